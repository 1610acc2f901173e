"""TypeScript types from JSON Schema."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, Final

__all__ = ["TypeWriter", "doc_comment"]

Schema = Mapping[str, Any]

_PREFIX: Final = "#/$defs/"
_IDENTIFIER: Final = re.compile(r"[A-Za-z_$][\w$]*", re.ASCII)
_OTHER: Final = re.compile(r"[^\w$]", re.ASCII)
_RESERVED: Final = frozenset(
    "any arguments as async await bigint boolean break case catch class const continue debugger default delete do else"
    " enum export extends false finally for function if implements import in infer instanceof interface keyof let never"
    " new null number object package private protected public readonly return static string super switch symbol this"
    " throw true try type typeof undefined unique unknown var void while with yield"
    " Array Client Defaults Job JobsOptions Map Partial Promise Queue QueueEvents QueueOptions Record TaskName"
    " Tasks".split()
)
"""TypeScript's reserved words, and the names that the client uses itself."""
_SIMPLE: Final = {
    "string": "string",
    "integer": "number",
    "number": "number",
    "boolean": "boolean",
    "null": "null",
}


class TypeWriter:
    """Writes the types in the output of ``bulltask tasks schema``.

    Args:
        definitions: The document's ``$defs``.
    """

    def __init__(self, definitions: Mapping[str, Schema]) -> None:
        self._definitions = definitions
        self._names: dict[str, str] = {}
        for name in definitions:
            self._names[name] = self._unused(_OTHER.sub("_", name))

    def declarations(self) -> str:
        """Return the declarations of all named types."""
        return "".join(self._declaration(name, schema) for name, schema in self._definitions.items())

    def type_of(self, schema: Any, indent: str = "") -> str:
        """Return the type of a schema; ``unknown`` for what TypeScript cannot express.

        Args:
            schema: The schema.
            indent: The indentation of the line in which the type begins.
        """
        if not isinstance(schema, Mapping):  # true or false
            return "never" if schema is False else "unknown"
        if "$ref" in schema:
            return self._names.get(str(schema["$ref"]).removeprefix(_PREFIX), "unknown")
        if "const" in schema or "enum" in schema:
            return _union([json.dumps(value) for value in schema.get("enum", [schema.get("const")])])
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return _union([self.type_of(member, indent) for member in schema[keyword]])
        if "allOf" in schema:
            return " & ".join(_grouped(self.type_of(member, indent)) for member in schema["allOf"])
        kinds = schema.get("type", ())
        return _union([self._of_kind(kind, schema, indent) for kind in ([kinds] if isinstance(kinds, str) else kinds)])

    def properties(self, schema: Schema, indent: str) -> str:
        """Return the members of an object type, one per line."""
        required, lines = schema.get("required", ()), []
        for name, member in schema.get("properties", {}).items():
            optional = "" if name in required else "?"
            key = name if _IDENTIFIER.fullmatch(name) else json.dumps(name)
            lines.append(
                f"{doc_comment(_notes(member), indent)}{indent}{key}{optional}: {self.type_of(member, indent)};\n"
            )
        return "".join(lines)

    def _declaration(self, name: str, schema: Schema) -> str:
        comment = doc_comment(_notes(schema))
        if schema.get("type") == "object" and "properties" in schema:
            return f"{comment}export interface {self._names[name]} {{\n{self.properties(schema, '  ')}}}\n\n"
        return f"{comment}export type {self._names[name]} = {self.type_of(schema)};\n\n"

    def _of_kind(self, kind: str, schema: Schema, indent: str) -> str:
        if kind == "array":
            return self._array(schema, indent)
        if kind == "object":
            return self._object(schema, indent)
        return _SIMPLE.get(kind, "unknown")

    def _array(self, schema: Schema, indent: str) -> str:
        if "prefixItems" in schema:
            required = schema.get("minItems", 0)
            types = [self.type_of(item, indent) for item in schema["prefixItems"]]
            return f"[{', '.join(text if i < required else f'{_grouped(text)}?' for i, text in enumerate(types))}]"
        return f"{_grouped(self.type_of(schema.get('items', {}), indent))}[]"

    def _object(self, schema: Schema, indent: str) -> str:
        if "properties" in schema:
            members = self.properties(schema, f"{indent}  ")
            return f"{{\n{members}{indent}}}" if members else "Record<string, never>"
        value = self.type_of(schema.get("additionalProperties", {}), indent)
        keys = self.type_of(schema.get("propertyNames", {"type": "string"}), indent)
        return f"Record<string, {value}>" if keys == "string" else f"Partial<Record<{keys}, {value}>>"

    def _unused(self, name: str) -> str:
        name = name if _IDENTIFIER.fullmatch(name) else f"_{name}"
        while name in _RESERVED or name in self._names.values():
            name += "_"
        return name


def doc_comment(text: str, indent: str = "") -> str:
    """Return a JSDoc comment, ``""`` for no text."""
    return f"{indent}/** {' '.join(text.split()).replace('*/', '* /')} */\n" if text else ""


def _notes(schema: Any) -> str:
    """Return what the type itself does not express: description, format and default."""
    if not isinstance(schema, Mapping):
        return ""
    formats = [part["format"] for part in (schema, *schema.get("anyOf", ())) if "format" in part]
    encodings = [schema["contentEncoding"]] if "contentEncoding" in schema else []
    notes = [schema.get("description", ""), *(f"@format {name}" for name in formats + encodings)]
    if schema.get("default") is not None:
        notes.append(f"@default {json.dumps(schema['default'], ensure_ascii=False)}")
    return " ".join(note for note in notes if note)


def _union(types: list[str]) -> str:
    return " | ".join(dict.fromkeys(types)) if types and "unknown" not in types else "unknown"


def _grouped(text: str) -> str:
    return f"({text})" if " | " in text or " & " in text else text
