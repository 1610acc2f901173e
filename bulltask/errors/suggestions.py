"""Suggestions for misspelled names in error messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

__all__ = ["did_you_mean", "nearest"]


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a suffix for an error message that suggests the closest of the ``known`` names, or ``""``."""
    match = nearest(name, known)
    return f"; did you mean {match!r}?" if match else ""


def nearest(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return the closest of the ``known`` names, ``""`` if the similarity of all is below ``cutoff`` (0 to 1)."""
    return next(iter(difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)), "")
