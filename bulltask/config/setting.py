"""A row of the table of settings."""

from __future__ import annotations

from dataclasses import dataclass

from bulltask.config.parsers import Parse

__all__ = ["Setting"]


@dataclass(frozen=True, slots=True)
class Setting:
    """A row of the table: the public name, the field of :class:`Config`, its parser, the default, the help text."""

    name: str
    field: str
    parse: Parse
    default: object
    doc: str
