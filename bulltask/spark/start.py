"""A session of Spark with the settings that the pipeline needs, and bulltask's data source in it."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from bulltask.spark.data_source import BulltaskSource

__all__ = ["PUSHDOWN", "current_session", "register", "session"]

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
"""While it is off, which is Spark's default, Spark refuses to read from a source that takes filters."""

_NEEDED: Final[Mapping[str, str]] = {
    PUSHDOWN: "true",
    "spark.sql.session.timeZone": "UTC",
    # The default is readable as naive nanoseconds only, elsewhere.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A batch that is written again replaces itself and nothing else.
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}

_LOCAL: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
}
"""Of a session in this process: no name of this machine is looked up, and small tables stay in few pieces."""


def session(
    app: str = "bulltask",
    master: str | None = None,
    *,
    ui: bool = False,
    shuffle_partitions: int | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with the settings that the pipeline needs and with the source ``bulltask`` in it.

    An existing session is used: Spark has one in a process.

    Args:
        app: its name, in Spark's user interface and logs.
        master: where it runs: ``local[4]``, ``spark://…``; by default what ``spark-submit`` says, else ``local[*]``.
        ui: serve Spark's user interface.
        shuffle_partitions: pieces of a shuffled table; by default 4 in this process, Spark's default on a cluster.
        conf: further settings of Spark; they win.

    Returns:
        The session. ``session().stop()`` ends it.
    """
    # Without it the workers are the `python3` of PATH, which need not have what this process has.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(app)
    if master is not None:
        builder = builder.master(master)
    for name, value in _settings(master, ui, shuffle_partitions, conf).items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def current_session() -> SparkSession:
    """Return the session of a task with ``spark=True``, where a worker runs it.

    Elsewhere, as in a test or a notebook that calls the task itself, it is the session of this process; one is made
    with :func:`session` where there is none.
    """
    if SparkContext._active_spark_context is None:  # noqa: SLF001 - nothing else says whether there is one
        return session()
    return SparkSession.builder.getOrCreate()


def _settings(
    master: str | None, ui: bool, shuffle_partitions: int | None, conf: Mapping[str, str] | None
) -> dict[str, str]:
    settings = dict(_NEEDED)
    if master is not None and master.startswith("local"):
        settings |= _LOCAL
    if shuffle_partitions is not None:
        settings["spark.sql.shuffle.partitions"] = str(shuffle_partitions)
    return settings | {"spark.ui.enabled": str(ui).lower()} | dict(conf or {})


def register(spark: SparkSession, name: str = "bulltask") -> None:
    """Make ``format("bulltask")`` known to a session.

    A read that asks for ``pushdown`` needs the session's leave, which is not given by default: it is given here.

    Args:
        spark: the session.
        name: the format's name, for one that is taken already.
    """
    spark.conf.set(PUSHDOWN, "true")
    spark.dataSource.register(_source(name))


def _source(name: str) -> type[DataSource]:
    if name == BulltaskSource.name():
        return BulltaskSource
    # Spark asks the class for its name. This one is pickled whole, as it is in no module.
    return type("NamedSource", (BulltaskSource,), {"name": classmethod(lambda _: name)})
