"""The exact limits on strings and numbers that bulltask stores or reads."""

from __future__ import annotations

import pytest

from bulltask.errors import EncodeError
from bulltask.jobs import codec
from bulltask.jobs.codec import ON_SURROGATE, encode
from bulltask.jobs.fields import REASON_CHARS, TRACE_CHARS, TRACES_CHARS, trace_text, truncate_reason, truncate_traces


def test_surrogates_are_encoded_as_their_original_bytes() -> None:
    assert "ä\udc80\udcff\ud800".encode("utf-8", ON_SURROGATE) == b"\xc3\xa4\x80\xff\xef\xbf\xbd"


@pytest.mark.parametrize(("value", "text"), [(10**40 - 1, "9" * 40), (10**40, "of about 133 bits")])
def test_an_error_message_shows_an_integer_of_up_to_40_digits(value: int, text: str) -> None:
    with pytest.raises(EncodeError, match=text):
        encode(value)


def test_numbers_are_clamped_to_javascripts_safe_integers() -> None:
    assert (codec.number(1e300), codec.number(-1e300)) == (9007199254740991, -9007199254740991)
    assert (codec.field_number(b"1e300"), codec.field_number(b"-1e300")) == (9007199254740991, -9007199254740991)


def test_a_long_traceback_of_an_exception_without_a_message_is_kept() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    failure = UnprintableError()
    failure.__cause__ = ValueError("x" * 2 * REASON_CHARS)
    assert "UnprintableError" in trace_text(failure, None)


def test_only_strings_above_a_limit_are_shortened() -> None:
    assert truncate_reason("x" * REASON_CHARS) == "x" * REASON_CHARS
    assert truncate_reason("x" * (REASON_CHARS + 1)) != "x" * (REASON_CHARS + 1)


def test_the_oldest_traceback_is_dropped_if_all_together_exceed_the_limit_by_a_character() -> None:
    traces = ["x" * TRACE_CHARS] * (TRACES_CHARS // TRACE_CHARS)
    assert truncate_traces(traces, None) == traces
    assert truncate_traces(["x", *traces], None) == traces


def test_a_counter_may_be_any_number_that_redis_can_increment() -> None:
    assert [codec.counter(raw) for raw in (b"0", b"-7", b"100")] == [0, -7, 100]
    with pytest.raises(ValueError, match="at its maximum"):
        codec.counter(str(2**63 - 1).encode())
