"""Check the JSON that a command prints against its documented schema."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import jsonschema
from click.testing import Result

__all__ = ["SCHEMAS", "json_of"]

SCHEMAS: Final = Path(__file__).parent.parent.parent / "docs/reference/schemas"
"""A JSON Schema for each command with ``--json``: ``job.show.json`` is that of ``bulltask job show``."""


def json_of(result: Result, command: str) -> Any:
    """Return the document that ``command`` (``"job show"``) has printed, which must match its schema."""
    document = json.loads(result.stdout)
    schema = json.loads((SCHEMAS / f"{command.replace(' ', '.')}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(document)
    return document
