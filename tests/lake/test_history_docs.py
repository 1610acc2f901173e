"""docs/how-to/history.md: its program runs, and its tables are complete."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from pathlib import Path

import click
import pytest

from bulltask.cli.history import history
from bulltask.cli.job import job
from bulltask.lake.history import JobFilter
from tests.support.lake import LakeBuilder

PAGE = Path(__file__).parent.parent.parent / "docs" / "how-to" / "history.md"


def test_the_program_on_the_history_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (program,) = re.findall(r"^```py\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    now = datetime.now(UTC)
    failed = {"job_id": "a", "name": "mail.send", "state": "failed", "finished_at": now, "failed_reason": "Timed out"}
    lake = LakeBuilder(tmp_path).jobs([failed]).snapshots([{"id": "a", "data": '{"to": "ada"}', "snapshot_at": now}])
    lake.attempts([{"job_id": "a", "outcome": "failed", "ended_at": now, "wait_ms": 1000}])
    assert "/data/lake" in program
    exec(compile(program.replace("/data/lake", str(tmp_path)), PAGE.name, "exec", dont_inherit=True), {})
    output = capsys.readouterr().out
    assert "failed ['failed'] []" in output
    assert "{'to': 'ada'}" in output
    assert "percentiles={50: 0.993, 95: 0.993}" in output


def test_the_history_page_documents_every_filter() -> None:
    table = PAGE.read_text().partition("| filter | meaning |")[2].partition("\n\n")[0]
    first = " ".join(row.split("|")[1] for row in table.splitlines() if row.count("|") > 1)
    assert set(re.findall(r"`(\w+)`", first)) == set(JobFilter.__annotations__)


def test_the_documented_options_match_the_commands() -> None:
    table = PAGE.read_text().partition("| option | commands | meaning |")[2].partition("\n\n")[0]
    documented: dict[str, set[str]] = {"show": set(), "search": set(), "serve": set()}
    for row in table.splitlines():
        if row.count("|") > 3 and not row.startswith("|-"):
            names, of = row.split("|")[1:3]
            for command in of.split(","):
                documented[command.strip()] |= set(re.findall(r"`(-[\w-]+)`", names))
    for name, entry in {"show": job.commands["show"], **history.commands}.items():
        options = [option for option in entry.params if isinstance(option, click.Option)]
        assert documented[name] == {opt for option in options for opt in (*option.opts, *option.secondary_opts)}
