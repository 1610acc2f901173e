"""The data source ``bulltask``: what Spark asks for, and who answers."""

from __future__ import annotations

from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    DataSourceWriter,
)
from pyspark.sql.types import StructType

from bulltask.errors import ConfigError
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
    """Responsible for checking the options of ``format("bulltask")`` and handing out the reader of a table.

    A reader takes filters only when asked to (``pushdown=true``, and why not always:
    :mod:`bulltask.spark.source.pushdown`). Spark refuses one that does while
    ``spark.sql.python.filterPushdown.enabled`` is off, so it is another class.
    """

    @classmethod
    def name(cls) -> str:
        """How the source is called in ``format()`` and ``USING``."""
        return "bulltask"

    def schema(self) -> StructType:
        """All columns of the table.

        Raises:
            ConfigError: there is no such table.
        """
        return TABLES[table_of(self.options)]

    def reader(self, schema: StructType) -> DataSourceReader:
        """The reader of the table.

        Args:
            schema: all columns, or those that the user chose.

        Raises:
            ConfigError: an option or a column is unknown, wrong or missing.
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
        """The reader of a stream of events; of the other tables there is none.

        Args:
            schema: all columns, or those that the user chose.

        Raises:
            ConfigError: an option or a column is unknown, wrong or missing.
        """
        if table_of(self.options) != "events":  # Spark has asked for the columns before it says that it is for a stream
            raise ConfigError(
                "[BULLTASK_OPTION_MISSING] only events can be read as a stream, and Spark needs to know their columns "
                "first: add option('table', 'events')"
            )
        return EventsStreamReader(read_options(StreamOptions, self.options), select_columns("events", schema))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """The writer of a batch: each row becomes a job.

        Args:
            schema: of the rows.
            overwrite: the mode is ``overwrite``, which is refused.

        Raises:
            ConfigError: an option or a column is wrong.
        """
        return JobsWriter(read_options(WriteOptions, self.options), schema, overwrite=overwrite)

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """The writer of a stream: :meth:`writer` for each of its batches."""
        return JobsStreamWriter(read_options(WriteOptions, self.options), schema, overwrite=overwrite)
