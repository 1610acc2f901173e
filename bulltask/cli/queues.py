"""``bulltask queues`` and ``bulltask queue``: how full the queues of a server are, and what can be done with one."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.options import json_option, redis_options
from bulltask.cli.terminal import as_table, duration_text, echo, in_one_line, print_json
from bulltask.jobs.errors import BulltaskError
from bulltask.jobs.names import name_in_app
from bulltask.queue.overview import MAX_PAGES, FoundQueues, QueueOverview, find_queues, read_overview
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.queue import QueueFigures

__all__ = ["queues"]


@click.command("queues", short_help="List the queues, and how full they are.")
@redis_options
@click.option("-Q", "--queues", "names", help="Only these queues (separated by commas).")
@json_option
@click.pass_context
def queues(ctx: click.Context, /, *, names: str | None, **options: Any) -> None:
    """List the queues of the server: the app's, those that bulltask has used, and those that only Node.js uses.

    'oldest' is for how long the oldest job has been waiting that could run. 'in' and 'out' are the jobs that were
    added, and that have completed or failed, in the last minute (less if there were many events). '?' cannot be known.
    """
    app = load_app_or_broker(ctx, options)
    try:
        with app._broker.pool.client() as client:
            client.connect()
            config = app._config
            if names is None:
                found = find_queues(client, config.prefix, [app._broker.keys(queue).name for queue in _of_app(app)])
                keys = [
                    QueueKeys(config.prefix, name, name_in_app(name, hash_tag=config.queue_hash_tag))
                    for name in found.names
                ]
            else:
                keys = [app._broker.keys(name.strip()) for name in names.split(",")]
                found = FoundQueues((), scanned_all=True)
            now_ms = app._broker.clock.now_ms()
            overview = read_overview(client, keys, now_ms)
    finally:
        app.close()
    if options["as_json"]:
        rows = [_to_json(queue, now_ms) for queue in overview]
        print_json({"at": _iso(now_ms), "queues": rows, "scanned_all": found.scanned_all})
        return
    echo(_table(overview, now_ms) if overview else "No queues.")
    if not found.scanned_all:
        echo(
            f"Redis has more than the {MAX_PAGES * 1000:,} keys that were scanned: queues that only Node.js uses, and "
            "that have no worker now, may be missing.",
            err=True,
        )


def _of_app(app: App) -> set[str]:
    """Return the queues that the app names, without importing its tasks."""
    named = {task._options.queue for task in app.tasks.values() if task._options.queue}
    return {*named, *(app._config.queues or ())}


_HEAD: Final = ("queue", "waiting", "oldest", "active", "delayed", "failed", "completed", "in", "out", "workers", "")


def _table(overview: Sequence[QueueOverview], now_ms: int) -> str:
    return as_table(_HEAD, [_row(queue, now_ms) for queue in overview])


def _row(queue: QueueOverview, now_ms: int) -> tuple[str, ...]:
    name, figures = in_one_line(_label(queue.keys)), queue.figures
    workers = "?" if queue.workers is None else str(queue.workers)
    if isinstance(figures, BulltaskError):
        return name, *"?" * 8, workers, in_one_line(str(figures))
    return (
        name,
        str(_waiting(figures)),
        _oldest(figures, now_ms),
        str(figures.active),
        str(figures.delayed - figures.due),
        str(figures.failed),
        str(figures.completed),
        _rate(figures.added, figures.window_ms),
        _rate(figures.finished, figures.window_ms),
        workers,
        in_one_line(_notes(figures, now_ms)),
    )


def _label(keys: QueueKeys) -> str:
    """Return the queue's name in the app, or its name in BullMQ if it has no name there."""
    return keys.queue


def _waiting(figures: QueueFigures) -> int:
    return figures.wait + figures.paused + figures.prioritized + figures.due


def _oldest(figures: QueueFigures, now_ms: int) -> str:
    if figures.oldest_ms is not None:
        return duration_text(max(0, now_ms - figures.oldest_ms) / 1000)
    return "?" if _waiting(figures) else "-"


def _rate(jobs: int, window_ms: int | None) -> str:
    if window_ms is None:
        return "?"
    per_second = jobs * 1000 / window_ms
    return f"{per_second:.3g}/s" if per_second >= 1 else f"{per_second * 60:.3g}/min"


def _notes(figures: QueueFigures, now_ms: int) -> str:
    notes = []
    if figures.is_paused:
        pause = figures.pause
        since = "" if pause is None else f" by {pause.by}, {duration_text((now_ms - pause.at_ms) / 1000)} ago"
        notes.append(f"paused{since}")
    if figures.concurrency is not None:
        notes.append(f"concurrency {figures.concurrency}")
    if figures.max is not None and figures.duration_ms is not None:
        notes.append(f"limit {figures.max} per {duration_text(figures.duration_ms / 1000)}")
    if figures.waiting_children:
        notes.append(f"{figures.waiting_children} wait for child jobs")
    return ", ".join(notes)


def _to_json(queue: QueueOverview, now_ms: int) -> dict[str, Any]:
    keys, figures = queue.keys, queue.figures
    named = {"queue": keys.queue, "bullmq_name": keys.name, "workers": queue.workers}
    if isinstance(figures, BulltaskError):
        return {**named, "error": str(figures)}
    window_ms, pause, oldest_ms = figures.window_ms, figures.pause, figures.oldest_ms
    return {
        **named,
        "error": None,
        "waiting": _waiting(figures),
        "oldest_waiting": None if oldest_ms is None else max(0, now_ms - oldest_ms) / 1000,
        "active": figures.active,
        "delayed": figures.delayed - figures.due,
        "waiting_children": figures.waiting_children,
        "completed": figures.completed,
        "failed": figures.failed,
        "added_per_second": None if window_ms is None else figures.added * 1000 / window_ms,
        "finished_per_second": None if window_ms is None else figures.finished * 1000 / window_ms,
        "rate_window": None if window_ms is None else window_ms / 1000,
        "paused": figures.is_paused,
        "paused_by": None if pause is None else pause.by,
        "paused_at": None if pause is None else _iso(pause.at_ms),
        "concurrency": figures.concurrency,
        "rate_limit": None
        if figures.max is None or figures.duration_ms is None
        else {"max": figures.max, "duration": figures.duration_ms / 1000},
    }


def _iso(ms: int) -> str | None:
    try:
        return datetime.fromtimestamp(ms / 1000, UTC).isoformat()
    except (OverflowError, ValueError, OSError):  # another client may have written anything
        return None
