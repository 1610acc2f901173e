"""What a position becomes when its stream was trimmed, deleted, made again or rolled back."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import DecodeError
from bulltask.spark.source.positions import (
    BEGINNING,
    LAST_SEQ,
    START,
    Cut,
    Facts,
    Gap,
    LossReason,
    Position,
    StreamId,
    decode,
    encode,
    seeing,
    settle,
    starting,
)
from bulltask.spark.source.spans import Span, spans_of


def at(ms: int, seq: int = 0) -> StreamId:
    return StreamId(ms, seq)


def stream(first: int | None, last: int, length: int, added: int | None) -> Facts:
    return Facts(None if first is None else at(first), at(last), length, added)


READ = Position(at(50), 5, lost=1, life=2)
"""Five entries up to 50; one of them was lost, in the stream's third life."""


def test_ids_are_ordered_as_numbers_and_written_as_redis_writes_them() -> None:
    assert StreamId.parse("1760010061025-10") > StreamId.parse("1760010061025-9")
    assert str(StreamId.parse("1760010061025-10")) == "1760010061025-10"


@pytest.mark.parametrize("text", ["", "5", "5-", "-5", "5-x", "5-1-1", "5 -1", "5-1x"])
def test_what_is_no_id_is_refused(text: str) -> None:
    with pytest.raises(DecodeError, match="is no id"):
        StreamId.parse(text)


def test_nothing_comes_between_an_id_and_the_one_before_it() -> None:
    assert at(5, 3).before == at(5, 2)
    assert at(5).before == StreamId(4, LAST_SEQ)
    assert BEGINNING.before == BEGINNING


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(stream(10, 90, 9, 9), id="nothing trimmed"),
        pytest.param(stream(50, 90, 5, 9), id="trimmed up to the position"),
        pytest.param(stream(60, 90, 4, 9), id="trimmed with the position"),
        pytest.param(stream(50, 50, 1, 5), id="caught up"),
        pytest.param(stream(None, 50, 0, 5), id="caught up, and all trimmed"),
    ],
)
def test_a_position_stays_while_nothing_behind_it_is_gone(facts: Facts) -> None:
    assert settle("emails", READ, facts) == (READ, None)


def test_what_was_trimmed_unread_is_counted_and_the_position_stands_before_what_is_left() -> None:
    settled, gap = settle("emails", READ, stream(80, 90, 2, 9))
    assert settled == Position(StreamId(79, LAST_SEQ), 7, lost=3, life=2)
    assert gap == Gap("emails", at(50), at(80), 2, exact=True, reason=LossReason.TRIMMED)


def test_a_stream_of_which_nothing_is_left_is_done() -> None:
    settled, gap = settle("emails", READ, stream(None, 90, 0, 9))
    assert settled == Position(at(90), 9, lost=5, life=2)
    assert gap == Gap("emails", at(50), None, 4, exact=True, reason=LossReason.TRIMMED)


@pytest.mark.parametrize(
    "facts",
    [
        pytest.param(stream(60, 70, 2, 2), id="fewer were added than were read"),
        pytest.param(stream(60, 99, 5, 5), id="as many were added as were read"),
        pytest.param(stream(60, 99, 20, 20), id="more were added, none of them is old enough"),
        pytest.param(stream(80, 99, 16, 20), id="more were added, one less trimmed than read"),
        pytest.param(stream(None, 40, 0, 4), id="it is empty and behind"),
    ],
)
def test_another_stream_is_read_from_its_beginning_in_a_life_of_its_own(facts: Facts) -> None:
    settled, gap = settle("emails", READ, facts)
    assert settled == Position(BEGINNING, 0, lost=1, life=3)
    assert gap == Gap("emails", at(50), facts.first, 0, exact=False, reason=LossReason.RECREATED)


def test_a_deleted_stream_is_told_once() -> None:
    settled, gap = settle("emails", READ, None)
    assert settled == Position(BEGINNING, 0, lost=1, life=3)
    assert gap == Gap("emails", at(50), None, 0, exact=False, reason=LossReason.GONE)
    assert settle("emails", settled, None) == (settled, None)


def test_of_a_stream_that_is_gone_what_was_seen_behind_the_position_is_lost() -> None:
    behind = seeing(READ, stream(10, 90, 9, 9))
    assert (behind.seen, behind.waiting) == (Cut(at(90), 9), 4)
    for facts, reason in ((None, LossReason.GONE), (stream(91, 95, 12, 12), LossReason.RECREATED)):
        settled, gap = settle("emails", behind, facts)
        assert settled == Position(BEGINNING, 0, lost=5, life=3)
        assert gap == Gap("emails", at(50), facts.first if facts else None, 4, exact=False, reason=reason)
    older, gap = settle("emails", behind, stream(10, 30, 3, 3))
    assert (older, gap and gap.lost) == (Position(at(30), 3, lost=5, life=3), 4)


