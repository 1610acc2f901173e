"""The types of a function's parameters and return value, and the conversion of its calls."""

from __future__ import annotations

import base64
import binascii
import collections
import dataclasses
import enum
import inspect
import json
import re
import reprlib
import sys
import threading
import types
import typing
from abc import ABC, abstractmethod
from collections import abc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date, datetime, time, timedelta
from decimal import Decimal, InvalidOperation
from pathlib import PurePath
from typing import Any, Final, Literal, get_args, get_origin
from uuid import UUID

from bulltask.jobs.errors import (
    HIDDEN_VALUES,
    ConfigError,
    DecodeError,
    EncodeError,
    InvalidJobError,
    did_you_mean,
    incompatible,
)
from bulltask.jobs.names import format_bytes, format_datetime, format_duration

__all__ = [
    "ANYTHING",
    "ANY_RANK",
    "EXACT",
    "FIRST",
    "LAST",
    "NO_DEFAULT",
    "PLAIN",
    "Anything",
    "Array",
    "CallConversion",
    "CallTypes",
    "Converter",
    "Definitions",
    "EnumMember",
    "Field",
    "FixedTuple",
    "LiteralValue",
    "Mismatch",
    "NoConverter",
    "Object",
    "OldModel",
    "OneOf",
    "PlainScalar",
    "Record",
    "Schema",
    "TypedDictionary",
    "Union",
    "convert_fields",
    "converter_of",
    "hints_of",
    "is_old_model",
    "key_converter",
    "object_schema",
    "or_none",
    "register_converter",
    "renamed",
    "scalar",
    "shorten",
    "shown",
]


# The definitions of a JSON Schema: the types that have names.


Schema = dict[str, Any]

_PREFIX: Final = "#/$defs/"


class Definitions:
    """Named types by their names in ``$defs``; types that share a name get distinct ones.

    Args:
        of_results: The schemas describe what a worker writes, not what it accepts: all fields are present, and each
            type has only one form.

    Attributes:
        schemas: The schemas by name.
    """

    def __init__(self, *, of_results: bool = False) -> None:
        self.of_results = of_results
        self.schemas: dict[str, Schema] = {}
        self._names: dict[object, str] = {}

    def reference(self, kind: type, build: Callable[[], Schema]) -> Schema:
        """Return a reference to a class; the first call defines it with ``build()``, even if it contains itself."""
        name = self._names.get(kind)
        if name is None:
            name = self._names[kind] = self._unused(kind.__name__)
            self.schemas[name] = {}  # reserved, for classes of the same name among its fields
            self.schemas[name] = build()
        return {"$ref": f"{_PREFIX}{name}"}

    def adopt(self, schema: Mapping[str, Any]) -> Schema:
        """Move the definitions of another tool's schema here, and return the schema with adjusted references."""
        schema = dict(schema)
        found: Mapping[str, Schema] = schema.pop("$defs", {})
        names = {name: self._name_of_equal(name, definition) for name, definition in found.items()}
        for name, definition in found.items():
            self.schemas[names[name]] = renamed(definition, names)
        adopted: Schema = renamed(schema, names)
        return adopted

    def _name_of_equal(self, name: str, definition: Schema) -> str:
        """Return the name of a definition that was adopted before, or a new one."""
        key = (name, repr(definition))
        if key not in self._names:
            self._names[key] = self._unused(name)
            self.schemas[self._names[key]] = {}
        return self._names[key]

    def rename_other(self, others: Mapping[str, Schema]) -> dict[str, str]:
        """Return other names for types that are defined differently in ``others``, or that contain such a type."""
        shared = {name for name, schema in self.schemas.items() if others.get(name, schema) == schema}
        while unequal := {name for name in shared if _references(self.schemas[name]) - shared}:
            shared -= unequal
        names: dict[str, str] = {}
        for name in self.schemas.keys() - shared:
            candidate = f"{name}Result"
            while candidate in others or candidate in self.schemas:
                candidate += "_"
            names[name] = candidate
        return names

    def _unused(self, name: str) -> str:
        number, candidate = 1, name
        while candidate in self.schemas:
            number += 1
            candidate = f"{name}{number}"
        return candidate


def _references(value: Any) -> set[str]:
    match value:
        case dict():
            own = {value["$ref"].removeprefix(_PREFIX)} if isinstance(value.get("$ref"), str) else set()
            return own.union(*(_references(item) for item in value.values()))
        case list():
            return set().union(*(_references(item) for item in value))
        case _:
            return set()


def renamed(value: Any, names: Mapping[str, str]) -> Any:
    """Return a schema, or a part of one, whose references to types have other names."""
    match value:
        case {"$ref": str(target), **others} if target.startswith(_PREFIX):
            name = target.removeprefix(_PREFIX)
            return {"$ref": f"{_PREFIX}{names.get(name, name)}", **renamed(others, names)}
        case dict():
            return {key: renamed(item, names) for key, item in value.items()}
        case list():
            return [renamed(item, names) for item in value]
        case _:
            return value


# What all converters have in common.


FIRST, EXACT, CONVERTED, LAST, ANY_RANK = range(5)
"""The order in which a value is compared with the members of a union: single values (enum members, literals); JSON's
numbers and booleans; converted types; JSON's strings, arrays and objects, which may also represent converted types;
any value."""

_LONGEST: Final = 60
_LONGEST_TEXT: Final = 500
_MOST_PROBLEMS: Final = 3
_MOST_PARTS: Final = 20

