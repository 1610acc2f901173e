"""Silver tables in memory, written batch by batch, and histories split into batches."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise

import pyarrow as pa

from bulltask.lake.reader import latest_rows
from bulltask.lake.tables import ATTEMPTS, JOBS
from bulltask.spark.lifecycle import derive_silver
from tests.support.lifecycle_oracle import LifecycleEvent
from tests.support.silver_rows import events_table

__all__ = ["IMMEDIATELY", "NEVER", "BatchLake", "histories_in_queues", "split_randomly"]

NEVER, IMMEDIATELY = 0, 2**53


class BatchLake:
    """The tables that batches have written so far.

    Attributes:
        bronze, attempts, jobs: All rows that were written.
        open_events: The events of open jobs after the last batch.
        looked_up: The number of jobs whose earlier events were looked up.
    """

    def __init__(self) -> None:
        self.bronze = events_table([])
        self.attempts: pa.Table | None = None
        self.jobs: pa.Table | None = None
        self.open_events: pa.Table | None = None
        self.looked_up = 0

    def add_batch(self, events: Sequence[LifecycleEvent], time_out_before_ms: int = NEVER) -> None:
        """Add a batch of events."""
        new = events_table(events)
        derived = derive_silver(new, self.open_events, self._look_up, time_out_before_ms)
        self.attempts = (
            derived.attempts if self.attempts is None else pa.concat_tables([self.attempts, derived.attempts])
        )
        self.jobs = derived.jobs if self.jobs is None else pa.concat_tables([self.jobs, derived.jobs])
        self.open_events, self.bronze = derived.open_events, pa.concat_tables([self.bronze, new])

    @property
    def open_event_count(self) -> int:
        return 0 if self.open_events is None else self.open_events.num_rows

    def latest_attempts(self) -> pa.Table:
        """Return the latest row of each attempt."""
        return latest_rows(self.attempts, ATTEMPTS)

    def latest_jobs(self) -> pa.Table:
        return latest_rows(self.jobs, JOBS)

    def _look_up(self, jobs: pa.Table) -> pa.Table | None:
        self.looked_up += jobs.num_rows
        earlier = self.bronze.join(jobs, ["queue", "job_id"], join_type="left semi")
        return earlier if earlier.num_rows else None


def split_randomly(events: list[LifecycleEvent], pieces: int, rng: random.Random) -> list[list[LifecycleEvent]]:
    """Split a history at random positions; pieces may be empty."""
    positions = sorted(rng.randrange(len(events) + 1) for _ in range(pieces - 1))
    return [events[first:last] for first, last in pairwise([0, *positions, len(events)])]


def histories_in_queues(
    kind: str, number: int, history: Callable[[int], list[LifecycleEvent]]
) -> list[list[LifecycleEvent]]:
    """Return histories, each in a separate queue."""
    return [[replace(event, queue=f"{kind}-{seed}") for event in history(seed)] for seed in range(number)]
