"""Gaps that are read from the lake."""

from __future__ import annotations

import re
from datetime import date, datetime
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.errors import LakeError
from bulltask.lake.reader import days_in_gaps, find_gaps
from bulltask.lake.storage import Lake
from bulltask.lake.tables import BACKFILLS
from tests.support.command_output import json_of
from tests.support.lake import LakeBuilder, at

FIRST = {
    "last_id_before": "1-0", "first_id_after": "9-0", "lost": 8, "exact": True, "loss_reason": "trimmed",
    "last_at_before": at("2026-11-22 10:00"), "first_at_after": at("2026-11-22 11:00"),
    "detected_at": at("2026-11-22 11:05"),
}  # fmt: skip
SECOND = {
    "queue": "other", "last_id_before": "0-0", "lost": 0, "exact": False, "loss_reason": "stream-deleted",
    "detected_at": at("2026-11-22 12:00"),
}  # fmt: skip


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    lake = LakeBuilder(tmp_path).gaps([FIRST, SECOND])
    for rows in (3, 2):
        row = {"last_id_before": "1-0", "detected_at": FIRST["detected_at"], "backfilled_at": at("2026-11-22 13:00")}
        lake.write(BACKFILLS, [{**row, "backfilled_jobs": rows}])
    return lake


def test_the_jobs_of_all_backfills_are_added_up(lake: LakeBuilder) -> None:
    first, second = find_gaps(lake.lake)
    assert (first.queue, first.lost, first.exact, first.backfilled_jobs) == ("mail", 8, True, 5)
    assert (second.queue, second.exact, second.last_at_before, second.first_id_after, second.backfilled_jobs) == (
        "other",
        False,
        None,
        None,
        None,
    )


@pytest.mark.parametrize(
    ("since", "until", "expected"),
    [
        ("2026-11-22 10:30", "2026-11-22 10:31", ["mail", "other"]),  # the start of the second gap is unknown
        ("2026-11-22 11:30", None, ["other"]),
        ("2026-11-22 12:30", None, []),
        (None, "2026-11-22 10:00", ["other"]),
        (None, "2026-11-22 10:01", ["mail", "other"]),
    ],
)
def test_gaps_are_filtered_by_the_possible_times_of_their_events(
    lake: LakeBuilder, since: str | None, until: str | None, expected: list[str]
) -> None:
    gaps = find_gaps(lake.lake, since=at(since) if since else None, until=at(until) if until else None)
    assert [gap.queue for gap in gaps] == expected


def test_each_new_stream_of_a_queue_can_have_a_gap_at_its_start(tmp_path: Path) -> None:
    lake, lost = LakeBuilder(tmp_path), {"lost": 8, "exact": True, "loss_reason": "trimmed"}
    detected_at = [at("2026-11-20 10:00", 1), at("2026-11-21 10:00")]
    lake.gaps([{"last_id_before": "0-0", **lost, "detected_at": detected} for detected in detected_at])
    for detected, rows in zip(detected_at, (3, 4), strict=True):
        row = {"last_id_before": "0-0", "detected_at": detected, "backfilled_at": at("2026-11-22 13:00")}
        lake.write(BACKFILLS, [{**row, "backfilled_jobs": rows}])
    assert [(gap.detected_at, gap.backfilled_jobs) for gap in find_gaps(lake.lake)] == [
        (detected_at[0], 3),
        (detected_at[1], 4),
    ]


def test_days_in_gaps_have_a_margin_for_clock_differences(tmp_path: Path) -> None:
    lake, lost = LakeBuilder(tmp_path), {"lost": 1, "exact": True, "loss_reason": "trimmed"}
    days = [date(2026, 11, day) for day in range(1, 29)]
    lake.gaps([
        {"last_id_before": "1-0", **lost, "last_at_before": at("2026-11-12 10:00"),
         "first_at_after": at("2026-11-12 23:59:51"), "detected_at": at("2026-11-25 10:00")},
        {"last_id_before": "5-0", **lost, "last_at_before": at("2026-11-20 00:00:09"),
         "detected_at": at("2026-11-20 10:00")},
    ])  # fmt: skip
    assert [day.day for day in days_in_gaps(lake.lake, days)] == [12, 13, 19, 20]
    lake.gaps(
        [
            {
                "last_id_before": "0-0",
                **lost,
                "first_at_after": at("2026-11-03 10:00"),
                "detected_at": at("2026-11-25 10:00"),
            }
        ]
    )
    assert [day.day for day in days_in_gaps(lake.lake, days)] == [1, 2, 3, 12, 13, 19, 20]


