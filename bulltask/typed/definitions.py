"""The definitions of a JSON Schema: the types that have names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

__all__ = ["Definitions", "Schema", "renamed"]

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
