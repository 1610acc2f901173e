"""``bulltask pipeline``: the commands that need neither Java nor Redis."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest
from click.testing import CliRunner, Result

from bulltask.cli import options
from bulltask.cli.job import job
from bulltask.cli.main import main
from bulltask.cli.pipeline import pipeline
from bulltask.errors import ConfigError
from bulltask.lake.history import History
from bulltask.lake.reader import TableReader
from bulltask.lake.tables import EVENTS, OPEN_EVENTS
from tests.support.command_output import json_of
from tests.support.lake import LakeBuilder

Run = Callable[..., Result]


@pytest.fixture
def lake(tmp_path: Path) -> LakeBuilder:
    lake = LakeBuilder(tmp_path)
    for batch in range(3):
        lake.events([{"event_id": f"{1795305600000 + batch}-{n}", "event": "added"} for n in range(5)])
    return lake


@pytest.fixture
def run(tmp_path: Path) -> Run:
    def invoke(command: str, *args: str) -> Result:
        return CliRunner().invoke(main, ["pipeline", command, "--lake", str(tmp_path), *args])

    return invoke


def test_maintain_prints_each_table_and_changes_nothing_in_a_dry_run(lake: LakeBuilder, run: Run) -> None:
    planned = run("maintain", "--keep", "silver=30", "--dry-run")
    assert planned.exit_code == 0, planned.output
    assert planned.output.endswith("Dry run: nothing was changed. Run the command again without --dry-run.\n")
    (events,) = json_of(run("maintain", "--json"), "pipeline maintain")["tables"]
    assert (events["table"], events["files_before"], events["files_after"]) == ("bronze.events", 3, 1)
    assert "3 -> 1" not in run("maintain").output


def test_maintain_removes_days_that_are_not_kept(lake: LakeBuilder, run: Run) -> None:
    (events,) = json_of(run("maintain", "--keep", "bronze.events=1", "--json"), "pipeline maintain")["tables"]
    assert (events["expired_days"], events["expired_files"]) == (1, 3)
    assert TableReader(lake.lake).days(EVENTS) == []


@pytest.mark.parametrize(
    "args",
    [
        ["gaps"],
        ["report"],
        ["maintain"],
        ["forget", "--job", "1", "--yes"],
        ["build", "gold", "--days", "2026-11-22"],
        ["backfill", "--since", "2026-11-21", "--until", "2026-11-22"],
        ["replay", "--where", "true"],
    ],
    ids=lambda args: args[0],
)
def test_every_command_fails_and_creates_nothing_without_a_lake(tmp_path: Path, args: list[str]) -> None:
    missing = tmp_path / "missing"
    result = CliRunner().invoke(main, ["-b", "redis://127.0.0.1:1", "pipeline", *args, "--lake", str(missing)])
    assert result.exit_code == 1
    assert result.output.startswith(f"Error: there is no lake in {missing} (no bronze/ or silver/)")
    assert not missing.exists()


def test_status_works_without_a_lake(tmp_path: Path, lake: LakeBuilder) -> None:
    def status(root: Path) -> str:
        return CliRunner().invoke(main, ["-b", "redis://127.0.0.1:1", "pipeline", "status", "--lake", str(root)]).output

    assert f"lake          {tmp_path / 'x'}, does not exist yet: 'bulltask pipeline run'" in status(tmp_path / "x")
    assert f"lake          {tmp_path}\n" in status(tmp_path)
    assert "cannot connect to Redis at redis://127.0.0.1:1" in status(tmp_path)


def test_a_lake_written_by_another_version_is_reported_in_one_line(tmp_path: Path, lake: LakeBuilder, run: Run) -> None:
    assert lake.lake.commit(OPEN_EVENTS, [], batch=1, metadata={"version": 3})
    result = run("status", "-b", "redis://127.0.0.1:1")
    assert result.exit_code == 1
    assert result.output == (
        "Error: the record of a batch has version 3, but this bulltask reads version 2: the lake was written by "
        "another version of bulltask; use that version or a newer one\n"
    )


def test_doctor_reports_an_unreachable_redis() -> None:
    result = CliRunner().invoke(main, ["-b", "redis://127.0.0.1:1", "pipeline", "doctor"])
    assert result.exit_code == 1
    assert "cannot connect to Redis at redis://127.0.0.1:1" in result.output
    assert "No queues found" not in result.output


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["build", "gold", "--days", "2026-11-22..2026-11-20"], "'2026-11-22..2026-11-20' ends before it begins"),
        (["build", "gold", "--days", "2026-13-01"], "invalid day '2026-13-01': write it like 2026-11-22"),
        (["gaps", "--since", "noon"], "invalid time 'noon': write it like 2026-11-22 or 2026-11-22T14:00"),
        (["report", "--max-wait", "soon"], "invalid duration 'soon': write it like 90, 10s, 15m, 12h or 7d"),
        (["backfill", "--since", "2026-11-22", "--until", "2026-11-21"], "--until must be later than --since"),
    ],
)
def test_an_invalid_time_is_reported_in_one_line(run: Run, args: list[str], message: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.output


def test_every_option_has_a_metavar_and_every_duration_option_a_default() -> None:
    """The help of the command group describes the format of durations."""
    text = " ".join(CliRunner().invoke(main, ["pipeline", "-h"]).output.split())
    assert "DURATION is 90 (seconds), 10s, 15m, 12h or 7d." in text
    ctx = click.Context(main)
    commands = {name: group.get_command(ctx, name) for group in (pipeline, job) for name in group.list_commands(ctx)}
    for name, command in commands.items():
        assert command is not None
        for param in command.params:
            if not isinstance(param, click.Option):
                continue
            assert param.help, (name, param.name)
            if param.type.name == "seconds":
                assert param.metavar == "DURATION", (name, param.name)
                assert param.show_default or "default" in param.help, (name, param.name)


def test_an_invalid_retention_is_reported_in_one_line(run: Run) -> None:
    result = run("maintain", "--keep", "silver.job=3")
    assert result.exit_code == 1
    assert result.output == "Error: unknown table 'silver.job'; did you mean 'silver.jobs'?\n"


def test_the_error_without_pyarrow_names_the_smallest_extra(tmp_path: Path) -> None:
    program = (
        "import sys\nsys.modules['pyarrow'] = None\nfrom bulltask.cli.main import main\n"
        f"main(['pipeline', 'maintain', '--lake', {str(tmp_path)!r}])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert run.returncode == 1
    assert run.stderr.strip() == "Error: pyarrow is not installed: pip install 'bulltask[history]'"


def test_the_error_from_a_spark_command_names_the_spark_extra(tmp_path: Path) -> None:
    program = (
        "import sys\nfor name in ('pyarrow', 'pyspark'): sys.modules[name] = None\n"
        "from bulltask.cli.main import main\n"
        f"main(['-b', 'redis://127.0.0.1:1', 'pipeline', 'run', '--lake', {str(tmp_path)!r}])"
    )
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=50)
    assert run.returncode == 1
    assert run.stderr.strip().endswith("pip install 'bulltask[spark]'")


def test_times_days_and_durations_are_parsed() -> None:
    assert options.moment("2026-11-22T14:00") == datetime(2026, 11, 22, 14, tzinfo=UTC)
    assert options.moment("2026-11-22T14:00+01:00") == datetime(2026, 11, 22, 13, tzinfo=UTC)
    assert [str(day) for day in options.days("2026-11-29..2026-12-01")] == ["2026-11-29", "2026-11-30", "2026-12-01"]
    assert [str(day) for day in options.days("2026-11-29")] == ["2026-11-29"]
    assert [options.seconds(text) for text in ("90", "1.5s", "15m", "12h", "7d")] == [90, 1.5, 900, 43_200, 604_800]
    for parse, text in [(options.days, "2026-11-22..2026-11-21"), (options.moment, "noon"), (options.seconds, "-1s")]:
        with pytest.raises(click.BadParameter):
            parse(text)


@pytest.mark.parametrize(("root", "message"), [("hdfs://head:9000/lake", "use a directory or a URL"), ("", "is empty")])
def test_a_root_that_cannot_be_a_lake_is_rejected_and_creates_no_directory(
    root: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for args in (
        ["pipeline", "run", "--lake", root],
        ["pipeline", "gaps", "--lake", root],
        ["history", "search", "--lake", root],
    ):
        result = CliRunner().invoke(main, args)
        assert result.exit_code == 2, result.output
        assert message in " ".join(result.output.split())
    with pytest.raises(ConfigError, match=message):
        History(root)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("AWS_SECRET_ACCESS_KEY=hidden", "AWS_SECRET_ACCESS_KEY may be a secret"),
        ("region", "write it like AWS_ENDPOINT_URL="),
    ],
)
def test_a_storage_option_that_is_a_secret_is_rejected_without_showing_it(run: Run, option: str, message: str) -> None:
    result = run("gaps", "--storage-option", option)
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())
    assert "hidden" not in result.output
