"""Searching the lake: every filter, the order, the pages, and that only the latest knowledge of a job is found."""

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
from bulltask.lake import History, PastJob
from bulltask.lake.tables import JOBS
from tests.support.lake import LakeBuilder, at

Row = dict[str, Any]
DAY = at("2026-11-20")


def done(job_id: str, moment: datetime, state: str = "completed", **more: Any) -> Row:
    return {
        "job_id": job_id,
        "incarnation": f"{job_id}-0",
        "name": "send",
        "state": state,
        "finished_at": moment,
        **more,
    }


def ids(history: History, **where: Any) -> list[str]:
    return [job.id for job in history.search(**where).jobs]


@pytest.fixture
def some(lake: LakeBuilder) -> History:
    """Five jobs of two queues and three days."""
    reason = "ConnectionError: SMTP server mx1.example.com: Timed Out"
    lake.jobs(
        [
            done("a", at("2026-11-20 10:00")),
            done("b", at("2026-11-21 10:00"), "failed", final_reason=reason, error_fingerprint="ConnectionError: SMTP"),
            done("c", at("2026-11-21 11:00"), "failed", final_reason="KeyError: 'x'", error_fingerprint="KeyError: #"),
            done("d", at("2026-11-22 00:00"), name="report", queue="reports"),
            {**done("e", at("2026-11-22 09:00"), "removed"), "finished_at": None, "as_of": at("2026-11-22 09:00")},
        ]
    )
    return History(lake.layout.root)


@pytest.mark.parametrize(
    ("where", "found"),
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
        ({"since": datetime(2026, 11, 22, 0, 0)}, "ed"),  # noqa: DTZ001 - UTC, where no zone is named
        ({"since": datetime(2026, 11, 22, 8, tzinfo=UTC).astimezone()}, "e"),
        ({"state": "failed", "text": "error", "queue": "mail", "name": "send", "since": date(2026, 11, 1)}, "cb"),
        ({"state": "failed", "queue": "reports"}, ""),
        ({"state": None, "text": None, "since": None}, "edcba"),
    ],
)
def test_jobs_are_found_by_each_filter_and_by_several_the_newest_first(some: History, where: Row, found: str) -> None:
    assert ids(some, **where) == list(found)


def test_a_job_has_the_lakes_columns_with_times_in_utc_and_lengths_in_seconds(lake: LakeBuilder) -> None:
    end = at("2026-11-20 10:00:01", 500)
    row = done("a", end, "failed", attempts=3, stalls=1, wait_ms=1500, run_ms=250, total_ms=None, data_bytes=7)
    row |= {"created_at": at("2026-11-20 10:00"), "first_started_at": at("2026-11-20 10:00:01"), "final_reason": "no"}
    lake.jobs([{**row, "error_fingerprint": "no", "parent_key": "bull:{up}:1"}])
    (job,) = History(lake.layout.root).search().jobs
    assert job == PastJob(
        id="a", queue="mail", name="send", state="failed", created_at=at("2026-11-20 10:00"),
        started_at=at("2026-11-20 10:00:01"), finished_at=end, seen_at=end, attempts=3, stalls=1, wait=1.5, run=0.25,
        total=None, reason="no", error_fingerprint="no", parent_key="bull:{up}:1", data_bytes=7, source="events",
        as_of=end, incarnation="a-0",
    )  # fmt: skip
    assert job.seen_at.tzinfo is UTC


def test_a_job_that_failed_and_was_completed_by_a_later_retry_is_found_as_completed_only(lake: LakeBuilder) -> None:
    lake.jobs([done("a", at("2026-11-20 10:00"), "failed", final_reason="no"), done("b", at("2026-11-20 09:00"))])
    lake.jobs([done("a", at("2026-11-22 10:00"))])
    history = History(lake.layout.root)
    assert [(job.id, job.state) for job in history.search().jobs] == [("a", "completed"), ("b", "completed")]
    assert ids(history, state="failed") == ids(history, text="no") == []
    assert ids(history, until=date(2026, 11, 21)) == ["b"]


