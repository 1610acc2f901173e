"""The lake's tables in Arrow: their schemas, and the latest of several rows with the same key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from bulltask.lake.tables import Kind, Table

__all__ = ["arrow_schema", "latest_rows", "partition_schema"]

_TYPES: Final[Mapping[Kind, Any]] = {
    Kind.TEXT: pa.string(),
    Kind.INT: pa.int32(),
    Kind.LONG: pa.int64(),
    Kind.DOUBLE: pa.float64(),
    Kind.FLAG: pa.bool_(),
    Kind.TIME: pa.timestamp("us", tz="UTC"),
    Kind.TEXTS: pa.list_(pa.string()),
    Kind.COUNTS: pa.map_(pa.int32(), pa.int64()),
    Kind.MONEY: pa.decimal128(18, 6),
}


def arrow_schema(table: Table) -> Any:
    """Return the Arrow schema (``pyarrow.Schema``) of a table: the columns of its files, then its partitions."""
    columns = [pa.field(column.name, _TYPES[column.kind]) for column in table.columns]
    return pa.schema(columns + list(partition_schema(table)))


def partition_schema(table: Table) -> Any:
    """Return the Arrow schema of a table's partitions; ``dt`` is text like ``2026-11-22``."""
    return pa.schema([pa.field(name, pa.string()) for name in table.partitions])


def latest_rows(rows: pa.Table, table: Table) -> pa.Table:
    """Return one row for each key: the row with the latest ``as_of``.

    Args:
        rows: Rows of a silver table with its key columns. Nulls are equal to each other.
        table: The table.
    """
    if rows.num_rows < 2:
        return rows
    key = [name for name in table.key if name in rows.column_names]
    ordered = rows.sort_by([*((name, "ascending") for name in key), ("as_of", "descending")]).combine_chunks()
    is_same = pa.scalar(True)
    for name in key:
        column = ordered[name]
        current, previous = column.slice(1), column.slice(0, len(column) - 1)
        both_null = pc.and_(pc.is_null(current), pc.is_null(previous))
        is_same = pc.and_(is_same, pc.or_(pc.fill_null(pc.equal(current, previous), False), both_null))
    head = pa.chunked_array([pa.array([True])])
    keep = pa.chunked_array(head.chunks + pc.invert(is_same).chunks)
    return ordered.filter(keep)
