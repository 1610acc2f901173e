"""Options of several commands, and the types of their values."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, date, datetime, timedelta
from enum import IntEnum
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar, cast

import click

from bulltask.config.settings import CONFIG_VARIABLE
from bulltask.config.urls import SecretUrl
from bulltask.jobs.errors import ConfigError, MissingExtraError

__all__ = [
    "ExitCode",
    "app_options",
    "broker_option",
    "config_option",
    "confirmation_options",
    "day",
    "days",
    "duration_option",
    "job_queue_option",
    "json_argument",
    "json_option",
    "lake_option",
    "moment",
    "operator_options",
    "queue_option",
    "queues_option",
    "redis_options",
    "seconds",
    "time_or_age",
]

F = TypeVar("F", bound=Callable[..., Any])

if TYPE_CHECKING:
    _ParamType = click.ParamType[Any]
else:
    _ParamType = click.ParamType

_UNITS_S: Final = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}


_SECRET_WORDS: Final = ("SECRET", "KEY", "TOKEN", "PASSWORD", "CREDENTIAL", "SAS")


class ExitCode(IntEnum):
    """Exit codes of the commands. (``bulltask worker`` and ``bulltask pipeline`` have further ones.)"""

    DONE = 0
    """Done; what was asked for exists."""
    ERROR = 1
    """An error, such as an unreachable server."""
    USAGE = 2
    """An invalid argument, or an unknown command or option."""
    PENDING = 3
    """Done in part: a job is still running, or something is still waiting."""
    NOT_FOUND = 4
    """A job, queue or schedule does not exist."""
    NO_ANSWER = 69
    """No worker answered."""


class _BrokerUrl(_ParamType):
    """A URL that hides its password, so that an error report (Sentry) with click's context does not show it."""

    name = "URL"

    def convert(self, value: str | SecretUrl, _param: click.Parameter | None, _ctx: click.Context | None) -> SecretUrl:
        return SecretUrl(value)


class _StorageOption(_ParamType):
    """``KEY=VALUE``. A secret is rejected, because every user of the machine sees the arguments of processes."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, str]:
        if isinstance(value, tuple):
            return value
        key, separator, text = value.partition("=")
        if not separator or not key:
            self.fail("write it like AWS_ENDPOINT_URL=http://localhost:9000", param, ctx)
        if any(word in key.upper() for word in _SECRET_WORDS):
            self.fail(
                f"{key} may be a secret, and every user of this machine can see the arguments of processes: set it as "
                "an environment variable",
                param,
                ctx,
            )
        return key, text


def broker_option(function: F) -> F:
    """Add ``-b``."""
    return click.option(
        "-b",
        "--broker",
        type=_BrokerUrl(),
        help="Redis URL; overrides the app's. Other users of this machine can see it (ps), so do not pass a "
        "password: set BULLTASK_BROKER_URL, or BULLTASK_BROKER_URL_FILE to the path of a file with the URL.",
    )(function)


def config_option(function: F) -> F:
    """Add ``--config``, which sets the environment variable of the same meaning: child processes inherit it."""

    def set_variable(_ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
        if value:
            # Absolute, because the path is relative to the user's directory, and --workdir changes to another one.
            os.environ[CONFIG_VARIABLE] = str(Path(value).resolve()) if value.endswith(".toml") else value

    return click.option(
        "--config",
        metavar="FILE|MODULE",
        expose_value=False,
        callback=set_variable,
        help="TOML file (*.toml) or Python module with settings that override the app's (or set BULLTASK_CONFIG).",
    )(function)


def app_options(function: F) -> F:
    """Add ``-A``, ``-b`` and ``--config``, which may also be given before the command."""
    app = click.option("-A", "--app", help="The app: pkg.mod:name, pkg.mod or pkg (or set BULLTASK_APP).")
    return app(broker_option(config_option(function)))


def redis_options(function: F) -> F:
    """Add ``-A``, ``-b`` and the options that determine the form of Redis keys.

    :func:`bulltask.cli.app_loader.load_app_or_broker` and :func:`bulltask.cli.pipeline.source_of` read them.
    """
    tag = click.option(
        "--queue-hash-tag/--no-queue-hash-tag",
        "hash_tag",
        default=None,
        help="Store queue 'emails' as BullMQ's '{emails}' (default: the app's setting, or on).",
    )
    return app_options(
        tag(click.option("--prefix", help="Prefix of all Redis keys (default: the app's setting, or bull).")(function))
    )


def duration_option(*names: str, text: str, default: str | None = None, show_default: bool = True) -> Callable[[F], F]:
    """Add an option with a duration; its argument is ``None``, or seconds."""
    return click.option(*names, type=seconds, default=default, show_default=show_default, metavar="DURATION", help=text)


def json_argument(text: str | None, option: str, default: Any) -> Any:
    """Parse an option's JSON; a ``UsageError`` says what is wrong."""
    if text is None:
        return default
    try:
        return json.loads(text)
    except ValueError as exc:
        raise click.UsageError(f"{option} is not JSON: {exc}") from exc


