"""``bulltask events``: follow the events of queues."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing, suppress
from dataclasses import fields
from math import inf
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.job import chosen_queues
from bulltask.cli.options import duration_option, operator_options, queues_option
from bulltask.cli.terminal import echo, in_one_line, iso, stamp, time_of
from bulltask.jobs.errors import BulltaskError
from bulltask.lake.formatting import CONTROL
from bulltask.queue.events import EventsLost, QueueEvent

__all__ = ["events"]

_OWN_FIELDS: Final = ("id", "queue", "job_id", "error")
_MAX_DETAILS: Final = 200


@click.command("events", short_help="Follow the events of queues.")
@queues_option
@click.option(
    "--event", "kinds", multiple=True, metavar="NAME", help="Only this event: added, failed …; may be repeated."
)
@click.option("--job", "job_id", metavar="ID", help="Only events of this job.")
@click.option("--filter", "wanted", metavar="TEXT", help="Only events whose line contains TEXT; case is ignored.")
@duration_option("--since", text="Begin with the events that are not older than this: 90, 10s, 15m, 12h or 7d.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Stop after N events.")
@operator_options
def events(ctx: click.Context, /, *, queues: str | None, **options: Any) -> None:
    """Print the events of queues as they happen, until Ctrl-C.

    Redis keeps the newest 10,000 events of a queue; --since begins with these. With
    --json, each is a document in a line.

    Exit codes: 0 (done, or interrupted), 1 (an error), 4 (there is no such queue).
    """
    with suppress(KeyboardInterrupt), closing(load_app_or_broker(ctx, options)) as app:
        names = chosen_queues(app, queues)
        if not names:
            raise click.ClickException("there are no queues yet")
        echo(f"following {', '.join(map(in_one_line, names))}; press Ctrl-C to stop", err=True)
        asyncio.run(_follow(app, names, options))


_Arrived = asyncio.Queue[QueueEvent | BulltaskError]


async def _read(app: App, name: str, start: str, arrived: _Arrived) -> None:
    """Pass the events of a queue on, and the error that ends it."""
    is_first = start != "$"
    try:
        async with app.aevents(name, start=start) as reader:
            async for event in reader:
                if not (is_first and isinstance(event, EventsLost)):  # from before the oldest one that Redis keeps
                    await arrived.put(event)
                is_first = False
    except BulltaskError as exc:
        await arrived.put(exc)


async def _follow(app: App, names: list[str], options: dict[str, Any]) -> None:
    """Read all queues at once, and print their events, until there are enough."""
    left = options["limit"] or inf
    arrived: _Arrived = asyncio.Queue(maxsize=1_000)
    start = "$"
    if options["since"] is not None:
        start = f"{max(0, int(app._now_ms() - options['since'] * 1000))}-0"
    readers = [asyncio.create_task(_read(app, name, start, arrived), name=f"bulltask-events-{name}") for name in names]
    try:
        while left > 0:
            event = await arrived.get()
            if isinstance(event, BulltaskError):
                raise event
            left -= _prints(event, options)
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)
        await app.aclose()


def _prints(event: QueueEvent, options: dict[str, Any]) -> bool:
    """Print an event if it is wanted."""
    if options["kinds"] and _kind(event) not in options["kinds"]:
        return False
    if options["job_id"] is not None and getattr(event, "job_id", None) != options["job_id"]:
        return False
    text = _json_line(event) if options["as_json"] else _line(event)
    if options["wanted"] is not None and options["wanted"].casefold() not in text.casefold():
        return False
    click.echo(text)
    return True


def _kind(event: QueueEvent) -> str:
    return event.event or str(getattr(event, "name", "custom"))


def _details(event: QueueEvent) -> dict[str, Any]:
    names = [item.name for item in fields(event) if item.name not in _OWN_FIELDS]
    details = {name: getattr(event, name) for name in names}
    if "data" in details or "returnvalue" in details:
        details.pop("text", None)  # the same as stored
    return {name: value for name, value in details.items() if value is not None}


def _at_ms(event: QueueEvent) -> int | None:
    ms = event.id.partition("-")[0]
    return int(ms) if ms.isdecimal() else None


def _line(event: QueueEvent) -> str:
    texts = map(in_one_line, (event.queue, _kind(event), getattr(event, "job_id", "")))
    details = "  ".join(f"{name}={_short(value)}" for name, value in _details(event).items())
    return "  ".join((stamp(time_of(_at_ms(event))), *texts, details)).rstrip()


def _short(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=dict)
    return in_one_line(text, _MAX_DETAILS)


def _json_line(event: QueueEvent) -> str:
    head: dict[str, Any] = {"id": event.id, "at": iso(_at_ms(event)), "queue": event.queue, "event": _kind(event)}
    if hasattr(event, "job_id"):
        head["job_id"] = event.job_id
    text = json.dumps({**head, **_details(event)}, ensure_ascii=False, default=dict)
    return CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], text)
