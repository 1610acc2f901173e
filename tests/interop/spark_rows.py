"""Write rows through the Spark sink as Spark does, but without a JVM."""

from __future__ import annotations

from collections.abc import Iterable

import pyarrow as pa
from pyspark.serializers import CloudPickleSerializer
from pyspark.sql.types import StringType, StructField, StructType

from bulltask.spark.connector import BulltaskSource
from bulltask.spark.sink import derived_id
from tests.interop.interop_queue import InteropQueue

__all__ = ["write_rows"]

_SCHEMA = StructType([StructField(name, StringType()) for name in ("name", "data")])


def write_rows(side: InteropQueue, rows: Iterable[tuple[str, str]], **options: str) -> list[str]:
    """Write rows of a name and JSON without spaces to the queue; return the ids of their jobs.

    Args:
        side: The queue.
        rows: Names and data.
        options: Options of the data source, as in ``option()``.
    """
    tag = str(side.app._config.queue_hash_tag).lower()
    source = BulltaskSource({"url": side.url, "queue": "mail", "queueHashTag": tag, "writeId": "w1", **options})
    pickled = CloudPickleSerializer()
    writer = pickled.loads(pickled.dumps(source.writer(_SCHEMA, overwrite=False)))
    names, data = zip(*rows, strict=True)
    result = writer.write(iter([pa.RecordBatch.from_arrays([pa.array(names), pa.array(data)], ["name", "data"])]))
    assert result.counts["added"] == len(names)
    return [derived_id("w1", side.name, name, text.encode()) for name, text in zip(names, data, strict=True)]
