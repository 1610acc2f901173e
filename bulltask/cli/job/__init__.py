"""``bulltask job``: look at jobs in Redis and in the lake.

The modules of its commands import Arrow only when they need it: ``--help`` and jobs that are in Redis do without.
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


@click.group("job", short_help="Look at jobs in Redis and in the lake.", cls=LazyGroup, modules=COMMANDS)
def command() -> None:
    """Look at jobs, including jobs that Redis no longer has.

    Those are read from the lake that 'bulltask pipeline run' writes, and so are searches. Both need the extra history
    (pip install 'bulltask[history]').
    """
