"""Programs that nobody here wrote read the lake's tables, with the same totals, also while they are rewritten."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import date, timedelta
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest
from deltalake import DeltaTable

from bulltask.lake.maintenance import maintain
from bulltask.lake.reader import TableReader
from bulltask.lake.storage import Lake
from bulltask.lake.tables import JOBS
from tests.support.lake import LakeBuilder, at

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "sql.md"
Totals = tuple[int, int]


def of_deltalake(path: str) -> Totals:
    rows = DeltaTable(path).to_pyarrow_dataset().to_table(columns=["total_ms"])
    return rows.num_rows, sum(rows["total_ms"].to_pylist())


def of_pandas(path: str) -> Totals:
    frame = DeltaTable(path).to_pandas(columns=["total_ms"])
    return len(frame), int(frame["total_ms"].sum())


def of_polars(path: str) -> Totals:
    rows = pl.scan_delta(path).select(pl.len().alias("rows"), pl.col("total_ms").sum()).collect()
    return rows.item(0, "rows"), rows.item(0, "total_ms")


def of_duckdb(path: str) -> Totals:
    return _ask_duckdb(lambda con: con.register("t", DeltaTable(path).to_pyarrow_dataset()))


def of_duckdb_with_files(path: str) -> Totals:
    files = DeltaTable(path).file_uris()
    return _ask_duckdb(lambda con: con.read_parquet(files, union_by_name=True).create_view("t"))


def of_bulltask(path: str) -> Totals:
    rows = TableReader(Lake(Path(path).parents[1])).rows(JOBS, columns=("total_ms",))
    return len(rows), sum(row["total_ms"] for row in rows)


def _ask_duckdb(make_view: Callable[[duckdb.DuckDBPyConnection], object]) -> Totals:
    with duckdb.connect() as con:
        make_view(con)
        found = con.execute("SELECT count(*), sum(total_ms)::BIGINT FROM t").fetchone()
        assert found is not None
        return found[0], found[1]


READERS = [of_deltalake, of_pandas, of_polars, of_duckdb, of_duckdb_with_files, of_bulltask]


def jobs(day: int, first: int, count: int) -> list[dict[str, Any]]:
    finished = {"state": "completed", "finished_at": at(f"2026-11-{day} 10:00"), "queue": "a{b}% c"}
    return [{"job_id": f"{number:05}", "total_ms": number, **finished} for number in range(first, first + count)]


@pytest.mark.parametrize("read", READERS)
def test_all_readers_find_the_same_totals(lake: LakeBuilder, read: Callable[[str], Totals]) -> None:
    for first in range(0, 300, 100):
        lake.jobs(jobs(20, first, 50)).jobs(jobs(21, first + 50, 50), batch=first)
    maintain(lake.lake, today=date(2026, 11, 21))
    lake.jobs(jobs(22, 300, 10))
    assert read(lake.lake.location(JOBS)) == (310, sum(range(310)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_no_read_falls_short_or_fails_while_files_are_merged(lake: LakeBuilder) -> None:
    """Each tool reads the table again and again while its files are merged and its day is written anew."""
    for first in range(0, 1_000, 50):
        lake.jobs(jobs(20, first, 50))
    path, done, merges = lake.lake.location(JOBS), threading.Event(), list[int]()

    def rewrite_repeatedly() -> None:
        writer = LakeBuilder(lake.root)
        while not done.is_set():
            merges.append(maintain(writer.lake, today=date(2026, 11, 21))[0].merged_days)
            snapshot = writer.lake.open(JOBS)
            assert snapshot is not None
            from bulltask.lake.reader import dataset_of  # noqa: PLC0415 - only here

            rows = dataset_of(writer.lake, JOBS, snapshot.files()).to_table()
            parts = [rows.slice(first, 50) for first in range(0, rows.num_rows, 50)]
            new = [file for part in parts for file in writer.lake.write(JOBS, part, "small")]
            writer.lake.commit(JOBS, new, replaced=snapshot.files(), since=snapshot)

    with ThreadPoolExecutor(1) as pool:
        rewriting = pool.submit(rewrite_repeatedly)
        try:
            results = [read(path) for _ in range(10) for read in READERS]
        finally:
            done.set()
        rewriting.result()
    assert results == [(1_000, sum(range(1_000)))] * len(results)
    assert sum(merges) > 3


# ---- the page with questions -----------------------------------------------------------------------------------------


@pytest.fixture
def shop(lake: LakeBuilder) -> LakeBuilder:
    """Return the lake that the page's answers are from."""
    ten, eleven = at("2026-11-22 10:00"), at("2026-11-22 11:00")

    def second(number: float) -> timedelta:
        return timedelta(seconds=number)

    declined = {"failed_reason": "card 4711 declined", "error_fingerprint": "card # declined"}
    ms = int(ten.timestamp() * 1000)
    events = [
        (ms, "added", "c-1", {}), (ms + 1_000, "active", "c-1", {}),
        (ms + 3_000, "failed", "c-1", {"failed_reason": declined["failed_reason"]}), (ms, "added", "m-9", {}),
    ]  # fmt: skip
    lake.events([
        {"event_id": f"{at_ms}-{number}", "event": event, "job_id": job_id, "queue": "shop", **more}
        for number, (at_ms, event, job_id, more) in enumerate(events)
    ])  # fmt: skip
    charge = {"queue": "shop", "name": "card.charge", "attempt_count": 1, "total_ms": 3_000}
    mail = {"queue": "shop", "name": "mail.send", "state": "completed", "attempt_count": 1, "total_ms": 4_000}
    lake.jobs([
        {**charge, "job_id": "c-1", "state": "failed", "finished_at": ten + second(3), **declined},
        {**charge, "job_id": "c-2", "state": "failed", "finished_at": ten + second(3), **declined},
        {**mail, "job_id": "m-1", "finished_at": at("2026-11-21 10:00")},
        {**mail, "job_id": "m-2", "finished_at": eleven},
        {**mail, "job_id": "m-3", "finished_at": eleven, "state": "failed", "as_of": ten},
        {**mail, "job_id": "m-4", "finished_at": eleven},
    ])  # fmt: skip
    lake.jobs([{**mail, "job_id": "m-3", "finished_at": eleven, "attempt_count": 2, "total_ms": 12_000}])
    attempt = {"queue": "shop", "name": "mail.send", "outcome": "completed", "wait_ms": 2_000, "run_ms": 2_000}
    charged = {**attempt, "name": "card.charge", "outcome": "failed", "wait_ms": 1_000}
    lake.attempts([
        {**charged, "job_id": "c-1", "started_at": ten, "ended_at": ten},
        {**charged, "job_id": "c-2", "started_at": ten, "ended_at": ten},
        {**attempt, "job_id": "m-2", "started_at": eleven, "ended_at": eleven},
        {**attempt, "job_id": "m-4", "started_at": eleven, "ended_at": eleven},
        {**attempt, "job_id": "m-3", "started_at": eleven, "ended_at": eleven, "outcome": "requeued", "run_ms": 3_000},
        {**attempt, "job_id": "m-3", "attempt": 2, "started_at": eleven, "ended_at": eleven, "wait_ms": 9_000,
         "run_ms": 5_000},
    ])  # fmt: skip
    lake.snapshots([{"id": "m-3", "queue": "shop", "data": '{"to": "ada@example.com"}', "snapshot_at": eleven}])
    return lake.gaps([
        {"queue": "shop", "last_id_before": "1-0", "lost": 40, "exact": True, "detected_at": ten},
    ])  # fmt: skip


def test_the_questions_of_the_page_have_its_answers(shop: LakeBuilder) -> None:
    text = PAGE.read_text()
    (setup,) = re.findall(r"```py\n(.*?)```", text, re.DOTALL)
    variables: dict[str, Any] = {}
    exec(setup.replace("/data/lake", str(shop.root)), variables)
    questions = re.findall(r"```sql\n(.*?)```\n\n(.*?)(?:\n\n|\Z)", text, re.DOTALL)
    try:
        for sql, answer in questions:
            found = duckdb.sql(sql)
            assert found is not None
            table = [found.columns, ["---"] * len(found.columns), *found.fetchall()]
            lines = [f"| {' | '.join('NULL' if value is None else str(value) for value in row)} |" for row in table]
            assert "\n".join(lines).replace("| --- ", "|---").replace("--- |", "---|") == answer.strip(), sql
    finally:
        duckdb.close()
    assert len(questions) == 10
