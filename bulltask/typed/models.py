"""The converter of pydantic's types: models, constrained types, discriminated unions …

This module imports pydantic, so it is imported only for a hint that contains such a type.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, Final

from pydantic import (
    PydanticSchemaGenerationError,
    PydanticUndefinedAnnotation,
    PydanticUserError,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticSerializationError

from bulltask.typed.converter import Converter, Mismatch
from bulltask.typed.definitions import Definitions, Schema

__all__ = ["UNUSABLE", "Model"]

UNUSABLE: Final = (PydanticSchemaGenerationError, PydanticUndefinedAnnotation, PydanticUserError)
"""Raised by :class:`Model` for a hint that pydantic cannot convert."""


class Model(Converter):
    """Any type that pydantic converts, according to its own rules and the model's configuration.

    Args:
        hint: The type.
    """

    def __init__(self, hint: Any) -> None:
        self._class = hint if isinstance(hint, type) else None
        self._adapter: TypeAdapter[Any] = TypeAdapter(hint)
        self.name = getattr(hint, "__name__", None) or str(hint)

    def decode(self, value: Any) -> Any:
        return _validated(self._from_json, value)

    def encode(self, value: Any) -> Any:
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