_repr = reprlib.Repr()  # does not read all of a large value
_repr.maxstring = _repr.maxother = _repr.maxlong = 4 * _LONGEST
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxfrozenset = _repr.maxdict = _repr.maxdeque = 12


class Mismatch(Exception):
    """A value does not match a type.

    Args:
        expected: What was expected, and what was found.
        path: Keys and indexes that lead to the value.
    """

    def __init__(self, expected: str, path: Sequence[str | int] = ()) -> None:
        super().__init__(expected)
        self.problems: list[tuple[tuple[str | int, ...], str]] = [(tuple(path), expected)]

    @classmethod
    def of_several(cls, problems: Sequence[tuple[Sequence[str | int], str]]) -> Mismatch:
        """Return one exception for several problems."""
        mismatch = cls("")
        mismatch.problems = [(tuple(path), text) for path, text in problems]
        return mismatch

    def below(self, part: str | int) -> Mismatch:
        """Return the mismatch with ``part``, a key or index of the surrounding container, before its path."""
        return Mismatch.of_several([((part, *path), text) for path, text in self.problems])

    def __str__(self) -> str:
        more = len(self.problems) - _MOST_PROBLEMS
        problems = ((path, shorten(text, _LONGEST_TEXT)) for path, text in self.problems[:_MOST_PROBLEMS])
        texts = [f"{_path_text(path)}: {text}" if path else text for path, text in problems]
        return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _path_text(path: Sequence[str | int]) -> str:
    short = [part if isinstance(part, int) else shorten(part, _LONGEST) for part in path[:_MOST_PARTS]]
    parts = [f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]" for part in short]
    return "".join(parts).removeprefix(".") + ("…" if len(path) > _MOST_PARTS else "")


def shown(value: object) -> str:
    """Return a short representation of a value, for a message."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({type(value).__name__})"


def shorten(text: str, chars: int) -> str:
    """Return at most ``chars`` characters of a text."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


class Converter(ABC):
    """Converts the values of one type.

    Attributes:
        name: The type's name in messages.
        plain: JSON has this type, so that there is nothing to convert, only to check.
        rank: The place of the type in a union.
    """

    name: str
    plain: bool = False
    rank: int = CONVERTED

    @abstractmethod
    def decode(self, value: Any) -> Any:
        """Return the Python value for a JSON value.

        Raises:
            Mismatch: The value does not match the type.
        """

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """Return the JSON value for a Python value. A value that is already in its JSON form is only checked.

        Raises:
            Mismatch: The value does not match the type.
        """

    @abstractmethod
    def schema(self, definitions: Definitions) -> Schema:
        """Return the JSON Schema of the JSON form."""

    def mismatch(self, value: object) -> Mismatch:
        """Return the exception for a value of another type."""
        return Mismatch(f"expected {self.name}, not {shown(value)}")


# Converters of single values: JSON's own types, times, ids, numbers, enum members, bytes.


class Anything(Converter):
    """No hint, or ``Any``: the value is not checked."""

    name, plain, rank = "any value", True, ANY_RANK

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
        self.kind = kind
        self.name = name
        self._json_type = json_type
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
        self._kind = kind
        self.name = name
        self._parse = parse
        self._form = form
        self._schema = schema

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


# Converters of arrays and objects of any length, and of unions.


class Array(Converter):
    """``list``, ``set``, ``tuple[T, ...]`` … : an array of one type.

    Args:
        item: The type of the items.
        name: The type in messages.
        make: Makes the collection from a list, for example ``set``.
        kinds: The Python types that can be sent, in addition to ``list`` and ``tuple``.
    """

    def __init__(self, item: Converter, name: str, make: Callable[[list[Any]], Any], kinds: tuple[type, ...]) -> None:
        self._item = item
        self.name = name
        self._make = make
        self._kinds: tuple[type[Iterable[Any]], ...] = (*kinds, list, tuple)
        self._is_unique = make in (set, frozenset)
        self.plain = make is list and item.plain
        self.rank = LAST if self.plain else self.rank

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise self.mismatch(value)
        try:
            return self._make(_each(value, self._item.decode))
        except TypeError as exc:  # an unhashable item of a set
            raise Mismatch(str(exc)) from None

    def encode(self, value: Any) -> list[Any]:
        if not isinstance(value, self._kinds):
            raise self.mismatch(value)
        return _each(value, self._item.encode)

    def schema(self, definitions: Definitions) -> Schema:
        schema: Schema = {"type": "array", "items": self._item.schema(definitions)}
        return {**schema, "uniqueItems": True} if self._is_unique else schema


class FixedTuple(Converter):
    """``tuple[A, B]``, or a ``NamedTuple``: an array of fixed length.

    Args:
        items: The types of the items.
        make: Makes the tuple from a list.
        required: The number of items without a default.
    """

    def __init__(self, items: Sequence[Converter], make: Callable[[list[Any]], Any], required: int) -> None:
        self._items = items
        self._make = make
        self._required = required
        self.name = f"an array of {len(items)} items"

    def decode(self, value: Any) -> Any:
        if not isinstance(value, list):
            raise self.mismatch(value)
        return self._make(self._convert(value, "decode"))

    def encode(self, value: Any) -> list[Any]:
        if not isinstance(value, list | tuple):
            raise self.mismatch(value)
        return self._convert(value, "encode")

    def _convert(self, values: Sequence[Any], method: str) -> list[Any]:
        if not self._required <= len(values) <= len(self._items):
            raise Mismatch(f"expected {self.name}, not {len(values)}")
        converted: list[Any] = []
        try:
            for item, value in zip(self._items, values, strict=False):
                converted.append(getattr(item, method)(value))
        except Mismatch as exc:
            raise exc.below(len(converted)) from None
        return converted

    def schema(self, definitions: Definitions) -> Schema:
        items = [item.schema(definitions) for item in self._items]
        return {"type": "array", "prefixItems": items, "minItems": self._required, "maxItems": len(items)}