@pytest.mark.parametrize(
    "facts", [stream(10, 90, 9, 9), stream(80, 99, 5, 12), stream(95, 99, 2, 12), stream(10, 90, 8, None)]
)
def test_what_was_seen_does_not_make_another_stream_of_one_that_was_trimmed(facts: Facts) -> None:
    behind = seeing(READ, stream(10, 90, 9, 9))
    settled, gap = settle("emails", behind, facts)
    assert settled.life == READ.life
    assert gap is None or gap.exact


def test_where_nothing_was_read_another_stream_is_known_by_what_was_seen() -> None:
    unread = seeing(START, stream(10, 30, 3, 3))
    assert settle("emails", unread, None)[0] == Position(lost=3, life=1)
    assert settle("emails", unread, stream(40, 90, 9, 9))[0] == Position(lost=3, life=1)
    assert settle("emails", unread, stream(None, 90, 0, 2))[0] == Position(lost=3, life=1)
    assert settle("emails", unread, stream(10, 90, 9, 9)) == (unread, None)


@pytest.mark.parametrize("facts", [None, stream(10, 50, 5, 5), stream(10, 90, 9, None), stream(10, 30, 3, 3)])
def test_nothing_is_seen_behind_a_position_at_the_end_or_where_nobody_counts(facts: Facts | None) -> None:
    assert seeing(READ, facts) == READ
    assert seeing(Position(at(5), None), stream(10, 90, 9, 9)).seen is None


def test_an_older_copy_of_the_stream_is_not_read_again() -> None:
    settled, gap = settle("emails", READ, stream(10, 30, 3, 3))
    assert settled == Position(at(30), 3, lost=1, life=3)
    assert gap == Gap("emails", at(50), None, 0, exact=False, reason=LossReason.ROLLED_BACK)


def test_an_older_copy_that_went_on_is_read_behind_the_position_without_a_count() -> None:
    settled, gap = settle("emails", READ, stream(10, 60, 4, 4))
    assert settled == Position(at(50), None, lost=1, life=3)
    assert gap is not None
    assert gap.reason is LossReason.ROLLED_BACK


@pytest.mark.parametrize("facts", [stream(10, 40, 9, 9), stream(10, 40, 4, None)])
def test_a_stream_that_ends_before_the_position_is_an_older_copy_however_much_it_counts(facts: Facts) -> None:
    settled, gap = settle("emails", READ, facts)
    assert settled == Position(at(40), facts.added, lost=1, life=3)
    assert gap is not None
    assert gap.reason is LossReason.ROLLED_BACK


def test_without_counts_a_loss_is_seen_but_no_number_is_given() -> None:
    here = Position(at(50), None)
    assert settle("emails", here, stream(40, 90, 5, None)) == (here, None)
    settled, gap = settle("emails", here, stream(60, 90, 4, None))
    assert settled == Position(StreamId(59, LAST_SEQ), None)
    assert gap == Gap("emails", at(50), at(60), 0, exact=False, reason=LossReason.TRIMMED)


def test_counting_begins_again_where_the_reader_has_caught_up() -> None:
    assert settle("emails", Position(at(90), None), stream(60, 90, 4, 9)) == (Position(at(90), 9), None)


def test_a_reader_begins_with_the_oldest_entry_the_next_one_or_behind_an_id() -> None:
    facts = stream(60, 90, 4, 9)
    assert starting(facts, "earliest") == Position(StreamId(59, LAST_SEQ), 5)
    assert starting(facts, "latest") == Position(at(90), 9)
    assert starting(facts, at(70)) == Position(at(70), None)
    assert starting(facts, at(10)) == starting(facts, "earliest")
    assert starting(facts, at(10**15)) == starting(facts, "latest")
    assert starting(None, "latest") == starting(None, at(5)) == START


def test_the_message_of_a_gap_says_where_what_how_much_and_what_to_do() -> None:
    gap = Gap("{emails}", at(50), at(80), 3155, exact=True, reason=LossReason.TRIMMED)
    assert gap.message.startswith(
        "[BULLTASK_EVENTS_LOST] queue={emails} after=50-0: trimmed before they were read; 3155 events lost, "
        "the first one left is 80-0. Set failOnDataLoss=false"
    )
    gone = Gap("emails", at(50), None, 0, exact=False, reason=LossReason.GONE)
    assert "the stream was deleted; at least 0 events lost, none is left." in gone.message


