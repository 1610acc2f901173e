"""``bulltask queues`` and ``bulltask queue``: how full the queues of a server are, and what can be done with one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from textwrap import wrap
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import existing_queue, load_app_or_broker
from bulltask.cli.groups import HintGroup
from bulltask.cli.options import confirmation_options, duration_option, operator_options, queues_option
from bulltask.cli.terminal import as_table, check_can_ask, duration_text, echo, in_one_line, iso, print_json
from bulltask.config.parsers import parse_names, rate_limits
from bulltask.jobs.errors import BulltaskError, ConfigError
from bulltask.jobs.names import EVERY_QUEUE, name_in_app
from bulltask.lake.formatting import age_text, pluralize
from bulltask.queue import Queue
from bulltask.queue.control import change_rate_limit, this_user
from bulltask.queue.fields import RateLimit
from bulltask.queue.overview import MAX_PAGES, QueueOverview, find_queues, read_overview
from bulltask.transport.call import QueueKeys, SyncClient
from bulltask.transport.scripts.queue import RATE_PERIOD_MS, QueueFigures, count_by_score

__all__ = ["QUEUE_COLUMNS", "keys_of", "queue", "queue_note", "queue_row", "queues", "queues_named_by"]


@click.command("queues", short_help="List the queues, and how full they are.")
@queues_option
@operator_options
def queues(ctx: click.Context, /, **options: Any) -> None:
    """List the queues of the server: the app's, those that bulltask has used, and those that only Node.js uses.

    'oldest' is for how long the oldest job has been waiting that could run. 'in/min' and 'out/min' are the jobs that
    were added, and that have completed or failed, per minute, in the last minute, or in the time below the row, if
    Redis no longer has the events of a minute. Delayed jobs that a task's rate limit delays are counted below the row.
    '?' cannot be known.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such queue).
    """
    with closing(load_app_or_broker(ctx, options)) as app, app._broker.pool.client() as client:
        client.connect()
        named = queues_named_by(app)
        if options["app"] or (ctx.obj or {}).get("app"):
            named.add(app._config.default_queue)
        keys, scanned_all = keys_of(app, client, options["queues"], named)
        now_ms = app._broker.clock.now_ms()
        overview = read_overview(client, keys, now_ms)
        for queue in overview:
            if options["queues"] is not None and not queue.workers:
                existing_queue(app, queue.keys.queue)  # or an error
    if options["as_json"]:
        rows = [_to_json(queue) for queue in overview]
        print_json({"at": iso(now_ms), "queues": rows, "scanned_all": scanned_all})
        return
    if overview:
        times = Counter(queue.keys.queue for queue in overview)
        twins = {name for name, count in times.items() if count > 1}  # with a hash tag, and without one
        notes = [queue_note(queue, now_ms) for queue in overview]
        echo(as_table(QUEUE_COLUMNS, [queue_row(queue, twins) for queue in overview], notes))
    else:
        echo(
            f"No queues: no job was sent to {app._broker.endpoint.safe_url} with prefix {app._config.prefix!r}",
            err=True,
        )
    if not scanned_all:
        echo(
            f"Redis has more than the {MAX_PAGES * 1000:,} keys that were scanned: queues that only Node.js uses, and "
            "that have no worker now, may be missing.",
            err=True,
        )


def queues_named_by(app: App) -> set[str]:
    """Return the queues that an app names, without importing its tasks."""
    return {*app.tasks.queues, *(app._config.queues or ())}


def keys_of(
    app: App, client: SyncClient, names: str | None, known: Iterable[str] = (), *, scan: bool = True
) -> tuple[list[QueueKeys], bool]:
    """Return the queues of ``-Q``, or else ``known`` and those of the server, and whether all its keys were scanned."""
    if names is not None:
        return [app._broker.keys(name) for name in parse_names(names, "-Q")], True
    config = app._config
    found = find_queues(client, config.prefix, [app._broker.keys(name).name for name in known], scan=scan)
    keys = [QueueKeys(config.prefix, name, name_in_app(name, hash_tag=config.queue_hash_tag)) for name in found.names]
    return keys, found.scanned_all


QUEUE_COLUMNS: Final = ("queue", "waiting", "oldest", "active", "delayed", "failed", "in/min", "out/min", "workers")
_WIDTH: Final = 78


def queue_row(queue: QueueOverview, twins: Collection[str] = ()) -> tuple[str, ...]:
    """Return the texts of :data:`QUEUE_COLUMNS`; ``twins`` are the names that two queues have."""
    name, figures = in_one_line(queue.keys.queue), queue.figures
    if queue.keys.queue in twins and queue.keys.name == queue.keys.queue:
        name += " (--no-queue-hash-tag)"
    workers = "?" if queue.workers is None else str(queue.workers)
    if isinstance(figures, BulltaskError):
        return name, *"?" * 7, workers
    return (
        name,
        str(figures.waiting),
        _oldest(figures),
        str(figures.active),
        str(figures.delayed - figures.due),
        str(figures.failed),
        _per_minute(figures.added, figures.window_ms),
        _per_minute(figures.finished, figures.window_ms),
        workers,
    )


def _oldest(figures: QueueFigures) -> str:
    if figures.oldest_ms is not None:
        return age_text(figures.oldest_ms / 1000)
    return "?" if figures.waiting else "-"


def _per_minute(jobs: int, window_ms: int | None) -> str:
    if window_ms is None:
        return "?"
    number = round(jobs * 60_000 / window_ms)
    return str(number) if number < 100_000 else f"{number / 1000:.0f}k"


def queue_note(queue: QueueOverview, now_ms: int) -> str:
    """Return what is special about a queue, for the lines below its row."""
    figures, notes = queue.figures, []
    if isinstance(figures, BulltaskError):
        return in_one_line(str(figures))
    if figures.is_paused:
        pause = figures.pause
        since = "" if pause is None else f" by {pause.by}, {duration_text((now_ms - pause.at_ms) / 1000)} ago"
        notes.append(f"paused{since}")
    if figures.concurrency is not None:
        notes.append(f"concurrency {figures.concurrency}")
    if figures.max is not None and figures.duration_ms is not None:
        notes.append(f"limit {figures.max} per {duration_text(figures.duration_ms / 1000)}")
    notes += _held_notes(queue)
    if figures.waiting_children:
        verb = "waits" if figures.waiting_children == 1 else "wait"
        notes.append(f"{figures.waiting_children} {verb} for child jobs")
    if figures.window_ms is not None and figures.window_ms < RATE_PERIOD_MS:
        notes.append(f"rates of the last {duration_text(figures.window_ms / 1000)}")
    text = in_one_line(", ".join(notes))
    return "\n  ".join(wrap(text, _WIDTH, break_long_words=False, break_on_hyphens=False))


def _held_notes(queue: QueueOverview) -> list[str]:
    """Return how many delayed jobs a task's rate limit delays, or no worker can run."""
    notes = ["throttled jobs: not permitted"] if queue.throttled is None or queue.incompatible is None else []
    notes += [f"{number} throttled by the rate limit of {task}" for task, number in (queue.throttled or {}).items()]
    return notes + ([f"{queue.incompatible} that no worker can run"] if queue.incompatible else [])