def test_a_job_that_is_retried_manually_ten_days_later_has_its_last_state(lake: LakeBuilder) -> None:
    first, later = at("2026-11-10 10:00"), at("2026-11-20 10:00")
    added: dict[str, Any] = {"created_at": at("2026-11-10 09:59")}
    lake.jobs([done("a", first, "failed", final_reason="no", **added), done("b", first, **added)])
    lake.jobs([done("a", later, **added)])
    history = History(lake.layout.root)
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
        assert {one.state: one.jobs for one in history.counts(since=since, until=until)} == states
    whole = history.job("a")
    assert whole is not None
    assert [(job.state, job.finished_at) for job in whole.incarnations] == [("completed", later)]


@pytest.mark.parametrize("created_at", [at("2026-11-10 09:59"), None])
def test_an_end_that_a_backfill_finds_supersedes_a_removal_ten_days_later(
    lake: LakeBuilder, created_at: datetime | None
) -> None:
    removed = {**done("a", DAY, "removed", created_at=created_at), "finished_at": None, "as_of": at("2026-11-20 10:00")}
    lake.jobs([removed, done("b", at("2026-11-20 11:00"), created_at=created_at)])
    end = done("a", at("2026-11-10 10:00"), source="snapshot", created_at=created_at)
    lake.jobs([{**end, "as_of": at("2026-11-21")}])
    history = History(lake.layout.root)
    assert ids(history, state="removed") == ids(history, since=date(2026, 11, 20), id="a") == []
    assert ids(history) == ["b", "a"]
    assert [(one.state, one.jobs) for one in history.counts(since=date(2026, 11, 20))] == [("completed", 1)]
    assert [(one.state, one.jobs) for one in history.counts(since=date(2026, 11, 9))] == [("completed", 2)]


def test_no_day_before_the_jobs_of_a_search_were_added_is_read(lake: LakeBuilder) -> None:
    """What keeps a search cheap: the day before is for clocks."""
    for day in range(1, 21):
        moment = at(f"2026-11-{day:02} 10:00")
        lake.jobs([done(f"j{day}", moment, created_at=moment)])
    for day in range(1, 19):
        [file] = lake.layout.day(JOBS, date(2026, 11, day)).rglob("*.parquet")
        file.write_bytes(b"not to be read")
    history = History(lake.layout.root)
    assert ids(history, limit=2, since=date(2026, 11, 20)) == ["j20"]
    assert [one.jobs for one in history.counts(since=date(2026, 11, 20))] == [1]


def test_a_retry_whose_beginning_has_expired_is_another_life(lake: LakeBuilder) -> None:
    """As docs/how-to/pipeline.md says of expire: nothing tells it from an id that was used again."""
    lake.jobs([done("a", at("2026-11-10"), "failed", incarnation="1-0", created_at=at("2026-11-10"))])
    lake.jobs([done("a", at("2026-11-20"), incarnation=None)])
    found = History(lake.layout.root).search().jobs
    assert [(job.state, job.created_at) for job in found] == [("completed", None), ("failed", at("2026-11-10"))]


def test_a_snapshot_by_a_clock_that_is_behind_takes_the_place_of_a_row_of_the_next_day(lake: LakeBuilder) -> None:
    cut = {**done("a", DAY, "active"), "finished_at": None, "as_of": at("2026-11-20 00:00", 5)}
    lake.jobs([cut]).jobs([{**done("a", at("2026-11-20", -5)), "as_of": at("2026-11-21"), "source": "snapshot"}])
    history = History(lake.layout.root)
    assert ids(history, state="active") == []
    assert ids(history) == ["a"]


def test_lives_of_one_id_and_the_same_id_in_two_queues_are_jobs_of_their_own(lake: LakeBuilder) -> None:
    lake.jobs(
        [
            done("a", DAY, incarnation="1-0"),
            done("a", at("2026-11-21"), incarnation=None),
            done("a", DAY, queue="other"),
        ]
    )
    assert ids(History(lake.layout.root)) == ["a", "a", "a"]


