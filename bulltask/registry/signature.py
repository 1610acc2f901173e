"""``Signature``: one call that is sent later, alone or as part of a canvas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar, Unpack, cast

from bulltask.jobs.job import NewJob
from bulltask.registry.call_options import CallOptions
from bulltask.registry.callee import Callee
from bulltask.registry.canvas import Canvas, pop_callbacks
from bulltask.registry.celery_options import translate_call_options
from bulltask.registry.option_types import CallKeywords, SignatureKeywords

__all__ = ["Signature"]

A_contra = TypeVar("A_contra", contravariant=True)
R_co = TypeVar("R_co", covariant=True)


class Signature(Canvas[A_contra, R_co]):
    """One call of a task, to be sent later: ``add.s(1, 2)``.

    Args:
        task: The task.
        args, kwargs: The arguments; the result of the step before comes first.
        options: Options of ``apply_async``.
        immutable: It ignores the result of the step before it (Celery's ``si``).

    Raises:
        TypeError: The task has no such parameters.
    """

    def __init__(
        self,
        task: Callee,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        options: Mapping[str, Any] | None = None,
        *,
        immutable: bool = False,
    ) -> None:
        self.task, self.args, self.kwargs = task, tuple(args), dict(kwargs or {})
        self.immutable, self.links = immutable, list[Canvas[Any, Any]]()
        self.errbacks = list[Signature[Any, Any]]()
        self._given = dict(options or {})
        self._take_callbacks(self._given)
        self._given = translate_call_options(self._given)  # once, because a clone would warn again
        self.options = CallOptions.of(self._given)
        task.check_partial(self.args, self.kwargs)

    def set(self, **options: Unpack[SignatureKeywords[R_co]]) -> Signature[A_contra, R_co]:
        """Set options of the call, in place, and return it; see :meth:`Canvas.set`."""
        given: dict[str, Any] = {**options}
        self.immutable = given.pop("immutable", self.immutable)
        self._take_callbacks(given)
        self._given.update(translate_call_options(given))
        self.options = CallOptions.of(self._given)
        return self

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Signature[A_contra, R_co]:
        """Return a copy. ``args`` come before its own, ``kwargs`` and ``options`` replace its own.

        The arguments of an immutable signature do not change.
        """
        given = ((), {}) if self.immutable else (args, kwargs or {})
        copy: Signature[A_contra, R_co] = Signature(
            self.task,
            (*given[0], *self.args),
            {**self.kwargs, **given[1]},
            {**self._given, **options},
            immutable=self.immutable,
        )
        copy.links[:0], copy.errbacks[:0] = self.links, self.errbacks
        return copy

    def calls(self) -> Iterator[Signature[Any, Any]]:
        """Iterate over this signature."""
        yield self

    @property
    def given(self) -> Mapping[str, Any]:
        """The options that were given and have an effect, by name."""
        return self._given

    def link(self, callback: Canvas[R_co, Any]) -> Any:
        """Run ``callback`` with the result when the call has completed; return ``callback``."""
        self.links.append(callback)
        return callback

    def link_error(self, callback: Signature[Any, Any]) -> Signature[Any, Any]:
        """Run ``callback`` if the call fails; see :meth:`Canvas.link_error`."""
        self.errbacks.append(callback)
        return callback

    def _take_callbacks(self, options: dict[str, Any]) -> None:
        """Add the callbacks given in Celery's options ``link`` and ``link_error``: one, or a list."""
        self.links += pop_callbacks(options, "link")
        self.errbacks += pop_callbacks(options, "link_error")

    def job(self) -> NewJob:
        """Return this call's job, with a new id each time unless ``job_id`` is set.

        Raises:
            TypeError: The arguments do not match the task, or the signature has callbacks, which are other jobs.
        """
        if self.links or self.errbacks:
            raise TypeError(f"{self!r} has callbacks; send it with its method apply_async")
        return self.task.build(self.task.bind_json(self.args, self.kwargs, self.options.serializer), self.options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task in this process, without a worker."""
        return cast(Any, self.task)(*args, *self.args, **{**self.kwargs, **kwargs})

    def __repr__(self) -> str:
        given = [repr(arg) for arg in self.args] + [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.task.name}({', '.join(given)})"
