"""``bulltask history``: search the jobs in the lake, and serve them over HTTP. Does not require Redis.

The modules of its commands import Arrow only on use, so ``--help`` works without it.
"""

from __future__ import annotations

from typing import Final

import click

from bulltask.cli.lazy import LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS: Final = {
    "search": "bulltask.cli.history.search",
    "serve": "bulltask.cli.history.serve",
}


@click.group(
    "history", short_help="Search the data lake for finished or removed jobs.", cls=LazyGroup, modules=COMMANDS
)
def command() -> None:
    """Search for finished or removed jobs, including jobs that are no longer in Redis.

    The jobs are read from the data lake that 'bulltask pipeline run' writes. Requires the history extra
    (pip install 'bulltask[history]'), but neither Redis nor Java. To show a single job, use 'bulltask job show'.
    """
