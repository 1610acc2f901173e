"""The permissions that Redis users need, by role, and a check of a worker's user against the server's ACL."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any, Final, TypeVar

from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import BrokerAuthError, BulltaskError
from bulltask.lua import loader
from bulltask.lua.loader import Script
from bulltask.transport.call import (
    Call,
    QueueKeys,
    SyncClient,
    beat_queues,
    command,
    known_queues,
    queue_consumers,
    saved_group,
    schedule_versions,
    script_call,
    texts,
)
from bulltask.transport.operation import Operation, execute
from bulltask.transport.redis_errors import rejected_command, user_of

__all__ = [
    "CLUSTER",
    "NEEDED_BY_JOBS",
    "ROLES",
    "Grants",
    "check_permissions",
    "metrics_commands",
    "permitted",
    "role_grants",
    "worker_commands",
]


ROLES: Final = {
    "worker": "run jobs, with schedules, retries, revocation and metrics",
    "sender": "send jobs, canvases and flows, including from an outbox, and wait for results",
    "reader": "read queues, jobs, results, schedules and events",
    "operator": "run every command for queues, jobs, schedules and workers, but neither jobs nor migrations",
    "manager": "everything that bulltask does: all methods of queues and jobs, all commands",
    "doctor": "read what a reader may, and the server's settings, slow log and refused calls, with their secrets",
}
"""The roles, and what a user with that role can do. A user can have several."""

NEEDED_BY_JOBS: Final = tuple(role for role in ROLES if role != "doctor")
"""The roles without which jobs are not sent, run or managed."""

CLUSTER: Final = ("asking", "client|id", "client|unblock", "cluster|slots")
"""Commands that every role needs in a Redis Cluster."""

_CONNECT: Final = ("time",)

_WORKER: Final = (
    "bzpopmin client|setname discard eval evalsha exists get hget hgetall hmget hset hsetnx info llen multi ping "
    "pexpire rpush sadd scard set zadd zcard zrem zscan"
).split()
_SENDER: Final = (
    "del eval evalsha exec exists get hmget hsetnx multi set unwatch wait watch xrange xread xrevrange"
).split()
_READER: Final = (
    "client|list client|setname eval evalsha exec exists get hexists hget hgetall hmget info llen lpos lrange mget "
    "multi pttl scan scard sismember smembers sscan xinfo|stream xread xrevrange zcard zcount zmscore zrange zrank "
    "zrevrange zscan zscore"
).split()
_OPERATOR: Final = "hdel hset lrem pexpire rpush".split()
_MANAGER: Final = "hlen ltrim srem type xadd xtrim".split()
_DOCTOR: Final = "acl|log config|get slowlog|get".split()
"""Commands that are called directly; those inside scripts are read from the scripts."""

_NOT_FOR_WORKERS: Final = frozenset(
    "cleanJobsInSet cleanPage convertBullJob getCounts getCountsPerPriority getDependencyCounts getRanges moveBullJob "
    "pageAfter paginate pause pauseScheduler promote queueOverview resetAttempts resumeScheduler setPaused "
    "lastIdOfRange".split()
)
"""Scripts of queues, readers and migrations. All other scripts are a worker's, so a new script needs no entry."""

_SENDERS: Final = frozenset(
    "addDelayedJob addOnce addParentJob addPrioritizedJob addStandardJob deduplicationGuard getStateV2 "
    "isFinished".split()
)
_READERS: Final = frozenset(
    "getCounts getCountsPerPriority getDependencyCounts getJobScheduler getMetrics getRanges getRateLimitTtl "
    "getStateV2 isFinished isMaxed pageAfter paginate queueOverview".split()
)
_OPERATORS: Final = frozenset(
    "addJobScheduler cleanJobsInSet cleanPage drain moveJobsToWait moveToFinished obliterate pause pauseScheduler "
    "pausedGuard promote removeJob removeJobScheduler reprocessJob resetAttempts resumeScheduler retryChild "
    "retryFailed revoke setPaused".split()
)
"""Scripts that commands of operators run, in addition to those of senders and readers. Redis cannot forbid
``obliterate`` to a user who may run the others, because it calls no other commands."""

