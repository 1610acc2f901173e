"""Each row of the gold tables that Spark builds equals the row that plain Python computes from the same history."""

from __future__ import annotations

import random
from collections.abc import Mapping
from datetime import date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from deltalake import DeltaTable
from pyspark.sql import SparkSession

from bulltask.errors import ConfigError
from bulltask.lake.log_histogram import merge_histograms, percentile
from bulltask.lake.report.data import Period, ReportData
from bulltask.lake.slo_config import Objective, SLOConfig
from bulltask.lake.storage import Lake, days_of
from bulltask.lake.tables import ATTEMPTS, CAPACITY_MINUTE, COST_DAY, ERRORS_DAY, SLO_DAY, TASK_MINUTE, Table
from bulltask.spark.gold import _spans, build_gold, merge_minutes
from bulltask.spark.lake_tables import read_table
from tests.support.gold_oracle import History, Oracle, nearest_rank, random_history
from tests.support.lake import LakeBuilder, at

pytestmark = [pytest.mark.spark, pytest.mark.timeout(600)]

GOLD = (TASK_MINUTE, CAPACITY_MINUTE, ERRORS_DAY, SLO_DAY, COST_DAY)
DAYS = (date(2026, 11, 20), date(2026, 11, 21))
SLO_CONFIG = SLOConfig(
    objectives=[
        Objective("wait", threshold=0.5, target=0.9),
        Objective("wait", threshold=0.5, target=0.5, name="send"),  # the first matching objective applies
        Objective("wait", threshold=60, target=0.999, queue="{im*"),
        Objective("run", threshold=10, target=0.95, name="mail.*"),
        Objective("run", threshold=0.001, target=0.95, name="count [x]"),
        Objective("total", threshold=3600, target=0.8, queue="mail"),
    ],
    price_per_hour={"mail": 0.12, "007": 250},
    capacity={"mail": 3},
)
GAPS: list[dict[str, Any]] = [
    {
        "queue": "mail",
        "lost": 5,
        "last_at_before": at("2026-11-20 10:00:30"),
        "first_at_after": at("2026-11-20 10:02:00"),
    },
    {
        "queue": "mail",
        "lost": 7,
        "last_at_before": at("2026-11-20 23:58:59"),
        "first_at_after": at("2026-11-21 00:00:01"),
    },
    {
        "queue": "mail",
        "lost": 1,
        "last_at_before": at("2026-11-20 23:59:10"),
        "first_at_after": at("2026-11-20 23:59:59"),
    },
    {"queue": "{images}", "lost": 11, "last_at_before": None, "first_at_after": at("2026-11-20 03:00:10")},
    {"queue": "007", "lost": 3, "last_at_before": at("2026-11-21 22:00:00"), "first_at_after": None},
    {
        "queue": "lonely",
        "lost": 2,
        "last_at_before": at("2026-11-20 05:00"),
        "first_at_after": at("2026-11-20 05:00:10"),
    },
]


SHAPES = {
    "long tail": lambda rng: int(rng.lognormvariate(5, 2)),
    "uniform": lambda rng: rng.randint(0, 30_000),
    "three values": lambda rng: rng.choice((2, 302, 30_208)),
    "around a second": lambda rng: rng.randint(990, 1_010),
}


def shaped_values(task: str, minute: datetime) -> list[int]:
    rng = random.Random(f"{task}{minute}")
    return [SHAPES[task](rng) for _ in range(500)]


def attempts_with(task: str, minute: datetime, values: list[int]) -> list[dict[str, Any]]:
    return [
        {
            "queue": "q", "name": task, "job_id": f"{task} {minute:%M} {number}", "incarnation": "1-0", "attempt": 1,
            "outcome": "completed", "started_at": minute, "ended_at": minute + timedelta(milliseconds=value),
            "wait_ms": value, "run_ms": value, "failed_reason": None, "error_fingerprint": None, "as_of": minute,
        }
        for number, value in enumerate(values)
    ]  # fmt: skip


def write_lake(root: Path, history: History) -> Lake:
    """Write a history to a lake, with other events and with superseded rows."""
    builder, rng = LakeBuilder(root), random.Random(5)
    others = [{**row, "event": event, "name": None} for row in history.added for event in ("waiting", "active")]
    builder.events([*({**row, "event": "added"} for row in history.added), *others])
    stale = [row for row in history.attempts if row["started_at"] and row["ended_at"] and rng.random() < 0.3]
    unfinished = {"ended_at": None, "run_ms": None, "outcome": "open"}
    builder.attempts({**row, **unfinished, "as_of": row["started_at"] - timedelta(seconds=1)} for row in stale)
    builder.attempts(history.attempts)
    earlier = {"state": "failed", "total_ms": 1}
    builder.jobs(
        {**row, **earlier, "finished_at": row["created_at"], "as_of": row["created_at"]}
        for row in history.jobs
        if row["created_at"] and row["created_at"] < row["as_of"] and rng.random() < 0.3
    )
    builder.jobs(history.jobs)
    return builder.gaps(history.gaps).lake


