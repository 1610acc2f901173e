"""``bulltask pipeline doctor``: check what the pipeline needs, and the retention of the queues' event streams."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from os import environ
from pathlib import Path
from typing import Any, Final

import click

from bulltask.cli.options import seconds
from bulltask.cli.pipeline.options import QueueSource, source_of, source_options
from bulltask.cli.pipeline.status import skipped_queue_lines
from bulltask.cli.terminal import as_table, echo
from bulltask.jobs.errors import BulltaskError
from bulltask.lake.status import SkippedQueue
from bulltask.lake.stream_retention import RetentionNeed, StreamRetention, retention_examples

__all__ = ["command"]

_MIN_VERSIONS: Final = {
    "java": (17,),
    "pyspark": (4, 2, 1),
    "pyarrow": (18,),
    "numpy": (1, 26),
    "hiredis": (3,),
    "redis": (7,),
}
_PACKAGES: Final = ("pyspark", "pyarrow", "numpy", "hiredis")


@dataclass(frozen=True, slots=True)
class Requirement:
    """A required program or package.

    Attributes:
        name: The name.
        version: The version; ``None`` if it is missing.
        advice: How to fix the problem; ``""`` if the version is fine.
    """

    name: str
    version: str | None
    advice: str


@click.command("doctor", short_help="Check the installation and the retention of event streams.")
@source_options
@click.option(
    "--trigger", type=seconds, metavar="DURATION", default="10s", show_default=True, help="Interval between batches."
)
@click.option(
    "--batch-duration",
    type=seconds,
    metavar="DURATION",
    default="5s",
    show_default=True,
    help="Duration of a batch.",
)
@click.option(
    "--outage",
    type=seconds,
    metavar="DURATION",
    default="0s",
    show_default=True,
    help="Longest pipeline downtime that must not cause a loss of events.",
)
@click.option(
    "--sizes", "show_sizes", is_flag=True, help="Print the recommended stream lengths for typical loads, and exit."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    trigger: float,
    batch_duration: float,
    outage: float,
    show_sizes: bool,
    as_json: bool,
    **connection: Any,
) -> None:
    """Check that the required software is installed and that the queues' event streams are long enough.

    BullMQ keeps only the newest events of a queue (streams.events.maxLen). Events that are trimmed before the pipeline
    has read them are lost. Therefore, a stream should keep the events of two batches (twice the sum of trigger interval
    and batch duration) or of the longest downtime (--outage), whichever is longer.

    Exit codes: 0 (all checks passed), 1 (a requirement is missing, a stream is too short, or a queue cannot be
    recorded).
    """
    if show_sizes:
        click.echo(_sizes())
        return
    need = RetentionNeed(trigger, batch_duration, outage)
    source = source_of(ctx, connection)
    requirements = [_java(), *map(_package, _PACKAGES)]
    redis, streams, skipped = _check_redis(source)
    requirements.append(redis)
    enough = all(stream.is_enough(need) is not False for stream in streams)
    ok = enough and not skipped and all(not requirement.advice for requirement in requirements)
    if as_json:
        checks = _to_json(requirements, streams, need, ok=ok)
        click.echo(json.dumps({**checks, "skipped": [asdict(item) for item in skipped]}, indent=2))
    else:
        echo("\n".join([*_lines(requirements, streams, need), *skipped_queue_lines(skipped)]))
    ctx.exit(0 if ok else 1)


def _java() -> Requirement:
    home = environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    advice = "install a JRE, 17 or newer, or set JAVA_HOME to one"
    if program is None:
        return Requirement("java", None, advice)
    try:
        output = subprocess.run([program, "-version"], capture_output=True, text=True, check=True, timeout=60).stderr  # noqa: S603 - the user's Java
    except (OSError, subprocess.SubprocessError):
        return Requirement("java", None, advice)
    return _check_version("java", output.split('"')[1] if '"' in output else output.strip(), advice)


def _package(name: str) -> Requirement:
    advice = "pip install 'bulltask[spark]'"
    try:
        return _check_version(name, version(name), advice)
    except PackageNotFoundError:
        return Requirement(name, None, advice)


def _check_version(name: str, installed: str, advice: str) -> Requirement:
    numbers = tuple(int(number) for number in installed.split("+", maxsplit=1)[0].split(".") if number.isdecimal())
    return Requirement(name, installed, "" if numbers >= _MIN_VERSIONS[name] else advice)


def _check_redis(source: QueueSource) -> tuple[Requirement, list[StreamRetention], Sequence[SkippedQueue]]:
    """Return the server, the event streams of its queues, and the queues that cannot be recorded."""
    from bulltask.spark.source.connection import Connection  # noqa: PLC0415 - slow
    from bulltask.spark.source.options import EventsOptions, read_options  # noqa: PLC0415 - slow
    from bulltask.spark.source.status import observe_streams, redis_version  # noqa: PLC0415 - slow

    options = read_options(EventsOptions, {"table": "events", **source.options, "skipUnsupportedQueues": "true"})
    try:
        with Connection(options.config) as connection:
            server_version = redis_version(connection) or "unknown"
            observed = observe_streams(connection, options)
    except BulltaskError as exc:
        return Requirement("redis", None, f"{options.config.broker_url}: {exc}"), [], []
    advice = "before Redis 7.0, losses are detected but cannot be counted: use Redis 7 or Valkey"
    counted = all(state is None or state.added is not None for _, _, state in observed.streams)
    if server_version == "unknown":
        redis = Requirement("redis", server_version, "" if counted else advice)
    else:
        redis = _check_version("redis", server_version, advice)
    return redis, [stream for _, stream, _ in observed.streams], observed.skipped


def _to_json(
    requirements: Sequence[Requirement], streams: Sequence[StreamRetention], need: RetentionNeed, *, ok: bool
) -> dict[str, Any]:
    return {
        "ok": ok,
        "required_s": need.seconds,
        "requirements": [
            {"name": item.name, "version": item.version, "advice": item.advice or None} for item in requirements
        ],
        "queues": [
            {
                "queue": stream.queue,
                "length": stream.length,
                "max_length": stream.limit,
                "events_per_s": stream.rate,
                "retention_s": stream.retention_s,
                "enough": stream.is_enough(need),
                "recommended_max_length": stream.recommended_limit(need),
            }
            for stream in streams
        ],
    }


def _lines(
    requirements: Sequence[Requirement], streams: Sequence[StreamRetention], need: RetentionNeed
) -> Iterator[str]:
    yield as_table(
        ("", "found", "needed", ""),
        [
            (item.name, item.version or "missing", ">= " + ".".join(map(str, _MIN_VERSIONS[item.name])), item.advice)
            for item in requirements
        ],
    )
    formula = "max(2 x (trigger + batch duration), outage)"
    yield f"\nAn event stream should keep events for {need.seconds:,.0f} s: {formula}."
    if not streams:
        if requirements[-1].version is not None:  # Redis is available
            yield "No queues found."
        return
    yield as_table(
        ("queue", "events now", "maxLen", "events/s", "retention", "verdict"),
        [
            (
                stream.queue,
                f"{stream.length:,}",
                f"{stream.limit:,}",
                "-" if stream.rate is None else f"{stream.rate:,.1f}",
                "-" if stream.retention_s is None else f"{stream.retention_s:,.0f} s",
                _verdict(stream, need),
            )
            for stream in streams
        ],
    )


def _verdict(stream: StreamRetention, need: RetentionNeed) -> str:
    enough = stream.is_enough(need)
    if enough is None:
        return "no events yet"
    return "long enough" if enough else f"too short: set streams.events.maxLen to {stream.recommended_limit(need):,}"


def _sizes() -> str:
    return as_table(
        ("jobs/s", "events/s", "10,000 events cover", "maxLen for 30 s", "maxLen for 15 min", "memory"),
        [
            (
                f"{item.jobs_per_s:,}",
                f"{item.events_per_s:,.0f}",
                f"{item.default_retention_s:,.1f} s",
                f"{item.half_minute:,}",
                f"{item.quarter_hour:,}",
                f"{item.quarter_hour_mb:,.0f} MB",
            )
            for item in retention_examples()
        ],
    )
