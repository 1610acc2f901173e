"""The columns of what Spark reads, as Spark and as Arrow name their types.

They are objects and not DDL texts, which only a running JVM can read. Times are UTC; a text is what Redis holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import DataType, IntegerType, LongType, StringType, StructField, StructType, TimestampType

from bulltask.errors import ConfigError, did_you_mean

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
"""The event of a row that stands for lost events: ``extra`` has ``lost``, ``first``, ``exact`` and ``reason``."""

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
    ("stacktrace", _TEXT),  # JSON: a list of texts
    ("parent_key", _TEXT),
    ("worker", _TEXT),
)
"""One row for each job; the clocks are those of the clients that wrote the job's hash."""

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
"""From which field of a job's hash each column comes; the first three columns say where the job was found."""

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
"""One row for each entry of a queue's event stream; the clock is Redis'. ``queue`` and ``event_id`` are a key."""

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
"""From which field of an entry each column comes; ``extra`` has the others."""

COUNTS: Final = _columns(("queue", _TEXT), ("state", _TEXT), ("jobs", _LONG))
"""One row for each state of each queue."""

TABLES: Final[Mapping[str, StructType]] = {"jobs": JOBS, "events": EVENTS, "counts": COUNTS}
"""By the word of the option ``table``."""

_ARROW: Final[Mapping[DataType, Any]] = {
    _TEXT: pa.string(),
    _INT: pa.int32(),
    _LONG: pa.int64(),
    _TIME: pa.timestamp("us", tz="UTC"),
}


def arrow_schema(schema: StructType) -> Any:
    """Return the Arrow schema (``pyarrow.Schema``) that Spark demands of batches with these columns, to the letter."""
    return pa.schema([pa.field(field.name, _ARROW[field.dataType], field.nullable) for field in schema.fields])


def select_columns(table: str, schema: StructType | None) -> StructType:
    """Return the columns to read: those that the user's schema names, or all.

    A schema of one's own is the way to read few columns, as Spark does not tell a source in Python which are needed.

    Args:
        table: ``jobs``, ``events`` or ``counts``.
        schema: what ``.schema(…)`` was given, ``None`` for nothing.

    Raises:
        ConfigError: it has a column that the table has not, or has with another type; the message begins with
            ``[BULLTASK_SCHEMA]``.
    """
    every = {field.name: field for field in TABLES[table].fields}
    if schema is None:
        return TABLES[table]
    for field in schema.fields:
        known = every.get(field.name)
        if known is None:
            raise ConfigError(
                f"[BULLTASK_SCHEMA] {table} have no column {field.name!r}{did_you_mean(field.name, every)}"
            )
        if known.dataType != field.dataType:
            raise ConfigError(
                f"[BULLTASK_SCHEMA] column {field.name} of {table} is of type {known.dataType.simpleString()}, "
                f"not {field.dataType.simpleString()}; read it as it is, and cast it behind"
            )
    if not schema.fields:
        raise ConfigError(f"[BULLTASK_SCHEMA] the schema names no column; {table} have {', '.join(every)}")
    return StructType([every[field.name] for field in schema.fields])
