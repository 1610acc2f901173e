"""What each batch of a lake's stream has written: the ledger that makes a batch done.

::

    ROOT/_pipeline/head.json                the last batch that is done
    ROOT/_pipeline/batches/<ingest>.json    the last batches, as they were done
    ROOT/_pipeline/publishing.json          the batch whose files are being put into the tables just now

A batch is done when it is the head, and not before: files of one that is being published and is not the head are
taken away before anything else is written. A batch that Spark asks for again, as it had no time to note that it was
done, has nothing to do: events that were read before may be gone by now. Each file is replaced whole, so a reader sees
it old or new.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

from bulltask.errors import DecodeError
from bulltask.lake.layout import Layout, batch_of

__all__ = ["BatchRecord", "Ledger", "QueueRecord"]

_VERSION: Final = 1

_KEPT: Final = 2_000
_SPARE: Final = 200
"""So many records more than are kept may be there, so that they need not be looked through for each batch."""


@dataclass(frozen=True, slots=True)
class QueueRecord:
    """What one batch read of one queue.

    Attributes:
        events: how many rows it added to ``bronze.events``.
        first: id of the first of them; ``None`` for none.
        last: id of the last of them.
        lost: events that were gone, by its rows in ``bronze.gaps``.
        gaps: how many rows those are.
    """

    events: int = 0
    first: str | None = None
    last: str | None = None
    lost: int = 0
    gaps: int = 0


@dataclass(frozen=True, slots=True)
class BatchRecord:
    """One batch that is done.

    Attributes:
        ingest: the ``ingest_id`` of its files.
        previous: that of the batch before, whose carry it read; ``None`` for the first of a lake.
        number: 1 for the first batch of a lake, whatever checkpoints it has had since.
        written_ms: when it was done, by this machine's clock.
        clock_ms: time of the newest event that was ever read, by Redis' clock; 0 before the first.
        queues: what it read of each queue, by the user's spelling.
        ends: id of the last event that was ever read of each queue.
        lost: how many events were ever lost of each queue.
        attempts: rows it added to ``silver.attempts``.
        jobs: rows it added to ``silver.jobs``.
        carry: the ``ingest_id`` of the batch that wrote the events of jobs which are open behind this one; ``None``
            for none.
        carried: how many events those are.
        oldest_ms: time of the oldest of them; 0 for none.
        steps_ms: how long each of its steps took.
        queries: of each query of Spark's that ever fed the lake, by the beginning of its id, the number of its last
            batch.
    """

    ingest: str
    previous: str | None = None
    number: int = 1
    written_ms: int = 0
    clock_ms: int = 0
    queues: Mapping[str, QueueRecord] = field(default_factory=dict)
    ends: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, int] = field(default_factory=dict)
    attempts: int = 0
    jobs: int = 0
    carry: str | None = None
    carried: int = 0
    oldest_ms: int = 0
    steps_ms: Mapping[str, int] = field(default_factory=dict)
    queries: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_json(cls, stored: Mapping[str, Any]) -> Self:
        """Read what :meth:`to_json` returned.

        Raises:
            DecodeError: it is something else, or was written by a newer bulltask.
        """
        if stored.get("version") != _VERSION:
            raise DecodeError(
                f"the record of a batch has version {stored.get('version')!r}, and this bulltask reads {_VERSION}: the "
                "lake was fed by another bulltask; use one that is as new"
            )
        fields = {name: stored[name] for name in cls.__dataclass_fields__ if name != "queries"}
        fields["queries"] = stored.get("queries", {})  # records of before have none
        fields["queues"] = {queue: QueueRecord(**one) for queue, one in fields["queues"].items()}
        return cls(**fields)

    def to_json(self) -> dict[str, Any]:
        """Return it as values of JSON."""
        return {"version": _VERSION, **asdict(self)}


class Ledger:
    """Responsible for the records of a lake's batches.

    Args:
        layout: of the lake.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._head, self._publishing = layout.own("head.json"), layout.own("publishing.json")

    def head(self) -> BatchRecord | None:
        """The last batch that is done; ``None`` before the first."""
        return _record(self._head)

    def get(self, ingest: str) -> BatchRecord | None:
        """The record of one batch; ``None`` where there is none (any more)."""
        return _record(self._file(ingest))

    def has(self, ingest: str) -> bool:
        """Whether a batch is done: the head says it, as the record of one that is not may be there, and old ones go."""
        head, (query, number) = self.head(), batch_of(ingest)
        if head is None:
            return False
        return number <= head.queries.get(query, -1) if head.queries else self._file(ingest).exists()

    def records(self) -> Iterator[BatchRecord]:
        """The last batches, the last one first: all of them, or some thousands."""
        record = self.head()
        while record is not None:
            yield record
            record = None if record.previous is None else self.get(record.previous)

    def publishing(self) -> str | None:
        """The ``ingest_id`` of which files may be in the tables though its batch is not done."""
        stored = _read(self._publishing)
        return None if stored is None else str(stored["ingest"])

    def announce(self, ingest: str) -> None:
        """Say that files of a batch are going to be put into the tables."""
        _write(self._publishing, {"ingest": ingest})

    def finish(self, record: BatchRecord) -> None:
        """Make a batch done."""
        _write(self._file(record.ingest), record.to_json())
        _write(self._head, record.to_json())
        self._publishing.unlink(missing_ok=True)
        self._forget_old()

    def _forget_old(self) -> None:
        files = set(self._layout.own("batches").glob("[!_]*.json"))
        if len(files) > _KEPT + _SPARE:
            kept = {self._file(record.ingest) for record in islice(self.records(), _KEPT)}
            for file in files - kept:
                file.unlink(missing_ok=True)

    def _file(self, ingest: str) -> Path:
        return self._layout.own("batches", f"{ingest}.json")


def _record(path: Path) -> BatchRecord | None:
    stored = _read(path)
    return None if stored is None else BatchRecord.from_json(stored)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        stored: dict[str, Any] = json.loads(path.read_text())
    except FileNotFoundError:
        return None
    return stored


def _write(path: Path, content: Mapping[str, Any]) -> None:
    """Replace a file whole: whoever reads it, also after a crash, finds the old content or the new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"_{path.name}")
    with new.open("w") as file:
        json.dump(content, file)
        file.flush()
        os.fsync(file.fileno())
    new.replace(path)
