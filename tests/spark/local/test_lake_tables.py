"""Spark reads and writes the tables of a lake, without a jar: through the files that Delta's log names."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession

from bulltask.jobs.errors import LakeError, LakeInUseError
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake
from bulltask.lake.tables import COST_DAY, ERRORS_DAY, EVENTS, JOBS, TASK_MINUTE, Table
from bulltask.spark import lake_tables
from bulltask.spark.lake_tables import (
    append,
    check_shared,
    latest,
    read_files,
    read_table,
    replace_days,
    write_files,
)
from bulltask.spark.source.columns import spark_schema
from tests.support.object_store import BUCKET, SECRET, object_store

pytestmark = [pytest.mark.spark, pytest.mark.timeout(300)]

DAYS = (date(2026, 11, 22), date(2026, 11, 23))
AT = datetime(2026, 11, 22, 23, 59, 59, 123456, tzinfo=UTC)


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "a lake with {braces}, * and #?")


def rows_of(spark: SparkSession, table: Table, *rows: dict[str, Any]) -> DataFrame:
    names = spark_schema(table).names
    return spark.createDataFrame([tuple(row.get(name) for name in names) for row in rows], spark_schema(table))


def job(job_id: str, day: date = DAYS[0], **values: Any) -> dict[str, Any]:
    return {"queue": "007", "job_id": job_id, "state": "failed", "as_of": AT, "dt": str(day), **values}


def ids(rows: DataFrame) -> list[str]:
    return sorted(row["job_id"] for row in rows.select("job_id").collect())


def test_a_table_that_does_not_exist_has_columns_and_no_rows(spark: SparkSession, lake: Lake) -> None:
    rows = read_table(spark, lake, JOBS)
    assert rows.schema == spark_schema(JOBS)
    assert rows.collect() == []


def test_of_the_rows_with_one_key_the_latest_is_kept_also_without_an_incarnation(
    spark: SparkSession, lake: Lake
) -> None:
    def state(incarnation: str | None, state: str, second: int) -> dict[str, Any]:
        return job("{1}", incarnation=incarnation, state=state, as_of=AT.replace(second=second))

    jobs = [state(None, "failed", 1), state(None, "completed", 2), state("5-0", "failed", 3)]
    assert append(rows_of(spark, JOBS, *jobs), JOBS, lake) == 3
    kept = {(row["incarnation"], row["state"]) for row in latest(read_table(spark, lake, JOBS), JOBS).collect()}
    assert kept == {(None, "completed"), ("5-0", "failed")}


def example(table: Table) -> dict[str, Any]:
    values: dict[str, Any] = {
        "string": "007 \N{SNOWMAN}", "int": -1, "bigint": 2**62, "double": 0.1, "boolean": False, "timestamp": AT,
        "array<string>": ["b", "a"], "map<int,bigint>": {-1: 2**40, 7: 0}, "decimal(18,6)": Decimal("12.345678"),
    }  # fmt: skip
    return {column.name: values[column.kind] for column in table.columns} | {"dt": str(DAYS[0])}


@pytest.mark.parametrize("table", [EVENTS, JOBS, TASK_MINUTE, ERRORS_DAY, COST_DAY], ids=lambda table: table.full_name)
def test_values_of_every_type_are_read_as_written_by_spark_and_by_arrow(
    spark: SparkSession, lake: Lake, table: Table
) -> None:
    full, empty = example(table), {column.name: None for column in table.columns} | {"dt": str(DAYS[1])}
    assert append(rows_of(spark, table, full, empty), table, lake) == 2
    for rows in (read_table(spark, lake, table), without_spark_reader(spark, lake, table)):
        assert rows.schema == spark_schema(table)
        stored = [row.asDict() for row in rows.orderBy("dt").collect()]
        assert [{**row, **times_in_utc(row)} for row in stored] == [full, empty]
    by_arrow = TableReader(lake).rows(table, DAYS)
    lists = {name: sorted(value.items()) for name, value in full.items() if isinstance(value, dict)}
    assert sorted(by_arrow, key=lambda row: row["dt"]) == [{**full, **lists}, empty]


def times_in_utc(row: dict[str, Any]) -> dict[str, datetime]:
    return {name: value.astimezone(UTC) for name, value in row.items() if isinstance(value, datetime)}


def without_spark_reader(spark: SparkSession, lake: Lake, table: Table, columns: list[str] | None = None) -> DataFrame:
    """Return a table's rows as Spark reads them from an object store."""
    snapshot = lake.open(table)
    assert snapshot is not None
    schema = spark_schema(table) if columns is None else read_table(spark, lake, table, columns=columns).schema
    return lake_tables._read_with_arrow(spark, lake, table, snapshot.files(), schema)


def test_some_days_and_columns_are_read(spark: SparkSession, lake: Lake) -> None:
    append(rows_of(spark, JOBS, job("1"), job("2", DAYS[1])), JOBS, lake)
    assert ids(read_table(spark, lake, JOBS, [DAYS[1]])) == ["2"]
    assert ids(read_table(spark, lake, JOBS, [date(2026, 11, 24)])) == []
    for rows in (
        read_table(spark, lake, JOBS, columns=["dt", "job_id"]),
        without_spark_reader(spark, lake, JOBS, ["dt", "job_id"]),
    ):
        assert sorted(map(tuple, rows.collect())) == [(str(DAYS[0]), "1"), (str(DAYS[1]), "2")]


