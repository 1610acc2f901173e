"""Spark sessions with the settings that the pipeline needs, and with bulltask's data source."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Final

from pyspark.sql import SparkSession, is_remote
from pyspark.sql.datasource import DataSource

import bulltask
from bulltask.jobs.errors import MissingExtraError
from bulltask.spark.connector.data_source import BulltaskSource

__all__ = ["PUSHDOWN", "register", "session"]

PUSHDOWN: Final = "spark.sql.python.filterPushdown.enabled"
"""While this setting is off (Spark's default), Spark rejects reads from a source that accepts filters."""

_REQUIRED_CONF: Final[Mapping[str, str]] = {
    PUSHDOWN: "true",
    "spark.sql.session.timeZone": "UTC",
    # Other programs read Spark's default timestamp type as nanoseconds without a time zone.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    # A batch that is written again must replace only its own partitions.
    "spark.sql.sources.partitionOverwriteMode": "dynamic",
}

_LOCAL_CONF: Final[Mapping[str, str]] = {
    "spark.driver.host": "127.0.0.1",
    "spark.sql.shuffle.partitions": "4",
}
"""Settings for a session in this process: no lookup of this machine's name, and few partitions for small tables."""


def session(
    app: str = "bulltask",
    master: str | None = None,
    *,
    ui: bool = False,
    shuffle_partitions: int | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Return a session with the settings that the pipeline needs, and with the data source ``bulltask``.

    If the process already has a session, it is used, because Spark has one session per process.

    Args:
        app: The application's name in the Spark UI and in logs.
        master: Spark's master: ``local[4]``, ``spark://…``, or ``sc://…`` for a Spark Connect server; default: the
            master given to ``spark-submit`` or in the environment variable ``SPARK_REMOTE``, else ``local[*]``.
        ui: Whether to serve the Spark UI; ignored with Spark Connect.
        shuffle_partitions: The partitions of a shuffled table; default: 4 with a local master, else Spark's default.
        conf: Further Spark settings, which override the settings above. With Spark Connect, only settings that a
            session may set.

    Returns:
        The session. ``session().stop()`` stops it.

    Raises:
        MissingExtraError: A package that Spark Connect needs is not installed.
    """
    # Otherwise Spark's Python workers use the `python3` on the PATH, which may lack packages that this process has.
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
    except ImportError as exc:  # only the Connect client checks for packages; the error names the first
        raise MissingExtraError(f"Spark Connect: pip install 'pyspark[connect]' 'pandas<3' ({exc})") from exc
    register(spark)
    return spark


def _remote_server(master: str | None) -> str | None:
    """Return the address of the Spark Connect server; ``None`` without Spark Connect."""
    address = os.environ.get("SPARK_REMOTE", "") if master is None else master
    return address if address.startswith("sc://") else None


def _settings(master: str | None, shuffle_partitions: int | None) -> dict[str, str]:
    settings = dict(_REQUIRED_CONF)
    if master is not None and master.startswith("local"):
        settings |= _LOCAL_CONF
    if shuffle_partitions is not None:
        settings["spark.sql.shuffle.partitions"] = str(shuffle_partitions)
    return settings


def register(spark: SparkSession, name: str = "bulltask") -> None:
    """Register ``format("bulltask")`` with a session.

    A read with ``pushdown`` needs a setting of the session that is off by default; this function turns it on.

    Args:
        spark: The session.
        name: The format's name.
    """
    spark.conf.set(PUSHDOWN, "true")
    archive = getattr(bulltask.__loader__, "archive", None)
    if archive is not None and not is_remote():
        _add_to_pythonpath(archive, spark)
    spark.dataSource.register(_source(name))


def _add_to_pythonpath(archive: str, spark: SparkSession) -> None:
    """Add bulltask's zip archive (``--py-files``) to the module path of all of Spark's Python processes.

    Spark adds such files to the path of executors and of this process, but not of the process that plans a
    streaming query.
    """
    environment = spark.sparkContext.environment
    paths = [path for path in environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    if archive not in paths:
        environment["PYTHONPATH"] = os.pathsep.join([*paths, archive])


def _source(name: str) -> type[DataSource]:
    if name == BulltaskSource.name():
        return BulltaskSource
    # Spark calls the class method `name`. The class is pickled by value, because it is not in a module.
    return type("NamedSource", (BulltaskSource,), {"name": classmethod(lambda _: name)})
