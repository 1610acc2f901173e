"""The lake's tables, on which all writers and readers rely."""

from __future__ import annotations

import subprocess
import sys

import pytest

from bulltask.lake.storage import arrow_schema
from bulltask.lake.tables import TABLES, Table

every_table = pytest.mark.parametrize("table", TABLES.values(), ids=TABLES)


@every_table
def test_a_table_has_unique_columns_which_include_its_key(table: Table) -> None:
    names = [column.name for column in table.columns]
    assert len({*names, table.partition}) == len(names) + 1
    assert names[0] == "queue"
    assert set(table.key) <= set(names)
    assert all(column.doc for column in table.columns)


@every_table
def test_arrow_and_spark_have_the_same_columns_and_types(table: Table) -> None:
    from bulltask.spark.source.columns import spark_schema  # noqa: PLC0415 - imports pyspark

    kinds = {
        "string": "string", "int32": "int", "int64": "bigint", "double": "double", "bool": "boolean",
        "timestamp[us, tz=UTC]": "timestamp", "decimal128(18, 6)": "decimal(18,6)",
        "map<int32, int64>": "map<int,bigint>",
    }  # fmt: skip
    arrow = [(field.name, kinds.get(str(field.type), "array<string>")) for field in arrow_schema(table)]
    assert arrow == [(field.name, field.dataType.simpleString()) for field in spark_schema(table).fields]


def test_the_tables_do_not_import_pyarrow() -> None:
    program = "import bulltask.lake.tables, sys; print('pyarrow' in sys.modules)"
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=50)
    assert run.stdout.strip() == "False"
