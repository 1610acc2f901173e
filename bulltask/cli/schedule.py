"""``bulltask schedule``: list, add, pause, run and remove job schedulers."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, Final

import click

from bulltask.cli.app_loader import NotFoundError, existing_queue, load_app_or_broker
from bulltask.cli.groups import HintGroup
from bulltask.cli.job import chosen_queues
from bulltask.cli.options import (
    ExitCode,
    duration_option,
    json_argument,
    moment,
    operator_options,
    queues_option,
)
from bulltask.cli.terminal import (
    ago,
    as_table,
    duration_text,
    echo,
    field_lines,
    in_one_line,
    iso,
    print_json,
    stamp,
    time_of,
)
from bulltask.jobs.schedules import Scheduler
from bulltask.lake.formatting import pluralize
from bulltask.queue import Queue
from bulltask.queue.control import this_user
from bulltask.queue.schedulers import listing_order, pause_text, rule_text
from bulltask.queue.search import LastRun, last_runs, recent_jobs

__all__ = ["schedule"]

_MAX_LISTED: Final = 1_000
_MAX_LAST: Final = 5
_UNKNOWN: Final = "unknown: the schedule does not exist"


@click.group("schedule", cls=HintGroup, short_help="List, add, pause, run and remove schedules.")
def schedule() -> None:
    """List, add, pause, run and remove schedules, which are BullMQ's job schedulers.

    Workers add the schedules in the setting beat_schedule again when they start.
    """


@schedule.command("list", short_help="List schedules, the next one first.")
@queues_option
@operator_options
def list_command(ctx: click.Context, /, *, queues: str | None, **options: Any) -> None:
    """List the schedules of queues, the paused ones last, up to 1,000 of each kind and queue.

    'last' is when the last job finished, or when it started if it runs, or was removed, and 'state' its state. '-' is
    not known, or there was none.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such queue).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        found = [app.queue(name) for name in chosen_queues(app, queues)]
        rows: list[tuple[str, Scheduler, LastRun | None]] = []
        total = 0
        for queue in found:
            paused = queue.schedulers.list_paused()
            items = [*queue.schedulers.list(0, _MAX_LISTED - 1, asc=True), *paused[:_MAX_LISTED]]
            total += queue.schedulers.count() + len(paused)
            runs = queue.context.run(last_runs(queue.context, items)) if items else []
            rows += [(queue.name, *row) for row in zip(items, runs, strict=True)]
        declared = {*(app._config.beat_schedule or ()), *app._periodic_tasks} if queues is None else set[str]()
    rows.sort(key=lambda row: listing_order(row[1]))
    if options["as_json"]:
        print_json({"schedules": [{**_to_json(queue, item), "last": _last_json(last)} for queue, item, last in rows]})
        return
    if rows:
        now = datetime.now(UTC)
        head = ("queue", "id", "task", "rule", "last", "state", "next", "jobs")
        echo(as_table(head, [_row(*row, now) for row in rows]))
    left = f" of {total:,}" if total > len(rows) else ""
    echo(f"{pluralize(len(rows), 'schedule')}{left} in {pluralize(len(found), 'queue')}", err=True)
    missing = sorted(declared - {item.id for _, item, _ in rows})
    if missing and not left:
        names = in_one_line(", ".join(missing), 1_000)
        echo(
            f"{pluralize(len(missing), 'schedule')} of the app, which a worker stores when it starts: {names}", err=True
        )