class Object(Converter):
    """``dict[K, V]``: an object with any keys.

    Args:
        key: The type of the keys; their JSON form must be a string.
        value: The type of the values.
    """

    name = "an object"

    def __init__(self, key: Converter, value: Converter) -> None:
        self._key = key
        self._value = value
        self.plain = key.plain and value.plain
        self.rank = LAST if self.plain else self.rank

    def decode(self, value: Any) -> dict[Any, Any]:
        if not isinstance(value, dict):
            raise self.mismatch(value)
        return self._convert(value, self._key.decode, self._value.decode)

    def encode(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, Mapping):
            raise self.mismatch(value)
        return self._convert(value, self._key.encode, self._value.encode)

    @staticmethod
    def _convert(
        values: Mapping[Any, Any], key_of: Callable[[Any], Any], value_of: Callable[[Any], Any]
    ) -> dict[Any, Any]:
        converted = {}
        key: Any = None
        try:
            for key, value in values.items():
                converted[key_of(key)] = value_of(value)
        except Mismatch as exc:
            raise exc.below(str(key)) from None
        return converted

    def schema(self, definitions: Definitions) -> Schema:
        schema: Schema = {"type": "object", "additionalProperties": self._value.schema(definitions)}
        keys = self._key.schema(definitions)
        return schema if keys == {"type": "string"} else {**schema, "propertyNames": keys}


class _IntegerKey(Converter):
    """Keys that are integers, or enum members whose values are integers; in JSON, they are strings.

    Args:
        inner: The converter of the numbers.
    """

    def __init__(self, inner: Converter) -> None:
        self._inner = inner
        self.name = inner.name

    def decode(self, value: Any) -> Any:
        try:
            return self._inner.decode(int(value))
        except (ValueError, Mismatch):
            raise self.mismatch(value) from None

    def encode(self, value: Any) -> str:
        if isinstance(value, str):
            self.decode(value)
            return value
        return str(self._inner.encode(value))

    def schema(self, definitions: Definitions) -> Schema:
        return {"type": "string", "pattern": "^-?[0-9]+$"}


_KEY_SCALARS = (str, int, float, bool, type(None))


class _Attempts(threading.local):
    """The members that match parts of the value that this thread is converting, or why none matches."""

    found: dict[tuple[int, int, str], tuple[object, Converter | Mismatch, Any]] | None = None


_attempts = _Attempts()


class Union(Converter):
    """``A | B | None``: the first member that matches, in the order of their ranks.

    Args:
        members: The types of the members, as they are written.
    """

    def __init__(self, members: Iterable[Converter]) -> None:
        self._written = tuple(members)
        self._members = sorted(self._written, key=lambda member: member.rank)
        self.plain = all(member.plain for member in self._members)
        others = [member for member in self._members if member is not PLAIN[type(None)]]
        self.name = " or ".join(member.name for member in self._members)
        self._only = others[0] if len(others) == 1 else None
        self._is_optional = len(others) < len(self._members)
        self.rank = max(member.rank for member in self._members)

    def decode(self, value: Any) -> Any:
        return self._convert(value, "decode")

    def encode(self, value: Any) -> Any:
        return self._convert(value, "encode")

    def _convert(self, value: Any, method: str) -> Any:
        if value is None and self._is_optional:
            return None
        if self._only is not None:  # its mismatch has the path to the problem
            return getattr(self._only, method)(value)
        if isinstance(value, _KEY_SCALARS):
            return self._first(value, method)[1]
        # Members that contain this union would try all members for each part again, at each level: remember which
        # member matches which part.
        is_first, key = _attempts.found is None, (id(self), id(value), method)
        found = _attempts.found = {} if _attempts.found is None else _attempts.found
        is_new = key not in found
        try:
            if is_new:
                try:
                    found[key] = value, *self._first(value, method)  # with the value, so that no other gets its id
                except Mismatch as exc:
                    found[key] = value, exc, None
            _, outcome, converted = found[key]
            if isinstance(outcome, Mismatch):
                raise Mismatch.of_several(outcome.problems)
            # A member that has failed may have changed what was decoded, but nothing changes what was encoded.
            return converted if is_new or method == "encode" else getattr(outcome, method)(value)
        finally:
            if is_first:
                _attempts.found = None

    def _first(self, value: Any, method: str) -> tuple[Converter, Any]:
        """Return the first member that matches, and the converted value.

        A float accepts an integer only if the union does not also have int.
        """
        reasons: dict[int, Mismatch] = {}
        for inexact in (False, True):
            for member in self._members:
                if (member.rank == EXACT and type(value) is not _kind(member)) is not inexact:
                    continue
                try:
                    return member, getattr(member, method)(value)
                except Mismatch as exc:
                    reasons[id(member)] = exc
        raise self._mismatch_of_all(value, [(member, reasons[id(member)]) for member in self._members])

    def _mismatch_of_all(self, value: Any, reasons: Iterable[tuple[Converter, Mismatch]]) -> Mismatch:
        """Return a mismatch with the reason for each member of the value's kind; the others are only named."""
        texts = [f"{member.name}: {exc}" for member, exc in reasons if any(path for path, _ in exc.problems)]
        details = f" ({'; '.join(texts)})" if texts else ""
        return Mismatch(f"{self.mismatch(value)}{details}")

    def schema(self, definitions: Definitions) -> Schema:
        return {"anyOf": [member.schema(definitions) for member in self._written]}


