"""The watch over what tests leave running can itself fail: it has to see daemons and servers, too."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from bulltask.testing.wait import wait_until
from tests.support.processes import LeftoverProcesses, has_exited, wait_for_exit

pytestmark = pytest.mark.process

WAIT = "import signal; signal.pause()"
DAEMON = f"""
import subprocess, sys
print(subprocess.Popen([sys.executable, "-c", {WAIT!r}], stdout=subprocess.DEVNULL).pid)
"""


@pytest.fixture
def watch(session_id: str, tmp_path_factory: pytest.TempPathFactory) -> LeftoverProcesses:
    return LeftoverProcesses(session_id, tmp_path_factory.getbasetemp())


@contextmanager
def daemon(cwd: Path | str = "/", **environment: str) -> Iterator[int]:
    """Start a process whose parent ends at once; its id."""
    said = subprocess.run(
        [sys.executable, "-c", DAEMON], cwd=cwd, env=environment, stdout=subprocess.PIPE, check=True, timeout=20
    )
    pid = int(said.stdout)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        wait_for_exit(pid)


def test_a_child_is_seen_until_it_has_ended(watch):
    with subprocess.Popen([sys.executable, "-c", WAIT], env={}) as child:
        assert child.pid in watch.find(set())
        assert child.pid not in watch.find({child.pid})
        child.kill()
        child.wait()
        assert child.pid not in watch.find(set())


def test_a_daemon_is_seen_by_the_mark_in_its_environment(watch):
    with daemon(**os.environ) as pid:
        assert WAIT in wait_until(lambda: watch.find(set()).get(pid, ""))


def test_a_daemon_without_the_mark_is_seen_by_its_directory(watch, tmp_path):
    with daemon(tmp_path) as pid:
        assert pid in watch.find(set())


def test_the_process_of_a_stranger_is_not_ours(watch):
    with daemon() as pid:
        assert pid not in watch.find(set())


def test_what_is_left_is_killed_by_its_id():
    with subprocess.Popen([sys.executable, "-c", WAIT]) as child:
        LeftoverProcesses.end({child.pid})
        assert has_exited(child.pid)
