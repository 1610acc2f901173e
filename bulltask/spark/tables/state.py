"""The state that a batch starts from: open jobs' events, and earlier events of jobs that appear again."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from bulltask.lake.layout import Layout
from bulltask.lake.listing import list_files
from bulltask.lake.tables import EVENTS
from bulltask.spark.lifecycle.fold import LIFECYCLE_COLUMNS

__all__ = ["earlier_events", "read_open_events"]

_IN_FILES: Final = [name for name in LIFECYCLE_COLUMNS if name != "queue"]
_MAX_CACHED_FILES: Final = 50_000
"""The maximum number of files whose id range is cached; reading a range takes a third of a millisecond."""


def read_open_events(layout: Layout, ingest_id: str) -> pa.Table:
    """Return the open jobs' events that a batch has stored for the next batch."""
    files = sorted((layout.open_jobs / ingest_id).glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file, columns=list(LIFECYCLE_COLUMNS), partitioning=None) for file in files])


def earlier_events(layout: Layout, jobs: pa.Table) -> pa.Table | None:
    """Return all events of some jobs that are in the lake; ``None`` if there are none.

    Only files that may contain them are read, judging by the smallest and greatest id in the files' statistics.

    Args:
        layout: The lake. Its directories must not move during the call (:func:`~bulltask.lake.atomic_swap.hold_swaps`).
        jobs: A table of unique ``queue`` and ``job_id``.
    """
    wanted: dict[str, list[str]] = defaultdict(list)
    for queue, job_id in zip(jobs["queue"].to_pylist(), jobs["job_id"].to_pylist(), strict=True):
        wanted[queue].append(job_id)
    tables = [
        part for queue, ids in wanted.items() for part in _events_of_queue(layout, queue, sorted(ids)) if part.num_rows
    ]
    return pa.concat_tables(tables) if tables else None


def _events_of_queue(layout: Layout, queue: str, ids: Sequence[str]) -> Iterator[pa.Table]:
    chosen = pa.array(ids, pa.string())
    for day in layout.days(EVENTS):
        for file, _ in list_files(layout, EVENTS, day, queue):
            if _may_contain(file, ids):
                rows = pq.read_table(file, columns=_IN_FILES, partitioning=None)
                rows = rows.filter(pc.is_in(rows["job_id"], chosen)).replace_schema_metadata(None)
                yield rows.add_column(0, "queue", pa.repeat(pa.scalar(queue), rows.num_rows))


def _may_contain(file: Path, ids: Sequence[str]) -> bool:
    """Return whether a file may contain one of some sorted ids."""
    ends = _id_range(str(file))
    if ends is None:
        return True
    first = bisect_left(ids, ends[0])
    return first < len(ids) and ids[first] <= ends[1]


@lru_cache(_MAX_CACHED_FILES)
def _id_range(file: str) -> tuple[str, str] | None:
    """Return the smallest and the greatest job id in a file; ``None`` without statistics. Files never change."""
    metadata = pq.read_metadata(file)
    at = metadata.schema.names.index("job_id")
    parts = [metadata.row_group(number).column(at).statistics for number in range(metadata.num_row_groups)]
    if any(part is None or not (part.has_min_max or not part.num_values) for part in parts):
        return None
    known = [part for part in parts if part.has_min_max]
    return min((part.min for part in known), default=""), max((part.max for part in known), default="")
