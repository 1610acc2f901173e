"""An installed package with a modified Lua script."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import bulltask
from bulltask.worker.slots import ExitCode
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

PACKAGE = Path(bulltask.__file__).parent


def install_altered(directory: Path, file: str) -> Path:
    """Install bulltask in a directory that Python searches first, with an addition to one of its scripts."""
    installed = directory / "bulltask"
    installed.mkdir(parents=True)
    for entry in PACKAGE.iterdir():
        if entry.name != "lua":
            (installed / entry.name).symlink_to(entry)
    shutil.copytree(PACKAGE / "lua", installed / "lua")
    script = installed / "lua" / file
    script.write_text(script.read_text() + "\n-- and more\n")
    return script


@pytest.mark.parametrize("file", ["official/moveToFinished-14.lua", "bulltask/wakeNext-2.lua"])
def test_a_worker_with_a_modified_script_names_the_file_and_runs_no_job(
    harness: WorkerHarness, tmp_path: Path, file: str
) -> None:
    script = install_altered(tmp_path / "altered", file)
    job = harness.app.send_task("quick")
    environ = {"JOURNAL_URL": harness.url}
    worker = Worker(tmp_path / "altered", settings={"broker_url": harness.url}, environ=environ, fresh=True)
    try:
        assert worker.wait() == ExitCode.FAILED
        (line,) = worker.warnings()
    finally:
        worker.close()
    assert line["event"] == "A Lua script in the bulltask package was modified"
    assert str(script) in line["error"]
    assert "reinstall bulltask" in line["error"]
    assert harness.redis.lrange(harness.keys.wait, 0, -1) == [job.id]


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("bulltask/revoke-4.lua", ["-m", "bulltask", "revoke", "-b", "{url}", "{job}"]),
        ("official/addStandardJob-9.lua", ["-c", "import bulltask; bulltask.App('a', '{url}').send_task('t')"]),
    ],
)
def test_commands_and_senders_name_the_modified_script(
    harness: WorkerHarness, tmp_path: Path, file: str, command: list[str]
) -> None:
    script = install_altered(tmp_path / "altered", file)
    job = harness.app.send_task("quick")
    args = [arg.format(url=harness.url, job=job.id) for arg in command]
    done = subprocess.run([sys.executable, *args], cwd=script.parents[3], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"{script} was altered" in done.stderr.splitlines()[-1]
    assert "reinstall bulltask" in done.stderr.splitlines()[-1], "in one line"
    assert harness.redis.lrange(harness.keys.wait, 0, -1) == [job.id]
