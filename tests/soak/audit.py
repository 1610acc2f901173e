"""Check the final states of the jobs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from bulltask.testing.worker import wait_until
from tests.soak.environment import SoakEnvironment
from tests.soak.load import Sent
from tests.soak.tasks import QUEUES

__all__ = ["Audit", "audit", "repeated_attempts", "wait_for_outcomes"]

LISTS = ("wait", "active", "paused")
SETS = ("prioritized", "delayed", "waiting-children", "completed", "failed")
ENDED = ("completed", "failed")
NO_PROGRESS_S = 45.0
SCHEDULED = "repeat:soak:"
SCHEDULER_S = 15.0  # it runs every second, and the last fault may have taken several seconds


@dataclass(slots=True)
class Audit:
    """Counts of jobs, and problems.

    Attributes:
        states: Acknowledged jobs by final state: ``completed``, ``failed`` … or ``nowhere``.
        attempts: Acknowledged jobs by number of attempts.
        malformed: Malformed jobs by state, by their defect.
        reasons: Reasons of unexpected failures of acknowledged jobs.
        problems: The jobs and other details of each problem, by its description.
    """

    states: Counter[str] = field(default_factory=Counter)
    attempts: Counter[int] = field(default_factory=Counter)
    malformed: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def wait_for_outcomes(env: SoakEnvironment, timeout: float) -> None:
    """Wait until every acknowledged job has finished, none has finished for a while, or time is up."""
    last, since = -1, time.monotonic()
    deadline = since + timeout

    def finished() -> bool:
        nonlocal last, since
        left = sum(len(jobs) for state, jobs in _by_state(env, env.acknowledged.jobs).items() if state not in ENDED)
        if left != last:
            last, since = left, time.monotonic()
        now = time.monotonic()
        env.pause(0.5)
        return not left or now - since > NO_PROGRESS_S or now > deadline

    wait_until(finished, timeout + NO_PROGRESS_S, "the outcomes of the jobs")


def audit(env: SoakEnvironment) -> Audit:
    """Compare the acknowledged jobs with Redis and the journal."""
    result, jobs = Audit(), env.acknowledged.jobs
    ends = _end_events(env)
    for state, ids in _by_state(env, jobs).items():
        result.states[state] += len(ids)
        for job_id in ids:
            result.attempts[env.journal.attempts(job_id)] += 1
            _check_job(env, result, job_id, state, ends[job_id])
    malformed = {job_id: Sent(kind, "main", "either") for job_id, kind in env.malformed.items()}
    for state, ids in _by_state(env, malformed).items():
        for job_id in ids:
            result.malformed[malformed[job_id].kind][state] += 1
            if len(ends[job_id]) > 1:
                result.problems[f"a malformed job has the events {ends[job_id]}"].append(
                    f"{malformed[job_id].kind}: {job_id}"
                )
    _check_scheduler(env, result)
    return result


def repeated_attempts(env: SoakEnvironment) -> list[int]:
    """Return the times of attempts of acknowledged jobs beyond the expected number, in epoch milliseconds."""
    return [
        at_ms
        for job_id, sent in env.acknowledged.jobs.items()
        for at_ms in env.journal.starts.get(job_id, ())[sent.attempts :]
    ]


def _check_job(env: SoakEnvironment, result: Audit, job_id: str, state: str, ends: list[str]) -> None:
    sent = env.acknowledged.jobs[job_id]
    name = f"{sent.kind} {job_id} of {sent.queue}, {env.journal.attempts(job_id)} attempts"
    if state not in ENDED:
        result.problems[f"acknowledged, and {state} with the events {ends}"].append(name)
    elif ends != [state]:
        result.problems[f"{state} with the events {ends}"].append(name)
    elif sent.outcome not in {state, "either"}:
        key = env.keys(sent.queue).job(job_id)
        reason = str(env.redis.hget(key, "failedReason"))[:160]
        result.reasons[reason] += 1
        result.problems[f"{state}, not {sent.outcome}"].append(f"{name}: {reason}")


def _check_scheduler(env: SoakEnvironment, result: Audit) -> None:
    last_ms = max(
        (at_ms for job_id, starts in env.journal.starts.items() if SCHEDULED in job_id for at_ms in starts), default=0
    )
    late_s = (env.stopped_ms - last_ms) / 1000
    if late_s > SCHEDULER_S:
        result.problems["the scheduler stopped"].append(f"{late_s:.1f} s before the end")


def _by_state(env: SoakEnvironment, jobs: dict[str, Sent]) -> dict[str, list[str]]:
    """Return the ids by the list or set that contains them, ``nowhere`` (only a hash) or ``removed``."""
    left, result = dict(jobs), defaultdict(list)
    for queue in QUEUES:
        base = env.keys(queue).base
        contents: dict[str, Any] = {name: env.redis.lrange(base + name, 0, -1) for name in LISTS}
        contents |= {name: env.redis.zrange(base + name, 0, -1) for name in SETS}
        for name, ids in contents.items():
            for job_id in ids:
                if job_id in left and left[job_id].queue == queue:
                    del left[job_id]
                    result[name].append(job_id)
    for job_id, sent in left.items():
        exists = env.redis.exists(env.keys(sent.queue).job(job_id))
        result["nowhere" if exists else "removed"].append(job_id)
    return result


def _end_events(env: SoakEnvironment) -> dict[str, list[str]]:
    """Return the events ``completed`` and ``failed`` by job."""
    result: dict[str, list[str]] = defaultdict(list)
    for queue in QUEUES:
        first = "-"
        while True:
            part: Any = env.redis.xrange(env.keys(queue).events, first, "+", 10_000)
            if not part:
                break
            for _, fields in part:
                if fields["event"] in ENDED:
                    result[fields["jobId"]].append(fields["event"])
            first = f"({part[-1][0]}"
    return result
