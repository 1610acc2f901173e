"""Signatures, chains and groups: calls that are described first and sent together later (Celery's canvas).

* ``add.s(1, 2)`` describes one call.
* ``a | b`` runs ``b`` with the result of ``a``.
* ``group(a, b)`` runs both at the same time.
* ``group(a, b) | c`` (a *chord*) runs ``c`` with the list of their results.

These can be combined into any structure. :mod:`bulltask.registry.canvas_plan` turns the structure into a flow: one
transaction stores all of its jobs, or none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast, overload

from bulltask.group_result import GroupResult
from bulltask.ports import Sender
from bulltask.registry.current import current_sender
from bulltask.registry.option_types import CallKeywords, SignatureKeywords
from bulltask.result import AsyncResult

if TYPE_CHECKING:  # signature.py imports this module
    from bulltask.registry.signature import Signature

__all__ = ["Canvas", "Chain", "Group", "GroupChain", "chain_of", "pop_callbacks"]

A_contra = TypeVar("A_contra", contravariant=True)
"""What a canvas accepts from the previous step."""
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")


class Canvas(Generic[A_contra, R_co]):
    """Base class of signatures, chains and groups: something that can be sent, or be a step of a chain.

    Its type parameters are what it accepts from the previous step, and what it returns. ``Never`` means that it accepts
    nothing, because all of its arguments are given, and ``object`` that it ignores the previous step's result.
    """

    @overload
    def __or__(self, following: _ReturnsGroup[R_co, S]) -> GroupChain[A_contra, S]: ...
    @overload
    def __or__(self, following: Canvas[R_co, S]) -> Chain[A_contra, S]: ...

    def __or__(self, following: Any) -> Any:
        """Return a chain: ``following`` runs after this, with its result as the first argument."""
        return chain_of([self, following])

    @overload
    def delay(self, **kwargs: Any) -> AsyncResult[R_co]: ...
    @overload
    def delay(self, first: A_contra, /, *args: Any, **kwargs: Any) -> AsyncResult[R_co]: ...

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult[R_co]:
        """Send the canvas; return the handle of its result once Redis has stored all of its jobs.

        Args:
            args, kwargs: Arguments for the calls that start first, unless these are immutable (Celery's partials).
                ``args`` come before a call's own arguments; ``kwargs`` override its own keyword arguments.

        Raises:
            TypeError: The arguments of a call do not match its task. Nothing was sent.
            EncodeError, PayloadTooLargeError, ConfigError: A call cannot be stored. Nothing was sent.
            BrokerError: Redis could not be reached in time, despite retries, or returned an error.
        """
        return self.apply_async(args, kwargs)

    @overload
    async def adelay(self, **kwargs: Any) -> AsyncResult[R_co]: ...
    @overload
    async def adelay(self, first: A_contra, /, *args: Any, **kwargs: Any) -> AsyncResult[R_co]: ...

    async def adelay(self, *args: Any, **kwargs: Any) -> AsyncResult[R_co]:
        """:meth:`delay` for asyncio."""
        return await self.aapply_async(args, kwargs)

    def apply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> AsyncResult[R_co]:
        """Send the canvas, with options for the calls that start first: ``countdown``, ``queue`` …

        Args:
            args, kwargs: As for :meth:`delay`.
            options: As for :meth:`bulltask.registry.task.AnyTask.apply_async`. In a chain, they apply to the first
                step, except ``link`` and ``link_error``: see :meth:`link` and :meth:`link_error`.
        """
        return cast(AsyncResult[R_co], self._sender().send_canvas(self.clone(args, kwargs, **options)))

    async def aapply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> AsyncResult[R_co]:
        """:meth:`apply_async` for asyncio."""
        return cast(AsyncResult[R_co], await self._sender().asend_canvas(self.clone(args, kwargs, **options)))

    def apply(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        throw: bool | None = None,
        **options: Unpack[CallKeywords[R_co]],
    ) -> AsyncResult[R_co]:
        """Run all calls in this process; see :meth:`bulltask.registry.task.AnyTask.apply`."""
        canvas = self.clone(args, kwargs, **options)
        return cast(AsyncResult[R_co], self._sender().apply_canvas(canvas, throw=throw))

    def __invert__(self) -> R_co:
        """``~add.s(2, 2)`` sends the canvas and waits for its result, as in Celery."""
        return self.delay().get()

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Any:
        """Return a copy; arguments and options as for :meth:`apply_async`."""
        raise NotImplementedError

    def set(self, **options: Unpack[SignatureKeywords[Any]]) -> Any:
        """Set options of all calls in this canvas, and return the canvas: ``add.s(1, 2).set(countdown=5)``.

        Args:
            options: As for :meth:`bulltask.registry.task.AnyTask.apply_async`; and ``immutable``.
        """
        for call in self.calls():
            call.set(**options)
        return self

    def calls(self) -> Iterator[Signature[Any, Any]]:
        """Iterate over the signatures in this canvas, without callbacks."""
        raise NotImplementedError

    def link(self, callback: Canvas[R_co, Any]) -> Any:
        """Also run ``callback`` with the result of this canvas when it has completed; return ``callback``."""
        raise NotImplementedError

    def link_error(self, callback: Signature[Any, Any]) -> Signature[Any, Any]:
        """Run ``callback`` once if a call in this canvas fails, after that call's last attempt; return ``callback``.

        In a group, the callback is called once for each member that fails.

        The callback's arguments depend on what it accepts:

        * three arguments: the failed job's reference (a dict with ``id``, ``task`` and ``queue``), the error message
          and the traceback;
        * one argument: the failed job's id;
        * an immutable signature (``si``): only its own arguments.

        The script that fails the job also adds the callback. A Node.js worker does not add callbacks.
        """
        raise NotImplementedError

    def on_error(self, callback: Signature[Any, Any]) -> Any:
        """Like :meth:`link_error`, but return this object: ``(a.s() | b.s()).on_error(c.s()).delay()``."""
        self.link_error(callback)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary in Celery's format, which :func:`bulltask.signature` and ``Signature.from_dict`` read."""
        raise NotImplementedError

    def __json__(self) -> dict[str, Any]:
        """Return the JSON form of a canvas that is an argument of a call."""
        return self.to_dict()

    def _sender(self) -> Sender:
        return next((call.task.sender for call in self.calls()), None) or current_sender()


class Chain(Canvas[A_contra, R_co]):
    """Steps that run one after another, each with the previous step's result: ``a | b``, or :func:`chain`."""

    def __init__(self, steps: Iterable[Canvas[Any, Any]]) -> None:
        self.steps: list[Canvas[Any, Any]] = []
        self.tasks = self.steps  # Celery's name
        self.errbacks: list[Signature[Any, Any]] = []
        for step in steps:
            _check_canvas(step)
            if isinstance(step, Chain) and not step.errbacks:
                self.steps += step.steps
            else:
                self.steps.append(step)
        if not self.steps:
            raise TypeError("a chain needs at least one step")

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Any:
        """Return a copy; the arguments and options are those of the first step, except ``link`` and ``link_error``."""
        given: dict[str, Any] = {**options}
        links, errbacks = pop_callbacks(given, "link"), pop_callbacks(given, "link_error")
        first, *others = self.steps
        copy = chain_of([first.clone(args, kwargs, **given), *(step.clone() for step in others)])
        copy.errbacks = [*self.errbacks, *errbacks]
        for callback in links:
            copy.link(callback)
        return copy

    def calls(self) -> Iterator[Signature[Any, Any]]:
        """Iterate over the signatures of all steps."""
        for step in self.steps:
            yield from step.calls()

    def to_dict(self) -> dict[str, Any]:
        """Return the chain in the format of Celery's JSON; see :meth:`Canvas.to_dict`."""
        return _to_dict("chain", self.steps, self.errbacks)

    def link(self, callback: Canvas[R_co, Any]) -> Any:
        """Run ``callback`` with the result of the last step; return ``callback``."""
        return self.steps[-1].link(callback)

    def link_error(self, callback: Signature[Any, Any]) -> Signature[Any, Any]:
        """Run ``callback`` if a step fails; see :meth:`Canvas.link_error`."""
        self.errbacks.append(callback)
        return callback

    @overload
    def __call__(self, **kwargs: Any) -> AsyncResult[R_co]: ...
    @overload
    def __call__(self, first: A_contra, /, *args: Any, **kwargs: Any) -> AsyncResult[R_co]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> AsyncResult[R_co]:
        """:meth:`delay`, as in Celery."""
        return self.delay(*args, **kwargs)

    def __repr__(self) -> str:
        return " | ".join(repr(step) for step in self.steps)


class _ReturnsGroup(Canvas[A_contra, list[R]], Generic[A_contra, R]):
    """Base class of a canvas with several results: a group, or a chain that ends with one."""

    @overload  # type: ignore[override]
    def delay(self, **kwargs: Any) -> GroupResult[R]: ...
    @overload
    def delay(self, first: A_contra, /, *args: Any, **kwargs: Any) -> GroupResult[R]: ...

    def delay(self, *args: Any, **kwargs: Any) -> GroupResult[R]:
        """Send all jobs in one transaction; see :meth:`Canvas.delay`."""
        return self.apply_async(args, kwargs)

    @overload  # type: ignore[override]
    async def adelay(self, **kwargs: Any) -> GroupResult[R]: ...
    @overload
    async def adelay(self, first: A_contra, /, *args: Any, **kwargs: Any) -> GroupResult[R]: ...

    async def adelay(self, *args: Any, **kwargs: Any) -> GroupResult[R]:
        """:meth:`delay` for asyncio."""
        return await self.aapply_async(args, kwargs)

    def apply_async(  # type: ignore[override]
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[Any]]
    ) -> GroupResult[R]:
        """Send all jobs in one transaction; see :meth:`Canvas.apply_async`."""
        return cast(GroupResult[R], super().apply_async(args, kwargs, **options))

    async def aapply_async(  # type: ignore[override]
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[Any]]
    ) -> GroupResult[R]:
        """:meth:`apply_async` for asyncio."""
        return cast(GroupResult[R], await super().aapply_async(args, kwargs, **options))

    def apply(  # type: ignore[override]
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        throw: bool | None = None,
        **options: Unpack[CallKeywords[Any]],
    ) -> GroupResult[R]:
        """Run all calls in this process; see :meth:`bulltask.registry.task.AnyTask.apply`."""
        return cast(GroupResult[R], super().apply(args, kwargs, throw=throw, **options))


