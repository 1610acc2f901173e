"""How long a queue's ring of events should be: the arithmetic behind the doctor and the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.cli.pipeline import COMMANDS
from bulltask.lake.stream_retention import (
    RetentionNeed,
    StreamRetention,
    busiest_rate,
    recommended_length,
    retention_examples,
)

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "pipeline.md"


def test_a_stream_keeps_events_until_it_is_full() -> None:
    assert StreamRetention("mail", 10_000, 10_000, 830).headroom_s == pytest.approx(12.05, abs=0.01)
    assert StreamRetention("mail", 3, 10_000, None).headroom_s is None


def test_needed_are_two_rounds_or_the_outage_whichever_is_longer() -> None:
    assert RetentionNeed(10, 5).seconds == 30
    assert RetentionNeed(10, 5, outage_s=900).seconds == 900
    ring = StreamRetention("mail", 10_000, 10_000, 400)  # 25 s
    assert [ring.is_enough(need) for need in (RetentionNeed(10, 2.5), RetentionNeed(10, 3))] == [True, False]
    assert StreamRetention("mail", 0, 10_000, None).is_enough(RetentionNeed(10, 5)) is None


def test_the_advice_is_enough_and_no_shorter_than_the_default() -> None:
    assert recommended_length(830, RetentionNeed(10, 5, 900)) == 747_000
    assert recommended_length(1, RetentionNeed(10, 5)) == 10_000
    for rate in (0.1, 333.3, 1_000.0, 8_860.0):
        ring = StreamRetention("mail", 0, recommended_length(rate, RetentionNeed(7, 3, 61)), rate)
        assert ring.is_enough(RetentionNeed(7, 3, 61))
        assert ring.recommended_limit(RetentionNeed(7, 3, 61)) == ring.limit


def test_the_rate_is_that_of_the_busiest_span_and_of_nothing_there_is_none() -> None:
    assert busiest_rate([(1_000, 10_000), (900, 3_000)]) == 300
    assert busiest_rate([(1_000, 0)]) == 1_000  # all in one millisecond: not a million a second
    assert busiest_rate([(0, 10_000)]) is None


def test_the_table_of_sizes_has_the_measured_example() -> None:
    """15 minutes at 200 jobs a second are 747,000 events, which take 46 MB."""
    [line] = [one for one in retention_examples() if one.jobs_per_s == 200]
    assert (line.quarter_hour, round(line.quarter_hour_mb)) == (747_000, 46)
    assert round(line.default_holds_s) == 12


def test_the_documentation_and_the_doctor_have_the_same_numbers() -> None:
    printed = CliRunner().invoke(main, ["pipeline", "doctor", "--sizes"]).output.splitlines()
    said = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    begin = next(number for number, row in enumerate(said) if row[0] == "jobs/s")
    table = [said[begin], *said[begin + 2 : begin + 2 + len(retention_examples())]]
    assert [re.split(r" {2,}", line.strip()) for line in printed] == table


def test_every_command_of_the_pipeline_is_documented() -> None:
    said = set(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(), re.MULTILINE))
    assert COMMANDS.keys() - said == set()
