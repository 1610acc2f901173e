"""Process control: parent-death signals, CPU limits, fork and exit. Programs on Windows import it, too."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NoReturn

__all__ = [
    "BLOCKED_AT_FORK",
    "BLOCKED_AT_START",
    "CHILD_MARK",
    "anonymous_file",
    "die_with_parent",
    "exit_child",
    "exit_if_forked",
    "fork_with_blocked_signals",
    "inherit_life_line",
    "life_line",
    "memory_kib",
    "name_process",
    "open_standard_streams",
    "stop_signals",
    "unblock_signals",
    "usable_cores",
]

if sys.platform != "win32":
    import resource

CHILD_MARK: Final = "BULLTASK_CHILD"
"""The environment variable that names the child of a worker that has started a program; empty for a program with a
session of its own that must outlive the child."""

_PR_SET_PDEATHSIG = 1  # linux/prctl.h


def die_with_parent(signal_number: int, parent_pid: int) -> bool:
    """Have ``signal_number`` sent to this process when its parent dies; return False if that is not possible.

    On Linux, the kernel sends it. Elsewhere, a thread of this process does, when it reads the end of the parent's
    :func:`life_line`; code that holds the GIL delays it.

    Call this immediately after the fork; a child does not inherit the setting. The kernel watches the parent's *thread*
    that forked: if that thread exits, its children receive the signal. If the parent, whose pid was taken before the
    fork, died before this call, the signal is sent immediately.
    """
    if sys.platform != "linux":
        return _watch_life_line(signal_number)
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, ctypes.c_ulong(signal_number), 0, 0, 0) != 0:
        return False
    if os.getppid() != parent_pid:
        os.kill(os.getpid(), signal_number)
    return True


_life_line: tuple[int, int, int] | None = None
"""The process that made the pipe, and the pipe's descriptors."""
_parent_fd: int | None = None


def life_line() -> int | None:
    """Return a descriptor that reads the end of a pipe when this process dies, for its children; ``None`` on Linux."""
    global _life_line  # noqa: PLW0603 - one pipe per process
    if sys.platform == "linux":
        return None
    if _life_line is None or _life_line[0] != os.getpid():
        _life_line = os.getpid(), *os.pipe()
    return _life_line[1]


def inherit_life_line(fd: int | None) -> None:
    """Use the parent's :func:`life_line` in a child."""
    global _life_line, _parent_fd
    if _life_line is not None:
        os.close(_life_line[2])  # otherwise, the pipe would end only with this process
    _life_line, _parent_fd = None, fd


def _watch_life_line(signal_number: int) -> bool:
    fd = _parent_fd
    if fd is None:
        return False

    def watch() -> None:
        os.read(fd, 1)
        os.kill(os.getpid(), signal_number)

    before = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # the thread must receive none
    threading.Thread(target=watch, daemon=True, name="life line").start()
    signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return True


def anonymous_file(name: str) -> int:
    """Return a descriptor of a file without a name in the file system, which spawned children can share.

    On Linux, ``/proc/PID/fd`` shows ``name``.
    """
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    with tempfile.TemporaryFile(buffering=0) as file:
        return os.dup(file.fileno())


def name_process(role: str) -> None:
    """Let ``ps``, ``top`` and ``pgrep`` show what this process is, as ``bulltask-child`` (on Linux, 15 characters)."""
    # Not with pathlib, whose code each child would copy: 0.1 MiB.
    with suppress(OSError), open("/proc/self/comm", "w") as file:  # noqa: PTH123
        file.write("-".join(filter(None, ("bulltask", role))))


