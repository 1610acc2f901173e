"""Converters of single values: JSON's own types, times, ids, numbers, enum members, bytes."""

from __future__ import annotations

import base64
import binascii
import enum
import re
from collections.abc import Callable
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import PurePath
from typing import Any, Final
from uuid import UUID

from bulltask.jobs.text_forms import format_bytes, format_datetime, format_duration
from bulltask.typed.converter import ANYTHING, EXACT, FIRST, LAST, Converter, shown
from bulltask.typed.definitions import Definitions, Schema

__all__ = ["PLAIN", "Anything", "EnumMember", "LiteralValue", "OneOf", "PlainScalar", "scalar"]


class Anything(Converter):
    """No hint, or ``Any``: the value is not checked."""

    name, plain, rank = "any value", True, ANYTHING

    def decode(self, value: Any) -> Any:
        return value

    encode = decode

    def schema(self, definitions: Definitions) -> Schema:
        return {}


class PlainScalar(Converter):
    """One of JSON's own types.

    Args:
        kind: ``str``, ``int``, ``float``, ``bool`` or ``type(None)``.
        name: Its name in messages.
        json_type: Its name in JSON Schema.
    """

    plain = True

    def __init__(self, kind: type, name: str, json_type: str) -> None:
        self.kind, self.name, self._json_type = kind, name, json_type
        self.rank = LAST if kind is str else EXACT

    def decode(self, value: Any) -> Any:
        if isinstance(value, self.kind) and (self.kind is bool or not isinstance(value, bool)):
            return value
        if isinstance(value, int | float) and not isinstance(value, bool):
            if self.kind is float:
                return float(value)
            if self.kind is int and isinstance(value, float) and value.is_integer():  # JavaScript has only one type
                return int(value)
        raise self.mismatch(value)

    encode = decode

    def schema(self, definitions: Definitions) -> Schema:
        return {"type": self._json_type}


PLAIN: Final = {
    str: PlainScalar(str, "a string", "string"),
    int: PlainScalar(int, "an integer", "integer"),
    float: PlainScalar(float, "a number", "number"),
    bool: PlainScalar(bool, "true or false", "boolean"),
    type(None): PlainScalar(type(None), "null", "null"),
}


class _Text(Converter):
    """A type whose JSON form is a string.

    Args:
        kind: The class.
        name: How error messages name the expected value.
        parse: Converts a string to the type, or raises ``ValueError``.
        form: Converts a value to a string.
        schema: The JSON Schema.
    """

    def __init__(
        self, kind: type, name: str, parse: Callable[[str], Any], form: Callable[[Any], str], schema: Schema
    ) -> None:
        self._kind, self.name, self._parse, self._form, self._schema = kind, name, parse, form, schema

    def decode(self, value: Any) -> Any:
        if not isinstance(value, str):
            raise self.mismatch(value)
        try:
            return self._parse(value)
        except (ValueError, OverflowError):
            raise self.mismatch(value) from None

    def encode(self, value: Any) -> Any:
        if isinstance(value, self._kind) and not (self._kind is date and isinstance(value, datetime)):
            return self._form(value)
        self.decode(value)
        return value

    def schema(self, definitions: Definitions) -> Schema:
        return dict(self._schema)


class _Number(Converter):
    """``Decimal``: a string, because a JSON number would be rounded; numbers are accepted, too."""

    name = "a decimal number"

    def decode(self, value: Any) -> Decimal:
        if isinstance(value, int | float | str) and not isinstance(value, bool):
            try:
                number = Decimal(repr(value) if isinstance(value, float) else value)
            except InvalidOperation:
                raise self.mismatch(value) from None
            if number.is_finite():
                return number
        raise self.mismatch(value)

    def encode(self, value: Any) -> Any:
        if isinstance(value, Decimal):
            if not value.is_finite():
                raise self.mismatch(value)
            return str(value)
        self.decode(value)
        return value

    def schema(self, definitions: Definitions) -> Schema:
        return _or_number({"type": "string", "format": "decimal"}, definitions)


class _Duration(Converter):
    """``timedelta``: an ISO 8601 duration, or a number of seconds."""

    name = "a duration such as 'PT1H30M', or seconds"

    def decode(self, value: Any) -> timedelta:
        try:
            if isinstance(value, str):
                return _parse_duration(value)
            if isinstance(value, int | float) and not isinstance(value, bool):
                return timedelta(seconds=value)
        except (ValueError, OverflowError):
            pass
        raise self.mismatch(value)

    def encode(self, value: Any) -> Any:
        if isinstance(value, timedelta):
            return format_duration(value)
        self.decode(value)
        return value

    def schema(self, definitions: Definitions) -> Schema:
        return _or_number({"type": "string", "format": "duration"}, definitions)


def _or_number(text: Schema, definitions: Definitions) -> Schema:
    """Return the schema of a type that is written as a string and may also be read from a number."""
    return text if definitions.of_results else {"anyOf": [text, {"type": "number"}]}


