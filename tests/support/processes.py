"""Find what a test left running."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from bulltask.testing.wait import wait_until

SESSION_VARIABLE = "BULLTASK_TEST_SESSION"
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # one per process, on purpose


class LeftoverProcesses:
    """Responsible for naming the processes that outlive the test that started them.

    A process counts when it is a child of this one, when it was started with this session's mark in its environment,
    or when it works in this session's temporary directory. The last two find daemons and orphans; Redis and Valkey
    overwrite their environment with their title, but they change into their data directory.
    """

    def __init__(self, mark: str, directory: Path) -> None:
        self._mark = f"{SESSION_VARIABLE}={mark}".encode()
        self._directory = directory.resolve()
        self._strangers: set[int] = set()

    def find(self, allowed: set[int]) -> dict[int, str]:
        """Return process id and command line of each living process of ours that is not ``allowed``."""
        running = {int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()}
        self._strangers &= running
        ours = {pid for pid in running - self._strangers - allowed - {os.getpid()} if self._is_ours(pid)}
        found = {pid: _command(pid) for pid in sorted(ours)}
        return {pid: text for pid, text in found.items() if text and not any(name in text for name in _HELPERS)}

    @staticmethod
    def end(pids: set[int]) -> None:
        """Kill them, each by its id, and reap those that are children."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _is_ours(self, pid: int) -> bool:
        if parent_of(pid) == os.getpid():
            return True
        process = Path(f"/proc/{pid}")
        # One that cannot be read has ended, or is the kernel's or somebody else's: there is nothing to look at again.
        with suppress(OSError):
            if self._mark in (process / "environ").read_bytes().split(b"\0"):
                return True
            if (process / "cwd").readlink().is_relative_to(self._directory):
                return True
        self._strangers.add(pid)
        return False


def has_exited(pid: int) -> bool:
    """True when there is no such process any more, or only its exit code waits to be fetched."""
    return not _command(pid)


def wait_for_exit(pid: int, timeout: float = 60.0) -> None:
    """Wait until a process that is not our child has ended."""
    wait_until(lambda: has_exited(pid), timeout, f"the end of process {pid}")


def _stat(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return []


def parent_of(pid: int) -> int:
    """The parent's process id; 0 when there is no such process."""
    fields = _stat(pid)
    return int(fields[1]) if fields else 0


def _command(pid: int) -> str:
    if (_stat(pid) or ["Z"])[0] in "ZX":
        return ""
    try:
        raw = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return ""
    return raw.replace(b"\0", b" ").decode(errors="replace").strip() or f"process {pid}"
