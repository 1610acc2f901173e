"""``bulltask job``: show jobs from Redis and from the lake.

The modules of its commands import Arrow only on use: ``--help`` and jobs that are in Redis do not need it.
"""

from __future__ import annotations

from typing import Final

import click

from bulltask.cli.lazy import LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS: Final = {
    "list": "bulltask.cli.job.list",
    "serve": "bulltask.cli.job.serve",
    "show": "bulltask.cli.job.show",
}


@click.group("job", short_help="Show jobs from Redis and from the lake.", cls=LazyGroup, modules=COMMANDS)
def command() -> None:
    """Show jobs, including jobs that Redis no longer has.

    Removed jobs and searches are read from the lake that 'bulltask pipeline run' writes, which needs the extra history
    (pip install 'bulltask[history]').
    """
