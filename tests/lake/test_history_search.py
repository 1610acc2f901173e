"""Searching the lake: filters, order, pages, and only the latest state of each job."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from datetime import UTC, date, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from bulltask.errors import ConfigError, LakeError
from bulltask.lake import History, JobRecord
from tests.support.lake import LakeBuilder, at

Row = dict[str, Any]
DAY = at("2026-11-20")


def job(job_id: str, moment: datetime, state: str = "completed", **fields: Any) -> Row:
    return {
        "job_id": job_id,
        "incarnation": f"{job_id}-0",
        "name": "send",
        "state": state,
        "finished_at": moment,
        **fields,
    }


def ids(history: History, **where: Any) -> list[str]:
    return [job.id for job in history.search(**where).jobs]


@pytest.fixture
def sample(lake: LakeBuilder) -> History:
    """Return a history of five jobs in two queues and on three days."""
    reason = "ConnectionError: SMTP server mx1.example.com: Timed Out"
    lake.jobs(
        [
            job("a", at("2026-11-20 10:00")),
            job("b", at("2026-11-21 10:00"), "failed", failed_reason=reason, error_fingerprint="ConnectionError: SMTP"),
            job("c", at("2026-11-21 11:00"), "failed", failed_reason="KeyError: 'x'", error_fingerprint="KeyError: #"),
            job("d", at("2026-11-22 00:00"), name="report", queue="reports"),
            {**job("e", at("2026-11-22 09:00"), "removed"), "finished_at": None, "as_of": at("2026-11-22 09:00")},
        ]
    )
    return History(lake.root)


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ({}, "edcba"),
        ({"id": "c"}, "c"),
        ({"id": "none"}, ""),
        ({"name": "report"}, "d"),
        ({"state": "failed"}, "cb"),
        ({"state": "removed"}, "e"),
        ({"queue": "reports"}, "d"),
        ({"queue": "{reports}"}, "d"),
        ({"text": "timed out"}, "b"),
        ({"text": "'X'"}, "c"),
        ({"text": "x1.e"}, "b"),
        ({"text": "x1xe"}, ""),
        ({"error_fingerprint": "KeyError: #"}, "c"),
        ({"since": at("2026-11-21 11:00")}, "edc"),
        ({"until": at("2026-11-21 11:00")}, "ba"),
        ({"since": date(2026, 11, 21), "until": date(2026, 11, 22)}, "cb"),
        ({"since": datetime(2026, 11, 22, 0, 0)}, "ed"),  # noqa: DTZ001 - a naive time is UTC
        ({"since": datetime(2026, 11, 22, 8, tzinfo=UTC).astimezone()}, "e"),
        ({"state": "failed", "text": "error", "queue": "mail", "name": "send", "since": date(2026, 11, 1)}, "cb"),
        ({"state": "failed", "queue": "reports"}, ""),
        ({"state": None, "text": None, "since": None}, "edcba"),
    ],
)
def test_a_search_applies_all_filters_and_returns_the_newest_first(sample: History, where: Row, expected: str) -> None:
    assert ids(sample, **where) == list(expected)


def test_a_job_in_search_results_has_times_in_utc_and_durations_in_seconds(lake: LakeBuilder) -> None:
    end = at("2026-11-20 10:00:01", 500)
    row = job("a", end, "failed", attempt_count=3, stalls=1, wait_ms=1500, run_ms=250, total_ms=None, data_bytes=7)
    row |= {"created_at": at("2026-11-20 10:00"), "first_started_at": at("2026-11-20 10:00:01"), "failed_reason": "no"}
    lake.jobs([{**row, "error_fingerprint": "no", "parent_key": "bull:{up}:1"}])
    (found_job,) = History(lake.root).search().jobs
    assert found_job == JobRecord(
        id="a", queue="mail", name="send", state="failed", created_at=at("2026-11-20 10:00"),
        started_at=at("2026-11-20 10:00:01"), finished_at=end, seen_at=end, attempt_count=3, stalls=1, wait_time=1.5,
        run_time=0.25, total=None, failed_reason="no", error_fingerprint="no", parent_key="bull:{up}:1", data_bytes=7,
        source="events", as_of=end, incarnation="a-0",
    )  # fmt: skip
    assert found_job.seen_at.tzinfo is UTC


def test_a_failed_job_that_a_retry_completed_is_only_found_as_completed(lake: LakeBuilder) -> None:
    lake.jobs([job("a", at("2026-11-20 10:00"), "failed", failed_reason="no"), job("b", at("2026-11-20 09:00"))])
    lake.jobs([job("a", at("2026-11-22 10:00"))])
    history = History(lake.root)
    assert [(job.id, job.state) for job in history.search().jobs] == [("a", "completed"), ("b", "completed")]
    assert ids(history, state="failed") == ids(history, text="no") == []
    assert ids(history, until=date(2026, 11, 21)) == ["b"]


def test_a_job_that_is_retried_ten_days_later_has_its_last_state(lake: LakeBuilder) -> None:
    first, later = at("2026-11-10 10:00"), at("2026-11-20 10:00")
    added: dict[str, Any] = {"created_at": at("2026-11-10 09:59")}
    lake.jobs([job("a", first, "failed", failed_reason="no", **added), job("b", first, **added)])
    lake.jobs([job("a", later, **added)])
    history = History(lake.root)
    assert ids(history) == ["a", "b"]
    assert ids(history, state="failed") == ids(history, text="no") == []
    assert ids(history, until=date(2026, 11, 11)) == ids(history, until=date(2026, 11, 15)) == ["b"]
    assert ids(history, since=date(2026, 11, 20)) == ["a"]
    for since, until, states in [
        (None, None, {"completed": 2}),
        (None, date(2026, 11, 15), {"completed": 1}),
        (date(2026, 11, 10), date(2026, 11, 11), {"completed": 1}),
        (date(2026, 11, 19), None, {"completed": 1}),
    ]:
        assert {count.state: count.jobs for count in history.job_counts(since=since, until=until)} == states
    record = history.job("a")
    assert record is not None
    assert [(job.state, job.finished_at) for job in record.incarnations] == [("completed", later)]


@pytest.mark.parametrize("created_at", [at("2026-11-10 09:59"), None])
def test_an_end_found_by_a_backfill_supersedes_a_later_removal(lake: LakeBuilder, created_at: datetime | None) -> None:
    removed = {**job("a", DAY, "removed", created_at=created_at), "finished_at": None, "as_of": at("2026-11-20 10:00")}
    lake.jobs([removed, job("b", at("2026-11-20 11:00"), created_at=created_at)])
    end = job("a", at("2026-11-10 10:00"), source="snapshot", created_at=created_at)
    lake.jobs([{**end, "as_of": at("2026-11-21")}])
    history = History(lake.root)
    assert ids(history, state="removed") == ids(history, since=date(2026, 11, 20), id="a") == []
    assert ids(history) == ["b", "a"]
    assert [(count.state, count.jobs) for count in history.job_counts(since=date(2026, 11, 20))] == [("completed", 1)]
    assert [(count.state, count.jobs) for count in history.job_counts(since=date(2026, 11, 9))] == [("completed", 2)]


def test_a_search_does_not_read_days_before_its_jobs_were_added(lake: LakeBuilder) -> None:
    """One more day is read, because clocks may differ."""
    for day in range(1, 21):
        moment = at(f"2026-11-{day:02} 10:00")
        lake.jobs([job(f"j{day}", moment, created_at=moment)])
    for day in range(1, 19):
        [file] = lake.root.glob(f"silver/jobs/dt=2026-11-{day:02}/*.parquet")
        file.write_bytes(b"not to be read")
    history = History(lake.root)
    assert ids(history, limit=2, since=date(2026, 11, 20)) == ["j20"]
    assert [count.jobs for count in history.job_counts(since=date(2026, 11, 20))] == [1]


def test_a_retry_of_a_job_whose_start_has_expired_is_another_incarnation(lake: LakeBuilder) -> None:
    """docs/how-to/pipeline.md documents this: the retry looks like an id that was used again."""
    lake.jobs([job("a", at("2026-11-10"), "failed", incarnation="1-0", created_at=at("2026-11-10"))])
    lake.jobs([job("a", at("2026-11-20"), incarnation=None)])
    jobs = History(lake.root).search().jobs
    assert [(job.state, job.created_at) for job in jobs] == [("completed", None), ("failed", at("2026-11-10"))]


def test_a_snapshot_from_a_slow_clock_supersedes_a_row_of_the_next_day(lake: LakeBuilder) -> None:
    unfinished = {**job("a", DAY, "active"), "finished_at": None, "as_of": at("2026-11-20 00:00", 5)}
    lake.jobs([unfinished]).jobs([{**job("a", at("2026-11-20", -5)), "as_of": at("2026-11-21"), "source": "snapshot"}])
    history = History(lake.root)
    assert ids(history, state="active") == []
    assert ids(history) == ["a"]


def test_incarnations_and_equal_ids_in_two_queues_are_separate_jobs(lake: LakeBuilder) -> None:
    lake.jobs(
        [
            job("a", DAY, incarnation="1-0"),
            job("a", at("2026-11-21"), incarnation=None),
            job("a", DAY, queue="other"),
        ]
    )
    assert ids(History(lake.root)) == ["a", "a", "a"]


def test_pages_contain_every_job_once_if_many_finished_at_the_same_time(lake: LakeBuilder) -> None:
    lake.jobs([job(f"{number:03}", DAY) for number in range(95)] + [job("old", at("2026-11-01"))])
    history, job_ids, cursor, pages = History(lake.root), list[str](), None, 0
    while pages == 0 or cursor:
        page = history.search(limit=10, cursor=cursor, since=date(2026, 10, pages + 1))  # the filter may change
        job_ids += [job.id for job in page.jobs]
        cursor, pages = page.cursor, pages + 1
    assert job_ids == [f"{number:03}" for number in reversed(range(95))] + ["old"]
    assert pages == 10


def test_a_page_is_full_even_if_newer_matching_rows_are_superseded(lake: LakeBuilder) -> None:
    lake.jobs([job(f"x{n:02}", at("2026-11-20 12:00", n), "failed") for n in range(60)])
    lake.jobs([job(f"x{n:02}", at("2026-11-21")) for n in range(60)])
    lake.jobs([job(f"y{n}", at("2026-11-20 11:00", n), "failed") for n in range(3)])
    page = History(lake.root).search(state="failed", limit=2)
    assert [job.id for job in page.jobs] == ["y2", "y1"]
    assert page.cursor is not None


def test_a_row_that_was_written_twice_is_returned_once(lake: LakeBuilder) -> None:
    lake.jobs([job("a", DAY)]).jobs([job("a", DAY)])
    assert ids(History(lake.root)) == ["a"]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        ({"limit": 0}, "limit must be an integer from 1 to 1000, not 0"),
        ({"limit": 1001}, "limit must be"),
        ({"limit": True}, "limit must be"),
        ({"state": "fialed"}, "unknown state 'fialed'; did you mean 'failed'?"),
        ({"queue": "mial"}, "has no data for queue 'mial'; did you mean 'mail'?"),
        ({"queue": ""}, "queue must be a non-empty string"),
        ({"text": 3}, "text must be a non-empty string"),
        ({"since": 3600}, "since must be a datetime or a date, not 3600"),
        ({"since": date(2026, 11, 2), "until": date(2026, 11, 1)}, "must be before until"),
        ({"cursor": "nonsense"}, "invalid cursor 'nonsense'"),
        ({"cursor": "é"}, "invalid cursor"),
        ({"cursor": ""}, "invalid cursor"),
    ],
)
def test_invalid_arguments_for_a_search_are_rejected(sample: History, where: Row, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        sample.search(**where)


def test_an_unknown_filter_is_rejected(sample: History) -> None:
    with pytest.raises(TypeError, match=r"cannot be searched by .stat.; did you mean .state."):
        sample.search(stat="failed")  # type: ignore[call-arg]


def test_a_cursor_from_another_search_is_rejected(sample: History) -> None:
    cursor = sample.search(limit=1).cursor
    assert cursor
    with pytest.raises(ConfigError, match="is from another search"):
        sample.search(limit=1, cursor=cursor, state="failed")


def test_a_history_without_a_lake_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=r"there is no lake in .*/missing"):
        History(tmp_path / "missing")


def test_the_history_of_a_lake_without_jobs_is_empty(tmp_path: Path) -> None:
    LakeBuilder(tmp_path).jobs([])
    history = History(tmp_path)
    assert history.search().jobs == ()
    assert (history.days(), history.queues(), history.job_counts(), history.job("a")) == ([], [], [], None)


def test_an_unreadable_file_is_an_error_that_names_the_file(lake: LakeBuilder) -> None:
    lake.jobs([job("a", DAY)])
    (file,) = lake.root.rglob("*.parquet")
    file.write_bytes(b"PAR1 nonsense")
    with pytest.raises(LakeError, match=re.escape(file.name)):
        History(lake.root).search()


# ---- comparison with a search in memory ------------------------------------------------------------------------------

TIMES = st.integers(0, 5 * 86_400_000 // 7_200_000).map(lambda n: DAY + timedelta(hours=2 * n))
TEXTS = st.sampled_from(["Timed out", "timed OUT é", "KeyError: 'a'", "", None])


@st.composite
def rows(draw: Callable[..., Any]) -> Row:
    ended, finished = draw(TIMES), draw(st.booleans())
    # A backfill records a job at any time after it finished.
    as_of = ended + timedelta(hours=draw(st.integers(0, 100))) if finished else ended
    incarnation = draw(st.sampled_from(["1-0", None]))
    return {
        "job_id": draw(st.sampled_from("abcd")),
        "incarnation": incarnation,
        "created_at": None if incarnation is None else DAY,
        "queue": draw(st.sampled_from(["mail", "{x}"])),
        "name": draw(st.sampled_from(["send", None])),
        "state": draw(st.sampled_from(["failed", "completed", "active"])),
        "failed_reason": draw(TEXTS),
        "finished_at": ended if finished else None,
        "as_of": as_of,
    }


def last_at(row: Row) -> datetime:
    moment: datetime = row["finished_at"] or row["as_of"]
    return moment


def latest_rows(written: list[Row]) -> list[Row]:
    latest: dict[Any, Row] = {}
    for row in sorted(written, key=lambda row: (row["as_of"], last_at(row), row["state"])):
        latest[row["queue"], row["job_id"], row["incarnation"]] = row
    return list(latest.values())


def matches(row: Row, where: Row) -> bool:
    text = where.get("text")
    return (
        all(where.get(name) in {None, row[name]} for name in ("name", "state", "queue"))
        and where.get("id") in {None, row["job_id"]}
        and (text is None or (row["failed_reason"] is not None and text.lower() in row["failed_reason"].lower()))
        and ("since" not in where or last_at(row) >= where["since"])
        and ("until" not in where or last_at(row) < where["until"])
    )


FILTERS = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from("abcd"),
        "name": st.just("send"),
        "state": st.sampled_from(["failed", "active"]),
        "queue": st.sampled_from(["mail", "{x}"]),
        "text": st.sampled_from(["timed", "É", "'A'"]),
        "since": TIMES,
        "until": TIMES.map(lambda moment: moment + timedelta(days=5, hours=1)),  # after every since
    },
)


def without_ties(written: list[Row]) -> list[Row]:
    """Return rows without ties: a tie's winner depends on the order of reading."""
    return list(
        {(r["queue"], r["job_id"], r["incarnation"], r["as_of"], last_at(r), r["state"]): r for r in written}.values()
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=40)
@given(
    written=st.lists(rows(), min_size=1, max_size=25).map(without_ties),
    searches=st.lists(st.tuples(FILTERS, st.integers(1, 7)), min_size=2, max_size=2),
)
@pytest.mark.slow
def test_a_search_returns_the_same_jobs_as_a_reference_search_in_memory(
    written: list[Row], searches: list[tuple[Row, int]]
) -> None:
    with tempfile.TemporaryDirectory() as directory:
        history = History(LakeBuilder(Path(directory)).jobs(written).root)
        for where, limit in searches:
            compare_with_memory(history, written, where, limit)


def compare_with_memory(history: History, written: list[Row], where: Row, limit: int) -> None:
    if where.get("queue") in {None, *(row["queue"] for row in written)}:
        expected = [row for row in latest_rows(written) if matches(row, where)]
        expected.sort(
            key=lambda row: (last_at(row), row["queue"], row["job_id"], row["incarnation"] or ""), reverse=True
        )
        page = history.search(limit=limit, **where)
        jobs = list(page.jobs)
        while page.cursor:
            page = history.search(limit=limit, cursor=page.cursor, **where)
            jobs += page.jobs
        assert [(job.id, job.queue, job.incarnation, job.state, job.as_of) for job in jobs] == [
            (row["job_id"], row["queue"], row["incarnation"], row["state"], row["as_of"]) for row in expected
        ]
        span = {name: value for name, value in where.items() if name in {"queue", "name", "since", "until"}}
        counted = [row for row in latest_rows(written) if matches(row, span)]
        assert {(count.queue, count.name, count.state): count.jobs for count in history.job_counts(**span)} == {
            kind: sum((row["queue"], row["name"], row["state"]) == kind for row in counted)
            for kind in {(row["queue"], row["name"], row["state"]) for row in counted}
        }
