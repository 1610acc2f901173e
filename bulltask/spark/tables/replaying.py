"""What the tasks of a replay do: look jobs up in Redis, and send them anew as they were."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Final

import pyarrow as pa
from pyspark.sql.types import StringType, StructField, StructType, TimestampType

from bulltask.config.config import Config
from bulltask.errors import DecodeError
from bulltask.jobs.job import OWN_KEY, JobOptions, NewJob
from bulltask.spark.source.columns import job_batch, job_fields_of
from bulltask.spark.source.connection import Connection, broker_of
from bulltask.spark.source.options import WriteOptions
from bulltask.transport.scripts.fence import Fence
from bulltask.transport.scripts.history import job_fields

__all__ = ["HASH", "HashLook", "Replayer", "StoredOptions", "replay_options"]

_FIELDS: Final = ("name", "data", "opts", "created_at", "finished_at")
HASH: Final = StructType(
    [StructField(name, TimestampType() if name.endswith("_at") else StringType()) for name in _FIELDS]
)
"""What is looked up of a job."""

_ARROW: Final = pa.schema(
    [(name, pa.timestamp("us", tz="UTC") if name.endswith("_at") else pa.string()) for name in _FIELDS]
)
_AT_ONCE: Final = 500

_OF_ONE_JOB: Final = frozenset(
    {
        "jobId", "delay", "timestamp",  # it has its own id, and is due now
        "parent", "fpof", "cpof", "idof", "rdof",  # its parent has gone on without it
        "repeat", "repeatJobKey", "prevMillis",  # the schedule goes on by itself
    }
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class HashLook:
    """Responsible for looking jobs' hashes up; travels to the executors.

    Attributes:
        options: where Redis is.
    """

    options: WriteOptions = field(repr=False)

    def up(self, arrays: Iterator[pa.StructArray]) -> Iterator[pa.Array]:
        """For each job of ``queue`` and ``job_id``, what is in its hash; null where there is none."""
        names = job_fields_of(_FIELDS)
        with Connection(self.options.config) as connection:
            for jobs in arrays:
                asked = jobs.to_pylist()
                calls = [job_fields(self.options.keys(one["queue"]), one["job_id"], names) for one in asked]
                replies: list[Any] = []
                for start in range(0, len(calls), _AT_ONCE):
                    replies += connection.run_many(calls[start : start + _AT_ONCE])
                there = [number for number, reply in enumerate(replies) if any(part is not None for part in reply)]
                found = job_batch(_ARROW, {}, [asked[n]["job_id"] for n in there], [replies[n] for n in there])
                places = {number: place for place, number in enumerate(there)}
                yield found.to_struct_array().take(pa.array([places.get(n) for n in range(len(asked))], pa.int64()))


class StoredOptions(JobOptions):
    """Options that are stored as they are given: those of a job of any client, which may lack what ours always has."""

    def to_wire(self, now_ms: int) -> dict[str, object]:  # noqa: ARG002 - they have no moment
        """The options."""
        return dict(self.more)


def replay_options(opts: str | None) -> StoredOptions:
    """Return the options of a job that is sent anew, from those that were stored.

    Raises:
        DecodeError: they are no JSON object.
    """
    try:
        stored = json.loads(opts or "{}")
    except ValueError as exc:
        raise DecodeError(f"the stored options {opts!r:.200} are no JSON") from exc
    if not isinstance(stored, dict):
        raise DecodeError(f"the stored options {opts!r:.200} are no JSON object")
    kept = {name: value for name, value in stored.items() if name not in _OF_ONE_JOB}
    if isinstance(own := kept.get(OWN_KEY), Mapping):
        # The moment by which it was to have begun has gone by.
        kept[OWN_KEY] = {name: value for name, value in own.items() if name != "expires"}
    priority = kept.get("priority")
    return StoredOptions(priority=priority if isinstance(priority, int) else 0, more=kept)


@dataclass(frozen=True, slots=True)
class Replayer:
    """Responsible for sending jobs anew; travels to the executors, and holds no connection.

    Attributes:
        config: where Redis is, and how queues are spelled.
        write_id: the write whose fence the jobs are sent behind.
        fence_ttl_ms: how long the fence is kept.
    """

    config: Config = field(repr=False)  # its URL may have a password
    write_id: str
    fence_ttl_ms: int

    def outcomes(self, batches: Iterable[pa.RecordBatch]) -> Iterator[list[str]]:
        """Send the rows of some batches: ``queue``, ``new_id``, ``name``, ``data``, ``opts``; say what became of each.

        Raises:
            BulltaskError: Redis cannot be reached, or a job's options are broken. What was sent before stays; the
                same replay again adds what is missing.
        """
        broker = broker_of(self.config)
        fence = Fence(self.write_id, self.fence_ttl_ms)
        try:
            for batch in batches:
                jobs = map(_job, batch.to_pylist())
                found: list[str] = []
                while part := list(islice(jobs, _AT_ONCE)):
                    found += [sent.outcome for sent in broker.producer.send_fenced(part, fence)]
                yield found
        finally:
            broker.close()


def _job(row: Mapping[str, Any]) -> NewJob:
    return NewJob(
        row["queue"], row["new_id"], row["name"], row["data"].encode(), replay_options(row["opts"]), chosen=True
    )
