"""Which of several rows with the same key counts, by Arrow alone."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.compute as pc

from bulltask.lake.tables import Table

__all__ = ["latest_rows"]


def latest_rows(rows: pa.Table, table: Table) -> pa.Table:
    """Return the rows that count: of those with the same key, the one with the latest ``as_of``.

    Args:
        rows: of a table of silver, each with the columns of its key; a null is a value like others there.
        table: which.
    """
    if rows.num_rows < 2:
        return rows
    key = [name for name in table.key if name in rows.column_names]
    in_order = rows.sort_by([*((name, "ascending") for name in key), ("as_of", "descending")]).combine_chunks()
    is_same = pa.scalar(True)
    for name in key:
        column = in_order[name]
        here, before = column.slice(1), column.slice(0, len(column) - 1)
        both_null = pc.and_(pc.is_null(here), pc.is_null(before))
        is_same = pc.and_(is_same, pc.or_(pc.fill_null(pc.equal(here, before), False), both_null))
    first = pa.chunked_array([pa.array([True])])
    counts = pa.chunked_array(first.chunks + pc.invert(is_same).chunks)
    return in_order.filter(counts)
