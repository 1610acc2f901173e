"""The commands that a worker's Redis user needs (ACL), and which of them the server refuses."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

from bulltask.errors import BrokerAuthError
from bulltask.lua import loader
from bulltask.lua.loader import Script
from bulltask.transport.advice import refused_command, user_of
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.keys import QueueKeys

__all__ = ["check_permissions", "metrics_commands", "worker_commands", "worker_grants"]

_PLAIN: Final = (
    "bzpopmin eval evalsha get hget hgetall hmget hset hsetnx llen ping pexpire sadd scard zadd zcard zrem".split()
)
"""Commands that workers call directly; those inside scripts are found by reading the scripts."""

_TO_LOOK: Final = ("client|setinfo", "client|setname", "discard", "info", "multi", "time")
"""Commands to connect and to inspect Redis before a worker starts; a refusal is reported there."""

_NOT_WORKERS: Final = frozenset(
    "cleanJobsInSet convertBullJob getCounts getCountsPerPriority getDependencyCounts getRanges moveBullJob pageAfter "
    "paginate pause promote setPaused spanEnd".split()
)
"""Scripts of queues, readers and migrations. All others count as a worker's, so a new one needs no entry here."""

_CALLED: Final = re.compile(rb"""\b(?:r|redis\.p?|server\.p?)call\s*\(\s*["'](\w+)["']""")
_PUSH: Final = re.compile(rb"""["']([LR]PUSH)["']""")  # chosen by a condition, called by a variable
_MOST_WORDS: Final = 5


@cache
def worker_commands() -> tuple[str, ...]:
    """Return the commands that a worker needs, including those that its scripts call."""
    scripts = (script for script in loader.all_scripts() if script.name not in _NOT_WORKERS)
    return tuple(sorted({*_PLAIN, *_called_in(scripts)}))


@cache
def metrics_commands() -> tuple[str, ...]:
    """Return the further commands that a worker needs to export metrics, which include the lengths of its queues."""
    return tuple(sorted(_called_in([loader.official_script("getCounts")]).difference(worker_commands())))


def _called_in(scripts: Iterable[Script]) -> set[str]:
    found = (pattern.findall(script.body) for script in scripts for pattern in (_CALLED, _PUSH))
    return {word.decode().lower() for words in found for word in words}


def worker_grants(prefix: str = "bull") -> list[str]:
    """Return the words after ``ACL SETUSER name on >password`` for a worker, as the documentation prints them.

    Args:
        prefix: The setting ``prefix``.
    """
    own = "bulltask:*" if prefix == "bull" else f"bulltask:{prefix}:*"
    names = sorted({*worker_commands(), *_TO_LOOK})
    return ["resetkeys", f"~{prefix}:*", f"~{own}", "resetchannels", "-@all", *(f"+{name}" for name in names)]


def check_permissions(client: Client, keys: QueueKeys, names: Sequence[str]) -> None:
    """Check whether the client's user may run some commands, without executing any. Needs no permission itself.

    Redis checks permissions when a transaction queues a call, before it runs, and this transaction is discarded. (``ACL
    DRYRUN`` checks the same, but a user that may run it lacks few permissions.) A command is queued with one word and
    more, because Redis checks their number first. If transactions are refused, nothing is found out.

    Args:
        client: Makes the calls.
        keys: A queue; nothing of it is touched.
        names: The commands.

    Raises:
        BrokerAuthError: Some of them are refused; the message names all.
        BrokerError: As in ``Client.run``.
    """
    offers = [_offer(name, count, keys) for name in names for count in range(1, _MOST_WORDS + 1)]
    replies = client.dry_run(offers) or []
    refused = dict.fromkeys(name for reply in replies if (name := refused_command(str(reply))))
    if refused:
        url = client.safe_url
        raise BrokerAuthError(
            f"Redis at {url} forbids this user {len(refused)} of the commands that a worker needs, also inside its "
            f"scripts: {', '.join(refused)}. Grant them: ACL SETUSER {user_of(url)} "
            + " ".join(f"+{name}" for name in refused)
        )


def _offer(name: str, count: int, keys: QueueKeys) -> Call[Any]:
    return command(name, *[keys.meta] * count)
