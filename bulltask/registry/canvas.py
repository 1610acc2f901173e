"""Signatures, chains and groups: calls that are described first and sent together later (Celery's canvas).

* ``add.s(1, 2)`` describes one call.
* ``a | b`` runs ``b`` with the result of ``a``.
* ``group(a, b)`` runs both at the same time.
* ``group(a, b) | c`` (a *chord*) runs ``c`` with the list of their results.

These can be combined into any structure. :mod:`bulltask.registry.canvas_plan` turns the structure into a flow: one
transaction stores all of its jobs, or none. At the end of this file are the jobs of single calls, and the sends that
pass through a method that a user has replaced.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from datetime import datetime, timedelta
from typing import (
    TYPE_CHECKING,
    Any,
    ClassVar,
    Final,
    Generic,
    Never,
    Protocol,
    Self,
    TypeAlias,
    TypeGuard,
    TypeVar,
    Unpack,
    cast,
    overload,
)

from bulltask.jobs.errors import ConfigError
from bulltask.jobs.job import NewJob, new_job_id
from bulltask.jobs.names import STARMAP
from bulltask.registry.call import NamedTask, check_args, check_kwargs
from bulltask.registry.options import CallKeywords, CallOptions, SignatureKeywords, translate_call_options
from bulltask.registry.protocols import Sender
from bulltask.registry.request import current_sender
from bulltask.registry.results import AsyncResult, GroupResult, result_of
from bulltask.registry.stamping import STAMPED_HEADERS, Stamper, StampingVisitor
from bulltask.registry.types import CONVERTERS, Definitions, Mismatch, Schema, shown

if TYPE_CHECKING:
    from bulltask.registry.task import AnyTask
    from bulltask.registry.tasks import Tasks

__all__ = [
    "EMPTY_CHAIN",
    "Callee",
    "Canvas",
    "Chain",
    "Chord",
    "Group",
    "GroupChain",
    "Signature",
    "Takes1",
    "Takes1To2",
    "Takes1To3",
    "Takes2",
    "Takes2To3",
    "Takes3",
    "TakesMany",
    "Unchecked",
    "chain",
    "chain_of",
    "check_canvas",
    "check_overrides_passed",
    "chord",
    "group",
    "handles",
    "is_call",
    "is_overridden",
    "is_single",
    "job_of",
    "maybe_signature",
    "pass_overrides",
    "record_call",
    "recorded",
    "send_call",
    "send_recorded",
    "signature",
    "subtask",
]


Callee: TypeAlias = "AnyTask[Any, Any] | NamedTask"
"""What a signature calls: a task, or the name of a task of another app."""

EMPTY_CHAIN: Final = "a chain needs at least one step"

A_contra = TypeVar("A_contra", contravariant=True)
"""What a canvas accepts from the previous step."""
R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")
S = TypeVar("S")


class Canvas(Generic[A_contra, R_co]):
    """Base class of signatures, chains and groups: something that can be sent, or be a step of a chain.

    Its type parameters are what it accepts from the previous step, and what it returns. ``Never`` means that it accepts
    nothing, because all of its arguments are given, and ``object`` that it ignores the previous step's result.

    ``planned_id`` is the id of the job whose result is this canvas's, or of its group, from :meth:`freeze`, or because
    the call has passed a replaced method.
    """

    planned_id = ""

    @property
    def id(self) -> str | None:
        """The id that the result will have, ``None`` before :meth:`freeze`."""
        return self.planned_id or None

    def freeze(self, _id: str | None = None) -> AsyncResult[R_co]:
        """Choose the ids of all jobs, and return the handle of the result, before the canvas is sent.

        The jobs have these ids when the canvas is sent for the first time. If it is sent again, they have new ids.

        Args:
            _id: The id of the result; default: ``job_id`` of the last call, or a new one.
        """
        return cast(AsyncResult[R_co], self.plan_ids(_id, None))

    def plan_ids(self, job_id: str | None, parent: Any) -> Any:
        """:meth:`freeze` for a step whose preceding step has the handle ``parent``."""
        raise NotImplementedError

    def parts(self) -> Iterable[Canvas[Any, Any]]:
        """Return the canvases of which this one consists, and its callbacks."""
        raise NotImplementedError

    @overload
    def __or__(self, following: _ReturnsGroup[R_co, S]) -> GroupChain[A_contra, S]: ...
    @overload
    def __or__(self, following: Canvas[R_co, S]) -> Chain[A_contra, S]: ...

    def __or__(self, following: Any) -> Any:
        """Return a chain: ``following`` runs after this, with its result as the first argument."""
        check_canvas(following)
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
                step, except ``link`` and ``link_error``, for which see :meth:`link` and :meth:`link_error`, and
                ``job_id``, which is that of the last step.
        """
        result = self._sender()._send_canvas(self.clone(args, kwargs, **options))
        self._forget_ids()
        return cast(AsyncResult[R_co], result)

    async def aapply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> AsyncResult[R_co]:
        """:meth:`apply_async` for asyncio."""
        result = await self._sender()._asend_canvas(self.clone(args, kwargs, **options))
        self._forget_ids()
        return cast(AsyncResult[R_co], result)

    def apply(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        throw: bool | None = None,
        **options: Unpack[CallKeywords[R_co]],
    ) -> AsyncResult[R_co]:
        """Run all calls in this process; see :meth:`bulltask.registry.task.AnyTask.apply`."""
        result = self._sender()._apply_canvas(self.clone(args, kwargs, **options), throw=throw)
        self._forget_ids()
        return cast(AsyncResult[R_co], result)

    def __invert__(self) -> R_co:
        """``~add.s(2, 2)`` sends the canvas and waits for its result, as in Celery."""
        return self.delay().get()

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Any:
        """Return a copy; arguments and options as for :meth:`apply_async`."""
        raise NotImplementedError

    def set(self, **options: Unpack[SignatureKeywords[Any]]) -> Self:
        """Set options of all calls in this canvas, and return the canvas: ``add.s(1, 2).set(countdown=5)``.

        Args:
            options: As for :meth:`bulltask.registry.task.AnyTask.apply_async`; and ``immutable``. ``job_id`` is the id
                of the result: that of a chain's last step, or of a group.
        """
        given: dict[str, Any] = {**options}
        if job_id := pop_id(given):
            self.set_id(job_id)
        for call in self.calls():
            call.set(**given)
        return self

    def stamp(self, visitor: StampingVisitor | None = None, append_stamps: bool = False, **headers: Any) -> Self:
        """Label all calls of this canvas, and their callbacks, and return the canvas (Celery's ``stamp``).

        The tasks receive the stamps as ``self.request.stamps``, and signals as ``headers["stamps"]``. A task that
        replaces itself passes its stamps on.

        Args:
            visitor: Chooses the stamps of each part.
            append_stamps: If a call has a stamp with this name already, make it a list of the old and the new values;
                by default, the new value replaces the old one.
            headers: Stamps of all parts: JSON values.
        """
        stamper = Stamper(visitor, append=append_stamps)
        self.stamp_with(stamper, stamper.merged({}, headers))
        return self

    def stamp_links(self, visitor: StampingVisitor | None, append_stamps: bool = False, **headers: Any) -> None:
        """Stamp only the callbacks of this canvas; arguments as for :meth:`stamp`."""
        stamper = Stamper(visitor, append=append_stamps)
        stamper.stamp_links(self, stamper.merged({}, headers))

    def stamp_with(self, stamper: Stamper, headers: Mapping[str, Any]) -> None:
        """:meth:`stamp` for a part of a canvas, to which ``headers`` apply."""
        raise NotImplementedError

    def set_id(self, job_id: str) -> None:
        """Set the id of the result."""
        raise NotImplementedError

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

    def on_error(self, callback: Signature[Any, Any]) -> Self:
        """Like :meth:`link_error`, but return this object: ``(a.s() | b.s()).on_error(c.s()).delay()``."""
        self.link_error(callback)
        return self

    def to_dict(self) -> dict[str, Any]:
        """Return a dictionary in Celery's format, which :func:`bulltask.signature` and ``Signature.from_dict`` read."""
        raise NotImplementedError

    def __json__(self) -> dict[str, Any]:
        """Return the JSON form of a canvas that is an argument of a call."""
        return self.to_dict()

    def keys(self) -> Iterable[str]:
        """Return the keys of :meth:`to_dict`; for ``dict(canvas)``, as in Celery."""
        return self.to_dict().keys()

    def __getitem__(self, key: str) -> Any:
        return self.to_dict()[key]

    __iter__: ClassVar[None] = None  # not the items 0, 1, …

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Canvas) and type(self) is type(other) and self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(tuple(call.task.name for call in self.calls()))

    def _forget_ids(self) -> None:
        self.planned_id = ""
        for part in self.parts():
            part._forget_ids()  # noqa: SLF001 - this class

    def _sender(self) -> Sender:
        return next((call.task._sender() for call in self.calls()), None) or current_sender()


