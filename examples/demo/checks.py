"""Check the outcome of every job in Redis, with a plain client."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis
from feed import Entry

from bulltask import AsyncResult

LABELS = {"atm": "attempts made", "ats": "attempts started"}  # BullMQ's attemptsMade and attemptsStarted
CHUNK = 1_000


@dataclass(frozen=True)
class Expectation:
    """The expected outcome of one job: its result or error message, attempts made, and attempts started."""

    job: AsyncResult[Any]
    result: Any = None
    error: str | None = None
    attempts_made: int = 1
    attempts_started: int = 1


def audit(url: str, expectations: list[Expectation]) -> tuple[int, list[str]]:
    """Compare the jobs in Redis with the expectations; return the number of stalls and the problems."""
    stalls, problems = 0, []
    queues = defaultdict(list)
    for expectation in expectations:
        queues[expectation.job.queue].append(expectation)
    with redis.Redis.from_url(url, decode_responses=True) as client:
        for queue, expected in queues.items():
            for start in range(0, len(expected), CHUNK):
                for expectation, stored in _read(client, expected[start : start + CHUNK]):
                    stalls += int(stored["stc"] or 0)
                    problems += [
                        f"job {expectation.job.id}: {problem}" for problem in _differences(expectation, stored)
                    ]
            problems += _leftovers(client, queue, len(expected))
    return stalls, problems


def audit_events(events: list[Entry], expectations: list[Expectation]) -> Iterator[str]:
    """Check that each job was added once, finished once, started as often as expected, and did not stall."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        counts[event.job_id][event.name] += 1
    for expectation in expectations:
        seen, ending = counts.pop(expectation.job.id, Counter()), "failed" if expectation.error else "completed"
        wanted = {"added": 1, "active": expectation.attempts_started, ending: 1, "stalled": 0}
        for name, number in wanted.items():
            if seen[name] != number:
                yield f"job {expectation.job.id}: {seen[name]} events {name!r} instead of {number}"
    yield from (f"an unknown job {job_id} appeared in the events" for job_id in counts if job_id)


def _read(client: redis.Redis, expectations: list[Expectation]) -> Iterator[tuple[Expectation, dict[str, Any]]]:
    names = ["returnvalue", "failedReason", "atm", "ats", "stc"]
    with client.pipeline(transaction=False) as pipe:
        for expectation in expectations:
            base = f"bull:{{{expectation.job.queue}}}:"  # BullMQ's keys
            pipe.hmget(base + expectation.job.id, names)
            pipe.zscore(base + "completed", expectation.job.id)
            pipe.zscore(base + "failed", expectation.job.id)
        replies: Any = iter(pipe.execute())
    for expectation in expectations:
        stored = dict(zip(names, next(replies), strict=True))
        yield expectation, stored | {"completed": next(replies) is not None, "failed": next(replies) is not None}


def _differences(expectation: Expectation, stored: dict[str, Any]) -> Iterator[str]:
    state = "completed" if stored["completed"] else "failed" if stored["failed"] else "neither completed nor failed"
    wanted = "completed" if expectation.error is None else "failed"
    if state != wanted:
        yield f"it is {state} instead of {wanted}: {stored['failedReason'] or 'no reason'}"
    elif expectation.error is not None and stored["failedReason"] != expectation.error:
        yield f"it failed with {stored['failedReason']!r} instead of {expectation.error!r}"
    elif expectation.error is None and json.loads(stored["returnvalue"]) != expectation.result:
        yield f"its result is {stored['returnvalue']} instead of {json.dumps(expectation.result)}"
    for name, number in (("atm", expectation.attempts_made), ("ats", expectation.attempts_started), ("stc", 0)):
        if int(stored[name] or 0) != number:
            yield f"{LABELS.get(name, 'stalls')}: {stored[name] or 0} instead of {number}"


def _leftovers(client: redis.Redis, queue: str, jobs: int) -> Iterator[str]:
    """Check that all jobs of the queue are in ``completed`` or ``failed``, and that there are no other jobs."""
    base = f"bull:{{{queue}}}:"
    lists = {name: client.llen(base + name) for name in ("wait", "active", "paused")}
    sets = {name: client.zcard(base + name) for name in ("delayed", "prioritized", "completed", "failed")}
    finished: Any = sets.pop("completed"), sets.pop("failed")
    if sum(finished) != jobs:
        yield f"queue {queue}: {sum(finished)} jobs have finished, but {jobs} were sent"
    yield from (f"queue {queue}: {count} jobs are still in {name!r}" for name, count in (lists | sets).items() if count)
