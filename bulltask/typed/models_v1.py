"""The converter of models of pydantic 1, which pydantic 2 contains as ``pydantic.v1``.

pydantic 2 cannot convert them. This module imports neither version.
"""

from __future__ import annotations

import json
from typing import Any

from bulltask.typed.converter import Converter, Mismatch
from bulltask.typed.definitions import Definitions, Schema

__all__ = ["OldModel", "is_old_model"]


def is_old_model(kind: type) -> bool:
    """Return whether a class is a model of pydantic 1."""
    return hasattr(kind, "__fields__") and hasattr(kind, "parse_obj") and not hasattr(kind, "model_validate")


class OldModel(Converter):
    """A model of pydantic 1, converted by its own rules and configuration.

    Args:
        kind: The class.
    """

    def __init__(self, kind: Any) -> None:
        self._class, self.name = kind, kind.__name__

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