_WRITES_OF_READERS: Final = frozenset(("del", "rpop"))
"""Write commands in scripts that read. They remove what BullMQ 4 and earlier, or an expired rate limit, have left. A
reader is not permitted to run them; scripts call them only if there is something to remove."""

_KEYS_OF_SENDERS: Final = ("added:*", "replicated", ":guard")
"""A sender needs no other keys of bulltask's own in a queue: above all, it may give no orders to workers."""

_CALLED: Final = re.compile(
    rb"""call(?:(?<=\bcall)|(?<=\brcall)|(?<=\bredis\.pcall)|(?<=\bserver\.pcall))\s*\(\s*["'](\w+)["']"""
)
"""The name of a command in ``redis.call("…")``; the pattern begins with letters, for which Python searches quickly."""
_IN_VARIABLE: Final = re.compile(rb"""["']([LR]PUSH|Z(?:REV)?RAN(?:K|GE)|SCARD|SSCAN|HLEN|HSCAN)["']""")
"""Names of commands that scripts choose before the call."""
_APP_KEYS: Final = (saved_group, beat_queues, schedule_versions, queue_consumers)
"""Functions that return the names of keys that belong to no queue."""
_GLOB: Final = re.compile(r"([*?\[\]\\])")
T = TypeVar("T")
_SPACE: Final = re.compile(r"[ \t\n\v\f\r]")


@value_class
class Grants:
    """The grants of a Redis user.

    Attributes:
        access: The prefix of key patterns: ``~``; ``%R~`` only for reading.
        commands: The commands.
        own: Patterns of the ends of those keys of a queue that are bulltask's own; ``*`` for all.
    """

    access: str
    commands: tuple[str, ...]
    own: tuple[str, ...] = ("*",)

    def rules(self, prefix: str = "bull", *, cluster: bool = False, queues: Sequence[QueueKeys] = ()) -> list[str]:
        """Return the rules for ``ACL SETUSER name on >password …``; without ``queues``, for all with the prefix."""
        keys = [f"{self.access}{pattern}" for pattern in key_patterns(prefix, queues, self.own)]
        allowed = sorted({*self.commands, *(CLUSTER if cluster else ())})
        return ["resetkeys", *keys, "resetchannels", "-@all", *(f"+{name}" for name in allowed)]


def key_patterns(prefix: str, queues: Sequence[QueueKeys] = (), own: Sequence[str] = ("*",)) -> list[str]:
    """Return the patterns of all keys with a prefix, or those of some queues and those that belong to no queue.

    ``own`` restricts bulltask's own keys, as in :class:`Grants`.
    """
    every, text = "*" in own, _literal(prefix)
    if queues:
        patterns = [f"{_literal(keys.base)}*" for keys in queues]
        patterns += [f"{_literal(keys.bulltask_base)}{end}" for keys in queues for end in own]
    else:
        root = "bulltask:" if prefix == "bull" else f"bulltask:{text}:"
        patterns = [f"{text}:*", *(f"{root}{end}" if every else f"{root}*:{end}" for end in own)]
        if prefix == "bull" and every:
            return patterns
    apps = [key(text, "*") for key in (_APP_KEYS if every else (saved_group,))]
    return [*patterns, *apps, *([known_queues(text)] if queues or not every else [])]


def role_grants(roles: Iterable[str]) -> Grants:
    """Return the permissions of a user with one or several of :data:`ROLES`."""
    names = set(roles)
    commands = {name for role in names for name in _commands_of(role)}
    return Grants("~", tuple(sorted(commands)), _KEYS_OF_SENDERS if names == {"sender"} else ("*",))


@cache
def worker_commands() -> tuple[str, ...]:
    """Return the commands that a running worker needs, including those that its scripts call."""
    scripts = (script for script in loader.all_scripts() if script.name not in _NOT_FOR_WORKERS)
    direct = (name for name in _WORKER if "|" not in name)
    return tuple(sorted({*direct, *called_in(scripts)} - {"discard", "info", "multi"}))


