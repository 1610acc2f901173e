"""Several calls as one: ``MULTI`` … ``EXEC`` in one round trip, all or nothing.

A script that the server does not have fails inside ``EXEC`` while the calls around it are executed: half a flow would
be stored. Checking for the script first does not help, because another client's ``SCRIPT FLUSH`` may come in between.
So the first call of each script carries its body (``EVAL``, which runs and caches it), and later ones find it: no other
client can run commands inside a transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from bulltask.errors import BrokerError, BulltaskError
from bulltask.transport import faults
from bulltask.transport.call import Call, command
from bulltask.transport.operation import Operation

__all__ = ["atomic", "transaction"]


def atomic(calls: Sequence[Call[Any]], where: str) -> list[Call[Any]]:
    """Return the calls of one round trip that make ``calls`` in a transaction; only the last one has a result.

    Args:
        calls: Must not block: Redis replies to a blocking call inside a transaction at once.
        where: The server for error messages, without its password (``Endpoint.safe_url``).

    Returns:
        Calls for one ``run_many``. The last one's result is a list with the result of each of ``calls``, or the
        ``BulltaskError`` that its reply stands for.

    If the server refuses to queue one of the calls (the ACL forbids it, its keys are in several slots), the round trip
    raises and nothing was executed. A server that cannot write at all (full, a replica) refuses there too or, depending
    on its version, executes nothing of any script; then all results are that error.
    """
    return [
        command("MULTI"),
        *_with_bodies(calls),
        command("EXEC", parse_reply=lambda reply: _results(calls, reply, where)),
    ]


def transaction(calls: Sequence[Call[Any]], where: str) -> Operation[list[Any]]:
    """Return the operation of :func:`atomic`; its result is the last call's."""
    results: list[Any] = (yield atomic(calls, where))[-1]
    return results


def _with_bodies(calls: Sequence[Call[Any]]) -> list[Call[Any]]:
    """Return the same calls as plain commands, which a client does not send again one by one."""
    known: set[str] = set()
    plain: list[Call[Any]] = []
    for call in calls:
        if call.script is None:
            plain.append(command(*call.args))
        elif call.script.sha in known:
            plain.append(command(call.script.by_sha, call.script.sha, *call.args))
        else:
            plain.append(command(call.script.by_body, call.script.body, *call.args))
            known.add(call.script.sha)
    return plain


def _results(calls: Sequence[Call[Any]], reply: Any, where: str) -> list[Any]:
    if not isinstance(reply, list) or len(reply) != len(calls):
        raise BrokerError(f"Redis at {where} replied to a transaction of {len(calls)} calls with {reply!r:.200}")

    return [_result(call, entry, where) for call, entry in zip(calls, reply, strict=True)]


def _result(call: Call[Any], reply: Any, where: str) -> Any:
    if isinstance(reply, ResponseError):
        refusal = faults.reply_error(reply, where)
        refusal.__cause__ = reply
        return refusal
    try:
        return call.parse_reply(reply)
    except BulltaskError as exc:
        return exc
