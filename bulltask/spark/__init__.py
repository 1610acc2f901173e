"""The data pipeline on Spark: jobs in, history out. Needs the extra ``spark`` and Java 17.

Importing this imports nothing of Spark: each name is looked up where it is used first.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bulltask.extras import SPARK, look_up

if TYPE_CHECKING:
    from bulltask.spark.enqueueing_stream import enqueue_stream
    from bulltask.spark.pipeline import Pipeline
    from bulltask.spark.reading import counts, events, jobs, stream_events
    from bulltask.spark.sink.enqueueing import EnqueueReport, enqueue
    from bulltask.spark.sink.gathering import gather
    from bulltask.spark.sink.mapping import map_dataframe
    from bulltask.spark.start import register, session
    from bulltask.spark.tasks.current import current_session

__all__ = [
    "EnqueueReport",
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

_HOME: Final = {
    "EnqueueReport": "bulltask.spark.sink.enqueueing",
    "Pipeline": "bulltask.spark.pipeline",
    "counts": "bulltask.spark.reading",
    "current_session": "bulltask.spark.tasks.current",
    "enqueue": "bulltask.spark.sink.enqueueing",
    "enqueue_stream": "bulltask.spark.enqueueing_stream",
    "events": "bulltask.spark.reading",
    "gather": "bulltask.spark.sink.gathering",
    "jobs": "bulltask.spark.reading",
    "map_dataframe": "bulltask.spark.sink.mapping",
    "register": "bulltask.spark.start",
    "session": "bulltask.spark.start",
    "stream_events": "bulltask.spark.reading",
}
"""Where each public name lives; a module of the same name would take its place as soon as it is imported."""


def __getattr__(name: str) -> Any:
    return look_up(__name__, name, _HOME, "spark", SPARK)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