def rows_of(lake: Lake, table: Table) -> list[dict[str, Any]]:
    """Return a table's rows, as any reader of Delta tables returns them."""
    return [with_dicts(row) for row in DeltaTable(lake.location(table)).to_pyarrow_table().to_pylist()]


def with_dicts(row: Mapping[str, Any]) -> dict[str, Any]:
    return {name: dict(value) if name.endswith("_histogram_ms") else value for name, value in row.items()}


def in_order(rows: list[dict[str, Any]], table: Table) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: [str(row[name]) for name in ("dt", *table.key)])


def assert_same(actual: list[dict[str, Any]], expected: list[dict[str, Any]], table: Table) -> None:
    """Compare rows by the columns of ``expected``; other tests compare percentiles."""
    for row, expected_row in zip(in_order(actual, table), in_order(expected, table), strict=False):
        known = {name: approximately(value) for name, value in expected_row.items() if name in row}
        assert {name: row[name] for name in known} == known
    assert len(actual) == len(expected)


def approximately(value: Any) -> Any:
    return pytest.approx(value, rel=1e-9) if isinstance(value, float) else value


def close_to_percentile(values: list[int], quantile: float) -> Any:
    """Return the exact percentile with the guaranteed tolerance of 1% and rounding."""
    exact = nearest_rank(values, quantile)
    return None if exact is None else pytest.approx(exact, rel=0, abs=exact * 0.01 + 0.5)


@pytest.fixture(scope="module")
def history() -> History:
    history = random_history(1, 1_200, at("2026-11-19 21:00"), at("2026-11-22 03:00"))
    detected = {"detected_at": at("2026-11-21 23:30"), "last_id_before": "1-0"}
    for minute in (at("2026-11-20 15:00"), at("2026-11-20 15:01")):
        history.attempts += [row for task in SHAPES for row in attempts_with(task, minute, shaped_values(task, minute))]
    history.gaps = [{**detected, **gap, "last_id_before": str(number)} for number, gap in enumerate(GAPS)]
    return history


@pytest.fixture(scope="module")
def oracle(history: History) -> Oracle:
    return Oracle(history, DAYS, SLO_CONFIG)


@pytest.fixture(scope="module")
def expected_minutes(oracle: Oracle) -> list[dict[str, Any]]:
    return oracle.task_minute()


