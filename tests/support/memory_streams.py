"""Event streams in memory, for tests of planning: every entry is known by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from bulltask.spark.source.offsets import BEGINNING, StreamId, StreamState
from bulltask.spark.source.planning import ScanRequest, ScanResult

Entry = tuple[str, int, int]
"""A queue, which of its streams, and the entry's number in it from 1 on."""


@dataclass
class MemoryStream:
    """One queue's stream; it may be trimmed, deleted and recreated."""

    queue: str
    counts: bool = True  # Redis 7.0 or newer
    made: int = 1
    kept: list[tuple[StreamId, Entry]] = field(default_factory=list)
    added: int = 0
    last: StreamId = BEGINNING

    def add(self, ms: int, number: int = 1) -> None:
        """Add entries of one millisecond, which is not before the last one's."""
        for _ in range(number):
            self.last = StreamId(ms, self.last.seq + 1 if self.last.ms == ms else 0)
            self.added += 1
            self.kept.append((self.last, (self.queue, self.made, self.added)))

    def trim(self, number: int) -> None:
        """Take entries from the beginning."""
        del self.kept[:number]

    def delete(self) -> None:
        """Delete the stream; what is added next makes another one."""
        self.made, self.kept, self.added, self.last = self.made + 1, [], 0, BEGINNING

    def state(self) -> StreamState | None:
        """What Redis would report."""
        if not self.added:
            return None
        first = self.kept[0][0] if self.kept else None
        return StreamState(first, self.last, len(self.kept), self.added if self.counts else None)

    def read(self, after: StreamId, upto: StreamId) -> list[Entry]:
        """The entries of a range."""
        return [entry for entry_id, entry in self.kept if after < entry_id <= upto]


class MemoryStreams:
    """Some queues' streams, and the server that answers a plan's questions about them.

    Args:
        rings: the streams by queue.
        page: how many entries the server looks at before it says "more".
        meanwhile: called before each answer: what others do while a plan is made.
    """

    def __init__(
        self, streams: Mapping[str, MemoryStream], page: int = 10_000, meanwhile: Callable[[], None] = lambda: None
    ) -> None:
        self.streams, self.page, self.meanwhile = streams, page, meanwhile

    def states(self, queues: Sequence[str]) -> Mapping[str, StreamState | None]:
        return {queue: self.streams[queue].state() for queue in queues}

    def scan(self, questions: Sequence[ScanRequest]) -> Sequence[ScanResult]:
        answers = []
        for question in questions:
            self.meanwhile()
            stream = self.streams[question.queue]
            max_entries = self.page if question.max_entries is None else min(self.page, question.max_entries)
            found = [one for one, _ in stream.kept if question.after < one <= question.until][:max_entries]
            more = len(found) == self.page != question.max_entries
            answers.append(ScanResult(found[-1] if found else None, len(found), stream.state(), more))
        return answers
