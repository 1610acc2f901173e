"""Sans-I/O operations: sequences of calls that are written once and run by the sync or the async client.

An operation is a generator. It yields the calls of one round trip, receives their results, and returns a result. A
call's error is raised at the ``yield``, where the operation may handle it.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any, Protocol, TypeVar

from bulltask.transport.call import Call
from bulltask.transport.client_types import AnyAsyncClient
from bulltask.transport.steps import adrive, drive

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
    return drive(operation, client.run_many)


async def run_async(client: AnyAsyncClient, operation: Operation[R]) -> R:
    """:func:`run_sync` for asyncio."""
    return await adrive(operation, client.run_many)
