"""The tables that the data pipeline writes, without Spark: their layout, and :class:`History`, which reads them.

``History`` needs the extra ``history``. Importing this imports nothing of Arrow: a name is looked up where it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bulltask.extras import look_up

if TYPE_CHECKING:
    from bulltask.lake.history import History
    from bulltask.lake.measures import JobCount, LatencyPoint, RatePoint
    from bulltask.lake.past import JobHistory, JobPage, PastAttempt, PastEvent, PastJob, PastSnapshot

__all__ = [
    "History",
    "JobCount",
    "JobHistory",
    "JobPage",
    "LatencyPoint",
    "PastAttempt",
    "PastEvent",
    "PastJob",
    "PastSnapshot",
    "RatePoint",
]

_HOME: Final = {
    "History": "bulltask.lake.history",
    "JobCount": "bulltask.lake.measures",
    "JobHistory": "bulltask.lake.past",
    "JobPage": "bulltask.lake.past",
    "LatencyPoint": "bulltask.lake.measures",
    "PastAttempt": "bulltask.lake.past",
    "PastEvent": "bulltask.lake.past",
    "PastJob": "bulltask.lake.past",
    "PastSnapshot": "bulltask.lake.past",
    "RatePoint": "bulltask.lake.measures",
}
"""Where each public name lives."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _HOME, "history", {"pyarrow"})


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
