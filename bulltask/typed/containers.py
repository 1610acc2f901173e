"""Converters of arrays and objects of any length, and of unions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bulltask.typed.converter import EXACT, LAST, Converter, Mismatch
from bulltask.typed.definitions import Definitions, Schema
from bulltask.typed.scalars import PLAIN, EnumMember, LiteralValue, PlainScalar

__all__ = ["Array", "FixedTuple", "Object", "Union", "key_converter", "or_none"]


class Array(Converter):
    """``list``, ``set``, ``tuple[T, ...]`` … : an array of one type.

    Args:
        item: The type of the items.
        name: The type in messages.
        make: Makes the collection from a list, for example ``set``.
        kinds: The Python types that can be sent, in addition to ``list`` and ``tuple``.
    """

    def __init__(self, item: Converter, name: str, make: Callable[[list[Any]], Any], kinds: tuple[type, ...]) -> None:
        self._item, self.name, self._make = item, name, make
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
        self._items, self._make, self._required = items, make, required
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
        self._key, self._value = key, value
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
        self._inner, self.name = inner, inner.name

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


_SCALARS = (str, int, float, bool, type(None))


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
        if isinstance(value, _SCALARS):
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
