"""Intended differences: docs/reference/differences.md explains them, test_table.py asserts each one separately."""

from __future__ import annotations

from typing import Any, Final

from tests.interop.differential.state import State

__all__ = ["EVERYWHERE", "META", "apply"]

EVERYWHERE: Final = ("bulltask",)
"""The options that bulltask stores in every job."""

META: Final = {"version": "bullmq:5.62.0", "opts.maxLenEvents": "10000"}
"""The metadata that Node writes with each new ``Queue``, and bulltask with the first job."""


def apply(node_state: State, bulltask_state: State) -> None:
    """Remove the differences that every queue has from both states; fail if one differs from the table."""
    _meta(node_state, bulltask_state)
    for key, entry in bulltask_state.items():
        opts = _options(entry)
        if opts is None:
            continue
        assert opts.pop("bulltask") == {"v": 1}, key
        assert "bulltask" not in (_options(node_state.get(key, {})) or {})


def _meta(node_state: State, bulltask_state: State) -> None:
    """bulltask writes the metadata with ``HSETNX``, so it does not change what Node has written."""
    for state in (node_state, bulltask_state):
        metadata: dict[str, Any] = state.get("meta", {"value": {}})["value"]
        for name, value in META.items():
            assert metadata.pop(name, value) == value, name
        if not metadata:
            state.pop("meta", None)


def _options(entry: dict[str, Any]) -> dict[str, Any] | None:
    value = entry.get("value")
    if entry.get("type") != "hash" or not isinstance(value, dict) or not isinstance(value.get("opts"), dict):
        return None
    opts: dict[str, Any] = value["opts"]
    return opts