@schedule.command("show", short_help="Show a schedule and its last jobs.")
@click.argument("queue", metavar="QUEUE")
@click.argument("scheduler_id", metavar="ID")
@operator_options
def show(ctx: click.Context, /, *, queue: str, scheduler_id: str, **options: Any) -> None:
    """Show the schedule ID of QUEUE, its last job, and others among the newest 1,000 finished ones of the queue.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such schedule).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        found = existing_queue(app, queue)
        item = found.schedulers.get(scheduler_id)
        if item is None:
            raise _missing(found, scheduler_id)
        (newest,) = found.context.run(last_runs(found.context, [item]))
        last = found.context.run(recent_jobs(found.context, scheduler_id, _MAX_LAST))
    if options["as_json"]:
        jobs = [
            {"id": job.id, "state": job.state, "finished_at": iso(job.since_ms), "failed_reason": job.reason or None}
            for job in last
        ]
        print_json({**_to_json(found.name, item), "last": _last_json(newest), "last_jobs": jobs})
        return
    now = datetime.now(UTC)
    next_at = time_of(item.next_ms)
    fields = {
        "rule": _rule(item),
        "task": item.name,
        "next": _paused(item) or ("-" if next_at is None else f"{stamp(next_at)} ({ago(next_at, now)})"),
        "start": item.start_ms and stamp(time_of(item.start_ms)),
        "end": item.end_ms and stamp(time_of(item.end_ms)),
        "limit": item.limit,
        "jobs": item.iterations,
        "data": json.dumps(item.data, ensure_ascii=False),
        "options": json.dumps(dict(item.opts), ensure_ascii=False),
    }
    echo(f"{in_one_line(item.id)}, queue {in_one_line(found.name)}")
    runs = [
        ("last", f"{stamp(time_of(job.since_ms))}  {job.state}{job.reason and f': {in_one_line(job.reason)}'}")
        for job in last
    ]
    if newest is not None and newest.id not in {job.id for job in last}:
        runs.insert(0, ("last", f"{stamp(time_of(newest.at_ms))}  {newest.state}"))
    echo("\n".join(field_lines([*fields.items(), *runs])))


@schedule.command("add", short_help="Create or update a schedule.")
@click.argument("queue", metavar="QUEUE")
@click.argument("scheduler_id", metavar="ID")
@duration_option("--every", text="Time between jobs: 90, 10s, 15m, 12h or 7d.")
@click.option("--cron", metavar="PATTERN", help="A cron pattern with 5 fields, or 6 with seconds: '0 3 * * mon-fri'.")
@click.option("--tz", metavar="ZONE", help="The pattern's time zone (default: the setting timezone, or UTC).")
@click.option("--task", metavar="NAME", help="The task (default: ID).")
@click.option(
    "--data", metavar="JSON", help="The jobs' data: an object has the task's keyword arguments (default: {})."
)
@click.option("--start", type=moment, metavar="TIME", help="No job runs before this time: 2026-11-22T14:00, in UTC.")
@click.option("--end", type=moment, metavar="TIME", help="No job runs after this time.")
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number of jobs.")
@operator_options
def add(ctx: click.Context, /, *, queue: str, scheduler_id: str, **options: Any) -> None:
    """Create the schedule ID in QUEUE, or update it; a paused one stays paused.

    Exit codes: 0 (done), 1 (an error), 2 (invalid usage), 3 (nothing was added, because no time matches).
    """
    if (options["every"] is None) == (options["cron"] is None):
        raise click.UsageError("pass either --every or --cron")
    rule = {name: options[name] for name in ("every", "cron", "tz", "start", "end", "limit")}
    with closing(load_app_or_broker(ctx, options)) as app:
        found = app.queue(queue)
        item = found.schedulers.upsert(
            scheduler_id, name=options["task"], data=json_argument(options["data"], "--data", {}), **rule
        )
    if options["as_json"]:
        print_json(None if item is None else _to_json(found.name, item))
    elif item is None:
        echo(f"{in_one_line(scheduler_id)}  not added: there is no further time", err=True)
    else:
        echo(f"{in_one_line(item.id)}  added: {in_one_line(_rule(item))}, {_next(item)}")
    ctx.exit(ExitCode.PENDING if item is None else ExitCode.DONE)


@schedule.command("pause", short_help="Let schedules add no more jobs.")
@click.argument("queue", metavar="QUEUE")
@click.argument("scheduler_ids", metavar="ID...", nargs=-1, required=True)
@click.option("--by", help="Who pauses them, for 'bulltask schedule list' (default: you and this host).")
@operator_options
def pause(ctx: click.Context, /, *, queue: str, scheduler_ids: tuple[str, ...], by: str | None, **options: Any) -> None:
    """Let the schedules ID of QUEUE add no jobs until they are resumed; jobs that are waiting or running stay.

    BullMQ has no pause: Node.js does not see the schedules meanwhile.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such schedule).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        found = existing_queue(app, queue)
        items = {name: found.schedulers.pause(name, by=by or this_user()) for name in scheduler_ids}
    _report(ctx, items, options)


@schedule.command("resume", short_help="Let paused schedules add jobs again.")
@click.argument("queue", metavar="QUEUE")
@click.argument("scheduler_ids", metavar="ID...", nargs=-1, required=True)
@operator_options
def resume(ctx: click.Context, /, *, queue: str, scheduler_ids: tuple[str, ...], **options: Any) -> None:
    """Let the schedules ID of QUEUE add jobs again, at their next regular times; the times missed are skipped.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such schedule).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        found = existing_queue(app, queue)
        paused = {name for name in scheduler_ids if (item := found.schedulers.get(name)) and item.paused_ms is not None}
        items = {name: found.schedulers.resume(name) for name in scheduler_ids}
    _report(ctx, items, options, paused)


@schedule.command("run", short_help="Run a schedule's task now, too.")
@click.argument("queue", metavar="QUEUE")
@click.argument("scheduler_id", metavar="ID")
@operator_options
def run(ctx: click.Context, /, *, queue: str, scheduler_id: str, **options: Any) -> None:
    """Add a job with the name, data and options of the schedule ID of QUEUE; its next time does not change.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such schedule).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        found = existing_queue(app, queue)
        job = found.schedulers.run_now(scheduler_id)
    if job is None:
        raise _missing(found, scheduler_id)
    if options["as_json"]:
        print_json({"id": job.id, "queue": job.queue})
    else:
        echo(job.id)


