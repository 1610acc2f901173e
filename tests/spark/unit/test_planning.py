"""Batches are planned and read in random histories of streams that are trimmed, deleted and recreated."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.spark.source.offsets import (
    START,
    EventGap,
    LossReason,
    QueueOffset,
    StreamId,
    StreamState,
    decode_offsets,
    encode_offsets,
    first_offset,
)
from bulltask.spark.source.planning import BatchLimits, divide_limit, pack, plan_batch, split_range
from tests.support.memory_streams import Entry, MemoryStream, MemoryStreams

QUEUES = ("emails", "images", "reports")


@dataclass
class Reader:
    """Reads batch after batch as Spark does: offsets are stored as JSON, and a batch may be read twice."""

    streams: MemoryStreams
    offsets: Mapping[str, QueueOffset] = field(default_factory=dict)
    rows: list[Entry] = field(default_factory=list)
    gaps: list[EventGap] = field(default_factory=list)

    def batch(
        self, limits: BatchLimits, *, between: Any = lambda: None, late: Any = lambda: None, twice: bool = False
    ) -> bool:
        """Read a batch; call ``between`` between planning and reading, and ``late`` while tasks start.

        Returns:
            Whether the batch had new entries.
        """
        planned = plan_batch(self.offsets, self.streams, list(self.streams.streams), limits)
        end = decode_offsets(json.loads(json.dumps(encode_offsets(planned.end))))
        assert end == planned.end
        between()
        if twice:
            self._read(end, late)
            between()
        rows, gaps = self._read(end, late)
        self.rows += rows
        self.gaps += gaps
        progressed, self.offsets = end != dict(self.offsets), end
        return progressed

    def _read(self, end: Mapping[str, QueueOffset], late: Any) -> tuple[list[Entry], list[EventGap]]:
        rows: list[Entry] = []
        gaps: list[EventGap] = []
        for queue, upto in end.items():
            stream = self.streams.streams[queue]
            lost, span = split_range(queue, self.offsets.get(queue), upto, stream.state())
            gaps += lost
            if span is not None:
                late()
                entries = stream.read(span.after, span.upto)
                assert span.expect is None or len(entries) <= span.expect
                rows += entries
                gaps += [gap] if (gap := span.gap(len(entries))) else []
        return rows, gaps

    def catch_up(self) -> None:
        for _ in range(1_000):
            if not self.batch(BatchLimits()):
                return
        raise AssertionError("the reader does not catch up")

    def lost(self, queue: str) -> int:
        return sum(gap.lost for gap in self.gaps if gap.queue == queue)

    def read(self, queue: str) -> int:
        return sum(1 for row in self.rows if row[0] == queue)


queues = st.sampled_from(QUEUES)
few = st.integers(0, 12)
added = st.tuples(st.just("add"), queues, few, st.integers(0, 3))
trimmed = st.tuples(st.just("trim"), queues, few)
batch = st.tuples(
    st.just("batch"), st.none() | st.integers(1, 20), st.booleans(), st.booleans(), st.lists(trimmed, max_size=3)
)
steps = st.lists(added | trimmed | batch, min_size=1, max_size=40)


class History:
    """Runs steps; all queues share a clock that never goes back."""

    def __init__(self, page: int, counts: bool = True) -> None:
        self.ms = 1_000
        self.disturbances: list[Any] = []
        self.streams = {queue: MemoryStream(queue, counts) for queue in QUEUES}
        self.reader = Reader(MemoryStreams(self.streams, page, self._disturb))

    def play(self, steps: list[Any]) -> History:
        for step in steps:
            getattr(self, step[0])(*step[1:])
        return self

    def add(self, queue: str, number: int, elapsed_ms: int) -> None:
        self.ms += elapsed_ms
        self.streams[queue].add(self.ms, number)

    def trim(self, queue: str, number: int) -> None:
        self.streams[queue].trim(number)

    def delete(self, queue: str) -> None:
        self.streams[queue].delete()

    def batch(self, max_entries: int | None, align: bool, twice: bool, disturbances: list[Any]) -> None:
        self.disturbances = list(disturbances)
        self.reader.batch(BatchLimits(max_entries, align), between=self._disturb, late=self._disturb, twice=twice)
        self.disturbances = []

    def _disturb(self) -> None:
        if self.disturbances:
            self.play([self.disturbances.pop()])


@given(steps, st.integers(1, 9))
def test_rows_plus_losses_equal_the_added_entries(steps: list[Any], page: int) -> None:
    history = History(page).play(steps)
    reader = history.reader
    reader.catch_up()
    assert max(Counter(reader.rows).values(), default=1) == 1
    for queue, stream in history.streams.items():
        assert reader.read(queue) + reader.lost(queue) == stream.added
        assert all(gap.exact for gap in reader.gaps)


@given(steps, st.integers(1, 9))
def test_offsets_count_only_losses_seen_by_a_plan(steps: list[Any], page: int) -> None:
    history = History(page).play(steps)
    reader = history.reader
    reader.catch_up()
    for queue in QUEUES:
        assert 0 <= reader.offsets[queue].lost <= reader.lost(queue)
        assert reader.offsets[queue].generation == 0


@given(steps, st.integers(1, 9), queues, st.integers(0, 20), steps)
def test_a_recreated_stream_is_read_from_its_beginning_exactly_once(
    before: list[Any], page: int, queue: str, again: int, after: list[Any]
) -> None:
    history = History(page).play(before)
    reader, stream = history.reader, history.streams[queue]
    reader.catch_up()
    offset = reader.offsets[queue]
    history.delete(queue)
    history.add(queue, again, 1)
    if offset.ordinal:  # a trim up to the offset would leave no trace of the first stream
        history.trim(queue, min(again, offset.ordinal - 1))
    lost_before = reader.lost(queue)
    reader.batch(BatchLimits())
    assert [gap.exact for gap in reader.gaps if not gap.exact] == [False] * bool(offset.ordinal)
    history.play(after)
    reader.catch_up()
    assert max(Counter(reader.rows).values(), default=1) == 1
    second = sum(1 for row in reader.rows if row[:2] == (queue, 2))
    assert second + reader.lost(queue) - lost_before == stream.added


@given(steps, st.integers(1, 9))
def test_without_counts_every_kept_entry_is_read_once(steps: list[Any], page: int) -> None:
    history = History(page, counts=False).play(steps)
    reader = history.reader
    left = {entry for stream in history.streams.values() for _, entry in stream.entries}
    reader.catch_up()
    assert max(Counter(reader.rows).values(), default=1) == 1
    assert left <= set(reader.rows)
    for queue, stream in history.streams.items():
        missed = stream.added - reader.read(queue)
        assert missed == 0 or not reader.lost(queue), "an unknown number of losses was reported"


@given(steps, st.integers(1, 9))
def test_the_offset_of_an_idle_reader_does_not_change(steps: list[Any], page: int) -> None:
    reader = History(page).play(steps).reader
    reader.catch_up()
    before = json.dumps(encode_offsets(reader.offsets))
    rows = len(reader.rows)
    for limits in (BatchLimits(), BatchLimits(max_entries=1), BatchLimits(align=False)):
        planned = plan_batch(reader.offsets, reader.streams, list(reversed(QUEUES)), limits)
        assert json.dumps(encode_offsets(planned.end)) == before
        assert planned.gaps == ()
    assert len(reader.rows) == rows
    assert list(encode_offsets(reader.offsets)["queues"]) == sorted(QUEUES)


def read_until(position: QueueOffset) -> int:
    return (position.ordinal or 0) - position.lost


@given(steps, st.integers(1, 9), st.integers(1, 20))
def test_a_batch_reads_no_entry_newer_than_those_that_it_leaves(steps: list[Any], page: int, max_entries: int) -> None:
    reader = History(page).play([step for step in steps if step[0] != "batch"]).reader
    progressed = reader.batch(BatchLimits(max_entries))
    while progressed:
        start = reader.offsets
        progressed = reader.batch(BatchLimits(max_entries))
        ends = reader.offsets
        read = [ends[queue].id.ms for queue in QUEUES if read_until(ends[queue]) > read_until(start[queue])]
        left = [
            entry_id.ms
            for queue, stream in reader.streams.streams.items()
            for entry_id, _ in stream.entries
            if entry_id > ends[queue].id
        ]
        assert max(read, default=0) <= min(left, default=10**12)


@given(steps, st.integers(1, 9), st.integers(1, 20), st.booleans())
def test_a_batch_respects_its_limit_and_always_makes_progress(
    steps: list[Any], page: int, max_entries: int, align: bool
) -> None:
    reader = History(page).play([step for step in steps if step[0] != "batch"]).reader
    reader.batch(BatchLimits(max_entries, align))
    while reader.batch(BatchLimits(max_entries, align)):
        assert reader.rows or reader.gaps
        assert len(reader.rows) <= max(max_entries, len(QUEUES))
        reader.rows.clear()
        reader.gaps.clear()
    for queue, stream in reader.streams.streams.items():
        assert reader.offsets[queue].id == stream.last


@given(steps, steps, st.integers(1, 9), st.integers(1, 20))
def test_available_now_ends_at_the_newest_entry_at_its_start(
    before: list[Any], during: list[Any], page: int, max_entries: int
) -> None:
    history = History(page).play(before)
    reader = history.reader
    reader.catch_up()
    history.play([step for step in during if step[0] == "add"])
    target = reader.streams.states(QUEUES)
    rows = len(reader.rows)
    for step in during:
        history.play([step] if step[0] != "batch" else [])
        reader.batch(BatchLimits(max_entries, target=target))
    while reader.batch(BatchLimits(max_entries, target=target)):
        pass
    assert Counter(reader.rows[rows:]) <= Counter(
        entry for stream in history.streams.values() for entry in all_entries(stream, target[stream.queue])
    )
    for queue, state in target.items():
        if state is not None:
            assert (reader.offsets[queue].id, reader.offsets[queue].ordinal) == (state.last, state.added)
    reader.catch_up()
    for queue, stream in history.streams.items():
        assert reader.read(queue) + reader.lost(queue) == stream.added


def all_entries(stream: MemoryStream, state: StreamState | None) -> list[Entry]:
    return [] if state is None else [(stream.queue, 1, number + 1) for number in range(state.added or 0)]


@pytest.mark.parametrize("recreated_ms", [1, 5_000])
def test_available_now_ends_even_if_a_stream_is_deleted_meanwhile(recreated_ms: int) -> None:
    history = History(5).play([("add", "emails", 9, 1), ("add", "images", 9, 1)])
    reader = history.reader
    target = reader.streams.states(QUEUES)
    history.delete("emails")
    history.streams["emails"].add(recreated_ms, 30)
    for _ in range(20):
        if not reader.batch(BatchLimits(3, target=target)):
            break
    else:
        raise AssertionError("the stream does not end")
    assert reader.read("images") == 9
    assert reader.read("emails") == 0


def test_available_now_ends_even_if_uncounted_entries_were_trimmed() -> None:
    history = History(5, counts=False).play([("add", "emails", 9, 1), ("add", "images", 9, 1)])
    reader = history.reader
    reader.batch(BatchLimits())
    target = reader.streams.states(QUEUES)
    history.play([("trim", "emails", 9), ("add", "emails", 30, 1)])
    while reader.batch(BatchLimits(3, target=target)):
        pass
    assert (reader.read("emails"), reader.read("images")) == (0, 9)


def test_a_queue_created_during_available_now_is_left_for_the_next_run() -> None:
    history = History(5).play([("add", "emails", 3, 1)])
    reader = history.reader
    streams = reader.streams.streams = {"emails": history.streams["emails"]}
    target = reader.streams.states(["emails"])
    streams["images"] = MemoryStream("images")
    streams["images"].add(5_000, 4)
    while reader.batch(BatchLimits(target=target)):
        pass
    assert (reader.read("emails"), reader.read("images")) == (3, 0)
    assert set(reader.offsets) == {"emails"}


def test_losses_of_a_queue_created_while_reading_are_counted() -> None:
    reader = History(5).reader
    reader.batch(BatchLimits())
    stream = reader.streams.streams["emails"]
    stream.add(2_000, 10)
    stream.trim(4)
    reader.catch_up()
    assert (reader.read("emails"), reader.lost("emails")) == (6, 4)


def test_a_queue_added_to_the_option_begins_with_a_gap_for_the_entries_trimmed_before() -> None:
    history = History(5).play([("add", "emails", 10, 1), ("trim", "emails", 4)])
    reader = history.reader
    reader.batch(BatchLimits(are_created=False))
    reader.catch_up()
    assert (reader.read("emails"), reader.lost("emails")) == (6, 4)
    assert [gap.loss_reason for gap in reader.gaps] == [LossReason.TRIMMED_BEFORE_START]
    assert reader.offsets["emails"] == QueueOffset(StreamId(1_001, 9), 10, lost=4)


def test_a_queue_that_is_no_longer_read_keeps_its_offset() -> None:
    streams = MemoryStreams({"emails": MemoryStream("emails")})
    start = {"emails": START, "gone": QueueOffset(StreamId(7, 1), 8, 2, 1)}
    streams.streams["emails"].add(5)
    planned = plan_batch(start, streams, ["emails"], BatchLimits())
    assert planned.end == {"emails": QueueOffset(StreamId(5, 0), 1), "gone": QueueOffset(StreamId(7, 1), 8, 2, 1)}


@pytest.mark.parametrize("behind", [0, 3, 9, 10, 99])
def test_a_start_after_an_id_counts_entries_after_catching_up(behind: int) -> None:
    stream = MemoryStream("emails")
    for ms in range(1, 11):
        stream.add(ms)
    stream.trim(2)
    reader = Reader(MemoryStreams({"emails": stream}), {"emails": first_offset(stream.state(), StreamId(behind, 0))})
    reader.catch_up()
    assert [number for _, _, number in reader.rows] == list(range(max(2, behind) + 1, 11))
    assert reader.offsets["emails"] == QueueOffset(StreamId(10, 0), 10, lost=0 if behind else 2)
    assert [gap.lost for gap in reader.gaps] == ([] if behind else [2])


@given(st.dictionaries(st.text("abc", max_size=3), st.integers(1, 50), max_size=8), st.integers(1, 60))
def test_the_batch_limit_is_used_completely_and_no_queue_starves(pending: dict[str, int], max_entries: int) -> None:
    limits = divide_limit(pending, max_entries)
    assert all(1 <= limits[queue] <= pending[queue] for queue in pending)
    if max_entries >= len(pending):
        assert sum(limits.values()) == min(max_entries, sum(pending.values()))
    limited = [limits[queue] for queue in pending if limits[queue] < pending[queue]]
    assert max(limited, default=0) - min(limited, default=0) <= 1, "queues that are limited get equal shares"
    assert divide_limit(pending, None) == pending


def test_entries_deleted_during_planning_are_reported_as_lost() -> None:
    stream = MemoryStream("emails")
    stream.add(1_000, 10)
    reader = Reader(MemoryStreams({"emails": stream}, meanwhile=stream.delete))
    reader.batch(BatchLimits())
    stream.add(2_000, 5)
    planned = plan_batch(reader.offsets, reader.streams, ["emails"], BatchLimits(max_entries=3))
    assert [(gap.lost, gap.exact) for gap in planned.gaps] == [(15, False)]
    assert planned.end == {"emails": QueueOffset(lost=15, generation=1)}


@given(st.lists(st.integers(0, 30)), st.integers(1, 20))
def test_packed_groups_keep_the_order_and_are_as_large_as_the_limit_allows(sizes: list[int], limit: int) -> None:
    groups = list(pack(sizes, lambda size: size, limit))
    assert [size for group in groups for size in group] == sizes
    assert all(sum(group) <= limit or len(group) == 1 for group in groups)
    assert all(sum(group) + following[0] > limit for group, following in pairwise(groups))