def test_gaps_are_filtered_by_queue(lake: LakeBuilder) -> None:
    assert [gap.queue for gap in find_gaps(lake.lake, queues=["other"])] == ["other"]


def test_find_gaps_raises_an_error_without_a_lake(tmp_path: Path) -> None:
    with pytest.raises(LakeError):
        find_gaps(Lake(tmp_path / "missing"))


def test_the_command_fails_for_an_unknown_queue(lake: LakeBuilder) -> None:
    def run_command(queues: str) -> Result:
        return CliRunner().invoke(main, ["pipeline", "gaps", "--lake", str(lake.root), "--queues", queues])

    result = run_command("othr")
    assert result.exit_code == 1
    assert "has no data for queue 'othr'; did you mean 'other'? It has other, " in result.output
    assert run_command("{other}").exit_code == run_command("other").exit_code == 3


def test_one_gap_is_printed_in_the_singular(tmp_path: Path) -> None:
    lost = {"lost": 1, "exact": True, "loss_reason": "trimmed", "detected_at": at("2026-11-22 10:01")}
    LakeBuilder(tmp_path).gaps([{"last_id_before": "1-0", "last_at_before": at("2026-11-22 10:00"), **lost}])
    result = CliRunner().invoke(main, ["pipeline", "gaps", "--lake", str(tmp_path)])
    assert result.output.endswith("\n1 gap, 1 event lost\n")


def test_the_command_exits_with_3_if_there_are_gaps(lake: LakeBuilder, tmp_path: Path) -> None:
    args = ["pipeline", "gaps", "--lake", str(tmp_path)]
    result = CliRunner().invoke(main, args)
    assert result.exit_code == 3
    assert "2 gaps, 8 events lost" in result.output
    assert re.search(r"other +0 +no ", result.output), "not exact"
    as_json = json_of(CliRunner().invoke(main, [*args, "--json"]), "pipeline gaps")
    assert [(gap["queue"], gap["lost"], gap["last_at_before"]) for gap in as_json] == [
        ("mail", 8, "2026-11-22T10:00:00+00:00"), ("other", 0, None),
    ]  # fmt: skip
    complete = CliRunner().invoke(main, [*args, "--since", "2026-11-23"])
    assert (complete.exit_code, complete.output) == (0, "No gaps: every event up to the last batch was read.\n")
    LakeBuilder(tmp_path / "new").events([])  # its first batch was stopped
    empty = CliRunner().invoke(main, ["pipeline", "gaps", "--lake", str(tmp_path / "new")])
    assert (empty.exit_code, empty.output) == (0, "No gaps, and no events: no batch has been written yet.\n")
    missing = CliRunner().invoke(main, ["pipeline", "gaps", "--lake", str(tmp_path / "missing")])
    assert missing.exit_code == 1
    assert "there is no lake" in missing.output


def test_gaps_are_ordered_by_detection_and_end_at_that_time(tmp_path: Path) -> None:
    lake, lost = LakeBuilder(tmp_path), {"lost": 1, "exact": True, "loss_reason": "trimmed", "last_id_before": "1-0"}
    detected_at = {"zoo": at("2026-11-20 10:00"), "ants": at("2026-11-21 10:00")}
    for queue, detected in detected_at.items():
        lake.gaps([{**lost, "queue": queue, "last_at_before": at("2026-11-19 10:00"), "detected_at": detected}])

    def queues_since(since: datetime) -> list[str]:
        return [gap.queue for gap in find_gaps(lake.lake, since=since)]

    # Without a known end, a gap lasts until it was detected.
    assert queues_since(at("2026-11-19")) == queues_since(detected_at["zoo"]) == ["zoo", "ants"]
    assert queues_since(at("2026-11-20 10:01")) == ["ants"]