def _to_json(queue: QueueOverview) -> dict[str, Any]:
    keys, figures = queue.keys, queue.figures
    named = {"queue": keys.queue, "bullmq_name": keys.name, "workers": queue.workers}
    if isinstance(figures, BulltaskError):
        return {**named, "error": str(figures)}
    window_ms, pause, oldest_ms = figures.window_ms, figures.pause, figures.oldest_ms
    return {
        **named,
        "error": None,
        "waiting": figures.waiting,
        "oldest_waiting": None if oldest_ms is None else oldest_ms / 1000,
        "active": figures.active,
        "delayed": figures.delayed - figures.due,
        "throttled": None if queue.throttled is None else sum(queue.throttled.values()),
        "incompatible": queue.incompatible,
        "waiting_children": figures.waiting_children,
        "completed": figures.completed,
        "failed": figures.failed,
        "added_per_second": None if window_ms is None else figures.added * 1000 / window_ms,
        "finished_per_second": None if window_ms is None else figures.finished * 1000 / window_ms,
        "rate_window": None if window_ms is None else window_ms / 1000,
        "paused": figures.is_paused,
        "paused_by": None if pause is None else pause.by,
        "paused_at": None if pause is None else iso(pause.at_ms),
        "concurrency": figures.concurrency,
        "rate_limit": _rate_limit(figures),
    }


@click.group("queue", cls=HintGroup, short_help="Pause, resume, empty or limit a queue.")
def queue() -> None:
    """Pause, resume, empty or limit a queue, for all its workers, also those of Node.js.

    Before jobs are removed, they are counted, and you are asked.

    Exit codes: 0 (done), 1 (an error, or you have answered no), 2 (invalid usage), 4 (there is no such queue).
    """


@contextmanager
def _existing(ctx: click.Context, name: str, options: dict[str, Any]) -> Iterator[Queue]:
    with closing(load_app_or_broker(ctx, options)) as app:
        yield existing_queue(app, name)


