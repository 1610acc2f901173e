"""The length of event streams: the arithmetic behind the doctor command and the documentation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.cli.pipeline import COMMANDS
from bulltask.lake.status import BYTES_PER_EVENT, stream_sizes
from bulltask.transport.streams import RetentionNeed, StreamRetention, busiest_rate, recommended_length

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "pipeline.md"


def test_a_streams_retention_is_its_limit_divided_by_its_rate() -> None:
    assert StreamRetention("mail", 10_000, 10_000, 830).retention_s == pytest.approx(12.05, abs=0.01)
    assert StreamRetention("mail", 3, 10_000, None).retention_s is None


def test_the_needed_retention_is_the_longer_of_two_batches_and_an_outage() -> None:
    assert RetentionNeed(10, 5).seconds == 30
    assert RetentionNeed(10, 5, outage_s=900).seconds == 900
    stream = StreamRetention("mail", 10_000, 10_000, 400)  # 25 s
    assert [stream.is_enough(need) for need in (RetentionNeed(10, 2.5), RetentionNeed(10, 3))] == [True, False]
    assert StreamRetention("mail", 0, 10_000, None).is_enough(RetentionNeed(10, 5)) is None


def test_the_recommended_length_is_enough_and_at_least_the_default() -> None:
    assert recommended_length(830, RetentionNeed(10, 5, 900)) == 747_000
    assert recommended_length(1, RetentionNeed(10, 5)) == 10_000
    for rate in (0.1, 333.3, 1_000.0, 8_860.0):
        stream = StreamRetention("mail", 0, recommended_length(rate, RetentionNeed(7, 3, 61)), rate)
        assert stream.is_enough(RetentionNeed(7, 3, 61))
        assert stream.recommended_limit(RetentionNeed(7, 3, 61)) == stream.limit


def test_the_rate_is_that_of_the_busiest_span() -> None:
    assert busiest_rate([(1_000, 10_000), (900, 3_000)]) == 300
    assert busiest_rate([(1_000, 0)]) == 1_000  # a span counts as one second or more
    assert busiest_rate([(0, 10_000)]) is None


def test_the_size_table_contains_the_measured_example() -> None:
    """200 jobs a second produce 747,000 events in 15 minutes, which take 46 MB."""
    assert list(stream_sizes([200])) == [("200", "830", "12.0 s", "25,000", "747,000", "46 MB")]


def test_the_documentation_and_the_doctor_have_the_same_numbers() -> None:
    printed = CliRunner().invoke(main, ["pipeline", "doctor", "--sizes"]).output.splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.read_text().splitlines()]
    begin = next(number for number, row in enumerate(rows) if row[0] == "jobs/s")
    table = [rows[begin], *rows[begin + 2 : begin + 2 + len([*stream_sizes()])]]
    assert [re.split(r" {2,}", line.strip()) for line in printed] == table


def test_every_command_of_the_pipeline_is_documented() -> None:
    documented = set(re.findall(r"^\| `([\w-]+)` \|", PAGE.read_text(), re.MULTILINE))
    assert COMMANDS.keys() - documented == set()


def test_the_numbers_for_a_billion_events_a_day_are_computed_from_the_measured_ones() -> None:
    """A batch writes two files of events (of two tasks), and one of attempts, of jobs and of open jobs."""
    text = (PAGE.parent.parent / "explanation" / "scaling.md").read_text().partition("a billion events a day\n")[2]
    rows = dict(line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| "))
    mean, batches, queues = 1e9 / 86_400, 86_400 // 10, 200
    ring = recommended_length(2 * mean / queues, RetentionNeed(10, 2, outage_s=900))
    puts, gets = (int(number) for number in re.findall(r"[*](\d+)[*]", rows["requests to S3 in a batch: PUT, GET"]))
    bronze, silver = re.findall(r"[*](\d+)[*]", rows["bytes of an event in bronze, of a row of silver"])
    cpu = "CPU time for 100,000 events at the average rate; cores"
    cpu_s = rows[cpu].split("*")[1].removesuffix(" s")
    assert rows == {
        **rows,
        "events/s: average, busiest minute with twice as many": f"{mean:,.0f}, {2 * mean:,.0f}",
        cpu: f"*{cpu_s} s*; {float(cpu_s) * mean / 1e5:.2f}",
        "batches, commits and files a day, before `maintain`": f"{batches:,}, {4 * batches:,}, {5 * batches:,}",
        "`maxLen` of each queue for an outage of 15 minutes": f"{ring:,}",
        f"Redis' memory for these events, of *{BYTES_PER_EVENT}* bytes each": f"{queues * ring * 61 / 1e9:.2f} GB",
        "the lake's growth a day, of 4.16 events per job": f"{int(bronze) + 2 * int(silver) / 4.16:.0f} GB",
        "their price a day, at $5 and $0.40 a million": f"${batches * (5 * puts + 0.4 * gets) / 1e6:.2f}",
    }
