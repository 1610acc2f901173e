"""``chain``, ``group`` and ``chord``, as in Celery."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Generic, TypeVar, Unpack, cast, overload

from bulltask.registry.canvas import Canvas, Chain, Group, chain_of
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


class ChordHeader(Generic[A, B]):
    """``chord(header)``, which sends the chord when it is called with a body."""

    def __init__(self, header: Group[A, B]) -> None:
        self._header = header

    def __call__(self, body: Canvas[list[B], S], **options: Unpack[CallKeywords[S]]) -> AsyncResult[S]:
        """Send the chord; return the handle of the body's result."""
        return chain(self._header, body).apply_async(**options)


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
def chain(steps: Iterable[Canvas[Any, Any]], /) -> Chain[Any, Any]: ...
@overload
def chain(step: Canvas[A, S], /) -> Chain[A, S]: ...


def chain(*steps: Any) -> Chain[Any, Any]:
    """Return a chain, ``a | b | c``. Each step receives the previous step's result as its first argument.

    Args:
        steps: Signatures, groups and chains, or one iterable of them.

    Raises:
        TypeError: There are no steps, or one of them is something else.
    """
    return chain_of(_spread(steps))


def group(*members: Canvas[A, B] | Iterable[Canvas[A, B]]) -> Group[A, B]:
    """Return a group, whose members run at the same time. Its result is the list of the members' results, in order.

    Args:
        members: Signatures, chains and groups, or one iterable of them; without members, the group is empty.

    Raises:
        TypeError: One of them is something else.
    """
    return Group(_spread(members))


@overload
def chord(header: Iterable[Canvas[A, B]] | Group[A, B]) -> ChordHeader[A, B]: ...
@overload
def chord(header: Iterable[Canvas[A, B]] | Group[A, B], body: Canvas[list[B], S]) -> Chain[A, S]: ...


def chord(header: Any, body: Any = None) -> Any:
    """Return a chord, ``group(*header) | body``: ``body`` receives the list of the results of ``header``.

    Args:
        header: The calls that run first, at the same time.
        body: The call that follows; without it, ``chord(header)(body)`` sends the chord.
    """
    members: Group[Any, Any] = header if isinstance(header, Group) else Group(header)
    return ChordHeader(members) if body is None else chain(members, body)


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


def _spread(given: Sequence[Any]) -> Iterable[Canvas[Any, Any]]:
    if len(given) == 1 and not isinstance(given[0], Canvas):
        return cast(Iterable[Canvas[Any, Any]], given[0])
    return given