def _kind(member: Converter) -> type | None:
    return member.kind if isinstance(member, PlainScalar) else None


def or_none(converter: Converter) -> Converter:
    """Return a converter that accepts ``None``, for ``day: date = None``, which means ``date | None``."""
    try:
        converter.decode(None)
    except Mismatch:
        return Union((converter, PLAIN[type(None)]))
    return converter


def key_converter(converter: Converter) -> Converter | None:
    """Return the converter of a dictionary's keys, ``None`` if they are not strings or integers."""
    definitions = Definitions()
    schema = converter.schema(definitions)
    schema = next(iter(definitions.schemas.values()), schema)
    values = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if schema.get("type") == "string" or (values and all(isinstance(value, str) for value in values)):
        return converter
    integers = schema.get("type") == "integer" or (values and all(type(value) is int for value in values))
    return (
        _IntegerKey(converter) if integers and isinstance(converter, PlainScalar | EnumMember | LiteralValue) else None
    )


def _each(values: Iterable[Any], convert: Callable[[Any], Any]) -> list[Any]:
    converted: list[Any] = []
    try:
        for value in values:
            converted.append(convert(value))  # noqa: PERF401 - its length is the index of a mismatch
    except Mismatch as exc:
        raise exc.below(len(converted)) from None
    return converted


# Converters of types with named fields: dataclasses and ``TypedDict``.


NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Field:
    """A field of a dataclass, a key of a ``TypedDict``, or a parameter of a function.

    Attributes:
        required: It has no default.
        default: The default, if it is a value that can be shown in a schema.
    """

    converter: Converter
    required: bool
    default: Any = NO_DEFAULT


