"""The columns of the tables that Spark reads, with their types in Spark and in Arrow.

The schemas are objects, because only a running JVM can parse DDL strings. Times are in UTC. Strings are as stored in
Redis.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import DataType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from bulltask.jobs.errors import ConfigError, did_you_mean

__all__ = [
    "COUNTS",
    "EVENTS",
    "EVENT_FIELDS",
    "GAP_EVENT",
    "JOBS",
    "JOB_FIELDS",
    "TABLES",
    "arrow_schema",
    "select_columns",
]

GAP_EVENT: Final = "bulltask.gap"
"""The event in a row that represents lost events.

``extra`` has ``lost``, ``first_id_after``, ``exact`` and ``loss_reason``.
"""

_TEXT, _INT, _LONG, _TIME = StringType(), IntegerType(), LongType(), TimestampType()


def _columns(*rows: tuple[str, DataType]) -> StructType:
    return StructType([StructField(name, kind) for name, kind in rows])


JOBS: Final = _columns(
    ("queue", _TEXT),
    ("state", _TEXT),
    ("id", _TEXT),
    ("name", _TEXT),
    ("data", _TEXT),  # JSON
    ("opts", _TEXT),  # JSON
    ("created_at", _TIME),
    ("delay_ms", _LONG),
    ("priority", _INT),
    ("processed_at", _TIME),
    ("finished_at", _TIME),
    ("attempts_made", _INT),
    ("attempts_started", _INT),
    ("stalled_count", _INT),
    ("return_value", _TEXT),  # JSON
    ("failed_reason", _TEXT),
    ("stacktrace", _TEXT),  # JSON: a list of strings
    ("parent_key", _TEXT),
    ("worker", _TEXT),
)
"""One row for each job. Times are by the clocks of the clients that wrote the job's hash."""

JOB_FIELDS: Final[Mapping[str, str]] = {
    "name": "name",
    "data": "data",
    "opts": "opts",
    "created_at": "timestamp",
    "delay_ms": "delay",
    "priority": "priority",
    "processed_at": "processedOn",
    "finished_at": "finishedOn",
    "attempts_made": "atm",
    "attempts_started": "ats",
    "stalled_count": "stc",
    "return_value": "returnvalue",
    "failed_reason": "failedReason",
    "stacktrace": "stacktrace",
    "parent_key": "parentKey",
    "worker": "pb",
}
"""The hash field of each column except the first three."""

EVENTS: Final = _columns(
    ("queue", _TEXT),
    ("event_id", _TEXT),
    ("event_ms", _LONG),
    ("event_seq", _LONG),
    ("event_at", _TIME),
    ("event", _TEXT),
    ("job_id", _TEXT),
    ("name", _TEXT),
    ("prev", _TEXT),
    ("delay_until", _TIME),
    ("failed_reason", _TEXT),
    ("return_value", _TEXT),  # JSON
    ("attempts_made", _INT),
    ("extra", _TEXT),  # JSON: an object of the fields that have no column
)
"""One row for each entry of a queue's event stream, by Redis' clock. ``queue`` and ``event_id`` together are a key."""

EVENT_FIELDS: Final[Mapping[str, str]] = {
    "event": "event",
    "job_id": "jobId",
    "name": "name",
    "prev": "prev",
    "delay_until": "delay",
    "failed_reason": "failedReason",
    "return_value": "returnvalue",
    "attempts_made": "attemptsMade",
}
"""The entry field of each column; ``extra`` has all other fields."""

COUNTS: Final = _columns(("queue", _TEXT), ("state", _TEXT), ("jobs", _LONG))
"""One row for each state of each queue."""

TABLES: Final[Mapping[str, StructType]] = {"jobs": JOBS, "events": EVENTS, "counts": COUNTS}
"""The tables by the value of the option ``table``."""

_ARROW: Final[Mapping[DataType, Any]] = {
    _TEXT: pa.string(),
    _INT: pa.int32(),
    _LONG: pa.int64(),
    _TIME: pa.timestamp("us", tz="UTC"),
}


def arrow_schema(schema: StructType) -> Any:
    """Return the exact Arrow schema (``pyarrow.Schema``) that Spark requires for batches with these columns."""
    return pa.schema([pa.field(field.name, _ARROW[field.dataType], field.nullable) for field in schema.fields])


def select_columns(table: str, schema: StructType | None) -> StructType:
    """Return the columns to read: the columns of the user's schema, or all columns.

    A schema is the only way to read fewer columns, because Spark does not push a query's column selection down to a
    Python data source.

    Args:
        table: ``jobs``, ``events`` or ``counts``.
        schema: The argument of ``.schema(…)``; ``None`` without a schema.

    Raises:
        ConfigError: The schema has a column that the table does not have, or one with a different type; the message
            begins with ``[BULLTASK_SCHEMA]``.
    """
    fields = {field.name: field for field in TABLES[table].fields}
    if schema is None:
        return TABLES[table]
    for requested in schema.fields:
        known = fields.get(requested.name)
        if known is None:
            raise ConfigError(
                f"[BULLTASK_SCHEMA] table {table} has no column {requested.name!r}"
                f"{did_you_mean(requested.name, fields)}"
            )
        if known.dataType != requested.dataType:
            raise ConfigError(
                f"[BULLTASK_SCHEMA] column {requested.name} of {table} is of type {known.dataType.simpleString()}, "
                f"not {requested.dataType.simpleString()}; cast it after reading"
            )
    if not schema.fields:
        raise ConfigError(f"[BULLTASK_SCHEMA] the schema has no columns; table {table} has {', '.join(fields)}")
    return StructType([fields[requested.name] for requested in schema.fields])
