"""Find processes that a test left running."""

from __future__ import annotations

import os
import signal
from contextlib import suppress
from pathlib import Path

from bulltask.testing.worker import wait_until

SESSION_VARIABLE = "BULLTASK_TEST_SESSION"
_HELPERS = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")  # one per process, on purpose


class LeftoverProcesses:
    """Finds processes that outlive the test that started them.

    A process belongs to the session if it is a child of this process, has the session's id in its environment, or has a
    working directory inside the session's temporary directory. The last two find daemons and orphans: Redis and Valkey
    overwrite their environment with their title, but change to their data directory.
    """

    def __init__(self, session_id: str, directory: Path) -> None:
        self._variable = f"{SESSION_VARIABLE}={session_id}".encode()
        self._directory = directory.resolve()
        self._unrelated: set[int] = set()

    def find(self, allowed: set[int]) -> dict[int, str]:
        """Return the id and command line of each running process of the session that is not ``allowed``."""
        running = running_pids()
        self._unrelated &= running
        pids = {pid for pid in running - self._unrelated - allowed - {os.getpid()} if self._belongs_to_session(pid)}
        found = {pid: _command(pid) for pid in sorted(pids)}
        return {pid: text for pid, text in found.items() if text and not any(name in text for name in _HELPERS)}

    @staticmethod
    def end(pids: set[int]) -> None:
        """Kill processes by their ids, and reap children."""
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            with suppress(ChildProcessError):
                os.waitpid(pid, 0)

    def _belongs_to_session(self, pid: int) -> bool:
        if parent_of(pid) == os.getpid():
            return True
        process = Path(f"/proc/{pid}")
        # An unreadable process has exited or belongs to the kernel or another user: do not check it again.
        with suppress(OSError):
            if self._variable in (process / "environ").read_bytes().split(b"\0"):
                return True
            if (process / "cwd").readlink().is_relative_to(self._directory):
                return True
        self._unrelated.add(pid)
        return False


def has_exited(pid: int) -> bool:
    """Return whether a process has exited; a zombie has."""
    return not _command(pid)


def wait_for_exit(pid: int, timeout: float = 60.0) -> None:
    """Wait until a process exits that is not a child of this process."""
    wait_until(lambda: has_exited(pid), timeout, f"the end of process {pid}")


def running_pids() -> set[int]:
    """Return the ids of all processes, zombies included."""
    return {int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()}


def _stat(pid: int) -> list[str]:
    # Not with pathlib, which takes three times as long: a test may read the files of all processes several times.
    try:
        file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
    except OSError:
        return []
    try:
        return os.read(file, 4096).rpartition(b")")[2].decode().split()
    except OSError:
        return []
    finally:
        os.close(file)


def parent_of(pid: int) -> int:
    """Return the parent's process id, or 0 if the process does not exist."""
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
