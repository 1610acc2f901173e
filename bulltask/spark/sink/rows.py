"""Turn rows into jobs: the columns of a write, the jobs that it builds, and their ids.

The same row of the same write always has the same id.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import repeat
from typing import Any, Final, cast

import pyarrow as pa
import uuid_utils
from pyspark.sql.types import StringType, StructType

from bulltask.config.config import Config
from bulltask.jobs import codec
from bulltask.jobs.errors import ConfigError, DecodeError
from bulltask.jobs.job import JobOptions, NewJob, check_size
from bulltask.jobs.names import bullmq_name, check_job_id, check_job_name, check_queue_name
from bulltask.jobs.payloads import PayloadCodec
from bulltask.queue.context import build_job

__all__ = [
    "NUMBER",
    "JobBuilder",
    "RowColumns",
    "SharedOptions",
    "check_columns",
    "check_job_options",
    "check_write_id",
    "column_values",
    "derived_id",
    "new_write_id",
    "write_id_of_batch",
]

NUMBER: Final = "bulltask_number"
"""The column that numbers equal rows."""

_SINGLE_JOB_OPTIONS: Final = ("job_id", "parent")
_MAX_LENGTH: Final = 200
_FORBIDDEN: Final = re.compile(r"[\x00-\x20\x7f{}\ud800-\udfff]")


@dataclass(frozen=True, slots=True)
class RowColumns:
    """The names of optional columns; an empty name means that the rows do not have the column.

    Attributes:
        id: The column with job ids.
        queue: The column with queues.
    """

    id: str
    queue: str


@dataclass(frozen=True, slots=True)
class SharedOptions:
    """The options of all jobs of a write, checked once.

    Attributes:
        options: The options.
        timestamp_ms: The creation time of the jobs; ``None``: when they are sent.
    """

    options: JobOptions
    timestamp_ms: int | None


def check_columns(schema: StructType, *, queue: str | None, id_column: str | None) -> RowColumns:
    """Check the schema before anything is written, and return the names of the id and queue columns.

    Args:
        schema: The schema of the rows.
        queue: The queue of all rows; ``None`` if a column contains the queues.
        id_column: The column with job ids; ``None``: ``id`` if it exists.

    Raises:
        ConfigError: A column is missing, has the wrong type, or would be ignored silently.
    """
    names = schema.fieldNames()
    id_name = id_column if id_column is not None else ("id" if "id" in names else "")
    columns = RowColumns(id_name, "" if queue is not None else "queue")
    known = [name for name in ("name", "data", columns.id, columns.queue) if name]
    columns_text = f"the rows have the columns {', '.join(names) or '(none)'}"
    for name in known:
        if name not in names:
            advice = ", or the option queue" if name == "queue" else ""
            raise ConfigError(
                f"[BULLTASK_COLUMN_MISSING] a write of jobs needs the column {name!r}{advice}; {columns_text}"
            )
        if not isinstance(kind := schema[name].dataType, StringType):
            conversion = "to_json(...)" if name == "data" else "cast('string')"
            raise ConfigError(
                f"[BULLTASK_COLUMN_TYPE] column {name!r} must contain strings, not {kind.simpleString()}: "
                f"use {conversion}"
            )
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(
            f"[BULLTASK_COLUMN_UNKNOWN] unknown column {unknown[0]!r}: jobs are built from the columns "
            f"{', '.join(known)}; put job data into the column 'data', as JSON"
        )
    return columns


def check_job_options(options: Mapping[str, Any], config: Config) -> SharedOptions:
    """Check and return the options of all jobs of a write, before any job is built.

    Raises:
        ConfigError: An option is unknown or invalid, or applies to a single job.
    """
    if single := [name for name in _SINGLE_JOB_OPTIONS if name in options]:
        raise ConfigError(
            f"[BULLTASK_OPTION_INVALID] {single[0]} applies to a single job, but these options are for all jobs"
        )
    try:
        sample = build_job("any", "any", None, options, config)
    except TypeError as exc:
        raise ConfigError(f"[BULLTASK_OPTION_INVALID] options of jobs: {exc}") from exc
    return SharedOptions(sample.options, sample.timestamp_ms)


def column_values(batch: pa.RecordBatch, columns: RowColumns) -> tuple[Iterable[Any], ...]:
    """Return the checked columns of an Arrow batch in the order of :meth:`JobBuilder.build`'s arguments."""

    def column(name: str, otherwise: object) -> Iterable[Any]:
        return batch.column(name).to_pylist() if name in batch.schema.names else repeat(otherwise, batch.num_rows)

    return (
        column("name", None),
        column("data", None),
        column(columns.queue, None),
        column(columns.id, None),
        column(NUMBER, 0),
    )


