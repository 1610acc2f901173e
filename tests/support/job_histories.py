"""Random lifecycles of jobs as BullMQ's scripts record them in events, and streams with holes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import replace

from bulltask.spark.lifecycle.fold import MAX_TIME_MS, STATE_AFTER, LifecycleEvent

__all__ = ["Teller", "far_future_histories", "histories", "random_events", "remove_ranges"]

REASONS = [
    "ValueError: bad 'x1'",
    json.dumps("KeyError: 'user_251'"),
    "",
    "timed out\nafter 0x1F s",
    '"',
    "é '\U0001f600'",
]


class Teller:
    """The events of one queue: their order, their ids, and the lifecycles that they record.

    Args:
        queue: its name.
        rng: where chance comes from.
    """

    def __init__(self, queue: str, rng: random.Random) -> None:
        self._queue, self._rng = queue, rng
        self._ms, self._seq = 1_760_000_000_000, 0
        self.events: list[LifecycleEvent] = []

    def tell(self, job_id: str, event: str, *, same_script: bool = False, **fields: str | None) -> None:
        """Write an event, in the same millisecond as the last one or later."""
        step = 0 if same_script else self._rng.choice([0, 0, 1, 7, 300])
        self._ms, self._seq = (self._ms + step, 0) if step else (self._ms, self._seq + 1)
        self.events.append(LifecycleEvent(self._queue, job_id, self._ms, self._seq, event, **fields))

    def life(self, job_id: str) -> Iterator[None]:
        """Yield one incarnation of a job step by step, so that several can be mixed."""
        rng = self._rng
        self._add(job_id)
        yield
        for _ in range(rng.randrange(7)):
            self.tell(job_id, "active", prev="waiting")
            yield
            if rng.random() < 0.2:
                self.tell(job_id, rng.choice(["progress", "duplicated", "deduplicated"]))
            fate = rng.choice(FATES)
            steps = fate(self, job_id)
            next(steps)
            yield
            if fate in FINISHING and rng.random() < 0.7:
                break
            yield from steps
            yield
        if rng.random() < 0.3:
            self.tell(job_id, "removed", prev="completed")

    def _add(self, job_id: str) -> None:
        self.tell(job_id, "added", name=self._rng.choice(["mail", "report"]))
        how = self._rng.choice(["waiting", "waiting", "delayed", "waiting-children"])
        self.tell(job_id, how, same_script=True)
        if how == "delayed":
            if self._rng.random() < 0.3:
                self.tell(job_id, "delayed")  # changeDelay
            self.tell(job_id, "waiting", prev="delayed")
        elif how == "waiting-children":
            self.tell(job_id, "waiting", prev="waiting-children")

    def complete(self, job_id: str) -> Iterator[None]:
        """It is done; some are retried by hand."""
        self.tell(job_id, "completed", prev="active")
        yield
        self.tell(job_id, "waiting", prev="completed")

    def fail(self, job_id: str) -> Iterator[None]:
        """It failed for good; some are retried by hand."""
        self.tell(job_id, "failed", prev="active", failed_reason=self._rng.choice(REASONS))
        self.tell(job_id, "retries-exhausted", same_script=True)
        yield
        self.tell(job_id, "waiting", prev="failed")

    def give_back(self, job_id: str) -> Iterator[None]:
        """A retry without delay, a rate limit, a move of its own, a worker that stops."""
        self.tell(job_id, "waiting", prev="active")
        yield

    def delay(self, job_id: str) -> Iterator[None]:
        """A retry with delay, or a move of its own."""
        self.tell(job_id, "delayed")
        yield
        self.tell(job_id, "waiting", prev="delayed")

    def stall(self, job_id: str) -> Iterator[None]:
        """The worker was lost."""
        self.tell(job_id, "waiting", prev="active")
        self.tell(job_id, "stalled", same_script=True)
        yield

    def wait_for_children(self, job_id: str) -> Iterator[None]:
        """It adds children and waits for them."""
        self.tell(job_id, "waiting-children", prev="active")
        yield
        self.tell(job_id, "waiting", prev="waiting-children")


FINISHING = [Teller.complete, Teller.fail]
FATES = [*FINISHING, Teller.give_back, Teller.delay, Teller.stall, Teller.wait_for_children]


def histories(seed: int, jobs: int) -> list[LifecycleEvent]:
    """Record the lifecycles of so many jobs in one stream; some ids are reused, some lifecycles are cut short."""
    rng = random.Random(seed)
    teller = Teller(f"queue-{seed % 3}", rng)
    waiting = [f"{seed}-{number}" for number in range(jobs)]
    living: dict[str, Iterator[None]] = {}
    while waiting or living:
        if waiting and (not living or rng.random() < 0.3):
            job_id = waiting.pop()
            living[job_id] = teller.life(job_id)
        job_id = rng.choice(list(living))
        if next(living[job_id], teller) is teller or rng.random() < 0.03:
            del living[job_id]
            if rng.random() < 0.2:
                waiting.append(job_id)
    return teller.events


def remove_ranges(events: list[LifecycleEvent], rng: random.Random) -> list[LifecycleEvent]:
    """Take entries away as a reader finds it who was away while the stream was trimmed, up to three times."""
    left = list(events)
    for _ in range(rng.randrange(4)):
        first = rng.randrange(-5, len(left))
        del left[max(first, 0) : first + rng.randrange(1, 12)]
    return left


def random_events(seed: int, length: int) -> list[LifecycleEvent]:
    """Tell of two jobs what no script would: any event in any order."""
    rng = random.Random(seed)
    teller = Teller("random_events", rng)
    for _ in range(length):
        prev = rng.choice([None, "active", "waiting", "delayed", "failed"])
        reason = rng.choice([None, *REASONS])
        name = rng.choice([None, "mail"])
        teller.tell(
            f"{seed}-{rng.randrange(2)}",
            rng.choice([*STATE_AFTER, "progress"]),
            prev=prev,
            failed_reason=reason,
            name=name,
        )
    return teller.events


def far_future_histories(seed: int, jobs: int) -> list[LifecycleEvent]:
    """Histories about the end of the year 9999, or about the last millisecond that a column has room for."""
    events = histories(seed, jobs)
    last = max(event.event_ms for event in events)
    by = 2**63 - 1 - last if seed % 2 else MAX_TIME_MS - (events[0].event_ms + last) // 2
    return [replace(event, event_ms=event.event_ms + by) for event in events]