def _figures(queue: Queue) -> QueueFigures:
    queue.wait_until_ready()
    context = queue.context
    with context.broker.pool.client() as client:
        (overview,) = read_overview(client, [context.keys], context.now_ms())
    if isinstance(overview.figures, BulltaskError):
        raise overview.figures
    return overview.figures


def _report(ctx: click.Context, queue: Queue, options: dict[str, Any], text: str, jobs: int | None = None) -> None:
    """Print what was done; the JSON document has the same keys for all commands."""
    if not options["as_json"]:
        echo(text)
        return
    figures = _figures(queue)
    print_json(
        {
            "queue": queue.name,
            "action": ctx.info_name,
            "dry_run": bool(options.get("dry_run")),
            "jobs": jobs,
            "paused": figures.is_paused,
            "concurrency": figures.concurrency,
            "rate_limit": _rate_limit(figures),
        }
    )


def _rate_limit(figures: QueueFigures) -> dict[str, Any] | None:
    if figures.max is None or figures.duration_ms is None:
        return None
    return {"max": figures.max, "duration": figures.duration_ms / 1000}


@queue.command("pause", short_help="Let workers acquire no more jobs.")
@click.argument("name", metavar="QUEUE")
@click.option("--by", help="Who pauses it, for 'bulltask queues' and 'bulltask why' (default: you and this host).")
@operator_options
def pause(ctx: click.Context, /, *, name: str, by: str | None, **options: Any) -> None:
    """Let the workers of QUEUE acquire no more jobs; running jobs continue."""
    with _existing(ctx, name, options) as queue:
        queue.pause(by=by or this_user())
        figures = _figures(queue)
        text = f"Queue {in_one_line(name)} is paused: {figures.waiting} waiting, {figures.active} running"
        _report(ctx, queue, options, text)


@queue.command("resume", short_help="Let workers acquire jobs again.")
@click.argument("name", metavar="QUEUE")
@operator_options
def resume(ctx: click.Context, /, *, name: str, **options: Any) -> None:
    """End a pause of QUEUE, whichever client has paused it."""
    with _existing(ctx, name, options) as queue:
        figures = _figures(queue)
        queue.resume()
        done = "was resumed" if figures.is_paused else "was not paused"
        if figures.paused and not figures.is_paused:
            done = f"has {pluralize(figures.paused, 'job')} back that no worker looked for (a pause by BullMQ 5)"
        _report(ctx, queue, options, f"Queue {in_one_line(name)} {done}: {figures.waiting} waiting")


@queue.command("drain", short_help="Remove all jobs that wait.")
@click.argument("name", metavar="QUEUE")
@click.option("--delayed", is_flag=True, help="Remove delayed jobs, too.")
@confirmation_options
@operator_options
def drain(ctx: click.Context, /, *, name: str, delayed: bool, **options: Any) -> None:
    """Remove all waiting jobs of QUEUE, with or without a priority.

    Running and finished jobs stay, and so do the next jobs of schedules. Delayed jobs stay even if they are due, such
    as retries while all workers are busy, unless you pass --delayed.
    """
    with _existing(ctx, name, options) as queue:
        figures = _figures(queue)
        jobs = figures.wait + figures.paused + figures.prioritized + (figures.delayed if delayed else 0)
        kind = "waiting or delayed job" if delayed else "waiting job"
        what = f"{pluralize(jobs, kind)} of queue {in_one_line(name)}"
        if figures.due and not delayed:
            what += f", but not {pluralize(figures.due, 'delayed job')} that {'is' if figures.due == 1 else 'are'} due"
            what += " (--delayed)"
        elif figures.delayed and not delayed:
            stay = "stays" if figures.delayed == 1 else "stay"
            what += f"; {pluralize(figures.delayed, 'delayed job')} {stay}"
        _remove(ctx, queue, options, what, jobs, lambda: queue.drain(delayed=delayed))


_CLEANED: Final = ("completed", "failed", "waiting", "paused", "prioritized", "delayed", "active")


@queue.command("clean", short_help="Remove old jobs of one state.")
@click.argument("name", metavar="QUEUE")
@click.option("--state", type=click.Choice(_CLEANED), default="completed", show_default=True)
@duration_option("--older-than", text="Only jobs that finished, or were added, longer ago: 90, 10s, 15m, 12h or 7d.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number of jobs (default: all).")
@confirmation_options
@operator_options
def clean(
    ctx: click.Context, /, *, name: str, state: str, older_than: float | None, limit: int | None, **options: Any
) -> None:
    """Remove the jobs of QUEUE that have one state; active ones only if their workers have died."""
    grace = older_than or 0
    with _existing(ctx, name, options) as queue:
        if state in {"completed", "failed"}:
            queue.wait_until_ready()
            before_ms = queue.context.now_ms() - round(grace * 1000)
            jobs = queue.context.run(count_by_score(queue.context.keys, state, "-inf", str(before_ms)))
        else:  # only reading the jobs would show their age
            jobs = queue.get_job_count_by_types(state)
        jobs = jobs if limit is None else min(jobs, limit)
        at_most = "" if state in {"completed", "failed"} else "at most "
        what = f"{at_most}{pluralize(jobs, f'{state} job')} of queue {in_one_line(name)}"
        _remove(ctx, queue, options, what, jobs, lambda: len(queue.clean(grace, limit or 0, state)))


