"""Silver told batch by batch is silver told at once: no row differs, wherever the batches were cut."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from bulltask.lake.tables import ATTEMPTS, JOBS, Table
from bulltask.spark.lifecycle import sql as lifecycle_sql
from bulltask.spark.lifecycle.fold import Event
from bulltask.spark.tables.lake_tables import latest
from bulltask.spark.tables.silver import silver_of
from tests.support.job_histories import cut, histories, noise

pytestmark = [pytest.mark.spark, pytest.mark.xdist_group("spark"), pytest.mark.timeout(300)]

TEXT, NUMBER = pa.string(), pa.int64()
COLUMNS = pa.schema({
    "queue": TEXT, "job_id": TEXT, "event_ms": NUMBER, "event_seq": NUMBER, "event": TEXT, "name": TEXT, "prev": TEXT,
    "failed_reason": TEXT,
})  # fmt: skip
NEVER, AT_ONCE = 0, 2**53


class Lake:
    """Silver as batches write it, in memory."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._bronze: list[pa.Table] = []
        self._carry: pa.Table | None = None
        self._attempts: list[pa.Table] = []
        self._jobs: list[pa.Table] = []
        self.looked_up = 0

    def take(self, events: Sequence[Event], give_up_ms: int = NEVER) -> None:
        """Tell a batch."""
        new = pa.Table.from_pylist([asdict(event) for event in events], COLUMNS)
        carry = None if self._carry is None else self._frame(self._carry)
        with silver_of(self._frame(new), carry, self._look_up, give_up_ms) as told:
            self._attempts.append(told.attempts.toArrow())
            self._jobs.append(told.jobs.toArrow())
            self._carry = told.carry.toArrow()
        self._bronze.append(new)

    @property
    def carried(self) -> int:
        return 0 if self._carry is None else self._carry.num_rows

    def attempts(self) -> DataFrame:
        return self._frame(pa.concat_tables(self._attempts))

    def jobs(self) -> DataFrame:
        return self._frame(pa.concat_tables(self._jobs))

    def bronze(self) -> DataFrame:
        return self._frame(pa.concat_tables(self._bronze))

    def _look_up(self, jobs: pa.Table) -> DataFrame | None:
        if not self._bronze:
            return None
        self.looked_up += jobs.num_rows
        return self.bronze().join(self._frame(jobs), ["queue", "job_id"], "left_semi")

    def _frame(self, table: pa.Table) -> DataFrame:
        return self._spark.createDataFrame(table.combine_chunks())


def rows(frame: DataFrame) -> set[tuple[Any, ...]]:
    """A frame's rows, which are few enough to be compared one by one; no two are the same."""
    table = frame.drop("dt").toArrow()
    found = list(zip(*(column.to_pylist() for column in table.columns), strict=True))
    assert len(set(found)) == len(found)
    return set(found)


def assert_same(batchwise: DataFrame, at_once: DataFrame, table: Table) -> int:
    """Assert that the rows that count are those of the batch form; return how many they are."""
    names = [name for name in batchwise.columns if name != "dt"]
    found, expected = rows(latest(batchwise, table).select(names)), rows(at_once.select(names))
    differing = sorted(found ^ expected, key=repr)
    assert differing[:4] == []
    return len(found)


def slices(events: list[Event], pieces: int, dice: random.Random) -> list[list[Event]]:
    """Cut a history at random places, also where nothing is between them."""
    places = sorted(dice.randrange(len(events) + 1) for _ in range(pieces - 1))
    return [events[first:last] for first, last in pairwise([0, *places, len(events)])]


def many(kind: str, number: int, tell: Callable[[int], list[Event]]) -> list[list[Event]]:
    """Histories in queues of their own."""
    return [[replace(event, queue=f"{kind}-{seed}") for event in tell(seed)] for seed in range(number)]


