"""``bulltask pipeline report``."""

from __future__ import annotations

import csv
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.lake.report.sections import _csv_cell
from tests.support.gold import queue_minute, task_minute
from tests.support.lake import LakeBuilder, at

Run = Callable[..., Result]


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    lake = LakeBuilder(tmp_path / "lake")
    for queue in ("images", "mail"):
        counts: dict[str, Any] = {"added": 60, "finished": 60, "completed": 58, "failed": 2}
        lake.gold("task_minute", [task_minute("10:00", queue=queue, waits=[10], runs=[1000] * 60, **counts)])
        busy = {"added": 60, "finished_or_removed": 60, "busy_slots": 1.0, "peak_slots": 4, "capacity": 4}
        lake.gold("capacity_minute", [queue_minute("10:00", queue=queue, utilization=0.25, **busy)])
        key = {"queue": queue, "name": "=send()", "dt": "2026-11-22"}
        lake.gold(
            "cost_day", [{**key, "jobs": 60, "attempts": 60, "busy_s": 60.0, "wasted_s": 0.0, "cost": Decimal("0.3")}]
        )
        times = {
            "first_seen": at("2026-11-22 10:00"),
            "last_seen": at("2026-11-22 10:00"),
            "sample_job_ids": ["j1", "j2"],
        }
        lake.gold(
            "errors_day",
            [
                {
                    **key,
                    "error_fingerprint": "no \x1b[31manswer",
                    "count": 2,
                    "sample_failed_reason": "all of it",
                    **times,
                }
            ],
        )
        slo = {"metric": "run", "threshold_ms": 500, "target": 0.5, "measured": 4, "good": 3, "complete": True}
        lake.gold("slo_day", [{**key, **slo}])
    return lake


