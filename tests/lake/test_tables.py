"""The lake's tables and directories, on which all writers and readers rely."""

from __future__ import annotations

import subprocess
import sys
from datetime import date
from pathlib import Path

import pytest

from bulltask.lake.files import arrow_schema
from bulltask.lake.storage import Layout, batch_ingest_id, partition_value
from bulltask.lake.tables import ATTEMPTS, EVENTS, TABLES, TASK_MINUTE, Table

every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@every_table
def test_a_table_has_unique_columns_which_include_its_key(table: Table) -> None:
    names = [column.name for column in table.columns]
    assert len(set(names + list(table.partitions))) == len(names) + len(table.partitions)
    assert set(table.key) <= {*names, *table.partitions}
    assert all(column.doc for column in table.columns)


@every_table
def test_arrow_and_spark_have_the_same_columns_and_types(table: Table) -> None:
    from bulltask.spark.lake_tables import spark_schema  # noqa: PLC0415 - imports pyspark

    kinds = {
        "string": "string", "int32": "int", "int64": "bigint", "double": "double", "bool": "boolean",
        "timestamp[us, tz=UTC]": "timestamp", "decimal128(18, 6)": "decimal(18,6)",
        "map<int32, int64>": "map<int,bigint>",
    }  # fmt: skip
    arrow = [(field.name, kinds.get(str(field.type), "array<string>")) for field in arrow_schema(table)]
    assert arrow == [(field.name, field.dataType.simpleString()) for field in spark_schema(table).fields]


def test_tables_and_layout_do_not_import_pyarrow() -> None:
    program = "import bulltask.lake.tables, bulltask.lake.storage, sys; print('pyarrow' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50)
    assert run.stdout.strip() == "False"


def test_the_ingest_id_consists_of_the_query_and_the_batch() -> None:
    assert batch_ingest_id("3f0c2a91-77aa-4c1e-a0f0-000000000000", 17) == "3f0c2a91-00000017"
    assert batch_ingest_id("4f0c2a91-77aa-4c1e-a0f0-000000000000", 17) != batch_ingest_id(
        "3f0c2a91-77aa-4c1e-a0f0-0000000000", 17
    )


def test_only_the_files_of_the_given_ingest_id_are_removed(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    kept = layout.day(EVENTS, date(2026, 11, 22)) / "queue=%7Bmail%7D" / "ingest_id=b"
    removed = [kept.parent / "ingest_id=a", layout.day(ATTEMPTS, date(2026, 11, 21)) / "queue=x" / "ingest_id=a"]
    minutes = layout.day(TASK_MINUTE, date(2026, 11, 22))
    for path in (kept, *removed, minutes, layout.table(EVENTS) / "_temporary" / "queue=x" / "ingest_id=a"):
        path.mkdir(parents=True)
    assert list(layout.written_directories(EVENTS, "a")) == [removed[0]]
    layout.remove("a")
    assert [path.exists() for path in (kept, *removed, minutes)] == [True, False, False, True]
    assert (layout.table(EVENTS) / "_temporary").exists()
    assert layout.days(EVENTS) == [date(2026, 11, 22)]
    assert partition_value(kept.parent.name) == "{mail}"
