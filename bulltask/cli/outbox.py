"""``bulltask outbox``: send and count the rows of an app's outboxes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import click

from bulltask.cli.app_loader import load_tasks
from bulltask.cli.groups import HintGroup
from bulltask.cli.options import app_options, json_option
from bulltask.cli.terminal import echo, in_one_line, print_json
from bulltask.config.process import stop_signals
from bulltask.config.urls import redact_secrets

__all__ = ["outbox", "outbox_json", "outbox_line"]


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
    config = app._config
    logger = configure_logging(level=config.log_level, worker_id=worker_id("relay"), log_format=config.log_format)
    with stop_signals() as wait_for_stop:
        logger.info("Outbox relay started", outboxes=len(app._outboxes))
        run_relays(app._outboxes, wait_for_stop, logger)
        logger.info("Outbox relay stopped")
        app.close()


@outbox.command("status", short_help="Count the rows that are waiting.")
@app_options
@click.option("--max-age", type=float, metavar="SECONDS", help="Exit with 1 if a row has waited longer than this.")
@json_option
@click.pass_context
def status(ctx: click.Context, /, *, max_age: float | None, as_json: bool, **options: Any) -> None:
    """For each outbox of the app, print how many rows are waiting, the age of the oldest, and how many have failed.

    The first failed rows are shown with their errors.

    Exit codes: 0 (success), 1 (an error, or a row has waited longer than --max-age).
    """
    app = load_tasks(ctx, options)[1]
    backlogs = [outbox.backlog() for outbox in app._outboxes]
    if as_json:
        print_json({"outboxes": list(map(outbox_json, backlogs))})
    else:
        for number, each in enumerate(backlogs):
            click.echo(outbox_line(number, outbox_json(each)))
            for line in _failed_rows(each):
                echo(line)
    ctx.exit(1 if any(max_age is not None and each.oldest_s > max_age for each in backlogs) else 0)


def outbox_json(backlog: Any) -> dict[str, Any]:
    """Return an outbox's backlog as a JSON document has it."""
    errors = {row_id: redact_secrets(error) for row_id, error in backlog.errors.items()}
    return {"waiting": backlog.waiting, "oldest": backlog.oldest_s, "failed": backlog.failed, "errors": errors}


def outbox_line(number: int, row: Mapping[str, Any]) -> str:
    """Return a line with the counts in an :func:`outbox_json`."""
    return f"outbox {number}: {row['waiting']} waiting, oldest {row['oldest']:.1f} s, {row['failed']} failed"


def _failed_rows(backlog: Any) -> Iterator[str]:
    for row_id, error in backlog.errors.items():
        yield f"  row {row_id} of {backlog.table} failed: {in_one_line(redact_secrets(error), 300)}"
    if backlog.errors:
        update = f"UPDATE {backlog.table} SET error = NULL WHERE error IS NOT NULL;"  # noqa: S608 - is only printed
        yield f"  To send failed rows again, after you have fixed the cause: {update}"