class Chain(Canvas[A_contra, R_co]):
    """Steps that run one after another, each with the previous step's result: ``a | b``, or :func:`chain`."""

    def __init__(self, steps: Iterable[Canvas[Any, Any]]) -> None:
        self.steps = list(steps)
        self.tasks = self.steps  # Celery's name
        self.errbacks: list[Signature[Any, Any]] = []

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Any:
        """Return a copy. Arguments and options are the first step's, except ``link``, ``link_error``, ``job_id``."""
        given: dict[str, Any] = {**options}
        links, errbacks, job_id = pop_callbacks(given, "link"), pop_callbacks(given, "link_error"), pop_id(given)
        # A header that is empty stays one, and a chain with error callbacks stays one step.
        copy = type(self)(
            [
                step.clone(*((args, kwargs) if index == 0 else ()), **(given if index == 0 else {}))
                for index, step in enumerate(self.steps)
            ]
        )
        copy.planned_id = self.planned_id
        copy.errbacks = [*self.errbacks, *errbacks]
        for callback in links:
            copy.link(callback)
        if job_id:
            copy.set_id(job_id)
        return copy

    def plan_ids(self, job_id: str | None, parent: Any) -> Any:
        """Choose the ids of all steps; ``job_id`` is that of the last one."""
        for index, step in enumerate(self.steps):
            parent = step.plan_ids(job_id if index == len(self.steps) - 1 else None, parent)
        if parent is not None:
            self.planned_id = parent.id
        return parent

    def parts(self) -> Iterable[Canvas[Any, Any]]:
        """Return the steps, and the error callbacks."""
        return [*self.steps, *self.errbacks]

    def stamp_with(self, stamper: Stamper, headers: Mapping[str, Any]) -> None:
        """Stamp the steps, and the error callbacks."""
        given = stamper.headers("on_chain_start", self, headers)
        stamper.stamp_links(self, given)
        for step in self.steps:
            step.stamp_with(stamper, given)
        stamper.end("on_chain_end", self, given)

    def set_id(self, job_id: str) -> None:
        """Set the id of the last step."""
        if self.steps:
            self.steps[-1].set_id(job_id)

    def calls(self) -> Iterator[Signature[Any, Any]]:
        """Iterate over the signatures of all steps."""
        for step in self.steps:
            yield from step.calls()

    def to_dict(self) -> dict[str, Any]:
        """Return the chain in the format of Celery's JSON; see :meth:`Canvas.to_dict`."""
        return _to_dict("chain", self.steps, self.errbacks)

    def link(self, callback: Canvas[R_co, Any]) -> Any:
        """Run ``callback`` with the last step's result, and return it; raises ``TypeError`` for an empty chain."""
        if not self.steps:
            raise TypeError(EMPTY_CHAIN)
        return self.steps[-1].link(callback)

    def link_error(self, callback: Signature[Any, Any]) -> Signature[Any, Any]:
        """Run ``callback`` if a step fails; see :meth:`Canvas.link_error`."""
        check_canvas(callback)
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
        self.links: list[Canvas[Any, Any]] = []
        for given in members:
            member = _as_member(given)
            if isinstance(member, Group) and not member.links:
                self.members += member.members
            elif not (isinstance(member, Chain) and not member.steps):
                self.members.append(member)

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[Any]]
    ) -> Any:
        """Return a copy; each member gets the arguments and options, except ``job_id``, which is that of the group."""
        given: dict[str, Any] = {**options}
        job_id = pop_id(given)
        copy: Group[Any, Any] = Group([member.clone(args, kwargs, **given) for member in self.members])
        copy.links = [*self.links]
        copy.planned_id = job_id or self.planned_id
        return copy

    def plan_ids(self, job_id: str | None, parent: Any) -> Any:
        """Choose the ids of the group, ``job_id``, and of its members."""
        self.planned_id = job_id or self.planned_id or new_job_id()
        return GroupResult(self.planned_id, [member.plan_ids(None, None) for member in self.members], parent)

    def parts(self) -> Iterable[Canvas[Any, Any]]:
        """Return the members, and the callbacks."""
        return [*self.members, *self.links]

    def stamp_with(self, stamper: Stamper, headers: Mapping[str, Any]) -> None:
        """Stamp the members, and the callbacks."""
        given = stamper.headers("on_group_start", self, headers)
        stamper.stamp_links(self, given)
        for member in self.members:
            member.stamp_with(stamper, given)
        stamper.end("on_group_end", self, given)

    def set_id(self, job_id: str) -> None:
        """Set the id of the group's result."""
        self.planned_id = job_id

    def calls(self) -> Iterator[Signature[Any, Any]]:
        """Iterate over the signatures of all members."""
        for member in self.members:
            yield from member.calls()

    def to_dict(self) -> dict[str, Any]:
        """Return the group in the format of Celery's JSON; see :meth:`Canvas.to_dict`."""
        return _to_dict("group", self.members)

    def link(self, callback: Canvas[list[R], Any]) -> Any:
        """Run ``callback`` with the list of all results when all members have completed; return ``callback``.

        (Celery calls it when the first member has completed, without its result.)
        """
        self.links.append(callback)
        return callback

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

    def skew(self, start: float = 1.0, stop: float | None = None, step: float = 1.0) -> Self:
        """Set a ``countdown`` for each member, from ``start`` by ``step`` up to ``stop`` seconds; return the group."""
        countdown = start
        for member in self.members:
            member.set(countdown=countdown)
            if stop is None or countdown + step <= stop:
                countdown += step
        return self

    def group(self) -> Self:
        """Return the group itself: ``task.chunks(…).group()`` is Celery's way to it."""
        return self

    def __len__(self) -> int:
        return len(self.members)

    def __repr__(self) -> str:
        return f"group({', '.join(repr(member) for member in self.members)})"