def json_option(function: F) -> F:
    """Add ``--json``, the argument ``as_json``; :func:`bulltask.cli.terminal.print_json` prints the document."""
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")(function)


def operator_options(function: Callable[..., None]) -> Callable[..., None]:
    """Pass the context, and add ``--json`` and ``redis_options``: the last decorator, so its options come last."""
    return json_option(redis_options(click.pass_context(function)))


def queue_option(text: str) -> Callable[[F], F]:
    """Add ``-Q``, the name of a queue."""
    return click.option("-Q", "--queue", help=text)


job_queue_option: Final = queue_option("The job's queue; required if several queues have a job with this ID.")

queues_option: Final = click.option(
    "-Q", "--queues", help="Only these queues, comma-separated (default: all of the server)."
)


def confirmation_options(function: F) -> F:
    """Add ``--dry-run`` and ``--yes``, which :func:`bulltask.cli.terminal.check_can_ask` reads."""
    dry_run = click.option("--dry-run", is_flag=True, help="Only count the jobs.")
    return dry_run(click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")(function))


def lake_option(*, required: bool = True, extra: str = "history", of_one: bool = False) -> Callable[[F], F]:
    """Add ``--lake`` and ``--storage-option``; the command receives a ``Lake``, or ``None`` without the option.

    ``extra`` installs what the command needs. ``of_one`` adds ``--lake-broker``.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def command(*args: Any, lake: str | None, storage_option: Sequence[tuple[str, str]], **options: Any) -> Any:
            broker = options.pop("lake_broker", "")
            if lake is None:
                return function(*args, lake=None, **options)
            try:
                from bulltask.lake.storage import Lake  # noqa: PLC0415 - slow, and needs an extra

                opened = Lake(lake, dict(storage_option), broker)
            except ModuleNotFoundError as exc:
                raise MissingExtraError(f"{exc.name} is not installed: pip install 'bulltask[{extra}]'") from exc
            except ConfigError as exc:
                raise click.BadParameter(str(exc), param_hint="--lake") from exc
            return function(*args, lake=opened, **options)

        directory = click.option(
            "--lake",
            required=required,
            envvar="BULLTASK_LAKE",
            metavar="DIRECTORY|URL",
            help="Directory or URL (s3://, abfss://, gs://) of the lake that 'bulltask pipeline' writes (or set "
            "BULLTASK_LAKE).",
        )
        storage = click.option(
            "--storage-option",
            multiple=True,
            type=_StorageOption(),
            help="Setting of the object store, such as AWS_ENDPOINT_URL=http://localhost:9000; may be repeated. "
            "Environment variables with these names count, too; set credentials there.",
        )
        one = click.option(
            "--lake-broker",
            default="",
            envvar="BULLTASK_LAKE_BROKER",
            metavar="NAME",
            help="Only jobs of this broker, in a lake of several (or set BULLTASK_LAKE_BROKER).",
        )
        return cast(F, directory(storage(one(command) if of_one else command)))

    return decorate


def day(text: str) -> date:
    """Parse ``2026-11-22``."""
    try:
        return date.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"invalid day {text!r}: write it like 2026-11-22") from None


def days(text: str) -> list[date]:
    """Parse ``2026-11-20..2026-11-22`` or a single day; the last day is included."""
    first, _, last = text.partition("..")
    begin, end = day(first), day(last or first)
    if end < begin:
        raise click.BadParameter(f"{text!r} ends before it begins")
    return [begin + timedelta(count) for count in range((end - begin).days + 1)]


def moment(text: str) -> datetime:
    """Parse ``2026-11-22`` or ``2026-11-22T14:00``; a time without an offset is UTC."""
    try:
        parsed = datetime.fromisoformat(text)
    except ValueError:
        raise click.BadParameter(f"invalid time {text!r}: write it like 2026-11-22 or 2026-11-22T14:00") from None
    return parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)


def seconds(text: str) -> float:
    """Parse a duration, ``90``, ``10s``, ``15m``, ``12h`` or ``7d``, into seconds."""
    number, unit = (text[:-1], text[-1]) if text[-1:] in _UNITS_S else (text, "s")
    try:
        duration = float(number) * _UNITS_S[unit]
    except ValueError:
        duration = -1.0
    if not 0 <= duration < float("inf"):
        raise click.BadParameter(f"invalid duration {text!r}: write it like 90, 10s, 15m, 12h or 7d")
    return duration


def time_or_age(text: str) -> datetime:
    """Parse a time as :func:`moment` does, or an age: ``1d`` is one day ago."""
    if text[-1:] in _UNITS_S and text[:1].isdigit():
        try:
            return datetime.now(UTC) - timedelta(seconds=seconds(text))
        except OverflowError:
            raise click.BadParameter(f"{text!r} is too long ago: Python's dates begin in year 1") from None
    try:
        return moment(text)
    except click.BadParameter:
        raise click.BadParameter(
            f"invalid time {text!r}: write it like 2026-11-22, 2026-11-22T14:00 or 1d (one day ago)"
        ) from None
