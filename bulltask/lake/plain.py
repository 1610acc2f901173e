"""What the history answers, as values of JSON: times as ISO 8601 in UTC, lengths of time in seconds."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from datetime import date
from typing import Any

from bulltask.lake.past import PastSnapshot

__all__ = ["plain"]


def plain(value: Any) -> Any:
    """Return an answer of :class:`bulltask.lake.history.History` as dictionaries, lists, texts and numbers."""
    if isinstance(value, PastSnapshot):
        return _snapshot(value)
    if is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, dict):
        return {_key(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    return value.isoformat() if isinstance(value, date) else value


def _key(key: Any) -> str:
    """A key as JSON has it; the percentile 50.0 is the percentile 50."""
    return str(int(key)) if isinstance(key, float) and key.is_integer() else str(key)


def _snapshot(snapshot: PastSnapshot) -> dict[str, Any]:
    """A snapshot with what its JSON texts say; the data is a text where it is no JSON."""
    names = (field.name for field in fields(snapshot) if not field.name.endswith("_text"))
    return {
        **{name: plain(getattr(snapshot, name)) for name in names},
        "data": snapshot.data_text if snapshot.data is None else snapshot.data,
        "opts": snapshot.opts,
        "returnvalue": snapshot.returnvalue,
        "stacktrace": list(snapshot.stacktrace),
    }
