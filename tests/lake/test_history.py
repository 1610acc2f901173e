"""A single job's history, and statistics about jobs, from the lake."""

from __future__ import annotations

import random
import re
from datetime import date, datetime, timedelta
from typing import Any

import pytest

from bulltask.errors import ConfigError, LakeError
from bulltask.lake import AttemptCount, History, JobCount, LatencyPoint
from bulltask.lake import history as job_stats
from tests.support.lake import LakeBuilder, at

DAY = at("2026-11-20 10:00")
MS = int(DAY.timestamp() * 1000)


def history(lake: LakeBuilder) -> History:
    return History(lake.root)


def add_retried_job(lake: LakeBuilder) -> None:
    """Add job 7 of mail, which stalled, failed, and completed in a retry a day later; its id had been used before."""
    incarnation, later = f"{MS}-0", DAY + timedelta(days=1)
    lake.events(
        [
            {"event_id": f"{MS}-1", "event": "waiting", "job_id": "7"},
            {"event_id": f"{MS}-0", "event": "added", "job_id": "7", "name": "send"},
            {"event_id": f"{MS + 9}-0", "event": "failed", "job_id": "7", "failed_reason": '"no"', "extra": "{}"},
            {"event_id": f"{MS + 9}-0", "event": "failed", "job_id": "8", "queue": "other"},
        ]
    )
    lake.events([{"event_id": f"{MS + 86_400_000}-10", "event": "completed", "job_id": "7", "return_value": "1"}])
    lake.events([{"event_id": f"{MS + 86_400_000}-9", "event": "active", "job_id": "7", "prev": "waiting"}])
    lake.jobs([{"job_id": "7", "incarnation": incarnation, "state": "failed", "finished_at": DAY, "created_at": DAY}])
    lake.jobs(
        [{"job_id": "7", "incarnation": incarnation, "state": "completed", "finished_at": later, "created_at": DAY}]
    )
    gone = {"job_id": "7", "incarnation": "5-0", "state": "removed"}
    lake.jobs([{**gone, "as_of": at("2026-11-01"), "created_at": at("1970-01-01", 5)}])
    first = {"job_id": "7", "incarnation": incarnation, "started_at": DAY, "queued_at": DAY}
    lake.attempts([{**first, "outcome": "open", "as_of": DAY}])
    stalled = {**first, "outcome": "stalled", "ended_at": at("2026-11-20 10:00", 3), "run_ms": 1500}
    failed = {**first, "outcome": "failed", "ended_at": at("2026-11-20 10:00", 9), "wait_ms": 1, "failed_reason": "no"}
    lake.attempts([{**failed, "attempt": 2}, stalled])
    lake.attempts([{**first, "attempt": 3, "started_at": later, "outcome": "completed", "ended_at": later}])
    lake.attempts([{"job_id": "7", "queue": "other", "outcome": "completed", "ended_at": later}])
    for moment, state in ((later, "completed"), (DAY, "failed")):
        data = '{"to": "ada"}' if state == "completed" else "{"
        lake.snapshots([{"id": "7", "state": state, "data": data, "return_value": "[1]", "snapshot_at": moment}])


def test_a_job_has_its_incarnations_attempts_events_and_newest_snapshot(lake: LakeBuilder) -> None:
    add_retried_job(lake)
    record = history(lake).job("7", "mail")
    assert record is not None
    assert (record.id, record.queue) == ("7", "mail")
    assert [(job.state, job.incarnation) for job in record.incarnations] == [
        ("completed", f"{MS}-0"),
        ("removed", "5-0"),
    ]
    assert record.job is record.incarnations[0]
    assert [
        (each.attempt, each.outcome, each.wait_time, each.run_time, each.failed_reason) for each in record.attempts
    ] == [
        (1, "stalled", None, 1.5, None),
        (2, "failed", 0.001, None, "no"),
        (3, "completed", None, None, None),
    ]
    assert [event.event for event in record.events] == ["added", "waiting", "failed", "active", "completed"]
    assert [event.id.rpartition("-")[2] for event in record.events] == ["0", "1", "0", "9", "10"]
    assert (record.events[0].name, record.events[2].failed_reason, record.events[4].return_value) == (
        "send",
        '"no"',
        "1",
    )
    assert record.events[2].at == at("2026-11-20 10:00", 9)
    assert record.snapshot is not None
    snapshot = record.snapshot
    assert (snapshot.state, snapshot.data, snapshot.return_value) == ("completed", {"to": "ada"}, [1])