positions = st.builds(
    Position,
    st.builds(StreamId, st.integers(0, 2**48), st.integers(0, LAST_SEQ)),
    st.none() | st.integers(0, 2**53),
    st.integers(0, 2**53),
    st.integers(0, 99),
    st.none() | st.builds(Cut, st.builds(StreamId, st.integers(0, 2**48), st.integers(0, 9)), st.integers(0, 2**53)),
)


@given(st.dictionaries(st.text(max_size=5), positions, max_size=5), st.randoms())
def test_offsets_survive_sparks_json_and_are_the_same_text_in_any_order(
    offsets: dict[str, Position], luck: Any
) -> None:
    text = json.dumps(encode(offsets))
    assert decode(json.loads(text)) == offsets
    names = list(offsets)
    luck.shuffle(names)
    assert json.dumps(encode({name: offsets[name] for name in names})) == text


@pytest.mark.parametrize(
    "stored",
    [
        {},
        {"version": 2, "queues": {}},
        {"version": 1},
        {"version": 1, "queues": []},
        {"version": 1, "queues": {"a": "5-0|5"}},
        {"version": 1, "queues": {"a": {"id": "x", "ordinal": 0, "lost": 0, "life": 0}}},
        {"version": 1, "queues": {"a": {"id": "5-0", "ordinal": 0, "lost": 0}}},
        {"version": 1, "queues": {"a": {"id": "5-0", "ordinal": 0, "lost": 0, "life": 0, "seen": {"id": "6-0"}}}},
    ],
)
def test_an_offset_that_is_none_of_ours_is_refused(stored: dict[str, Any]) -> None:
    with pytest.raises(DecodeError, match="offset"):
        decode(stored)


def test_a_batch_that_is_whole_is_one_span() -> None:
    end = Position(at(90), 9, lost=1, life=2)
    assert spans_of("emails", READ, end, stream(50, 95, 6, 10)) == ([], Span("emails", at(50), at(90), 4))


def test_a_batch_that_takes_a_queue_in_or_has_nothing_of_it_has_no_span() -> None:
    facts = stream(50, 95, 6, 10)
    assert spans_of("emails", None, READ, facts) == ([], None)
    assert spans_of("emails", READ, READ, facts) == ([], None)
    assert spans_of("emails", READ, seeing(READ, facts), stream(80, 95, 2, None)) == ([], None)


def test_what_was_trimmed_since_the_plan_is_told_apart_from_what_the_plan_knew() -> None:
    end = Position(at(90), 9, lost=2, life=2)
    gaps, span = spans_of("emails", READ, end, stream(80, 95, 3, 10))
    assert [(gap.reason, gap.lost, gap.first) for gap in gaps] == [
        (LossReason.TRIMMED, 1, at(80)),
        (LossReason.AT_READ, 1, at(80)),
    ]
    assert span == Span("emails", at(50), at(90), 2)


@pytest.mark.parametrize("facts", [None, stream(200, 300, 3, 3), stream(None, 95, 0, 10)])
def test_of_a_stream_that_is_gone_since_the_plan_all_is_lost(facts: Facts | None) -> None:
    gaps, span = spans_of("emails", READ, Position(at(90), 9, lost=1, life=2), facts)
    assert [(gap.reason, gap.lost, gap.exact) for gap in gaps] == [(LossReason.AT_READ, 4, True)]
    assert span is None


@pytest.mark.parametrize(
    ("end", "facts", "reason"),
    [
        (Position(BEGINNING, 0, 1, 3), None, LossReason.GONE),
        (Position(BEGINNING, 0, 1, 3), stream(60, 70, 2, 2), LossReason.RECREATED),
        (Position(at(30), 3, 1, 3), stream(10, 30, 3, 3), LossReason.ROLLED_BACK),
    ],
)
def test_the_batch_between_two_lives_is_a_gap_of_no_known_size(
    end: Position, facts: Facts | None, reason: LossReason
) -> None:
    gaps, span = spans_of("emails", READ, end, facts)
    assert [(gap.reason, gap.lost, gap.exact) for gap in gaps] == [(reason, 0, False)]
    assert span is None


def test_without_counts_a_span_expects_nothing() -> None:
    end = Position(at(90), None, lost=1, life=2)
    gaps, span = spans_of("emails", READ, end, stream(50, 95, 6, None))
    assert (gaps, span) == ([], Span("emails", at(50), at(90), None))
    assert span is not None
    assert span.gap(0) is None


def test_a_span_of_which_less_was_read_tells_the_rest_as_lost() -> None:
    span = Span("emails", at(50), at(90), 4)
    assert span.gap(4) is span.gap(5) is None
    assert span.gap(1, at(80)) == Gap("emails", at(50), at(80), 3, exact=True, reason=LossReason.AT_READ)
