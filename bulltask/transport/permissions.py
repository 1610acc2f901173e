"""Checks whether the server's ACL permits a Redis user to run the commands that a worker needs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from bulltask.errors import BrokerAuthError
from bulltask.transport.advice import rejected_command, user_of
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys

__all__ = ["check_permissions"]

_MAX_ARGUMENTS: Final = 4


def check_permissions(client: SyncClient, keys: QueueKeys, names: Sequence[str]) -> None:
    """Check whether the client's user may run some commands, without executing any. This needs no permissions.

    Redis checks permissions when a transaction queues a call, and this transaction is discarded. (``ACL DRYRUN`` checks
    the same, but few restricted users may run it.) Each command is queued with zero to four arguments, because Redis
    checks its arity first. If the server rejects transactions, nothing is checked.

    Args:
        client: Makes the calls.
        keys: A queue; it is not changed.
        names: The commands, with a subcommand if only that is needed (``client|id``).

    Raises:
        BrokerAuthError: Some of the commands are forbidden; the message names them all.
        BrokerError: As in ``Client.run``.
    """
    calls = [_test_call(name, count, keys) for name in names for count in range(_MAX_ARGUMENTS + 1)]
    replies = client.dry_run(calls) or []
    forbidden = dict.fromkeys(name for reply in replies if (name := rejected_command(str(reply))))
    if forbidden:
        url, user, count = client.safe_url, user_of(client.safe_url), len(forbidden)
        raise BrokerAuthError(
            f"Redis user {user!r} at {url} lacks permission for {count} command{'s' * (count != 1)} that workers need, "
            f"directly or in scripts: {', '.join(forbidden)}. Grant them: ACL SETUSER {user} "
            + " ".join(f"+{name}" for name in forbidden)
            + (", on every node of the cluster" if "+cluster://" in url else "")
        )


def _test_call(name: str, count: int, keys: QueueKeys) -> Call[Any]:
    return command(*name.split("|"), *[keys.meta] * count)
