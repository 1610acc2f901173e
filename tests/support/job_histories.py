"""Random job lifecycles, recorded as events like those that BullMQ's scripts write, and streams with gaps."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

from bulltask.lake.tables import MAX_TIME_MS
from bulltask.spark.lifecycle import STATE_AFTER
from tests.support.lifecycle_oracle import LifecycleEvent

__all__ = ["HistoryWriter", "far_future_histories", "histories", "random_events", "remove_ranges"]

REASONS = [
    "ValueError: bad 'x1'",
    json.dumps("KeyError: 'user_251'"),
    "",
    "timed out\nafter 0x1F s",
    '"',
    "é '\U0001f600'",
]


class HistoryWriter:
    """Writes the events of one queue in order, with their ids.

    Args:
        queue: The name of the queue.
        rng: The source of randomness.
    """

    def __init__(self, queue: str, rng: random.Random) -> None:
        self._queue, self._rng = queue, rng
        self._ms, self._seq = 1_760_000_000_000, 0
        self.events: list[LifecycleEvent] = []

    def write(self, job_id: str, event: str, *, same_script: bool = False, **fields: str | None) -> None:
        """Write an event in the same millisecond as the last event, or later."""
        step = 0 if same_script else self._rng.choice([0, 0, 1, 7, 300])
        self._ms, self._seq = (self._ms + step, 0) if step else (self._ms, self._seq + 1)
        self.events.append(LifecycleEvent(self._queue, job_id, self._ms, self._seq, event, **fields))

    def incarnation(self, job_id: str) -> Iterator[None]:
        """Write one incarnation of a job step by step, so that several jobs can be interleaved."""
        rng = self._rng
        self._add(job_id)
        yield
        for _ in range(rng.randrange(7)):
            self.write(job_id, "active", prev="waiting")
            yield
            if rng.random() < 0.2:
                self.write(job_id, rng.choice(["progress", "duplicated", "deduplicated"]))
            outcome = rng.choice(OUTCOMES)
            steps = outcome(self, job_id)
            next(steps)
            yield
            if outcome in FINISHING and rng.random() < 0.7:
                break
            yield from steps
            yield
        if rng.random() < 0.3:
            self.write(job_id, "removed", prev="completed")

    def _add(self, job_id: str) -> None:
        self.write(job_id, "added", name=self._rng.choice(["mail", "report"]))
        state = self._rng.choice(["waiting", "waiting", "delayed", "waiting-children"])
        self.write(job_id, state, same_script=True)
        if state == "delayed":
            if self._rng.random() < 0.3:
                self.write(job_id, "delayed")  # changeDelay
            self.write(job_id, "waiting", prev="delayed")
        elif state == "waiting-children":
            self.write(job_id, "waiting", prev="waiting-children")

    def complete(self, job_id: str) -> Iterator[None]:
        """Complete the job; on the second step it is retried manually."""
        self.write(job_id, "completed", prev="active")
        yield
        self.write(job_id, "waiting", prev="completed")

    def fail(self, job_id: str) -> Iterator[None]:
        """Fail the job without a retry; on the second step it is retried manually."""
        self.write(job_id, "failed", prev="active", failed_reason=self._rng.choice(REASONS))
        self.write(job_id, "retries-exhausted", same_script=True)
        yield
        self.write(job_id, "waiting", prev="failed")

    def requeue(self, job_id: str) -> Iterator[None]:
        """Move the job to wait: a retry without delay, or a release after its start."""
        self.write(job_id, "waiting", prev="active")
        yield

    def release(self, job_id: str) -> Iterator[None]:
        """Release the job before its start."""
        self.write(job_id, "released")
        self.write(job_id, "waiting", same_script=True, prev="active")
        yield

    def throttle(self, job_id: str) -> Iterator[None]:
        """Release the job before its start, because of its task's rate limit."""
        self.write(job_id, "released")
        self.write(job_id, "delayed", same_script=True)
        yield
        self.write(job_id, "waiting", prev="delayed")

    def delay(self, job_id: str) -> Iterator[None]:
        """Delay the job: a retry with a delay, or a reschedule by the task."""
        self.write(job_id, "delayed")
        yield
        self.write(job_id, "waiting", prev="delayed")

    def stall(self, job_id: str) -> Iterator[None]:
        """Let the job stall, as if its worker had died."""
        self.write(job_id, "waiting", prev="active")
        self.write(job_id, "stalled", same_script=True)
        yield

    def wait_for_children(self, job_id: str) -> Iterator[None]:
        """Let the job wait for child jobs."""
        self.write(job_id, "waiting-children", prev="active")
        yield
        self.write(job_id, "waiting", prev="waiting-children")


FINISHING = [HistoryWriter.complete, HistoryWriter.fail]
OUTCOMES = [
    *FINISHING,
    HistoryWriter.requeue,
    HistoryWriter.release,
    HistoryWriter.throttle,
    HistoryWriter.delay,
    HistoryWriter.stall,
    HistoryWriter.wait_for_children,
]


def histories(seed: int, jobs: int) -> list[LifecycleEvent]:
    """Record the lifecycles of ``jobs`` jobs in one stream; some ids are reused, some lifecycles end early."""
    rng = random.Random(seed)
    writer = HistoryWriter(f"queue-{seed % 3}", rng)
    waiting = [f"{seed}-{number}" for number in range(jobs)]
    running: dict[str, Iterator[None]] = {}
    while waiting or running:
        if waiting and (not running or rng.random() < 0.3):
            job_id = waiting.pop()
            running[job_id] = writer.incarnation(job_id)
        job_id = rng.choice(list(running))
        if next(running[job_id], writer) is writer or rng.random() < 0.03:
            del running[job_id]
            if rng.random() < 0.2:
                waiting.append(job_id)
    return writer.events


def remove_ranges(events: list[LifecycleEvent], rng: random.Random) -> list[LifecycleEvent]:
    """Remove up to three ranges of events, as if the stream was trimmed while the reader was offline."""
    left = list(events)
    for _ in range(rng.randrange(4)):
        first = rng.randrange(-5, len(left))
        del left[max(first, 0) : first + rng.randrange(1, 12)]
    return left


def random_events(seed: int, length: int) -> list[LifecycleEvent]:
    """Write random events of two jobs in any order, which BullMQ's scripts would not write."""
    rng = random.Random(seed)
    writer = HistoryWriter("random_events", rng)
    for _ in range(length):
        prev = rng.choice([None, "active", "waiting", "delayed", "failed"])
        reason = rng.choice([None, *REASONS])
        name = rng.choice([None, "mail"])
        writer.write(
            f"{seed}-{rng.randrange(2)}",
            rng.choice([*STATE_AFTER, "progress"]),
            prev=prev,
            failed_reason=reason,
            name=name,
        )
    return writer.events


def far_future_histories(seed: int, jobs: int) -> list[LifecycleEvent]:
    """Return histories around the end of the year 9999, or at the last millisecond that a column can hold."""
    events = histories(seed, jobs)
    last = max(event.event_ms for event in events)
    shift_ms = 2**63 - 1 - last if seed % 2 else MAX_TIME_MS - (events[0].event_ms + last) // 2
    return [replace(event, event_ms=event.event_ms + shift_ms) for event in events]
