"""The converter of pydantic's types: models, constrained types, discriminated unions …

This module imports pydantic, so it is imported only for a hint that contains such a type.
"""

from __future__ import annotations

import json
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
    """Any type that pydantic converts, by its own rules and the model's configuration.

    Args:
        hint: The type.
    """

    def __init__(self, hint: Any) -> None:
        self._class = hint if isinstance(hint, type) else None
        self._adapter: TypeAdapter[Any] = TypeAdapter(hint)
        self.name = getattr(hint, "__name__", None) or str(hint)

    def decode(self, value: Any) -> Any:
        # As JSON, because a strict model accepts an ISO time or an array for a tuple only from JSON.
        try:
            return self._adapter.validate_json(json.dumps(value))
        except ValidationError as exc:
            raise _mismatch(exc) from None

    def encode(self, value: Any) -> Any:
        try:
            checked = self._adapter.validate_python(value)
        except ValidationError as exc:
            checked = self._decode_json_form(value, exc)
        try:
            return self._adapter.dump_python(checked, mode="json", by_alias=True, round_trip=True, warnings="error")
        except PydanticSerializationError as exc:
            raise Mismatch(str(exc)) from None

    def _decode_json_form(self, value: Any, problem: ValidationError) -> Any:
        """Return the value of what may be its JSON form, which a strict model does not accept as Python values."""
        try:
            return self._adapter.validate_json(json.dumps(value))
        except (ValidationError, TypeError, ValueError):
            raise _mismatch(problem) from None

    def schema(self, definitions: Definitions) -> Schema:
        schema = self._adapter.json_schema(mode="serialization" if definitions.of_results else "validation")
        if self._class is not None and schema.get("type") == "object" and "$ref" not in schema:
            more = schema.pop("$defs", {})
            name = self._class.__name__
            schema = {"$defs": {**more, name: schema}, "$ref": f"#/$defs/{name}"}
        return definitions.adopt(schema)


def _mismatch(exc: ValidationError) -> Mismatch:
    """Return pydantic's problems without the values, which may be secrets."""
    errors = exc.errors(include_url=False, include_context=False, include_input=False)
    return Mismatch.of_several([(error["loc"], error["msg"]) for error in errors])
