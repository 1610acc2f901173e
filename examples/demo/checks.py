"""Did every job really end as it should? Read from Redis with a plain client, key by key."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import redis
from feed import Heard

from bulltask import AsyncResult

WORDS = {"atm": "tries", "ats": "starts"}  # BullMQ's attemptsMade and attemptsStarted
CHUNK = 1_000


@dataclass(frozen=True)
class Promise:
    """How one job has to end: its result (or the text of its error), its tries, and how often it was started."""

    job: AsyncResult[Any]
    result: Any = None
    error: str | None = None
    tries: int = 1
    starts: int = 1


def audit(url: str, promises: list[Promise]) -> tuple[int, list[str]]:
    """Compare what Redis holds with what was promised; return the number of stalls, and what is wrong."""
    stalls, faults = 0, []
    queues = defaultdict(list)
    for promise in promises:
        queues[promise.job.queue].append(promise)
    with redis.Redis.from_url(url, decode_responses=True) as client:
        for queue, of_queue in queues.items():
            for start in range(0, len(of_queue), CHUNK):
                for promise, held in _read(client, of_queue[start : start + CHUNK]):
                    stalls += int(held["stc"] or 0)
                    faults += [f"job {promise.job.id}: {fault}" for fault in _differences(promise, held)]
            faults += _leftovers(client, queue, len(of_queue))
    return stalls, faults


def audit_events(events: list[Heard], promises: list[Promise]) -> Iterator[str]:
    """Each job was added once and ended once; it was started as often as promised; none has stalled."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for event in events:
        counts[event.job_id][event.what] += 1
    for promise in promises:
        seen, ending = counts.pop(promise.job.id, Counter()), "failed" if promise.error else "completed"
        wanted = {"added": 1, "active": promise.starts, ending: 1, "stalled": 0}
        for what, number in wanted.items():
            if seen[what] != number:
                yield f"job {promise.job.id}: {seen[what]} events {what!r} instead of {number}"
    yield from (f"an unknown job {job_id} appeared in the events" for job_id in counts if job_id)


def _read(client: redis.Redis, promises: list[Promise]) -> Iterator[tuple[Promise, dict[str, Any]]]:
    names = ["returnvalue", "failedReason", "atm", "ats", "stc"]
    with client.pipeline(transaction=False) as pipe:
        for promise in promises:
            base = f"bull:{{{promise.job.queue}}}:"  # BullMQ's keys, as Node and every dashboard see them
            pipe.hmget(base + promise.job.id, names)
            pipe.zscore(base + "completed", promise.job.id)
            pipe.zscore(base + "failed", promise.job.id)
        replies: Any = iter(pipe.execute())
    for promise in promises:
        held = dict(zip(names, next(replies), strict=True))
        yield promise, held | {"completed": next(replies) is not None, "failed": next(replies) is not None}


def _differences(promise: Promise, held: dict[str, Any]) -> Iterator[str]:
    state = "completed" if held["completed"] else "failed" if held["failed"] else "neither completed nor failed"
    wanted = "completed" if promise.error is None else "failed"
    if state != wanted:
        yield f"it is {state} instead of {wanted}: {held['failedReason'] or 'no reason is given'}"
    elif promise.error is not None and held["failedReason"] != promise.error:
        yield f"it failed with {held['failedReason']!r} instead of {promise.error!r}"
    elif promise.error is None and json.loads(held["returnvalue"]) != promise.result:
        yield f"its result is {held['returnvalue']} instead of {json.dumps(promise.result)}"
    for name, number in (("atm", promise.tries), ("ats", promise.starts), ("stc", 0)):
        if int(held[name] or 0) != number:
            yield f"{WORDS.get(name, 'stalls')} are {held[name] or 0} instead of {number}"


def _leftovers(client: redis.Redis, queue: str, jobs: int) -> Iterator[str]:
    """No job of the queue is anywhere but in ``completed`` and ``failed``, and there are no others."""
    base = f"bull:{{{queue}}}:"
    lists = {name: client.llen(base + name) for name in ("wait", "active", "paused")}
    sets = {name: client.zcard(base + name) for name in ("delayed", "prioritized", "completed", "failed")}
    ended: Any = sets.pop("completed"), sets.pop("failed")
    if sum(ended) != jobs:
        yield f"queue {queue}: {sum(ended)} jobs have ended, and {jobs} were sent"
    yield from (f"queue {queue}: {count} jobs are still in {name!r}" for name, count in (lists | sets).items() if count)
