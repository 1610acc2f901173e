"""The data pipeline on Spark: rows become jobs, and jobs' events become tables.

It requires the ``spark`` extra and Java 17 or newer.

Importing this package does not import Spark: each name is looked up when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bulltask.jobs.errors import SPARK, look_up

if TYPE_CHECKING:
    from bulltask.spark.connector import counts, enqueue_stream, events, jobs, register, session, stream_events
    from bulltask.spark.mapping import map_dataframe
    from bulltask.spark.pipeline import Pipeline
    from bulltask.spark.results import gather
    from bulltask.spark.sink import EnqueueResult, enqueue
    from bulltask.spark.task_session import current_session

__all__ = [
    "EnqueueResult",
    "Pipeline",
    "counts",
    "current_session",
    "enqueue",
    "enqueue_stream",
    "events",
    "gather",
    "jobs",
    "map_dataframe",
    "register",
    "session",
    "stream_events",
]

_MODULES: Final = {
    "EnqueueResult": "bulltask.spark.sink",
    "Pipeline": "bulltask.spark.pipeline",
    "counts": "bulltask.spark.connector",
    "current_session": "bulltask.spark.task_session",
    "enqueue": "bulltask.spark.sink",
    "enqueue_stream": "bulltask.spark.connector",
    "events": "bulltask.spark.connector",
    "gather": "bulltask.spark.results",
    "jobs": "bulltask.spark.connector",
    "map_dataframe": "bulltask.spark.mapping",
    "register": "bulltask.spark.connector",
    "session": "bulltask.spark.connector",
    "stream_events": "bulltask.spark.connector",
}
"""The module of each public name. No submodule may have the same name, because importing it would replace the name."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _MODULES, "spark", SPARK)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
