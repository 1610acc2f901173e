"""The lake's tables in Spark: how rows are read and written.

Spark knows the tables only as files that Delta's log names, which Python reads: it needs no jar. Tasks write files by
Arrow, and the driver commits them. Files of tasks that failed or ran twice stay unnamed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import date
from functools import partial
from typing import Any, Final

import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession, Window
from pyspark.sql import functions as F
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StringType, StructType

from bulltask.lake.reader import dataset_of
from bulltask.lake.storage import DataFile, Lake, Snapshot
from bulltask.lake.tables import Table
from bulltask.spark.sink import vectorized_udf
from bulltask.spark.source.columns import spark_schema
from bulltask.spark.source.planning import pack


def as_table(frame: DataFrame, table: Table) -> DataFrame:
    """Return a DataFrame with exactly a table's columns and partition, in order and with their types."""
    return frame.select(*(F.col(field.name).cast(field.dataType).alias(field.name) for field in spark_schema(table)))


def day_of(*times: Column) -> Column:
    """Return the partition ``dt`` of a row: the day (UTC) of the first of these times that is not null."""
    return F.date_format(F.coalesce(*times), "yyyy-MM-dd")


def latest(rows: DataFrame, table: Table) -> DataFrame:
    """Return the latest rows: of the rows with the same key, the one with the latest ``as_of``."""
    return first_of_each(rows, table.key, F.desc("as_of"))


def first_of_each(rows: DataFrame, key: Sequence[str], *order: str | Column) -> DataFrame:
    """Return the rows that are, in this order, the first of those with the same key."""
    number = F.row_number().over(Window.partitionBy(*key).orderBy(*order))
    return rows.withColumn("rank", number).where("rank = 1").drop("rank")


def read_table(
    spark: SparkSession,
    lake: Lake,
    table: Table,
    days: Collection[date] | None = None,
    columns: Sequence[str] | None = None,
) -> DataFrame:
    """Return the rows that a table has now: later commits do not change the DataFrame. A missing table has no rows.

    ``days`` and ``columns`` limit what is read, which saves much in an object store; default: all.
    """
    snapshot = lake.open(table)
    files = [] if snapshot is None else snapshot.files(None if days is None else set(map(str, days)))
    return read_files(spark, lake, table, files, columns)


def read_files(
    spark: SparkSession, lake: Lake, table: Table, files: Sequence[DataFile], columns: Sequence[str] | None = None
) -> DataFrame:
    """Return the rows of some files of a table, whether they are committed or not."""
    schema = spark_schema(table)
    if columns is not None:
        schema = StructType([schema[name] for name in columns])
    if not files:
        return spark.createDataFrame([], schema)
    if lake.directory is None:
        return _read_with_arrow(spark, lake, table, files, schema)
    small = [file for file in files if file.size < _SMALL_BYTES]
    if len(small) < _MANY_FILES:
        return _read_with_spark(spark, lake, table, files, schema)
    rows = _read_with_arrow(spark, lake, table, small, schema)
    large = [file for file in files if file.size >= _SMALL_BYTES]
    return rows.union(_read_with_spark(spark, lake, table, large, schema)) if large else rows


# Spark lists and opens each file, which takes longer than Arrow needs to read a small one: three times for 300 files.
# Of large files, Spark reads only what a query needs.
_MANY_FILES: Final = 100
_SMALL_BYTES: Final = 2**20


def _read_with_spark(
    spark: SparkSession, lake: Lake, table: Table, files: Sequence[DataFile], schema: StructType
) -> DataFrame:
    root = f"file:{lake.location(table)}"
    reader = spark.read.schema(spark_schema(table)).option("basePath", root)
    pattern = re.sub(r"([*?{}])", r"\\\1", root)
    return reader.parquet(*(f"{pattern}/{file.path}" for file in files)).select(*schema.names)


_MISSING_FILE: Final = re.compile(
    r"(?:FILE_NOT_EXIST|PATH_NOT_FOUND|FileNotFoundError).*?(?:file:/*)?(/[^/\n][^\n]*?\.parquet)", re.DOTALL
)