class Group(_ReturnsGroup[A_contra, R]):
    """Members that run at the same time; made by :func:`group`. Nested groups are flattened."""

    def __init__(self, members: Iterable[Canvas[A_contra, R]]) -> None:
        self.members: list[Canvas[Any, Any]] = []
        self.tasks = self.members  # Celery's name
        for member in members:
            _check_canvas(member)
            self.members += member.members if isinstance(member, Group) else [member]

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[Any]]
    ) -> Any:
        """Return a copy; each member gets the arguments and options."""
        return Group([member.clone(args, kwargs, **options) for member in self.members])

    def calls(self) -> Iterator[Signature[Any, Any]]:
        """Iterate over the signatures of all members."""
        for member in self.members:
            yield from member.calls()

    def to_dict(self) -> dict[str, Any]:
        """Return the group in the format of Celery's JSON; see :meth:`Canvas.to_dict`."""
        return _to_dict("group", self.members)

    def link(self, callback: Canvas[list[R], Any]) -> Any:  # noqa: ARG002 - the signature of the base class
        """Always raise an error. (Celery would call ``callback`` for the first member only.)

        Raises:
            TypeError: Always.
        """
        raise TypeError("a group cannot have a callback; use group(…) | callback, or link each member")

    def link_error(self, callback: Signature[Any, Any]) -> Signature[Any, Any]:
        """Run ``callback`` for each member that fails; see :meth:`Canvas.link_error`."""
        for member in self.members:
            member.link_error(callback)
        return callback

    @overload
    def __call__(self, **kwargs: Any) -> GroupResult[R]: ...
    @overload
    def __call__(self, first: A_contra, /, *args: Any, **kwargs: Any) -> GroupResult[R]: ...

    def __call__(self, *args: Any, **kwargs: Any) -> GroupResult[R]:
        """:meth:`delay`, as in Celery."""
        return self.delay(*args, **kwargs)

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"group({', '.join(repr(member) for member in self.members)})"


