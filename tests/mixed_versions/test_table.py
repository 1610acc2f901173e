"""docs/reference/mixed-versions.md: its rows match the tests, its versions are installed, its program works."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from bulltask.jobs.names import JobState
from bulltask.lua import loader
from bulltask.queue import Queue
from tests.interop.interop_queue import InteropQueue
from tests.mixed_versions.conftest import PACKAGES, Clients
from tests.mixed_versions.page import (
    CLIENTS,
    NEWEST_6,
    PAGE,
    PINNED,
    PYTHON_6,
    VERSIONS,
    documented_outcomes,
    installed,
    pause_sequences,
)
from tests.support.manual_worker import ManualWorker
from tests.support.programs import ROOT

pytestmark = [pytest.mark.interop, pytest.mark.redis]

MANIFEST = json.loads((ROOT / "bulltask/lua/manifest.json").read_text())


def test_every_documented_row_has_a_test_and_every_test_a_row() -> None:
    tests = [
        name
        for file in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)\([^)]*\bdocumented: str", file.read_text(), re.MULTILINE)
    ]
    rows = re.findall(r"\| `(test_\w+)` \|$", PAGE.read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(tests)


def test_documented_outcomes_have_only_values_that_the_tests_know() -> None:
    for row in documented_outcomes().values():
        assert {row[version] for version in VERSIONS} <= {"safe", "differs", "unsafe"}, row
        assert row["Note"] or {row[version] for version in VERSIONS} == {"safe"}, f"a note is missing: {row}"
    for sequence in pause_sequences():
        assert all(re.fullmatch(r"safe|loses \d", outcome) for outcome in sequence.outcomes.values()), sequence
        assert list(sequence.outcomes) == [*PACKAGES, PYTHON_6, "bulltask"]


def test_the_documentation_names_the_versions_that_the_tests_run(node_client: None) -> None:
    for version, package in PACKAGES.items():
        assert installed(package) == version
    text = " ".join(PAGE.read_text().split())
    assert f"`bullmq` {', '.join([*PACKAGES][:-1])} and {NEWEST_6} and PyPI" in text
    assert f"PyPI `bullmq` {PYTHON_6}." in text
    named = set(re.findall(r"\b\d+\.\d+\.\d+\b", text))
    assert named == {*PACKAGES, PYTHON_6, MANIFEST["source"].partition("==")[2]}


def test_the_documentation_lists_every_script_that_differs_from_the_tested_one(node_client: None) -> None:
    folder = CLIENTS / "node_modules" / "bullmq" / "dist" / "cjs" / "scripts"
    official = {
        path.stem.rpartition("-")[0]: re.findall(
            r"^const content = `(.*?)`;", path.read_text(), re.DOTALL | re.MULTILINE
        )
        for path in folder.glob("*-*.js")
    }
    names = [file.rpartition("-")[0] for file in MANIFEST["scripts"]]
    same = [
        name
        for name in names
        if [loader.official_script(name).source.decode().split()] == [*map(str.split, official.get(name, []))]
    ]
    text = PAGE.read_text()
    documented = re.findall(r"^\| `(\w+)` \|", text.partition("## Scripts that are newer")[2], re.MULTILINE)
    assert sorted({*names} - {*same}) == sorted(documented)
    assert f"Of its {len(names)} scripts, {len(same)} are the same" in text


@pytest.fixture
def program() -> dict[str, Any]:
    """The names that the page's Python program defines."""
    [block] = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    names: dict[str, Any] = {}
    exec(block, names)
    return names


@pytest.mark.parametrize("version", [NEWEST_6])
def test_the_documented_program_recovers_only_lost_jobs(
    mail: InteropQueue, clients: Clients, program: dict[str, Any]
) -> None:
    pinned = clients[PINNED]
    manual_worker = ManualWorker(mail.app._broker, mail.keys)
    queue: Queue = mail.app.queue("mail")
    queue.add("a")
    manual_worker.complete()
    queue.add("a", attempts=1)
    manual_worker.fail()
    queue.add("a")
    manual_worker.acquire()
    queue.add("a", delay=60)
    queue.add("a", priority=3)
    queue.schedulers.upsert("hourly", every=3600)
    states = {job.id: job.get_state() for job in queue.get_jobs()}
    waiting = [job for job, state in states.items() if state is JobState.WAITING]

    mail.call("pause")
    added = pinned.call("queue.add", queue=mail.name, name="a", data={}, opts={})["id"]
    pinned.call("queue.call", queue=mail.name, method="resume", args=[])
    assert waiting
    assert [queue.get_job_state(job) for job in waiting] == [JobState.UNKNOWN] * len(waiting)
    assert sorted(program["recover_jobs"](mail.app, mail.url, "mail")) == sorted(waiting)
    assert program["recover_jobs"](mail.app, mail.url, "mail") == []
    assert {job.id: job.get_state() for job in queue.get_jobs()} == {**states, added: JobState.WAITING}
    assert {manual_worker.complete() for _ in range(len(waiting) + 1)} == {added, *waiting}
    queue.close()
    manual_worker.close()
