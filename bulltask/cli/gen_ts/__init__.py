"""``bulltask gen-ts``: write a typed TypeScript client for an app."""

from __future__ import annotations

from typing import IO, Any

import click

from bulltask.cli.app_loader import load_tasks
from bulltask.cli.gen_ts.client import client_source
from bulltask.cli.options import app_options

__all__ = ["command"]


@click.command("gen-ts", short_help="Write a typed TypeScript client for an app.")
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.File("w", "utf-8", lazy=True),
    help="File to write, or - for standard output.",
)
@app_options
@click.pass_context
def command(ctx: click.Context, /, *, output: IO[str], **options: Any) -> None:
    """Write a TypeScript module with a client for the app's tasks. The client uses the npm package bullmq.

    The types of the tasks' arguments and results are those of the type hints, so a call that does not match is a
    compile-time error. Run the command again after you change a task.
    """
    spec, app = load_tasks(ctx, options)
    output.write(client_source(app, spec))
