"""``bulltask tasks schema``: print the JSON Schema of an app's tasks."""

from __future__ import annotations

import json
from typing import Any

import click

from bulltask.cli.app_loader import load_tasks
from bulltask.cli.options import app_options
from bulltask.registry.tasks import schema_of

__all__ = ["command"]


@click.command("schema", short_help="Print the JSON Schema of tasks.")
@click.argument("names", metavar="[TASK]...", nargs=-1)
@app_options
@click.pass_context
def command(ctx: click.Context, /, *, names: tuple[str, ...], **options: Any) -> None:
    """Print a JSON document with the JSON Schema of each TASK, by default of all tasks of the app.

    For each task, it contains the schemas of a job's data and return value, derived from the type hints, and its
    queue's name in BullMQ.
    """
    app = load_tasks(ctx, options)[1]
    tasks = [app.tasks[name] for name in names] or list(app.tasks.values())
    click.echo(json.dumps(schema_of(tasks, app._config), indent=2, ensure_ascii=False))
