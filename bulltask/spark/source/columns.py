"""The columns of the tables that Spark reads, and Redis' replies as Arrow columns.

The schemas are objects, because only a running JVM can parse DDL strings. Times are in UTC. Strings are as stored in
Redis.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql.types import (
    ArrayType,
    BooleanType,
    DataType,
    DecimalType,
    DoubleType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

from bulltask.jobs.codec import decode_text
from bulltask.jobs.errors import ConfigError, did_you_mean
from bulltask.lake import tables
from bulltask.lake.tables import MAX_TIME_MS, Kind, Table
from bulltask.spark.source.connection import gc_paused
from bulltask.spark.source.offsets import EventGap
from bulltask.transport.streams import RawEntry

_TYPES: Final[Mapping[Kind, DataType]] = {
    Kind.TEXT: StringType(),
    Kind.INT: IntegerType(),
    Kind.LONG: LongType(),
    Kind.DOUBLE: DoubleType(),
    Kind.FLAG: BooleanType(),
    Kind.TIME: TimestampType(),
    Kind.TEXTS: ArrayType(StringType()),
    Kind.COUNTS: MapType(IntegerType(), LongType()),
    Kind.MONEY: DecimalType(18, 6),
}


def spark_schema(table: Table) -> StructType:
    """Return a table's columns followed by its partition; ``dt`` is a string like ``2026-11-22``."""
    fields = [StructField(column.name, _TYPES[column.kind]) for column in table.columns]
    return StructType([*fields, StructField(table.partition, StringType())])


GAP_EVENT: Final = "bulltask.gap"
"""The event in a row that represents lost events.

``extra`` has ``lost``, ``first_id_after``, ``exact`` and ``loss_reason``.
"""


def _columns_of(table: Table, *omitted: str) -> StructType:
    """Return the columns of a table of bronze, which stores these rows."""
    return StructType([field for field in spark_schema(table).fields if field.name not in {table.partition, *omitted}])


JOBS: Final = _columns_of(tables.SNAPSHOTS, "snapshot_at")
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

EVENTS: Final = _columns_of(tables.EVENTS)
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

COUNTS: Final = StructType().add("queue", "string").add("state", "string").add("jobs", "long")
"""One row for each state of each queue."""

TABLES: Final[Mapping[str, StructType]] = {"jobs": JOBS, "events": EVENTS, "counts": COUNTS}
"""The tables by the value of the option ``table``."""

_ARROW: Final[Mapping[DataType, Any]] = {
    StringType(): pa.string(),
    IntegerType(): pa.int32(),
    LongType(): pa.int64(),
    TimestampType(): pa.timestamp("us", tz="UTC"),
}


def arrow_schema(schema: StructType) -> Any:
    """Return the exact Arrow schema (``pyarrow.Schema``) that Spark requires for batches with these columns."""
    return pa.schema([pa.field(field.name, _ARROW[field.dataType], field.nullable) for field in schema.fields])


def select_columns(table: str, schema: StructType | None, names: Sequence[str] | None = None) -> StructType:
    """Return the columns to read: those of the argument of ``.schema(…)``, else those named, else all of the table.

    Only so can a read have fewer columns: Spark does not push a query's column selection down to a Python data source.
    A column that the table does not have, or has with a different type, raises ``ConfigError``.
    """
    fields = {field.name: field for field in TABLES[table].fields}
    wanted = schema.fieldNames() if schema is not None else fields if names is None else names
    for name in wanted:
        if name not in fields:
            raise ConfigError(f"[BULLTASK_SCHEMA] table {table} has no column {name!r}{did_you_mean(name, fields)}")
    for requested in schema or ():
        known = fields[requested.name]
        if known.dataType != requested.dataType:
            raise ConfigError(
                f"[BULLTASK_SCHEMA] column {requested.name} of {table} is of type {known.dataType.simpleString()}, "
                f"not {requested.dataType.simpleString()}; cast it after reading"
            )
    if not wanted:
        raise ConfigError(f"[BULLTASK_SCHEMA] the schema has no columns; table {table} has {', '.join(fields)}")
    return StructType([fields[name] for name in wanted])


# Whole columns are converted in one step, because creating a Python object for each value of each row would take most
# of a read's time. Invalid values from other programs never fail a read: invalid numbers become null, and text that is
# not UTF-8 is escaped, as everywhere in bulltask.


