"""The ledger: the records of a lake's committed batches.

::

    LAKE/_pipeline/head.json                   the last committed batch
    LAKE/_pipeline/batches/<ingest_id>.json    the last committed batches
    LAKE/_pipeline/publishing.json             the batch whose files are being moved into the tables

A batch is committed when it is the head. Files of a batch that is being published but is not the head are removed
before anything else is written. If Spark was killed before it recorded the end of a committed batch, it reruns the
batch, which then does nothing: Redis may have trimmed its events by then. Files are replaced atomically.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

from bulltask.jobs.errors import DecodeError
from bulltask.lake.layout import Layout, batch_of

__all__ = ["BatchRecord", "Ledger", "QueueRecord"]

_VERSION: Final = 1

_MAX_RECORDS: Final = 2_000
_CLEANUP_SLACK: Final = 200
"""Old records are removed when the maximum is exceeded by this number, not after each batch."""


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """The result of a batch for one queue.

    Attributes:
        events: The number of rows added to ``bronze.events``.
        first: Id of the first of these events; ``None`` if there are no events.
        last: Id of the last of these events.
        lost: The number of lost events.
        gaps: The number of rows added to ``bronze.gaps``.
    """

    events: int = 0
    first: str | None = None
    last: str | None = None
    lost: int = 0
    gaps: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """A committed batch.

    Attributes:
        ingest_id: The ``ingest_id`` of its files.
        previous: The ``ingest_id`` of the previous batch, whose open jobs it read; ``None`` for a lake's first batch.
        number: The number of the batch, from 1, across checkpoints.
        written_ms: When it was committed, by this machine's clock.
        newest_event_ms: Time of the newest event ever read; 0 before the first.
        queues: The result for each queue, by name without the hash tag.
        last_ids: Id of the last event ever read from each queue.
        lost: The number of events ever lost in each queue.
        attempts: The number of rows added to ``silver.attempts``.
        jobs: The number of rows added to ``silver.jobs``.
        open_jobs_ingest_id: The ``ingest_id`` of the batch that wrote the events of the jobs that are open after this
            batch; ``None`` if no jobs are open.
        open_job_events: The number of these events.
        oldest_open_event_ms: The time of the oldest of them; 0 if no jobs are open.
        steps_ms: How long each step took.
        queries: The last batch number of each Spark query that has written to the lake, by the beginning of its id.
    """

    ingest_id: str
    previous: str | None = None
    number: int = 1
    written_ms: int = 0
    newest_event_ms: int = 0
    queues: Mapping[str, QueueRecord] = field(default_factory=dict)
    last_ids: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 0
    jobs: int = 0
    open_jobs_ingest_id: str | None = None
    open_job_events: int = 0
    oldest_open_event_ms: int = 0
    steps_ms: Mapping[str, int] = field(default_factory=dict)
    queries: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Decode the result of :meth:`to_json`.

        Raises:
            DecodeError: It has another version.
        """
        if stored.get("version") != _VERSION:
            raise DecodeError(
                f"the record of a batch has version {stored.get('version')!r}, but this bulltask reads "
                f"version {_VERSION}: the lake was written by another version of bulltask; use that "
                "version or a newer one"
            )
        fields = {name: stored[name] for name in cls.__dataclass_fields__ if name != "queries"}
        fields["queries"] = stored.get("queries", {})  # missing in old records
        fields["queues"] = {queue: QueueRecord(**record) for queue, record in fields["queues"].items()}
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return the record as JSON values."""
        return {"version": _VERSION, **asdict(self)}


class Ledger:
    """The records of a lake's batches.

    Args:
        layout: The lake.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._head = layout.internal("head.json")
        self._publishing = layout.internal("publishing.json")

    def head(self) -> BatchRecord | None:
        """Return the last committed batch; ``None`` before the first."""
        return _read_record(self._head)

    def get(self, ingest_id: str) -> BatchRecord | None:
        """Return the record of a batch; ``None`` if it does not exist or was removed."""
        return _read_record(self._file(ingest_id))

    def has(self, ingest_id: str) -> bool:
        """Whether a batch is committed, by the head, as uncommitted batches can have records, and old ones none."""
        head, (query, number) = self.head(), batch_of(ingest_id)
        if head is None:
            return False
        return number <= head.queries.get(query, -1) if head.queries else self._file(ingest_id).exists()

    def records(self) -> Iterator[BatchRecord]:
        """Yield the most recent batches, newest first, as far back as there are records."""
        record = self.head()
        while record is not None:
            yield record
            record = None if record.previous is None else self.get(record.previous)

    def publishing(self) -> str | None:
        """Return the ``ingest_id`` of an uncommitted batch whose files may be in the tables."""
        stored = _read(self._publishing)
        return None if stored is None else str(stored["ingest_id"])

    def begin_publishing(self, ingest_id: str) -> None:
        """Record that the files of a batch will be moved into the tables."""
        _write(self._publishing, {"ingest_id": ingest_id})

    def commit(self, record: BatchRecord) -> None:
        """Commit a batch."""
        _write(self._file(record.ingest_id), record.to_json())
        _write(self._head, record.to_json())
        self._publishing.unlink(missing_ok=True)
        self._remove_old_records()

    def _remove_old_records(self) -> None:
        files = set(self._layout.internal("batches").glob("[!_]*.json"))
        if len(files) > _MAX_RECORDS + _CLEANUP_SLACK:
            kept = {self._file(record.ingest_id) for record in islice(self.records(), _MAX_RECORDS)}
            for file in files - kept:
                file.unlink(missing_ok=True)

    def _file(self, ingest_id: str) -> Path:
        return self._layout.internal("batches", f"{ingest_id}.json")


def _read_record(path: Path) -> BatchRecord | None:
    stored = _read(path)
    return None if stored is None else BatchRecord.from_json(stored)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return stored


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file atomically: readers see the old content or the new one, even after a crash."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"_{path.name}")
    with new.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