class GroupChain(_ReturnsGroup[A_contra, R], Chain[A_contra, list[R]]):
    """A chain that ends with a group."""


def chain_of(steps: Iterable[Canvas[Any, Any]]) -> Chain[Any, Any]:
    """Return a chain of one or more steps."""
    every = list(steps)
    return GroupChain(every) if every and isinstance(every[-1], _ReturnsGroup) else Chain(every)


def _to_dict(
    kind: str, tasks: Sequence[Canvas[Any, Any]], errbacks: Sequence[Signature[Any, Any]] = ()
) -> dict[str, Any]:
    return {
        "task": f"celery.{kind}",
        "args": [],
        "kwargs": {"tasks": [task.to_dict() for task in tasks]},
        "options": {"link_error": [callback.to_dict() for callback in errbacks]} if errbacks else {},
        "subtask_type": kind,
        "immutable": False,
    }


def pop_callbacks(options: dict[str, Any], name: str) -> list[Any]:
    """Remove and return the callbacks in an option, ``link`` or ``link_error``: one, or a list.

    Raises:
        TypeError: One of them is something else.
    """
    given = options.pop(name, None) or []
    callbacks = list(given) if isinstance(given, list | tuple) else [given]
    for callback in callbacks:
        _check_canvas(callback)
    return callbacks


def _check_canvas(value: object) -> None:
    if not isinstance(value, Canvas):
        raise TypeError(f"a canvas consists of signatures such as task.s(…), chains and groups, not {value!r}")