_CPU_MAX: Final = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Return how many CPU cores this process may use, at least 1.

    The CPU affinity and the container's CPU quota (cgroup v2) limit the number. Without the quota, a container that is
    limited to 2 of a machine's 64 cores would start 64 children, which would compete for 2 cores.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        quota, period = _CPU_MAX.read_text().split()
        if quota != "max":
            cores = min(cores, int(quota) // int(period))
    except (OSError, ValueError):
        pass  # no cgroup v2, or no quota
    return max(1, cores)


BLOCKED_AT_START: Final = frozenset(
    signal.Signals[name]
    for name in ("SIGHUP", "SIGINT", "SIGUSR1", "SIGUSR2", "SIGTSTP", "SIGCONT", "SIGTTIN", "SIGTTOU")
    if name in signal.Signals.__members__  # Windows has only SIGINT
)
"""Signals that would end or stop a process, or be lost, before its handlers are installed."""

BLOCKED_AT_FORK: Final = BLOCKED_AT_START | {signal.SIGTERM, getattr(signal, "SIGQUIT", signal.SIGTERM)}
"""Those, and the ones that a worker receives to stop: a fork would run its parent's handlers."""


def fork_with_blocked_signals() -> int:
    """Fork, with signals blocked in the child until it calls :func:`unblock_signals`.

    Before the child has installed its own handlers, a signal would run the parent's handler in the child, and be lost.
    A child that is asked to stop at that moment would continue.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, BLOCKED_AT_FORK)
    fd = life_line()
    pid = os.fork()
    if pid == 0:
        inherit_life_line(fd)
        _reseed()
    else:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    return pid


_GENERATORS: Final = (("numpy.random", "seed"), ("torch.random", "seed"))
"""Functions that seed a library's global generator from the operating system, as Python does with its own in a fork."""


def _reseed() -> None:
    """Seed the global generators of loaded libraries, which would otherwise be the same in all forks."""
    for module, seed in _GENERATORS:
        with suppress(Exception):  # a partly imported or unusual version must not keep a child from starting
            getattr(sys.modules[module], seed)()


def unblock_signals() -> None:
    """Unblock signals; the child calls this once its handlers are installed."""
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def exit_if_forked(pid: int, raised: BaseException | None = None) -> None:
    """Exit if this process is a child that user code has forked from process ``pid``; call this after user code.

    The exit code is the one that Python would use after ``raised``. Nothing is flushed and no ``atexit`` handler runs,
    because the buffers and handlers are copies from process ``pid``.
    """
    if os.getpid() == pid:
        return
    code = 0
    if isinstance(raised, SystemExit) and not isinstance(raised.code, str):
        code = raised.code if isinstance(raised.code, int) else int(raised.code is not None)
    elif raised is not None:
        code = 1
        with suppress(Exception):  # a broken __str__ of a user's exception
            # Not through sys.stderr: another thread may have held its lock at the fork, so it would never be released.
            os.write(2, "".join(traceback.format_exception(raised)).encode(errors="backslashreplace"))
    os._exit(code & 0xFF)


_STATM: Final = "/proc/{}/statm"
_PAGE_KIB: Final = mmap.PAGESIZE // 1024


def memory_kib(pid: int | None = None) -> int:
    """Return the resident memory (RSS) of this process, or of process ``pid``, in KiB; ``OSError``: it has exited.

    Memory that a process shares with others counts, such as the pages of a fork that neither process has changed. On
    systems without ``/proc``, it is the maximum so far for this process, and 0 for any other process; on Windows 0.
    """
    if os.path.exists(_STATM.format("self")):  # noqa: PTH110 - ten times as fast as Path, for every job
        with open(_STATM.format(pid or "self"), "rb") as statm:  # noqa: PTH123 - the same
            return int(statm.read().split()[1]) * _PAGE_KIB
    if sys.platform == "win32":
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return 0 if pid else peak // 1024 if sys.platform == "darwin" else peak


@contextmanager
def stop_signals(*, hangup: bool = False) -> Iterator[Callable[[], object]]:
    """Block the signals that stop a program, and yield a function that waits for one of them.

    Threads that are started in the block inherit the mask, so that the signal reaches the function.
    """
    if sys.platform == "win32":  # no masks there
        stopped = threading.Event()
        handlers = {signal.SIGINT: signal.getsignal(signal.SIGINT), signal.SIGTERM: signal.getsignal(signal.SIGTERM)}
        for number in handlers:
            signal.signal(number, lambda *_: stopped.set())
        try:
            yield lambda: next(iter(lambda: stopped.wait(0.2), True), None)  # Ctrl-C does not end a longer wait
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        return
    numbers = {signal.SIGINT, signal.SIGTERM} | ({signal.SIGHUP} if hangup else set())
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield lambda: signal.sigwait(numbers)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def open_standard_streams() -> None:
    """Open ``/dev/null`` as stdin, stdout and stderr if they are closed, as by ``2>&-``.

    Otherwise, a connection to Redis would have the number of stderr, and whatever a library prints would be sent to it.
    """
    if sys.platform == "win32":
        return
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)  # inheritable, unlike the original
            if null != number:
                os.close(null)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115 - the process's streams


def exit_child(code: int) -> NoReturn:
    """Exit from a forked process without running its parent's ``atexit`` handlers."""
    try:
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(code)
