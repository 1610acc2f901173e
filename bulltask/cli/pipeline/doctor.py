"""``bulltask pipeline doctor``: is all there that the pipeline needs, and do the queues' rings hold long enough."""

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

from bulltask.cli.pipeline.options import Source, seconds, source_of, source_options
from bulltask.cli.pipeline.tables import as_table, set_aside_lines
from bulltask.errors import BulltaskError
from bulltask.lake.rings import Need, Ring, sizes
from bulltask.lake.status import SetAside

__all__ = ["command"]

_OLDEST: Final = {
    "java": (17,),
    "pyspark": (4, 2, 1),
    "pyarrow": (18,),
    "numpy": (1, 26),
    "hiredis": (3,),
    "redis": (7,),
}
_PACKAGES: Final = ("pyspark", "pyarrow", "numpy", "hiredis")


@dataclass(frozen=True, slots=True)
class Part:
    """Something that the pipeline needs.

    Attributes:
        name: what.
        found: its version; ``None`` when it is not there.
        advice: what to do, ``""`` for nothing.
    """

    name: str
    found: str | None
    advice: str


@click.command("doctor")
@source_options
@click.option(
    "--trigger", type=seconds, metavar="LENGTH", default="10s", show_default=True, help="Time between two batches."
)
@click.option(
    "--batch", type=seconds, metavar="LENGTH", default="5s", show_default=True, help="Time that a batch takes."
)
@click.option(
    "--outage",
    type=seconds,
    metavar="LENGTH",
    default="0s",
    show_default=True,
    help="Time without a reader to survive.",
)
@click.option("--sizes", "show_sizes", is_flag=True, help="Print the table of sizes of rings, and end.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    trigger: float,
    batch: float,
    outage: float,
    show_sizes: bool,
    as_json: bool,
    **where: Any,
) -> None:
    """Look whether all is there that the pipeline needs, and whether the queues' rings hold long enough.

    A queue's events are kept in a ring. What is not read before the ring has gone round is lost, so it should hold
    two rounds of the pipeline (trigger and batch), and the longest outage to survive.

    Exit codes: 0 all is well, 1 something is missing or too small, or a queue cannot be recorded.
    """
    if show_sizes:
        click.echo(_sizes())
        return
    need = Need(trigger, batch, outage)
    source = source_of(ctx, where)
    parts = [_java(), *map(_package, _PACKAGES)]
    redis, rings, aside = _ask_redis(source)
    parts.append(redis)
    enough = all(ring.is_enough(need) is not False for ring in rings)
    well = enough and not aside and all(not part.advice for part in parts)
    if as_json:
        said = _as_json(parts, rings, need, well=well)
        click.echo(json.dumps({**said, "set_aside": [asdict(one) for one in aside]}, indent=2))
    else:
        click.echo("\n".join([*_shown(parts, rings, need), *set_aside_lines(aside)]))
    ctx.exit(0 if well else 1)


def _java() -> Part:
    home = environ.get("JAVA_HOME")
    program = str(Path(home, "bin", "java")) if home else shutil.which("java")
    advice = "install a JRE, 17 or newer, or set JAVA_HOME where one is"
    if program is None:
        return Part("java", None, advice)
    try:
        said = subprocess.run([program, "-version"], capture_output=True, text=True, check=True, timeout=60).stderr  # noqa: S603 - the user's own
    except (OSError, subprocess.SubprocessError):
        return Part("java", None, advice)
    return _judged("java", said.split('"')[1] if '"' in said else said.strip(), advice)


def _package(name: str) -> Part:
    advice = "pip install 'bulltask[spark]'"
    try:
        return _judged(name, version(name), advice)
    except PackageNotFoundError:
        return Part(name, None, advice)


def _judged(name: str, found: str, advice: str) -> Part:
    numbers = tuple(int(part) for part in found.split("+", maxsplit=1)[0].split(".") if part.isdecimal())
    return Part(name, found, "" if numbers >= _OLDEST[name] else advice)


def _ask_redis(source: Source) -> tuple[Part, list[Ring], Sequence[SetAside]]:
    """The server, the rings of its queues, and the queues that cannot be recorded."""
    from bulltask.spark.source.connection import Connection  # noqa: PLC0415 - slow
    from bulltask.spark.source.options import EventsOptions, read_options  # noqa: PLC0415 - slow
    from bulltask.spark.source.status import observe_streams, redis_version  # noqa: PLC0415 - slow

    options = read_options(EventsOptions, {"table": "events", **source.texts, "skipForeignQueues": "true"})
    try:
        with Connection(options.config) as connection:
            found = redis_version(connection) or "unknown"
            look = observe_streams(connection, options)
    except BulltaskError as exc:
        return Part("redis", None, f"{options.config.broker_url}: {exc}"), [], []
    advice = "before 7.0 losses are seen but cannot be counted: use Redis 7 or Valkey"
    counted = all(facts is None or facts.added is not None for _, _, facts in look.streams)
    part = Part("redis", found, "" if counted else advice) if found == "unknown" else _judged("redis", found, advice)
    return part, [ring for _, ring, _ in look.streams], look.skipped


def _as_json(parts: Sequence[Part], rings: Sequence[Ring], need: Need, *, well: bool) -> dict[str, Any]:
    return {
        "well": well,
        "needed_s": need.seconds,
        "parts": [{"name": one.name, "version": one.found, "advice": one.advice or None} for one in parts],
        "queues": [
            {
                "queue": ring.queue,
                "length": ring.length,
                "max_length": ring.limit,
                "events_per_s": ring.rate,
                "headroom_s": ring.headroom_s,
                "enough": ring.is_enough(need),
                "advised_max_length": ring.advice(need),
            }
            for ring in rings
        ],
    }


def _shown(parts: Sequence[Part], rings: Sequence[Ring], need: Need) -> Iterator[str]:
    yield as_table(
        ("", "found", "needed", ""),
        [
            (one.name, one.found or "missing", ">= " + ".".join(map(str, _OLDEST[one.name])), one.advice)
            for one in parts
        ],
    )
    yield f"\nA ring should hold {need.seconds:,.0f} s: the greater of 2 x (trigger + batch) and the outage."
    if not rings:
        if parts[-1].found is not None:  # Redis answered
            yield "No queue was found."
        return
    yield as_table(
        ("queue", "events now", "maxLen", "events/s", "holds", "verdict"),
        [
            (
                ring.queue,
                f"{ring.length:,}",
                f"{ring.limit:,}",
                "-" if ring.rate is None else f"{ring.rate:,.1f}",
                "-" if ring.headroom_s is None else f"{ring.headroom_s:,.0f} s",
                _verdict(ring, need),
            )
            for ring in rings
        ],
    )


def _verdict(ring: Ring, need: Need) -> str:
    enough = ring.is_enough(need)
    if enough is None:
        return "no events yet"
    return "enough" if enough else f"too short: set streams.events.maxLen to {ring.advice(need):,}"


def _sizes() -> str:
    return as_table(
        ("jobs/s", "events/s", "10,000 hold", "maxLen for 30 s", "maxLen for 15 min", "takes"),
        [
            (
                f"{one.jobs_per_s:,}",
                f"{one.events_per_s:,.0f}",
                f"{one.default_holds_s:,.1f} s",
                f"{one.near_live:,}",
                f"{one.quarter_hour:,}",
                f"{one.quarter_hour_mb:,.0f} MB",
            )
            for one in sizes()
        ],
    )
