"""The Celery project in `examples/from_celery` does the same with bulltask, after each of the changes in its README."""

from __future__ import annotations

import difflib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.celery_parity.idioms import for_bulltask
from tests.support.programs import ROOT

pytestmark = pytest.mark.process

EXAMPLE = ROOT / "examples/from_celery"
README = (EXAMPLE / "README.md").read_text()
QUEUES = "orders,mail,catalog"


def with_celery() -> str:
    """Return the interpreter of the environment that has Celery."""
    python = ROOT / ".venv/celery/bin/python"
    if not python.exists():
        if os.environ.get("CI"):
            pytest.fail("Celery is missing, and in CI every test has to run: make .venv/celery/installed.stamp")
        pytest.skip("no Celery: run make .venv/celery/installed.stamp")
    return str(python)


class Project:
    """A copy of the example.

    Args:
        directory: Where to copy it.
        url: The Redis server that it uses.
        variables: Environment variables.
    """

    def __init__(self, directory: Path, url: str, **variables: str) -> None:
        self.directory, self._url = directory, url
        shutil.copytree(EXAMPLE, directory, ignore=shutil.ignore_patterns("__pycache__", "*.sqlite3"))
        self.environment = os.environ | {"SHOP_DATABASE": str(directory / "shop.sqlite3"), "PYTHONUNBUFFERED": "1"}
        self.environment.pop("PYTHONPATH", None)
        self.environment |= variables

    def files(self) -> dict[str, list[str]]:
        """Return the lines of its modules."""
        names = sorted(self.directory.rglob("*.py"))
        return {str(name.relative_to(self.directory)): name.read_text().splitlines() for name in names}

    def change_url(self) -> None:
        """Use the test's server."""
        settings = self.directory / "shop/settings.py"
        settings.write_text(settings.read_text().replace("redis://localhost:6379/0", self._url))

    def change_two_lines(self) -> None:
        """Make the change in the README, with the test's server."""
        file, old = self.directory, ""
        for line in re.findall(r"^```diff\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)[0].splitlines():
            if line.startswith("---"):
                file = self.directory / line[4:]
            elif line.startswith("-"):
                old = line[1:]
            else:
                text = file.read_text()
                assert text.count(f"{old}\n") == 1
                file.write_text(text.replace(old, line[1:].replace("redis://localhost:6379/1", self._url)))

    def change_imports(self) -> None:
        """Run the command in the README."""
        (command,) = [
            block for block in re.findall(r"^```sh\n(.*?)^```$", README, re.DOTALL | re.MULTILINE) if "sed" in block
        ]
        subprocess.run(command, shell=True, check=True, cwd=self.directory)

    def outcomes(self, *worker: str, python: str) -> list[list[object]]:
        """Run the scenario with a worker; return what it has printed."""

        def run(*args: str) -> str:
            done = subprocess.run(
                [python, *args],
                cwd=self.directory,
                env=self.environment,
                capture_output=True,
                text=True,
                timeout=120,
                check=False,
            )
            assert done.returncode == 0, done.stdout + done.stderr + (self.directory / "worker.log").read_text()[-5000:]
            return done.stdout

        (self.directory / "worker.log").touch()
        run("manage.py", "migrate", "--run-syncdb", "-v0")
        with self._running([python, "-m", *worker]):
            return [json.loads(line) for line in run("scenario.py").splitlines()]

    @contextmanager
    def _running(self, command: list[str]) -> Iterator[None]:
        with (self.directory / "worker.log").open("wb") as log:
            process = subprocess.Popen(command, cwd=self.directory, env=self.environment, stdout=log, stderr=log)
        try:
            yield
            process.terminate()
            assert process.wait(60) == 0
        finally:
            process.kill()
            process.wait()


def changed_lines(before: dict[str, list[str]], after: dict[str, list[str]]) -> list[tuple[str, str]]:
    """Return the lines that differ, before and after the change."""
    assert before.keys() == after.keys()
    changed: list[tuple[str, str]] = []
    for name, lines in before.items():
        removed = [line[2:] for line in difflib.ndiff(lines, after[name]) if line.startswith("- ")]
        added = [line[2:] for line in difflib.ndiff(lines, after[name]) if line.startswith("+ ")]
        changed += zip(removed, added, strict=True)
    return changed


def broken_celery(directory: Path) -> str:
    """Create a package that cannot be imported, under Celery's name; return the directory."""
    (directory / "celery").mkdir(parents=True)
    (directory / "celery/__init__.py").write_text("raise AssertionError('Celery was imported')")
    return str(directory)


@pytest.mark.one_server  # Celery does not know bulltask's URLs of clusters and sentinels
def test_a_celery_project_has_the_same_outcomes_after_two_lines_and_after_all_its_imports_are_changed(
    broker_url: str, tmp_path: Path
) -> None:
    python = with_celery()
    original, moved = Project(tmp_path / "celery", broker_url), Project(tmp_path / "moved", broker_url)
    two_lines = Project(
        tmp_path / "two-lines",
        broker_url,
        BULLTASK_PREFIX="two-lines",  # separates it from the other project on this server
        BULLTASK_WORKER_START_METHOD="spawn",
        PYTHONPATH=broken_celery(tmp_path / "installed"),
    )
    files = [original.files()]
    original.change_url()
    two_lines.change_two_lines()
    files.append(two_lines.files())
    moved.change_two_lines()
    moved.change_imports()
    files.append(moved.files())
    assert [before for before, _ in changed_lines(files[0], files[1])] == [
        "from celery import Celery",
        'CELERY_BROKER_URL = "redis://localhost:6379/0"',
    ]
    imports = changed_lines(files[1], files[2])
    assert all(re.match(r"from (bulltask\.)?celery(\.\w+)* import ", before) for before, _ in imports)
    assert f"{len(imports)} lines in this project" in README.replace("\n", " ")
    arguments = ("-A", "shop", "worker", "-Q", QUEUES)
    with ThreadPoolExecutor(3) as threads:  # on one server, as in a migration
        celery = threads.submit(original.outcomes, "celery", *arguments, "-c", "2", "-B", python=python)
        projects = [
            threads.submit(project.outcomes, "bulltask", *arguments, "-c", children, python=sys.executable)
            for project, children in ((two_lines, "1"), (moved, "2"))
        ]
        assert [project.result() for project in projects] == [celery.result()] * 2
    situations = [situation for situation, *_ in celery.result()]
    assert len(situations) == len(set(situations)) == 34
    assert not any("timeout" in str(outcome) for outcome in celery.result())


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("from celery import Celery, shared_task", "from bulltask import Celery, shared_task"),
        ("    from celery import chain", "    from bulltask import chain"),
        ("\tfrom celery.result import AsyncResult  # late", "\tfrom bulltask import AsyncResult  # late"),
        ("from celery import (", "from bulltask import ("),
        ("from celery.schedules import crontab", "from bulltask.schedules import crontab"),
        ("  from celery.exceptions import Retry", "  from bulltask.exceptions import Retry"),
        ("import celery.states as states", "import bulltask.states as states"),
        ("import celery", "import bulltask as celery"),
        ("  import celery  # the app's class", "  import bulltask as celery  # the app's class"),
        ("import celery as c", "import bulltask as c"),
        ("import celery, json", "import bulltask as celery, json"),
        ("from bulltask.celery import Celery, chain", "from bulltask import Celery, chain"),
        ("from celery_app import app", "from celery_app import app"),
        ("import celery_app", "import celery_app"),
        ("import celery.bin", "import celery.bin"),
        ("from .celery import app", "from .celery import app"),
        ("from shop.celery import app", "from shop.celery import app"),
    ],
)
def test_the_command_changes_every_form_of_import(before: str, after: str) -> None:
    assert for_bulltask(f"{before}\n") == f"{after}\n"


def test_the_page_about_celery_has_the_command_of_the_example() -> None:
    page = (ROOT / "docs/how-to/coming-from-celery.md").read_text()
    (command,) = re.findall(r"^find \. .*?\+$", README, re.DOTALL | re.MULTILINE)
    assert command in page


def test_the_celery_project_has_at_least_15_tasks() -> None:
    modules = [path.read_text() for path in EXAMPLE.glob("*/tasks.py")]
    assert sum(text.count("\n@shared_task") for text in modules) >= 15
