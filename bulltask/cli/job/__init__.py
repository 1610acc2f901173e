"""``bulltask job``: one job or many, from Redis and from the lake of the data pipeline.

Modules of commands do not import Arrow at their top: ``--help`` and a job that Redis still has need none.
"""

from __future__ import annotations

from typing import Final

import click

from bulltask.cli.lazy import LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS: Final = {
    "list": "bulltask.cli.job.search",
    "serve": "bulltask.cli.job.serve",
    "show": "bulltask.cli.job.show",
}


@click.group("job", cls=LazyGroup, modules=COMMANDS)
def command() -> None:
    """Look at jobs, also at those that Redis has forgotten.

    For those, and to search, it needs the tables that 'bulltask pipeline run' writes, and the extra history (pip
    install 'bulltask[history]').
    """
