"""The Arrow schema of each table equals the one that Spark derives; a read may select columns."""

from __future__ import annotations

import pyarrow as pa
import pytest
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import LongType, StringType, StructField, StructType

from bulltask.errors import ConfigError
from bulltask.spark.source.columns import EVENT_FIELDS, JOB_FIELDS, TABLES, arrow_schema, select_columns


@pytest.mark.parametrize("table", TABLES)
def test_the_arrow_schema_equals_the_one_that_spark_derives(table: str) -> None:
    assert arrow_schema(TABLES[table]).equals(to_arrow_schema(TABLES[table], timezone="UTC"))


def test_times_are_microseconds_in_utc() -> None:
    assert arrow_schema(TABLES["events"]).field("event_at").type == pa.timestamp("us", tz="UTC")


@pytest.mark.parametrize("table", TABLES)
def test_the_first_column_of_every_table_is_the_queue(table: str) -> None:
    assert TABLES[table].fieldNames()[0] == "queue"


def test_every_column_has_a_source() -> None:
    assert ["queue", "state", "id", *JOB_FIELDS] == TABLES["jobs"].fieldNames()
    computed = ["queue", "event_id", "event_ms", "event_seq", "event_at"]
    assert [*computed, *EVENT_FIELDS, "extra"] == TABLES["events"].fieldNames()


@pytest.mark.parametrize("table", TABLES)
def test_all_columns_are_read_without_a_schema(table: str) -> None:
    assert select_columns(table, None) == TABLES[table]


def test_a_user_schema_selects_columns_and_their_order() -> None:
    schema = StructType([StructField("id", StringType(), nullable=False), StructField("delay_ms", LongType())])
    selected = select_columns("jobs", schema)
    assert selected.fieldNames() == ["id", "delay_ms"]
    assert arrow_schema(selected).equals(to_arrow_schema(selected, timezone="UTC"))


def test_an_unknown_column_is_rejected_with_a_suggestion() -> None:
    with pytest.raises(
        ConfigError, match=r"\[BULLTASK_SCHEMA\] table jobs has no column 'job_name'; did you mean 'name'"
    ):
        select_columns("jobs", StructType([StructField("job_name", StringType())]))


def test_a_column_of_another_type_is_rejected() -> None:
    with pytest.raises(ConfigError, match=r"column event_ms of events is of type bigint, not string"):
        select_columns("events", StructType([StructField("event_ms", StringType())]))


def test_a_schema_without_columns_is_rejected() -> None:
    with pytest.raises(ConfigError, match="schema has no columns"):
        select_columns("counts", StructType([]))
