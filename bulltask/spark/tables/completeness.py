"""Check that a batch is complete: compare Spark's offsets with the files in the lake's directory.

Executors write a batch's rows, and the driver derives all other data from their files. If an executor has another
directory at the lake's path (a local disk instead of a shared one), it writes there, and Spark does not detect this: it
only sees the driver's directory, with fewer files. Offsets count every entry that was ever added, so a batch's start
and end offsets determine its number of rows.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from functools import partial
from typing import Any

from bulltask.jobs.errors import LakeError
from bulltask.lake.formatting import pluralize
from bulltask.lake.layout import Layout, batch_of
from bulltask.lake.ledger import QueueRecord
from bulltask.spark.source.offsets import batch_start, decode_offsets
from bulltask.spark.source.options import app_name
from bulltask.spark.source.ranges import ExpectedRows, expected_rows

__all__ = ["check_complete"]

_NONE = QueueRecord()


def check_complete(layout: Layout, ingest_id: str, records: Mapping[str, QueueRecord], *, hash_tag: bool) -> None:
    """Compare the records of a batch with its offsets.

    Args:
        layout: The lake.
        ingest_id: The ``ingest_id`` of the batch.
        records: Each queue's counts, by name without the hash tag.
        hash_tag: The setting ``queue_hash_tag``.

    Raises:
        LakeError: Rows are missing or duplicated.
    """
    _, number = batch_of(ingest_id)
    end = _offset(layout, number)
    begin = batch_start(None if number == 0 else _offset(layout, number - 1), end)
    if begin is None:  # an older version of bulltask planned the first batch
        return
    expectations: defaultdict[str, ExpectedRows] = defaultdict(partial(ExpectedRows, 0))
    for name, end_offset in decode_offsets(end).items():
        # Two queues may have the same name: offsets also contain queues that are now skipped.
        expectations[app_name(name, hash_tag=hash_tag) or name] += expected_rows(begin.get(name), end_offset)
    for queue, expected in expectations.items():
        record = records.get(queue, _NONE)
        if not expected.is_met(record.events, record.lost, record.gaps):
            raise LakeError(
                f"[BULLTASK_BATCH_INCOMPLETE] batch {ingest_id} should contain {_shown(expected)} from queue "
                f"{queue!r}, but its files contain {record.events:,} and record {record.lost:,} as lost. {layout.root} "
                "must be the same directory for the driver and for all executors. The batch was not published: mount "
                "the directory on every node and run the pipeline again before Redis trims these events"
            )


def _shown(expected: ExpectedRows) -> str:
    return "events" if expected.count is None else pluralize(expected.count, "event")


def _offset(layout: Layout, number: int) -> dict[str, Any]:
    """Return the offset at which a batch ends: the last line of Spark's file, after two header lines."""
    stored: dict[str, Any] = json.loads((layout.checkpoint / "offsets" / str(number)).read_text().splitlines()[-1])
    return stored