@contextmanager
def check_shared(lake: Lake) -> Iterator[None]:
    """Raise ``LakeError`` if a task in this block cannot find a file of the lake, instead of pages about the task."""
    try:
        yield
    except Exception as exc:  # of PySpark or py4j
        missing = _MISSING_FILE.search(str(exc))
        if missing is None:
            raise
        raise lake.not_shared_error(f"a task of Spark cannot find {missing[1]}", "lake") from None


def write_files(rows: DataFrame, table: Table, lake: Lake) -> list[DataFile]:
    """Write rows to new files, one or more for each of Spark's partitions and each day; nothing is committed."""
    columns = as_table(rows, table)
    write = vectorized_udf(partial(_write, lake, table), StringType())
    with check_shared(lake):
        written = columns.select(write(F.struct(*columns.columns)).alias("files")).where("files is not null").collect()
    return [DataFile(**file) for row in written for file in json.loads(row["files"])]


def append(rows: DataFrame, table: Table, lake: Lake) -> int:
    """Append rows to a table in one commit; return their number."""
    files = write_files(rows, table, lake)
    if files:
        lake.commit(table, files)
    return sum(file.rows for file in files)


def replace_days(
    lake: Lake,
    since: Snapshot,
    files: Sequence[DataFile],
    days: Collection[date],
    metadata: Mapping[str, Any] | None = None,
) -> None:
    """Replace the rows of some days by those of new files, which may have none for a day, in one commit.

    ``since`` is the table's version before the new rows were computed: rows added later are kept. ``metadata`` are JSON
    values, which :meth:`Snapshot.last_metadata` returns.

    Raises:
        LakeInUseError: Another process has replaced rows of the table since then.
    """
    lake.commit(since.table, files, metadata=metadata, replaced=since.files(set(map(str, days))), since=since)


_FILE_BYTES: Final = 256 * 2**20
"""How many bytes of Arrow arrays a task collects before it writes them to a file, several times smaller."""


def _write(lake: Lake, table: Table, structs: Iterator[pa.StructArray]) -> Iterator[pa.Array]:
    """Write a task's rows; yield the files as JSON beside its last rows, and nulls beside all others."""
    rows: list[pa.RecordBatch] = []
    files: list[DataFile] = []
    count = size = 0
    for array in structs:
        if count:
            yield pa.nulls(count, pa.string())
        count = len(array)
        rows.append(pa.RecordBatch.from_struct_array(array))
        size += rows[-1].nbytes
        if size >= _FILE_BYTES:
            files += lake.write(table, pa.Table.from_batches(rows), "part")
            rows, size = [], 0
    if rows:
        files += lake.write(table, pa.Table.from_batches(rows), "part")
    if count:
        yield pa.array([json.dumps([asdict(file) for file in files]), *[None] * (count - 1)], pa.string())


# Spark's readers know no object store without a jar. `mapInArrow` would need pandas.

_TASK_BYTES: Final = 64 * 2**20


def _read_with_arrow(
    spark: SparkSession, lake: Lake, table: Table, files: Sequence[DataFile], schema: StructType
) -> DataFrame:
    # Neither the plan nor Spark's user interface shows variables of a class, and one of them has the credentials.
    class LakeSource(DataSource):
        kind = f"bulltask_lake_{secrets.token_hex(8)}"

        @classmethod
        def name(cls) -> str:
            return cls.kind

        def reader(self, schema: StructType) -> DataSourceReader:
            return _LakeReader(lake, table, files, schema.names)

    spark.dataSource.register(LakeSource)
    return spark.read.format(LakeSource.kind).schema(schema).load()


@dataclass(frozen=True)
class _LakeReader(DataSourceReader):
    lake: Lake
    table: Table
    files: Sequence[DataFile]
    columns: Sequence[str]

    def partitions(self) -> Sequence[InputPartition]:
        """Return small files together, up to `_TASK_BYTES`."""
        return [InputPartition(group) for group in pack(self.files, lambda file: file.size, _TASK_BYTES)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        """Yield the rows of some files as Arrow record batches."""
        rows = dataset_of(self.lake, self.table, partition.value)
        return (batch for batch in rows.to_batches(columns=list(self.columns), batch_size=8192) if batch.num_rows)