@pytest.fixture(scope="module")
def expected_capacity(oracle: Oracle, expected_minutes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return oracle.capacity_minute(expected_minutes)


@pytest.fixture(scope="module")
def lake(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory, history: History) -> Lake:
    lake = write_lake(tmp_path_factory.mktemp("gold"), history)
    build_gold(spark, lake, [DAYS[1], DAYS[0]], SLO_CONFIG)
    return lake


def test_task_minute_equals_the_oracles_rows(lake: Lake, expected_minutes: list[dict[str, Any]]) -> None:
    assert len(expected_minutes) > 1_000
    assert_same(rows_of(lake, TASK_MINUTE), expected_minutes, TASK_MINUTE)


def test_capacity_minute_equals_the_oracles_rows(lake: Lake, expected_capacity: list[dict[str, Any]]) -> None:
    assert max(row["peak_slots"] for row in expected_capacity if row["queue"] == "mail") > 3
    assert_same(rows_of(lake, CAPACITY_MINUTE), expected_capacity, CAPACITY_MINUTE)


@pytest.mark.parametrize("table", [ERRORS_DAY, SLO_DAY, COST_DAY], ids=lambda table: table.name)
def test_daily_tables_equal_the_oracles_rows(lake: Lake, oracle: Oracle, table: Table) -> None:
    expected = getattr(oracle, table.name)()
    assert len(expected) >= 10
    assert_same(rows_of(lake, table), expected, table)


@pytest.mark.parametrize("percent", [50, 95, 99])
def test_percentiles_are_accurate_to_one_percent(
    lake: Lake, expected_capacity: list[dict[str, Any]], expected_minutes: list[dict[str, Any]], percent: int
) -> None:
    pairs = zip(in_order(rows_of(lake, TASK_MINUTE), TASK_MINUTE), in_order(expected_minutes, TASK_MINUTE), strict=True)
    seen = [(row[f"{metric}_p{percent}"], exact[f"{metric}s"]) for row, exact in pairs for metric in ("wait", "run")]
    if percent == 95:
        queues = in_order(expected_capacity, CAPACITY_MINUTE)
        built = in_order(rows_of(lake, CAPACITY_MINUTE), CAPACITY_MINUTE)
        seen += [(row["wait_p95"], exact["waits"]) for row, exact in zip(built, queues, strict=True)]
    for value, values in seen:
        assert value == close_to_percentile(values, percent / 100)
    assert any(len(values) > 5 for _, values in seen)


def test_gold_sums_equal_the_totals_of_the_history(lake: Lake, history: History) -> None:
    minutes, days = rows_of(lake, TASK_MINUTE), {str(day) for day in DAYS}

    def sum_of(name: str) -> Any:
        return sum(row[name] for row in minutes)

    def count(rows: list[dict[str, Any]], time: str, **values: str) -> int:
        matching = [row for row in rows if all(row[name] == value for name, value in values.items())]
        return sum(row[time] is not None and str(row[time].date()) in days for row in matching)

    assert sum_of("added") == count(history.added, "event_at") > 0
    assert sum_of("started") == count(history.attempts, "started_at")
    assert sum_of("finished") == count(history.jobs, "finished_at")
    for outcome in ("failed", "requeued", "waiting-children"):
        assert sum_of(outcome.replace("-", "_")) == count(history.attempts, "ended_at", outcome=outcome)
    assert sum(row["count"] for row in rows_of(lake, ERRORS_DAY)) == sum_of("failed")
    assert sum(row["jobs"] for row in rows_of(lake, COST_DAY)) == sum_of("finished")
    assert sum(row["busy_s"] for row in rows_of(lake, COST_DAY)) == pytest.approx(sum_of("busy_ms") / 1000)


@pytest.mark.parametrize(("unit", "by"), [("hour", ("queue", "name")), ("month", ())])
def test_merged_minutes_equal_the_sums_of_their_hour_or_month(
    spark: SparkSession, lake: Lake, expected_minutes: list[dict[str, Any]], unit: str, by: tuple[str, ...]
) -> None:
    time_format = {"hour": "%Y-%m-%d %H:00", "month": "%Y-%m-01 00:00"}[unit]
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in expected_minutes:
        groups.setdefault((*(row[name] for name in by), at(row["minute"].strftime(time_format))), []).append(row)
    merged = merge_minutes(read_table(spark, lake, TASK_MINUTE), unit, by).toArrow().to_pylist()
    assert {(*(row[name] for name in by), row["since"]) for row in merged} == set(groups)
    for row in merged:
        minutes = groups[*(row[name] for name in by), row["since"]]
        for name in ("added", "completed", "busy_ms"):
            assert row[name] == sum(minute[name] for minute in minutes)
        assert row["complete"] == all(minute["complete"] for minute in minutes)
        assert dict(row["wait_histogram_ms"]) == merge_histograms(minute["wait_histogram_ms"] for minute in minutes)
        runs = [run for minute in minutes for run in minute["runs"]]
        assert row["run_p99"] == close_to_percentile(runs, 0.99)
        assert row["wait_p50"] == percentile(dict(row["wait_histogram_ms"]), 0.5)


def test_only_minutes_and_days_within_a_gap_are_incomplete(lake: Lake) -> None:
    minutes = rows_of(lake, TASK_MINUTE)
    lost = {row["minute"]: row["events_lost"] for row in minutes if row["queue"] == "mail" and not row["complete"]}
    assert lost == {
        at("2026-11-20 10:00"): 5, at("2026-11-20 10:01"): 5, at("2026-11-20 10:02"): 5,
        at("2026-11-20 23:58"): 7, at("2026-11-20 23:59"): 8, at("2026-11-21 00:00"): 7,
    }  # fmt: skip
    lonely = [row for row in minutes if row["queue"] == "lonely"]
    assert [(row["name"], row["minute"], row["complete"]) for row in lonely] == [(None, at("2026-11-20 05:00"), False)]
    complete = {(row["queue"], row["dt"], row["complete"]) for row in rows_of(lake, SLO_DAY)}
    assert {row for row in complete if row[0] != "mail"} >= {
        ("{images}", "2026-11-20", False), ("{images}", "2026-11-21", True), ("007", "2026-11-20", True),
        ("007", "2026-11-21", False),
    }  # fmt: skip


@pytest.mark.parametrize("task", SHAPES)
def test_percentiles_are_close_to_exact_ones_for_every_distribution(lake: Lake, task: str) -> None:
    rows = [row for row in rows_of(lake, TASK_MINUTE) if row["name"] == task and row["started"]]
    assert [row["started"] for row in rows] == [500, 500]
    for row in rows:
        exact = shaped_values(task, row["minute"])
        for percent, tolerance in ((50, 0.03), (95, 0.03), (99, 0.06)):
            assert row[f"wait_p{percent}"] == pytest.approx(nearest_rank(exact, percent / 100), rel=tolerance)


def contents(lake: Lake) -> dict[str, list[dict[str, Any]]]:
    return {table.name: in_order(rows_of(lake, table), table) for table in GOLD}


def test_a_rebuilt_day_is_the_same_in_another_time_zone(spark: SparkSession, lake: Lake) -> None:
    before = contents(lake)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        build_gold(spark, lake, [DAYS[1]], SLO_CONFIG)
        assert spark.conf.get("spark.sql.session.timeZone") == "Asia/Tokyo"
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert contents(lake) == before
    for table in GOLD:
        assert [file.partition for file in lake.create(table).files()] == [str(day) for day in DAYS]


def test_rebuilding_an_empty_day_removes_only_that_days_rows(spark: SparkSession, tmp_path: Path) -> None:
    builder = LakeBuilder(tmp_path)
    lake = builder.lake
    builder.attempts(attempts_with("one", at("2026-11-20 23:59:59.900"), [5_000]))
    build_gold(spark, lake, DAYS, SLOConfig(objectives=[Objective("run", threshold=1, target=0.5)], price_per_hour=1))
    days = {table.name: [row["dt"] for row in rows_of(lake, table)] for table in GOLD}
    both = ["2026-11-20", "2026-11-21"]
    assert {name: sorted(values) for name, values in days.items()} == {
        "task_minute": both, "capacity_minute": both, "errors_day": [], "slo_day": both[1:], "cost_day": both,
    }  # fmt: skip
    assert {row["dt"]: row["busy_s"] for row in rows_of(lake, COST_DAY)} == {both[0]: 0.1, both[1]: 4.9}
    attempts = lake.create(ATTEMPTS)
    lake.commit(ATTEMPTS, [], replaced=attempts.files(), since=attempts)
    build_gold(spark, lake, DAYS[:1])
    assert {row["dt"] for table in GOLD for row in rows_of(lake, table)} == {"2026-11-21"}
    assert [days_of(lake.open(table)) for table in (TASK_MINUTE, ERRORS_DAY)] == [[DAYS[1]], []]
    assert len(read_table(spark, lake, TASK_MINUTE).collect()) == 1
    assert read_table(spark, lake, ERRORS_DAY).collect() == []


class KilledLake(Lake):
    """A lake whose process dies before it has replaced the rows of all tables of gold."""

    def commit(self, table: Table, *args: Any, **options: Any) -> bool:
        if table is SLO_DAY:
            raise KeyboardInterrupt
        return super().commit(table, *args, **options)


def test_the_days_of_a_killed_build_are_reported_and_built_by_the_next_one(spark: SparkSession, tmp_path: Path) -> None:
    builder = LakeBuilder(tmp_path)
    builder.attempts(attempts_with("one", at("2026-11-20 10:00"), [5_000]))
    with pytest.raises(KeyboardInterrupt):
        build_gold(spark, KilledLake(tmp_path), DAYS[:1])
    names = {table.name: {row["name"] for row in rows_of(builder.lake, table)} for table in (TASK_MINUTE, COST_DAY)}
    assert names == {"task_minute": set(), "cost_day": {"one"}}
    assert ReportData(builder.lake, Period(*DAYS)).unbuilt == [DAYS[0]]
    builder.attempts(attempts_with("two", at("2026-11-21 10:00"), [5_000]))
    build_gold(spark, builder.lake, DAYS[1:])
    assert {row["name"] for row in rows_of(builder.lake, TASK_MINUTE)} == {"one", "two"}
    assert ReportData(builder.lake, Period(*DAYS)).unbuilt == []


def test_consecutive_days_are_built_together() -> None:
    days = [date(2026, 11, 21), date(2026, 12, 2), date(2026, 11, 20), date(2026, 11, 22), date(2026, 11, 20)]
    assert [(span.first.day, span.last.day) for span in _spans(days)] == [(20, 22), (2, 2)]


def test_building_gold_for_the_last_day_of_the_year_9999_is_rejected() -> None:
    with pytest.raises(ConfigError, match="gold cannot be built for 9999-12-31"):
        list(_spans([date(2026, 11, 21), date.max]))
