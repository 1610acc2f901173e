"""What a signature calls: a task, or the name of a task of another app."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from bulltask.jobs.job import NewJob
from bulltask.ports import Sender
from bulltask.registry.call_options import CallOptions

__all__ = ["Callee"]


class Callee(Protocol):
    """What a signature calls: a task, or the name of a task of another app."""

    @property
    def name(self) -> str:
        """The task's name."""
        ...

    @property
    def sender(self) -> Sender:
        """The app that sends its calls."""
        ...

    @property
    def is_overridden(self) -> bool:
        """Whether a replaced ``apply_async`` or ``send_task`` sends its calls: :mod:`bulltask.registry.overrides`."""
        ...

    @property
    def result_decoder(self) -> Callable[[Any], Any] | None:
        """Converts a JSON result to the hinted return type; ``None`` if results are not converted."""
        ...

    def check_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` if the arguments cannot be completed to form a valid call."""
        ...

    def bind_json(self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None) -> Any:
        """Return a call's data; raise ``TypeError`` if the arguments do not match.

        Args:
            args, kwargs: The arguments.
            serializer: The call's serializer, ``None`` for the task's.
        """
        ...

    def bind_json_after(
        self, count: int, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None
    ) -> tuple[Any, list[str]]:
        """Return a call's data without its first ``count`` arguments, and the names of their parameters."""
        ...

    def build(self, data: Any, call: CallOptions) -> NewJob:
        """Return the job for bound arguments."""
        ...
