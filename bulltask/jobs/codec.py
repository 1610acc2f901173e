"""JSON that Node and Python read in the same way, and the fields of a job's hash.

The output is identical to that of ``JSON.stringify``. A value that the two languages would read differently is rejected
before anything is sent or stored, and the message contains the value's path:

* NaN and Infinity would permanently stop all of the queue's Node listeners.
* Node silently rounds integers beyond ±(2^53-1).
* Keys that are not strings would be read as strings.

What is malformed raises ``DecodeError``, in which ``what`` names it; a text that is not a number raises ``ValueError``.
"""

from __future__ import annotations

import base64
import codecs
import json
import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final, TypeVar

from bulltask.jobs.errors import ConfigError, DecodeError, EncodeError, PayloadTooLargeError

__all__ = [
    "MAX_SAFE_INTEGER",
    "ON_SURROGATE",
    "Json",
    "counter",
    "cursor_of",
    "decode",
    "decode_object",
    "decode_text",
    "encode",
    "field_number",
    "has_more_tokens",
    "int_field",
    "json_field",
    "mapping_field",
    "number",
    "read_cursor",
    "read_int",
    "text_field",
]

Json = None | bool | int | float | str | list["Json"] | dict[str, "Json"]
"""A JSON value. :func:`encode` accepts tuples as well; they come back as lists."""

MAX_SAFE_INTEGER = 2**53 - 1
"""Largest integer that JavaScript represents exactly."""

ON_SURROGATE: Final = "bulltask.surrogate"
"""Name of an error handler for ``str.encode`` that encodes surrogates.

Python represents bytes that are not UTF-8 as surrogates (``surrogateescape``), for example in an id that another
program has created. They become the original bytes. A lone surrogate from a JSON escape becomes U+FFFD, as in Node.
"""

MAX_LEVELS: Final = 500
"""Maximum nesting of lists and objects. Python's own limit is about 950 levels, and lower if the stack is already deep.
A fixed limit is the same in every process."""


def _make_dumps() -> Callable[[object], str]:
    # check_circular is off: _problem() has already rejected values that contain themselves.
    encoder = json.JSONEncoder(
        ensure_ascii=False,
        allow_nan=False,
        check_circular=False,
        separators=(",", ":"),
        default=lambda value: value.__json__(),
    )
    # encoder.encode() makes a new C encoder in every call, which costs more than encoding a job's arguments.
    c_encoder: Any = json.encoder
    try:
        chunks = c_encoder.c_make_encoder(
            None, encoder.default, c_encoder.encode_basestring, None, ":", ",", False, False, False
        )
    except (AttributeError, TypeError):  # not CPython, or one with other parameters
        return encoder.encode
    return lambda value: "".join(chunks(value, 0))


_dumps: Final = _make_dumps()


def encode(
    value: object, *, what: str = "value", limit: int | None = None, convert: Callable[[Any], Any] | None = None
) -> bytes:
    """Return ``value`` as UTF-8 JSON.

    Args:
        value: ``None``, ``bool``, ``int``, ``float``, ``str``, lists, tuples and string-keyed dicts of these; objects
            with a method ``__json__`` that returns one of these, such as signatures.
        what: Name of the value in messages, such as ``"argument of task shop.add"``.
        limit: Maximum number of bytes; ``None`` for no limit.
        convert: Called with a value that JSON does not support, returns its JSON form: see
            :func:`bulltask.jobs.names.to_plain`.

    Raises:
        EncodeError: It contains a value that JSON does not support, or that Node would read differently.
        PayloadTooLargeError: It is longer than ``limit``.
    """
    if value is None:
        return b"null"  # the result of most tasks
    try:
        problem = _problem(value)
        if problem is not None and convert is not None:
            value = convert(value)
            problem = _problem(value)
        if problem is not None:
            raise EncodeError(f"{what}: {problem}" if problem.startswith("[") else f"{what}{problem}")  # "[": a path
        text = _dumps(value)
    except RecursionError:
        raise EncodeError(f"{what}: it contains a circular reference, or is {_TOO_DEEP}") from None
    if len(text) > MAX_LEVELS and text.count("[") + text.count("{") > MAX_LEVELS and _is_too_deep(value):
        raise EncodeError(f"{what}: {_TOO_DEEP}")
    try:
        data = text.encode()
    except UnicodeEncodeError:  # a lone surrogate: legal in a JSON escape, not in UTF-8
        data = json.dumps(json.loads(text), allow_nan=False, separators=(",", ":")).encode("ascii")
    if limit is not None and len(data) > limit:
        raise PayloadTooLargeError(
            f"{what}: {len(data):,} bytes of JSON exceed the limit of {limit:,}; store the data elsewhere and send "
            "a reference, or raise max_payload"
        )
    return data


