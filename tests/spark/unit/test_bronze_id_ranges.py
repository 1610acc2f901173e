"""Each queue's first and last event ids are read from a batch's files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulltask.lake.storage import QueueRecord
from bulltask.spark.batches import _lifecycle_events, _queue_records
from bulltask.spark.source.columns import EVENTS, arrow_schema, event_record_batch

MAX_MS = 2**64 - 2


@pytest.mark.parametrize(
    ("days", "first", "last"),
    [
        ([["5-1", "5-20"], ["6-0", "5-3"]], "5-1", "6-0"),
        ([["7-0", f"{2**63 - 1}-0"]], "7-0", f"{2**63 - 1}-0"),
        ([["7-0"], [f"{MAX_MS}-3", f"{MAX_MS - 1}-7"]], "7-0", f"{MAX_MS}-3"),
        ([[f"{MAX_MS}-{2**64 - 1}", f"{MAX_MS}-{2**64 - 2}"]], f"{MAX_MS}-{2**64 - 2}", f"{MAX_MS}-{2**64 - 1}"),
        ([[f"5-{2**64 - 1}", f"5-{2**64 - 2}"], ["6-0"]], f"5-{2**64 - 2}", "6-0"),
    ],
)
def test_first_and_last_ids_of_a_batch_are_redis_stream_ids(
    tmp_path: Path, days: list[list[str]], first: str, last: str
) -> None:
    for number, ids in enumerate(days):
        write_events(tmp_path / f"dt=2026-11-2{number}" / "queue=mail", ids)
        write_events(tmp_path / f"dt=2026-11-2{number}" / "queue=other", ["1-1"])
    seen = dict(_queue_records(_lifecycle_events(tmp_path), tmp_path))
    assert seen["mail"] == QueueRecord(sum(map(len, days)), first, last)
    assert seen["other"] == QueueRecord(len(days), "1-1", "1-1")


def write_events(directory: Path, ids: Sequence[str]) -> None:
    entries = [(entry_id.encode(), [b"event", b"added", b"jobId", b"j"]) for entry_id in ids]
    rows = pa.Table.from_batches([event_record_batch(arrow_schema(EVENTS), "mail", entries)])
    directory.mkdir(parents=True, exist_ok=True)
    pq.write_table(rows.drop(["queue"]), directory / "part-0.parquet")
