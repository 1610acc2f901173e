"""``bulltask outbox``: send and count the rows of an app's outboxes."""

from __future__ import annotations

from typing import Final

import click

from bulltask.cli.lazy import LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS: Final = {
    "relay": "bulltask.cli.outbox.relay",
    "status": "bulltask.cli.outbox.status",
}


@click.group("outbox", short_help="Send and count the rows of an app's outboxes.", cls=LazyGroup, modules=COMMANDS)
def command() -> None:
    """Send and count the rows of an app's outboxes."""