def test_the_history_of_a_job_reads_no_days_before_it_was_added(lake: LakeBuilder) -> None:
    """One more day is read, because clocks may differ. The ids of a file do not tell which jobs it has."""
    for day in (1, 18, 20):
        moment = at(f"2026-11-{day:02} 10:00")
        ids = [f"{letter}{day}" for letter in "amz"]
        event = {"event_id": f"{int(moment.timestamp() * 1000)}-0", "event": "added"}
        lake.events({**event, "job_id": job_id} for job_id in ids)
        job = {"state": "completed", "finished_at": moment, "created_at": moment}
        lake.jobs({**job, "job_id": job_id} for job_id in ids)
    for day in (1, 18):
        [file] = lake.root.glob(f"bronze/events/dt=2026-11-{day:02}/*.parquet")
        file.write_bytes(b"not to be read")
    record = history(lake).job("m20")
    assert record is not None
    assert len(record.events) == 1
    with pytest.raises(LakeError):
        history(lake).job("m18")
    for file in lake.root.glob("silver/jobs/dt=2026-11-01/*.parquet"):
        file.write_bytes(b"not to be read")
    with pytest.raises(LakeError):
        history(lake).job("m20")
    assert history(lake).job("m20", since=date(2026, 11, 20)) == record
    assert history(lake).job("m20", since=date(2026, 11, 22)) is None


def test_malformed_json_in_a_snapshot_is_returned_as_text(lake: LakeBuilder) -> None:
    lake.snapshots([{"id": "1", "data": "{", "stacktrace": '["a", 1, "b"]', "delay_ms": 1500, "snapshot_at": DAY}])
    record = history(lake).job("1")
    assert record is not None
    assert record.snapshot is not None
    assert (record.snapshot.data, record.snapshot.opts) == ("{", None)
    assert (record.snapshot.stacktrace, record.snapshot.delay, record.job) == (("a", "b"), 1.5, None)


def test_an_unfinished_job_has_events_only(lake: LakeBuilder) -> None:
    lake.events([{"event_id": f"{MS}-0", "event": "added", "job_id": "1"}])
    record = history(lake).job("1")
    assert record is not None
    assert (record.job, record.attempts, record.snapshot, len(record.events)) == (None, (), None, 1)


def test_a_job_id_in_several_queues_requires_a_queue(lake: LakeBuilder) -> None:
    add_retried_job(lake)
    with pytest.raises(ConfigError, match=r"several queues have a job '7': mail, other; choose one"):
        history(lake).job("7")
    record = history(lake).job("7", "{other}")  # with the hash tag
    assert record is not None
    assert (record.incarnations, len(record.attempts)) == ((), 1)


def test_an_unknown_job_returns_none_but_an_unknown_queue_raises_an_error(lake: LakeBuilder) -> None:
    add_retried_job(lake)
    assert history(lake).job("9") is None
    assert history(lake).job("9", "mail") is None
    with pytest.raises(ConfigError, match=re.escape("no data for queue 'mial'; did you mean 'mail'?")):
        history(lake).job("7", "mial")


def test_days_and_queues_with_jobs_are_listed(lake: LakeBuilder) -> None:
    add_retried_job(lake)
    lake.jobs([{"job_id": "1", "state": "failed", "finished_at": DAY, "queue": "{a}"}])
    assert history(lake).days() == [date(2026, 11, 1), date(2026, 11, 20), date(2026, 11, 21)]
    assert history(lake).queues() == ["mail", "{a}"]


def test_jobs_are_counted_once_when_they_are_read_in_several_passes(
    lake: LakeBuilder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_stats, "_ROWS_PER_PASS", 30)
    first = [{"job_id": f"{n}é", "name": "send", "state": "failed", "finished_at": DAY} for n in range(100)]
    lake.jobs(first).jobs([{**row, "state": "completed", "finished_at": DAY + timedelta(days=1)} for row in first[:40]])
    assert history(lake).job_counts() == [
        JobCount(queue="mail", name="send", state="completed", jobs=40),
        JobCount(queue="mail", name="send", state="failed", jobs=60),
    ]
    assert [count.jobs for count in history(lake).job_counts(until=date(2026, 11, 21))] == [60]