def decode(data: bytes | str | None, *, what: str = "value", exact: bool = False) -> Any:
    """Return the value that a JSON string represents, ``None`` if ``data`` is ``None``.

    Raises:
        DecodeError: It is not JSON, or nested too deeply.
        EncodeError: With ``exact``, a number has digits that would be lost when it is read as a ``float``.
    """
    if data is None:
        return None
    scan, decoder = (_scan_exact, _exact_decoder) if exact else (_scan, _decoder)
    try:
        text = data if isinstance(data, str) else data.decode("utf-8", "surrogatepass")
        try:
            value, end = scan(text, 0)  # without the decoder's search for surrounding whitespace, which is rare
        except (StopIteration, ValueError):
            value, end = None, -1
        if end != len(text):  # whitespace, or an error
            value = decoder.decode(text)
    except ValueError as exc:
        raise DecodeError(f"{what} is not valid JSON: {exc}") from exc
    except RecursionError:
        raise DecodeError(f"{what} is {_TOO_DEEP}") from None
    if len(text) > MAX_LEVELS and text.count("[") + text.count("{") > MAX_LEVELS and _is_too_deep(value):
        raise DecodeError(f"{what} is {_TOO_DEEP}")
    return value


def has_more_tokens(data: bytes, limit: int) -> bool:
    """Return whether JSON has more than ``limit`` brackets, strings and commas, each of which may become an object."""
    if len(data) <= limit:
        return False
    data = data.replace(b"\\\\", b"").replace(b'\\"', b"")
    strings = data.count(b'"') // 2
    if strings <= limit:  # do not split into more parts than this
        data = b"".join(data.split(b'"')[::2])
    return strings + sum(map(data.count, (b"[", b"{", b","))) > limit


def decode_object(data: bytes, *, what: str) -> dict[str, Any]:
    """Return the JSON object that a JSON string represents."""
    value = decode(data, what=what)
    if not isinstance(value, dict):
        raise DecodeError(f"{what} is not a JSON object")
    return value


def decode_text(data: bytes | None) -> str:
    """Return stored text as a string; bytes that are not UTF-8 become escapes, so that decoding never fails."""
    return "" if data is None else data.decode("utf-8", "backslashreplace")


def _without_surrogates(error: UnicodeError) -> tuple[bytes, int]:
    if not isinstance(error, UnicodeEncodeError):
        raise error
    surrogates = error.object[error.start : error.end]
    encoded = (bytes([ord(char) - 0xDC00]) if "\udc80" <= char <= "\udcff" else b"\xef\xbf\xbd" for char in surrogates)
    return b"".join(encoded), error.end


codecs.register_error(ON_SURROGATE, _without_surrogates)


def _reject_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


_ALWAYS_EXACT: Final = 15  # any decimal number with as many digits is read back as it was
_DIGITS_OF_A_FLOAT: Final = 17  # of its longest text


def _exact_float(text: str) -> float:
    """Return a number as a ``float``, or raise ``EncodeError`` if another number in JSON would be the same ``float``.

    A text is exact if it is what the ``float`` is with as many digits. Java before version 19 may be off by one in the
    last digit of a number with an exponent.
    """
    value = float(text)
    if len(text) <= _ALWAYS_EXACT:
        return value
    digits, _, exponent = text.lower().partition("e")
    count = len(digits.lstrip("-0.").replace(".", ""))
    if count <= (_DIGITS_OF_A_FLOAT if exponent else _ALWAYS_EXACT) or not math.isfinite(value):
        return value
    from decimal import Decimal  # noqa: PLC0415 - only for such a number

    if Decimal(text) != Decimal(f"{value:.{count - 1}e}"):
        raise EncodeError(f"the number {text:.60} has more digits than a float; send it as a string")
    return value