_EXISTENCE_FIELDS: Final = ("name", "timestamp")
"""Fields that every job has. If these and the requested fields are all missing, the job does not exist."""

_EVENT_FIELDS: Final = {column: name.encode() for column, name in EVENT_FIELDS.items()}
_KNOWN: Final = frozenset(_EVENT_FIELDS.values())
_MAX_INT64: Final = 2**63 - 1  # the parts of an id may be larger, but a column cannot store more

# Created once: Arrow searches the whole of sys.path for pandas whenever it converts a Python number.
_scalar = lru_cache(maxsize=1_000)(pa.scalar)
_MAX_TIME, _YEAR_1, _US_PER_MS, _NONE = map(_scalar, (MAX_TIME_MS, -62_135_596_800_000, 1_000, None))

Raw = Sequence[bytes | None]


def hash_fields(columns: Sequence[str]) -> tuple[str, ...]:
    """Return the hash fields to fetch: the fields of ``columns``, then fields that show whether the job exists."""
    wanted = [JOB_FIELDS[column] for column in columns if column in JOB_FIELDS]
    return tuple(dict.fromkeys((*wanted, *_EXISTENCE_FIELDS)))


@gc_paused()
def job_record_batch(
    schema: pa.Schema,
    constants: Mapping[str, str],
    ids: Sequence[str],
    replies: Sequence[Raw],
    *,
    with_missing: bool = False,
) -> pa.RecordBatch:
    """Return the jobs that exist as an Arrow record batch; ``with_missing``: others, too, with nulls.

    ``constants`` are columns with the same value in all rows; ``replies`` have the fields in the order of
    `hash_fields`.
    """
    names = hash_fields(schema.names)
    no_fields = [None] * len(names)
    existing = [index for index, reply in enumerate(replies) if with_missing or reply != no_fields]
    if len(existing) != len(ids):
        ids, replies = [ids[index] for index in existing], [replies[index] for index in existing]
    fields: dict[str, Raw] = dict(zip(names, zip(*replies, strict=True), strict=True)) if ids else {}

    def column(field: pa.Field) -> pa.Array:
        if field.name in constants:
            return pa.repeat(_scalar(constants[field.name], field.type), len(ids))
        if field.name == "id":
            return _texts([job_id.encode("utf-8", "surrogateescape") for job_id in ids], field.type)
        return _typed(fields.get(JOB_FIELDS[field.name], ()), field.type)

    return pa.RecordBatch.from_arrays([column(field) for field in schema], schema=schema)


@gc_paused()
def event_record_batch(schema: pa.Schema, queue: str | Sequence[str], entries: Sequence[RawEntry]) -> pa.RecordBatch:
    """Return events as an Arrow record batch, in the order of ``entries``; ``queue`` is that of all, or of each.

    Entries with the same fields are converted together. BullMQ's scripts write a dozen kinds of events, so thousands of
    entries form a few groups, and no mapping for each entry is needed.
    """
    indexes: dict[tuple[bytes, ...], list[int]] = defaultdict(list)
    for index, (_, flat) in enumerate(entries):
        indexes[tuple(flat[::2])].append(index)
    groups: list[tuple[dict[bytes, Raw], int]] = []
    for names, group_indexes in indexes.items():
        values = list(zip(*(entries[index][1] for index in group_indexes), strict=True))[1::2]
        # If a field occurs twice, the last value counts.
        groups.append((dict(zip(names, values, strict=True)), len(group_indexes)))
    # The concatenated groups are in a different order from the entries. This maps each row back.
    positions = [index for group_indexes in indexes.values() for index in group_indexes]
    order = pc.array_sort_indices(pa.array(positions, pa.int32()))
    ids = [entry_id for entry_id, _ in entries]
    columns = {"queue": lambda kind: _queue_column(queue, len(ids), kind), **_id_columns(ids)}

    def column(field: pa.Field) -> pa.Array:
        if field.name in columns:
            return columns[field.name](field.type)
        parts = [_column_of_group(field, *group) for group in groups] or [pa.nulls(0, field.type)]
        return pa.concat_arrays(parts).take(order) if len(parts) > 1 else parts[0]

    return pa.RecordBatch.from_arrays([column(field) for field in schema], schema=schema)


def _queue_column(queue: str | Sequence[str], count: int, kind: pa.DataType) -> pa.Array:
    return pa.repeat(_scalar(queue, kind), count) if isinstance(queue, str) else pa.array(queue, kind)


