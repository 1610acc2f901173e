"""A task's session. Modules with tasks import this module, so it does not import Spark."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from bulltask.jobs.errors import SPARK, look_up

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


def current_session() -> SparkSession:
    """Return the session of the running task, which has ``spark=True`` and runs in a worker.

    Outside a worker, as in a test or a notebook that calls the task directly, return the session of this process;
    :func:`bulltask.spark.session` creates a session if there is none.

    Raises:
        MissingExtraError: The extra ``spark`` is not installed.
    """
    home = {"session": "bulltask.spark.connector"}
    session: Callable[[], SparkSession] = look_up("bulltask.spark", "session", home, "spark", SPARK)
    from pyspark.errors import PySparkRuntimeError  # noqa: PLC0415 - as above
    from pyspark.sql import SparkSession, is_remote  # noqa: PLC0415

    if is_remote():
        try:
            return SparkSession.active()
        except PySparkRuntimeError:  # there is no session
            return session()
    from pyspark import SparkContext  # noqa: PLC0415 - missing in Connect's client package

    if SparkContext._active_spark_context is None:  # noqa: SLF001 - no public API returns it
        return session()
    return SparkSession.builder.getOrCreate()
