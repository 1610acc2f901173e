"""``bulltask pipeline``: record the events of queues in a lake of tables, with Spark.

The commands' modules import Spark and Arrow only when they need them, so ``--help`` works without them.
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
    "enqueue": "bulltask.cli.pipeline.enqueue",
    "expire": "bulltask.cli.pipeline.expire",
    "gaps": "bulltask.cli.pipeline.gaps",
    "gather": "bulltask.cli.pipeline.gather",
    "replay": "bulltask.cli.pipeline.replay",
    "report": "bulltask.cli.pipeline.report",
    "run": "bulltask.cli.pipeline.run",
    "snapshot": "bulltask.cli.pipeline.snapshot",
    "status": "bulltask.cli.pipeline.status",
}


@click.group(
    "pipeline", short_help="Record the events of queues in a lake, with Spark.", cls=LazyGroup, modules=COMMANDS
)
def command() -> None:
    """Record the events and jobs of queues in a lake: a directory of Parquet tables.

    The bronze tables contain the raw events, silver contains jobs and attempts, gold contains statistics by minute and
    day.

    Requires the spark extra (pip install 'bulltask[spark]') and Java 17 or newer, unless a command says otherwise.

    Formats: DAY is 2026-11-22, TIME is 2026-11-22 or 2026-11-22T14:00, both in UTC. DURATION is 90 (seconds), 10s, 15m,
    12h or 7d.

    Exit codes of all commands: 0 (success), 1 (an error, or a failed check), 2 (invalid usage), 3 (events were lost,
    and the loss is recorded), 4 (events were lost, and --on-loss is fail).
    """
