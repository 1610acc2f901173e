"""The check for leftover processes of tests finds children, daemons and servers."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bulltask.testing.worker import wait_until
from tests.support.processes import LeftoverProcesses, has_exited, wait_for_exit

pytestmark = pytest.mark.process

WAIT = "import signal; signal.pause()"
DAEMON = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {WAIT!r}], stdout=subprocess.DEVNULL).pid)
"""


@pytest.fixture
def leftovers(session_id: str, tmp_path_factory: pytest.TempPathFactory) -> LeftoverProcesses:
    return LeftoverProcesses(session_id, tmp_path_factory.getbasetemp())


@contextmanager
def daemon(cwd: Path | str = "/", **environment: str) -> Iterator[int]:
    """Start a process whose parent exits immediately; yield its id."""
    done = subprocess.run(
        [sys.executable, "-c", DAEMON], cwd=cwd, env=environment, stdout=subprocess.PIPE, check=True, timeout=20
    )
    pid = int(done.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_for_exit(pid)


def test_a_child_is_found_until_it_has_exited(leftovers):
    with subprocess.Popen([sys.executable, "-c", WAIT], env={}) as child:
        assert child.pid in leftovers.find(set())
        assert child.pid not in leftovers.find({child.pid})
        child.kill()
        child.wait()
        assert child.pid not in leftovers.find(set())


def test_a_daemon_is_found_by_the_session_id_in_its_environment(leftovers):
    with daemon(**os.environ) as pid:
        assert WAIT in wait_until(lambda: leftovers.find(set()).get(pid, ""))


def test_a_daemon_without_the_session_id_is_found_by_its_directory(leftovers, tmp_path):
    with daemon(tmp_path) as pid:
        assert pid in leftovers.find(set())


def test_an_unrelated_process_is_not_found(leftovers):
    with daemon() as pid:
        assert pid not in leftovers.find(set())


def test_leftover_processes_are_killed_by_id():
    with subprocess.Popen([sys.executable, "-c", WAIT]) as child:
        LeftoverProcesses.end({child.pid})
        assert has_exited(child.pid)
