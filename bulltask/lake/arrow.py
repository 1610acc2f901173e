"""The tables' types as Arrow names them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import pyarrow as pa

from bulltask.lake.tables import Kind, Table

__all__ = ["arrow_schema", "partition_schema"]

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
    """Return the Arrow schema (``pyarrow.Schema``) of a table's files and, behind it, of its partitions."""
    columns = [pa.field(column.name, _TYPES[column.kind]) for column in table.columns]
    return pa.schema(columns + list(partition_schema(table)))


def partition_schema(table: Table) -> Any:
    """Return the Arrow schema of a table's partitions; ``dt`` is a text like ``2026-11-22``."""
    return pa.schema([pa.field(name, pa.string()) for name in table.partitions])
