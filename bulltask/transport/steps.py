"""Drives sans-I/O generators: logic that is written once, and whose steps a sync or an asyncio caller takes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator
from typing import Any, TypeVar

from bulltask.errors import BulltaskError

__all__ = ["adrive", "drive"]

S = TypeVar("S")
R = TypeVar("R")
_Errors = type[BulltaskError] | tuple[type[BulltaskError], ...]


def drive(steps: Generator[S, Any, R], take: Callable[[S], object], errors: _Errors = BulltaskError) -> R:
    """Take each step that a generator yields, and send it the result, until it returns.

    Args:
        steps: The generator.
        take: Takes a step.
        errors: The errors of a step that are raised at the ``yield``; the caller receives the others.

    Returns:
        What the generator returns.
    """
    try:
        step = next(steps)
        while True:
            try:
                result = take(step)
            except errors as exc:
                step = steps.throw(exc)
            else:
                step = steps.send(result)
    except StopIteration as end:
        returned: R = end.value
        return returned


async def adrive(
    steps: Generator[S, Any, R], take: Callable[[S], Awaitable[object]], errors: _Errors = BulltaskError
) -> R:
    """:func:`drive` for asyncio."""
    try:
        step = next(steps)
        while True:
            try:
                result = await take(step)
            except errors as exc:
                step = steps.throw(exc)
            else:
                step = steps.send(result)
    except StopIteration as end:
        returned: R = end.value
        return returned
