"""Columns are built from a whole page of entries; each row equals the row built from its entry alone."""

from __future__ import annotations

import gc
import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.spark.source.columns import (
    EVENT_FIELDS,
    EVENTS,
    JOBS,
    arrow_schema,
    event_record_batch,
    hash_fields,
    job_record_batch,
)
from bulltask.spark.source.connection import gc_paused

KNOWN = [name.encode() for name in EVENT_FIELDS.values()]
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
NUMBERS = ["0", "7", "-3", "1500.5", "1e3", "", " 5 ", "+5", "1_0", "0x1F", "0X1f", "soon", "nan", "9" * 30, "-" * 2]
TEXTS = st.one_of(
    st.sampled_from([number.encode() for number in NUMBERS]),
    st.integers(-(2**70), 2**70).map(lambda number: str(number).encode()),
    st.binary(max_size=8),
    st.text(max_size=8).map(str.encode),
)
NAMES = st.one_of(st.sampled_from(KNOWN), st.binary(max_size=3))
KINDS = st.lists(st.lists(NAMES, min_size=1, max_size=5), min_size=1, max_size=4)
TIMES = st.integers(0, 2**64 - 1)


@st.composite
def pages(draw: st.DrawFn) -> list[tuple[bytes, list[bytes]]]:
    """Draw entries of a few kinds in mixed order, as in a real stream."""
    kinds = draw(KINDS)
    page = []
    for ms, seq, kind in draw(st.lists(st.tuples(TIMES, TIMES, st.integers(0, len(kinds) - 1)), max_size=12)):
        page.append((b"%d-%d" % (ms, seq), [word for name in kinds[kind] for word in (name, draw(TEXTS))]))
    return page


def as_text(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def parse_number(raw: bytes | None, bits: int) -> int | None:
    """Parse a number as Python does; return None if it does not fit into the column."""
    for parse in (int, lambda value: int(float(value))):
        try:
            parsed: int = parse(raw)  # type: ignore[arg-type]
        except (ValueError, OverflowError, TypeError):
            continue
        return parsed if -(2 ** (bits - 1)) <= parsed < 2 ** (bits - 1) else None
    return None


def parse_time(raw: bytes | None) -> datetime | None:
    ms = parse_number(raw, 64)
    try:
        return None if ms is None else EPOCH + timedelta(milliseconds=ms)
    except OverflowError:
        return None


def row_of(entry_id: bytes, flat: list[bytes]) -> dict[str, Any]:
    """Return the expected row for a single entry: the oracle."""
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    ms, seq = entry_id.split(b"-")
    row: dict[str, Any] = {"queue": "mail", "event_id": as_text(entry_id), "event_at": parse_time(ms)}
    row |= {"event_ms": min(int(ms), 2**63 - 1), "event_seq": min(int(seq), 2**63 - 1)}
    for column, name in EVENT_FIELDS.items():
        raw = fields.pop(name.encode(), None)
        row[column] = None if raw is None else as_text(raw)
        if column == "delay_until":
            row[column] = parse_time(raw)
        elif column == "attempts_made":
            row[column] = parse_number(raw, 32)
    extra = {as_text(name): as_text(value) for name, value in fields.items()}
    return {**row, "extra": json.dumps(extra, sort_keys=True) if extra else None}


@given(pages())
def test_event_rows_equal_the_rows_of_single_entries(page: list[tuple[bytes, list[bytes]]]) -> None:
    batch = event_record_batch(arrow_schema(EVENTS), "mail", page)

    assert batch.to_pylist() == [row_of(*entry) for entry in page]
    batch.validate(full=True)


@given(st.lists(st.one_of(st.none(), TEXTS), max_size=6))
def test_numbers_of_a_job_are_parsed_as_in_python(values: list[bytes | None]) -> None:
    names = hash_fields(JOBS.fieldNames())
    replies = [[b"send" if name == "name" else value for name in names] for value in values]

    batch = job_record_batch(
        arrow_schema(JOBS), {"queue": "q", "state": "wait"}, [str(n) for n in range(len(values))], replies
    )

    assert [(row["created_at"], row["delay_ms"], row["priority"]) for row in batch.to_pylist()] == [
        (parse_time(value), parse_number(value, 64), parse_number(value, 32)) for value in values
    ]
    batch.validate(full=True)


@pytest.mark.parametrize("was_enabled", [True, False])
def test_gc_paused_restores_the_state_of_the_garbage_collector(was_enabled: bool) -> None:
    enabled_before = gc.isenabled()
    (gc.enable if was_enabled else gc.disable)()
    try:
        with suppress(ValueError), gc_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() is was_enabled
    finally:
        (gc.enable if enabled_before else gc.disable)()
