"""Event streams in memory, for tests that plan batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bulltask.spark.source.offsets import BEGINNING, StreamId, StreamState
from bulltask.spark.source.planning import ScanRequest, ScanResult

Entry = tuple[str, int, int]
"""The queue, the generation of its stream, and the number of the entry, starting at 1."""


@dataclass
class MemoryStream:
    """The event stream of one queue, which may be trimmed, deleted and recreated."""

    queue: str
    counts: bool = True  # Redis 7.0 or newer
    generation: int = 1
    entries: list[tuple[StreamId, Entry]] = field(default_factory=list)
    added: int = 0
    last: StreamId = BEGINNING

    def add(self, ms: int, number: int = 1) -> None:
        """Add entries at a millisecond that is not before the last entry."""
        for _ in range(number):
            self.last = StreamId(ms, self.last.seq + 1 if self.last.ms == ms else 0)
            self.added += 1
            self.entries.append((self.last, (self.queue, self.generation, self.added)))

    def trim(self, number: int) -> None:
        """Remove entries from the beginning."""
        del self.entries[:number]

    def delete(self) -> None:
        """Delete the stream; the next entry creates a new generation."""
        self.generation, self.entries, self.added, self.last = self.generation + 1, [], 0, BEGINNING

    def state(self) -> StreamState | None:
        """Return the state that Redis would report."""
        if not self.added:
            return None
        first = self.entries[0][0] if self.entries else None
        return StreamState(first, self.last, len(self.entries), self.added if self.counts else None)

    def read(self, after: StreamId, upto: StreamId) -> list[Entry]:
        """Return the entries in a range."""
        return [entry for entry_id, entry in self.entries if after < entry_id <= upto]


class MemoryStreams:
    """The streams of some queues, and the server's replies to the queries of a plan.

    Args:
        streams: The streams by queue.
        page: The maximum number of entries in one scan.
        meanwhile: Called before each reply; simulates changes during planning.
    """

    def __init__(
        self, streams: Mapping[str, MemoryStream], page: int = 10_000, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        self.streams, self.page, self.meanwhile = streams, page, meanwhile

    def states(self, queues: Sequence[str]) -> Mapping[str, StreamState | None]:
        return {queue: self.streams[queue].state() for queue in queues}

    def scan(self, requests: Sequence[ScanRequest]) -> Sequence[ScanResult]:
        results = []
        for request in requests:
            self.meanwhile()
            stream = self.streams[request.queue]
            max_entries = self.page if request.max_entries is None else min(self.page, request.max_entries)
            ids = [entry_id for entry_id, _ in stream.entries if request.after < entry_id <= request.until][
                :max_entries
            ]
            more = len(ids) == self.page != request.max_entries
            results.append(ScanResult(ids[-1] if ids else None, len(ids), stream.state(), more))
        return results
