"""Derived job ids are valid in every BullMQ version, and equal only for the same row of the same write."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import ConfigError
from bulltask.jobs.names import check_job_id
from bulltask.spark.sink import check_write_id, derived_id

TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=6)
ROWS = st.tuples(TEXTS, TEXTS, TEXTS, st.binary(max_size=8), st.integers(0, 3))


@given(ROWS)
def test_derived_ids_are_valid_bullmq_job_ids(row: tuple) -> None:
    assert check_job_id(derived_id(*row)).startswith("s")


@given(ROWS, ROWS)
def test_derived_ids_are_equal_only_if_the_rows_are_equal(row: tuple, other: tuple) -> None:
    assert (derived_id(*row) == derived_id(*other)) == (row == other)


@given(st.text("ab", min_size=2, max_size=6), st.data())
def test_derived_ids_depend_on_the_boundary_between_name_and_data(text: str, data: st.DataObject) -> None:
    cut, other = (data.draw(st.integers(1, len(text) - 1)) for _ in range(2))
    ids = {derived_id("w", "q", text[:at], text[at:].encode()) for at in (cut, other)}
    assert len(ids) == len({cut, other})


def test_the_derived_id_of_a_row_is_the_same_in_every_version() -> None:
    """A write that is retried after an upgrade must find its jobs."""
    assert derived_id("w1", "{mail}", "send", b'{"n":1}') == "se30dabebc3fdd7a11aeaa32b"
    assert derived_id("w1", "{mail}", "send", b'{"n":1}', 1) == "s3d365533beaedb6dd9bd7397"


def test_new_write_ids_are_unique_and_valid() -> None:
    ids = [check_write_id(None) for _ in range(100)]
    assert len(set(ids)) == 100
    assert ids == [check_write_id(write_id) for write_id in sorted(ids)]


@pytest.mark.parametrize("wrong", ["", "a b", "a\nb", "{a}", "x" * 201, "\ud800", 7])
def test_a_write_id_that_is_unsafe_in_a_redis_key_is_rejected(wrong: object) -> None:
    with pytest.raises(ConfigError, match="write id"):
        check_write_id(wrong)  # type: ignore[arg-type]
