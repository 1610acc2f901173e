"""Converters of types with named fields: dataclasses and ``TypedDict``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from bulltask.errors import did_you_mean
from bulltask.typed.converter import CONVERTED, LAST, Converter, Mismatch, shown
from bulltask.typed.definitions import Definitions, Schema

__all__ = ["NO_DEFAULT", "Field", "Record", "TypedDictionary", "convert_fields", "object_schema"]

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
        self._kind, self.name = kind, kind.__name__
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
        self._kind, self.name = kind, kind.__name__
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
