"""``chain``, ``group`` and ``chord``, as in Celery."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack, cast, overload

from bulltask.registry.canvas import Canvas, Chain, Chord, Group, chain_of, chord_of
from bulltask.registry.current import current_sender
from bulltask.registry.option_types import CallKeywords
from bulltask.registry.signature import Signature
from bulltask.result import AsyncResult

__all__ = ["ChordHeader", "chain", "chord", "group", "maybe_signature", "signature", "subtask"]

A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
D = TypeVar("D")
E = TypeVar("E")
F = TypeVar("F")
G = TypeVar("G")
H = TypeVar("H")
S = TypeVar("S")
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
        self._function, self._type = function, of_type

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

    Args:
        members: Signatures, chains and groups, or one iterable of them; without members, the group is empty. A task is
            called without arguments of its own.

    Raises:
        TypeError: One of them is something else.
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