class GroupChain(_ReturnsGroup[A_contra, R], Chain[A_contra, list[R]]):
    """A chain that ends with a group."""


class Chord(Chain[A_contra, R_co]):
    """A group, the header, and the call that follows it, the body: ``group(…) | body``, or :func:`chord`.

    Attributes:
        tasks: The members of the header.
        header_errbacks: The error callbacks from :meth:`link_error`, which the members of the header have, too, if
            ``task_allow_error_cb_on_chord_header`` is set; as in Celery, not those of the option ``link_error``.
    """

    def __init__(self, steps: Iterable[Canvas[Any, Any]]) -> None:
        super().__init__(steps)
        header = self.steps[0]
        assert isinstance(header, Group)
        self.header: Group[Any, Any] = header
        self.tasks = header.members
        self.header_errbacks: list[Signature[Any, Any]] = []

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Any:
        """Return a copy; see :meth:`Chain.clone`."""
        copy = super().clone(args, kwargs, **options)
        copy.header_errbacks = [*self.header_errbacks]
        return copy

    def link_error(self, callback: Signature[Any, Any]) -> Signature[Any, Any]:
        """Run ``callback`` if a member of the header or the body fails; see :meth:`Canvas.link_error`."""
        self.header_errbacks.append(super().link_error(callback))
        return callback

    @property
    def body(self) -> Canvas[Any, R_co]:
        """The call that receives the list of results."""
        return self.steps[1]

    def stamp_with(self, stamper: Stamper, headers: Mapping[str, Any]) -> None:
        """Stamp the members of the header, the body, and the callbacks."""
        given = stamper.headers("on_chord_header_start", self, headers)
        stamper.stamp_links(self, given)
        stamper.stamp_links(self.header, given)
        for member in self.header.members:
            member.stamp_with(stamper, given)
        stamper.end("on_chord_header_end", self, given)
        self.body.stamp_with(stamper, stamper.headers("on_chord_body", self, given))

    def to_dict(self) -> dict[str, Any]:
        """Return the chord in the format of Celery's JSON; see :meth:`Canvas.to_dict`."""
        found = _to_dict("chord", (), self.errbacks)
        return {**found, "kwargs": {"header": self.header.to_dict(), "body": self.body.to_dict()}}


class GroupChord(GroupChain[A_contra, R], Chord[A_contra, list[R]]):
    """A chord whose body is a group, or ends with one."""


def chain_of(steps: Iterable[Canvas[Any, Any]]) -> Chain[Any, Any]:
    """Return a chain, or a :class:`Chord`; chains among the steps join it unless they have error callbacks."""
    every: list[Canvas[Any, Any]] = []
    for step in steps:
        check_canvas(step)
        every += _flat(step)
    if len(every) > 1 and isinstance(header := every[0], Group):
        return chord_of(header, chain_of(every[1:]) if len(every) > 2 else every[1])
    return GroupChain(every) if every and isinstance(every[-1], _ReturnsGroup) else Chain(every)