def test_pages_have_every_job_once_also_where_many_ended_in_the_same_moment(lake: LakeBuilder) -> None:
    lake.jobs([done(f"{number:03}", DAY) for number in range(95)] + [done("old", at("2026-11-01"))])
    history, found, cursor, pages = History(lake.layout.root), list[str](), None, 0
    while pages == 0 or cursor:
        page = history.search(limit=10, cursor=cursor, since=date(2026, 10, pages + 1))  # times may move on
        found += [job.id for job in page.jobs]
        cursor, pages = page.cursor, pages + 1
    assert found == [f"{number:03}" for number in reversed(range(95))] + ["old"]
    assert pages == 10


def test_a_page_is_full_although_the_newest_rows_that_fit_are_superseded(lake: LakeBuilder) -> None:
    lake.jobs([done(f"x{n:02}", at("2026-11-20 12:00", n), "failed") for n in range(60)])
    lake.jobs([done(f"x{n:02}", at("2026-11-21")) for n in range(60)])
    lake.jobs([done(f"y{n}", at("2026-11-20 11:00", n), "failed") for n in range(3)])
    page = History(lake.layout.root).search(state="failed", limit=2)
    assert [job.id for job in page.jobs] == ["y2", "y1"]
    assert page.cursor is not None


def test_a_row_that_was_written_twice_is_found_once(lake: LakeBuilder) -> None:
    lake.jobs([done("a", DAY)]).jobs([done("a", DAY)])
    assert ids(History(lake.layout.root)) == ["a"]