@pytest.fixture
def run(lake: LakeBuilder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def invoke(*args: str) -> Result:
        return CliRunner().invoke(main, ["pipeline", "report", "--lake", str(lake.root), *args])

    return invoke


def test_the_command_writes_a_page_and_prints_its_file_name(run: Run) -> None:
    result = run()
    assert (result.exit_code, result.output) == (0, "Report on 2026-11-22 written to bulltask-report-2026-11-22.html\n")
    assert Path("bulltask-report-2026-11-22.html").read_text().startswith("<!doctype html>")
    assert [path.name for path in Path().iterdir() if path.is_file()] == ["bulltask-report-2026-11-22.html"]


def test_the_format_is_chosen_by_an_option_or_by_the_file_extension(run: Run) -> None:
    assert run("--format", "md").output.startswith("# Jobs, 22 November 2026\n")
    assert run("--days", "2026-11-21..2026-11-22", "-o", "week.md").exit_code == 0
    assert Path("week.md").read_text().startswith("# Jobs, 21 November to 22 November 2026\n")
    assert run("-o", "-").output.startswith("<!doctype html>")
    assert run("cost", "-o", "cost.csv").exit_code == 0
    assert Path("cost.csv").read_text().startswith("queue,name,jobs")


@pytest.mark.parametrize("section", ["slo", "capacity", "cost", "errors"])
def test_a_section_is_printed_in_every_format(run: Run, section: str) -> None:
    rows = json.loads(run(section, "--format", "json").output)
    assert [row["queue"] for row in rows] == ["images", "mail"]
    assert [row["queue"] for row in csv.DictReader(io.StringIO(run(section, "--format", "csv").output))] == [
        "images",
        "mail",
    ]
    text = run(section)
    assert text.exit_code == 0
    assert text.output.splitlines()[1].startswith("images")
    assert run(section, "--format", "md").output.splitlines()[2].startswith("| images |")
    assert [row["queue"] for row in json.loads(run(section, "--format", "json", "--queues", "mail").output)] == ["mail"]


def test_values_in_json_are_not_rounded(run: Run) -> None:
    [cost, _] = json.loads(run("cost", "--format", "json").output)
    assert (cost["cost"], Decimal(cost["per_job"]), cost["busy_s"], cost["wasted"]) == (
        "0.300000",
        Decimal("0.005"),
        60.0,
        0.0,
    )
    [slo, _] = json.loads(run("slo", "--format", "json").output)
    assert (slo["threshold_ms"], slo["attainment"], slo["error_budget_remaining"], slo["complete"]) == (
        500,
        0.75,
        0.5,
        True,
    )
    [error, _] = json.loads(run("errors", "--format", "json").output)
    assert (error["error_fingerprint"], error["last_seen"]) == ("no \x1b[31manswer", "2026-11-22T10:00:00+00:00")
    assert (error["sample_failed_reason"], error["sample_job_ids"]) == ("all of it", ["j1", "j2"])


def test_control_characters_and_formulas_are_escaped(run: Run) -> None:
    output = run("errors").output
    assert "\x1b" not in output
    assert "no \\x1b[31manswer" in output
    assert {row["name"] for row in csv.DictReader(io.StringIO(run("errors", "--format", "csv").output))} == {"'=send()"}
    assert {row["name"] for row in json.loads(run("errors", "--format", "json").output)} == {"=send()"}


@pytest.mark.parametrize("kind", ["table", "md", "csv", "json"])
def test_no_table_contains_control_characters(run: Run, lake: LakeBuilder, kind: str) -> None:
    evil = "\x1b[31m \x9b2J \u202e \r\n \x07"
    lake.gold("errors_day", [{"queue": "evil", "name": evil, "dt": "2026-11-22", "error_fingerprint": evil, "count": 1,
                              "sample_failed_reason": evil, "sample_job_ids": [evil]}])  # fmt: skip
    output = run("errors", "--format", kind).output
    assert not set(output) & {"\x1b", "\x9b", "\u202e", "\r", "\x07"}
    if kind == "json":
        assert evil in {row["name"] for row in json.loads(output)}
    else:
        assert "\\x1b[31m \\x9b2J \\u202e \\r\\n \\x07" in output.replace("&#91;", "[").replace("&#92;", "\\")


def test_a_link_with_the_name_of_the_unfinished_file_is_not_followed(run: Run, tmp_path: Path) -> None:
    (tmp_path / "victim").write_text("important")
    (tmp_path / f".day.html.{os.getpid()}").symlink_to(tmp_path / "victim")
    assert run("-o", "day.html").exit_code == 0
    assert (tmp_path / "victim").read_text() == "important"
    assert (tmp_path / "day.html").read_text().startswith("<!doctype html>")


def test_a_concurrency_is_recommended_with_the_reasoning(run: Run) -> None:
    rows = json.loads(run("capacity", "--format", "json").output)
    assert all(row["concurrency"] >= 2 for row in rows)
    text = run("capacity", "--max-wait", "500ms").output
    assert "invalid duration" in text
    text = run("capacity", "--max-wait", "10s", "--target", "0.9", "--peak-factor", "1").output
    assert "Recommended concurrency if the same workers process all these queues: " in text
    assert " slots across all workers, so that 90% of the attempts start within 10 s, even in the busiest" in text
    assert "* The busiest of" in text


def test_lost_events_are_reported_on_standard_error(run: Run, lake: LakeBuilder) -> None:
    lost = {"lost": 5, "exact": True, "loss_reason": "trimmed", "detected_at": at("2026-11-22 10:01")}
    lake.gaps([{"last_id_before": "1-0", "last_at_before": at("2026-11-22 10:00"), **lost}])
    result = run("cost", "--format", "json")
    assert result.exit_code == 0
    assert json.loads(result.stdout)
    assert result.stderr.startswith("Incomplete: 2 minutes. Events of mail were lost: 5.")


def test_a_queue_may_be_named_with_its_hash_tag(run: Run) -> None:
    result = run("errors", "--format", "json", "--queues", "{mail}")
    assert [row["queue"] for row in json.loads(result.stdout)] == ["mail"]


def test_a_day_without_data_is_not_an_error(run: Run) -> None:
    result = run("--day", "2026-11-20")
    assert result.exit_code == 0
    assert "No jobs for 20 November 2026. The lake has days" in result.stderr
    assert "from 2026-11-22 to 2026-11-22" in result.stderr
    assert json.loads(run("errors", "--day", "2026-11-20", "--format", "json").stdout) == []


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--format", "csv"], 2, "--format for the whole report must be html or md; csv needs a section"),
        (["cost", "--format", "html"], 2, "must be table, json, csv, md, not html"),
        (["--day", "2026-11-22", "--days", "2026-11-22"], 2, "--day and --days cannot be used together"),
        (["--days", "2020-01-01..2026-11-22"], 1, "more than 366 days"),
        (["--target", "1.5"], 1, "target must be more than 0 and less than 1"),
        (["-o", "no/such/folder.html"], 1, "no/such/folder.html cannot be written"),
        (["costs"], 2, "'costs' is not one of"),
        (["--queues", "mial"], 1, "has no data for queue 'mial'; did you mean 'mail'? It has mail, images"),
        (["cost", "--queues", "mail,xyz"], 1, "has no data for queue 'xyz'. It has images, mail"),
    ],
)
def test_invalid_arguments_are_rejected_with_a_message(run: Run, args: list[str], code: int, message: str) -> None:
    result = run(*args)
    assert (result.exit_code, message in result.stderr) == (code, True), result.stderr


