"""``bulltask outbox status``: count the rows of an app's outboxes."""

from __future__ import annotations

from typing import Any, Final

import click

from bulltask.cli.app_loader import load_tasks
from bulltask.cli.options import app_options

__all__ = ["command"]

_EXIT_LATE: Final = 1


@click.command("status", short_help="Count the rows that are waiting.")
@app_options
@click.option("--max-age", type=float, metavar="SECONDS", help="Exit with 1 if a row has waited longer than this.")
@click.pass_context
def command(ctx: click.Context, /, *, max_age: float | None, **options: Any) -> None:
    """For each outbox of the app, print how many rows are waiting, the age of the oldest, and how many have failed.

    Exit codes: 0 (success), 1 (an error, or a row has waited longer than --max-age).
    """
    app = load_tasks(ctx, options)[1]
    late = False
    for number, outbox in enumerate(app._outboxes):
        backlog = outbox.backlog()
        click.echo(
            f"outbox {number}: {backlog.waiting} waiting, oldest {backlog.oldest_s:.1f} s, {backlog.failed} failed"
        )
        late |= max_age is not None and backlog.oldest_s > max_age
    ctx.exit(_EXIT_LATE if late else 0)