def _column_of_group(field: pa.Field, values: Mapping[bytes, Raw], count: int) -> pa.Array:
    """Return a column of entries that have the same fields, given the values of each field."""
    if field.name != "extra":
        column = values.get(_EVENT_FIELDS[field.name])
        return pa.nulls(count, field.type) if column is None else _typed(column, field.type)
    extra = {decode_text(name): column for name, column in values.items() if name not in _KNOWN}
    rows = zip(*extra.values(), strict=True)
    objects = [json.dumps(dict(zip(extra, map(decode_text, row), strict=True)), sort_keys=True) for row in rows]
    return pa.array(objects, field.type) if extra else pa.nulls(count, field.type)


def _id_columns(ids: Sequence[bytes]) -> dict[str, Callable[[pa.DataType], pa.Array]]:
    """Return the columns derived from entry ids such as ``1760010061025-0``: the time and the sequence number."""
    texts = pa.array(ids, pa.string())
    halves = pc.split_pattern(texts, "-")
    return {
        "event_id": texts.cast,
        "event_ms": lambda kind: _id_part(pc.list_element(halves, 0), kind),
        "event_seq": lambda kind: _id_part(pc.list_element(halves, 1), kind),
        "event_at": lambda kind: _as_times(pc.list_element(halves, 0), kind),
    }


def _id_part(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    try:
        return texts.cast(kind)
    except pa.ArrowInvalid:
        return pa.array([min(int(text), _MAX_INT64) for text in texts.to_pylist()], kind)


def gap_entry(gap: EventGap) -> RawEntry:
    """Return an entry that represents lost events in the list of events; its id is the last id before the gap."""
    fields: dict[str, object] = {
        "event": GAP_EVENT,
        "lost": gap.lost,
        "exact": str(gap.exact).lower(),
        "loss_reason": gap.loss_reason.value,
    }
    if gap.first_id_after is not None:
        fields["first_id_after"] = str(gap.first_id_after)
    return str(gap.last_id_before).encode(), [str(word).encode() for pair in fields.items() for word in pair]


def count_record_batch(schema: pa.Schema, queue: str, counts: Mapping[str, int]) -> pa.RecordBatch:
    """Return the number of jobs in ``queue`` as an Arrow record batch, with one row for each state."""
    columns = {"queue": [queue] * len(counts), "state": list(counts), "jobs": list(counts.values())}
    return pa.RecordBatch.from_arrays([pa.array(columns[field.name], field.type) for field in schema], schema=schema)


def _typed(raw: Raw, kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return _as_times(_texts(raw, pa.string()), kind)
    return _as_numbers(_texts(raw, pa.string()), kind) if pa.types.is_integer(kind) else _texts(raw, kind)


def _texts(raw: Raw, kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(raw, kind)
    except pa.ArrowInvalid:  # not UTF-8
        return pa.array([None if value is None else decode_text(value) for value in raw], kind)


def _as_numbers(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    try:
        return _plain_numbers(texts, kind)
    except pa.ArrowInvalid:
        bound = 2 ** (kind.bit_width - 1)
        return pa.array([_number(raw, -bound, bound - 1) for raw in texts.cast(pa.binary()).to_pylist()], kind)


def _as_times(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    numbers = _as_numbers(texts, pa.int64())
    in_range = pc.and_(pc.greater_equal(numbers, _YEAR_1), pc.less_equal(numbers, _MAX_TIME))
    return pc.multiply(pc.if_else(in_range, numbers, _NONE), _US_PER_MS).cast(kind)


def _plain_numbers(texts: pa.StringArray, kind: pa.DataType) -> pa.Array:
    """Convert numbers that consist only of digits and a sign; otherwise raise ``ArrowInvalid``."""
    if pc.any(pc.match_substring(texts, "x")).as_py() or pc.any(pc.match_substring(texts, "X")).as_py():
        raise pa.ArrowInvalid("0x10 is a number for Arrow, but not for Redis")
    return texts.cast(kind)


def _number(value: bytes | None, min_value: int, max_value: int) -> int | None:
    if not value:
        return None
    try:
        number = int(value)
    except ValueError:
        try:
            number = int(float(value))
        except (ValueError, OverflowError):
            return None
    return number if min_value <= number <= max_value else None
