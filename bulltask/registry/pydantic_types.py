"""The converter of pydantic's types: models, constrained types, discriminated unions …"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, Final

from pydantic import (
    BaseModel,
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticSerializationError

from bulltask.registry.types import Converter, Definitions, Mismatch, Schema

__all__ = ["UNUSABLE", "Model"]


UNUSABLE: Final = (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError)
"""Raised by :class:`Model` for a hint that pydantic cannot convert."""


_MAX_TRIES, _TRIES_PER_PART = 5_000, 20
"""Maximum number of attempts to match a part with a member of a union, in total and for each part."""

_SCALAR_SCHEMAS: Final = frozenset(
    {
        "none",
        "bool",
        "int",
        "float",
        "decimal",
        "str",
        "bytes",
        "date",
        "time",
        "datetime",
        "timedelta",
        "literal",
        "enum",
        "uuid",
        "url",
    }
)


class Model(Converter):
    """Any type that pydantic converts, according to its own rules and the model's configuration.

    Args:
        hint: The type.
    """

    def __init__(self, hint: Any) -> None:
        self._class = hint if isinstance(hint, type) else None
        self._adapter: TypeAdapter[Any] = TypeAdapter(hint)
        self.name = getattr(hint, "__name__", None) or str(hint)
        self._choices = _choices_of_recursive_unions(self._adapter.core_schema)

    def decode(self, value: Any) -> Any:
        self._check_work(value)
        return _validated(self._from_json, value)

    def encode(self, value: Any) -> Any:
        self._check_work(value)
        try:
            checked = _validated(self._adapter.validate_python, value)
        except Mismatch as exc:  # perhaps the JSON form, which a strict model does not accept as Python values
            try:
                checked = _validated(self._from_json, value)
            except Mismatch:
                raise exc from None
        try:
            return self._adapter.dump_python(checked, mode="json", by_alias=True, round_trip=True, warnings="error")
        except PydanticSerializationError as exc:
            raise Mismatch(str(exc)) from None

    def _check_work(self, value: Any) -> None:
        """Raise ``Mismatch`` if unions of models that contain themselves would take too long: each level tries all."""
        if self._choices < 2:
            return
        work, room, level, tries = 0, _MAX_TRIES, [value], 1
        while level and work <= room:
            tries *= self._choices
            level = [part for whole in level for part in _parts(whole)]
            work += tries * sum(isinstance(part, dict | BaseModel) for part in level)
            room += _TRIES_PER_PART * len(level)
        if work > room:
            raise Mismatch(
                f"{self.name} is a union in which models contain each other, and the value is nested too "
                "deeply for it; use a discriminated union (pydantic.Discriminator)"
            )

    def _from_json(self, value: Any) -> Any:
        # As text, because a strict model accepts an ISO time, or an array for a tuple, only from JSON.
        return self._adapter.validate_json(json.dumps(value))

    def schema(self, definitions: Definitions) -> Schema:
        try:
            schema = self._adapter.json_schema(mode="serialization" if definitions.of_results else "validation")
        except PydanticUserError as exc:  # for example, a field that is a callable
            return {"description": f"pydantic has no JSON Schema for {self.name}: {str(exc).splitlines()[0]}"}
        if self._class is not None and schema.get("type") == "object" and "$ref" not in schema:
            more = schema.pop("$defs", {})
            name = self._class.__name__
            schema = {"$defs": {**more, name: schema}, "$ref": f"#/$defs/{name}"}
        return definitions.adopt(_without_computed_fields(schema) if definitions.of_results else schema)


def _choices_of_recursive_unions(schema: Any) -> int:
    """Return the largest number of models in a union of a schema that refers to itself; 0 if there is none.

    pydantic tries all members of a union unless it is discriminated, so each level of nesting multiplies the work.
    """
    if schema["type"] != "definitions":
        return 0
    most, left = 0, [schema]
    while left:
        part = left.pop()
        if isinstance(part, dict):
            if part.get("type") == "union":
                kinds = [choice[0] if isinstance(choice, tuple) else choice for choice in part["choices"]]
                most = max(most, sum(kind["type"] not in _SCALAR_SCHEMAS for kind in kinds))
            left += part.values()
        elif isinstance(part, list | tuple):
            left += part
    return most


def _parts(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    if isinstance(value, BaseModel):
        return value.__dict__.values()
    return value if isinstance(value, list | tuple | set | frozenset) else ()


def _without_computed_fields(schema: Any) -> Any:
    """Remove the fields that :meth:`Model.encode` does not write, because the model could not be read back."""
    if isinstance(schema, list):
        return [_without_computed_fields(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: _without_computed_fields(item) for key, item in schema.items()}
    properties = schema.get("properties", {})
    computed = {name for name, field in properties.items() if isinstance(field, dict) and field.get("readOnly")}
    if not computed:
        return schema
    kept = {name: field for name, field in properties.items() if name not in computed}
    required = [name for name in schema.get("required", ()) if name not in computed]
    return {**schema, "properties": kept, "required": required}


def _validated(validate: Callable[[Any], Any], value: Any) -> Any:
    """Return the validated value; the message of a mismatch does not contain the value, which may be secret."""
    try:
        return validate(value)
    except ValidationError as exc:
        errors = exc.errors(include_url=False, include_context=False, include_input=False)
        raise Mismatch.of_several([(error["loc"], error["msg"]) for error in errors]) from None
    except Exception as exc:  # from a validator of the model, or because the value is not JSON
        raise Mismatch(f"{type(exc).__name__}: {exc}") from exc