def attempts(lake: LakeBuilder) -> list[dict[str, Any]]:
    """Add attempts in three hours on two days, some with long run times."""
    rng, hours = random.Random(4), [DAY, at("2026-11-20 23:00"), at("2026-11-21 00:00")]
    rows = [
        {
            "job_id": str(number),
            "name": rng.choice(["send", "report"]),
            "queue": rng.choice(["mail", "other"]),
            "outcome": rng.choice(["completed", "completed", "failed", "requeued"]),
            "ended_at": rng.choice(hours) + timedelta(milliseconds=rng.randrange(3_600_000)),
            "run_ms": int(rng.lognormvariate(5, 2)) if number % 50 else 0,
            "wait_ms": None if number % 3 else rng.randrange(100),
        }
        for number in range(900)
    ]
    lake.attempts([*rows, {"job_id": "open", "outcome": "open", "started_at": DAY, "as_of": DAY}])
    return rows


def hour(moment: datetime) -> datetime:
    return moment.replace(minute=0, second=0, microsecond=0)


def test_ended_attempts_are_counted_by_hour_and_by_day(lake: LakeBuilder) -> None:
    rows = attempts(lake)
    ended = [hour(row["ended_at"]) for row in rows if row["outcome"] == "completed"]
    assert history(lake).attempt_counts() == [AttemptCount(start, ended.count(start)) for start in sorted(set(ended))]
    selected = [row for row in rows if row["outcome"] == "failed" and row["queue"] == "mail" and row["name"] == "send"]
    days = history(lake).attempt_counts("failed", every="day", queue="mail", name="send", since=at("2026-11-20 12:00"))
    assert [(point.at, point.attempts) for point in days] == [
        (
            at("2026-11-20"),
            sum(row["ended_at"] >= at("2026-11-20 12:00") and row["ended_at"].day == 20 for row in selected),
        ),
        (at("2026-11-21"), sum(row["ended_at"].day == 21 for row in selected)),
    ]
    assert history(lake).attempt_counts(until=at("2026-11-20 10:00")) == []


def nearest_rank(values: list[int], percentile: float) -> int:
    return sorted(values)[max(0, -int(-len(values) * percentile // 100) - 1)]


def test_percentiles_are_accurate_to_one_percent(lake: LakeBuilder) -> None:
    rows = attempts(lake)
    points = history(lake).latency(percentiles=(0, 1, 50, 95, 99, 100))
    assert [point.at for point in points] == sorted({hour(row["ended_at"]) for row in rows})
    for point in points:
        runs = [row["run_ms"] for row in rows if hour(row["ended_at"]) == point.at]
        assert point.attempts == len(runs)
        for percentile, seconds in point.percentiles.items():
            exact = nearest_rank(runs, percentile)
            assert abs(seconds * 1000 - exact) <= 0.01 * exact + 0.5, percentile


def test_percentiles_of_the_whole_period_are_one_data_point(lake: LakeBuilder) -> None:
    rows = attempts(lake)
    (point,) = history(lake).latency("wait", (50,), every=None, queue="mail", since=date(2026, 11, 20))
    waits = [row["wait_ms"] for row in rows if row["wait_ms"] is not None and row["queue"] == "mail"]
    assert (point.at, point.attempts) == (at("2026-11-20"), len(waits))
    assert history(lake).latency("wait", every=None, since=date(2026, 12, 1)) == []
    lake.attempts([{"job_id": "z", "outcome": "completed", "ended_at": at("2026-12-01"), "run_ms": 0}])
    assert history(lake).latency(percentiles=(50,), since=date(2026, 12, 1)) == [
        LatencyPoint(at("2026-12-01"), 1, {50: 0.0})
    ]


@pytest.mark.parametrize(
    ("query", "message"),
    [
        (lambda lake: lake.attempt_counts(every="week"), "one of hour, day, not 'week'"),
        (lambda lake: lake.latency("total"), "one of wait, run, not 'total'"),
        (lambda lake: lake.latency(percentiles=(101,)), "percentiles must be from 0 to 100, not 101"),
        (lambda lake: lake.latency(every="week"), "not 'week'"),
    ],
)
def test_invalid_arguments_for_statistics_are_rejected(lake: LakeBuilder, query: Any, message: str) -> None:
    attempts(lake)
    with pytest.raises(ConfigError, match=re.escape(message)):
        query(history(lake))
