"""``bulltask job show``: one job, from Redis and from the lake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.job.options import lake_option
from bulltask.cli.loading import some_app
from bulltask.cli.pipeline.options import redis_options
from bulltask.errors import BrokerError, ConfigError

if TYPE_CHECKING:
    from bulltask.app import App
    from bulltask.cli.job.finding import Found
    from bulltask.lake.past import JobHistory

__all__ = ["command"]

EXIT_UNKNOWN: Final = 1


@click.command("show")
@click.argument("job_id", metavar="ID")
@redis_options
@lake_option(required=False)
@click.option("--queue", help="Its queue; needed when jobs of several queues have this id.")
@click.option("--no-redis", is_flag=True, help="Ask the lake alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.pass_context
def command(
    ctx: click.Context, /, *, job_id: str, lake: Path | None, queue: str | None, no_redis: bool, **given: Any
) -> None:
    """Show the job ID: its state, data, result, attempts, events, logs and tracebacks.

    Redis is asked first, in all queues unless --queue says which: those of the app, of the lake and of connected
    workers, then the others. What it has forgotten, and how each attempt went, is in the lake. Exit code 1: nobody
    knows the job.
    """
    if no_redis and lake is None:
        raise click.UsageError("--no-redis leaves the lake alone to ask: say where it is, with --lake")
    found = None if no_redis else _in_redis(some_app(ctx, given), job_id, queue, lake)
    history = None if lake is None else _in_lake(lake, job_id, queue, found)
    if found is None and history is None:
        click.echo(_nobody(job_id, queue, lake, asked_redis=not no_redis), err=True)
        ctx.exit(EXIT_UNKNOWN)
    if given["as_json"]:
        click.echo(json.dumps(_plain(job_id, found, history), indent=2, ensure_ascii=False))
        return
    from bulltask.cli.job.page import page  # noqa: PLC0415 - beside what it shows

    click.echo("\n".join(page(job_id, found, history)))


def _in_redis(app: App, job_id: str, queue: str | None, lake: Path | None) -> Found | None:
    from bulltask.cli.job.finding import find  # noqa: PLC0415 - beside the app

    try:
        return find(app, job_id, queue, () if queue or lake is None else _queues_of(lake))
    except BrokerError as exc:
        if lake is None:
            raise
        click.echo(f"Redis could not be asked, so this is from the lake alone: {exc}", err=True)
        return None
    finally:
        app.close()


def _queues_of(lake: Path) -> list[str]:
    from bulltask.lake import History  # noqa: PLC0415 - slow

    return History(lake).queues()


def _in_lake(lake: Path, job_id: str, queue: str | None, found: Found | None) -> JobHistory | None:
    from bulltask.lake import History  # noqa: PLC0415 - slow

    history = History(lake)
    if found is None:
        return history.job(job_id, queue)
    try:
        return history.job(job_id, found.job.queue)
    except ConfigError:  # the lake has nothing of the queue, which is there all the same
        return None


def _plain(job_id: str, found: Found | None, history: JobHistory | None) -> dict[str, Any]:
    from bulltask.lake.plain import plain  # noqa: PLC0415 - slow

    queue = found.job.queue if found else history and history.queue
    return {"id": job_id, "queue": queue, "redis": found and found.plain(), "history": plain(history)}


def _nobody(job_id: str, queue: str | None, lake: Path | None, *, asked_redis: bool) -> str:
    """Say who was asked, and what else can be done."""
    asked = [f"Redis ({'queue ' + queue if queue else 'all queues'})"] if asked_redis else []
    if lake is not None:
        verb = "know" if asked else "knows"
        return f"No job {job_id!r}: {' and '.join([*asked, f'the lake {lake}'])} {verb} nothing of it."
    return (
        f"No job {job_id!r}: {asked[0]} knows nothing of it. Jobs that Redis has forgotten are in the lake of "
        "'bulltask pipeline run': say where it is, with --lake."
    )
