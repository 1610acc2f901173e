"""``bulltask outbox``: send and count the rows of an app's outboxes."""

from __future__ import annotations

from typing import Any

import click

from bulltask.cli.app_loader import load_tasks
from bulltask.cli.groups import HintGroup
from bulltask.cli.options import app_options
from bulltask.config.process import stop_signals

__all__ = ["outbox"]


@click.group("outbox", cls=HintGroup, short_help="Send and count the rows of an app's outboxes.")
def outbox() -> None:
    """Send and count the rows of an app's outboxes."""


@outbox.command("relay", short_help="Send rows until the process is stopped.")
@app_options
@click.pass_context
def relay(ctx: click.Context, /, **options: Any) -> None:
    """Send the rows of the app's outboxes to Redis until TERM or INT.

    Workers also do this unless the setting worker_outbox_relay is false. Any number of relays may run at the same time.
    """
    from bulltask.observe.log import configure_logging, worker_id  # noqa: PLC0415 - slow
    from bulltask.outbox.outbox import run_relays  # noqa: PLC0415

    app = load_tasks(ctx, options)[1]
    if not app._outboxes:
        raise click.ClickException(
            f"the app {app.name} has no outbox: create an Outbox(app, ...) in a module that the app imports"
        )
    logger = configure_logging(level=app._config.log_level, worker_id=worker_id("relay"))
    with stop_signals() as wait_for_stop:
        logger.info("Outbox relay started", outboxes=len(app._outboxes))
        run_relays(app._outboxes, wait_for_stop, logger)
        logger.info("Outbox relay stopped")
        app.close()


@outbox.command("status", short_help="Count the rows that are waiting.")
@app_options
@click.option("--max-age", type=float, metavar="SECONDS", help="Exit with 1 if a row has waited longer than this.")
@click.pass_context
def status(ctx: click.Context, /, *, max_age: float | None, **options: Any) -> None:
    """For each outbox of the app, print how many rows are waiting, the age of the oldest, and how many have failed.

    Exit codes: 0 (success), 1 (an error, or a row has waited longer than --max-age).
    """
    app = load_tasks(ctx, options)[1]
    late = False
    for number, each in enumerate(app._outboxes):
        backlog = each.backlog()
        click.echo(
            f"outbox {number}: {backlog.waiting} waiting, oldest {backlog.oldest_s:.1f} s, {backlog.failed} failed"
        )
        late |= max_age is not None and backlog.oldest_s > max_age
    ctx.exit(1 if late else 0)
