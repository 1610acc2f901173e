"""Spark reads the rows of a lake with their types, and the latest row of each key."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from bulltask.lake.storage import Layout, partition_name
from bulltask.lake.tables import JOBS
from bulltask.spark.lake_tables import as_table, latest, read_table, spark_schema

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]


def test_a_table_without_files_has_columns_and_no_rows(spark: SparkSession, tmp_path: Path) -> None:
    rows = read_table(spark, Layout(tmp_path), JOBS)
    assert rows.schema == spark_schema(JOBS)
    assert rows.collect() == []


def test_rows_are_read_as_written_with_the_latest_row_per_key(spark: SparkSession, tmp_path: Path) -> None:
    layout = Layout(tmp_path)

    def job(incarnation: str | None, state: str, second: int) -> dict[str, object]:
        names = {column.name: None for column in JOBS.columns}
        as_of = datetime(2026, 11, 22, 0, 0, second, tzinfo=UTC)
        keys = {
            "dt": "2026-11-22",
            "queue": "007",
            "ingest_id": f"a-{second}",
            "job_id": "{1}",
            "incarnation": incarnation,
        }
        return names | keys | {"state": state, "as_of": as_of, "attempt_count": 1}

    jobs = [job(None, "failed", 1), job(None, "completed", 2), job("5-0", "failed", 3)]
    frame = as_table(spark.createDataFrame(jobs, spark_schema(JOBS)), JOBS)
    frame.write.partitionBy(*JOBS.partitions).mode("append").parquet(str(layout.table(JOBS)))
    rows = read_table(spark, layout, JOBS)
    assert rows.schema.fieldNames() == spark_schema(JOBS).fieldNames()
    assert {row["queue"] for row in rows.collect()} == {"007"}
    kept = {(row["incarnation"], row["state"]) for row in latest(rows, JOBS).collect()}
    assert kept == {(None, "completed"), ("5-0", "failed")}


def test_arrow_and_spark_use_the_same_partition_directories(spark: SparkSession, tmp_path: Path) -> None:
    queues = [*(f"a{chr(code)}b" for code in range(1, 256)), "é \U0001f600"]
    frame = spark.createDataFrame([(queue, 1) for queue in queues], "queue string, one int")
    frame.coalesce(1).write.partitionBy("queue").parquet(str(tmp_path / "rows"))
    names = {path.name for path in (tmp_path / "rows").iterdir() if path.is_dir()}
    assert names == {partition_name("queue", queue) for queue in queues}
