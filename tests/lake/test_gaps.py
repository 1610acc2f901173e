"""Gaps, read from the lake."""

from __future__ import annotations

import json
from datetime import date, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.errors import LakeError
from bulltask.lake.gaps import days_in_gaps, find_gaps
from bulltask.lake.layout import Layout
from bulltask.lake.ledger import Ledger
from bulltask.lake.tables import REPAIRS
from tests.support.lake import LakeBuilder, at

FIRST = {
    "after_id": "1-0", "first_id": "9-0", "lost": 8, "exact": True, "reason": "trimmed",
    "after_at": at("2026-11-22 10:00"), "first_at": at("2026-11-22 11:00"), "detected_at": at("2026-11-22 11:05"),
}  # fmt: skip
GONE = {
    "queue": "other", "after_id": "0-0", "lost": 0, "exact": False, "reason": "gone",
    "detected_at": at("2026-11-22 12:00"),
}  # fmt: skip


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    made = LakeBuilder(tmp_path).gaps([FIRST, GONE])
    for rows in (3, 2):
        row = {"after_id": "1-0", "detected_at": FIRST["detected_at"], "repaired_at": at("2026-11-22 13:00")}
        made.write(REPAIRS, [{**row, "repaired_rows": rows}])
    return made


def test_gaps_have_the_jobs_that_all_backfills_have_found(lake: LakeBuilder) -> None:
    first, gone = find_gaps(lake.layout)
    assert (first.queue, first.lost, first.exact, first.repaired_rows) == ("mail", 8, True, 5)
    assert (gone.queue, gone.exact, gone.after_at, gone.first_id, gone.repaired_rows) == (
        "other",
        False,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("since", "until", "found"),
    [
        ("2026-11-22 10:30", "2026-11-22 10:31", ["mail", "other"]),  # nobody knows when the second one began
        ("2026-11-22 11:30", None, ["other"]),
        ("2026-11-22 12:30", None, []),
        (None, "2026-11-22 10:00", ["other"]),
        (None, "2026-11-22 10:01", ["mail", "other"]),
    ],
)
def test_a_gap_is_found_by_every_time_that_its_events_may_be_of(
    lake: LakeBuilder, since: str | None, until: str | None, found: list[str]
) -> None:
    gaps = find_gaps(lake.layout, since=at(since) if since else None, until=at(until) if until else None)
    assert [gap.queue for gap in gaps] == found


def test_each_new_stream_of_a_queue_can_have_a_gap_at_its_start(tmp_path: Path) -> None:
    lake, lost = LakeBuilder(tmp_path), {"lost": 8, "exact": True, "reason": "trimmed"}
    found_at = [at("2026-11-20 10:00", 1), at("2026-11-21 10:00")]
    lake.gaps([{"after_id": "0-0", **lost, "detected_at": detected} for detected in found_at])
    for detected, rows in zip(found_at, (3, 4), strict=True):
        row = {"after_id": "0-0", "detected_at": detected, "repaired_at": at("2026-11-22 13:00")}
        lake.write(REPAIRS, [{**row, "repaired_rows": rows}])
    assert [(gap.detected_at, gap.repaired_rows) for gap in find_gaps(lake.layout)] == [
        (found_at[0], 3),
        (found_at[1], 4),
    ]


def test_days_on_which_jobs_may_have_ended_within_a_gap_also_by_a_clock_that_differs(tmp_path: Path) -> None:
    lake, lost = LakeBuilder(tmp_path), {"lost": 1, "exact": True, "reason": "trimmed"}
    days = [date(2026, 11, day) for day in range(1, 29)]
    lake.gaps([
        {"after_id": "1-0", **lost, "after_at": at("2026-11-12 10:00"), "first_at": at("2026-11-12 23:59:51"),
         "detected_at": at("2026-11-25 10:00")},
        {"after_id": "5-0", **lost, "after_at": at("2026-11-20 00:00:09"), "detected_at": at("2026-11-20 10:00")},
    ])  # fmt: skip
    assert [day.day for day in days_in_gaps(lake.layout, days)] == [12, 13, 19, 20]
    lake.gaps([{"after_id": "0-0", **lost, "first_at": at("2026-11-03 10:00"), "detected_at": at("2026-11-25 10:00")}])
    assert [day.day for day in days_in_gaps(lake.layout, days)] == [1, 2, 3, 12, 13, 19, 20]


