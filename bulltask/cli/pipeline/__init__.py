"""``bulltask pipeline``: record the events of queues in a lake of tables, with Spark.

The commands that connect to Redis are in :mod:`bulltask.cli.pipeline.queues`, those that need only the lake in
:mod:`bulltask.cli.pipeline.tables`. They import Spark and Arrow only when they run, so ``--help`` works without them.
Here are the options that several of them have: where the queues are, and the Spark session.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import click

from bulltask import embedded
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.groups import LazyGroup
from bulltask.cli.options import redis_options
from bulltask.config.config import Config
from bulltask.config.parsers import parse_names
from bulltask.jobs.errors import MissingExtraError

F = TypeVar("F", bound=Callable[..., Any])

EXIT_LOST: Final = 3
"""Events were lost, and the loss was recorded."""

EXIT_LOST_FAIL: Final = 4
"""Events were lost, and ``--on-loss`` is ``fail``."""

COMMANDS: Final = {
    "backfill": "bulltask.cli.pipeline.queues:backfill_command",
    "build": "bulltask.cli.pipeline.tables:build_command",
    "doctor": "bulltask.cli.pipeline.queues:doctor_command",
    "enqueue": "bulltask.cli.pipeline.queues:enqueue_command",
    "forget": "bulltask.cli.pipeline.tables:forget_command",
    "gaps": "bulltask.cli.pipeline.tables:gaps_command",
    "gather": "bulltask.cli.pipeline.queues:gather_command",
    "maintain": "bulltask.cli.pipeline.tables:maintain_command",
    "migrate-lake": "bulltask.cli.pipeline.tables:migrate_command",
    "replay": "bulltask.cli.pipeline.queues:replay_command",
    "report": "bulltask.cli.pipeline.tables:report_command",
    "run": "bulltask.cli.pipeline.queues:run_command",
    "snapshot": "bulltask.cli.pipeline.queues:snapshot_command",
    "status": "bulltask.cli.pipeline.queues:status_command",
}


@click.group(
    "pipeline", short_help="Record the events of queues in a lake, with Spark.", cls=LazyGroup, places=COMMANDS
)
def pipeline() -> None:
    """Record the events and jobs of queues in a lake: a directory or bucket of Delta tables.

    The bronze tables contain the raw events, silver contains jobs and attempts, gold contains statistics by minute and
    day.

    Requires the spark extra (pip install 'bulltask[spark]') and Java 17 or newer, unless a command says otherwise.

    Formats: DAY is 2026-11-22, TIME is 2026-11-22 or 2026-11-22T14:00, both in UTC. DURATION is 90 (seconds), 10s, 15m,
    12h or 7d.

    Exit codes of all commands: 0 (success), 1 (an error, or a failed check), 2 (invalid usage), 3 (events were lost,
    and the loss is recorded), 4 (events were lost, and --on-loss is fail).
    """


@dataclass(frozen=True, slots=True)
class QueueSource:
    """Queues (comma-separated names in the app, or ``*``), and the settings with their location."""

    queues: str
    config: Config
    broker: str = ""

    @property
    def options(self) -> dict[str, str]:
        """The options of ``format("bulltask")``."""
        from bulltask.spark.source.options import broker_options  # noqa: PLC0415 - slow

        return broker_options({**self.keywords, "broker": self.broker}, self.queues)

    @property
    def keywords(self) -> dict[str, Any]:
        """The server and the form of its keys, for the functions of :mod:`bulltask.spark`."""
        config = self.config
        return {"url": config.broker_url, "prefix": config.prefix, "queue_hash_tag": config.queue_hash_tag}


def source_options(function: F) -> F:
    """Add the options of :func:`bulltask.cli.options.redis_options` and ``--queues``."""
    queues = click.option(
        "--queues", default="*", show_default=True, help="Names of queues, comma-separated, or * for all."
    )
    return redis_options(queues(function))


def source_of(options: Mapping[str, Any]) -> QueueSource:
    """Return the location of the queues from the values of :func:`source_options` or ``redis_options``."""
    app = load_app_or_broker(click.get_current_context(), options)
    config = app.conf.freeze()
    url = embedded.resolve_url(config.broker_url, app._directory)
    return QueueSource(options.get("queues", "*"), replace(config, broker_url=url))


def brokers_option(function: F) -> F:
    """Add ``--brokers``; :func:`sources_of` reads it."""
    return click.option(
        "--brokers",
        envvar="BULLTASK_BROKERS",
        metavar="NAMES",
        help="Names of brokers, comma-separated, in a lake of several: the queue mail of the broker eu, whose URL is "
        "BULLTASK_EU_BROKER_URL, is eu:mail in the lake (or set BULLTASK_BROKERS).",
    )(function)


def sources_of(options: Mapping[str, Any]) -> list[QueueSource]:
    """Return the location of the queues of each broker in ``--brokers``; without it, as :func:`source_of` does."""
    if not (names := parse_names(options["brokers"] or "", "--brokers")):
        return [source_of(options)]
    before: dict[str, Any] = click.get_current_context().obj or {}
    if any(given.get(name) for given in (options, before) for name in ("app", "broker")):
        raise click.UsageError("--brokers cannot be used with --broker or --app: their URLs are environment variables")
    from bulltask.spark.source.options import config_of  # noqa: PLC0415 - slow

    given = {"prefix": options["prefix"], "queue_hash_tag": options["hash_tag"]}
    queues = options.get("queues", "*")
    return [QueueSource(queues, config_of({**given, "broker": name}), name) for name in names]


def spark_options(function: F) -> F:
    """Add the options of :func:`open_session`."""
    function = click.option(
        "--conf", multiple=True, metavar="NAME=VALUE", help="Spark configuration property; may be repeated."
    )(function)
    return click.option(
        "--master",
        help="Spark master URL, or sc://HOST:PORT for Spark Connect (default: spark-submit's, else local[*]).",
    )(function)


QUICK_DRIVER: Final = {"spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"}
"""For a JVM that only plans batches: optimizing its code takes as long as all of its work in the first minutes, and G1
marks the small heap in each batch."""


def open_session(options: Mapping[str, Any], defaults: Mapping[str, str] | None = None) -> Any:
    """Return this process' ``pyspark.sql.SparkSession``: the session of ``spark-submit``, or a new session.

    Args:
        options: The values of :func:`spark_options`.
        defaults: Settings of a session that starts its own JVM; ``--conf`` may override them.

    Raises:
        MissingExtraError: Spark or Java is not installed.
    """
    master, conf = options["master"], options["conf"]
    for text in conf:
        if "=" not in text:
            raise click.UsageError(f"--conf {text!r} must be NAME=VALUE")
    from bulltask.spark import session  # noqa: PLC0415 - slow

    submitted = any(name in os.environ for name in ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"))
    remote = (master or os.environ.get("SPARK_REMOTE", "")).startswith("sc://")
    starts_jvm = not submitted and not remote
    if starts_jvm and shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise MissingExtraError("Spark needs Java 17 or newer: install a JRE, or set JAVA_HOME to one")
    # Spark's progress bar would mix with the lines that commands print.
    settings = {} if remote else {"spark.ui.showConsoleProgress": "false"}
    settings |= (defaults or {}) if starts_jvm else {}
    settings |= {name.strip(): value for name, _, value in (text.partition("=") for text in conf)}
    spark = session("bulltask pipeline", master or (None if submitted else "local[*]"), conf=settings)
    from bulltask.spark.sink import described  # noqa: PLC0415 - slow

    command = click.get_current_context()
    command.with_resource(described(spark, command.command_path))
    return spark