def chord_of(header: Group[Any, Any], body: Canvas[Any, Any]) -> Chain[Any, Any]:
    """Return a chord."""
    check_canvas(body)
    return GroupChord([header, body]) if isinstance(body, _ReturnsGroup) else Chord([header, body])


def _flat(step: Canvas[Any, Any]) -> list[Canvas[Any, Any]]:
    if not isinstance(step, Chain) or step.errbacks:
        return [step]
    return [part for inner in step.steps for part in _flat(inner)]


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
    """Remove and return the callbacks in an option, ``link`` or ``link_error``: one, or a list."""
    given = options.pop(name, None) or []
    return [_as_canvas(callback) for callback in (given if isinstance(given, list | tuple) else [given])]


def pop_id(options: dict[str, Any]) -> str | None:
    """Remove and return the option ``job_id``, or ``task_id``, Celery's name."""
    job_id, task_id = options.pop("job_id", None), options.pop("task_id", None)
    return cast(str | None, job_id or task_id)


def _as_canvas(value: Any) -> Canvas[Any, Any]:
    """Return a canvas; one that is given as a dictionary is converted."""
    if isinstance(value, Mapping):
        value = Signature.from_dict(value)
    check_canvas(value)
    return cast(Canvas[Any, Any], value)


def _as_member(value: Any) -> Canvas[Any, Any]:
    """Return a canvas; a task becomes its call without arguments."""
    if not isinstance(value, Canvas) and callable(call := getattr(value, "s", None)):
        value = call()
    return _as_canvas(value)


def check_canvas(value: object) -> None:
    """Raise ``TypeError`` if a value cannot be part of a canvas, because it is neither a signature nor a canvas."""
    if not isinstance(value, Canvas):
        raise TypeError(f"a canvas consists of signatures such as task.s(…), chains and groups, not {value!r:.200}")


_CALLBACKS: Final = {"link", "link_error"}
_TIMES: Final = {"eta", "expires", "timestamp"}


