"""``bulltask history search`` finds finished jobs in the lake, without Redis."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from tests.support.command_output import json_of
from tests.support.lake import LakeBuilder, at

Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run ``bulltask history search …``."""
    for name in ("BULLTASK_LAKE", "BULLTASK_APP", "BULLTASK_BROKER_URL"):
        monkeypatch.delenv(name, raising=False)

    def invoke(*args: object) -> Result:
        return CliRunner().invoke(main, ["history", "search", *map(str, args)])

    return invoke


def add_finished_job(lake: LakeBuilder) -> None:
    lake.jobs([{"job_id": "1", "name": "send", "state": "failed", "finished_at": at("2026-11-20 10:00", 250)}])


def test_the_search_filters_jobs_and_returns_pages(lake: LakeBuilder, run: Run) -> None:
    now = datetime.now(UTC)
    rows = [
        {
            "job_id": f"job-{n}", "name": "send", "state": "failed", "attempt_count": 3, "run_ms": 2500,
            "finished_at": now - timedelta(hours=n), "failed_reason": f"refused\n\x1b[2J by host {n}",
        }
        for n in range(5)
    ]  # fmt: skip
    lake.jobs([*rows, {**rows[0], "job_id": "done", "state": "completed"}, {**rows[0], "job_id": "x", "name": "other"}])
    args = ["--lake", lake.root, "--state", "failed", "--name", "send", "--text", "REFUSED"]
    args += ["--since", "210m", "--limit", "3"]
    shown = run(*args)
    assert shown.exit_code == 0, shown.output
    head, *lines, empty, more = shown.output.splitlines()
    assert head.split() == ["ended", "(UTC)", "state", "queue", "name", "id", "attempts", "ran", "reason"]
    assert [line.split()[5] for line in lines] == ["job-0", "job-1", "job-2"]
    assert lines[0].endswith("  failed  mail   send  job-0         3  2.500 s  refused \\x1b[2J by host 0")
    assert empty == ""
    cursor = more.rpartition(" ")[2]
    rest = json_of(run(*args, "--cursor", cursor, "--json"), "history search")
    assert ([job["id"] for job in rest["jobs"]], rest["cursor"]) == (["job-3"], None)
    assert rest["jobs"][0]["run_time"] == 2.5


def test_the_lakes_directory_may_be_set_in_the_environment(
    lake: LakeBuilder, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    add_finished_job(lake)
    assert run().exit_code == 2
    monkeypatch.setenv("BULLTASK_LAKE", str(lake.root))
    assert " 1 " in run("--since", "2026-11-20", "--until", "2026-11-20T10:01").output
    assert run("--since", "2026-11-21").output == "No jobs found.\n"


@pytest.mark.parametrize(
    ("args", "code", "message"),
    [
        (["--state", "fialed"], 1, "unknown state 'fialed'; did you mean 'failed'?"),
        (["--since", "yesterday"], 2, "invalid time 'yesterday': write it like 2026-11-22, 2026-11-22T14:00 or 1d"),
        (["--since", "1x"], 2, "invalid time '1x'"),
        (["--since", "99999999999d"], 2, "is too long ago"),
        (["--limit", "0"], 1, "limit must be an integer from 1 to 1000"),
        (["--cursor", "x"], 1, "invalid cursor"),
        (["--queue", "mial"], 1, "did you mean 'mail'?"),
    ],
)
def test_invalid_options_are_errors(lake: LakeBuilder, run: Run, args: list[str], code: int, message: str) -> None:
    add_finished_job(lake)
    shown = run("--lake", lake.root, *args)
    assert shown.exit_code == code
    assert message in shown.output


def test_the_search_reports_a_directory_that_is_not_a_lake(run: Run, tmp_path: Path) -> None:
    shown = run("--lake", tmp_path)
    assert shown.exit_code == 1
    assert f"there is no lake in {tmp_path}" in shown.output
