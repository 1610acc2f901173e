"""Lakes of many days, and what reads them: ``benchmarks/pipeline.py growth``.

Each job has an added, a waiting, an active and a completed event, an attempt and a row of ``silver.jobs``; one in a
hundred failed. Ids are UUIDs: those of bulltask, which increase with time, or random ones, whose smallest and greatest
values in a file do not tell which day a job is of. Days are as ``pipeline maintain`` leaves them: files are in order of
ids, and logs have a checkpoint.
"""

from __future__ import annotations

import contextlib
import io
import secrets
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import SparkSession

from bulltask.cli.main import main as bulltask
from bulltask.lake.history import History
from bulltask.lake.maintenance import MAX_ROWS
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import DataFile, Lake, arrow_schema
from bulltask.lake.tables import ATTEMPTS, EVENTS, JOBS, TABLES, Table
from bulltask.spark.gold import build_gold

__all__ = ["QUEUE", "build_all_gold", "measured_ms", "reads", "write_lake"]

QUEUE = "q0000"
_LAST_DAY = datetime.now(UTC).date() - timedelta(days=1)
_DAY_MS = 86_400_000
_REAL_DAYS = 2  # before the last day; gold reads some of them
_WAIT_MS, _RUN_MS = 200, 1_500
_STEPS = {"added": 0, "waiting": 0, "active": _WAIT_MS, "completed": _WAIT_MS + _RUN_MS}
_FILE_JOBS = MAX_ROWS // len(_STEPS)


def write_lake(root: Path, days: int, jobs: int, *, random_ids: bool) -> str:
    """Write a lake of days until yesterday, with a number of jobs on each; return the id of a job of the last day.

    The files of earlier days are copies of one day's; only their statistics have the ids and times of their day.
    """
    lake, random = Lake(root), np.random.default_rng()
    copied: list[tuple[Table, DataFile]] = []
    job_id = ""
    for back in range(days):
        day = _LAST_DAY - timedelta(days=back)
        if back <= _REAL_DAYS:
            copied, some = _write_day(lake, day, jobs, random, random_ids=random_ids)
            job_id = job_id or some
        else:
            for table, file in copied:
                lake.commit(table, [_copy(root / table.layer / table.name, file, day, random_ids=random_ids)])
    for table in (EVENTS, ATTEMPTS, JOBS):
        lake.write_checkpoint(table)
    return job_id


