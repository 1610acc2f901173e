"""``bulltask revoke``: prevent jobs from running, or cancel running jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.options import redis_options
from bulltask.cli.terminal import echo, in_one_line
from bulltask.jobs.errors import JobError
from bulltask.jobs.names import Revocation

if TYPE_CHECKING:
    from bulltask.app import App

__all__ = ["command"]

EXIT_REJECTED: Final = 1
EXIT_RUNNING: Final = 3
EXIT_UNKNOWN: Final = 4

_MESSAGES: Final = {
    Revocation.REVOKED: "revoked: the job has failed and will not run",
    Revocation.RUNNING: "running: the job continues; use --terminate to cancel it",
    Revocation.TERMINATING: "terminating: the job's worker will cancel it",
    Revocation.FINISHED: "finished: the job had already finished",
    Revocation.UNKNOWN: "unknown: the job does not exist",
}
_EXITS: Final = {Revocation.RUNNING: EXIT_RUNNING, Revocation.UNKNOWN: EXIT_UNKNOWN}


@click.command("revoke", short_help="Prevent jobs from running, or cancel running jobs.")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@redis_options
@click.option("-q", "--queue", help="The jobs' queue; required if several queues have a job with this id.")
@click.option("--terminate", is_flag=True, help="Also cancel jobs that are running.")
@click.pass_context
def command(
    ctx: click.Context, /, *, job_ids: tuple[str, ...], queue: str | None, terminate: bool, **options: Any
) -> None:
    """Revoke jobs by ID, so that they do not run and are not retried.

    A job that has not started fails immediately, with the reason 'revoked'. A running job continues, unless
    --terminate is given.

    Without --queue, all queues are searched: those of the app and of connected workers first, then the others.

    Exit codes: 0 (each job has finished, or its worker will cancel it), 1 (an error, or a job cannot be revoked), 3 (a
    job is still running), 4 (a job does not exist). If several apply, the smallest one other than 0 is used.
    """
    app = load_app_or_broker(ctx, options)
    try:
        codes = {_revoke(app, job_id, queue, terminate=terminate) for job_id in job_ids}
    finally:
        app.close()
    ctx.exit(min(codes - {0}, default=0))


def _revoke(app: App, job_id: str, queue: str | None, *, terminate: bool) -> int:
    """Revoke one job, print the outcome, and return the exit code."""
    try:
        name = queue or _queue_of(app, job_id)
        outcome = app.queue(name).revoke(job_id, terminate=terminate) if name else Revocation.UNKNOWN
    except JobError as exc:
        echo(f"{in_one_line(job_id)}  rejected: {exc}", err=True)
        return EXIT_REJECTED
    echo(f"{in_one_line(job_id)}  {_MESSAGES[outcome]}")
    return _EXITS.get(outcome, 0)


def _queue_of(app: App, job_id: str) -> str | None:
    from bulltask.cli.job_lookup import ambiguous, queues_with_job  # noqa: PLC0415 - slow

    names = queues_with_job(app, job_id)
    if len(names) > 1:
        raise ambiguous(job_id, names)
    return names[0] if names else None
