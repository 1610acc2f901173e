"""The lake that the data pipeline writes, without Spark: its tables and layout, and :class:`History`, which reads it.

``History`` requires the ``history`` extra. Importing this package does not import Arrow: names are loaded on first use.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bulltask.jobs.errors import look_up

if TYPE_CHECKING:
    from bulltask.lake.history import AttemptCount, History, JobCount, LatencyPoint
    from bulltask.lake.records import AttemptRecord, EventRecord, JobHistory, JobPage, JobRecord, SnapshotRecord

__all__ = [
    "AttemptCount",
    "AttemptRecord",
    "EventRecord",
    "History",
    "JobCount",
    "JobHistory",
    "JobPage",
    "JobRecord",
    "LatencyPoint",
    "SnapshotRecord",
]

_MODULES: Final = {
    **dict.fromkeys(__all__, "bulltask.lake.records"),
    **dict.fromkeys(("AttemptCount", "History", "JobCount", "LatencyPoint"), "bulltask.lake.history"),
}
"""The module of each public name."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _MODULES, "history", {"deltalake", "pyarrow"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
