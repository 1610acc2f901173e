"""``bulltask history``: search the jobs in the lake, and serve them over HTTP. Does not require Redis.

The commands import Arrow only when they run, so ``--help`` works without it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any

import click

from bulltask.cli.groups import HintGroup
from bulltask.cli.options import json_option, lake_option, queue_option, time_or_age
from bulltask.cli.terminal import as_table, duration_text, in_one_line, print_json, stamp
from bulltask.config.process import stop_signals

if TYPE_CHECKING:
    from bulltask.lake.records import JobRecord
    from bulltask.lake.storage import Lake


@click.group("history", cls=HintGroup, short_help="Search the data lake for finished or removed jobs.")
def history() -> None:
    """Search for finished or removed jobs, including jobs that are no longer in Redis.

    The jobs are read from the data lake that 'bulltask pipeline run' writes. Requires the history extra
    (pip install 'bulltask[history]'), but neither Redis nor Java. To show a single job, use 'bulltask job show'.
    """


@history.command("search", short_help="Search for finished or removed jobs.")
@lake_option(of_one=True)
@queue_option("Only jobs in this queue.")
@click.option("--name", help="Only jobs with this task name.")
@click.option(
    "--state",
    help="Only jobs in this state: completed, failed or removed; or, for unfinished jobs that timed out"
    " (open_job_timeout), their last state: waiting, active, delayed or waiting-children.",
)
@click.option(
    "--since",
    type=time_or_age,
    metavar="TIME",
    help="Only jobs that ended at or after this time: 2026-11-22, 2026-11-22T14:00 (UTC), or 1d (one day ago).",
)
@click.option("--until", type=time_or_age, metavar="TIME", help="Only jobs that ended before this time.")
@click.option("--text", help="Only jobs whose failure reason contains this text, ignoring case.")
@click.option(
    "--error-fingerprint", help="Only failures with this error_fingerprint: the reason without its variable parts."
)
@click.option("--limit", type=int, default=20, show_default=True, help="Jobs per page, up to 1,000.")
@click.option("--cursor", help="Show the page after this cursor, which the previous page printed.")
@json_option
def search(*, lake: Lake, limit: int, cursor: str | None, as_json: bool, **filters: Any) -> None:
    """Search for finished or removed jobs, latest first. A job must match all filters.

    The search includes unfinished jobs that timed out (open_job_timeout). Only the latest state of a job
    matters: a job that failed and was completed by a later retry counts as completed.
    """
    from bulltask.lake import History  # noqa: PLC0415 - slow
    from bulltask.lake.records import to_json  # noqa: PLC0415 - slow

    page = History(lake).search(limit=limit, cursor=cursor, **filters)
    if as_json:
        print_json(to_json(page))
        return
    if not page.jobs:
        click.echo("No jobs found.")
        return
    head = ("ended (UTC)", "state", "queue", "name", "id", "attempts", "ran", "reason")
    click.echo(as_table(head, [_row(job) for job in page.jobs]))
    if page.cursor:
        click.echo(f"\nFor more, run the command again with --cursor {page.cursor}")


def _row(job: JobRecord) -> tuple[str, ...]:
    attempts = "-" if job.attempt_count is None else str(job.attempt_count)
    reason = in_one_line(job.failed_reason or "", 80)
    texts = (in_one_line(text) for text in (job.queue, job.name or "-", job.id))
    return (stamp(job.seen_at), job.state, *texts, attempts, duration_text(job.run_time), reason)


@history.command("serve", short_help="Serve the history as JSON over HTTP.")
@lake_option(of_one=True)
@click.option("--port", type=click.IntRange(0, 65_535), default=3001, show_default=True, help="TCP port on 127.0.0.1.")
def serve(*, lake: Lake, port: int) -> None:
    """Serve the lake's history as JSON over HTTP until Ctrl-C.

    It listens on 127.0.0.1 only, without authentication, so any user on this machine can read it. Paths: /search,
    /job, /job-counts, /attempt-counts, /latency.
    """
    from bulltask.lake import History  # noqa: PLC0415 - slow
    from bulltask.lake.serving import HistoryServer  # noqa: PLC0415 - slow

    with stop_signals(hangup=True) as wait_for_stop, HistoryServer(History(lake), port) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        click.echo(f"history: {server.url} serves {lake.root}")
        wait_for_stop()
        server.shutdown()