_DURATION: Final = re.compile(
    r"(?P<sign>[-+]?)P(?!$)(?:(?P<weeks>\d+)W)?(?:(?P<days>\d+)D)?"
    r"(?:T(?!$)(?:(?P<hours>\d+)H)?(?:(?P<minutes>\d+)M)?(?:(?P<seconds>\d+)(?:[.,](?P<fraction>\d{1,9}))?S)?)?",
    re.ASCII,
)


def _parse_duration(text: str) -> timedelta:
    """Parse ``-P1DT2H3M4.5S``; years and months have no fixed length."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError(text)
    parts = {name: int(match[name] or 0) for name in ("weeks", "days", "hours", "minutes", "seconds")}
    micros = int((match["fraction"] or "0").ljust(6, "0")[:6])
    length = timedelta(**parts, microseconds=micros)
    return -length if match["sign"] == "-" else length


def _parse_datetime(text: str) -> datetime:
    if len(text) <= len("2026-11-23"):  # a date without a time
        raise ValueError(text)
    return datetime.fromisoformat(text)


def _parse_bytes(text: str) -> bytes:
    try:
        return base64.b64decode(text.encode("ascii"), validate=True)
    except (binascii.Error, UnicodeEncodeError) as exc:
        raise ValueError(text) from exc


def _text(kind: type, name: str, parse: Callable[[str], Any], form: Callable[[Any], str], format_: str) -> _Text:
    return _Text(kind, name, parse, form, {"type": "string", "format": format_})


_BASE64: Final[Schema] = {"type": "string", "contentEncoding": "base64"}
_SCALARS: Final[dict[type, Converter]] = {
    datetime: _text(
        datetime, "a date and time such as '2026-11-23T10:00:00Z'", _parse_datetime, format_datetime, "date-time"
    ),
    date: _text(date, "a date such as '2026-11-23'", date.fromisoformat, date.isoformat, "date"),
    time: _text(time, "a time such as '10:00:00'", time.fromisoformat, time.isoformat, "time"),
    timedelta: _Duration(),
    UUID: _text(UUID, "a UUID", UUID, str, "uuid"),
    Decimal: _Number(),
    bytes: _Text(bytes, "bytes in base64", _parse_bytes, format_bytes, _BASE64),
    bytearray: _Text(bytearray, "bytes in base64", lambda text: bytearray(_parse_bytes(text)), format_bytes, _BASE64),
}


def scalar(kind: type) -> Converter | None:
    """Return the converter of a class of single values, ``None`` for any other class."""
    found = PLAIN.get(kind) or _SCALARS.get(kind)
    if found is None and issubclass(kind, enum.Enum):
        return EnumMember(kind)
    if found is None and issubclass(kind, PurePath):
        return _Text(kind, "a path", kind, str, {"type": "string"})
    return found


class OneOf(Converter):
    """One of several JSON values; the base of enum members and literals."""

    rank = FIRST

    def __init__(self, values: dict[tuple[type, Any], Any]) -> None:
        # With the type, because True == 1 == 1.0.
        self._values = values
        self.name = (
            "one of " + ", ".join(repr(value) for _, value in values)
            if len(values) > 1
            else ("".join(repr(value) for _, value in values))
        )

    def decode(self, value: Any) -> Any:
        try:
            return self._values[type(value), value]
        except (KeyError, TypeError):  # TypeError: a list cannot be a key
            raise self.mismatch(value) from None

    def schema(self, definitions: Definitions) -> Schema:
        values = [value for _, value in self._values]
        return {"const": values[0]} if len(values) == 1 else {"enum": values}


class LiteralValue(OneOf):
    """``Literal["a", "b"]``."""

    plain = True

    def __init__(self, values: tuple[Any, ...]) -> None:
        super().__init__({(type(value), value): value for value in values})

    def encode(self, value: Any) -> Any:
        return self.decode(value)


class EnumMember(OneOf):
    """A member of an ``Enum``: its value.

    Raises:
        TypeError: The class has no members (``x: Enum``), or the value of a member is not a string, a number, a boolean
            or ``None``.
    """

    def __init__(self, kind: type[enum.Enum]) -> None:
        if not kind.__members__:
            raise TypeError(f"{kind.__name__} has no members")
        super().__init__({(type(_json_atom(kind, member)), _json_atom(kind, member)): member for member in kind})
        self._kind = kind

    def decode(self, value: Any) -> Any:
        if issubclass(self._kind, enum.Flag) and type(value) is int:  # a combination of members has a different value
            try:
                return self._kind(value)
            except ValueError:
                raise self.mismatch(value) from None
        return super().decode(value)

    def encode(self, value: Any) -> Any:
        if isinstance(value, self._kind):
            return _json_atom(self._kind, value)
        self.decode(value)
        return value

    def schema(self, definitions: Definitions) -> Schema:
        if issubclass(self._kind, enum.Flag):
            return {"type": "integer"}
        return definitions.reference(self._kind, lambda: super(EnumMember, self).schema(definitions))


def _json_atom(kind: type[enum.Enum], member: enum.Enum) -> Any:
    value = member.value
    if value is not None and type(value) not in (str, int, float, bool):
        raise TypeError(f"{kind.__name__}.{member.name} has the value {shown(value)}")
    return value
