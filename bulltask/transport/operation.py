"""Sans-I/O operations: sequences of calls that are written once and run by the sync or the async client.

An operation is a generator. It yields the calls of one round trip, receives their results, and returns a result. A
call's error is raised at the ``yield``, where the operation may handle it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol, TypeVar

from bulltask.errors import BulltaskError
from bulltask.transport.call import Call
from bulltask.transport.client_types import AnyAsyncClient

__all__ = ["Operation", "execute", "run_async", "run_sync"]

R = TypeVar("R")

Operation = Generator[Sequence[Call[Any]], list[Any], R]


class _Runner(Protocol):
    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]: ...


def execute(call: Call[R]) -> Operation[R]:
    """Return an operation that makes one call; inside another operation: ``result = yield from execute(call)``."""
    result: R = (yield [call])[0]
    return result


def run_sync(client: _Runner, operation: Operation[R]) -> R:
    """Run an operation with a sync client or pool.

    Raises:
        BrokerError, JobError: A call's error that the operation did not handle.
    """
    try:
        calls = next(operation)
        while True:
            try:
                results = client.run_many(calls)
            except BulltaskError as exc:
                calls = operation.throw(exc)
            else:
                calls = operation.send(results)
    except StopIteration as end:
        result: R = end.value
        return result


async def run_async(client: AnyAsyncClient, operation: Operation[R]) -> R:
    """:func:`run_sync` for asyncio."""
    try:
        calls = next(operation)
        while True:
            try:
                results = await client.run_many(calls)
            except BulltaskError as exc:
                calls = operation.throw(exc)
            else:
                calls = operation.send(results)
    except StopIteration as end:
        result: R = end.value
        return result
