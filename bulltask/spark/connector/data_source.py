"""The data source ``bulltask``: the factory of its readers and writers."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from bulltask.jobs.errors import ConfigError
from bulltask.spark.sink.writer import JobsStreamWriter, JobsWriter
from bulltask.spark.source.events_source import CountsReader, EventsReader, PushdownCountsReader, PushdownEventsReader
from bulltask.spark.source.events_stream import EventsStreamReader
from bulltask.spark.source.jobs_source import JobsReader, PushdownJobsReader
from bulltask.spark.source.options import (
    CountsOptions,
    EventsOptions,
    JobsOptions,
    StreamOptions,
    WriteOptions,
    read_options,
    table_of,
)
from bulltask.spark.source.schemas import TABLES, select_columns

__all__ = ["BulltaskSource"]


class BulltaskSource(DataSource):
    """The data source of ``format("bulltask")``: checks the options and returns the reader or writer of a table.

    A reader accepts filters only with ``pushdown=true``; :mod:`bulltask.spark.source.pushdown` explains why. Spark
    rejects such a reader while ``spark.sql.python.filterPushdown.enabled`` is off, so it is a separate class.
    """

    @classmethod
    def name(cls) -> str:
        """Return the name for ``format()`` and ``USING``."""
        return "bulltask"

    def schema(self) -> StructType:
        """Return all columns of the table.

        Raises:
            ConfigError: The table does not exist.
        """
        return TABLES[table_of(self.options)]

    def reader(self, schema: StructType) -> DataSourceReader:
        """Return the reader of the table.

        Args:
            schema: All columns, or the columns that the user selected.

        Raises:
            ConfigError: An option or a column is unknown, invalid or missing.
        """
        table = table_of(self.options)
        columns = select_columns(table, schema)
        if table == "events":
            events = read_options(EventsOptions, self.options)
            return (PushdownEventsReader if events.pushdown else EventsReader)(events, columns)
        if table == "counts":
            counts = read_options(CountsOptions, self.options)
            return (PushdownCountsReader if counts.pushdown else CountsReader)(counts, columns)
        jobs = read_options(JobsOptions, self.options)
        return (PushdownJobsReader if jobs.pushdown else JobsReader)(jobs, columns)

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:
        """Return the reader of a streaming query of events; other tables cannot be streamed.

        Args:
            schema: All columns, or the columns that the user selected.

        Raises:
            ConfigError: An option or a column is unknown, invalid or missing.
        """
        # Spark requests the columns before it reports that this is a streaming query.
        if table_of(self.options) != "events":
            raise ConfigError(
                "[BULLTASK_OPTION_MISSING] a streaming query can read only events: add option('table', 'events')"
            )
        return EventsStreamReader(read_options(StreamOptions, self.options), select_columns("events", schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Return the writer of a batch: each distinct row becomes a job.

        Args:
            schema: The schema of the rows.
            overwrite: Whether the mode is ``overwrite``, which is rejected.

        Raises:
            ConfigError: An option or a column is invalid.
        """
        return JobsWriter(read_options(WriteOptions, self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return the writer of a streaming query, which writes each batch like :meth:`writer`."""
        return JobsStreamWriter(read_options(WriteOptions, self.options), schema, overwrite=overwrite)
