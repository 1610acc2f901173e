from __future__ import annotations

import json
from collections import OrderedDict
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from decimal import Decimal
from enum import Enum, IntEnum, StrEnum
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask.errors import DecodeError, EncodeError, PayloadTooLargeError
from bulltask.jobs.codec import MAX_SAFE_INTEGER, decode, decode_text, encode

atoms = (
    st.none()
    | st.booleans()
    | st.integers(-MAX_SAFE_INTEGER, MAX_SAFE_INTEGER)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text()
)
values = st.recursive(atoms, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=20)


class Color(StrEnum):
    RED = "red"


class Level(IntEnum):
    LOW = 1


class Plain(Enum):
    ONE = 1


class Later:
    def __await__(self) -> Iterator[None]:
        yield


class Point(NamedTuple):
    x: int
    y: int


# --- encode -----------------------------------------------------------------------------------------------------------


@given(values)
def test_an_encoded_value_is_decoded_to_the_same_value(value: Any) -> None:
    assert decode(encode(value)) == value


def test_values_are_encoded_like_json_stringify() -> None:
    assert encode({"b": [1, 2.5, None, True], "a": "é\n"}) == '{"b":[1,2.5,null,true],"a":"é\\n"}'.encode()


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ((1, (2,)), "[1,[2]]"),
        (Point(1, 2), "[1,2]"),
        (OrderedDict(a=1), '{"a":1}'),
        ({Color.RED: Color.RED}, '{"red":"red"}'),
        ([Level.LOW, True], "[1,true]"),
        (MAX_SAFE_INTEGER, "9007199254740991"),
        (-MAX_SAFE_INTEGER, "-9007199254740991"),
        (1e300, "1e+300"),
    ],
)
def test_tuples_enums_and_other_subclasses_are_encoded_as_their_base_type(value: object, text: str) -> None:
    assert encode(value).decode() == text


def test_a_lone_surrogate_is_encoded_as_an_escape() -> None:
    data = encode({"name": "\ud800 é"})
    assert data == b'{"name":"\\ud800 \\u00e9"}'
    assert decode(data) == {"name": "\ud800 é"}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (float("nan"), "value is nan"),
        ({"a": [0, float("-inf")]}, "value: ['a'][1] is -inf"),
        (2**53, "value is the integer 9007199254740992, beyond ±(2^53-1)"),
        ({"ids": (1, -(2**53))}, "value: ['ids'][1] is the integer -9007199254740992"),
        pytest.param(10**5000, "value is the integer of about 16610 bits", id="huge"),
        ({"a": {1: "x"}}, "value: ['a'] has the key 1 of type int; JSON keys are strings"),
        ({None: 1}, "value has the key None of type NoneType"),
        ([b"bytes"], "value: [0] is of type builtins.bytes"),
        ({"when": datetime(2026, 1, 1, tzinfo=UTC)}, "value: ['when'] is of type datetime.datetime"),
        ({"deep": [{"sum": Decimal(1)}]}, "value: ['deep'][0]['sum'] is of type decimal.Decimal"),
        ({1, 2}, "value is of type builtins.set"),
        (Plain.ONE, "Plain, which JSON does not support"),
        (object, "value is of type builtins.type"),
        ([Later()], "Later, which is not a value yet: `await` it first"),
    ],
)
def test_a_value_without_a_json_type_is_rejected_with_its_path(value: object, message: str) -> None:
    with pytest.raises(EncodeError) as caught:
        encode(value)
    assert message in str(caught.value)


def test_an_encode_error_names_the_value() -> None:
    with pytest.raises(EncodeError, match=r"^the arguments of task f: \['x'\] is of type builtins\.bytes"):
        encode({"x": b""}, what="the arguments of task f")


def test_a_value_that_contains_itself_is_rejected() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(EncodeError, match="contains a circular reference"):
        encode(loop)


def lists(levels: int) -> Any:
    value: Any = []
    for _ in range(levels - 1):
        value = [value]
    return value


def objects(levels: int) -> Any:
    value: Any = {}
    for _ in range(levels - 1):
        value = {"a": 1, "b": value}
    return value