@schedule.command("remove", short_help="Remove schedules and their next jobs.")
@click.argument("queue", metavar="QUEUE")
@click.argument("scheduler_ids", metavar="ID...", nargs=-1, required=True)
@operator_options
def remove(ctx: click.Context, /, *, queue: str, scheduler_ids: tuple[str, ...], **options: Any) -> None:
    """Remove the schedules ID of QUEUE with their next jobs; jobs that are waiting or running stay.

    A worker adds a schedule of beat_schedule again when it starts.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such schedule).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        found = existing_queue(app, queue)
        removed = {scheduler_id: found.schedulers.remove(scheduler_id) for scheduler_id in scheduler_ids}
    if options["as_json"]:
        print_json({"schedules": [{"id": name, "removed": was_there} for name, was_there in removed.items()]})
    else:
        for name, was_there in removed.items():
            echo(f"{in_one_line(name)}  {'removed' if was_there else _UNKNOWN}")
    ctx.exit(ExitCode.DONE if all(removed.values()) else ExitCode.NOT_FOUND)


def _report(
    ctx: click.Context, items: dict[str, Scheduler | None], options: dict[str, Any], resumed: Collection[str] = ()
) -> None:
    """Print schedules that were paused or resumed."""
    if options["as_json"]:
        print_json({"schedules": [_pause_json(name, item) for name, item in items.items()]})
    else:
        for name, item in items.items():
            text = _UNKNOWN if item is None else _next(item)
            if item is not None and item.paused_ms is None:
                text = f"{'resumed' if name in resumed else 'was not paused'}, {text}"
            echo(f"{in_one_line(name)}  {text}")
    ctx.exit(ExitCode.NOT_FOUND if None in items.values() else ExitCode.DONE)


def _missing(queue: Queue, scheduler_id: str) -> NotFoundError:
    return NotFoundError(in_one_line(f"queue {queue.name!r} has no schedule {scheduler_id!r}"))


def _rule(item: Scheduler) -> str:
    return rule_text(item, lambda ms: duration_text(ms / 1000))


def _paused(item: Scheduler) -> str:
    return in_one_line(pause_text(item, lambda ms: stamp(time_of(ms))))


def _next(item: Scheduler) -> str:
    return _paused(item) or f"next {stamp(time_of(item.next_ms))}"


def _row(queue: str, item: Scheduler, last: LastRun | None, now: datetime) -> tuple[str, ...]:
    times = time_of(last and last.at_ms), time_of(item.next_ms)
    last_at, next_at = ("-" if moment is None else ago(moment, now) for moment in times)
    texts = map(in_one_line, (queue, item.id, item.name, _rule(item)))
    return (*texts, last_at, "-" if last is None else last.state, _paused(item) or next_at, f"{item.iterations:,}")


def _last_json(last: LastRun | None) -> dict[str, Any] | None:
    return None if last is None else {"at": iso(last.at_ms), "id": last.id or None, "state": last.state}


def _pause(item: Scheduler) -> dict[str, Any]:
    return {
        "next_at": iso(item.next_ms) if item.paused_ms is None else None,
        "paused": item.paused_ms is not None,
        "paused_by": item.paused_by,
        "paused_at": iso(item.paused_ms),
    }


def _pause_json(scheduler_id: str, item: Scheduler | None) -> dict[str, Any]:
    nothing = {"next_at": None, "paused": None, "paused_by": None, "paused_at": None}
    return {"id": scheduler_id, "found": item is not None, **(nothing if item is None else _pause(item))}


def _to_json(queue: str, item: Scheduler) -> dict[str, Any]:
    return {
        "queue": queue,
        "id": item.id,
        "task": item.name,
        "every": None if item.every_ms is None else item.every_ms / 1000,
        "cron": item.pattern,
        "tz": item.tz,
        **_pause(item),
        "start_at": iso(item.start_ms),
        "end_at": iso(item.end_ms),
        "limit": item.limit,
        "iterations": item.iterations,
        "data": item.data,
    }
