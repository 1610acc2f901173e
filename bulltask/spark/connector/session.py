"""A Spark session with the settings that the pipeline needs, and with bulltask's data source."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from pyspark.sql import SparkSession, is_remote
from pyspark.sql.datasource import DataSource

import bulltask
from bulltask.errors import MissingExtraError
from bulltask.spark.connector.data_source import BulltaskSource

__all__ = ["PUSHDOWN", "register", "session"]

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
"""While this is off, which is Spark's default, Spark refuses to read from a source that accepts filters."""

_NEEDED: Final[Mapping[str, str]] = {
    PUSHDOWN: "true",
    "spark.sql.session.timeZone": "UTC",
    # Other programs read Spark's default type only as nanoseconds without a time zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A batch that is written again must replace only itself.
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}

_LOCAL: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
}
"""Settings of a session in this process: no look-up of this machine's name, and few partitions for small tables."""


def session(
    app: str = "bulltask",
    master: str | None = None,
    *,
    ui: bool = False,
    shuffle_partitions: int | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with the settings that the pipeline needs and with the source ``bulltask``.

    An existing session is used, because Spark has one in each process.

    Args:
        app: Its name, in Spark's user interface and logs.
        master: Where it runs: ``local[4]``, ``spark://…``, or ``sc://…`` for a Spark Connect server; by default what
            ``spark-submit`` or the environment's ``SPARK_REMOTE`` says, else ``local[*]``.
        ui: Serve Spark's user interface; with Spark Connect, the server decides.
        shuffle_partitions: Partitions of a shuffled table; by default 4 in this process, Spark's default on a cluster.
        conf: Further settings of Spark, which override the others. With Spark Connect only those that a session may
            set.

    Returns:
        The session. ``session().stop()`` ends it.

    Raises:
        MissingExtraError: A package that Spark Connect needs is not installed.
    """
    # Without it Spark's Python workers are the `python3` of PATH, which may lack packages that this process has.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    server = _remote_server(master)
    builder = SparkSession.builder.appName(app)
    if server is not None:
        builder = builder.remote(server)
    elif master is not None:
        builder = builder.master(master)
    settings = _settings(master, shuffle_partitions) | ({} if server else {"spark.ui.enabled": str(ui).lower()})
    for name, value in (settings | dict(conf or {})).items():
        builder = builder.config(name, value)
    try:
        spark = builder.getOrCreate()
    except ImportError as exc:  # only the Connect client checks for packages; it names the first
        raise MissingExtraError(f"Spark Connect: pip install 'pyspark[connect]' 'pandas<3' ({exc})") from exc
    register(spark)
    return spark


def _remote_server(master: str | None) -> str | None:
    """Return the address of the Spark Connect server, if one is to be used."""
    said = os.environ.get("SPARK_REMOTE", "") if master is None else master
    return said if said.startswith("sc://") else None


def _settings(master: str | None, shuffle_partitions: int | None) -> dict[str, str]:
    settings = dict(_NEEDED)
    if master is not None and master.startswith("local"):
        settings |= _LOCAL
    if shuffle_partitions is not None:
        settings["spark.sql.shuffle.partitions"] = str(shuffle_partitions)
    return settings


def register(spark: SparkSession, name: str = "bulltask") -> None:
    """Register ``format("bulltask")`` with a session.

    A read with ``pushdown`` needs a setting of the session that is off by default; it is turned on here.

    Args:
        spark: The session.
        name: The format's name, if another one is needed.
    """
    spark.conf.set(PUSHDOWN, "true")
    archive = getattr(bulltask.__loader__, "archive", None)
    if archive is not None and not is_remote():
        _find_in(archive, spark)
    spark.dataSource.register(_source(name))


def _find_in(archive: str, spark: SparkSession) -> None:
    """Make all of Spark's Python processes find bulltask where this one has it, in a zip archive (``--py-files``).

    Spark adds such files to the path of executors and of this process, but not of the process that plans a stream.
    """
    environment = spark.sparkContext.environment
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if archive not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([*paths, archive])


def _source(name: str) -> type[DataSource]:
    if name == BulltaskSource.name():
        return BulltaskSource
    # Spark asks the class for its name. This one is pickled by value, because it is not in a module.
    return type("NamedSource", (BulltaskSource,), {"name": classmethod(lambda _: name)})
