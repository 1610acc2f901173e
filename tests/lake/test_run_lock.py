"""Only one pipeline at a time can write to a lake."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from bulltask.errors import LakeInUseError
from bulltask.lake.storage import Lake, RunLock, writer_pid


@pytest.fixture
def lake(tmp_path: Path) -> Lake:
    return Lake(tmp_path / "lake")


@pytest.fixture
def lock(lake: Lake) -> Iterator[RunLock]:
    with RunLock(lake) as lock:
        yield lock


def test_a_second_lock_on_a_lake_is_rejected_with_the_id_of_the_process(lake: Lake, lock: RunLock) -> None:
    with pytest.raises(LakeInUseError, match=f"process {os.getpid()} is already writing"):
        RunLock(lake)
    assert writer_pid(lake) == os.getpid()


def test_a_released_lock_is_free_while_a_process_forked_earlier_still_runs(lake: Lake, lock: RunLock) -> None:
    end_of_test, test_is_running = os.pipe()
    if (pid := os.fork()) == 0:
        os.close(test_is_running)
        os.read(end_of_test, 1)
        os._exit(0)
    try:
        lock.release()
        assert writer_pid(lake) is None
        RunLock(lake).release()
    finally:
        os.close(end_of_test)
        os.close(test_is_running)
        os.waitpid(pid, 0)


def test_a_second_release_returns_only_when_the_lock_is_free(
    lake: Lake, lock: RunLock, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocking, may_unlock, flock = threading.Event(), threading.Event(), fcntl.flock

    def slow_flock(file: int, operation: int) -> None:
        if operation == fcntl.LOCK_UN:
            unlocking.set()
            may_unlock.wait(10)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", slow_flock)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(lock.release)
        unlocking.wait(10)
        second = pool.submit(lock.release)
        with pytest.raises(TimeoutError):
            second.result(timeout=0.1)
        may_unlock.set()
        first.result(timeout=10)
        second.result(timeout=10)
    RunLock(lake).release()
