"""Error fingerprints leave out the variable parts of a reason, so that failures of one kind are counted together."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.jobs.failure_reasons import MAX_FINGERPRINT, error_fingerprint, plain_reason


@pytest.mark.parametrize(
    ("reason", "plain"),
    [
        (None, None),
        ("", ""),
        ('"', '"'),
        ("timed out", "timed out"),
        ('""', ""),
        ("\"'user_251'\"", "'user_251'"),
        (r'"a \"b\" \\ \n \u0041 \ud83d\ude00"', 'a "b" \\ \n A \U0001f600'),
        ('"one" and "two"', '"one" and "two"'),
        ('"a" : "b"', '"a" : "b"'),
        (r'"\ud83d"', r'"\ud83d"'),  # Java cannot store an unpaired surrogate
        (r'"\x"', r'"\x"'),
        ('"two\nlines"', '"two\nlines"'),
        (r'"ends in \"', r'"ends in \"'),
    ],
)
def test_a_reason_is_plain_text_or_a_json_string(reason: str | None, plain: str | None) -> None:
    assert plain_reason(reason) == plain


@given(st.text(), st.booleans())
def test_a_reason_quoted_by_python_is_unquoted_exactly(text: str, ascii_only: bool) -> None:
    assert plain_reason(json.dumps(text, ensure_ascii=ascii_only)) == text


@pytest.mark.parametrize(
    ("reason", "key"),
    [
        (None, None),
        ("", ""),
        ("timed out after 5s", "timed out after #s"),
        ("KeyError: 'user_251'", "KeyError: #"),
        ('no "such file" here', "no # here"),
        ("can't open 'a.txt' or 'b.txt', won't", "can't open # or #, won't"),
        ("job 3f2b8c1e-0000-4abc-8def-0123456789ab of 0xDEADbeef", "job # of #"),
        ("deadbeef01 is no feedbeef", "# is no feedbeef"),
        ("10.0.0.1:6379 refused", "#.#.#.#:# refused"),
        ("first line\nTraceback: 17", "first line"),
        ("first line\r\nsecond", "first line"),
        ("x" * 500, "x" * MAX_FINGERPRINT),
    ],
)
def test_an_error_fingerprint_leaves_out_the_variable_parts_of_a_reason(reason: str | None, key: str | None) -> None:
    assert error_fingerprint(reason) == key


@given(st.integers(0), st.integers(0), st.uuids(), st.uuids())
def test_failures_of_one_kind_have_the_same_error_fingerprint(a: int, b: int, x: object, y: object) -> None:
    assert error_fingerprint(f"user {a} of {x} at 'h{a}'") == error_fingerprint(f"user {b} of {y} at 'h{b}'")