def test_many_small_files_are_read_beside_large_ones(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        append(rows_of(spark, JOBS, job(f"{number}", failed_reason=f"{number}" * 400 * number)), JOBS, lake)
    sizes = sorted(file.size for file in lake.create(JOBS).files())
    monkeypatch.setattr(lake_tables, "_SMALL_BYTES", sizes[-1])
    monkeypatch.setattr(lake_tables, "_MANY_FILES", 2)
    assert ids(read_table(spark, lake, JOBS)) == ["0", "1", "2"]
    assert ids(read_table(spark, lake, JOBS, columns=["job_id"]).where("job_id > '0'")) == ["1", "2"]


def test_a_dataframe_has_the_rows_of_one_version_of_a_table(spark: SparkSession, lake: Lake) -> None:
    append(rows_of(spark, JOBS, job("1")), JOBS, lake)
    before = read_table(spark, lake, JOBS)
    append(rows_of(spark, JOBS, job("2")), JOBS, lake)
    assert ids(before) == ["1"]
    assert ids(read_table(spark, lake, JOBS)) == ["1", "2"]


def test_nothing_is_committed_without_rows(spark: SparkSession, lake: Lake) -> None:
    assert append(rows_of(spark, JOBS), JOBS, lake) == 0
    assert lake.open(JOBS) is None


def test_files_are_read_before_they_are_committed(spark: SparkSession, lake: Lake) -> None:
    files = write_files(rows_of(spark, JOBS, job("1"), job("2")), JOBS, lake)
    assert ids(read_files(spark, lake, JOBS, files)) == ["1", "2"]
    assert lake.open(JOBS) is None


def test_days_are_replaced_and_rows_that_others_have_added_meanwhile_are_kept(spark: SparkSession, lake: Lake) -> None:
    append(rows_of(spark, JOBS, job("old"), job("other day", DAYS[1])), JOBS, lake)
    since = lake.create(JOBS)
    append(rows_of(spark, JOBS, job("of a batch")), JOBS, lake)
    replace_days(lake, since, write_files(rows_of(spark, JOBS, job("new")), JOBS, lake), [DAYS[0]])
    assert ids(read_table(spark, lake, JOBS)) == ["new", "of a batch", "other day"]


def test_days_that_another_process_has_replaced_meanwhile_are_not_replaced_again(
    spark: SparkSession, lake: Lake
) -> None:
    append(rows_of(spark, JOBS, job("old")), JOBS, lake)
    since = lake.create(JOBS)
    replace_days(lake, since, write_files(rows_of(spark, JOBS, job("first")), JOBS, lake), DAYS)
    with pytest.raises(LakeInUseError, match="another process has changed"):
        replace_days(lake, since, write_files(rows_of(spark, JOBS, job("second")), JOBS, lake), DAYS)
    assert ids(read_table(spark, lake, JOBS)) == ["first"]


def test_files_that_are_not_in_the_drivers_directory_are_not_committed(spark: SparkSession, lake: Lake) -> None:
    [file] = write_files(rows_of(spark, JOBS, job("1")), JOBS, lake)
    missing = replace(file, path=file.path.replace("part-", "elsewhere-"))
    with pytest.raises(LakeError, match="must be the same directory for the driver and for all executors"):
        lake.commit(JOBS, [file, missing])
    assert lake.open(JOBS) is None or not lake.create(JOBS).files()


@pytest.mark.parametrize("finds", ["the driver", "a task", "a task with Arrow"])
def test_a_missing_file_is_one_error_of_one_line(
    spark: SparkSession, lake: Lake, finds: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if finds == "a task with Arrow":
        monkeypatch.setattr(lake_tables, "_MANY_FILES", 1)
    append(rows_of(spark, JOBS, job("1")), JOBS, lake)
    files = lake.create(JOBS).files()
    rows = read_files(spark, lake, JOBS, files)
    Path(lake.location(JOBS), files[0].path).unlink()
    message = rf"cannot find /.*{files[0].path}: .* must be the same directory for the driver"
    with pytest.raises(LakeError, match=message) as caught, check_shared(lake):
        write_files(rows if finds.startswith("a task") else read_files(spark, lake, JOBS, files), JOBS, lake)
    assert "\n" not in str(caught.value)


def test_a_task_writes_a_file_whenever_it_has_collected_enough_rows(
    spark: SparkSession, lake: Lake, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lake_tables, "_FILE_BYTES", 1)
    batches = rows_of(spark, JOBS, *(job(str(number)) for number in range(5))).toArrow().to_batches(max_chunksize=2)
    structs = (batch.to_struct_array() for batch in batches)
    beside: Iterator[Any] = (value for array in lake_tables._write(lake, JOBS, structs) for value in array.to_pylist())
    found = [value for value in beside if value is not None]
    assert len(found) == 1
    assert found[0].count(".parquet") == 3
    assert len(list(Path(lake.root).rglob("*.parquet"))) == 3


def test_an_object_store_is_written_and_read_without_a_jar_and_without_showing_the_credentials(
    spark: SparkSession, capfd: pytest.CaptureFixture[str]
) -> None:
    with object_store() as options:
        lake = Lake(f"s3://{BUCKET}/spark", options)
        assert append(rows_of(spark, JOBS, job("1"), job("2", DAYS[1])), JOBS, lake) == 2
        since = lake.create(JOBS)
        replace_days(lake, since, write_files(rows_of(spark, JOBS, job("3")), JOBS, lake), [DAYS[0]])
        rows = read_table(spark, lake, JOBS)
        assert ids(rows) == ["2", "3"]
        assert ids(read_table(spark, lake, JOBS, [DAYS[1]], ["job_id"])) == ["2"]
        rows.explain("extended")
    assert SECRET not in "".join(capfd.readouterr())