class Record(Converter):
    """A dataclass: an object with exactly its fields.

    Args:
        kind: The class.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.name = kind.__name__
        self.fields: dict[str, Field] = {}
        """Filled in later, because a class may contain itself."""

    def decode(self, value: Any) -> Any:
        if not isinstance(value, dict):
            raise Mismatch(f"expected {self.name} as an object, not {shown(value)}")
        self._check_names(value)
        arguments = convert_fields(self.fields, value, "decode")
        try:
            return self._kind(**arguments)
        except Exception as exc:
            raise Mismatch(f"{type(exc).__name__}: {exc}") from exc

    def encode(self, value: Any) -> dict[str, Any]:
        if isinstance(value, self._kind):
            self._check_subclass(value)
            return self._encode_fields({name: getattr(value, name) for name in self.fields})
        if not isinstance(value, Mapping):
            raise self.mismatch(value)
        encoded = self._encode_fields(value)
        self.decode(encoded)  # runs the checks of the class, such as __post_init__
        return encoded

    def _encode_fields(self, values: Mapping[str, Any]) -> dict[str, Any]:
        self._check_names(values)
        return convert_fields(self.fields, values, "encode")

    def _check_names(self, values: Mapping[str, Any]) -> None:
        problems: list[tuple[tuple[str, ...], str]] = [
            ((name,), "missing") for name, field in self.fields.items() if field.required and name not in values
        ]
        problems += [
            ((str(name),), f"{self.name} has no such field{did_you_mean(str(name), self.fields)}")
            for name in values
            if name not in self.fields
        ]
        if problems:
            raise Mismatch.of_several(problems)

    def _check_subclass(self, value: Any) -> None:
        if type(value) is not self._kind and (more := {field.name for field in fields(value)} - self.fields.keys()):
            raise Mismatch(f"expected {self.name}, not {type(value).__name__}, whose field {min(more)!r} would be lost")

    def schema(self, definitions: Definitions) -> Schema:
        def build() -> Schema:
            fields = self.fields
            if definitions.of_results:  # the worker writes all fields
                fields = {name: Field(field.converter, required=True) for name, field in fields.items()}
            return {**object_schema(fields, definitions), "additionalProperties": False}

        return definitions.reference(self._kind, build)


class TypedDictionary(Converter):
    """A ``TypedDict``: an object with its keys. Other keys are kept, as in Python's type system.

    Args:
        kind: The class.
    """

    def __init__(self, kind: type) -> None:
        self._kind = kind
        self.name = kind.__name__
        self.fields: dict[str, Field] = {}
        """Filled in later, because a type may contain itself."""

    def complete(self, given: Mapping[str, Field]) -> None:
        """Set the fields."""
        self.plain = all(field.converter.plain for field in given.values())
        self.rank = LAST if self.plain else CONVERTED
        self.fields.update(given)

    def decode(self, value: Any) -> dict[str, Any]:
        return self._convert(value, "decode")

    def encode(self, value: Any) -> dict[str, Any]:
        return self._convert(value, "encode")

    def _convert(self, value: Any, method: str) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self.mismatch(value)
        if missing := [name for name, field in self.fields.items() if field.required and name not in value]:
            raise Mismatch.of_several([((name,), "missing") for name in missing])
        return convert_fields(self.fields, value, method)

    def schema(self, definitions: Definitions) -> Schema:
        return definitions.reference(self._kind, lambda: object_schema(self.fields, definitions))


def convert_fields(given: Mapping[str, Field], values: Mapping[str, Any], method: str) -> dict[str, Any]:
    """Return the converted values by name; values without a field are unchanged.

    Args:
        given: The fields.
        values: The values.
        method: ``"decode"`` or ``"encode"``.

    Raises:
        Mismatch: A value does not match its field.
    """
    converted = {}
    name = ""
    try:
        for name, value in values.items():
            field = given.get(name)
            converted[name] = value if field is None else getattr(field.converter, method)(value)
    except Mismatch as exc:
        raise exc.below(name) from None
    return converted


def object_schema(given: Mapping[str, Field], definitions: Definitions) -> Schema:
    """Return the JSON Schema of an object with these fields."""
    properties: Schema = {}
    for name, field in given.items():
        properties[name] = field.converter.schema(definitions)
        if field.default is not NO_DEFAULT:
            try:
                properties[name] = {**properties[name], "default": field.converter.encode(field.default)}
            except Mismatch:  # such as None for "not given"
                continue
    schema: Schema = {"type": "object", "properties": properties}
    required = [name for name, field in given.items() if field.required]
    return {**schema, "required": required} if required else schema


# The converter of models of pydantic 1, which pydantic 2 contains as ``pydantic.v1``.
#
# pydantic 2 cannot convert them. This module imports neither version.


def is_old_model(kind: type) -> bool:
    """Return whether a class is a model of pydantic 1."""
    return hasattr(kind, "__fields__") and hasattr(kind, "parse_obj") and not hasattr(kind, "model_validate")


class OldModel(Converter):
    """A model of pydantic 1, converted by its own rules and configuration.

    Args:
        kind: The class.
    """

    def __init__(self, kind: Any) -> None:
        self._class = kind
        self.name = kind.__name__

    def decode(self, value: Any) -> Any:
        try:
            return self._class.parse_obj(value)
        except Exception as exc:  # a ValidationError, or anything that a validator raises
            problems = exc.errors() if hasattr(exc, "errors") else ()
            if not problems:
                raise Mismatch(f"{type(exc).__name__}: {exc}") from exc
            found = [([part for part in error["loc"] if part != "__root__"], error["msg"]) for error in problems]
            raise Mismatch.of_several(found) from None  # its message does not contain the value, which may be secret

    def encode(self, value: Any) -> Any:
        model = value if isinstance(value, self._class) else self.decode(value)
        try:
            return json.loads(model.json(by_alias=True))
        except Exception as exc:  # a type without a JSON form
            raise Mismatch(f"{type(exc).__name__}: {exc}") from exc

    def schema(self, definitions: Definitions) -> Schema:
        schema = self._class.schema(by_alias=True, ref_template="#/$defs/{model}")
        more = schema.pop("definitions", {})
        return definitions.adopt({"$defs": {**more, self.name: schema}, "$ref": f"#/$defs/{self.name}"})


# Make the converter for a type hint.


ANYTHING: Final = Anything()

_ARRAYS: Final[dict[Any, tuple[str, Callable[[list[Any]], Any], tuple[type, ...]]]] = {
    **dict.fromkeys((list, abc.Sequence, abc.MutableSequence, abc.Iterable, abc.Collection), ("an array", list, ())),
    **dict.fromkeys((set, abc.Set, abc.MutableSet), ("an array of unique items", set, (set, frozenset))),
    frozenset: ("an array of unique items", frozenset, (set, frozenset)),
    collections.deque: ("an array", collections.deque, (collections.deque,)),
}
_UNCHECKED: Final = (Any, object, typing.NoReturn, typing.Never)
_QUALIFIERS: Final = (typing.Required, typing.NotRequired, typing.Final, getattr(typing, "ReadOnly", typing.Final))
_OBJECTS: Final = (dict, abc.Mapping, abc.MutableMapping)
_REGISTERED: Final[dict[type, Converter]] = {}


class NoConverter(Exception):
    """A type cannot be converted from and to JSON; the message says which one and why."""


def register_converter(kind: type, converter: Converter) -> None:
    """Register a converter for a class that is defined in a higher layer."""
    _REGISTERED[kind] = converter


def converter_of(hint: Any) -> Converter:
    """Return the converter of a hint that has no unresolved names.

    Raises:
        NoConverter: The hint contains a type that JSON cannot represent, or something that is not a type.
    """
    try:
        return _Builder().build(hint)
    except RecursionError:  # ``type Json = list[Json] | …``
        raise NoConverter(f"{_hint_text(hint)} is an alias that contains itself") from None


class _Builder:
    """Builds the converter of one hint; it remembers classes, because a class may contain itself."""

    def __init__(self) -> None:
        self._classes: dict[type, Converter] = {}

    def build(self, hint: Any) -> Converter:
        hint = _underlying(hint)
        if isinstance(hint, typing.TypeVar) or any(hint is kind for kind in _UNCHECKED):
            return ANYTHING
        origin, args = get_origin(hint), get_args(hint)
        if origin is typing.Annotated:
            return _model(hint) if any(_is_pydantics(part) for part in args[1:]) else self.build(args[0])
        if origin is Literal:
            return self._literal(hint, args)
        if origin in (typing.Union, types.UnionType):
            return self._union(hint, args)
        return self._class(hint, hint if origin is None else origin, args)

    def _class(self, hint: Any, kind: Any, args: tuple[Any, ...]) -> Converter:
        if not isinstance(kind, type):
            raise NoConverter(f"{_hint_text(hint)} is not a type that describes a value")
        if kind in _REGISTERED:
            return _REGISTERED[kind]
        if _is_pydantics(kind):
            return _model(hint)
        if kind is tuple:
            return self._tuple(args)
        if kind in _ARRAYS:
            return Array(self.build(args[0]) if args else ANYTHING, *_ARRAYS[kind])
        if kind in _OBJECTS:
            return self._object(*(args or (str, Any)))
        if args:
            raise NoConverter(
                f"{_hint_text(hint)} is a generic class, which is converted only if it is a pydantic model"
            )
        return self._plain_class(kind)

    def _plain_class(self, kind: type) -> Converter:
        try:
            if (found := scalar(kind)) is not None:
                return found
        except TypeError as exc:
            raise NoConverter(f"{exc}, so it cannot be converted to JSON") from None
        if kind in self._classes:
            return self._classes[kind]
        if is_old_model(kind):
            return OldModel(kind)
        if dataclasses.is_dataclass(kind):
            return self._record(kind)
        if issubclass(kind, dict) and hasattr(kind, "__required_keys__"):  # of typing or typing_extensions
            return self._typed_dictionary(kind)
        if issubclass(kind, tuple) and hasattr(kind, "_fields"):
            hints = _field_hints(kind)
            items = [self.build(hints.get(name, Any)) for name in kind._fields]
            defaults = tuple(kind._field_defaults.values())  # type: ignore[attr-defined]
            required = len(items) - len(defaults)
            make: Any = kind._make  # type: ignore[attr-defined]  # it does not add the defaults
            return FixedTuple(items, lambda values: make([*values, *defaults[len(values) - required :]]), required)
        raise NoConverter(f"{_hint_text(kind)} is not a type that can be converted to JSON")

    def _literal(self, hint: Any, values: tuple[Any, ...]) -> Converter:
        if all(value is None or type(value) in (str, int, bool) for value in values):
            return LiteralValue(values)
        raise NoConverter(f"{_hint_text(hint)} contains a value that JSON does not support")

    def _union(self, hint: Any, members: tuple[Any, ...]) -> Converter:
        others = [member for member in members if member is not type(None)]
        if len(others) > 1 and any(_is_pydantics(get_origin(member) or member) for member in others):
            return _model(hint)  # pydantic finds the best member, not the first one
        return Union([self.build(member) for member in members])

    def _tuple(self, args: tuple[Any, ...]) -> Converter:
        if not args or (len(args) == 2 and args[1] is Ellipsis):
            return Array(self.build(args[0]) if args else ANYTHING, "an array", tuple, ())
        items = [self.build(arg) for arg in args if arg != ()]
        return FixedTuple(items, tuple, len(items))

    def _object(self, key: Any, value: Any) -> Converter:
        converter = self.build(str) if key is Any else key_converter(self.build(key))
        if converter is None:
            raise NoConverter(
                f"the keys of a JSON object are strings, and {_hint_text(key)} cannot be represented by one"
            )
        return Object(converter, self.build(value))

    def _record(self, kind: type) -> Converter:
        record = self._classes[kind] = Record(kind)
        hints = _field_hints(kind)
        for field in dataclasses.fields(kind):
            if field.init:
                required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
                default = NO_DEFAULT if field.default is dataclasses.MISSING else field.default
                converter = self._field(kind, field.name, hints[field.name])
                record.fields[field.name] = Field(
                    or_none(converter) if default is None else converter, required, default
                )
        return record

    def _typed_dictionary(self, kind: Any) -> Converter:
        dictionary = self._classes[kind] = TypedDictionary(kind)
        dictionary.complete(
            {
                name: Field(self._field(kind, name, hint), _is_required(kind, name, hint))
                for name, hint in _field_hints(kind).items()
            }
        )
        return dictionary

    def _field(self, kind: type, name: str, hint: Any) -> Converter:
        try:
            return self.build(hint)
        except NoConverter as exc:
            raise NoConverter(f"{kind.__name__}.{name}: {exc}") from None


def _underlying(hint: Any) -> Any:
    """Return the type behind an alias, a ``NewType``, or a qualifier such as ``Required``."""
    while True:
        if hint is None:
            return type(None)
        if isinstance(hint, typing.NewType):
            hint = hint.__supertype__
        elif type(hint).__name__ == "TypeAliasType":  # Python 3.12, or typing_extensions
            hint = hint.__value__
        elif get_origin(hint) in _QUALIFIERS:
            hint = get_args(hint)[0]
        else:
            return hint


def _field_hints(kind: type) -> dict[str, Any]:
    try:
        return typing.get_type_hints(kind, include_extras=True)
    except Exception as exc:  # noqa: BLE001 - evaluating a hint may raise anything
        raise NoConverter(f"the hints of {kind.__name__} cannot be evaluated: {exc}") from None


def _is_required(kind: Any, name: str, hint: Any) -> bool:
    """Return whether a key is required; ``__required_keys__`` does not account for string annotations."""
    origin = get_origin(hint)
    return origin is typing.Required or (name in kind.__required_keys__ and origin is not typing.NotRequired)


def _is_pydantics(part: Any) -> bool:
    """Return whether a class, or metadata of ``Annotated``, belongs to pydantic; False unless pydantic is imported."""
    if "pydantic" not in sys.modules:
        return False
    kind = part if isinstance(part, type) else type(part)
    package = kind.__module__.partition(".")[0]
    marks = ("__get_pydantic_core_schema__", "__pydantic_validator__")
    return package in ("pydantic", "annotated_types") or any(hasattr(part, mark) for mark in marks)


def _model(hint: Any) -> Converter:
    try:
        from bulltask.registry import pydantic_types as models  # noqa: PLC0415 - it needs pydantic, which is slow to import
    except ImportError as exc:  # pydantic 1
        raise NoConverter(f"{_hint_text(hint)} needs pydantic 2: {exc}") from None
    try:
        return models.Model(hint)
    except models.UNUSABLE as exc:
        raise NoConverter(f"pydantic cannot convert {_hint_text(hint)}: {str(exc).splitlines()[0]}") from None


def _hint_text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)


# The types of a function's parameters and return value, and the conversion of its calls.


_Kind = inspect.Parameter
_VARIADIC: Final = (_Kind.VAR_POSITIONAL, _Kind.VAR_KEYWORD)


class CallTypes:
    """The converters of a task's parameters and return value.

    Args:
        function: The task's function.
        task: The task's name, for messages.
        skip_first: The first parameter is the context (``bind=True``), not an argument.

    Attributes:
        problems: Why a hint was ignored, by the name of its parameter or ``"return"``.
    """

    def __init__(self, function: Callable[..., Any], task: str, *, skip_first: bool) -> None:
        self._task = task
        parameters = list(inspect.signature(function).parameters.values())[1 if skip_first else 0 :]
        self._parameters = {parameter.name: parameter for parameter in parameters}
        hints, self.problems = hints_of(function)
        self._items = {name: self._converter(name, hints) for name in self._parameters}
        for name, parameter in self._parameters.items():
            if parameter.default is None:
                self._items[name] = or_none(self._items[name])
        self.fields = {name: self._field(parameter) for name, parameter in self._parameters.items()}
        self.result = self._converter("return", hints)

    def _converter(self, name: str, hints: Mapping[str, Any]) -> Converter:
        try:
            return converter_of(hints.get(name, Any))
        except NoConverter as exc:
            self.problems[name] = str(exc)
            return ANYTHING

    def _field(self, parameter: inspect.Parameter) -> Field:
        """Return the field of a parameter in the job's data; ``*args`` is an array, ``**kwargs`` an object."""
        item = self._items[parameter.name]
        if parameter.kind is _Kind.VAR_POSITIONAL:
            return Field(Array(item, "an array", list, ()), required=False)
        if parameter.kind is _Kind.VAR_KEYWORD:
            return Field(Object(PLAIN[str], item), required=False)
        default = NO_DEFAULT if parameter.default is _Kind.empty else parameter.default
        return Field(item, default is NO_DEFAULT, default)

    def conversion(self, typed: bool | None) -> CallConversion | None:
        """Return the conversion of calls, ``None`` if nothing is converted.

        Args:
            typed: ``True``: all hints are enforced; ``None``: those of types that JSON does not have; ``False``: none.

        Raises:
            ConfigError: ``typed`` is true, and a hint cannot be enforced.
        """
        if typed is False:
            return None
        for name in ("return", *self._parameters) if typed else ():
            if name in self.problems:
                what = "the return value" if name == "return" else f"parameter {name!r}"
                raise ConfigError(
                    f"task {self._task!r} has typed=True, but the type of {what} cannot be enforced: "
                    f"{self.problems[name]}; use Any, or leave out typed=True"
                )
        enforced = {name for name, item in self._items.items() if self._is_enforced(item, typed)}
        result = self.result if self._is_enforced(self.result, typed) else None
        if not enforced and result is None:
            return None
        names = [name for name, parameter in self._parameters.items() if parameter.kind not in _VARIADIC]
        by_kind = {parameter.kind: name for name, parameter in self._parameters.items()}
        return CallConversion(
            self._task,
            {name: self.fields[name].converter for name in enforced},
            {name: self._items[name] for name in enforced},
            positional=[name for name in names if self._parameters[name].kind is not _Kind.KEYWORD_ONLY],
            var_args=by_kind.get(_Kind.VAR_POSITIONAL),
            var_kwargs=by_kind.get(_Kind.VAR_KEYWORD),
            names=frozenset(names),
            result=result,
        )

    @staticmethod
    def _is_enforced(converter: Converter, typed: bool | None) -> bool:
        return converter is not ANYTHING if typed else not converter.plain

    def data_schema(self, definitions: Definitions) -> Schema:
        """Return the JSON Schema of the job's data."""
        schema = object_schema(self.fields, definitions)
        if any(parameter.kind is _Kind.VAR_KEYWORD for parameter in self._parameters.values()):
            return schema  # other keys are keyword arguments, too
        return {**schema, "additionalProperties": False}


