"""Rows on their way to become jobs: which columns they have, and the jobs that come of them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import repeat
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StringType, StructType

from bulltask import codec
from bulltask.config import Config
from bulltask.errors import ConfigError, DecodeError
from bulltask.job import NewJob
from bulltask.names import check_queue_name, wire_name
from bulltask.queue.options import build_job
from bulltask.spark.ids import derived_id
from bulltask.values import value_class

__all__ = ["NUMBER", "Columns", "JobMaker", "Row", "check_columns", "check_job_options", "rows_of"]

NUMBER: Final = "bulltask_number"
"""The column that numbers equal rows, where somebody asked for it."""

_OF_ONE_JOB: Final = ("job_id", "parent")


@value_class
class Row:
    """One row; ``queue`` and ``id`` are ``None`` where it does not say."""

    name: str | None
    data: str | None
    queue: str | None
    id: str | None
    number: int


@dataclass(frozen=True, slots=True)
class Columns:
    """Which columns the rows have; an empty name stands for none.

    Attributes:
        id: job ids.
        queue: queues.
    """

    id: str
    queue: str


def check_columns(schema: StructType, *, queue: str | None, id_column: str | None) -> Columns:
    """Return where the rows say what, before anything is written; Spark itself checks nothing.

    Args:
        schema: of the rows.
        queue: the queue of all rows, ``None`` where a column says it.
        id_column: the column with job ids; ``None``: ``id`` if there is one.

    Raises:
        ConfigError: a column is missing, of a wrong type, or would be left out silently.
    """
    names = schema.fieldNames()
    ids = id_column if id_column is not None else ("id" if "id" in names else "")
    columns = Columns(ids, "" if queue is not None else "queue")
    known = [name for name in ("name", "data", columns.id, columns.queue) if name]
    shown = f"the rows have the columns {', '.join(names) or '(none)'}"
    for name in known:
        if name not in names:
            hint = ", or the option queue" if name == "queue" else ""
            raise ConfigError(f"[BULLTASK_COLUMN_MISSING] a write of jobs needs the column {name!r}{hint}; {shown}")
        if not isinstance(kind := schema[name].dataType, StringType):
            cure = "to_json(...)" if name == "data" else "cast('string')"
            raise ConfigError(
                f"[BULLTASK_COLUMN_TYPE] column {name!r} must hold texts, not {kind.simpleString()}: {cure} makes them"
            )
    if unknown := sorted(set(names) - set(known)):
        raise ConfigError(
            f"[BULLTASK_COLUMN_UNKNOWN] column {unknown[0]!r} would not be part of any job; select {', '.join(known)}"
            " (what belongs to a job's data goes into the column 'data', as JSON)"
        )
    return columns


def check_job_options(options: Mapping[str, Any], config: Config) -> None:
    """Check options that all jobs of a write have, before any of them is made.

    Raises:
        ConfigError: one is unknown or wrong, or belongs to a single job.
    """
    if single := [name for name in _OF_ONE_JOB if name in options]:
        raise ConfigError(f"[BULLTASK_OPTION_WRONG] {single[0]} belongs to one job, and these are the options of all")
    try:
        build_job("any", "any", None, options, config)
    except TypeError as exc:
        raise ConfigError(f"[BULLTASK_OPTION_WRONG] options of jobs: {exc}") from exc


def rows_of(batch: pa.RecordBatch, columns: Columns) -> Iterator[Row]:
    """Read the rows of an Arrow batch whose columns were checked."""

    def texts(name: str) -> Iterable[Any]:
        return batch.column(name).to_pylist() if name in batch.schema.names else repeat(None, batch.num_rows)

    fields = (texts("name"), texts("data"), texts(columns.queue), texts(columns.id), texts(NUMBER))
    for name, data, queue, job_id, number in zip(*fields, strict=True):
        yield Row(name, data, queue, job_id, number or 0)


@dataclass(frozen=True, slots=True)
class JobMaker:
    """Responsible for the jobs of one write: each is built as ``Queue.add`` builds it.

    Attributes:
        config: the defaults of options, and how queues are spelled.
        write_id: the write.
        queue: the queue of rows that do not say theirs.
        options: of every job, in the words of ``Queue.add``.
        has_ids: the rows have ids of their own.
    """

    config: Config = field(repr=False)  # its URL may have a password
    write_id: str
    queue: str | None
    options: Mapping[str, Any]
    has_ids: bool

    def make(self, row: Row) -> NewJob:
        """Build the job of a row.

        Raises:
            ConfigError: the row has no name, no queue, or no id where the others have.
            DecodeError: its data is no JSON.
            EncodeError, PayloadTooLarge, InvalidName: something about the job is wrong, as for ``Queue.add``.
        """
        queue = row.queue if self.queue is None else self.queue
        if row.name is None or queue is None or (self.has_ids and row.id is None):
            what = "name" if row.name is None else "queue" if queue is None else "id"
            raise ConfigError(f"[BULLTASK_ROW_INCOMPLETE] a row has no {what}: {row!r:.300}")
        try:
            data = codec.decode(row.data)
        except DecodeError as exc:
            raise DecodeError(
                f"data of a row for job {row.name} in queue {queue}: {exc}; got {row.data!r:.80}"
            ) from exc
        job_id = row.id if self.has_ids else self._derived(check_queue_name(queue), row.name, data, row.number)
        return build_job(queue, row.name, data, {**self.options, "job_id": job_id}, self.config)

    def _derived(self, queue: str, name: str, data: Any, number: int) -> str:
        wire = wire_name(queue, hash_tag=self.config.queue_hash_tag)
        return derived_id(self.write_id, wire, name, codec.encode(data, what=f"the data of job {name}"), number)