def test_a_missing_or_empty_lake_is_an_error(tmp_path: Path) -> None:
    def invoke(root: Path) -> Result:
        return CliRunner().invoke(main, ["pipeline", "report", "--lake", str(root)])

    assert "there is no lake" in invoke(tmp_path / "missing").stderr
    LakeBuilder(tmp_path).events([])
    result = invoke(tmp_path)
    assert (result.exit_code, "has no events yet" in result.stderr) == (1, True)


@pytest.mark.slow
@pytest.mark.parametrize("missing", ["jinja2", "pyarrow"])
def test_the_error_without_a_dependency_names_the_extra(lake: LakeBuilder, missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; from bulltask.cli.main import main; main(sys.argv[1:])"
    args = [sys.executable, "-c", code, "pipeline", "report", "--lake", str(lake.root), "-o", "-"]
    result = subprocess.run(args, capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert re.search(rf"{missing}.* is not installed: pip install 'bulltask\[report\]'", result.stderr)


@pytest.mark.slow
def test_the_report_needs_neither_spark_nor_numpy(lake: LakeBuilder, tmp_path: Path) -> None:
    code = (
        "import sys; sys.modules['numpy'] = sys.modules['pyspark'] = None;"  # Arrow imports numpy if it is installed
        "from bulltask.cli.main import main; main(sys.argv[1:], standalone_mode=False);"
        "print([name for name in ('pyspark', 'py4j') if sys.modules.get(name)])"
    )
    out = str(tmp_path / "page.html")
    args = [sys.executable, "-c", code, "pipeline", "report", "--lake", str(lake.root), "-o", out]
    result = subprocess.run(args, capture_output=True, text=True, check=True)
    assert result.stdout.endswith("page.html\n[]\n")


@pytest.mark.parametrize(
    "text",
    [
        "=1",
        "+1",
        "-1",
        "@a",
        " =1",
        "\u00a0=1",
        "\u3000@a",
        "\uff1d1",
        "\uff0b1",
        "\uff0d1",
        "\uff20a",
        "\u200b=1",
        "\t=1",
        "\n=1",
    ],
)
def test_no_text_is_a_formula_in_a_spreadsheet(text: str) -> None:
    assert str(_csv_cell(text)).startswith("'")
    assert str(_csv_cell(f"a{text}")).startswith("a")
