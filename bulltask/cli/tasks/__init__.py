"""``bulltask tasks``: describe the tasks of an app."""

from __future__ import annotations

from typing import Final

import click

from bulltask.cli.lazy import LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS: Final = {
    "schema": "bulltask.cli.tasks.schema",
}


@click.group("tasks", short_help="Describe the tasks of an app.", cls=LazyGroup, modules=COMMANDS)
def command() -> None:
    """Describe the tasks of an app; no server is needed."""
