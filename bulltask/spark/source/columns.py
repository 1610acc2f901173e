"""Replies of Redis as columns of Arrow.

Whole columns are made at once, because a Python object for each value of each row would take most of a read's time.
What another program wrote badly (a number that is none, a text that is no UTF-8) never fails a read: the first is
null, the second is shown with escapes, as everywhere in bulltask.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Final

import pyarrow as pa

from bulltask.codec import decode_text
from bulltask.spark.source.positions import Gap
from bulltask.spark.source.schemas import EVENT_FIELDS, GAP_EVENT, JOB_FIELDS
from bulltask.transport.scripts_history import RawEntry

__all__ = ["count_batch", "event_batch", "gap_entry", "job_batch", "job_fields_of"]

_PROBES: Final = ("name", "timestamp")
"""Fields that every job has: without any of them, and without the others, the job is not there (any more)."""

_EVENT_FIELDS: Final = {column: name.encode() for column, name in EVENT_FIELDS.items()}
_KNOWN: Final = frozenset(_EVENT_FIELDS.values())
_LAST_MS: Final = 253_402_300_799_999  # the end of the year 9999, the last that Python and Spark can show
_FIRST_MS: Final = -62_135_596_800_000  # the beginning of the year 1

Raw = Sequence[bytes | None]


def job_fields_of(columns: Sequence[str]) -> tuple[str, ...]:
    """The fields of a job's hash to ask for: those of ``columns``, then the ones that tell whether it is there."""
    wanted = [JOB_FIELDS[column] for column in columns if column in JOB_FIELDS]
    return tuple(dict.fromkeys((*wanted, *_PROBES)))


def job_batch(
    schema: pa.Schema, place: Mapping[str, str], ids: Sequence[str], replies: Sequence[Raw]
) -> pa.RecordBatch:
    """Make a batch of jobs.

    Args:
        schema: the columns that are wanted.
        place: columns with one value for all: ``queue`` and ``state``.
        ids: of the jobs.
        replies: for each, its fields in the order of :func:`job_fields_of`; jobs that are not there are left out.
    """
    there = [index for index, reply in enumerate(replies) if any(value is not None for value in reply)]
    if len(there) != len(ids):
        ids, replies = [ids[index] for index in there], [replies[index] for index in there]
    names = job_fields_of(schema.names)
    fields: dict[str, Raw] = dict(zip(names, zip(*replies, strict=True), strict=True)) if ids else {}

    def column(field: pa.Field) -> pa.Array:
        if field.name in place:
            return pa.repeat(pa.scalar(place[field.name], field.type), len(ids))
        if field.name == "id":
            return _texts([job_id.encode("utf-8", "surrogateescape") for job_id in ids], field.type)
        return _typed(fields.get(JOB_FIELDS[field.name], ()), field.type)

    return pa.RecordBatch.from_arrays([column(field) for field in schema], schema=schema)


def event_batch(schema: pa.Schema, queue: str, entries: Sequence[RawEntry]) -> pa.RecordBatch:
    """Make a batch of events of ``queue``, in the order of ``entries``."""
    ids = [entry_id for entry_id, _ in entries]
    halves = [entry_id.split(b"-") for entry_id in ids]
    fields = [dict(zip(flat[::2], flat[1::2], strict=True)) for _, flat in entries]
    made: Mapping[str, Callable[[pa.DataType], pa.Array]] = {
        "queue": lambda kind: pa.repeat(pa.scalar(queue, kind), len(ids)),
        "event_id": lambda kind: _texts(ids, kind),
        "event_ms": lambda kind: _numbers([half[0] for half in halves], kind),
        "event_seq": lambda kind: _numbers([half[1] for half in halves], kind),
        "event_at": lambda kind: _times([half[0] for half in halves], kind),
        "extra": lambda kind: pa.array([_extra(entry) for entry in fields], kind),
    }

    def column(field: pa.Field) -> pa.Array:
        if field.name in made:
            return made[field.name](field.type)
        name = _EVENT_FIELDS[field.name]
        return _typed([entry.get(name) for entry in fields], field.type)

    return pa.RecordBatch.from_arrays([column(field) for field in schema], schema=schema)


def gap_entry(gap: Gap) -> RawEntry:
    """What stands in a batch of events for those that are lost: an entry with the id before the gap."""
    said: dict[str, object] = {
        "event": GAP_EVENT,
        "lost": gap.lost,
        "exact": str(gap.exact).lower(),
        "reason": gap.reason.value,
    }
    if gap.first is not None:
        said["first"] = str(gap.first)
    return str(gap.after).encode(), [str(word).encode() for pair in said.items() for word in pair]


def count_batch(schema: pa.Schema, queue: str, counts: Mapping[str, int]) -> pa.RecordBatch:
    """Make a batch of the numbers of jobs of ``queue``, one row for each state."""
    made = {"queue": [queue] * len(counts), "state": list(counts), "jobs": list(counts.values())}
    return pa.RecordBatch.from_arrays([pa.array(made[field.name], field.type) for field in schema], schema=schema)


def _typed(raw: Raw, kind: pa.DataType) -> pa.Array:
    if pa.types.is_timestamp(kind):
        return _times(raw, kind)
    return _numbers(raw, kind) if pa.types.is_integer(kind) else _texts(raw, kind)


def _texts(raw: Raw, kind: pa.DataType) -> pa.Array:
    try:
        return pa.array(raw, kind)
    except pa.ArrowInvalid:  # a text that is no UTF-8
        return pa.array([None if value is None else decode_text(value) for value in raw], kind)


def _numbers(raw: Raw, kind: pa.DataType) -> pa.Array:
    try:
        return pa.array([None if value is None else int(value) for value in raw], kind)
    except (ValueError, OverflowError, pa.ArrowInvalid):
        bound = 2 ** (kind.bit_width - 1)
        return pa.array([_number(value, -bound, bound - 1) for value in raw], kind)


def _times(raw: Raw, kind: pa.DataType) -> pa.Array:
    found = [_number(value, _FIRST_MS, _LAST_MS) for value in raw]
    return pa.array([None if ms is None else ms * 1000 for ms in found], pa.int64()).cast(kind)


def _number(value: bytes | None, least: int, most: int) -> int | None:
    if not value:
        return None
    try:
        number = int(value)
    except ValueError:
        try:
            number = int(float(value))
        except (ValueError, OverflowError):
            return None
    return number if least <= number <= most else None


def _extra(entry: Mapping[bytes, bytes]) -> str | None:
    if entry.keys() <= _KNOWN:
        return None
    more = {decode_text(name): decode_text(value) for name, value in entry.items() if name not in _KNOWN}
    return json.dumps(more, sort_keys=True)