def _write_day(
    lake: Lake, day: date, jobs: int, random: np.random.Generator, *, random_ids: bool
) -> tuple[list[tuple[Table, DataFile]], str]:
    start_ms = int(datetime(day.year, day.month, day.day, tzinfo=UTC).timestamp() * 1000)
    added = start_ms + np.arange(jobs, dtype=np.int64) * (_DAY_MS - 10_000) // jobs
    ids = _uuids(added, random, random_ids=random_ids)
    parts = [slice(begin, begin + _FILE_JOBS) for begin in range(0, jobs, _FILE_JOBS)]
    rows = [(EVENTS, _events(day, added[part], ids[part])) for part in parts] + _silver(day, added, ids)
    files = [(table, file) for table, part in rows for file in lake.write(table, part, "merged")]
    for table, file in files:
        lake.commit(table, [file])
    return files, ids[jobs // 2].as_py()


def _copy(directory: Path, file: DataFile, day: date, *, random_ids: bool) -> DataFile:
    """Copy a file to an earlier day."""
    path = f"dt={day}/merged-{secrets.token_hex(8)}.parquet"
    (directory / path).parent.mkdir(exist_ok=True)
    shutil.copyfile(directory / file.path, directory / path)
    earlier_ms = (date.fromisoformat(file.partition) - day).days * _DAY_MS

    def moved(values: Mapping[str, Any]) -> dict[str, Any]:
        ends = dict(values)
        if "event_ms" in ends:
            ends["event_ms"] -= earlier_ms
        if not random_ids:
            digits = f"{int(ends['job_id'][:13].replace('-', ''), 16) - earlier_ms:012x}"
            ends["job_id"] = f"{digits[:8]}-{digits[8:]}{ends['job_id'][13:]}"
        return ends

    return replace(file, path=path, partition=str(day), low=moved(file.low), high=moved(file.high))


def _uuids(added: Any, random: Any, *, random_ids: bool) -> Any:
    """Return a UUID for each job: of version 7, or 4."""
    words = random.integers(0, 1 << 63, (len(added), 2), dtype=np.uint64) * 2
    if not random_ids:
        words[:, 0] = (added.astype(np.uint64) << 16) | (words[:, 0] & 0xFFF)
    version = np.uint64(0x4000 if random_ids else 0x7000)
    words[:, 0] = (words[:, 0] & np.uint64(0xFFFFFFFFFFFF0FFF)) | version
    digits = np.frombuffer(words.astype(">u8").tobytes().hex().encode(), np.uint8).reshape(-1, 32)
    texts = np.insert(digits, [8, 12, 16, 20], ord("-"), axis=1)
    offsets = np.arange(len(added) + 1, dtype=np.int32) * 36
    return pa.StringArray.from_buffers(len(added), pa.py_buffer(offsets), pa.py_buffer(texts.tobytes()))


def _events(day: date, added: Any, ids: Any) -> Any:
    order = pc.sort_indices(ids).to_numpy()
    steps = np.tile(np.arange(len(_STEPS)), len(added))
    at = np.repeat(added[order], len(_STEPS)) + np.array([*_STEPS.values()])[steps]
    seq = (steps == 1).astype(np.int64)
    names = pa.DictionaryArray.from_arrays(pa.array(np.repeat(order % 5, len(_STEPS)), mask=steps > 0), _NAMES)
    values = {
        "queue": QUEUE, "event_id": pc.binary_join_element_wise(_texts(at), _texts(seq), "-"), "event_ms": at,
        "event_seq": seq, "event_at": _times(at), "event": pa.DictionaryArray.from_arrays(steps, [*_STEPS]),
        "job_id": ids.take(np.repeat(order, len(_STEPS))), "name": names, "dt": str(day),
    }  # fmt: skip
    return _table(EVENTS, len(at), values)


_NAMES = [f"task_{number}" for number in range(5)]


def _silver(day: date, added: Any, ids: Any) -> list[tuple[Table, Any]]:
    jobs, order = len(added), pc.sort_indices(ids).to_numpy()
    at, finished = added[order], _times(added[order] + _WAIT_MS + _RUN_MS)
    state = pa.DictionaryArray.from_arrays((order % 100 == 0).astype(int), ["completed", "failed"])
    reason = pa.DictionaryArray.from_arrays(pa.array(np.zeros(jobs, int), mask=order % 100 > 0), ["ValueError: no"])
    common = {
        "queue": QUEUE, "job_id": ids.take(order), "incarnation": pc.binary_join_element_wise(_texts(at), "0", "-"),
        "name": pa.DictionaryArray.from_arrays(order % 5, _NAMES), "source": "events", "as_of": finished,
        "failed_reason": reason, "error_fingerprint": reason, "dt": str(day),
    }  # fmt: skip
    attempts = {"attempt": 1, "queued_at": _times(at), "started_at": _times(at + _WAIT_MS), "ended_at": finished,
                "wait_ms": _WAIT_MS, "run_ms": _RUN_MS, "outcome": state}  # fmt: skip
    all_jobs = {"created_at": _times(at), "first_started_at": _times(at + _WAIT_MS), "finished_at": finished,
                "state": state, "attempt_count": 1, "stalls": 0, "wait_ms": _WAIT_MS, "run_ms": _RUN_MS,
                "total_ms": _WAIT_MS + _RUN_MS}  # fmt: skip
    return [(ATTEMPTS, _table(ATTEMPTS, jobs, common | attempts)), (JOBS, _table(JOBS, jobs, common | all_jobs))]


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


def build_all_gold(spark: SparkSession, root: Path, days: int) -> None:
    """Build the gold tables of the last day, and write the same rows for the days before."""
    lake = Lake(root)
    build_gold(spark, lake, [_LAST_DAY])
    for table in (table for table in TABLES.values() if table.layer == "gold" and lake.open(table) is not None):
        rows = TableReader(lake).scan(table, [_LAST_DAY], lambda batches: [*batches])
        for back in range(1, days):
            moved = [_moved(pa.Table.from_batches([batch]), back) for batch in rows]
            lake.commit(table, [file for part in moved for file in lake.write(table, part, "part")])
        lake.write_checkpoint(table)


def _moved(rows: Any, back: int) -> Any:
    """Return the rows of a day as those of an earlier one."""
    for index, field in enumerate(rows.schema):
        if pa.types.is_timestamp(field.type):
            rows = rows.set_column(index, field, pc.subtract(rows[index], pa.scalar(timedelta(days=back))))
    index = rows.schema.get_field_index("dt")
    return rows.set_column(index, "dt", pa.repeat(str(_LAST_DAY - timedelta(days=back)), rows.num_rows))


def reads(spark: SparkSession, root: Path, job_id: str) -> dict[str, Callable[[], object]]:
    """Return what users do with a lake with a job of the last day, by name."""
    yesterday = datetime.combine(_LAST_DAY, datetime.min.time(), UTC)

    def run(*arguments: str) -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            bulltask([*arguments, "--lake", str(root)], standalone_mode=False)

    def charts() -> None:
        history = History(root)
        history.attempt_counts(since=yesterday)
        history.latency("run", since=yesterday)

    return {
        "open bronze.events": lambda: len(Lake(root).open(EVENTS).files()),  # type: ignore[union-attr]
        "build gold of the last day": lambda: build_gold(spark, Lake(root), [_LAST_DAY]),
        "job show of a job": lambda: run("job", "show", job_id, "--no-redis"),
        "job show of a job, --since its day": lambda: run(
            "job", "show", job_id, "--no-redis", "--since", f"{_LAST_DAY}"
        ),
        "history search of a job's id": lambda: History(root).search(id=job_id),
        "history search of 50 failed jobs": lambda: run("history", "search", "--state", "failed", "--limit", "50"),
        "charts of the dashboard's history": charts,
        "report of the last day": lambda: run(
            "pipeline", "report", "--days", f"{_LAST_DAY}..{_LAST_DAY}", "-o", f"{root}.html"
        ),
    }


def measured_ms(call: Callable[[], object]) -> int:
    """Return how long a call took."""
    started = time.monotonic()
    call()
    return round((time.monotonic() - started) * 1000)