@queue.command("obliterate", short_help="Remove a queue with all its jobs.")
@click.argument("name", metavar="QUEUE")
@click.option("--force", is_flag=True, help="Even if jobs are running.")
@confirmation_options
@operator_options
def obliterate(ctx: click.Context, /, *, name: str, force: bool, **options: Any) -> None:
    """Pause QUEUE and remove it with all its jobs, schedules and events. This cannot be undone."""
    with _existing(ctx, name, options) as queue:
        jobs = sum(queue.get_job_counts().values())
        active = _figures(queue).active
        if active and not force:
            running = f"{pluralize(active, 'running job')} of queue {in_one_line(name)}"
            raise click.ClickException(f"{running}: wait, or pass --force")
        what = f"queue {in_one_line(name)} with {pluralize(jobs, 'job')}"
        _remove(ctx, queue, options, what, jobs, lambda: queue.obliterate(force=force))


def _remove(
    ctx: click.Context, queue: Queue, options: dict[str, Any], what: str, jobs: int, remove: Callable[[], int | None]
) -> None:
    """Ask, and remove jobs, or only say what would be removed; ``remove`` may return how many were."""
    if options["dry_run"]:
        _report(ctx, queue, options, f"Would remove {what}. Nothing was changed.", jobs)
        return
    check_can_ask(f"'queue {ctx.info_name}'", options)
    if not options["yes"]:
        click.confirm(f"Remove {what}?", abort=True, err=True)
    removed = remove()
    if removed is not None:
        what, jobs = f"{pluralize(removed, 'job')} of queue {in_one_line(queue.name)}", removed
    _report(ctx, queue, options, f"Removed {what}", jobs)


@queue.command("limit", short_help="Set the rate limit of a queue.")
@click.argument("name", metavar="QUEUE")
@click.argument("rate", required=False)
@click.option("--remove", is_flag=True, help="Remove the limit.")
@operator_options
def limit(ctx: click.Context, /, *, name: str, rate: str | None, remove: bool, **options: Any) -> None:
    """Show or set how many jobs of QUEUE all workers together acquire: RATE is like 100/m, 10/s or 5/30s."""
    if rate is not None and remove:
        raise click.UsageError("pass a rate or --remove")
    with _existing(ctx, name, options) as queue:
        if rate is not None or remove:
            change_rate_limit(queue, None if rate is None else _limit_of(rate))
        figures = _figures(queue)
        text = "no rate limit"
        if figures.max is not None and figures.duration_ms is not None:
            left = queue.get_rate_limit_ttl()
            reached = f"; reached, free in {duration_text(left)}" if left else ""
            text = f"{pluralize(figures.max, 'job')} per {duration_text(figures.duration_ms / 1000)}{reached}"
        _report(ctx, queue, options, f"Queue {in_one_line(name)}: {text}")


def _limit_of(rate: str) -> RateLimit:
    with suppress(ConfigError):
        if wanted := rate_limits(rate, "RATE").get(EVERY_QUEUE):
            return RateLimit(wanted["max"], wanted["duration"] / 1000)
    raise click.UsageError(
        f"RATE must be a rate such as '100/m', not {rate!r:.200}; to remove the limit, pass --remove"
    )


@queue.command("concurrency", short_help="Set how many jobs of a queue may run.")
@click.argument("name", metavar="QUEUE")
@click.argument("number", type=click.IntRange(min=1), required=False)
@click.option("--remove", is_flag=True, help="Remove the limit.")
@operator_options
def concurrency(ctx: click.Context, /, *, name: str, number: int | None, remove: bool, **options: Any) -> None:
    """Show or set how many jobs of QUEUE may run at a time in all workers together."""
    if number is not None and remove:
        raise click.UsageError("pass a number or --remove")
    with _existing(ctx, name, options) as queue:
        if number is not None:
            queue.set_global_concurrency(number)
        elif remove:
            queue.remove_global_concurrency()
        figures = _figures(queue)
        limit = "no limit" if figures.concurrency is None else f"at most {figures.concurrency}"
        _report(ctx, queue, options, f"Queue {in_one_line(name)}: {limit}, {figures.active} running")