_TOO_DEEP: Final = f"nested deeper than {MAX_LEVELS} levels; send it as a JSON string instead"
_CONTAINERS: Final = (dict, list, tuple)

# json.loads() with options builds a new decoder in every call, which costs more than decoding a job.
_decoder = json.JSONDecoder(parse_constant=_reject_constant)
_scan: Callable[[str, int], tuple[Any, int]] = _decoder.scan_once  # type: ignore[attr-defined]  # not in the stub
_exact_decoder = json.JSONDecoder(parse_constant=_reject_constant, parse_float=_exact_float)
_scan_exact: Callable[[str, int], tuple[Any, int]] = _exact_decoder.scan_once  # type: ignore[attr-defined]


def _is_too_deep(value: object) -> bool:
    """Return whether a value exceeds :data:`MAX_LEVELS`; iterative, because recursion could exhaust the stack."""
    level = [value]
    for _ in range(MAX_LEVELS):
        level = [
            part
            for whole in level
            if isinstance(whole, _CONTAINERS)
            for part in (whole.values() if isinstance(whole, dict) else whole)
            if isinstance(part, _CONTAINERS)
        ]
        if not level:
            return False
    return True


def _problem(value: Any) -> str | None:
    """Return a description of a value that JSON cannot represent, with its path; ``None`` if all values are valid."""
    return (_CHECKS.get(type(value)) or _check_of(value))(value)


def _check_of(value: object) -> Callable[[Any], str | None]:
    """Return the check for a subclass of a JSON type, such as an enum member, or for an unknown type."""
    return next((check for kind, check in _CHECKS.items() if isinstance(value, kind)), _of_another_type)


def _of_atom(_: object) -> None:
    return None


def _of_int(value: int) -> str | None:
    if -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER:
        return None
    return f" is the integer {_short(value)}, beyond ±(2^53-1): Node would round it; send it as a string"


def _of_float(value: float) -> str | None:
    return None if math.isfinite(value) else f" is {value}, which JSON does not support; send None or a string"


def _of_dict(value: dict[Any, Any]) -> str | None:
    for key, item in value.items():
        if not isinstance(key, str):
            return f" has the key {key!r:.60} of type {type(key).__name__}; JSON keys are strings"
        # The path is built while returning, so no string is created for valid values. Each level is one
        # call, so MAX_LEVELS levels use half of Python's recursion limit.
        if (kind := type(item)) not in _ATOMS and (problem := (_CHECKS.get(kind) or _check_of(item))(item)) is not None:
            return f"[{key[:60]!r}]{problem}"
    return None


def _of_list(value: list[Any] | tuple[Any, ...]) -> str | None:
    for index, item in enumerate(value):
        if (kind := type(item)) not in _ATOMS and (problem := (_CHECKS.get(kind) or _check_of(item))(item)) is not None:
            return f"[{index}]{problem}"
    return None


def _of_another_type(value: object) -> str | None:
    kind = type(value)
    if hasattr(kind, "__json__"):  # kombu's name
        return _problem(kind.__json__(value))
    if isinstance(value, Awaitable):
        return f" is of type {kind.__module__}.{kind.__qualname__}, which is not a value yet: `await` it first"
    return (
        f" is of type {kind.__module__}.{kind.__qualname__}, which JSON does not support; "
        "convert it first (for example with str() or .isoformat()), annotate the task's parameter or return value, or "
        "set convert_untyped"
    )


_ATOMS: Final = frozenset({str, bool, type(None)})
_CHECKS: Final[Mapping[type, Callable[[Any], str | None]]] = {
    str: _of_atom,
    bool: _of_atom,
    type(None): _of_atom,
    int: _of_int,
    float: _of_float,
    dict: _of_dict,
    list: _of_list,
    tuple: _of_list,
}


def _short(value: int) -> str:
    return str(value) if abs(value) < 10**40 else f"of about {value.bit_length()} bits"


