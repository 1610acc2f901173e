"""Several calls as one operation, written once for the sync and the asyncio clients; and transactions.

An operation is a generator (sans I/O): it yields the calls of one round trip, receives their results, and returns a
result. A call's error is raised at the ``yield``, where the operation may handle it. :func:`run_sync` and
:func:`run_async` run it with a client.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Sequence
from typing import Any, Protocol, TypeVar

from redis.exceptions import ResponseError

from bulltask.jobs.errors import BrokerError, BrokerNotReadyError, BulltaskError
from bulltask.transport import redis_errors
from bulltask.transport.call import Call, command

__all__ = [
    "Operation",
    "arun_generator",
    "atomic",
    "execute",
    "run_async",
    "run_generator",
    "run_sync",
    "together",
    "transaction",
]


R = TypeVar("R")
S = TypeVar("S")
_Errors = type[BulltaskError] | tuple[type[BulltaskError], ...]

Operation = Generator[Sequence[Call[Any]], list[Any], R]


class _Runner(Protocol):
    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]: ...


class _AsyncRunner(Protocol):
    async def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]: ...


def execute(call: Call[R]) -> Operation[R]:
    """Return an operation that makes one call; inside another operation: ``result = yield from execute(call)``."""
    result: R = (yield [call])[0]
    return result


def run_sync(client: _Runner, operation: Operation[R]) -> R:
    """Run an operation with a sync client or pool; raises a call's error that the operation did not handle."""
    return run_generator(operation, client.run_many)


def together(operations: Sequence[Operation[R]]) -> Generator[list[Call[Any]], list[Any], list[R | BulltaskError]]:
    """Yield the calls of independent operations, whose steps share round trips; an operation that failed is its error.

    Unlike an operation, it receives the error of a call that failed instead of a result, as ``try_many`` returns it. If
    the connection breaks, it is unknown which operations were executed.
    """
    results: list[Any] = [None] * len(operations)
    waiting: list[tuple[int, Sequence[Call[Any]]]] = []

    def advance(number: int, reply: list[Any] | None) -> None:
        operation = operations[number]
        try:
            error = next((part for part in reply or () if isinstance(part, BulltaskError)), None)
            calls = operation.throw(error) if error else next(operation) if reply is None else operation.send(reply)
            waiting.append((number, calls))
        except StopIteration as end:
            results[number] = end.value
        except BulltaskError as exc:
            results[number] = exc

    for number in range(len(operations)):
        advance(number, None)
    while waiting:
        asked, waiting = waiting, []
        replies = iter((yield [call for _, calls in asked for call in calls]))
        for number, calls in asked:
            advance(number, [next(replies) for _ in calls])
    return results


async def run_async(client: _AsyncRunner, operation: Operation[R]) -> R:
    """:func:`run_sync` for asyncio."""
    return await arun_generator(operation, client.run_many)


def run_generator(generator: Generator[S, Any, R], handle: Callable[[S], object], errors: _Errors = BulltaskError) -> R:
    """Pass what a generator yields to ``handle``, and send it the result, until it returns; return what it returns.

    ``errors`` of ``handle`` are raised at the ``yield``; the caller receives the others.
    """
    try:
        yielded = next(generator)
        while True:
            try:
                result = handle(yielded)
            except errors as exc:
                yielded = generator.throw(exc)
            else:
                yielded = generator.send(result)
    except StopIteration as end:
        returned: R = end.value
        return returned


async def arun_generator(
    generator: Generator[S, Any, R], handle: Callable[[S], Awaitable[object]], errors: _Errors = BulltaskError
) -> R:
    """:func:`run_generator` for asyncio."""
    try:
        yielded = next(generator)
        while True:
            try:
                result = await handle(yielded)
            except errors as exc:
                yielded = generator.throw(exc)
            else:
                yielded = generator.send(result)
    except StopIteration as end:
        returned: R = end.value
        return returned


# Transactions: ``MULTI`` … ``EXEC`` in one round trip, all or nothing.
#
# If the server does not have a script, its call fails inside ``EXEC``, but the other calls are executed, so half a flow
# would be stored. Loading the script first does not help, because another client may send ``SCRIPT FLUSH`` in between.
# Therefore, the first call to each script contains its source (``EVAL``, which runs and caches it), and later calls
# need only the hash, because no other client can run commands inside a transaction.


def atomic(calls: Sequence[Call[Any]], where: str) -> list[Call[Any]]:
    """Return the calls that execute ``calls`` in a transaction, in one round trip; only the last call has a result.

    It is a list with the result, or the ``BulltaskError``, of each of ``calls``. They must not block: Redis replies
    immediately to a blocking call inside a transaction. ``where`` is the server for error messages.

    If the server rejects one of the calls when it is queued (the ACL forbids it, its keys are in several slots), the
    round trip raises and nothing was executed. A server that cannot write at all (it is at maxmemory, or a replica)
    also rejects calls at that point or, depending on its version, executes no part of any script, and all results are
    that error.
    """
    return [
        command("MULTI"),
        *_with_sources(calls),
        command("EXEC", parse_reply=lambda reply: _results(calls, reply, where)),
    ]


def transaction(calls: Sequence[Call[Any]], where: str, then: Sequence[Call[Any]] = ()) -> Operation[list[Any]]:
    """Return :func:`atomic` as an operation, whose result is the transaction's; ``then`` are calls after it."""
    requests = atomic(calls, where)
    results: list[Any] = (yield [*requests, *then])[len(requests) - 1]
    return results


def _with_sources(calls: Sequence[Call[Any]]) -> list[Call[Any]]:
    """Return the same calls as plain commands, so that the client does not resend individual calls."""
    known: set[str] = set()
    plain: list[Call[Any]] = []
    for call in calls:
        if call.script is None:
            plain.append(command(*call.args))
        elif call.script.sha in known:
            plain.append(command(call.script.by_sha, call.script.sha, *call.args))
        else:
            plain.append(command(call.script.by_source, call.script.source, *call.args))
            known.add(call.script.sha)
    return plain


def _results(calls: Sequence[Call[Any]], reply: Any, where: str) -> list[Any]:
    if reply is None:
        raise BrokerNotReadyError(f"Redis at {where} did not execute a transaction, because a watched key has changed")
    if not isinstance(reply, list) or len(reply) != len(calls):
        raise BrokerError(f"Redis at {where} replied to a transaction of {len(calls)} calls with {reply!r:.200}")

    return [_result(call, entry, where) for call, entry in zip(calls, reply, strict=True)]


def _result(call: Call[Any], reply: Any, where: str) -> Any:
    if isinstance(reply, ResponseError):
        error = redis_errors.reply_error(reply, where)
        error.__cause__ = reply
        return error
    try:
        return call.parse_reply(reply)
    except BulltaskError as exc:
        return exc
