"""Is a batch whole? What Spark's offsets say of it, beside what was found of it in the lake's directory.

Executors write a batch's rows, and the driver tells everything else from their files. An executor that has another
directory under the lake's name (a disk of its own in the place of a shared one) writes there, and nobody notices: Spark
looks at the driver's directory only, finds fewer files, and is content. Positions count every entry that was ever
added, so the two ends of a batch say how many rows there must be.
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
    """Compare what was found of a batch with what there must be.

    Args:
        layout: the lake.
        ingest: the batch.
        found: of each queue, by the user's spelling.
        hash_tag: how the user spells queues.

    Raises:
        LakeError: something is missing, or there twice.
    """
    _, number = batch_of(ingest)
    end = _offset(layout, number)
    begin = batch_start(None if number == 0 else _offset(layout, number - 1), end)
    if begin is None:  # a checkpoint whose first batch an older bulltask has planned
        return
    every: defaultdict[str, ExpectedRows] = defaultdict(partial(ExpectedRows, 0))
    for name, upto in decode_offsets(end).items():
        # Two may be called alike: of one that was set aside the offset keeps its place.
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
    """The offset in which a batch of the query ends: Spark's file has it in the last line, behind two of its own."""
    stored: dict[str, Any] = json.loads((layout.checkpoint / "offsets" / str(number)).read_text().splitlines()[-1])
    return stored
