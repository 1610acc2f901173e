"""Names of queues that somebody asks a lake for: how the lake spells them, and what to say of one that it has not."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Final

from bulltask.errors import ConfigError, did_you_mean
from bulltask.lake.read import TableReader
from bulltask.lake.tables import ATTEMPTS, EVENTS, GAPS, JOBS, SNAPSHOTS

__all__ = ["check_queues", "known_queues", "spelled"]

_NAMED: Final = 8
"""So many queues a message names."""


def known_queues(reader: TableReader) -> set[str]:
    """Return the queues that bronze and silver have something of; gold may have been kept for longer."""
    return {name for table in (EVENTS, ATTEMPTS, JOBS, SNAPSHOTS, GAPS) for name in reader.queues(table)}


def spelled(queue: str, known: Collection[str]) -> str:
    """Return the lake's spelling of a queue: ``mail`` for BullMQ's ``{mail}``, unless the lake has it like that."""
    in_braces = queue.startswith("{") and queue.endswith("}")
    return queue[1:-1] if in_braces and queue not in known else queue


def check_queues(root: Path, asked: Iterable[str], known: Collection[str]) -> None:
    """See to it that a lake has something of each queue, as a misspelled name would look like one without jobs.

    Args:
        root: the lake's directory.
        asked: names, in the lake's spelling.
        known: the queues that it has; a lake of none has nothing to compare with.

    Raises:
        ConfigError: it has nothing of one; the message names those that it has, the most alike first.
    """
    for queue in asked if known else ():
        if queue not in known:
            near = sorted(known, key=lambda name: (-difflib.SequenceMatcher(None, queue, name).ratio(), name))
            more = f" and {len(near) - _NAMED:,} more" if len(near) > _NAMED else ""
            meant = did_you_mean(queue, known) or "."
            raise ConfigError(
                f"the lake {root} has nothing of queue {queue!r}{meant} It has {', '.join(near[:_NAMED])}{more}"
            )
