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
from importlib import import_module
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, Self, TypeVar, Unpack, cast, overload

import uuid_utils

from bulltask.group_result import GroupResult
from bulltask.ports import Sender
from bulltask.registry.current import current_sender
from bulltask.registry.option_types import CallKeywords, SignatureKeywords
from bulltask.registry.stamping import Stamper, StampingVisitor
from bulltask.result import AsyncResult

if TYPE_CHECKING:  # signature.py imports this module
    from bulltask.registry.signature import Signature

__all__ = [
    "EMPTY_CHAIN",
    "Canvas",
    "Chain",
    "Chord",
    "Group",
    "GroupChain",
    "chain_of",
    "check_canvas",
    "chord_of",
    "pop_callbacks",
]

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

    Attributes:
        planned_id: The id of the job whose result is this canvas's, or of its group, from :meth:`freeze`, or because
            the call has passed a replaced method (:mod:`bulltask.registry.overrides`); ``""`` for none.
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
        result = self._sender().send_canvas(self.clone(args, kwargs, **options))
        self._forget_ids()
        return cast(AsyncResult[R_co], result)

    async def aapply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> AsyncResult[R_co]:
        """:meth:`apply_async` for asyncio."""
        result = await self._sender().asend_canvas(self.clone(args, kwargs, **options))
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
        result = self._sender().apply_canvas(self.clone(args, kwargs, **options), throw=throw)
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
        return next((call.task.sender for call in self.calls()), None) or current_sender()


class Chain(Canvas[A_contra, R_co]):
    """Steps that run one after another, each with the previous step's result: ``a | b``, or :func:`chain`."""

    def __init__(self, steps: Iterable[Canvas[Any, Any]]) -> None:
        self.steps = list(steps)
        self.tasks = self.steps  # Celery's name
        self.errbacks: list[Signature[Any, Any]] = []

    def clone(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R_co]]
    ) -> Any:
        """Return a copy.

        The arguments and options are those of the first step, except ``link``, ``link_error`` and ``job_id``.
        """
        given: dict[str, Any] = {**options}
        links, errbacks, job_id = pop_callbacks(given, "link"), pop_callbacks(given, "link_error"), pop_id(given)
        # A header that is empty stays one, and a chain with error callbacks stays one step.
        copy = type(self)(
            [
                step.clone(*((args, kwargs) if index == 0 else ()), **(given if index == 0 else {}))
                for index, step in enumerate(self.steps)
            ]
        )
        copy.planned_id, copy.errbacks = self.planned_id, [*self.errbacks, *errbacks]
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
        """Run ``callback`` with the result of the last step; return ``callback``.

        Raises:
            TypeError: The chain is empty.
        """
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
        copy.links, copy.planned_id = [*self.links], job_id or self.planned_id
        return copy

    def plan_ids(self, job_id: str | None, parent: Any) -> Any:
        """Choose the ids of the group, ``job_id``, and of its members."""
        self.planned_id = job_id or self.planned_id or str(uuid_utils.uuid7())
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
        """Set a ``countdown`` for each member, in seconds, and return the group (Celery's ``skew``).

        It grows from ``start`` by ``step`` from member to member, up to ``stop``.
        """
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
    """Return a chain; one that begins with a group is a :class:`Chord`.

    Chains among the steps become part of it, unless they have error callbacks.
    """
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
    """Remove and return the callbacks in an option, ``link`` or ``link_error``: one, or a list.

    Raises:
        TypeError: One of them is something else.
    """
    given = options.pop(name, None) or []
    return [_as_canvas(callback) for callback in (given if isinstance(given, list | tuple) else [given])]


def pop_id(options: dict[str, Any]) -> str | None:
    """Remove and return the option ``job_id``, or ``task_id``, Celery's name."""
    job_id, task_id = options.pop("job_id", None), options.pop("task_id", None)
    return cast(str | None, job_id or task_id)


def _as_canvas(value: Any) -> Canvas[Any, Any]:
    """Return a canvas; one that is given as a dictionary is converted."""
    if isinstance(value, Mapping):
        value = import_module("bulltask.registry.signature").Signature.from_dict(value)
    check_canvas(value)
    return cast(Canvas[Any, Any], value)


def _as_member(value: Any) -> Canvas[Any, Any]:
    """Return a canvas; a task becomes its call without arguments."""
    if not isinstance(value, Canvas) and callable(call := getattr(value, "s", None)):
        value = call()
    return _as_canvas(value)


def check_canvas(value: object) -> None:
    """Check that a value can be part of a canvas.

    Raises:
        TypeError: It is neither a signature nor a canvas.
    """
    if not isinstance(value, Canvas):
        raise TypeError(f"a canvas consists of signatures such as task.s(…), chains and groups, not {value!r:.200}")
