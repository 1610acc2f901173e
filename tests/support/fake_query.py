"""A streaming query without Spark: what it asks of a reader, batch after batch."""

from __future__ import annotations

import json
from typing import Any

import cloudpickle  # type: ignore[import-untyped]
from pyspark.sql.streaming.datasource import ReadMaxRows

from bulltask.spark.source.events_stream import EventsStreamReader
from bulltask.spark.source.options import StreamOptions, read_options
from bulltask.spark.source.schemas import EVENTS

__all__ = ["FakeQuery"]


class FakeQuery:
    """What Spark does with a reader: offsets travel as JSON, tasks get copies, a restart makes a new reader."""

    schema = EVENTS

    def __init__(self, url: str, **options: str) -> None:
        self._options = {"url": url, "queue": "mail", **options}
        self.rows: list[dict[str, Any]] = []
        self.restart()
        self.offset = self._json(self.reader.initialOffset())

    def restart(self, **options: str) -> None:
        self._options |= options
        self.reader = EventsStreamReader(read_options(StreamOptions, self._options), self.schema)

    def plan(self, most: int | None = None) -> Any:
        limit = self.reader.getDefaultReadLimit() if most is None else ReadMaxRows(most)
        return self._json(self.reader.latestOffset(self.offset, limit))

    def read(self, end: Any) -> list[dict[str, Any]]:
        found = []
        for part in self.reader.partitions(self.offset, end):
            there, piece = cloudpickle.loads(cloudpickle.dumps((self.reader, part)))
            for batch in there.read(piece):
                found += batch.to_pylist()
        return found

    def batch(self, most: int | None = None) -> bool:
        end = self.plan(most)
        moved: bool = end != self.offset
        self.rows += self.read(end)
        self.offset = end
        return moved

    def run_until_idle(self) -> None:
        for _ in range(100):
            if not self.batch():
                return
        raise AssertionError("the query never comes to an end")

    def events(self, queue: str = "mail") -> list[str]:
        return [row["event_id"] for row in self.rows if row["queue"] == queue and row["event"] != "bulltask.gap"]

    def gaps(self) -> list[dict[str, Any]]:
        return [json.loads(row["extra"]) for row in self.rows if row["event"] == "bulltask.gap"]

    @staticmethod
    def _json(offset: Any) -> Any:
        return json.loads(json.dumps(offset))
