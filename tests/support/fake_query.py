"""A streaming query without Spark: it calls a reader batch by batch."""

from __future__ import annotations

import json
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from pyspark.sql.streaming.datasource import ReadMaxRows

from bulltask.spark.source.columns import EVENTS
from bulltask.spark.source.options import StreamOptions, read_options
from bulltask.spark.source.readers import EventsStreamReader

__all__ = ["FakeQuery"]


class FakeQuery:
    """Calls a reader as Spark does: offsets are JSON, tasks get copies, a restart creates a new reader."""

    schema = EVENTS

    def __init__(self, url: str, **options: str) -> None:
        self._options = {"url": url, "queue": "mail", **options}
        self.rows: list[dict[str, Any]] = []
        self.restart()
        self.offset = self._json(self.reader.initialOffset())

    def restart(self, **options: str) -> None:
        self._options |= options
        self.reader = EventsStreamReader(read_options(StreamOptions, self._options), self.schema)

    def plan(self, max_rows: int | None = None) -> Any:
        limit = self.reader.getDefaultReadLimit() if max_rows is None else ReadMaxRows(max_rows)
        return self._json(self.reader.latestOffset(self.offset, limit))

    def read(self, end: Any) -> list[dict[str, Any]]:
        rows = []
        for part in self.reader.partitions(self.offset, end):
            reader, partition = cloudpickle.loads(cloudpickle.dumps((self.reader, part)))
            for batch in reader.read(partition):
                rows += batch.to_pylist()
        return rows

    def batch(self, max_rows: int | None = None) -> bool:
        """Plan and read a batch; return whether the offset advanced."""
        end = self.plan(max_rows)
        progressed: bool = end != self.offset
        self.rows += self.read(end)
        self.offset = end
        return progressed

    def run_until_idle(self) -> None:
        for _ in range(100):
            if not self.batch():
                return
        raise AssertionError("the query did not finish")

    def events(self, queue: str = "mail") -> list[str]:
        return [row["event_id"] for row in self.rows if row["queue"] == queue and row["event"] != "bulltask.gap"]

    def gaps(self) -> list[dict[str, Any]]:
        return [json.loads(row["extra"]) for row in self.rows if row["event"] == "bulltask.gap"]

    @staticmethod
    def _json(offset: Any) -> Any:
        return json.loads(json.dumps(offset))
