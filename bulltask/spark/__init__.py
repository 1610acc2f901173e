"""The data pipeline on Spark: rows become jobs, and jobs' events become tables.

It requires the ``spark`` extra and Java 17 or newer.

Importing this package does not import Spark: each name is looked up when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bulltask.jobs.errors import SPARK, look_up

if TYPE_CHECKING:
    from bulltask.spark.connector.enqueue_stream import enqueue_stream
    from bulltask.spark.connector.read import counts, events, jobs, stream_events
    from bulltask.spark.connector.session import register, session
    from bulltask.spark.pipeline import Pipeline
    from bulltask.spark.sink.enqueue import EnqueueResult, enqueue
    from bulltask.spark.sink.mapping import map_dataframe
    from bulltask.spark.sink.results import gather
    from bulltask.spark.tasks.current_session import current_session

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
    "EnqueueResult": "bulltask.spark.sink.enqueue",
    "Pipeline": "bulltask.spark.pipeline",
    "counts": "bulltask.spark.connector.read",
    "current_session": "bulltask.spark.tasks.current_session",
    "enqueue": "bulltask.spark.sink.enqueue",
    "enqueue_stream": "bulltask.spark.connector.enqueue_stream",
    "events": "bulltask.spark.connector.read",
    "gather": "bulltask.spark.sink.results",
    "jobs": "bulltask.spark.connector.read",
    "map_dataframe": "bulltask.spark.sink.mapping",
    "register": "bulltask.spark.connector.session",
    "session": "bulltask.spark.connector.session",
    "stream_events": "bulltask.spark.connector.read",
}
"""The module of each public name. No submodule may have the same name, because importing it would replace the name."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _MODULES, "spark", SPARK)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
