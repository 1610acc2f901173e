"""Offsets are reconciled with streams that were trimmed, deleted, recreated or rolled back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import DecodeError
from bulltask.spark.source.offsets import (
    BEGINNING,
    LAST_SEQ,
    START,
    EventGap,
    LossReason,
    QueueOffset,
    StreamEnd,
    StreamId,
    StreamState,
    decode_offsets,
    encode_offsets,
    first_offset,
    reconcile,
    with_stream_end,
)
from bulltask.spark.source.planning import EntryRange, split_range


def at(ms: int, seq: int = 0) -> StreamId:
    return StreamId(ms, seq)


def stream(first: int | None, last: int, length: int, added: int | None) -> StreamState:
    return StreamState(None if first is None else at(first), at(last), length, added)


OFFSET = QueueOffset(at(50), 5, lost=1, generation=2)
"""The offset after the five entries up to 50, one of which was lost, in the stream's third generation."""


def test_ids_are_ordered_as_numbers_and_written_as_redis_writes_them() -> None:
    assert StreamId.parse("1760010061025-10") > StreamId.parse("1760010061025-9")
    assert str(StreamId.parse("1760010061025-10")) == "1760010061025-10"


@pytest.mark.parametrize("text", ["", "5", "5-", "-5", "5-x", "5-1-1", "5 -1", "5-1x"])
def test_invalid_ids_are_rejected(text: str) -> None:
    with pytest.raises(DecodeError, match="is not the id"):
        StreamId.parse(text)


def test_before_returns_the_immediately_preceding_id() -> None:
    assert at(5, 3).before == at(5, 2)
    assert at(5).before == StreamId(4, LAST_SEQ)
    assert BEGINNING.before == BEGINNING


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(stream(10, 90, 9, 9), id="nothing trimmed"),
        pytest.param(stream(50, 90, 5, 9), id="trimmed up to the position"),
        pytest.param(stream(60, 90, 4, 9), id="trimmed with the position"),
        pytest.param(stream(50, 50, 1, 5), id="caught up"),
        pytest.param(stream(None, 50, 0, 5), id="caught up, and all trimmed"),
    ],
)
def test_an_offset_stays_while_nothing_after_it_is_trimmed(state: StreamState) -> None:
    assert reconcile("emails", OFFSET, state) == (OFFSET, None)


def test_entries_trimmed_before_they_were_read_are_counted_as_lost() -> None:
    reconciled, gap = reconcile("emails", OFFSET, stream(80, 90, 2, 9))
    assert reconciled == QueueOffset(StreamId(79, LAST_SEQ), 7, lost=3, generation=2)
    assert gap == EventGap("emails", at(50), at(80), 2, exact=True, loss_reason=LossReason.TRIMMED)


def test_the_offset_of_a_stream_trimmed_to_nothing_moves_to_its_end() -> None:
    reconciled, gap = reconcile("emails", OFFSET, stream(None, 90, 0, 9))
    assert reconciled == QueueOffset(at(90), 9, lost=5, generation=2)
    assert gap == EventGap("emails", at(50), None, 4, exact=True, loss_reason=LossReason.TRIMMED)


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(stream(60, 70, 2, 2), id="fewer were added than were read"),
        pytest.param(stream(60, 99, 5, 5), id="as many were added as were read"),
        pytest.param(stream(60, 99, 20, 20), id="more were added, but none is old enough"),
        pytest.param(stream(80, 99, 16, 20), id="more were added, and one less was trimmed than read"),
        pytest.param(stream(None, 40, 0, 4), id="the stream is empty and behind the offset"),
    ],
)
def test_a_recreated_stream_is_read_from_its_beginning(state: StreamState) -> None:
    reconciled, gap = reconcile("emails", OFFSET, state)
    assert reconciled == QueueOffset(BEGINNING, 0, lost=1, generation=3)
    assert gap == EventGap("emails", at(50), state.first, 0, exact=False, loss_reason=LossReason.STREAM_RECREATED)


