"""Columns are made of whole pages at once; each row is what it would be if it were made alone."""

from __future__ import annotations

import gc
import json
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.spark.source.columns import event_batch, hash_fields, job_batch
from bulltask.spark.source.connection import gc_paused
from bulltask.spark.source.schemas import EVENT_FIELDS, EVENTS, JOBS, arrow_schema

KNOWN = [name.encode() for name in EVENT_FIELDS.values()]
DAY = datetime(1970, 1, 1, tzinfo=UTC)
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
    """Entries of a few kinds that take turns, as those of a stream do."""
    kinds = draw(KINDS)
    page = []
    for ms, seq, kind in draw(st.lists(st.tuples(TIMES, TIMES, st.integers(0, len(kinds) - 1)), max_size=12)):
        page.append((b"%d-%d" % (ms, seq), [word for name in kinds[kind] for word in (name, draw(TEXTS))]))
    return page


def shown(raw: bytes) -> str:
    return raw.decode("utf-8", "backslashreplace")


def number(raw: bytes | None, bits: int) -> int | None:
    """What Python takes for a number, if the column has room for it."""
    for read in (int, lambda value: int(float(value))):
        try:
            found: int = read(raw)  # type: ignore[arg-type]
        except (ValueError, OverflowError, TypeError):
            continue
        return found if -(2 ** (bits - 1)) <= found < 2 ** (bits - 1) else None
    return None


def time(raw: bytes | None) -> datetime | None:
    found = number(raw, 64)
    try:
        return None if found is None else DAY + timedelta(milliseconds=found)
    except OverflowError:
        return None


def row_of(entry_id: bytes, flat: list[bytes]) -> dict[str, Any]:
    """The oracle: one entry alone."""
    fields = dict(zip(flat[::2], flat[1::2], strict=True))
    ms, seq = entry_id.split(b"-")
    row: dict[str, Any] = {"queue": "mail", "event_id": shown(entry_id), "event_at": time(ms)}
    row |= {"event_ms": min(int(ms), 2**63 - 1), "event_seq": min(int(seq), 2**63 - 1)}
    for column, name in EVENT_FIELDS.items():
        raw = fields.pop(name.encode(), None)
        row[column] = None if raw is None else shown(raw)
        if column == "delay_until":
            row[column] = time(raw)
        elif column == "attempts_made":
            row[column] = number(raw, 32)
    more = {shown(name): shown(value) for name, value in fields.items()}
    return {**row, "extra": json.dumps(more, sort_keys=True) if more else None}


@given(pages())
def test_a_row_of_events_is_what_its_entry_says(page: list[tuple[bytes, list[bytes]]]) -> None:
    batch = event_batch(arrow_schema(EVENTS), "mail", page)

    assert batch.to_pylist() == [row_of(*entry) for entry in page]
    batch.validate(full=True)


@given(st.lists(st.one_of(st.none(), TEXTS), max_size=6))
def test_numbers_of_a_job_are_parsed_as_python_does(values: list[bytes | None]) -> None:
    names = hash_fields(JOBS.fieldNames())
    replies = [[b"send" if name == "name" else value for name in names] for value in values]

    batch = job_batch(
        arrow_schema(JOBS), {"queue": "q", "state": "wait"}, [str(n) for n in range(len(values))], replies
    )

    assert [(row["created_at"], row["delay_ms"], row["priority"]) for row in batch.to_pylist()] == [
        (time(value), number(value, 64), number(value, 32)) for value in values
    ]
    batch.validate(full=True)


@pytest.mark.parametrize("was_on", [True, False])
def test_the_garbage_collector_is_on_again_if_it_was_on(was_on: bool) -> None:
    on = gc.isenabled()
    (gc.enable if was_on else gc.disable)()
    try:
        with suppress(ValueError), gc_paused():
            assert not gc.isenabled()
            raise ValueError
        assert gc.isenabled() is was_on
    finally:
        (gc.enable if on else gc.disable)()
