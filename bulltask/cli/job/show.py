"""``bulltask job show``: show a job, from Redis and from the lake."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.options import job_lake_option, redis_options
from bulltask.cli.terminal import echo
from bulltask.jobs.errors import BrokerError, ConfigError
from bulltask.lake.formatting import json_text

if TYPE_CHECKING:
    from bulltask.app import App
    from bulltask.cli.job_lookup import FoundJob
    from bulltask.lake.records import JobHistory

__all__ = ["command"]

EXIT_UNKNOWN: Final = 1


@click.command("show", short_help="Show a job by ID.")
@click.argument("job_id", metavar="ID")
@redis_options
@job_lake_option(required=False)
@click.option("--queue", help="The job's queue; required if several queues have a job with this id.")
@click.option("--no-redis", is_flag=True, help="Read the lake only.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context, /, *, job_id: str, lake: Path | None, queue: str | None, no_redis: bool, **options: Any
) -> None:
    """Show a job by ID: its state, data, result, attempts, events, logs and tracebacks.

    Redis is searched first. Without --queue, all queues are searched: those of the app, the lake and connected workers
    first, then the others. The lake adds jobs that Redis no longer has, and the history of each attempt.

    Exit codes: 0 (the job was found), 1 (it was not found, or an error).
    """
    if no_redis and lake is None:
        raise click.UsageError("--no-redis needs --lake")
    job = None if no_redis else _in_redis(load_app_or_broker(ctx, options), job_id, queue, lake)
    history = None if lake is None else _in_lake(lake, job_id, queue, job)
    if job is None and history is None:
        echo(_not_found(job_id, queue, lake, searched_redis=not no_redis), err=True)
        ctx.exit(EXIT_UNKNOWN)
    if options["as_json"]:
        click.echo(json_text(_to_json(job_id, job, history)))
        return
    from bulltask.cli.job.show_page import page  # noqa: PLC0415 - slow

    echo("\n".join(page(job_id, job, history)))


def _in_redis(app: App, job_id: str, queue: str | None, lake: Path | None) -> FoundJob | None:
    from bulltask.cli.job_lookup import find_job  # noqa: PLC0415 - slow

    try:
        return find_job(app, job_id, queue, () if queue or lake is None else _queues_of(lake))
    except BrokerError as exc:
        if lake is None:
            raise
        echo(f"Redis is not available; showing the lake only: {exc}", err=True)
        return None
    finally:
        app.close()


def _queues_of(lake: Path) -> list[str]:
    from bulltask.lake import History  # noqa: PLC0415 - slow

    return History(lake).queues()


def _in_lake(lake: Path, job_id: str, queue: str | None, redis_job: FoundJob | None) -> JobHistory | None:
    from bulltask.lake import History  # noqa: PLC0415 - slow

    history = History(lake)
    if redis_job is None:
        return history.job(job_id, queue)
    try:
        return history.job(job_id, redis_job.job.queue)
    except ConfigError:  # Redis has the queue, but the lake has no data for it yet
        return None


def _to_json(job_id: str, redis_job: FoundJob | None, history: JobHistory | None) -> dict[str, Any]:
    from bulltask.lake.records import to_json  # noqa: PLC0415 - slow

    queue = redis_job.job.queue if redis_job else history and history.queue
    return {"id": job_id, "queue": queue, "redis": redis_job and redis_job.to_json(), "history": to_json(history)}


def _not_found(job_id: str, queue: str | None, lake: Path | None, *, searched_redis: bool) -> str:
    searched = [f"Redis ({'queue ' + queue if queue else 'all queues'})"] if searched_redis else []
    if lake is not None:
        return f"Job {job_id!r} not found in {' or '.join([*searched, f'the lake {lake}'])}."
    return f"Job {job_id!r} not found in {searched[0]}. To search for jobs that Redis no longer has, pass --lake."