def test_a_deleted_stream_is_reported_once() -> None:
    reconciled, gap = reconcile("emails", OFFSET, None)
    assert reconciled == QueueOffset(BEGINNING, 0, lost=1, generation=3)
    assert gap == EventGap("emails", at(50), None, 0, exact=False, loss_reason=LossReason.STREAM_DELETED)
    assert reconcile("emails", reconciled, None) == (reconciled, None)


def test_entries_seen_but_not_read_are_lost_with_a_deleted_stream() -> None:
    behind = with_stream_end(OFFSET, stream(10, 90, 9, 9))
    assert (behind.seen, behind.pending) == (StreamEnd(at(90), 9), 4)
    for state, reason in ((None, LossReason.STREAM_DELETED), (stream(91, 95, 12, 12), LossReason.STREAM_RECREATED)):
        reconciled, gap = reconcile("emails", behind, state)
        assert reconciled == QueueOffset(BEGINNING, 0, lost=5, generation=3)
        assert gap == EventGap("emails", at(50), state.first if state else None, 4, exact=False, loss_reason=reason)
    older, gap = reconcile("emails", behind, stream(10, 30, 3, 3))
    assert (older, gap and gap.lost) == (QueueOffset(at(30), 3, lost=5, generation=3), 4)


@pytest.mark.parametrize(
    "state", [stream(10, 90, 9, 9), stream(80, 99, 5, 12), stream(95, 99, 2, 12), stream(10, 90, 8, None)]
)
def test_a_trimmed_stream_is_not_mistaken_for_a_recreated_one(state: StreamState) -> None:
    behind = with_stream_end(OFFSET, stream(10, 90, 9, 9))
    reconciled, gap = reconcile("emails", behind, state)
    assert reconciled.generation == OFFSET.generation
    assert gap is None or gap.exact


def test_an_unread_stream_is_recognized_by_its_stored_end() -> None:
    unread = with_stream_end(START, stream(10, 30, 3, 3))
    assert reconcile("emails", unread, None)[0] == QueueOffset(lost=3, generation=1)
    assert reconcile("emails", unread, stream(40, 90, 9, 9))[0] == QueueOffset(lost=3, generation=1)
    assert reconcile("emails", unread, stream(None, 90, 0, 2))[0] == QueueOffset(lost=3, generation=1)
    assert reconcile("emails", unread, stream(10, 90, 9, 9)) == (unread, None)


@pytest.mark.parametrize("state", [None, stream(10, 50, 5, 5), stream(10, 90, 9, None), stream(10, 30, 3, 3)])
def test_the_stream_end_is_stored_only_if_entries_are_known_to_be_pending(state: StreamState | None) -> None:
    assert with_stream_end(OFFSET, state) == OFFSET
    assert with_stream_end(QueueOffset(at(5), None), stream(10, 90, 9, 9)).seen is None


def test_a_stream_rolled_back_to_an_older_copy_is_not_read_again() -> None:
    reconciled, gap = reconcile("emails", OFFSET, stream(10, 30, 3, 3))
    assert reconciled == QueueOffset(at(30), 3, lost=1, generation=3)
    assert gap == EventGap("emails", at(50), at(10), 0, exact=False, loss_reason=LossReason.FAILOVER_ROLLBACK)


def test_an_older_copy_with_new_entries_is_read_without_a_count() -> None:
    reconciled, gap = reconcile("emails", OFFSET, stream(10, 60, 4, 4))
    assert reconciled == QueueOffset(at(50), None, lost=1, generation=3)
    assert gap is not None
    assert gap.loss_reason is LossReason.FAILOVER_ROLLBACK


@pytest.mark.parametrize("state", [stream(10, 40, 9, 9), stream(10, 40, 4, None)])
def test_a_stream_that_ends_before_the_offset_was_rolled_back(state: StreamState) -> None:
    reconciled, gap = reconcile("emails", OFFSET, state)
    assert reconciled == QueueOffset(at(40), state.added, lost=1, generation=3)
    assert gap is not None
    assert gap.loss_reason is LossReason.FAILOVER_ROLLBACK


