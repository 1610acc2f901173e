"""``bulltask outbox relay``: send the rows of an app's outboxes."""

from __future__ import annotations

from typing import Any

import click

from bulltask.cli.app_loader import load_tasks
from bulltask.cli.options import app_options
from bulltask.config.process import stop_signals

__all__ = ["command"]


@click.command("relay", short_help="Send rows until the process is stopped.")
@app_options
@click.pass_context
def command(ctx: click.Context, /, **options: Any) -> None:
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
