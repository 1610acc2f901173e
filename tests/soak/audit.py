"""What became of the jobs."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any

from bulltask.testing.wait import wait_until
from tests.soak.load import Sent
from tests.soak.scene import Scene
from tests.soak.tasks import QUEUES

__all__ = ["Audit", "audit", "runs_again", "wait_for_the_end"]

LISTS = ("wait", "active", "paused")
SETS = ("prioritized", "delayed", "waiting-children", "completed", "failed")
ENDED = ("completed", "failed")
STANDSTILL_S = 45.0
SCHEDULED = "repeat:soak:"
SCHEDULER_S = 15.0  # it runs every second, and the last fault may have lasted some


@dataclass(slots=True)
class Audit:
    """Counts, and the jobs that have a problem.

    Attributes:
        places: acknowledged jobs by where they are in the end: ``completed``, ``failed`` … or ``nowhere``.
        runs: acknowledged jobs by how often they ran.
        malformed: malformed jobs by where they are, by what is wrong with them.
        reasons: why acknowledged jobs failed that should not have.
        problems: what must not be, by what it is.
    """

    places: Counter[str] = field(default_factory=Counter)
    runs: Counter[int] = field(default_factory=Counter)
    malformed: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    reasons: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))


def wait_for_the_end(scene: Scene, timeout: float) -> None:
    """Wait until every acknowledged job has ended, none has for a while, or the time is over."""
    last, since = -1, time.monotonic()
    deadline = since + timeout

    def over() -> bool:
        nonlocal last, since
        left = sum(len(jobs) for place, jobs in _places(scene, scene.ledger.jobs).items() if place not in ENDED)
        if left != last:
            last, since = left, time.monotonic()
        now = time.monotonic()
        scene.pause(0.5)
        return not left or now - since > STANDSTILL_S or now > deadline

    wait_until(over, timeout + STANDSTILL_S, "the end of the jobs")


def audit(scene: Scene) -> Audit:
    """Compare what was acknowledged with what Redis and the journal say."""
    found, jobs = Audit(), scene.ledger.jobs
    ends = _end_events(scene)
    for place, ids in _places(scene, jobs).items():
        found.places[place] += len(ids)
        for job_id in ids:
            found.runs[scene.journal.runs(job_id)] += 1
            _judge(scene, found, job_id, place, ends[job_id])
    malformed = {job_id: Sent(kind, "main", "either") for job_id, kind in scene.malformed.items()}
    for place, ids in _places(scene, malformed).items():
        for job_id in ids:
            found.malformed[malformed[job_id].kind][place] += 1
            if len(ends[job_id]) > 1:
                found.problems[f"a malformed job ended as {ends[job_id]}"].append(f"{malformed[job_id].kind}: {job_id}")
    _judge_scheduler(scene, found)
    return found


def runs_again(scene: Scene) -> list[int]:
    """When acknowledged jobs ran once more than they had to, epoch milliseconds."""
    return [
        at_ms
        for job_id, sent in scene.ledger.jobs.items()
        for at_ms in scene.journal.starts.get(job_id, ())[sent.runs :]
    ]


def _judge(scene: Scene, found: Audit, job_id: str, place: str, ends: list[str]) -> None:
    sent = scene.ledger.jobs[job_id]
    name = f"{sent.kind} {job_id} of {sent.queue}, {scene.journal.runs(job_id)} runs"
    if place not in ENDED:
        found.problems[f"acknowledged, and {place} with the events {ends}"].append(name)
    elif ends != [place]:
        found.problems[f"{place} with the events {ends}"].append(name)
    elif sent.outcome not in {place, "either"}:
        key = scene.keys(sent.queue).job(job_id)
        reason = str(scene.redis.hget(key, "failedReason"))[:160]
        found.reasons[reason] += 1
        found.problems[f"{place}, not {sent.outcome}"].append(f"{name}: {reason}")


def _judge_scheduler(scene: Scene, found: Audit) -> None:
    last_ms = max(
        (at_ms for job_id, runs in scene.journal.starts.items() if SCHEDULED in job_id for at_ms in runs), default=0
    )
    late_s = (scene.stopped_ms - last_ms) / 1000
    if late_s > SCHEDULER_S:
        found.problems["the scheduler stood still"].append(f"{late_s:.1f} s before the end")


def _places(scene: Scene, jobs: dict[str, Sent]) -> dict[str, list[str]]:
    """The ids by the list or set that has them, ``nowhere`` (a hash without a place) or ``gone``."""
    left, found = dict(jobs), defaultdict(list)
    for queue in QUEUES:
        base = scene.keys(queue).base
        contents: dict[str, Any] = {name: scene.redis.lrange(base + name, 0, -1) for name in LISTS}
        contents |= {name: scene.redis.zrange(base + name, 0, -1) for name in SETS}
        for name, ids in contents.items():
            for job_id in ids:
                if job_id in left and left[job_id].queue == queue:
                    del left[job_id]
                    found[name].append(job_id)
    for job_id, sent in left.items():
        there = scene.redis.exists(scene.keys(sent.queue).job(job_id))
        found["nowhere" if there else "gone"].append(job_id)
    return found


def _end_events(scene: Scene) -> dict[str, list[str]]:
    """The events ``completed`` and ``failed`` by job."""
    found: dict[str, list[str]] = defaultdict(list)
    for queue in QUEUES:
        first = "-"
        while True:
            part: Any = scene.redis.xrange(scene.keys(queue).events, first, "+", 10_000)
            if not part:
                break
            for _, fields in part:
                if fields["event"] in ENDED:
                    found[fields["jobId"]].append(fields["event"])
            first = f"({part[-1][0]}"
    return found