@dataclass(frozen=True)
class CallConversion:
    """Converts the arguments and results of one task.

    Attributes:
        task: The task's name, for messages.
        fields: The converted parameters, as they are in the job's data.
        items: The converted parameters, or for ``*args`` and ``**kwargs``, their items.
        positional: Names of the parameters that can be passed by position.
        var_args, var_kwargs: Names of ``*args`` and ``**kwargs``.
        names: Names of the other parameters.
        result: The converter of the return value, ``None`` if it is not converted.
    """

    task: str
    fields: Mapping[str, Converter]
    items: Mapping[str, Converter]
    positional: Sequence[str]
    var_args: str | None
    var_kwargs: str | None
    names: frozenset[str]
    result: Converter | None
    hides_values: Callable[[], bool] = bool
    """Whether messages must not contain values, because the app encrypts payloads; called only for a problem."""

    def without(self, names: Collection[str]) -> CallConversion:
        """Return the conversion of the other parameters."""
        return replace(self, items={name: item for name, item in self.items.items() if name not in names})

    def encode_arguments(self, data: Mapping[str, Any]) -> dict[str, Any]:
        """Return arguments by parameter name, some or all of them, in their JSON form.

        Raises:
            EncodeError: An argument does not match its type hint; the message has the path to the bad value.
        """
        problems: list[_Problem] = []
        encoded = {
            name: _convert(self.fields.get(name), "encode", value, (name,), problems) for name, value in data.items()
        }
        if problems:
            raise EncodeError(f"the arguments of task {self.task}: {self._text(problems)}")
        return encoded

    def decode_arguments(
        self, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Convert a job's arguments, which match the signature, to the types of their hints.

        Raises:
            InvalidJobError: An argument does not match its type hint; the message has the path to the bad value.
        """
        problems: list[_Problem] = []
        count = len(self.positional)
        decoded_args = [
            _convert(self.items.get(name), "decode", value, (name,), problems)
            for name, value in zip(self.positional, args, strict=False)
        ]
        decoded_args += [
            _convert(self.items.get(self.var_args or ""), "decode", value, (self.var_args or "", index), problems)
            for index, value in enumerate(args[count:])
        ]
        decoded_kwargs = {
            name: _convert(self._item_of(name), "decode", value, (name,), problems) for name, value in kwargs.items()
        }
        if problems:
            problem = f"the job's data does not match task {self.task}: {self._text(problems)}"
            raise incompatible(InvalidJobError(problem))
        return tuple(decoded_args), decoded_kwargs

    def _item_of(self, name: str) -> Converter | None:
        return self.items.get(name if name in self.names else self.var_kwargs or "")

    def encode_result(self, value: Any) -> Any:
        """Return the JSON form of a return value.

        Raises:
            EncodeError: The value does not match the type hint; the message has the path to the bad value.
        """
        problems: list[_Problem] = []
        encoded = _convert(self.result, "encode", value, (), problems)
        if problems:
            raise EncodeError(f"the return value of task {self.task}: {self._text(problems)}")
        return encoded

    def decode_result(self, value: Any) -> Any:
        """Convert a job's return value to the type of the hint.

        Raises:
            DecodeError: The value does not match the type hint; the message has the path to the bad value.
        """
        problems: list[_Problem] = []
        decoded = _convert(self.result, "decode", value, (), problems)
        if problems:
            raise DecodeError(f"the return value of task {self.task}: {self._text(problems)}")
        return decoded

    def _text(self, problems: Sequence[_Problem]) -> str:
        """Return the problems, or if values are hidden, only the parameters: paths and texts contain values."""
        if not self.hides_values():
            return str(Mismatch.of_several(problems))
        found = dict.fromkeys(str(path[0]) if path else "" for path, _ in problems)
        names = [name if name in self.items or not name else f"**{self.var_kwargs}" for name in found]
        texts = []
        for name in dict.fromkeys(names):
            hint = self.result if not name else self.items.get(name.removeprefix("**"))
            kind = "its type" if hint is None else hint.name
            texts.append(f"{name}: expected {kind}".removeprefix(": "))
        return f"{'; '.join(texts)} ({HIDDEN_VALUES})"


_Path = tuple[str | int, ...]
_Problem = tuple[_Path, str]


def _convert(converter: Converter | None, method: str, value: Any, path: _Path, problems: list[_Problem]) -> Any:
    """Return the converted value; append any mismatch to ``problems``."""
    if converter is None:
        return value
    try:
        return getattr(converter, method)(value)
    except Mismatch as exc:
        problems += [((*path, *rest), text) for rest, text in exc.problems]
    except RecursionError:
        problems.append((path, "contains a circular reference, or is nested too deeply"))
    return None


def hints_of(function: Callable[..., Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return a function's evaluated hints, and the reasons why others cannot be evaluated, by parameter name.

    A name that exists only for type checkers (``if TYPE_CHECKING:``) affects only the hints that contain it.
    """
    try:
        return typing.get_type_hints(function, include_extras=True), {}
    except Exception:  # noqa: BLE001 - evaluating a hint may raise anything
        hints: dict[str, Any] = {}
        problems: dict[str, str] = {}
    variables = getattr(inspect.unwrap(function), "__globals__", {})
    for name, hint in getattr(function, "__annotations__", {}).items():
        try:
            hints |= typing.get_type_hints(_with_hint(name, hint), globalns=variables, include_extras=True)
        except Exception as exc:  # noqa: BLE001 - as above
            problems[name] = f"its hint cannot be evaluated: {exc}"
    return hints, problems


def _with_hint(name: str, hint: Any) -> Callable[[], None]:
    def holder() -> None: ...

    holder.__annotations__ = {name: hint}
    return holder
