"""What a worker's user of Redis has to be allowed to do (ACL), and what of it is refused."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final

from bulltask.errors import BrokerAuthError
from bulltask.lua import loader
from bulltask.lua.loader import Script
from bulltask.transport import acl_advice
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.keys import QueueKeys

__all__ = ["check_permissions", "metrics_commands", "worker_commands", "worker_grants"]

_PLAIN: Final = (
    "bzpopmin eval evalsha get hget hgetall hmget hset hsetnx llen ping pexpire sadd scard zadd zcard zrem".split()
)
"""What workers call themselves; scripts are read for theirs."""

_TO_LOOK: Final = ("client|setinfo", "client|setname", "discard", "info", "multi", "time")
"""What it needs to connect and to look at Redis before it starts; a refusal is met there."""

_NOT_WORKERS: Final = frozenset(
    "cleanJobsInSet convertBullJob getCounts getCountsPerPriority getDependencyCounts getRanges moveBullJob pageAfter "
    "paginate pause promote setPaused spanEnd".split()
)
"""Scripts of queues, readers and migrations. Any other one is taken for a worker's: a new one needs no entry here."""

_CALLED: Final = re.compile(rb"""\b(?:r|redis\.p?|server\.p?)call\s*\(\s*["'](\w+)["']""")
_PUSH: Final = re.compile(rb"""["']([LR]PUSH)["']""")  # chosen by a condition, called by a variable
_MOST_WORDS: Final = 5


@cache
def worker_commands() -> tuple[str, ...]:
    """The commands that a worker needs, those that are called inside its scripts included."""
    scripts = (script for script in loader.every() if script.name not in _NOT_WORKERS)
    return tuple(sorted({*_PLAIN, *_called_in(scripts)}))


@cache
def metrics_commands() -> tuple[str, ...]:
    """The commands that a worker needs besides when it exports metrics: they have the lengths of its queues."""
    return tuple(sorted(_called_in([loader.official("getCounts")]).difference(worker_commands())))


def _called_in(scripts: Iterable[Script]) -> set[str]:
    found = (pattern.findall(script.body) for script in scripts for pattern in (_CALLED, _PUSH))
    return {word.decode().lower() for words in found for word in words}


def worker_grants(prefix: str = "bull") -> list[str]:
    """The words behind ``ACL SETUSER name on >password`` for a worker: the documentation prints them.

    Args:
        prefix: the setting ``prefix``.
    """
    own = "bulltask:*" if prefix == "bull" else f"bulltask:{prefix}:*"
    names = sorted({*worker_commands(), *_TO_LOOK})
    return ["resetkeys", f"~{prefix}:*", f"~{own}", "resetchannels", "-@all", *(f"+{name}" for name in names)]


def check_permissions(client: Client, keys: QueueKeys, names: Sequence[str]) -> None:
    """Ask whether the client's user may run some commands. Nothing is executed, and no right is needed to ask.

    Redis looks at rights when a transaction takes a call, before it runs, and this one is dry_run. (``ACL DRYRUN``
    asks the same, but whoever may run it has few rights to miss.) A command is offered with one word and more, because
    Redis looks at their number first. Where transactions are refused nothing is found out.

    Args:
        client: asks.
        keys: a queue, of which nothing is touched.
        names: the commands.

    Raises:
        BrokerAuthError: some of them are refused; the message names all.
        BrokerError: as of ``Client.run``.
    """
    offers = [_offer(name, count, keys) for name in names for count in range(1, _MOST_WORDS + 1)]
    replies = client.dry_run(offers) or []
    refused = dict.fromkeys(name for reply in replies if (name := acl_advice.refused_command(str(reply))))
    if refused:
        url = client.safe_url
        raise BrokerAuthError(
            f"Redis at {url} forbids this user {len(refused)} of the commands that a worker needs, also inside its "
            f"scripts: {', '.join(refused)}. Grant them: ACL SETUSER {acl_advice.user_of(url)} "
            + " ".join(f"+{name}" for name in refused)
        )


def _offer(name: str, count: int, keys: QueueKeys) -> Call[Any]:
    return command(name, *[keys.meta] * count)