# Numbers are clamped when they are read, so that later code cannot overflow. Node stores ``Number.MAX_VALUE`` as
# ``1.7976931348623157e+308``. As a Python integer, this number has 309 digits, and overflows in msgpack, in shared
# memory and in divisions.
_EXACT_DIGITS: Final = 15  # of a number that needs no clamping
_MAX_DIGITS: Final = 19  # of the largest integer that Redis supports
_ZERO: Final = ord("0")


def number(value: object) -> int | None:
    """Return a finite number from decoded JSON as an integer within ±(2^53-1), ``None`` for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if isinstance(value, float) and not math.isfinite(value):  # 1e999 is legal JSON
        return None
    whole = int(value)
    return whole if -MAX_SAFE_INTEGER <= whole <= MAX_SAFE_INTEGER else _clamped(whole)


def field_number(raw: bytes | str) -> int:
    """Return the number in a hash field, within ±(2^53-1); Lua writes some numbers with an exponent."""
    if raw.isdigit() and len(raw) <= _EXACT_DIGITS:  # almost every number
        return int(raw)
    read = float(raw)
    if not math.isfinite(read):
        raise ValueError(f"not a finite number: {raw[:40]!r}")
    whole = int(read)
    return whole if -MAX_SAFE_INTEGER <= whole <= MAX_SAFE_INTEGER else _clamped(whole)


def counter(raw: bytes) -> int:
    """Return the number in a hash field that Redis can increment (``HINCRBY``): no ``+`` sign, no leading zeros."""
    digits = raw.removeprefix(b"-")
    if not (digits.isdigit() and len(digits) <= _MAX_DIGITS) or (raw[:1] == b"0" and raw != b"0") or raw[:2] == b"-0":
        raise ValueError(f"not a counter: {raw[:40]!r}")
    value = int(raw)
    if not -(2**63) <= value < 2**63 - 1:
        raise ValueError(f"a counter at its maximum: {raw[:40]!r}")
    return value if -MAX_SAFE_INTEGER <= value <= MAX_SAFE_INTEGER else _clamped(value)


def _clamped(value: int) -> int:
    return max(-MAX_SAFE_INTEGER, min(value, MAX_SAFE_INTEGER))


def read_int(raw: Mapping[bytes, bytes], name: bytes, job_id: str, read: Callable[[bytes], int] = field_number) -> int:
    """Return a numeric field, 0 if it is missing; an error names the job."""
    value = raw.get(name)
    if value is None:
        return 0
    if value.isdigit() and len(value) <= _EXACT_DIGITS and (value[0] != _ZERO or len(value) == 1):
        return int(value)  # almost every number
    try:
        return read(value)
    except ValueError as exc:
        raise DecodeError(f"field {name.decode()} of job {job_id} is not a number: {value[:40]!r}") from exc


# Readers of a hash for people, who can look at any job: a malformed field counts as missing.


def text_field(raw: Mapping[bytes, bytes], name: bytes) -> str | None:
    """Return a field as text."""
    return decode_text(raw[name]) if name in raw else None


def int_field(raw: Mapping[bytes, bytes], name: bytes) -> int | None:
    """Return a field with a number."""
    try:
        return field_number(raw[name])
    except (KeyError, ValueError):
        return None


def json_field(raw: Mapping[bytes, bytes], name: bytes) -> Any:
    """Return the value of a field with JSON."""
    try:
        return decode(raw.get(name))
    except DecodeError:
        return None


def mapping_field(raw: Mapping[bytes, bytes], name: bytes) -> Mapping[str, Any] | None:
    """Return the value of a field with a JSON object."""
    value = json_field(raw, name)
    return value if isinstance(value, dict) else None


R = TypeVar("R")


def cursor_of(parts: Sequence[object]) -> str:
    """Return where a page ends as a text that addresses may contain."""
    text = json.dumps(parts, separators=(",", ":"))
    return base64.urlsafe_b64encode(text.encode()).decode().rstrip("=")


def read_cursor(cursor: str, parse: Callable[[Any], R]) -> R:
    """Return what ``parse`` makes of the parts of a cursor; raises ``ConfigError`` if they are not such parts."""
    try:
        return parse(json.loads(base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4))))
    except (ValueError, TypeError, OverflowError, RecursionError) as exc:
        raise ConfigError(
            f"invalid cursor {cursor!r:.100}: use the cursor of the previous page, or no cursor for the first page"
        ) from exc
