"""The commands that a worker's Redis user needs (ACL), and the check whether the server allows them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

from bulltask.errors import BrokerAuthError
from bulltask.lua import loader
from bulltask.lua.loader import Script
from bulltask.transport.advice import rejected_command, user_of
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys

__all__ = ["check_permissions", "metrics_commands", "worker_commands", "worker_grants"]

_PLAIN: Final = (
    "bzpopmin eval evalsha get hget hgetall hmget hset hsetnx llen ping pexpire sadd scard zadd zcard zrem".split()
)
"""Commands that workers call directly; commands inside scripts are read from the scripts."""

_CONNECT: Final = ("client|setinfo", "client|setname", "discard", "info", "multi", "time")
"""Commands to connect to and inspect Redis before a worker starts; if they are rejected, that step reports it."""

_NOT_FOR_WORKERS: Final = frozenset(
    "cleanJobsInSet convertBullJob getCounts getCountsPerPriority getDependencyCounts getRanges moveBullJob pageAfter "
    "paginate pause promote setPaused lastIdOfRange".split()
)
"""Scripts of queues, readers and migrations. All other scripts are a worker's, so a new script needs no entry."""

_CALLED: Final = re.compile(rb"""\b(?:r|redis\.p?|server\.p?)call\s*\(\s*["'](\w+)["']""")
_PUSH: Final = re.compile(rb"""["']([LR]PUSH)["']""")  # scripts pass these names in a variable
_MAX_WORDS: Final = 5


@cache
def worker_commands() -> tuple[str, ...]:
    """Return the commands that a worker needs, including those that its scripts call."""
    scripts = (script for script in loader.all_scripts() if script.name not in _NOT_FOR_WORKERS)
    return tuple(sorted({*_PLAIN, *_called_in(scripts)}))


@cache
def metrics_commands() -> tuple[str, ...]:
    """Return the additional commands that a worker needs for its metrics, which include the lengths of its queues."""
    return tuple(sorted(_called_in([loader.official_script("getCounts")]).difference(worker_commands())))


def _called_in(scripts: Iterable[Script]) -> set[str]:
    names = (pattern.findall(script.body) for script in scripts for pattern in (_CALLED, _PUSH))
    return {name.decode().lower() for group in names for name in group}


def worker_grants(prefix: str = "bull") -> list[str]:
    """Return the words after ``ACL SETUSER name on >password`` for a worker, as the documentation prints them.

    Args:
        prefix: The setting ``prefix``.
    """
    own = ["bulltask:*"] if prefix == "bull" else [f"bulltask:{prefix}:*", f"bulltask:beat:{prefix}:*"]
    keys = [f"~{pattern}" for pattern in (f"{prefix}:*", *own)]
    names = sorted({*worker_commands(), *_CONNECT})
    return ["resetkeys", *keys, "resetchannels", "-@all", *(f"+{name}" for name in names)]


def check_permissions(client: SyncClient, keys: QueueKeys, names: Sequence[str]) -> None:
    """Check whether the client's user may run some commands, without executing any. This needs no permissions.

    Redis checks permissions when a transaction queues a call, and this transaction is discarded. (``ACL DRYRUN`` checks
    the same, but few restricted users may run it.) Each command is queued with zero to four arguments, because Redis
    checks its arity first. If the server rejects transactions, nothing is checked.

    Args:
        client: Makes the calls.
        keys: A queue; it is not changed.
        names: The commands.

    Raises:
        BrokerAuthError: Some of the commands are forbidden; the message names them all.
        BrokerError: As in ``Client.run``.
    """
    calls = [_test_call(name, count, keys) for name in names for count in range(1, _MAX_WORDS + 1)]
    replies = client.dry_run(calls) or []
    forbidden = dict.fromkeys(name for reply in replies if (name := rejected_command(str(reply))))
    if forbidden:
        url, user, count = client.safe_url, user_of(client.safe_url), len(forbidden)
        raise BrokerAuthError(
            f"Redis user {user!r} at {url} lacks permission for {count} command{'s' * (count != 1)} that workers need, "
            f"directly or in scripts: {', '.join(forbidden)}. Grant them: ACL SETUSER {user} "
            + " ".join(f"+{name}" for name in forbidden)
        )


def _test_call(name: str, count: int, keys: QueueKeys) -> Call[Any]:
    return command(name, *[keys.meta] * count)
