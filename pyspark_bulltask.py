"""``format("bulltask")`` in every Spark session: Spark itself looks for data sources in modules named ``pyspark_*``.

It imports these modules, once in a session, as soon as it looks for any Python data source. This module therefore
imports bulltask only when its source is used, so that a missing package cannot make another source fail.
"""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

__all__ = ["DefaultSource"]


class DefaultSource(DataSource):
    """The data source :class:`bulltask.spark.connector.BulltaskSource`."""

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()`` and ``USING``."""
        return "bulltask"

    def _source(self) -> DataSource:
        from bulltask.spark.connector import BulltaskSource  # noqa: PLC0415 - see above

        return BulltaskSource(self.options)

    def schema(self) -> StructType | str:
        """Return all columns of the table."""
        return self._source().schema()

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of a batch."""
        return self._source().reader(schema)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query."""
        return self._source().streamReader(schema)

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch."""
        return self._source().writer(schema, overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of a streaming query."""
        return self._source().streamWriter(schema, overwrite)