def mixed(levels: int) -> Any:
    value: Any = ()
    for level in range(levels - 1):
        value = {"a": value} if level % 2 else (1, value)
    return value


@pytest.mark.parametrize("nested", [lists, objects, mixed])
def test_values_may_be_nested_up_to_500_levels_deep(nested: Callable[[int], Any]) -> None:
    text = encode(nested(500))
    assert encode(decode(text)) == text
    for levels in (501, 700, 5_000):
        with pytest.raises(EncodeError, match=r"^data of job 7: .*nested deeper than 500 levels"):
            encode(nested(levels), what="data of job 7")
        with pytest.raises(DecodeError, match=r"^data of job 7 is nested deeper than 500 levels"):
            decode(levels * b"[" + levels * b"]", what="data of job 7")


def test_a_wide_value_does_not_count_as_deeply_nested() -> None:
    wide = {"rows": [{"n": [number]} for number in range(5_000)]}
    assert decode(encode(wide)) == wide
    assert decode(encode(5_000 * "[{")) == 5_000 * "[{"


def test_the_size_limit_counts_bytes() -> None:
    assert len(encode("é" * 4, limit=10)) == 10
    with pytest.raises(PayloadTooLargeError, match=r"value: 12 bytes of JSON exceed the limit of 10"):
        encode("é" * 5, limit=10)


def test_the_size_limit_counts_escapes() -> None:
    with pytest.raises(PayloadTooLargeError, match="8 bytes"):
        encode("\ud800", limit=7)


# --- decode -----------------------------------------------------------------------------------------------------------


@given(values)
def test_json_text_is_decoded_like_the_json_module(value: Any) -> None:
    assert decode(json.dumps(value)) == value
    assert decode(json.dumps(value).encode()) == value
    assert decode(f"\n\t{json.dumps(value, indent=1)} \r\n") == value


@pytest.mark.parametrize(
    ("number", "exact"),
    [
        ("0.1", True),
        ("123456789012345.67", True),
        ("123456789012345.68", False),  # the same float as the number above
        ("169299987.35345112", False),
        ("-0.30000000000000004", True),
        ("-0.30000000000000005", False),
        ("1.00000000000000000000", True),
        ("0.1000000000000000055511151231257827", True),  # more of the digits of the float 0.1
        ("3.1526711628916386E25", True),  # as Java 17 writes a double, not quite its digits
        ("4.9E-324", True),
        ("1.00000000000000000001E25", False),
    ],
)
def test_a_number_with_digits_that_a_float_loses_is_rejected_on_request(number: str, exact: bool) -> None:
    assert decode(f"[{number}]") == [float(number)]
    if exact:
        assert decode(f" [{number}]", exact=True) == [float(number)]
        return
    with pytest.raises(EncodeError, match="send it as a string") as caught:
        decode(f"[{number}]", exact=True)
    assert number in str(caught.value)


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_each_float_is_exact_as_python_writes_it(number: float) -> None:
    assert decode(encode(number), exact=True) == number


def test_text_after_a_json_value_is_an_error() -> None:
    with pytest.raises(DecodeError, match="Extra data"):
        decode("{} 5", what="x")


def test_a_missing_value_is_none() -> None:
    assert decode(None) is None


@pytest.mark.parametrize(
    "data",
    [
        b"",
        "",
        "{",
        b"\xff",
        "NaN",
        '{"a":Infinity}',
        "-Infinity",
        pytest.param("9" * 5000, id="integer too long"),
    ],
)
def test_invalid_json_is_rejected_with_the_name_of_the_value(data: bytes | str) -> None:
    with pytest.raises(DecodeError, match=r"^data of job 7 is not valid JSON: "):
        decode(data, what="data of job 7")


@given(st.binary())
def test_any_bytes_can_be_decoded_as_text(data: bytes) -> None:
    assert isinstance(decode_text(data), str)


def test_bytes_that_are_not_utf8_become_escapes() -> None:
    assert decode_text(b"caf\xc3\xa9 \xff") == "café \\xff"
    assert decode_text(None) == ""