@pytest.mark.parametrize(
    ("where", "said"),
    [
        ({"limit": 0}, "limit must be from 1 to 1,000, not 0"),
        ({"limit": 1001}, "limit must be"),
        ({"limit": True}, "limit must be"),
        ({"state": "fialed"}, "unknown state 'fialed'; did you mean 'failed'?"),
        ({"queue": "mial"}, "has no data of queue 'mial'; did you mean 'mail'?"),
        ({"queue": ""}, "queue must be a non-empty string"),
        ({"text": 3}, "text must be a non-empty string"),
        ({"since": 3600}, "since must be a datetime or a date, not 3600"),
        ({"since": date(2026, 11, 2), "until": date(2026, 11, 1)}, "must be before until"),
        ({"cursor": "nonsense"}, "invalid cursor 'nonsense'"),
        ({"cursor": "é"}, "invalid cursor"),
        ({"cursor": ""}, "invalid cursor"),
    ],
)
def test_invalid_arguments_are_rejected(some: History, where: Row, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        some.search(**where)


def test_a_filter_that_does_not_exist_is_refused(some: History) -> None:
    with pytest.raises(TypeError, match=r"cannot be searched by .stat.; did you mean .state."):
        some.search(stat="failed")  # type: ignore[call-arg]


def test_the_cursor_of_another_search_is_refused(some: History) -> None:
    cursor = some.search(limit=1).cursor
    assert cursor
    with pytest.raises(ConfigError, match="belongs to another search"):
        some.search(limit=1, cursor=cursor, state="failed")


def test_without_a_lake_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(LakeError, match=r"there is no lake in .*/nowhere"):
        History(tmp_path / "nowhere")


def test_a_lake_without_any_job_has_none(tmp_path: Path) -> None:
    (tmp_path / "_pipeline").mkdir()
    history = History(tmp_path)
    assert history.search().jobs == ()
    assert (history.days(), history.queues(), history.counts(), history.job("a")) == ([], [], [], None)


def test_a_broken_file_is_an_error_that_names_it(lake: LakeBuilder) -> None:
    lake.jobs([done("a", DAY)])
    (file,) = lake.layout.root.rglob("*.parquet")
    file.write_bytes(b"PAR1 nonsense")
    with pytest.raises(LakeError, match=re.escape(file.name)):
        History(lake.layout.root).search()


# ---- against the plainest search that there is -----------------------------------------------------------------------

TIMES = st.integers(0, 5 * 86_400_000 // 7_200_000).map(lambda n: DAY + timedelta(hours=2 * n))
TEXTS = st.sampled_from(["Timed out", "timed OUT é", "KeyError: 'a'", "", None])


@st.composite
def rows(draw: Callable[..., Any]) -> Row:
    ended, finished = draw(TIMES), draw(st.booleans())
    # What a backfill finds out is known later than it happened, by any time.
    as_of = ended + timedelta(hours=draw(st.integers(0, 100))) if finished else ended
    incarnation = draw(st.sampled_from(["1-0", None]))
    return {
        "job_id": draw(st.sampled_from("abcd")),
        "incarnation": incarnation,
        "created_at": None if incarnation is None else DAY,
        "queue": draw(st.sampled_from(["mail", "{x}"])),
        "name": draw(st.sampled_from(["send", None])),
        "state": draw(st.sampled_from(["failed", "completed", "active"])),
        "final_reason": draw(TEXTS),
        "finished_at": ended if finished else None,
        "as_of": as_of,
        "ingest_id": draw(st.sampled_from(["i-1", "i-2"])),
    }


def seen(row: Row) -> datetime:
    moment: datetime = row["finished_at"] or row["as_of"]
    return moment


def counting(written: list[Row]) -> list[Row]:
    best: dict[Any, Row] = {}
    for row in sorted(written, key=lambda row: (row["as_of"], seen(row), row["state"])):
        best[row["queue"], row["job_id"], row["incarnation"]] = row
    return list(best.values())


def fits(row: Row, where: Row) -> bool:
    text = where.get("text")
    return (
        all(where.get(name) in {None, row[name]} for name in ("name", "state", "queue"))
        and where.get("id") in {None, row["job_id"]}
        and (text is None or (row["final_reason"] is not None and text.lower() in row["final_reason"].lower()))
        and ("since" not in where or seen(row) >= where["since"])
        and ("until" not in where or seen(row) < where["until"])
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
        "until": TIMES.map(lambda moment: moment + timedelta(days=5, hours=1)),  # behind every since
    },
)


def unlike(written: list[Row]) -> list[Row]:
    """Rows that no two orders of reading would choose between: none with the same rank and other contents."""
    return list(
        {(r["queue"], r["job_id"], r["incarnation"], r["as_of"], seen(r), r["state"]): r for r in written}.values()
    )


@pytest.mark.slow
@pytest.mark.timeout(300)
@settings(max_examples=80)
@given(written=st.lists(rows(), min_size=1, max_size=25).map(unlike), where=FILTERS, limit=st.integers(1, 7))
def test_a_search_finds_what_a_plain_one_would(written: list[Row], where: Row, limit: int) -> None:
    with tempfile.TemporaryDirectory() as directory:
        history = History(LakeBuilder(Path(directory)).jobs(written).layout.root)
        if where.get("queue") not in {None, *(row["queue"] for row in written)}:
            return
        expected = [row for row in counting(written) if fits(row, where)]
        expected.sort(key=lambda row: (seen(row), row["queue"], row["job_id"], row["incarnation"] or ""), reverse=True)
        page = history.search(limit=limit, **where)
        found = list(page.jobs)
        while page.cursor:
            page = history.search(limit=limit, cursor=page.cursor, **where)
            found += page.jobs
        assert [(job.id, job.queue, job.incarnation, job.state, job.as_of) for job in found] == [
            (row["job_id"], row["queue"], row["incarnation"], row["state"], row["as_of"]) for row in expected
        ]
        span = {name: value for name, value in where.items() if name in {"queue", "name", "since", "until"}}
        known = [row for row in counting(written) if fits(row, span)]
        assert {(one.queue, one.name, one.state): one.jobs for one in history.counts(**span)} == {
            kind: sum((row["queue"], row["name"], row["state"]) == kind for row in known)
            for kind in {(row["queue"], row["name"], row["state"]) for row in known}
        }