def test_gaps_of_some_queues_only(lake: LakeBuilder) -> None:
    assert [gap.queue for gap in find_gaps(lake.layout, queues=["other"])] == ["other"]


def test_without_a_lake_nothing_is_reported_as_complete(tmp_path: Path) -> None:
    with pytest.raises(LakeError):
        find_gaps(Layout(tmp_path / "nowhere"))


def test_an_unknown_queue_is_not_reported_as_complete(lake: LakeBuilder) -> None:
    def asked(queues: str) -> Result:
        return CliRunner().invoke(main, ["pipeline", "gaps", "--root", str(lake.layout.root), "--queues", queues])

    found = asked("othr")
    assert found.exit_code == 1
    assert "has no data of queue 'othr'; did you mean 'other'? It has other, " in found.output
    assert asked("{other}").exit_code == asked("other").exit_code == 3


def test_one_gap_is_printed_in_the_singular(tmp_path: Path) -> None:
    lost = {"lost": 1, "exact": True, "reason": "trimmed", "detected_at": at("2026-11-22 10:01")}
    LakeBuilder(tmp_path).gaps([{"after_id": "1-0", "after_at": at("2026-11-22 10:00"), **lost}])
    found = CliRunner().invoke(main, ["pipeline", "gaps", "--root", str(tmp_path)])
    assert found.output.endswith("\n1 gap, 1 event lost\n")


def test_the_command_ends_with_3_when_something_is_missing(lake: LakeBuilder, tmp_path: Path) -> None:
    words = ["pipeline", "gaps", "--root", str(tmp_path)]
    found = CliRunner().invoke(main, words)
    assert found.exit_code == 3
    assert "2 gaps, 8 events lost" in found.output
    assert ">= 0" in found.output
    as_json = json.loads(CliRunner().invoke(main, [*words, "--json"]).output)
    assert [(one["queue"], one["lost"], one["after_at"]) for one in as_json] == [
        ("mail", 8, "2026-11-22T10:00:00+00:00"), ("other", 0, None),
    ]  # fmt: skip
    fine = CliRunner().invoke(main, [*words, "--since", "2026-11-23"])
    assert (fine.exit_code, fine.output) == (0, "No gaps: every event up to the last batch was read.\n")
    Ledger(Layout(tmp_path / "new")).announce("3f0c2a91-00000000")  # its first batch was stopped
    none = CliRunner().invoke(main, ["pipeline", "gaps", "--root", str(tmp_path / "new")])
    assert (none.exit_code, none.output) == (0, "No gaps, and no events: no batch has been published yet.\n")
    nowhere = CliRunner().invoke(main, ["pipeline", "gaps", "--root", str(tmp_path / "nowhere")])
    assert nowhere.exit_code == 1
    assert "there is no lake" in nowhere.output


def test_gaps_are_in_the_order_in_which_they_were_found_and_touch_the_time_up_to_that(tmp_path: Path) -> None:
    lake, lost = LakeBuilder(tmp_path), {"lost": 1, "exact": True, "reason": "trimmed", "after_id": "1-0"}
    found_at = {"zoo": at("2026-11-20 10:00"), "ants": at("2026-11-21 10:00")}
    for queue, detected in found_at.items():
        lake.gaps([{**lost, "queue": queue, "after_at": at("2026-11-19 10:00"), "detected_at": detected}])

    def found(since: datetime) -> list[str]:
        return [gap.queue for gap in find_gaps(lake.layout, since=since)]

    assert found(at("2026-11-19")) == found(found_at["zoo"]) == ["zoo", "ants"]  # what is behind it nobody knows yet
    assert found(at("2026-11-20 10:01")) == ["ants"]