@dataclass(frozen=True, slots=True)
class JobBuilder:
    """Builds the jobs of one write, like ``Queue.add``.

    Attributes:
        config: The settings for queue names and the maximum size of a job.
        write_id: The id of the write.
        queue: The queue of all rows; ``None`` if a column contains the queues.
        shared: The options of all jobs.
        has_ids: Whether the rows have ids.
    """

    config: Config = field(repr=False)  # its URL may have a password
    write_id: str
    queue: str | None
    shared: SharedOptions
    has_ids: bool

    def build(self, name: str | None, data: str | None, queue: str | None, job_id: str | None, number: int) -> NewJob:
        """Build the job of a row.

        Raises:
            ConfigError: The row has no name or no queue, or its id is missing in a write with ids.
            DecodeError: The data is not JSON.
            EncodeError, PayloadTooLargeError, InvalidNameError: The job is invalid, as for ``Queue.add``.
        """
        if self.queue is not None:
            queue = self.queue
        if name is None or queue is None or (self.has_ids and job_id is None):
            missing = "name" if name is None else "queue" if queue is None else "id"
            raise ConfigError(
                f"[BULLTASK_ROW_INCOMPLETE] a row has no {missing}: name={name!r:.80}, queue={queue!r:.80}, "
                f"id={job_id!r:.80}, data={data!r:.200}"
            )
        wire_queue = _checked_names(queue, name, self.config.queue_hash_tag)
        encoded = self._encoded_data(name, data, queue)
        if self.has_ids:
            new_id = check_job_id(cast(str, job_id))
        else:
            new_id = derived_id(self.write_id, wire_queue, name, encoded, number)
        if (payloads := PayloadCodec(self.config)).encrypts(queue):  # after the id, because each encryption differs
            encoded = payloads.dump_job_data(codec.decode(encoded), queue, name, f"the data of job {name}")
        return NewJob(
            queue, new_id, name, encoded, self.shared.options, timestamp_ms=self.shared.timestamp_ms, has_custom_id=True
        )

    def _encoded_data(self, name: str, data: str | None, queue: str) -> bytes:
        """Return the data in normalized JSON, without spaces, so that equal data has the same encoding."""
        try:
            value = codec.decode(data)
        except DecodeError as exc:
            raise DecodeError(f"data of a row for job {name} in queue {queue}: {exc}; got {data!r:.80}") from exc
        description = f"the data of job {name}"
        encoded = codec.encode(value, what=description, limit=self.config.max_payload)
        check_size(encoded, self.shared.options, self.config.max_payload, description)
        return encoded


@lru_cache(maxsize=1_000)
def _checked_names(queue: str, name: str, hash_tag: bool) -> str:
    """Check the names, which many rows have in common, and return BullMQ's name for the queue."""
    check_job_name(name)
    return bullmq_name(check_queue_name(queue), hash_tag=hash_tag)


def derived_id(write_id: str, queue: str, name: str, data: bytes, number: int = 0) -> str:
    """Return the id of a row's job: ``s`` and 24 hexadecimal digits.

    BullMQ 5.62 rejects ids that are numbers or contain a ``:``, so the id begins with a letter. Equal rows are the
    same job unless they are numbered.

    Args:
        write_id: The id of the write (:func:`check_write_id`).
        queue: BullMQ's name for the queue, so that ``emails`` and ``{emails}`` are the same.
        name: The job's name.
        data: The job's data as normalized JSON. The order of keys matters, and 1 differs from 1.0.
        number: The number of the row among equal rows, from 0.
    """
    return "s" + hashlib.sha256(_id_prefix(write_id, queue, name, number) + data).hexdigest()[:24]


@lru_cache(maxsize=1_000)
def _id_prefix(write_id: str, queue: str, name: str, number: int) -> bytes:
    # None of these parts can contain a control character, so the separator is unambiguous.
    return f"{write_id}\0{queue}\0{name}\0{number or ''}\0".encode()


def new_write_id() -> str:
    """Return a new write id. Such ids sort by time."""
    return uuid_utils.uuid7().hex


def write_id_of_batch(write: str, batch: str | int) -> str:
    """Return the write id of one batch of a streaming query.

    Args:
        write: The ``writeId`` of the streaming query, or Spark's id of it, which a checkpoint keeps.
        batch: The number of the batch, which is the same if Spark runs the batch again.
    """
    return f"{write}-{batch}"


def check_write_id(write_id: str) -> str:
    """Return ``write_id`` if it may be part of a Redis key.

    Raises:
        ConfigError: The id is empty, longer than 200 characters, or contains spaces, control characters or braces.
    """
    if not isinstance(write_id, str) or not write_id or len(write_id) > _MAX_LENGTH or _FORBIDDEN.search(write_id):
        raise ConfigError(
            f"write id {write_id!r:.60} must be a string of 1 to {_MAX_LENGTH} characters without spaces, control "
            "characters or braces"
        )
    return write_id
