"""``bulltask job``: show a job from Redis and from the lake.

The command's module imports Arrow only on use, because ``--help`` and jobs that are in Redis do not need it.
"""

from __future__ import annotations

from typing import Final

import click

from bulltask.cli.lazy import LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS: Final = {
    "show": "bulltask.cli.job.show",
}


@click.group("job", short_help="Show a job from Redis and from the data lake.", cls=LazyGroup, modules=COMMANDS)
def command() -> None:
    """Show a job, even if it is no longer in Redis.

    Removed jobs are read from the data lake that 'bulltask pipeline run' writes. This requires the history extra
    (pip install 'bulltask[history]'). To search for jobs in the lake, use 'bulltask history search'.
    """
