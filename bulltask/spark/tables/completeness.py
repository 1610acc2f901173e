"""Check that a batch is complete: compare Spark's offsets with the files in the lake's directory.

Executors write a batch's rows, and the driver derives everything else from their files. If an executor has another
directory under the lake's path (its own disk instead of a shared one), it writes there and Spark does not notice: it
looks only at the driver's directory and finds fewer files. Offsets count every entry that was ever added, so the two
ends of a batch say how many rows there must be.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from bulltask.errors import LakeError
from bulltask.lake.formatting import pluralize
from bulltask.lake.layout import Layout, batch_of
from bulltask.lake.ledger import QueueRecord
from bulltask.spark.source.offsets import batch_start, decode_offsets
from bulltask.spark.source.options import user_name
from bulltask.spark.source.ranges import ExpectedRows, expected_rows

__all__ = ["check_complete"]

_NONE = QueueRecord()


def check_complete(layout: Layout, ingest: str, found: Mapping[str, QueueRecord], *, hash_tag: bool) -> None:
    """Compare what was found of a batch with what it must have.

    Args:
        layout: The lake.
        ingest: The batch.
        found: Counts of each queue, by the user's name.
        hash_tag: How the user names queues.

    Raises:
        LakeError: Something is missing, or there twice.
    """
    _, number = batch_of(ingest)
    end = _offset(layout, number)
    begin = batch_start(None if number == 0 else _offset(layout, number - 1), end)
    if begin is None:  # the first batch was planned by an older bulltask
        return
    every: defaultdict[str, ExpectedRows] = defaultdict(partial(ExpectedRows, 0))
    for name, upto in decode_offsets(end).items():
        # Two may have the same name: offsets also contain queues that are now skipped.
        every[user_name(name, hash_tag=hash_tag) or name] += expected_rows(begin.get(name), upto)
    for queue, must in every.items():
        seen = found.get(queue, _NONE)
        if not must.is_met(seen.events, seen.lost, seen.gaps):
            raise LakeError(
                f"[BULLTASK_BATCH_INCOMPLETE] batch {ingest} must have {_shown(must)} of queue {queue!r}, and its "
                f"files have {pluralize(seen.events, 'event')} and {seen.lost:,} lost. {layout.root} must be the same "
                "directory for the driver and for all executors. Nothing of the batch was published: mount the "
                "directory on every node and run the pipeline again before the streams drop these events"
            )


def _shown(must: ExpectedRows) -> str:
    return "events" if must.count is None else pluralize(must.count, "event")


def _offset(layout: Layout, number: int) -> dict[str, Any]:
    """Return the offset at which a batch ends: the last line of Spark's file, after two lines of Spark's own."""
    stored: dict[str, Any] = json.loads((layout.checkpoint / "offsets" / str(number)).read_text().splitlines()[-1])
    return stored
