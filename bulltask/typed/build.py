"""Make the converter for a type hint."""

from __future__ import annotations

import collections
import dataclasses
import sys
import types
import typing
from collections import abc
from collections.abc import Callable
from typing import Any, Final, Literal, get_args, get_origin

from bulltask.typed.containers import Array, FixedTuple, Object, Union, key_converter, or_none
from bulltask.typed.converter import Converter
from bulltask.typed.models_v1 import OldModel, is_old_model
from bulltask.typed.records import NO_DEFAULT, Field, Record, TypedDictionary
from bulltask.typed.scalars import Anything, LiteralValue, scalar

__all__ = ["ANYTHING", "NoConverter", "converter_of", "register_converter"]

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
        raise NoConverter(f"{_text(hint)} is an alias that contains itself") from None


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
            raise NoConverter(f"{_text(hint)} is not a type that describes a value")
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
            raise NoConverter(f"{_text(hint)} is a generic class, which is converted only if it is a pydantic model")
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
        raise NoConverter(f"{_text(kind)} is not a type that can be converted to JSON")

    def _literal(self, hint: Any, values: tuple[Any, ...]) -> Converter:
        if all(value is None or type(value) in (str, int, bool) for value in values):
            return LiteralValue(values)
        raise NoConverter(f"{_text(hint)} contains a value that JSON does not support")

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
            raise NoConverter(f"the keys of a JSON object are strings, and {_text(key)} cannot be represented by one")
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
        from bulltask.typed import models  # noqa: PLC0415 - it needs pydantic, which is slow to import
    except ImportError as exc:  # pydantic 1
        raise NoConverter(f"{_text(hint)} needs pydantic 2: {exc}") from None
    try:
        return models.Model(hint)
    except models.UNUSABLE as exc:
        raise NoConverter(f"pydantic cannot convert {_text(hint)}: {str(exc).splitlines()[0]}") from None


def _text(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
