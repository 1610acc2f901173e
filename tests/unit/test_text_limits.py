"""The exact limits of texts and numbers that bulltask stores or reads."""

from __future__ import annotations

import pytest

from bulltask.errors import EncodeError
from bulltask.jobs import numbers
from bulltask.jobs.codec import ON_SURROGATE, encode
from bulltask.jobs.failures import REASON_CHARS, trace_text


def test_surrogates_are_encoded_as_their_original_bytes() -> None:
    assert "ä\udc80\udcff\ud800".encode("utf-8", ON_SURROGATE) == b"\xc3\xa4\x80\xff\xef\xbf\xbd"


@pytest.mark.parametrize(("value", "text"), [(10**40 - 1, "9" * 40), (10**40, "of about 133 bits")])
def test_an_error_message_shows_an_integer_of_up_to_40_digits(value: int, text: str) -> None:
    with pytest.raises(EncodeError, match=text):
        encode(value)


def test_numbers_are_clamped_to_javascripts_safe_integers() -> None:
    assert (numbers.number(1e300), numbers.number(-1e300)) == (9007199254740991, -9007199254740991)
    assert (numbers.field_number(b"1e300"), numbers.field_number(b"-1e300")) == (9007199254740991, -9007199254740991)


def test_a_long_traceback_of_an_exception_without_a_message_is_kept() -> None:
    class UnprintableError(Exception):
        def __str__(self) -> str:
            raise ValueError

    failure = UnprintableError()
    failure.__cause__ = ValueError("x" * 2 * REASON_CHARS)
    assert "UnprintableError" in trace_text(failure, None)
