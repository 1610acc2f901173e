"""``bulltask revoke``: jobs that are not to run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import click

from bulltask.cli.loading import some_app
from bulltask.cli.pipeline.options import redis_options
from bulltask.errors import JobError
from bulltask.jobs.states import Revocation

if TYPE_CHECKING:
    from bulltask.app import App

__all__ = ["command"]

EXIT_REFUSED: Final = 1
EXIT_RUNNING: Final = 3
EXIT_UNKNOWN: Final = 4

_SAID: Final = {
    Revocation.REVOKED: "revoked: it has failed, and does not run",
    Revocation.RUNNING: "running: it goes on; --terminate has its worker end it",
    Revocation.TERMINATING: "terminating: its worker ends it",
    Revocation.FINISHED: "finished: it had ended before",
    Revocation.UNKNOWN: "unknown: there is no such job",
}
_EXITS: Final = {Revocation.RUNNING: EXIT_RUNNING, Revocation.UNKNOWN: EXIT_UNKNOWN}


@click.command("revoke")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@redis_options
@click.option("-q", "--queue", help="The jobs' queue; needed when jobs of several queues have one id.")
@click.option("--terminate", is_flag=True, help="End a job that runs, too.")
@click.pass_context
def command(
    ctx: click.Context, /, *, job_ids: tuple[str, ...], queue: str | None, terminate: bool, **given: Any
) -> None:
    """Have the jobs ID... not run: each fails now, as revoked, and is not retried.

    Without --queue they are looked for in all queues: those of the app and of connected workers first, then the others.

    Exit codes: 0 each has ended, or its worker ends it; 1 an error, or one was refused; 3 one runs and goes on; 4 there
    is no job of one id. Where several hold, the smallest.
    """
    app = some_app(ctx, given)
    try:
        codes = {_revoke(app, job_id, queue, terminate=terminate) for job_id in job_ids}
    finally:
        app.close()
    ctx.exit(min(codes - {0}, default=0))


def _revoke(app: App, job_id: str, queue: str | None, *, terminate: bool) -> int:
    """Revoke one job and say what became of it; its exit code."""
    try:
        place = queue or _queue_of(app, job_id)
        found = app.queue(place).revoke(job_id, terminate=terminate) if place else Revocation.UNKNOWN
    except JobError as exc:
        click.echo(f"{job_id}  refused: {exc}", err=True)
        return EXIT_REFUSED
    click.echo(f"{job_id}  {_SAID[found]}")
    return _EXITS.get(found, 0)


def _queue_of(app: App, job_id: str) -> str | None:
    from bulltask.cli.job.finding import holding  # noqa: PLC0415 - slow

    names = holding(app, job_id)
    if len(names) > 1:
        raise click.UsageError(
            f"there is a job {job_id!r} in each of the queues {', '.join(names)}: say which with --queue"
        )
    return names[0] if names else None
