"""Whether a worker is alive and ready: the supervisor writes it into shared memory, and others read and judge it.

Begin with :class:`HealthPage`. The exporter (``/livez``, ``/readyz``) and ``bulltask health`` read the page themselves:
a supervisor that hangs, or was stopped, cannot say so, but it does not write either. :class:`Pulse` is the supervisor's
side, :func:`find_workers` finds the pages of this machine's workers. It imports little, because a probe starts often.
"""

from __future__ import annotations

import mmap
import os
import socket
from collections.abc import Callable, MutableMapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bulltask.jobs.clock import mono_ms, value_class

if TYPE_CHECKING:
    from bulltask.observe.events import WorkerStopping

__all__ = [
    "HEALTH_AT",
    "SLOTS_NAME",
    "HealthPage",
    "HealthReport",
    "Pulse",
    "ServiceManager",
    "Vitals",
    "find_workers",
    "no_child_runs",
]

SLOTS_NAME: Final = "bulltask-slots"
"""Name of the shared memory, as shown in ``/proc``."""
HEALTH_AT: Final = 2048
"""Where the health page begins in the shared memory."""

LIVE_MS: Final = 30_000
"""A supervisor that has not made progress for so long is not alive. Between two calls to Redis, each of which takes at
most 3 s, it makes progress; only a machine that swaps makes it wait longer, where a restart would not help."""

_LAYOUT: Final = 1  # another number when the words change: a probe of another version must not misread them
_MAGIC: Final = int.from_bytes(b"blthlth") << 8 | _LAYOUT
_MAGIC_WORD, _PID, _TICKED, _CLOSING, _STARTED, _PAUSED, _CHILDREN, _READY, _FAILING_SINCE, _NAME_LENGTH = range(10)
_STOPPED_PID: Final = 10  # 0 in a page of a version without it
_NAME_AT: Final = 128
_NAME_BYTES: Final = 512
_PAGE_BYTES: Final = _NAME_AT + _NAME_BYTES
_NO_REDIS: Final = "Redis does not serve it"


@value_class
class Vitals:
    """What a supervisor knows about its worker.

    Attributes:
        started: Whether the checks at the start are over.
        children: How many children there should be.
        ready: How many children run jobs or wait for them.
        stopped_pid: A child that was stopped (``SIGSTOP``), if possible one that runs jobs; 0 if there is none.
        failing_since_ms: Since when Redis does not serve the supervisor (monotonic time); 0 if it does.
    """

    started: bool = False
    closing: bool = False
    paused: bool = False
    children: int = 0
    ready: int = 0
    stopped_pid: int = 0
    failing_since_ms: int = 0

    def problems(self) -> list[str]:
        """Return why the worker is not ready, the cause first."""
        found = ["it is stopping"] * self.closing
        if self.failing_since_ms:
            found.append(_NO_REDIS)
        if not (self.started or self.closing):
            return [*found, "it is starting"]
        if self.paused:
            found.append("it is paused: send CONT to the supervisor to resume it")
        if not (self.ready or self.closing):
            found.append(no_child_runs(self.children, self.stopped_pid))
        return found


def no_child_runs(children: int, stopped_pid: int) -> str:
    """Return why a worker without a child that makes progress is not ready."""
    if stopped_pid:
        others = "" if children == 1 else ", and no other child takes jobs"
        return f"its child {stopped_pid} was stopped{others}: send CONT to the child"
    return "its child does not take jobs" if children == 1 else f"none of its {children} children takes jobs"


class HealthPage:
    """A worker's vital signs in shared memory, which only its supervisor writes."""

    def __init__(self, memory: memoryview) -> None:
        self._words = memory[:_NAME_AT].cast("q")
        self._name = memory[_NAME_AT : _NAME_AT + _NAME_BYTES]

    def open(self, worker_id: str) -> None:
        """Begin to use the page, in the supervisor."""
        name = worker_id.encode()[:_NAME_BYTES]
        self._name[: len(name)] = name
        self._words[_NAME_LENGTH], self._words[_PID] = len(name), os.getpid()
        self.tick()
        self._words[_MAGIC_WORD] = _MAGIC

    def tick(self) -> None:
        """Record that the supervisor makes progress."""
        self._words[_TICKED] = mono_ms()

    def write(self, vitals: Vitals) -> None:
        """Record the vital signs; each is a word, so a reader needs no lock."""
        words = self._words
        words[_STARTED], words[_CLOSING], words[_PAUSED] = vitals.started, vitals.closing, vitals.paused
        words[_CHILDREN], words[_READY], words[_FAILING_SINCE] = vitals.children, vitals.ready, vitals.failing_since_ms
        words[_STOPPED_PID] = vitals.stopped_pid

    @property
    def is_known(self) -> bool:
        """Whether a worker of a version with this layout uses the page."""
        return self._words[_MAGIC_WORD] == _MAGIC

    @property
    def pid(self) -> int:
        """The supervisor's process id."""
        return self._words[_PID]

    @property
    def worker_id(self) -> str:
        """The worker's id."""
        return bytes(self._name[: self._words[_NAME_LENGTH]]).decode(errors="replace")

    def not_alive(self) -> list[str]:
        """Return why the worker is not alive; empty if it is. It never depends on Redis, nor on jobs."""
        silent_ms = mono_ms() - self._words[_TICKED]
        if silent_ms < LIVE_MS:
            return []
        return [f"its supervisor has been stopped or has hung for {silent_ms / 1000:.0f} s"]

    def not_ready(self) -> list[str]:
        """Return why the worker cannot take jobs now, the cause first; empty if it can."""
        words = self._words
        vitals = Vitals(
            started=bool(words[_STARTED]),
            closing=bool(words[_CLOSING]),
            paused=bool(words[_PAUSED]),
            children=words[_CHILDREN],
            ready=words[_READY],
            stopped_pid=words[_STOPPED_PID],
            failing_since_ms=words[_FAILING_SINCE],
        )
        problems = [*self.not_alive(), *vitals.problems()]
        if since_ms := vitals.failing_since_ms:
            seconds = (mono_ms() - since_ms) / 1000
            return [f"{each}, for {seconds:.0f} s" if each == _NO_REDIS else each for each in problems]
        return problems