@cache
def metrics_commands() -> tuple[str, ...]:
    """Return the additional commands that a worker needs for its metrics, which include the figures of its queues."""
    called = called_in([loader.bulltask_script("queueOverview")]) - {"xlen", "xrevrange"}  # for rates, which they lack
    return tuple(sorted(called.difference(worker_commands())))


@cache
def _commands_of(role: str) -> frozenset[str]:
    scripts = loader.all_scripts()
    reader = called_in(script for script in scripts if script.name in _READERS) - _WRITES_OF_READERS
    sender = called_in(script for script in scripts if script.name in _SENDERS)
    operator = {*_SENDER, *sender, *_READER, *reader, *_OPERATOR}
    operator |= called_in(script for script in scripts if script.name in _OPERATORS)
    commands: dict[str, set[str]] = {
        "worker": {*_WORKER, *worker_commands(), *metrics_commands()},
        "sender": {*_SENDER, *sender},
        "reader": {*_READER, *reader},
        "doctor": {*_READER, *reader, *_DOCTOR},
        "operator": operator,
        "manager": {*_WORKER, *_SENDER, *_READER, *_OPERATOR, *_MANAGER, *called_in(scripts)},
    }
    return frozenset(commands[role] | set(_CONNECT))


def called_in(scripts: Iterable[Script]) -> set[str]:
    """Return the commands that scripts call."""
    names = (pattern.findall(script.source) for script in scripts for pattern in (_CALLED, _IN_VARIABLE))
    return {name.decode().lower() for group in names for name in group}


def _literal(text: str) -> str:
    """Escape the characters that have a meaning in a pattern; Redis allows no space in one, so ``?`` replaces it."""
    return _SPACE.sub("?", _GLOB.sub(r"\\\1", text))


_MAX_ARGUMENTS: Final = 4


def check_permissions(client: SyncClient, keys: QueueKeys, names: Sequence[str]) -> None:
    """Check whether the client's user may run some commands, without executing any. This needs no permissions.

    Redis checks permissions when a transaction queues a call, and this transaction is discarded. (``ACL DRYRUN`` checks
    the same, but few restricted users may run it.) Each command is queued with zero to four arguments, because Redis
    checks its arity first. If the server rejects transactions, nothing is checked.

    Raises ``BrokerAuthError``, which names the forbidden commands.
    """
    counts = range(_MAX_ARGUMENTS + 1)
    calls: list[Call[object]] = [command(*name.split("|"), *[keys.meta] * count) for name in names for count in counts]
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


def permitted(operation: Operation[T], known: set[str], url: str) -> Operation[T]:
    """Run an operation, but before it runs a script that changes jobs, check that its user may complete the script.

    ``known`` has the hashes of scripts that have been checked, so that each is checked once. Raises
    ``BrokerAuthError``.
    """
    try:
        calls = next(operation)
        while True:
            try:
                for call in calls:
                    if call.script is not None and call.script.sha not in known:
                        yield from _check_script(call, url)
                        known.add(call.script.sha)
                results = yield calls
            except BulltaskError as exc:
                calls = operation.throw(exc)
            else:
                calls = operation.send(results)
    except StopIteration as end:
        returned: T = end.value
        return returned


def _check_script(call: Call[Any], url: str) -> Operation[None]:
    script = call.script
    assert script is not None
    names = script.name.split(":")
    if not call.keys or (_READERS | _SENDERS).issuperset(names):
        return
    needed = sorted(called_in([script]))
    checking = loader.bulltask_script("deniedCommands")
    if denied := (yield from execute(script_call(checking, call.keys[:1], tuple(needed), texts))):
        user = user_of(url)
        roles = [role for role in ("operator", "manager") if _commands_of(role).issuperset(needed)]
        raise BrokerAuthError(
            f"Redis user {user!r} at {url} lacks permission for {', '.join(denied)}, which the script "
            f"{names[0]!r} needs, so nothing was changed. Grant them: ACL SETUSER {user} "
            f"{' '.join(f'+{name}' for name in denied)}, or all permissions of the role: "
            f"bulltask acl {roles[0]} --user {user}"
        )
