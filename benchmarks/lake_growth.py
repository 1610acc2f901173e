"""Lakes of many days, and what reads them: ``benchmarks/pipeline.py growth``.

Each day has the same number of jobs, whose ids continue those of the day before, as BullMQ's: an added, a waiting, an
active and a completed event, an attempt and a row of ``silver.jobs``. One job in a hundred failed. A day is one file of
each table, as after ``pipeline maintain``.
"""

from __future__ import annotations

import contextlib
import io
import time
from collections.abc import Callable, Mapping
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from bulltask.cli.main import main as bulltask
from bulltask.lake.history import History
from bulltask.lake.storage import Lake, arrow_schema
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, Table
from bulltask.spark.gold import build_gold

__all__ = ["measured_ms", "reads", "write_lake"]

_LAST_DAY = datetime.now(UTC).date() - timedelta(days=1)
_DAY_MS = 86_400_000
_WAIT_MS, _RUN_MS = 200, 1_500
_STEPS = (("added", 0), ("waiting", 0), ("active", _WAIT_MS), ("completed", _WAIT_MS + _RUN_MS))


def write_lake(root: Path, days: int, jobs: int) -> None:
    """Write a lake of days until yesterday, with a number of jobs on each."""
    lake = Lake(root)
    for number in range(days):
        day = _LAST_DAY - timedelta(days=days - 1 - number)
        for table, rows in _rows(day, number * jobs + 1, jobs).items():
            lake.commit(table, lake.write(table, rows, "part"))


def _rows(day: date, first_id: int, jobs: int) -> dict[Table, pa.Table]:
    start_ms = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1000)
    added = start_ms + np.arange(jobs, dtype=np.int64) * (_DAY_MS - 10_000) // jobs
    ids = _texts(first_id + np.arange(jobs, dtype=np.int64))
    incarnation = pc.binary_join_element_wise(_texts(added), "0", "-")
    names = pa.DictionaryArray.from_arrays(np.arange(jobs) % 5, [f"task_{n}" for n in range(5)]).cast(pa.string())
    state = pa.DictionaryArray.from_arrays((np.arange(jobs) % 100 == 0).astype(int), ["completed", "failed"])
    finished = _times(added + _WAIT_MS + _RUN_MS)
    common = {"queue": "mail", "job_id": ids, "incarnation": incarnation, "name": names, "source": "events",
              "as_of": finished, "dt": str(day)}  # fmt: skip
    attempts = {"attempt": 1, "queued_at": _times(added), "started_at": _times(added + _WAIT_MS), "ended_at": finished,
                "wait_ms": _WAIT_MS, "run_ms": _RUN_MS, "outcome": state.cast(pa.string())}  # fmt: skip
    all_jobs = {"created_at": _times(added), "first_started_at": _times(added + _WAIT_MS), "finished_at": finished,
                "state": state.cast(pa.string()), "attempt_count": 1, "stalls": 0, "wait_ms": _WAIT_MS,
                "run_ms": _RUN_MS, "total_ms": _WAIT_MS + _RUN_MS}  # fmt: skip
    events = []
    for event, offset in _STEPS:
        at = added + offset
        seq = 1 if event == "waiting" else 0
        values = {"queue": "mail", "event_id": pc.binary_join_element_wise(_texts(at), str(seq), "-"), "event_ms": at,
                  "event_seq": seq, "event_at": _times(at), "event": event, "job_id": ids, "dt": str(day),
                  **({"name": names} if event == "added" else {})}  # fmt: skip
        events.append(_table(EVENTS, jobs, values))
    return {
        EVENTS: pa.concat_tables(events).sort_by([("event_ms", "ascending")]),
        ATTEMPTS: _table(ATTEMPTS, jobs, {**common, **attempts}),
        JOBS: _table(JOBS, jobs, {**common, **all_jobs}),
    }


def _table(table: Table, rows: int, values: Mapping[str, Any]) -> pa.Table:
    columns = []
    for field in arrow_schema(table):
        value = values.get(field.name)
        is_array = isinstance(value, pa.Array | pa.ChunkedArray | np.ndarray)
        columns.append((pa.array(value) if isinstance(value, np.ndarray) else value) if is_array else
                       pa.repeat(pa.scalar(value, field.type), rows))  # fmt: skip
    return pa.Table.from_arrays(columns, names=arrow_schema(table).names).cast(arrow_schema(table))


def _texts(numbers: Any) -> pa.Array:
    return pa.array(numbers).cast(pa.string())


def _times(ms: Any) -> pa.Array:
    return pa.array(ms * 1000).cast(pa.timestamp("us", tz="UTC"))


def reads(spark: SparkSession, root: Path, days: int, jobs: int) -> dict[str, Callable[[], object]]:
    """Return what users do with a lake of some days, by name."""
    job_id = str(days * jobs - jobs // 2)
    page = ["pipeline", "report", "--lake", str(root), "--days", f"{_LAST_DAY}..{_LAST_DAY}", "-o", f"{root}.html"]

    def find_job() -> None:
        assert History(root).job(job_id, "mail") is not None

    def report() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            bulltask(page, standalone_mode=False)

    return {
        "build gold of the last day": lambda: build_gold(spark, Lake(root), [_LAST_DAY]),
        "the history of a job": find_job,
        "a search for 50 failed jobs": lambda: History(root).search(state="failed", limit=50),
        "a report of the last day": report,
    }


def measured_ms(call: Callable[[], object]) -> int:
    """Return how long a call took."""
    started = time.monotonic()
    call()
    return round((time.monotonic() - started) * 1000)