def test_batches_tell_what_all_events_at_once_tell_of_150_random_histories(
    spark: SparkSession, record_property: Callable[[str, object], None]
) -> None:
    dice = random.Random(11)
    told = many("whole", 60, lambda seed: histories(seed, 4))
    told += many("holes", 60, lambda seed: cut(histories(seed, 4), random.Random(seed)))
    told += many("noise", 30, lambda seed: noise(seed, 40))
    lake, pieces = Lake(spark), 6
    batches = zip(*(slices(events, pieces, dice) for events in told), strict=True)
    for batch in batches:
        events = [event for part in batch for event in part]
        lake.take(events, dice.choice([NEVER, max(event.event_ms for event in events) - 700]))
    lake.take([], AT_ONCE)
    assert lake.carried == 0
    counts = {
        "attempts": assert_same(lake.attempts(), lifecycle_sql.attempts(lake.bronze()), ATTEMPTS),
        "jobs": assert_same(lake.jobs(), lifecycle_sql.jobs(lake.bronze()), JOBS),
        "looked_up": lake.looked_up,
    }
    for name, count in counts.items():
        record_property(name, count)
    assert counts["attempts"] > 800
    assert counts["jobs"] > 500
    assert counts["looked_up"] > 100


def story(*steps: str) -> list[Event]:
    """The events of one job: a step is ``event`` or ``event<prev``, 10 ms after the one before."""
    told = []
    for number, step in enumerate(steps):
        event, _, prev = step.partition("<")
        reason = "boom" if event == "failed" else None
        told.append(Event("q", "a", 1_000 + 10 * number, 0, event, prev=prev or None, failed_reason=reason))
    return told


STORY = story(
    "added", "waiting", "active", "waiting<active", "stalled", "active", "failed<active",
    "waiting<failed", "active", "completed<active", "removed<completed", "added", "waiting", "removed<waiting",
)  # fmt: skip


def test_each_ended_attempt_is_written_once_and_a_job_when_it_is_done_wherever_batches_end(spark: SparkSession) -> None:
    lake = Lake(spark)
    for first, last in pairwise([0, 4, 5, 7, 8, 10, 12, len(STORY)]):
        lake.take(STORY[first:last])
    written = lake.attempts().select("life", "attempt", "outcome").collect()
    assert [tuple(row) for row in written] == [
        ("1000-0", 1, "stalled"),
        ("1000-0", 2, "failed"),
        ("1000-0", 3, "completed"),
    ]
    jobs = lake.jobs().select("life", "state", "attempts", "stalls").collect()
    assert [tuple(row) for row in jobs] == [
        ("1000-0", "failed", 2, 1),
        ("1000-0", "completed", 3, 1),
        ("1110-0", "removed", 0, 0),
    ]
    assert lake.carried == 0
    assert lake.looked_up == 1, "the retry by hand"
    assert assert_same(lake.jobs(), lifecycle_sql.jobs(lake.bronze()), JOBS) == 2


def test_a_job_that_is_given_up_is_written_as_it_was_seen_last_and_anew_when_it_comes_up_again(
    spark: SparkSession,
) -> None:
    lake = Lake(spark)
    events = story("added", "waiting", "active", "completed<active")
    lake.take(events[:3])
    assert lake.carried == 3
    lake.take([replace(events[0], job_id="b", event_ms=9_000)], give_up_ms=1_021)
    assert lake.carried == 1
    assert [tuple(row) for row in lake.attempts().select("outcome", "ended_at").collect()] == [("open", None)]
    assert [tuple(row) for row in lake.jobs().select("job_id", "state").collect()] == [("a", "active")]
    lake.take(events[3:])
    assert lake.looked_up == 1
    (attempt,) = latest(lake.attempts(), ATTEMPTS).select("outcome", "run_ms").collect()
    assert tuple(attempt) == ("completed", 10)
    (job,) = latest(lake.jobs(), JOBS).select("state", "total_ms").collect()
    assert tuple(job) == ("completed", 30)


def test_what_happens_to_a_finished_job_that_is_only_removed_needs_no_look_at_its_past(spark: SparkSession) -> None:
    lake = Lake(spark)
    events = story("added", "waiting", "active", "completed<active", "removed<completed")
    lake.take(events[:4])
    lake.take(events[4:])
    assert lake.looked_up == 0
    assert lake.jobs().count() == 1
