"""``bulltask pipeline``: from queues to tables on disk, on Spark.

Modules of commands import neither Spark nor Arrow at their top: ``--help`` needs none of them.
"""

from __future__ import annotations

from typing import Final

import click

from bulltask.cli.lazy import LazyGroup

__all__ = ["COMMANDS", "command"]

COMMANDS: Final = {
    "backfill": "bulltask.cli.pipeline.backfill",
    "build": "bulltask.cli.pipeline.build",
    "compact": "bulltask.cli.pipeline.compact",
    "doctor": "bulltask.cli.pipeline.doctor",
    "expire": "bulltask.cli.pipeline.expire",
    "gaps": "bulltask.cli.pipeline.gaps",
    "gather": "bulltask.cli.pipeline.gather",
    "replay": "bulltask.cli.pipeline.replay",
    "report": "bulltask.cli.pipeline.report",
    "run": "bulltask.cli.pipeline.run",
    "snapshot": "bulltask.cli.pipeline.snapshot",
    "status": "bulltask.cli.pipeline.status",
    "submit": "bulltask.cli.pipeline.submit",
}


@click.group("pipeline", cls=LazyGroup, modules=COMMANDS)
def command() -> None:
    """Jobs in, history out: the events and jobs of queues become tables in a directory.

    Needs the extra spark (pip install 'bulltask[spark]') and, where it says so, Java 17.

    A DAY is 2026-11-22, a TIME 2026-11-22 or 2026-11-22T14:00, both UTC. A LENGTH of time is 90 (seconds), 10s, 15m,
    12h or 7d.

    Exit codes of all commands: 0 fine, 1 an error, 2 wrong usage, 3 events were lost and recorded, 4 events were lost
    and --on-loss is fail.
    """