class _SignatureType(type):
    """Makes chains and groups instances of ``Signature``, as they are in Celery; see also :func:`is_call`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return isinstance(instance, Canvas)


class Signature(Canvas[A_contra, R_co], metaclass=_SignatureType):
    """One call of a task, to be sent later: ``add.s(1, 2)``.

    Args:
        task: The task.
        args, kwargs: The arguments; the result of the previous step comes before them.
        options: Options of ``apply_async``.
        immutable: Ignore the result of the previous step (Celery's ``si``).

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
        self.task = task
        self.args = tuple(check_args(args, task.name))
        self.kwargs = dict(check_kwargs(kwargs, task.name))
        self.immutable = _flag(immutable)
        self.links = list[Canvas[Any, Any]]()
        self.errbacks = list[Signature[Any, Any]]()
        self._given = dict(options or {})
        self._take_callbacks(self._given)
        self._given = translate_call_options(self._given)  # once, because a clone would warn again
        self.options = CallOptions.of(self._given)
        self.has_passed_overrides = False
        task._codec.check_partial(self.args, self.kwargs)

    def set(self, **options: Unpack[SignatureKeywords[R_co]]) -> Self:
        """Set options of the call, and return this signature; see :meth:`Canvas.set`."""
        given: dict[str, Any] = {**options}
        self.immutable = _flag(given.pop("immutable", self.immutable))
        self._take_callbacks(given)
        self._given.update(translate_call_options(given))
        self.options = CallOptions.of(self._given)
        return self

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Signature[A_contra, R_co]:
        """Return a copy. ``args`` come before the signature's own; ``kwargs`` and ``options`` override its own.

        The arguments of an immutable signature do not change.
        """
        given = ((), {}) if self.immutable else (check_args(args, self.task.name), check_kwargs(kwargs, self.task.name))
        copy: Signature[A_contra, R_co] = Signature(
            self.task,
            (*given[0], *self.args),
            {**self.kwargs, **given[1]},
            {**self._given, **options},
            immutable=self.immutable,
        )
        copy.links[:0], copy.errbacks[:0] = self.links, self.errbacks
        copy.planned_id = self.planned_id
        return copy

    @property
    def name(self) -> str:
        """The name of the task, as in Celery."""
        return self.task.name

    @property
    def id(self) -> str | None:
        """The id of the job, ``None`` before :meth:`Canvas.freeze`, unless it is set."""
        return self.planned_id or self.options.job_id

    def plan_ids(self, job_id: str | None, parent: Any) -> Any:
        """Choose the id of the job; see :meth:`Canvas.freeze`."""
        self.planned_id = job_id or self.id or new_job_id()
        sender, task = self.task._sender(), self.task
        return AsyncResult(
            self.planned_id,
            task._build({}, self.options).queue,
            sender._results,
            None,
            task._codec.result_decoder,
            parent,
        )

    def parts(self) -> Sequence[Canvas[Any, Any]]:
        """Return the callbacks."""
        return [*self.links, *self.errbacks]

    @property
    def stamps(self) -> Mapping[str, Any]:
        """The stamps of the call; see :meth:`Canvas.stamp`."""
        stamps: Mapping[str, Any] = self._given.get("stamps", {})
        return stamps

    def stamp_with(self, stamper: Stamper, headers: Mapping[str, Any]) -> None:
        """Stamp the call, and its callbacks."""
        stamper.stamp_links(self, headers)
        given = stamper.headers("on_signature", self, headers)
        stamps = {name: given[name] for name in given[STAMPED_HEADERS] if name in given}
        merged = stamper.merged(self.stamps, stamps)
        del merged[STAMPED_HEADERS]
        self._given["stamps"] = merged
        self.options = CallOptions.of(self._given)

    def set_id(self, job_id: str) -> None:
        """Set the option ``job_id``."""
        self._given["job_id"] = job_id
        self.options = CallOptions.of(self._given)

    def calls(self) -> Iterator[Signature[Any, Any]]:
        """Iterate over this signature."""
        yield self

    def to_dict(self) -> dict[str, Any]:
        """Return the signature in the format of Celery's JSON; see :meth:`Canvas.to_dict`."""
        callbacks: dict[str, Sequence[Canvas[Any, Any]]] = {"link": self.links, "link_error": self.errbacks}
        return {
            "task": self.task.name,
            "args": list(self.args),
            "kwargs": dict(self.kwargs),
            "options": {name: _as_json(value) for name, value in self._given.items() if name != "stamps"}
            | ({**self.stamps, STAMPED_HEADERS: [*self.stamps]} if self.stamps else {})
            | {name: [callback.to_dict() for callback in given] for name, given in callbacks.items() if given},
            "subtask_type": None,
            "immutable": self.immutable,
        }

    @classmethod
    def from_dict(cls, d: Mapping[str, Any], app: Any = None) -> Canvas[Any, Any]:
        """Return the signature, chain or group for a dictionary from ``to_dict``, bulltask's or Celery's.

        The ``app`` (default: the current one) sends it.

        Raises:
            TypeError: It is not a signature, or has options that this app does not know.
        """
        app = app or current_sender()
        kind, kwargs = d.get("subtask_type"), dict(d.get("kwargs") or {})
        options = _from_json(d.get("options") or {}, app)
        if kind is None and "task" in d:
            call = _call_of(app, d["task"], d.get("args") or (), kwargs)
            return call.set(**options, immutable=bool(d.get("immutable")))
        if kind in ("chain", "group") and "tasks" in kwargs:
            parts = [cls.from_dict(part, app) for part in kwargs["tasks"]]
            canvas: Canvas[Any, Any] = chain_of(parts) if kind == "chain" else Group(parts)
        elif kind == "chord" and kwargs.keys() >= {"header", "body"}:
            header: Group[Any, Any] = Group([cls.from_dict(part, app) for part in _as_list(kwargs["header"])])
            canvas = chord_of(header, cls.from_dict(kwargs["body"], app))
        else:
            raise TypeError(f"the dictionary does not describe a signature, chain, group or chord: {d!r:.200}")
        return cast(Canvas[Any, Any], canvas.clone((), None, **options))

    @property
    def given(self) -> Mapping[str, Any]:
        """The options that were given and have an effect, by name."""
        return self._given

    def given_with_callbacks(self) -> dict[str, Any]:
        """Return the options that were given, with ``link`` and ``link_error``."""
        callbacks: dict[str, list[Any]] = {"link": [*self.links], "link_error": [*self.errbacks]}
        return {**self._given, **{name: given for name, given in callbacks.items() if given}}

    def link(self, callback: Canvas[R_co, Any]) -> Any:
        """Run ``callback`` with the result when the call has completed; return ``callback``."""
        check_canvas(callback)
        self.links.append(callback)
        return callback

    def link_error(self, callback: Signature[Any, Any]) -> Signature[Any, Any]:
        """Run ``callback`` if the call fails; see :meth:`Canvas.link_error`."""
        check_canvas(callback)
        self.errbacks.append(callback)
        return callback

    def _take_callbacks(self, options: dict[str, Any]) -> None:
        """Add the callbacks given in Celery's options ``link`` and ``link_error``: one, or a list."""
        self.links += pop_callbacks(options, "link")
        self.errbacks += pop_callbacks(options, "link_error")

    def send_by_public_method(self) -> Any:
        """Send the call with the task's ``apply_async``, or with the app's ``send_task`` if only its name is known."""
        task, options = cast(Any, self.task), self.given_with_callbacks()
        if hasattr(task, "apply_async"):
            return task.apply_async(self.args, self.kwargs, **options)
        return task._sender().send_task(task.name, self.args, self.kwargs, **options)

    def become(self, other: Signature[Any, Any]) -> None:
        """Take the arguments, options and callbacks of another call of the same task."""
        planned_id = self.planned_id or other.planned_id
        vars(self).update({**vars(other), "immutable": self.immutable, "planned_id": planned_id})

    def job(self) -> NewJob:
        """Return this call's job, with a new id each time unless ``job_id`` is set.

        Raises ``TypeError`` if the arguments do not match the task, or the signature has callbacks, which are other
        jobs.
        """
        if self.links or self.errbacks:
            raise TypeError(f"{self!r:.200} has callbacks; send it with its method apply_async")
        job = self.task._build(self.task._codec.encode(self.args, self.kwargs, self.options.serializer), self.options)
        return replace(job, id=self.planned_id) if self.planned_id else job

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task in this process, without a worker."""
        return cast(Any, self.task)(*args, *self.args, **{**self.kwargs, **kwargs})

    def __repr__(self) -> str:
        given = [repr(arg) for arg in self.args] + [f"{name}={value!r}" for name, value in self.kwargs.items()]
        return f"{self.task.name}({', '.join(given)})"


def is_call(canvas: object) -> TypeGuard[Signature[Any, Any]]:
    """Return whether a canvas is one call; chains and groups are instances of ``Signature``, too."""
    return type.__instancecheck__(Signature, canvas)


def _call_of(app: Any, name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Signature[Any, Any]:
    mapped = app.tasks.get(kwargs.get("task")) if name == STARMAP else None
    # The job of a starmap has the queue and the other options of the task that it calls.
    call: Signature[Any, Any] = (
        app.signature(name, args, kwargs) if mapped is None else mapped._starmap_encoded(kwargs.get("items", ()))
    )
    return call


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _flag(immutable: object) -> bool:
    if not isinstance(immutable, bool):
        raise TypeError(f"immutable must be True or False, not {immutable!r:.200}")
    return immutable


def _as_json(option: Any) -> Any:
    if isinstance(option, timedelta):
        return option.total_seconds()
    return option.isoformat() if isinstance(option, datetime) else option


def _from_json(options: Mapping[str, Any], app: Any) -> dict[str, Any]:
    found = dict(options)
    for name in _CALLBACKS & options.keys():
        found[name] = [Signature.from_dict(callback, app) for callback in _as_list(options[name])]
    for name in _TIMES & options.keys():
        if isinstance(options[name], str):
            found[name] = datetime.fromisoformat(options[name])
    return found


class SignatureConverter:
    """Converts arguments of tasks whose hint is :class:`Signature`; chains and groups as well, as in Celery."""

    name = "a signature"

    def decode(self, value: Any) -> Canvas[Any, Any]:
        """Return the signature for its JSON form."""
        if not isinstance(value, Mapping):
            raise Mismatch(f"expected {self.name}, not {shown(value)}")
        try:
            return Signature.from_dict(value)
        except (AttributeError, TypeError, ValueError) as exc:  # AttributeError: a part is not a dictionary
            raise Mismatch(f"expected {self.name}: {exc}") from exc

    def encode(self, value: Any) -> dict[str, Any]:
        """Return the JSON form of a signature."""
        if isinstance(value, Canvas):
            return value.to_dict()
        return self.decode(value).to_dict()

    def schema(self, definitions: Definitions) -> Schema:  # noqa: ARG002 - as Converter
        """Return the JSON Schema of Celery's format."""
        types = {"task": "string", "args": "array", "kwargs": "object", "options": "object", "immutable": "boolean"}
        properties: Schema = {name: {"type": kind} for name, kind in types.items()}
        return {"type": "object", "properties": {**properties, "subtask_type": {}}, "required": ["task"]}


CONVERTERS[Signature] = SignatureConverter()


A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")
Fn = TypeVar("Fn", bound=Callable[..., Any])


class ChordHeader(Generic[A, B]):
    """``chord(header)``, which sends the chord when it is called with a body."""

    def __init__(self, header: Group[A, B]) -> None:
        self._header = header

    def __call__(self, body: Canvas[list[B], S], **options: Unpack[CallKeywords[S]]) -> AsyncResult[S]:
        """Send the chord; return the handle of the body's result."""
        return cast(AsyncResult[S], chord_of(self._header, body).apply_async(**options))


class _Constructor:
    """A function that is also the type of what it returns: ``isinstance(x, chain)``, as in Celery."""

    def __init__(self, function: Callable[..., Any], of_type: type) -> None:
        functools.update_wrapper(self, function)
        self._function = function
        self._type = of_type

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    def __instancecheck__(self, instance: object) -> bool:
        return isinstance(instance, self._type)

    def __repr__(self) -> str:
        return f"<function {self._function.__name__}>"


def _constructor(of_type: type) -> Callable[[Fn], Fn]:
    def construct(function: Fn) -> Fn:
        return cast(Fn, _Constructor(function, of_type))

    return construct


@overload
def chain(first: Canvas[A, B], second: Canvas[B, S], /) -> Chain[A, S]: ...
@overload
def chain(first: Canvas[A, B], second: Canvas[B, C], third: Canvas[C, S], /) -> Chain[A, S]: ...
@overload
def chain(first: Canvas[A, B], second: Canvas[B, C], third: Canvas[C, D], other: Canvas[D, S], /) -> Chain[A, S]: ...
@overload
def chain(
    first: Canvas[A, B], second: Canvas[B, C], third: Canvas[C, D], fourth: Canvas[D, E], other: Canvas[E, S], /
) -> Chain[A, S]: ...
@overload
def chain(
    first: Canvas[A, B],
    second: Canvas[B, C],
    third: Canvas[C, D],
    fourth: Canvas[D, E],
    fifth: Canvas[E, F],
    other: Canvas[F, S],
    /,
) -> Chain[A, S]: ...
@overload
def chain(
    first: Canvas[A, B],
    second: Canvas[B, C],
    third: Canvas[C, D],
    fourth: Canvas[D, E],
    fifth: Canvas[E, F],
    sixth: Canvas[F, G],
    other: Canvas[G, S],
    /,
) -> Chain[A, S]: ...
@overload
def chain(
    first: Canvas[A, B],
    second: Canvas[B, C],
    third: Canvas[C, D],
    fourth: Canvas[D, E],
    fifth: Canvas[E, F],
    sixth: Canvas[F, G],
    seventh: Canvas[G, H],
    other: Canvas[H, S],
    /,
) -> Chain[A, S]: ...
@overload
def chain(  # after the eighth step, links are checked only as a | b | c …
    first: Canvas[A, B],
    second: Canvas[B, C],
    third: Canvas[C, D],
    fourth: Canvas[D, E],
    fifth: Canvas[E, F],
    sixth: Canvas[F, G],
    seventh: Canvas[G, H],
    eighth: Canvas[H, Any],
    /,
    *steps: Canvas[Any, Any],
) -> Chain[A, Any]: ...
@overload
def chain(steps: Iterable[Canvas[Any, Any]], /, *, app: Any = ..., **options: Any) -> Chain[Any, Any]: ...
@overload
def chain(step: Canvas[A, S], /) -> Chain[A, S]: ...
@overload
def chain(*, app: Any = ..., **options: Any) -> Chain[Any, Any]: ...


@_constructor(Chain)
def chain(*steps: Any, app: Any = None, **options: Any) -> Chain[Any, Any]:  # noqa: ARG001 - Celery's signature
    """Return a chain, ``a | b | c``. Each step receives the previous step's result as its first argument.

    Args:
        steps: Signatures, groups and chains, or one iterable of them. A chain without steps can be a step or a member,
            where it has no effect, but it cannot be sent. An empty group has no effect, either, as in Celery; in
            ``a | group() | b``, ``b`` receives its result, ``[]``.
        app: Has no effect: each task has its app.
        options: As for ``apply_async``.

    Raises:
        TypeError: One of the steps is something else.
    """
    every = list(_spread(steps))
    canvas = chain_of([step for step in every if not _is_empty_group(step)] or every[:1])
    return cast(Chain[Any, Any], canvas.clone((), None, **options)) if options else canvas


@_constructor(Group)
def group(*members: Canvas[A, B] | Iterable[Canvas[A, B]]) -> Group[A, B]:
    """Return a group, whose members run at the same time. Its result is the list of the members' results, in order.

    The members are signatures, chains and groups, or one iterable of them; without members, the group is empty. A task
    is called without arguments of its own. Anything else is a ``TypeError``.
    """
    return Group(_spread(members))


@overload
def chord(header: Iterable[Canvas[A, B]] | Group[A, B]) -> ChordHeader[A, B]: ...
@overload
def chord(header: Canvas[A, B]) -> ChordHeader[A, B]: ...
@overload
def chord(header: Iterable[Canvas[A, B]] | Group[A, B], body: Canvas[list[B], S]) -> Chord[A, S]: ...
@overload
def chord(header: Canvas[A, B], body: Canvas[list[B], S]) -> Chord[A, S]: ...


@_constructor(Chord)
def chord(header: Any, body: Any = None) -> Any:
    """Return a chord, ``group(*header) | body``: ``body`` receives the list of the results of ``header``.

    Args:
        header: The calls that run first, at the same time; or one call.
        body: The call that follows; without it, ``chord(header)(body)`` sends the chord.
    """
    members: Group[Any, Any] = header if isinstance(header, Group) else group(header)
    return ChordHeader(members) if body is None else chord_of(members, body)


def signature(
    name: str | Canvas[A, S] | Mapping[str, Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    **options: Any,
) -> Canvas[Any, Any]:
    """Return a signature of the current app, by task name; see :meth:`bulltask.App.signature`.

    Args:
        name: The task's name; a signature, chain or group is returned as it is; a dictionary that represents one
            is converted (:meth:`bulltask.Signature.from_dict`).
        args, kwargs, options: As for :meth:`bulltask.App.signature`; and ``app``, another app.
    """
    if isinstance(name, Canvas):
        return name
    app: Any = options.pop("app", None) or current_sender()
    if isinstance(name, Mapping):
        return Signature.from_dict(name, app)
    return cast(Canvas[Any, Any], app.signature(name, args, kwargs, **options))


subtask = signature
"""Celery's alias of :func:`signature`."""


def maybe_signature(d: Canvas[Any, Any] | Mapping[str, Any] | None, app: Any = None) -> Canvas[Any, Any] | None:
    """Like :func:`signature` for a signature or a dictionary, but return ``None`` for ``None``, as in Celery."""
    return None if d is None else signature(d, app=app)


def _is_empty_group(canvas: object) -> bool:
    return isinstance(canvas, Group) and not (canvas.members or canvas.links)


def _spread(given: Sequence[Any]) -> Iterable[Canvas[Any, Any]]:
    if len(given) == 1 and not isinstance(given[0], Canvas):
        return cast(Iterable[Canvas[Any, Any]], given[0])
    return given


# Protocols for tasks by number of positional parameters, for methods that take the arguments of several calls.
#
# Python's type system has no type for "tuples of the positional arguments of a ``ParamSpec``", so there is one protocol
# for each number of parameters. A task with optional parameters matches several protocols.


B_contra = TypeVar("B_contra", contravariant=True)
C_contra = TypeVar("C_contra", contravariant=True)


class Takes1(Protocol[A_contra]):
    """A task that can be called with one positional argument."""

    def delay(self, first: A_contra, /) -> Any:
        """Send a call."""


class Takes2(Protocol[A_contra, B_contra]):
    """A task that can be called with two positional arguments."""

    def delay(self, first: A_contra, second: B_contra, /) -> Any:
        """Send a call."""


class Takes3(Protocol[A_contra, B_contra, C_contra]):
    """A task that can be called with three positional arguments."""

    def delay(self, first: A_contra, second: B_contra, third: C_contra, /) -> Any:
        """Send a call."""


class Takes1To2(Protocol[A_contra, B_contra]):
    """A task that can be called with one and with two positional arguments."""

    def delay(self, first: A_contra, /) -> Any:
        """Send a call."""

    def adelay(self, first: A_contra, second: B_contra, /) -> Any:
        """Send a call; this method and ``delay`` have the same parameters."""


class Takes1To3(Protocol[A_contra, B_contra, C_contra]):
    """A task that can be called with one to three positional arguments."""

    def delay(self, first: A_contra, /) -> Any:
        """Send a call."""

    def adelay(self, first: A_contra, second: B_contra, third: C_contra, /) -> Any:
        """Send a call; this method and ``delay`` have the same parameters."""


class Takes2To3(Protocol[A_contra, B_contra, C_contra]):
    """A task that can be called with two and with three positional arguments."""

    def delay(self, first: A_contra, second: B_contra, /) -> Any:
        """Send a call."""

    def adelay(self, first: A_contra, second: B_contra, third: C_contra, /) -> Any:
        """Send a call; this method and ``delay`` have the same parameters."""


class TakesMany(Protocol):
    """A task that can be called with four positional arguments or more, whose types are not checked."""

    def delay(self, first: Any, second: Any, third: Any, fourth: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Send a call."""


Unchecked = list[Any] | Sequence[Never]
"""A row whose items are not checked: a list, an empty tuple, or a sequence of ``Any``."""


_Call = Signature[Any, Any] | NewJob


def is_single(canvas: object) -> TypeGuard[Signature[Any, Any]]:
    """Return whether a canvas is one call without callbacks."""
    return is_call(canvas) and not (canvas.links or canvas.errbacks)


def job_of(call: _Call) -> NewJob:
    """Return the job of a single call; raises ``TypeError`` for a chain, a group, or something else."""
    if is_call(call):
        return call.job()
    if not isinstance(call, NewJob):
        raise TypeError(f"send_many sends signatures of single calls, not {call!r:.200}; use its method apply_async")
    return call


def handles(
    sender: Sender, tasks: Tasks, jobs: Sequence[tuple[_Call, NewJob]], ids: Iterable[str]
) -> list[AsyncResult[Any]]:
    """Return the handles of sent jobs, stored under these ids; a job without a signature may be one of ``tasks``."""
    results, now_ms = sender._results, sender._now_ms()
    sent: list[AsyncResult[Any]] = []
    for (call, job), job_id in zip(jobs, ids, strict=True):
        task: Callee | None = call.task if is_call(call) else tasks.get(job.name)
        sent.append(
            AsyncResult(job_id, job.queue, results, now_ms, None if task is None else task._codec.result_decoder)
        )
    return sent


# Sends through an ``apply_async`` or ``send_task`` that a subclass, or a test's patch, has replaced.
#
# As in Celery, all sends pass through these methods: ``delay`` calls ``apply_async``, which calls ``app.send_task``. If
# nothing has replaced them, the detour is left out.
#
# The jobs of a canvas are stored in one transaction, and a coroutine must not block. In these cases, the replaced
# method is called first, for each call. When it calls the original method, that method records the call instead of
# sending it. The recorded calls are then sent together. If it does not call the original method, as a mock, nothing is
# sent.


class _Recorder:
    """Records a call of a task that reaches the original method."""

    def __init__(self, task: Callee) -> None:
        self._task = task
        self.call: Signature[Any, Any] | None = None

    def takes(self, name: str) -> bool:
        """Return whether this is the call to record; other calls that the replaced method makes are sent."""
        return self.call is None and name == self._task.name

    def take(self, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]) -> AsyncResult[Any]:
        """Record the call, and return the handle of the job that will be sent."""
        sender = self._task._sender()
        call = self.call = Signature(self._task, args, kwargs, options)
        call.has_passed_overrides = True
        job_id = call.options.job_id or new_job_id()
        call.planned_id = job_id
        own = None if isinstance(self._task, NamedTask) else self._task._options.queue
        queue = call.options.queue or own or sender._config.default_queue
        return AsyncResult(job_id, queue, sender._results, None, self._task._codec.result_decoder)


_recorder: ContextVar[_Recorder | None] = ContextVar("bulltask_recorder", default=None)


def record_call(task: Callee, send: Callable[[], Any]) -> tuple[Signature[Any, Any] | None, Any]:
    """Call ``send``; return the call that reached the original method, or ``None``, and what was returned."""
    recorder = _Recorder(task)
    token = _recorder.set(recorder)
    try:
        returned = send()
    finally:
        _recorder.reset(token)
    return recorder.call, returned


def send_call(
    task: Callee, args: Sequence[Any], kwargs: Mapping[str, Any], options: Mapping[str, Any]
) -> AsyncResult[Any]:
    """Send a call that has passed all replaced methods, or record it."""
    if (recorder := _recorder.get()) is not None and recorder.takes(task.name):
        return recorder.take(args, kwargs, options)
    if "link" in options or "link_error" in options:
        call: Signature[Any, Any] = Signature(task, args, kwargs, options)
        call.has_passed_overrides = True
        return cast(AsyncResult[Any], task._sender()._send_canvas(call))
    sender = task._sender()
    job = task._build(task._codec.encode(args, kwargs, options.get("serializer")), CallOptions.of(options))
    ignored = not isinstance(task, NamedTask) and task._options.ignore_result
    return result_of(sender, job, sender._send([job])[0], task._codec.result_decoder, ignored=ignored)


async def send_recorded(call: Signature[Any, Any] | None, returned: Any) -> AsyncResult[Any]:
    """Send a recorded call for asyncio; without one, return what the replaced method has returned."""
    if call is None:
        return cast(AsyncResult[Any], returned)
    return cast(AsyncResult[Any], await call.task._sender()._asend_canvas(call))


def recorded(call: Signature[Any, Any] | NewJob) -> tuple[Signature[Any, Any] | NewJob | None, Any]:
    """Return a single call, or what it becomes in a replaced method; see :func:`record_call`."""
    if is_call(call) and call.task._is_overridden and not call.has_passed_overrides:
        return record_call(call.task, call.send_by_public_method)
    return call, None


def is_overridden(canvas: Canvas[Any, Any]) -> bool:
    """Return whether a call of a canvas, or one of its callbacks, must pass a replaced method."""
    return any(call.task._is_overridden for call in _every_call(canvas) if not call.has_passed_overrides)


def pass_overrides(canvas: Canvas[Any, Any]) -> bool:
    """Pass the calls of a canvas through the replaced methods; return whether all have reached the original."""
    complete = True
    for call in _every_call(canvas):
        if call.has_passed_overrides or not call.task._is_overridden:
            continue
        recorded, _ = record_call(call.task, call.send_by_public_method)
        if recorded is None:
            complete = False
        else:
            call.become(recorded)
    return complete


def check_overrides_passed(canvas: Canvas[Any, Any]) -> Canvas[Any, Any]:
    """Return a copy that has passed the replaced methods; raises ``ConfigError`` if one did not call the original."""
    if not is_overridden(canvas):
        return canvas
    copy: Canvas[Any, Any] = canvas.clone()
    if not pass_overrides(copy):
        raise ConfigError(
            f"{canvas!r:.200} cannot be sent: an overridden apply_async() or send_task() did not call super()"
        )
    return copy


def _every_call(canvas: Canvas[Any, Any]) -> Iterator[Signature[Any, Any]]:
    """Iterate over the calls of a canvas and its callbacks. A call is yielded before its callbacks."""
    if is_call(canvas):
        yield canvas
    for part in canvas.parts():
        yield from _every_call(part)