def test_without_counts_a_loss_is_reported_with_an_unknown_number() -> None:
    uncounted = QueueOffset(at(50), None)
    assert reconcile("emails", uncounted, stream(40, 90, 5, None)) == (uncounted, None)
    reconciled, gap = reconcile("emails", uncounted, stream(60, 90, 4, None))
    assert reconciled == QueueOffset(StreamId(59, LAST_SEQ), None)
    assert gap == EventGap("emails", at(50), at(60), 0, exact=False, loss_reason=LossReason.TRIMMED)


def test_counting_resumes_when_the_reader_has_caught_up() -> None:
    assert reconcile("emails", QueueOffset(at(90), None), stream(60, 90, 4, 9)) == (QueueOffset(at(90), 9), None)


def test_a_reader_starts_at_the_oldest_entry_the_end_or_a_given_id() -> None:
    state = stream(60, 90, 4, 9)
    assert first_offset(state, "earliest") == first_offset(state, BEGINNING) == QueueOffset(missed=5)
    assert first_offset(stream(60, 90, 4, 4), "earliest") == START
    assert first_offset(state, "latest") == QueueOffset(at(90), 9)
    assert first_offset(state, at(70)) == QueueOffset(at(70), None)
    assert first_offset(state, at(10**15)) == first_offset(state, "latest")
    assert first_offset(None, "latest") == first_offset(None, at(5)) == START


def test_entries_trimmed_before_the_start_are_a_gap_of_their_own_kind() -> None:
    start, state = QueueOffset(missed=5), stream(60, 90, 4, 9)
    reconciled, gap = reconcile("emails", start, state)
    assert reconciled == QueueOffset(StreamId(59, LAST_SEQ), 5, lost=5)
    assert gap == EventGap("emails", BEGINNING, at(60), 5, exact=True, loss_reason=LossReason.TRIMMED_BEFORE_START)
    assert split_range("emails", start, QueueOffset(at(90), 9, lost=5), state)[0] == [gap]
    later, gap = reconcile("emails", start, stream(80, 90, 2, 9))
    assert gap is not None
    assert (gap.lost, gap.loss_reason, later.lost) == (7, LossReason.TRIMMED, 7), "two of them could have been read"


def test_a_start_at_an_id_that_was_trimmed_is_a_gap_of_unknown_size() -> None:
    state = stream(60, 90, 4, 9)
    _, gap = reconcile("emails", first_offset(state, at(10)), state)
    assert gap == EventGap("emails", at(10), at(60), 0, exact=False, loss_reason=LossReason.TRIMMED)
    whole = stream(60, 90, 9, 9)
    assert reconcile("emails", first_offset(whole, at(10)), whole)[1] is None
    assert first_offset(whole, at(70)) == QueueOffset(at(70), None)


def test_a_gaps_message_names_the_queue_id_count_and_options() -> None:
    gap = EventGap("{emails}", at(50), at(80), 3155, exact=True, loss_reason=LossReason.TRIMMED)
    assert gap.message.startswith(
        "[BULLTASK_EVENTS_LOST] queue={emails} last_id_before=50-0: 3155 events lost (trimmed before they were read), "
        "the first remaining event is 80-0. To record the gap and continue, use on_loss='gap' (pipeline run: "
        "--on-loss gap; format('bulltask'): failOnDataLoss=false, gapRows=true)"
    )
    gone = EventGap("emails", at(50), None, 0, exact=False, loss_reason=LossReason.STREAM_DELETED)
    assert "at least 0 events lost (the stream was deleted), no event is left." in gone.message


positions = st.builds(
    QueueOffset,
    st.builds(StreamId, st.integers(0, 2**48), st.integers(0, LAST_SEQ)),
    st.none() | st.integers(0, 2**53),
    st.integers(0, 2**53),
    st.integers(0, 99),
    st.none()
    | st.builds(StreamEnd, st.builds(StreamId, st.integers(0, 2**48), st.integers(0, 9)), st.integers(0, 2**53)),
    st.integers(0, 2**53),
)


