"""Combines one of bulltask's scripts with one of BullMQ's, so that Redis runs both atomically.

BullMQ's source is included byte for byte, as the body of a local function. The function's parameters replace the
global variables ``KEYS`` and ``ARGV``. bulltask's script calls that function.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Final

from bulltask.lua.loader import Script, bulltask_script, official_script, sha1

__all__ = [
    "add_once",
    "delay_incompatible",
    "fetching",
    "outcome_scripts",
    "pause_scheduler",
    "release_unstarted",
    "resume_scheduler",
    "retry_failed",
    "with_delay",
    "with_errbacks",
    "with_fields",
    "with_finish",
    "with_guard",
    "with_reset",
    "with_wakeup",
]

_INNER_GUARDS: Final = {"moveToFinished": "retentionGuard", "moveStalledJobsToWait": "stalledGuard"}
"""The guards of BullMQ's scripts that have two; the other one is the outer one."""


@cache
def add_once(name: str, *, deduplicated: bool = False) -> Script:
    """Return ``addOnce`` with one of BullMQ's add scripts, which it calls as ``add(KEYS, ARGV)``.

    With ``deduplicated``, that script has the guard for jobs that have a deduplication id.
    """
    add = with_guard(name, "deduplicationGuard") if deduplicated else official_script(name)
    return _combine(bulltask_script("addOnce"), add, b"add")


@cache
def delay_incompatible() -> Script:
    """Return ``delayIncompatible`` with ``moveToDelayed``, which it calls as ``move(KEYS, ARGV)``."""
    return _combine(bulltask_script("delayIncompatible"), official_script("moveToDelayed"), b"move")


@cache
def fetching(name: str) -> Script:
    """Return one of bulltask's scripts with BullMQ's ``moveToActive`` and its guard, which it calls as ``fetch``."""
    return _combine(bulltask_script(name), with_guard("moveToActive", "promotionGuard"), b"fetch")


@cache
def outcome_scripts() -> Mapping[str, Script]:
    """Return by their hashes the scripts that write the outcomes of prefetched jobs.

    If a child dies before it has written an outcome, its supervisor has the call in packed form, with the script's
    hash. A server that has been started or promoted since may not have the script.
    """
    requested = [*map(official_script, ("moveToDelayed", "moveJobFromActiveToWait", "moveToWaitingChildren"))]
    moves = [
        *requested,
        *map(with_fields, requested),
        delay_incompatible(),
        with_guard("retryJob", "promotionGuard"),
    ]
    failures = [
        with_guard("moveToFinished", "promotionGuard"),
        with_finish("finishFanOut"),
        with_finish("failMalformed"),
        with_finish("failMalformed", fan_out=True),
    ]
    moves += [*failures, *map(with_errbacks, failures)]
    moves += [with_finish("finishRevoked"), with_finish("finishRevoked", fan_out=True)]
    return {script.sha: script for move in moves for script in (move, with_wakeup(move))}


@cache
def pause_scheduler() -> Script:
    """Return ``pauseScheduler`` with ``removeJobScheduler``, which it calls as ``remove(KEYS, ARGV)``."""
    return _combine(bulltask_script("pauseScheduler"), official_script("removeJobScheduler"), b"remove")


@cache
def release_unstarted() -> Script:
    """Return ``releaseUnstarted`` with ``moveJobFromActiveToWait``, which it calls as ``release(KEYS, ARGV)``."""
    return _combine(bulltask_script("releaseUnstarted"), official_script("moveJobFromActiveToWait"), b"release")


@cache
def resume_scheduler() -> Script:
    """Return ``resumeScheduler`` with ``addJobScheduler``, which it calls as ``add(KEYS, ARGV)``."""
    return _combine(bulltask_script("resumeScheduler"), official_script("addJobScheduler"), b"add")


@cache
def with_delay(name: str) -> Script:
    """Return one of bulltask's scripts with BullMQ's ``moveToDelayed``, which it calls as ``delay(KEYS, ARGV)``."""
    return _combine(bulltask_script(name), official_script("moveToDelayed"), b"delay")


@cache
def with_finish(name: str, *, fan_out: bool = False) -> Script:
    """Return one of bulltask's scripts with BullMQ's ``moveToFinished``, which it calls as ``finish(KEYS, ARGV)``.

    With ``fan_out``, it calls ``finishFanOut`` instead, which also handles the dependents of a fan-out job.
    """
    finish = with_finish("finishFanOut") if fan_out else with_guard("moveToFinished", "retentionGuard")
    return _combine(bulltask_script(name), finish, b"finish")


@cache
def with_errbacks(finish: Script) -> Script:
    """Return ``finishWithErrbacks`` with a script that fails a job, and the scripts that add a job without a parent.

    It calls them as ``finish``, ``add_standard``, ``add_delayed`` and ``add_prioritized``, each with ``(KEYS, ARGV)``.
    """
    script = _combine(bulltask_script("finishWithErrbacks"), finish, b"finish")
    for kind in ("Standard", "Delayed", "Prioritized"):
        add = replace(official_script(f"add{kind}Job"), key_count=0)
        script = _combine(script, add, f"add_{kind.lower()}".encode())
    return script


@cache
def with_guard(name: str, guard: str) -> Script:
    """Return one of BullMQ's scripts with a guard, which handles malformed jobs or limits what one call does.

    The guard is one of bulltask's scripts, and calls BullMQ's as ``official(KEYS, ARGV)``. The combined script keeps
    BullMQ's name.
    """
    inner = _INNER_GUARDS.get(name, guard)
    official = official_script(name) if inner == guard else with_guard(name, inner)
    return replace(_combine(bulltask_script(guard), official, b"official"), name=name)


@cache
def retry_failed() -> Script:
    """Return ``retryFailed`` with BullMQ's ``moveJobsToWait``, which it calls as ``retry(KEYS, ARGV)``."""
    return _combine(bulltask_script("retryFailed"), official_script("moveJobsToWait"), b"retry")


@cache
def with_reset(script: Script) -> Script:
    """Return ``resetAttempts`` with a script that retries a finished job, which it calls as ``retry(KEYS, ARGV)``."""
    return _combine(bulltask_script("resetAttempts"), script, b"retry")


@cache
def with_wakeup(script: Script) -> Script:
    """Return ``wakeNext`` with a script that moves a job out of ``active``, which it calls as ``move(KEYS, ARGV)``."""
    return _combine(bulltask_script("wakeNext"), script, b"move")


@cache
def with_fields(script: Script) -> Script:
    """Return ``moveWithFields`` with a script that moves a job, which it calls as ``move(KEYS, ARGV)``."""
    return _combine(bulltask_script("moveWithFields"), script, b"move")


def _combine(outer: Script, inner: Script, function: bytes) -> Script:
    source = b"local function " + function + b"(KEYS, ARGV)\n" + inner.source + b"\nend\n" + outer.source
    return Script(f"{outer.name}:{inner.name}", outer.key_count + inner.key_count, source, sha1(source))
