"""Intended differences: docs/reference/differences.md explains them, test_table.py asserts each one alone."""

from __future__ import annotations

from typing import Any, Final

from tests.interop.differential.state import State

__all__ = ["EVERYWHERE", "META", "apply"]

EVERYWHERE: Final = ("bulltask",)
"""Stored options of every job of ours."""

META: Final = {"version": "bullmq:5.62.0", "opts.maxLenEvents": "10000"}
"""What Node writes when a ``Queue`` is made, and we with the first job."""


def apply(theirs: State, ours: State) -> None:
    """Take the differences that every queue has out of both states; fail where one is not as the table says."""
    _meta(theirs, ours)
    for key, entry in ours.items():
        opts = _options(entry)
        if opts is None:
            continue
        assert opts.pop("bulltask") == {"v": 1}, key
        assert "bulltask" not in (_options(theirs.get(key, {})) or {})


def _meta(theirs: State, ours: State) -> None:
    """Ours writes them with ``HSETNX``, so a queue that Node has described stays as it is."""
    for state in (theirs, ours):
        found: dict[str, Any] = state.get("meta", {"value": {}})["value"]
        for name, value in META.items():
            assert found.pop(name, value) == value, name
        if not found:
            state.pop("meta", None)


def _options(entry: dict[str, Any]) -> dict[str, Any] | None:
    value = entry.get("value")
    if entry.get("type") != "hash" or not isinstance(value, dict) or not isinstance(value.get("opts"), dict):
        return None
    found: dict[str, Any] = value["opts"]
    return found
