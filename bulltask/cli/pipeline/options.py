"""The options that commands of the pipeline share, and what comes of them."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any, Final, TypeVar

import click

from bulltask import embedded
from bulltask.cli.loading import app_options, load_app
from bulltask.config.config import Conf
from bulltask.config.urls import SecretUrl
from bulltask.errors import ConfigError, MissingExtraError
from bulltask.lake.layout import check_local

__all__ = [
    "EXIT_LOST",
    "EXIT_LOST_FAIL",
    "LakeDirectory",
    "Source",
    "day",
    "days",
    "moment",
    "open_session",
    "redis_options",
    "root_option",
    "seconds",
    "source_of",
    "source_options",
    "spark_options",
]

F = TypeVar("F", bound=Callable[..., Any])

EXIT_LOST: Final = 3
"""Events were lost, and that is recorded."""

EXIT_LOST_FAIL: Final = 4
"""Events were lost, and the user wanted no less than all."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where the queues are: what was given, else what bulltask's settings say.

    Attributes:
        queues: names with commas between them, as the user spells them, or ``*``.
        url: of Redis.
        prefix: of its keys.
        hash_tag: ``emails`` is BullMQ's ``{emails}``.
    """

    queues: str
    url: SecretUrl
    prefix: str
    hash_tag: bool

    @property
    def texts(self) -> dict[str, str]:
        """The same as options of ``format("bulltask")``."""
        tag = str(self.hash_tag).lower()
        return {"queue": self.queues, "url": self.url.get_secret_value(), "prefix": self.prefix, "queueHashTag": tag}


_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


def day(text: str) -> date:
    """Read ``2026-11-22``; a type of options."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no day; one looks like 2026-11-22") from None


def days(text: str) -> list[date]:
    """Read ``2026-11-20..2026-11-22``, or one day; a type of options."""
    first, _, last = text.partition("..")
    begin, end = day(first), day(last or first)
    if end < begin:
        raise click.BadParameter(f"{text!r} ends before it begins")
    return [begin + timedelta(count) for count in range((end - begin).days + 1)]


def moment(text: str) -> datetime:
    """Read ``2026-11-22`` or ``2026-11-22T14:00``, which is UTC unless it says otherwise; a type of options."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"{text!r} is no time; one looks like 2026-11-22 or 2026-11-22T14:00") from None
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def seconds(text: str) -> float:
    """Read ``90``, ``10s``, ``15m``, ``12h`` or ``7d``; a type of options."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS_S else (text, "s")
    try:
        length = float(number) * _UNITS_S[unit]
    except ValueError:
        length = -1.0
    if not 0 <= length < float("inf"):
        raise click.BadParameter(f"{text!r} is no length of time; one looks like 90, 10s, 15m, 12h or 7d")
    return length


class LakeDirectory(click.Path):
    """The type of an option that names a lake: a directory, no URL."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Return the directory."""
        try:
            check_local(value)
        except ConfigError as exc:
            self.fail(str(exc), param, ctx)
        return super().convert(value, param, ctx)


def root_option(function: F) -> F:
    """Give a command ``--root``, which its parameter ``root`` gets."""
    return click.option(
        "--root",
        required=True,
        envvar="BULLTASK_LAKE",
        type=LakeDirectory(file_okay=False, resolve_path=True, path_type=Path),
        help="Directory of the tables; else BULLTASK_LAKE.",
    )(function)


def redis_options(function: F) -> F:
    """Give a command ``-A``, ``-b`` and how keys are spelled; :func:`source_of` takes them."""
    tag = click.option(
        "--queue-hash-tag/--no-queue-hash-tag", "hash_tag", default=None, help="Whether queue 'emails' is '{emails}'."
    )
    return app_options(tag(click.option("--prefix", help="First part of all keys (bull).")(function)))


def source_options(function: F) -> F:
    """Give a command the options of :func:`redis_options`, and ``--queues``."""
    queues = click.option(
        "--queues", default="*", show_default=True, help="Names of queues, comma-separated, or * for all."
    )
    return redis_options(queues(function))


def source_of(ctx: click.Context, given: Mapping[str, Any]) -> Source:
    """Return where the queues are, from what a command with these options was given."""
    around: dict[str, Any] = ctx.obj or {}
    url = given["broker"] or around.get("broker")
    app = load_app(ctx, given["app"], url)[1] if given["app"] or around.get("app") else None
    conf = app.conf if app else Conf({})
    if url is not None and app is None:
        conf.override("broker_url", url)
    config = conf.freeze()
    return Source(
        given.get("queues", "*"),
        embedded.resolve_url(config.broker_url),
        given["prefix"] or config.prefix,
        config.queue_hash_tag if given["hash_tag"] is None else given["hash_tag"],
    )


def spark_options(function: F) -> F:
    """Give a command the options of its Spark session; :func:`open_session` takes them."""
    function = click.option("--conf", multiple=True, metavar="NAME=VALUE", help="A setting of Spark; may be repeated.")(
        function
    )
    return click.option(
        "--master", help="Spark's master, or sc://… for Spark Connect; default: what spark-submit says, else local[*]."
    )(function)


def open_session(master: str | None, conf: tuple[str, ...]) -> Any:
    """Return this process' ``pyspark.sql.SparkSession``: the one that ``spark-submit`` began, or a new one.

    Raises:
        click.UsageError: a setting is no ``NAME=VALUE``.
        MissingExtraError: Spark or Java is not installed.
    """
    for text in conf:
        if "=" not in text:
            raise click.UsageError(f"--conf {text!r} must be NAME=VALUE")
    from bulltask.spark import session  # noqa: PLC0415 - slow

    given = any(name in os.environ for name in ("PYSPARK_GATEWAY_PORT", "SPARK_REMOTE"))
    remote = (master or os.environ.get("SPARK_REMOTE", "")).startswith("sc://")
    if not given and not remote and shutil.which("java") is None and "JAVA_HOME" not in os.environ:
        raise MissingExtraError("Spark needs Java 17 or newer: install a JRE, or set JAVA_HOME where one is")
    # Its bar would run into the lines that commands write.
    settings = {} if remote else {"spark.ui.showConsoleProgress": "false"}
    settings |= {name.strip(): value for name, _, value in (text.partition("=") for text in conf)}
    return session("bulltask pipeline", master or (None if given else "local[*]"), conf=settings)
