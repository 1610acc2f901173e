"""A batch's files, from staging to the tables."""

from __future__ import annotations

import string
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from bulltask.lake.files import Staging, TableReader, arrow_schema
from bulltask.lake.storage import Layout, partition_name, partition_value
from bulltask.lake.tables import GAPS, JOBS

AT = datetime(2026, 11, 22, tzinfo=UTC)


def gaps(*rows: tuple[str, str, int]) -> pa.Table:
    fields = {"last_id_before": "0-0", "detected_at": AT}
    records = [{"dt": dt, "queue": queue, "lost": lost, **fields} for dt, queue, lost in rows]
    return pa.Table.from_pylist(records, arrow_schema(GAPS))


def test_rows_in_any_order_are_published_as_one_file_for_each_day_and_queue(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    staging = Staging(layout, "3f0c2a91-00000001")
    written = [("2026-11-22", "b", 1), ("2026-11-21", "a/x", 2), ("2026-11-22", "b", 3), ("2026-11-22", "a/x", 4)]
    staging.write(GAPS, gaps(*written))
    assert not layout.table(GAPS).exists()
    staging.publish((GAPS,))
    files = sorted(str(file.relative_to(layout.table(GAPS))) for file in tmp_path.rglob("*.parquet"))
    assert files == [
        "dt=2026-11-21/queue=a%2Fx/ingest_id=3f0c2a91-00000001/part-0.parquet",
        "dt=2026-11-22/queue=a%2Fx/ingest_id=3f0c2a91-00000001/part-0.parquet",
        "dt=2026-11-22/queue=b/ingest_id=3f0c2a91-00000001/part-0.parquet",
    ]
    assert pq.read_schema(layout.table(GAPS) / files[0]).names == [column.name for column in GAPS.columns]
    reader = TableReader(layout)
    rows = reader.scan(GAPS, reader.days(GAPS), lambda batches: [row for batch in batches for row in batch.to_pylist()])
    assert sorted((row["dt"], row["queue"], row["lost"]) for row in rows) == sorted(written)


def test_a_batch_without_rows_publishes_no_files(tmp_path: Path) -> None:
    staging = Staging(Layout(tmp_path), "3f0c2a91-00000001")
    staging.write(GAPS, gaps())
    staging.publish((GAPS,))
    assert list(tmp_path.rglob("*.parquet")) == []


@pytest.mark.parametrize("queue", [string.printable, "é \U0001f600", "{mail}", "100%", "a=b", "x+y z"])
def test_a_partition_name_is_one_directory_and_encodes_its_value(queue: str) -> None:
    name = partition_name("queue", queue)
    assert "/" not in name
    assert partition_value(name) == queue


def test_a_batch_that_runs_again_starts_empty_and_publishes_all_tables(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    Staging(layout, "3f0c2a91-00000001").write(GAPS, gaps(("2026-11-22", "b", 1)))
    repeated = Staging(layout, "3f0c2a91-00000001")
    assert list(tmp_path.rglob("*.parquet")) == []
    repeated.write(GAPS, gaps(("2026-11-22", "b", 1)))
    jobs = [{"dt": "2026-11-22", "queue": "b", "job_id": "1", "as_of": AT}]
    repeated.write(JOBS, pa.Table.from_pylist(jobs, arrow_schema(JOBS)))
    repeated.publish((GAPS, JOBS))
    assert [len(list(layout.table(table).rglob("*.parquet"))) for table in (GAPS, JOBS)] == [1, 1]
