"""The state that a batch starts from: the events of open jobs, and earlier events of jobs that appear again."""

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
_FILES: Final = 50_000
"""For how many files this process remembers the range of ids: looking at a file takes a third of a millisecond."""


def read_open_events(layout: Layout, ingest: str) -> pa.Table:
    """Return the events of open jobs that a batch has left for the next one."""
    files = sorted((layout.open_jobs / ingest).glob("*.parquet"))
    return pa.concat_tables([pq.read_table(file, columns=list(LIFECYCLE_COLUMNS), partitioning=None) for file in files])


def earlier_events(layout: Layout, jobs: pa.Table) -> pa.Table | None:
    """Return all events of some jobs that are in the lake; ``None`` if there are none.

    Only files that may contain them are read, by the least and greatest id in their statistics.

    Args:
        layout: The lake. Its directories must not move during the call (:func:`~bulltask.lake.atomic_swap.hold_swaps`).
        jobs: Their ``queue`` and ``job_id``, each once.
    """
    wanted: dict[str, list[str]] = defaultdict(list)
    for queue, job_id in zip(jobs["queue"].to_pylist(), jobs["job_id"].to_pylist(), strict=True):
        wanted[queue].append(job_id)
    found = [part for queue, ids in wanted.items() for part in _of_queue(layout, queue, sorted(ids)) if part.num_rows]
    return pa.concat_tables(found) if found else None


def _of_queue(layout: Layout, queue: str, ids: Sequence[str]) -> Iterator[pa.Table]:
    chosen = pa.array(ids, pa.string())
    for day in layout.days(EVENTS):
        for file, _ in list_files(layout, EVENTS, day, queue):
            if _may_have(file, ids):
                rows = pq.read_table(file, columns=_IN_FILES, partitioning=None)
                rows = rows.filter(pc.is_in(rows["job_id"], chosen)).replace_schema_metadata(None)
                yield rows.add_column(0, "queue", pa.repeat(pa.scalar(queue), rows.num_rows))


def _may_have(file: Path, ids: Sequence[str]) -> bool:
    """Return whether one of some sorted ids may be in a file."""
    ends = _ids_in(str(file))
    if ends is None:
        return True
    first = bisect_left(ids, ends[0])
    return first < len(ids) and ids[first] <= ends[1]


@lru_cache(_FILES)
def _ids_in(file: str) -> tuple[str, str] | None:
    """Return the least and the greatest job id in a file; ``None`` if it has no statistics. A file never changes."""
    data = pq.read_metadata(file)
    at = data.schema.names.index("job_id")
    parts = [data.row_group(number).column(at).statistics for number in range(data.num_row_groups)]
    if any(part is None or not (part.has_min_max or not part.num_values) for part in parts):
        return None
    known = [part for part in parts if part.has_min_max]
    return min((part.min for part in known), default=""), max((part.max for part in known), default="")
