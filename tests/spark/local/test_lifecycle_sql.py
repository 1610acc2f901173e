"""The lifecycle derived with Spark SQL equals the fold over events, for histories of every kind."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from bulltask.spark import fold as error_fingerprints
from bulltask.spark import sql as lifecycle_sql
from bulltask.spark.fold import LifecycleEvent, lifecycle
from tests.support.job_histories import REASONS, far_future_histories, histories, random_events, remove_ranges
from tests.support.silver_rows import COLUMNS, assert_same, attempt_row, job_row

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def frame_of(spark: SparkSession, events: list[dict[str, Any]]) -> DataFrame:
    """Create a DataFrame from Arrow, which needs no Python worker."""
    return spark.createDataFrame(pa.Table.from_pylist(events, COLUMNS))


def rows(frame: DataFrame) -> list[tuple[Any, ...]]:
    """Return the rows of a DataFrame, with times in microseconds."""
    times = {name: F.col(name).cast("decimal(20,6)") for name, kind in frame.dtypes if kind == "timestamp"}
    result = []
    for row in frame.withColumns(times).collect():
        values = row.asDict()
        for name in times:
            values[name] = None if values[name] is None else int(values[name] * 1_000_000)
        result.append(tuple(values.values()))
    return result


def assert_sql_is_fold(spark: SparkSession, events: list[LifecycleEvent]) -> tuple[int, int]:
    shuffled = random.Random(0).sample(events, len(events))
    frame = frame_of(spark, [asdict(event) for event in shuffled])
    jobs = lifecycle(events)
    attempts = [attempt_row(attempt) for job in jobs for attempt in job.attempts]
    assert_same(rows(lifecycle_sql.attempts(frame)), attempts)
    assert_same(rows(lifecycle_sql.jobs(frame)), [job_row(job) for job in jobs])
    return len(jobs), len(attempts)


def histories_in_queues(kind: str, generate: Callable[[int], list[LifecycleEvent]]) -> list[LifecycleEvent]:
    """Generate two hundred histories, each in separate queues."""
    return [replace(event, queue=f"{kind}-{seed}-{event.queue}") for seed in range(200) for event in generate(seed)]


def test_sql_and_python_derive_the_same_lifecycle_in_800_random_histories(
    spark: SparkSession, record_property: Callable[[str, object], None]
) -> None:
    whole = histories_in_queues("whole", lambda seed: histories(seed, 4))
    gaps = histories_in_queues("gaps", lambda seed: remove_ranges(histories(seed, 4), random.Random(seed)))
    noise = histories_in_queues("noise", lambda seed: random_events(seed, 40))
    far = histories_in_queues("far", lambda seed: far_future_histories(seed, 2))
    jobs, attempts = assert_sql_is_fold(spark, whole + gaps + noise + far)
    record_property("jobs", jobs)
    record_property("attempts", attempts)
    assert jobs > 2000
    assert attempts > 5000


def test_no_rows_are_derived_from_gap_rows_and_events_without_a_job(spark: SparkSession) -> None:
    kinds = ("drained", "bulltask.gap", "paused", "added")
    frame = frame_of(spark, [{"queue": "q", "event_ms": 1, "event_seq": 0, "event": kind} for kind in kinds])
    assert lifecycle_sql.attempts(frame).count() == 0
    assert lifecycle_sql.jobs(frame).count() == 0


def test_reasons_are_parsed_and_normalized_as_in_python(spark: SparkSession) -> None:
    rng = random.Random(5)
    parts = [
        "a",
        "'",
        '"',
        "\\",
        "\n",
        "\r",
        "é",
        "\U0001f600",
        "0x",
        "17",
        "deadbeef0",
        "-",
        " ",
        "n",
        "\x01",
        "\\ud83d",
    ]
    texts = ["".join(rng.choices(parts, k=rng.randrange(12))) for _ in range(3000)]
    texts += [f'"{text}"' for text in texts] + [json.dumps(text, ensure_ascii=len(text) % 2 == 0) for text in texts]
    texts += [*REASONS, json.dumps('\\"' * 50_000), "'" * 50_000, "f" * 50_000 + "1", "\U0001f600" * 300]
    texts += ["deadbeef1" + "-abcd" * 20_000, "-a" * 50_000]  # Java's stack is small, and so is the patience of users
    frame = spark.createDataFrame(pa.table({"reason": [*texts, None]}))
    plain = lifecycle_sql.plain_reason(F.col("reason"))
    derived = frame.select(
        "reason", plain.alias("plain"), lifecycle_sql.error_fingerprint(F.col("reason")).alias("key")
    ).collect()
    assert len(derived) == len(texts) + 1
    for row in derived:
        assert row.plain == error_fingerprints.plain_reason(row.reason), repr(row.reason)[:200]
        assert row.key == error_fingerprints.error_fingerprint(row.reason), repr(row.reason)[:200]
