"""``NamedTask``: a task that is known only by its name, because another app or a worker defines it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

from bulltask.jobs.job import NewJob
from bulltask.ports import Sender
from bulltask.registry.arguments import check_args, check_kwargs
from bulltask.registry.call_options import CallOptions
from bulltask.registry.job_plan import build_job
from bulltask.registry.task_options import TaskOptions

__all__ = ["FAN_OUT_PARAMETER", "NamedTask"]

FAN_OUT_PARAMETER: Final = "result"


class NamedTask:
    """A task whose function is not known here, so its arguments cannot be checked.

    Args:
        name: The task's name.
        sender: Returns the app that sends its calls.
        options: The options of its calls.
        result_decoder: Converts a JSON result to the task's return type, if that is known.
    """

    def __init__(
        self,
        name: str,
        sender: Callable[[], Sender],
        options: TaskOptions | None = None,
        result_decoder: Callable[[Any], Any] | None = None,
    ) -> None:
        self.name, self._sender, self._options = name, sender, options or TaskOptions()
        self.result_decoder = result_decoder

    @property
    def sender(self) -> Sender:
        """The app that sends its calls."""
        return self._sender()

    @property
    def is_overridden(self) -> bool:
        """Whether a replaced ``send_task`` sends its calls."""
        return self._sender().overrides_send_task

    def build(self, data: Any, call: CallOptions) -> NewJob:
        """Return the job for bound arguments."""
        return build_job(self.name, data, self._options, call, self._sender().config)

    def check_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Check arguments that may be completed later.

        Raises:
            TypeError: Both positional and keyword arguments are given.
        """
        if args and kwargs:
            raise TypeError(
                f"task {self.name!r:.200} is not registered in this app, so positional and keyword arguments cannot be "
                "combined; pass all of them as kwargs"
            )

    def bind_json(self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None) -> Any:  # noqa: ARG002 - as AnyTask
        """Return a call's data: a list of positional arguments, or keyword arguments by name.

        Raises:
            TypeError: As for :meth:`check_partial`, or they are not a list or tuple, and a dictionary.
        """
        args, kwargs = check_args(args, self.name), check_kwargs(kwargs, self.name)
        self.check_partial(args, kwargs)
        return list(args) if args else dict(kwargs)

    def bind_json_after(
        self,
        count: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        serializer: str | None = None,  # noqa: ARG002 - as AnyTask
    ) -> tuple[Any, list[str]]:
        """Return a call's data without its first argument, which is not known yet, and that parameter's name, ``""``.

        Raises:
            TypeError: As for :meth:`check_partial`, or more than one argument is not known.
        """
        if count > 1:
            raise TypeError(f"task {self.name!r:.200} is not registered in this app; its parameters are not known")
        self.check_partial(args or (None,), kwargs)
        return list(args), [""] * count
