"""Random histories of streams that are trimmed, deleted and recreated while they are read."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.spark.source.offsets import (
    START,
    EventGap,
    QueueOffset,
    StreamId,
    StreamState,
    decode_offsets,
    encode_offsets,
    first_offset,
)
from bulltask.spark.source.planning import BatchLimits, plan_batch, split_budget
from bulltask.spark.source.ranges import split_range
from tests.support.memory_streams import Entry, MemoryStream, MemoryStreams

QUEUES = ("emails", "images", "reports")


@dataclass
class Reader:
    """Reads batch after batch as Spark does: offsets travel as JSON, a batch may be planned, lost and read again."""

    streams: MemoryStreams
    offsets: Mapping[str, QueueOffset] = field(default_factory=dict)
    rows: list[Entry] = field(default_factory=list)
    gaps: list[EventGap] = field(default_factory=list)

    def batch(
        self, rules: BatchLimits, *, between: Any = lambda: None, late: Any = lambda: None, twice: bool = False
    ) -> bool:
        """Read a batch; ``between`` is what happens between planning and reading, ``late`` while tasks start.

        Returns:
            Whether anything was new.
        """
        planned = plan_batch(self.offsets, self.streams, list(self.streams.streams), rules)
        end = decode_offsets(json.loads(json.dumps(encode_offsets(planned.end))))
        assert end == planned.end
        between()
        if twice:
            self._read(end, late)
            between()
        rows, gaps = self._read(end, late)
        self.rows += rows
        self.gaps += gaps
        moved, self.offsets = end != dict(self.offsets), end
        return moved

    def _read(self, end: Mapping[str, QueueOffset], late: Any) -> tuple[list[Entry], list[EventGap]]:
        rows: list[Entry] = []
        gaps: list[EventGap] = []
        for queue, upto in end.items():
            ring = self.streams.streams[queue]
            lost, span = split_range(queue, self.offsets.get(queue), upto, ring.state())
            gaps += lost
            if span is not None:
                late()
                found = ring.read(span.after, span.upto)
                assert span.expect is None or len(found) <= span.expect
                rows += found
                gaps += [gap] if (gap := span.gap(len(found))) else []
        return rows, gaps

    def catch_up(self) -> None:
        for _ in range(1_000):
            if not self.batch(BatchLimits()):
                return
        raise AssertionError("the reader never comes to an end")

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
    """Plays steps; the clock is the same for all queues and never goes back."""

    def __init__(self, page: int, counts: bool = True) -> None:
        self.ms = 1_000
        self.disturbances: list[Any] = []
        self.streams = {queue: MemoryStream(queue, counts) for queue in QUEUES}
        self.reader = Reader(MemoryStreams(self.streams, page, self._disturb))

    def play(self, steps: list[Any]) -> History:
        for step in steps:
            getattr(self, step[0])(*step[1:])
        return self

    def add(self, queue: str, number: int, later: int) -> None:
        self.ms += later
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
def test_rows_plus_losses_are_what_was_added_whatever_is_trimmed(steps: list[Any], page: int) -> None:
    history = History(page).play(steps)
    reader = history.reader
    reader.catch_up()
    assert max(Counter(reader.rows).values(), default=1) == 1
    for queue, ring in history.streams.items():
        assert reader.read(queue) + reader.lost(queue) == ring.added
        assert all(gap.exact for gap in reader.gaps)


@given(steps, st.integers(1, 9))
def test_the_offsets_losses_are_those_that_plans_saw(steps: list[Any], page: int) -> None:
    history = History(page).play(steps)
    reader = history.reader
    reader.catch_up()
    for queue in QUEUES:
        assert 0 <= reader.offsets[queue].lost <= reader.lost(queue)
        assert reader.offsets[queue].generation == 0


@given(steps, st.integers(1, 9), queues, st.integers(0, 20), steps)
def test_a_recreated_stream_is_read_from_its_beginning_and_nothing_twice(
    before: list[Any], page: int, queue: str, again: int, after: list[Any]
) -> None:
    history = History(page).play(before)
    reader, ring = history.reader, history.streams[queue]
    reader.catch_up()
    had = reader.offsets[queue]
    history.delete(queue)
    history.add(queue, again, 1)
    if had.ordinal:  # a trim up to what was read leaves no trace of the first stream
        history.trim(queue, min(again, had.ordinal - 1))
    lost_before = reader.lost(queue)
    reader.batch(BatchLimits())
    assert [gap.exact for gap in reader.gaps if not gap.exact] == [False] * bool(had.ordinal)
    history.play(after)
    reader.catch_up()
    assert max(Counter(reader.rows).values(), default=1) == 1
    second = sum(1 for row in reader.rows if row[:2] == (queue, 2))
    assert second + reader.lost(queue) - lost_before == ring.added


@given(steps, st.integers(1, 9))
def test_without_counts_nothing_is_read_twice_and_all_that_is_there_is_read(steps: list[Any], page: int) -> None:
    history = History(page, counts=False).play(steps)
    reader = history.reader
    left = {entry for ring in history.streams.values() for _, entry in ring.kept}
    reader.catch_up()
    assert max(Counter(reader.rows).values(), default=1) == 1
    assert left <= set(reader.rows)
    for queue, ring in history.streams.items():
        missed = ring.added - reader.read(queue)
        assert missed == 0 or not reader.lost(queue), "a number that nobody knows was given"


@given(steps, st.integers(1, 9))
def test_an_idle_readers_offset_stays_byte_for_byte(steps: list[Any], page: int) -> None:
    reader = History(page).play(steps).reader
    reader.catch_up()
    before = json.dumps(encode_offsets(reader.offsets))
    rows = len(reader.rows)
    for rules in (BatchLimits(), BatchLimits(max_entries=1), BatchLimits(align=False)):
        planned = plan_batch(reader.offsets, reader.streams, list(reversed(QUEUES)), rules)
        assert json.dumps(encode_offsets(planned.end)) == before
        assert planned.gaps == ()
    assert len(reader.rows) == rows
    assert list(encode_offsets(reader.offsets)["queues"]) == sorted(QUEUES)


def read_until(position: QueueOffset) -> int:
    return (position.ordinal or 0) - position.lost


@given(steps, st.integers(1, 9), st.integers(1, 20))
def test_nothing_is_read_that_is_newer_than_what_is_left(steps: list[Any], page: int, max_entries: int) -> None:
    reader = History(page).play([step for step in steps if step[0] != "batch"]).reader
    moved = reader.batch(BatchLimits(max_entries))
    while moved:
        start = reader.offsets
        moved = reader.batch(BatchLimits(max_entries))
        ends = reader.offsets
        read = [ends[queue].id.ms for queue in QUEUES if read_until(ends[queue]) > read_until(start[queue])]
        left = [
            entry_id.ms
            for queue, ring in reader.streams.streams.items()
            for entry_id, _ in ring.kept
            if entry_id > ends[queue].id
        ]
        assert max(read, default=0) <= min(left, default=10**12)


@given(steps, st.integers(1, 9), st.integers(1, 20), st.booleans())
def test_a_batch_keeps_its_budget_and_always_makes_progress(
    steps: list[Any], page: int, max_entries: int, align: bool
) -> None:
    reader = History(page).play([step for step in steps if step[0] != "batch"]).reader
    reader.batch(BatchLimits(max_entries, align))
    while reader.batch(BatchLimits(max_entries, align)):
        assert reader.rows or reader.gaps
        assert len(reader.rows) <= max(max_entries, len(QUEUES))
        reader.rows.clear()
        reader.gaps.clear()
    for queue, ring in reader.streams.streams.items():
        assert reader.offsets[queue].id == ring.last


@given(steps, steps, st.integers(1, 9), st.integers(1, 20))
def test_available_now_ends_at_what_was_there_when_it_began(
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
        entry for ring in history.streams.values() for entry in all_entries(ring, target[ring.queue])
    )
    for queue, state in target.items():
        if state is not None:
            assert (reader.offsets[queue].id, reader.offsets[queue].ordinal) == (state.last, state.added)
    reader.catch_up()
    for queue, ring in history.streams.items():
        assert reader.read(queue) + reader.lost(queue) == ring.added


def all_entries(ring: MemoryStream, state: StreamState | None) -> list[Entry]:
    return [] if state is None else [(ring.queue, 1, number + 1) for number in range(state.added or 0)]


@pytest.mark.parametrize("again_at", [1, 5_000])
def test_a_stream_that_is_deleted_during_available_now_does_not_keep_it_from_ending(again_at: int) -> None:
    history = History(5).play([("add", "emails", 9, 1), ("add", "images", 9, 1)])
    reader = history.reader
    target = reader.streams.states(QUEUES)
    history.delete("emails")
    history.streams["emails"].add(again_at, 30)
    for _ in range(20):
        if not reader.batch(BatchLimits(3, target=target)):
            break
    else:
        raise AssertionError("it does not end")
    assert reader.read("images") == 9
    assert reader.read("emails") == 0


def test_what_cannot_be_counted_and_is_gone_does_not_keep_available_now_from_ending() -> None:
    history = History(5, counts=False).play([("add", "emails", 9, 1), ("add", "images", 9, 1)])
    reader = history.reader
    reader.batch(BatchLimits())
    target = reader.streams.states(QUEUES)
    history.play([("trim", "emails", 9), ("add", "emails", 30, 1)])
    while reader.batch(BatchLimits(3, target=target)):
        pass
    assert (reader.read("emails"), reader.read("images")) == (0, 9)


def test_a_queue_that_appears_during_available_now_is_left_for_the_next_run() -> None:
    history = History(5).play([("add", "emails", 3, 1)])
    reader = history.reader
    late = reader.streams.streams = {"emails": history.streams["emails"]}
    target = reader.streams.states(["emails"])
    late["images"] = MemoryStream("images")
    late["images"].add(5_000, 4)
    while reader.batch(BatchLimits(target=target)):
        pass
    assert (reader.read("emails"), reader.read("images")) == (3, 0)
    assert set(reader.offsets) == {"emails"}


def test_losses_of_a_queue_that_appears_while_reading_are_counted() -> None:
    reader = History(5).reader
    reader.batch(BatchLimits())
    ring = reader.streams.streams["emails"]
    ring.add(2_000, 10)
    ring.trim(4)
    reader.catch_up()
    assert (reader.read("emails"), reader.lost("emails")) == (6, 4)


def test_a_queue_that_is_added_to_the_list_begins_with_what_is_there_without_losses() -> None:
    history = History(5).play([("add", "emails", 10, 1), ("trim", "emails", 4)])
    reader = history.reader
    reader.batch(BatchLimits(count_missed=False))
    reader.catch_up()
    assert (reader.read("emails"), reader.lost("emails")) == (6, 0)
    assert reader.offsets["emails"] == QueueOffset(StreamId(1_001, 9), 10)


def test_a_queue_that_is_no_longer_read_keeps_its_offset() -> None:
    rings = MemoryStreams({"emails": MemoryStream("emails")})
    start = {"emails": START, "gone": QueueOffset(StreamId(7, 1), 8, 2, 1)}
    rings.streams["emails"].add(5)
    planned = plan_batch(start, rings, ["emails"], BatchLimits())
    assert planned.end == {"emails": QueueOffset(StreamId(5, 0), 1), "gone": QueueOffset(StreamId(7, 1), 8, 2, 1)}


@pytest.mark.parametrize("behind", [0, 3, 9, 10, 99])
def test_a_start_after_an_id_reads_what_follows_and_counts_once_it_has_caught_up(behind: int) -> None:
    ring = MemoryStream("emails")
    for ms in range(1, 11):
        ring.add(ms)
    ring.trim(2)
    reader = Reader(MemoryStreams({"emails": ring}), {"emails": first_offset(ring.state(), StreamId(behind, 0))})
    reader.catch_up()
    assert [number for _, _, number in reader.rows] == list(range(max(2, behind) + 1, 11))
    assert reader.offsets["emails"] == QueueOffset(StreamId(10, 0), 10)


@given(st.dictionaries(st.text("abc", max_size=3), st.integers(1, 50), max_size=8), st.integers(1, 60))
def test_the_budget_is_used_up_and_no_queue_starves(pending: dict[str, int], max_entries: int) -> None:
    given = split_budget(pending, max_entries)
    assert all(1 <= given[queue] <= pending[queue] for queue in pending)
    if max_entries >= len(pending):
        assert sum(given.values()) == min(max_entries, sum(pending.values()))
    cut = [given[queue] for queue in pending if given[queue] < pending[queue]]
    assert max(cut, default=0) - min(cut, default=0) <= 1, "who is cut gives as much as the others who are"
    assert split_budget(pending, None) == pending


def test_entries_deleted_during_planning_are_lost_as_far_as_the_plan_has_seen_them() -> None:
    ring = MemoryStream("emails")
    ring.add(1_000, 10)
    reader = Reader(MemoryStreams({"emails": ring}, meanwhile=ring.delete))
    reader.batch(BatchLimits())
    ring.add(2_000, 5)
    planned = plan_batch(reader.offsets, reader.streams, ["emails"], BatchLimits(max_entries=3))
    assert [(gap.lost, gap.exact) for gap in planned.gaps] == [(15, False)]
    assert planned.end == {"emails": QueueOffset(lost=15, generation=1)}
