"""What all converters have in common."""

from __future__ import annotations

import reprlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, Final

from bulltask.typed.definitions import Definitions, Schema

__all__ = ["ANYTHING", "EXACT", "FIRST", "LAST", "Converter", "Mismatch", "shorten", "shown"]

FIRST, EXACT, CONVERTED, LAST, ANYTHING = range(5)
"""The order in which a value is compared with the members of a union: single values (enum members, literals); JSON's
numbers and booleans; converted types; JSON's strings, arrays and objects, which may also represent converted types;
any value."""

_LONGEST: Final = 60
_LONGEST_TEXT: Final = 500
_MOST_PROBLEMS: Final = 3
_MOST_PARTS: Final = 20

_repr = reprlib.Repr()  # does not read all of a large value
_repr.maxstring = _repr.maxother = _repr.maxlong = 4 * _LONGEST
_repr.maxlist = _repr.maxtuple = _repr.maxset = _repr.maxfrozenset = _repr.maxdict = _repr.maxdeque = 12


class Mismatch(Exception):
    """A value does not match a type.

    Args:
        expected: What was expected, and what was found.
        path: Keys and indexes that lead to the value.
    """

    def __init__(self, expected: str, path: Sequence[str | int] = ()) -> None:
        super().__init__(expected)
        self.problems: list[tuple[tuple[str | int, ...], str]] = [(tuple(path), expected)]

    @classmethod
    def of_several(cls, problems: Sequence[tuple[Sequence[str | int], str]]) -> Mismatch:
        """Return one exception for several problems."""
        mismatch = cls("")
        mismatch.problems = [(tuple(path), text) for path, text in problems]
        return mismatch

    def below(self, part: str | int) -> Mismatch:
        """Return the mismatch with ``part``, a key or index of the surrounding container, before its path."""
        return Mismatch.of_several([((part, *path), text) for path, text in self.problems])

    def __str__(self) -> str:
        more = len(self.problems) - _MOST_PROBLEMS
        problems = ((path, shorten(text, _LONGEST_TEXT)) for path, text in self.problems[:_MOST_PROBLEMS])
        texts = [f"{_path_text(path)}: {text}" if path else text for path, text in problems]
        return "; ".join(texts) + (f"; and {more} more" if more > 0 else "")


def _path_text(path: Sequence[str | int]) -> str:
    short = [part if isinstance(part, int) else shorten(part, _LONGEST) for part in path[:_MOST_PARTS]]
    parts = [f".{part}" if isinstance(part, str) and part.isidentifier() else f"[{part!r}]" for part in short]
    return "".join(parts).removeprefix(".") + ("…" if len(path) > _MOST_PARTS else "")


def shown(value: object) -> str:
    """Return a short representation of a value, for a message."""
    try:
        text = _repr.repr(value)
    except ValueError:  # an integer of more than 4,300 digits
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}… ({type(value).__name__})"


def shorten(text: str, chars: int) -> str:
    """Return at most ``chars`` characters of a text."""
    return text if len(text) <= chars else f"{text[: chars - 1]}…"


class Converter(ABC):
    """Converts the values of one type.

    Attributes:
        name: The type's name in messages.
        plain: JSON has this type, so that there is nothing to convert, only to check.
        rank: The place of the type in a union.
    """

    name: str
    plain: bool = False
    rank: int = CONVERTED

    @abstractmethod
    def decode(self, value: Any) -> Any:
        """Return the Python value for a JSON value.

        Raises:
            Mismatch: The value does not match the type.
        """

    @abstractmethod
    def encode(self, value: Any) -> Any:
        """Return the JSON value for a Python value. A value that is already in its JSON form is only checked.

        Raises:
            Mismatch: The value does not match the type.
        """

    @abstractmethod
    def schema(self, definitions: Definitions) -> Schema:
        """Return the JSON Schema of the JSON form."""

    def mismatch(self, value: object) -> Mismatch:
        """Return the exception for a value of another type."""
        return Mismatch(f"expected {self.name}, not {shown(value)}")