@given(st.dictionaries(st.text(max_size=5), positions, max_size=5), st.randoms())
def test_offsets_round_trip_as_json_and_do_not_depend_on_order(offsets: dict[str, QueueOffset], rng: Any) -> None:
    text = json.dumps(encode_offsets(offsets))
    assert decode_offsets(json.loads(text)) == offsets
    names = list(offsets)
    rng.shuffle(names)
    assert json.dumps(encode_offsets({name: offsets[name] for name in names})) == text


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"version": 2, "queues": {}},
        {"version": 1},
        {"version": 1, "queues": []},
        {"version": 1, "queues": {"a": "5-0|5"}},
        {"version": 1, "queues": {"a": {"id": "x", "ordinal": 0, "lost": 0, "generation": 0}}},
        {"version": 1, "queues": {"a": {"id": "5-0", "ordinal": 0, "lost": 0}}},
        {"version": 1, "queues": {"a": {"id": "5-0", "ordinal": 0, "lost": 0, "generation": 0, "seen": {"id": "6-0"}}}},
    ],
)
def test_an_invalid_stored_offset_is_rejected(stored: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match="offset"):
        decode_offsets(stored)


def test_a_complete_batch_is_one_range() -> None:
    end = QueueOffset(at(90), 9, lost=1, generation=2)
    assert split_range("emails", OFFSET, end, stream(50, 95, 6, 10)) == ([], EntryRange("emails", at(50), at(90), 4))


def test_a_queue_without_new_entries_has_no_range() -> None:
    state = stream(50, 95, 6, 10)
    assert split_range("emails", None, OFFSET, state) == ([], None)
    assert split_range("emails", OFFSET, OFFSET, state) == ([], None)
    assert split_range("emails", OFFSET, with_stream_end(OFFSET, state), stream(80, 95, 2, None)) == ([], None)


def test_losses_after_planning_are_separate_from_planned_losses() -> None:
    end = QueueOffset(at(90), 9, lost=2, generation=2)
    gaps, span = split_range("emails", OFFSET, end, stream(80, 95, 3, 10))
    assert [(gap.loss_reason, gap.lost, gap.first_id_after) for gap in gaps] == [
        (LossReason.TRIMMED, 1, at(80)),
        (LossReason.TRIMMED_DURING_READ, 1, at(80)),
    ]
    assert span == EntryRange("emails", at(50), at(90), 2)


@pytest.mark.parametrize("state", [None, stream(200, 300, 3, 3), stream(None, 95, 0, 10)])
def test_a_stream_deleted_after_planning_is_lost_completely(state: StreamState | None) -> None:
    gaps, span = split_range("emails", OFFSET, QueueOffset(at(90), 9, lost=1, generation=2), state)
    assert [(gap.loss_reason, gap.lost, gap.exact) for gap in gaps] == [(LossReason.TRIMMED_DURING_READ, 4, True)]
    assert span is None


@pytest.mark.parametrize(
    ("end", "state", "reason"),
    [
        (QueueOffset(BEGINNING, 0, 1, 3), None, LossReason.STREAM_DELETED),
        (QueueOffset(BEGINNING, 0, 1, 3), stream(60, 70, 2, 2), LossReason.STREAM_RECREATED),
        (QueueOffset(at(30), 3, 1, 3), stream(10, 30, 3, 3), LossReason.FAILOVER_ROLLBACK),
    ],
)
def test_a_batch_between_two_generations_is_a_gap_of_unknown_size(
    end: QueueOffset, state: StreamState | None, reason: LossReason
) -> None:
    gaps, span = split_range("emails", OFFSET, end, state)
    assert [(gap.loss_reason, gap.lost, gap.exact) for gap in gaps] == [(reason, 0, False)]
    assert span is None


def test_a_range_without_counts_reports_no_loss() -> None:
    end = QueueOffset(at(90), None, lost=1, generation=2)
    gaps, span = split_range("emails", OFFSET, end, stream(50, 95, 6, None))
    assert (gaps, span) == ([], EntryRange("emails", at(50), at(90), None))
    assert span is not None
    assert span.gap(0) is None


def test_a_partly_read_range_reports_the_missing_entries_as_lost() -> None:
    span = EntryRange("emails", at(50), at(90), 4)
    assert span.gap(4) is span.gap(5) is None
    assert span.gap(1, at(80)) == EventGap(
        "emails", at(50), at(80), 3, exact=True, loss_reason=LossReason.TRIMMED_DURING_READ
    )