def find_workers() -> list[HealthPage]:
    """Return the pages of the workers on this machine, or in this container, that this user may see.

    They are found by their shared memory: without a file that a killed worker leaves, or a socket at which a stopped
    one does not answer. Needs Linux.
    """
    found: dict[tuple[int, int], HealthPage] = {}
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has exited, or belongs to another user
            for link in os.scandir(process / "fd"):
                with suppress(OSError, ValueError):
                    if not os.readlink(link.path).startswith(f"/memfd:{SLOTS_NAME}"):  # noqa: PTH115 - for every file
                        continue
                    status = link.stat()
                    if (key := (status.st_dev, status.st_ino)) not in found and (page := _page_of(link.path)).is_known:
                        found[key] = page  # its children and helpers have it, too
    return sorted(found.values(), key=lambda page: page.worker_id)


def _page_of(path: str) -> HealthPage:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        memory = memoryview(mmap.mmap(fd, mmap.PAGESIZE, prot=mmap.PROT_READ))
    finally:
        os.close(fd)
    return HealthPage(memory[HEALTH_AT : HEALTH_AT + _PAGE_BYTES])


_REPORT_MS, _MIN_REPORT_MS = 500, 20
_EXTEND_MS: Final = 5_000
_EXTENSION: Final = "EXTEND_TIMEOUT_USEC=15000000"
"""systemd gives the worker this time; it is sent again every 5 s, so a supervisor that hangs is killed after all."""


class ServiceManager:
    """Tells systemd what the worker does (``sd_notify``); does nothing if no service manager has started it.

    Takes the variables of the protocol out of ``environ``, so that tasks, and what they start, cannot speak for the
    worker.
    """

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        self._address = environ.pop("NOTIFY_SOCKET", "")
        usec, pid = environ.pop("WATCHDOG_USEC", ""), environ.pop("WATCHDOG_PID", "")
        is_watched = usec.isdecimal() and pid in {"", str(os.getpid())}
        self._watchdog_ms = int(usec) // 2_000 if is_watched else 0
        self.interval_ms = min(_REPORT_MS, max(_MIN_REPORT_MS, self._watchdog_ms // 2)) if is_watched else _REPORT_MS
        self._watchdog_due_ms = self._extend_due_ms = 0
        self._sent = ""

    def notify(self, *lines: str) -> None:
        """Send a message, unless it is the same as the last one."""
        if (message := "\n".join(lines)) != self._sent:
            self._sent = message
            self._send(message)

    def keep_alive(self, *, extend: bool) -> None:
        """Send that the supervisor makes progress, if it is time; with ``extend``, also that it needs more time."""
        now_ms = mono_ms()
        if self._watchdog_ms and now_ms >= self._watchdog_due_ms:
            self._watchdog_due_ms = now_ms + self._watchdog_ms
            self._send("WATCHDOG=1")
        if extend and now_ms >= self._extend_due_ms:
            self._extend_due_ms = now_ms + _EXTEND_MS
            self._send(_EXTENSION)

    def _send(self, message: str) -> None:
        if not self._address.startswith(("/", "@")):
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        with suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.setblocking(False)  # a service manager that hangs must not stop the worker
            sender.sendto(message.encode(), address)


class Pulse:
    """The supervisor's side: what it writes into the page and tells the service manager."""

    def __init__(self, page: HealthPage, manager: ServiceManager) -> None:
        self._page = page
        self._manager = manager
        self._vitals = Vitals()
        self._mode = ""

    @property
    def interval_ms(self) -> int:
        """How often the supervisor must at least make progress, in milliseconds."""
        return self._manager.interval_ms

    def beat(self) -> None:
        """Record progress: called in each turn of the supervisor's loop, and before each of its calls to Redis."""
        self._page.tick()
        # systemd waits for the start, and for the end, as long as the supervisor makes progress.
        self._manager.keep_alive(extend=bool(self._mode) or not self._vitals.started)

    def report(self, vitals: Vitals) -> None:
        """Report the vital signs."""
        self._vitals = vitals
        self._page.write(vitals)
        if not self._mode:
            status = f"Not ready: {problems[0]}" if (problems := vitals.problems()) else "Ready"
            ready = ["READY=1"] if vitals.started and vitals.ready else []
            self._manager.notify(*ready, f"STATUS={status}")

    def stopping(self, event: WorkerStopping) -> None:
        """Tell that the worker stops, or restarts."""
        self._mode = event.mode
        jobs = f"{event.running} jobs are running"
        if event.mode == "restart":
            since = mono_ms() * 1_000
            self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={since}", f"STATUS=Restarting: {jobs}")
        else:
            self._manager.notify("STOPPING=1", f"STATUS=Stopping ({event.mode}): {jobs}")


class HealthReport:
    """A service of the supervisor that reports the worker's vital signs."""

    def __init__(self, pulse: Pulse, read: Callable[[], Vitals]) -> None:
        self._pulse = pulse
        self._read = read

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks."""
        return self._pulse.interval_ms

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Report them."""
        self._pulse.report(self._read())
