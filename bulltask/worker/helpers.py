"""Processes that the supervisor starts in addition to its children: guard, hooks, metrics and outboxes.

Begin with :class:`HelperProcess`; each of the others overrides what its process runs.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, ClassVar, Final

from structlog.typing import FilteringBoundLogger

from bulltask.app import App
from bulltask.config.config import Config
from bulltask.config.process import (
    BLOCKED_AT_FORK,
    CHILD_MARK,
    die_with_parent,
    exit_child,
    fork_with_blocked_signals,
    name_process,
    unblock_signals,
)
from bulltask.jobs.clock import mono_ms, value_class
from bulltask.observe.bus import Bus
from bulltask.observe.counters import MetricsMemory
from bulltask.observe.events import WorkerStopping
from bulltask.observe.hooks import send_signal
from bulltask.observe.signals import worker_ready, worker_shutdown, worker_shutting_down
from bulltask.worker import guard
from bulltask.worker.slots import ExitCode, Slots

if TYPE_CHECKING:
    import socket

    from bulltask.observe.metrics import ReadQueues

__all__ = [
    "GuardProcess",
    "HelperProcess",
    "HookProcess",
    "MetricsProcess",
    "OutboxProcess",
    "WorkerInfo",
]


def ignore_stop_signals(parent_pid: int) -> None:
    """Ignore stop signals, which terminals and service managers send to all of a worker's processes.

    The process is killed when its parent dies.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGQUIT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, lambda *_: None)  # not SIG_IGN, which programs that a receiver starts would inherit
    for number in (signal.SIGTSTP, signal.SIGCONT, signal.SIGTTIN, signal.SIGTTOU):
        signal.signal(number, lambda *_: None)
    die_with_parent(signal.SIGKILL, parent_pid)
    unblock_signals()


_POLL_S: Final = 0.02
_RENEW_MS: Final = 200


class HelperProcess(ABC):
    """A helper process of the worker; a service of the supervisor, which starts another process if this one dies."""

    interval_ms = 1_000
    title: ClassVar[str]
    """The process's name in log lines."""
    role: ClassVar[str]
    """The process's name in lists of processes."""
    stop_timeout_ms: ClassVar[int]
    """How long the process may take to stop, unless the worker must stop earlier."""
    kill_hint: ClassVar[str]
    """What it means that the process did not stop in time."""

    def __init__(self, close_inherited: Callable[[], None], logger: FilteringBoundLogger) -> None:
        self._close_inherited = close_inherited
        self._logger = logger
        self._pid: int | None = None

    @property
    def pid(self) -> int:
        """The process's id; 0 if it is not running."""
        return self._pid or 0

    def start(self) -> None:
        """Fork the process."""
        self._fork()

    def tick(self, now_ms: int, missed: int, /) -> None:  # noqa: ARG002 - a service's arguments
        """Start another process if this one has died; also reaps it."""
        if self._pid is not None and (code := self._exit_code(os.WNOHANG)) is not None:
            self._logger.warning(f"{self.title} died", pid=self._pid, code=code, hint="Another one starts")
            self._fork()

    def renew(self) -> None:
        """Start another process in place of this one, if it is running: it knows what the supervisor knows now."""
        if self._pid is not None:
            self.request_stop()
            self.wait(mono_ms() + _RENEW_MS)
            self._fork()

    def request_stop(self) -> None:
        """Tell the process to stop, without waiting for it."""
        if self._pid is not None:
            with suppress(OSError):
                self._send_stop()

    def wait(self, deadline_ms: int | None) -> None:
        """Wait until the process has exited; kill it at the deadline (monotonic time), or when its own time is over."""
        if self._pid is None:
            return
        kill_at_ms = mono_ms() + self.stop_timeout_ms
        if deadline_ms is not None:
            kill_at_ms = min(kill_at_ms, deadline_ms)
        while self._exit_code(os.WNOHANG) is None:
            if mono_ms() >= kill_at_ms:
                self._logger.warning(f"{self.title} killed", pid=self._pid, hint=self.kill_hint)
                os.kill(self._pid, signal.SIGKILL)
                self._exit_code(0)
                break
            threading.Event().wait(_POLL_S)
        self._pid = None

    def _fork(self) -> None:
        self._before_fork()
        self._pid = self._launch()
        self._after_fork()

    def _launch(self) -> int:
        """Start the process and return its pid."""
        parent_pid = os.getpid()
        pid = fork_with_blocked_signals()
        if pid == 0:
            try:
                name_process(self.role)
                self._run(parent_pid)
            except BaseException:  # noqa: BLE001 - a fork must never return into the supervisor's code
                traceback.print_exc()
            finally:
                exit_child(ExitCode.OK)
        return pid

    def _exit_code(self, options: int) -> int | None:
        """Return the process's exit code, negative after a signal; ``None`` while it is running."""
        assert self._pid is not None
        try:
            pid, status = os.waitpid(self._pid, options)
        except ChildProcessError:
            return 0
        return os.waitstatus_to_exitcode(status) if pid else None

    @abstractmethod
    def close_inherited(self) -> None:
        """Close what only the supervisor needs; its other forks call this, too."""

    @abstractmethod
    def _send_stop(self) -> None:
        """Tell the process to stop."""

    def _before_fork(self) -> None:  # noqa: B027 - optional
        """Prepare a fork."""

    def _after_fork(self) -> None:  # noqa: B027 - optional
        """Complete a fork, in the supervisor."""

    def _run(self, parent_pid: int) -> None:
        """Run in the new process, if it is a fork, and close what it has inherited."""
        raise NotImplementedError


class PipedProcess(HelperProcess):
    """A helper process that reads from the supervisor through a pipe; it also reads the pipe's end."""

    def __init__(self, close_inherited: Callable[[], None], logger: FilteringBoundLogger) -> None:
        super().__init__(close_inherited, logger)
        self._read_fd = -1
        self._write_fd: int | None = None

    def close_inherited(self) -> None:
        """Close the pipe. Forks of the supervisor also call this: an open copy would keep the process running."""
        if self._write_fd is not None:
            os.close(self._write_fd)
            self._write_fd = None

    def _send_stop(self) -> None:
        self.close_inherited()

    def _before_fork(self) -> None:
        self.close_inherited()
        self._read_fd, self._write_fd = os.pipe()

    def _after_fork(self) -> None:
        os.close(self._read_fd)


_SHELL: Final = "/bin/sh"
_WAIT: Final = '{ printf %s "$0" >/proc/$$/comm; } 2>/dev/null; read -r _ || exec "$@"'
"""Name the process, and wait for a line, or start the program when the pipe has ended."""


class GuardProcess(PipedProcess):
    """The process that runs :mod:`bulltask.worker.guard`; ``slots_fd`` is the descriptor of the shared memory.

    It waits for as long as the worker runs. A fork would keep the pages that the other processes change, 7 MiB, and a
    Python program takes 4 MiB: so a shell waits, with a quarter of a MiB, and then becomes the program. Where there is
    no shell, the program itself waits.
    """

    title, role = "Guard process", "guard"
    stop_timeout_ms, kill_hint = 1_000, "It did not stop"

    def __init__(
        self,
        worker_id: str,
        slots: Slots,
        slots_fd: int,
        close_inherited: Callable[[], None],
        logger: FilteringBoundLogger,
    ) -> None:
        super().__init__(close_inherited, logger)
        at = slots.pids_at
        numbers = (slots_fd, at.start, at.stop, at.step)
        # -I -S: without the program's folder, installed packages and PYTHON* variables.
        self._program = [sys.executable, "-I", "-S", guard.__file__, f"{CHILD_MARK}={worker_id}/", *map(str, numbers)]
        self._slots_fd = slots_fd

    def _send_stop(self) -> None:
        if self._write_fd is not None:
            os.write(self._write_fd, b"\n")
            super()._send_stop()

    def _launch(self) -> int:
        os.set_inheritable(self._slots_fd, True)
        try:
            return self._spawn([_SHELL, "-c", _WAIT, "bulltask-guard", *self._program])
        except FileNotFoundError:
            return self._spawn(self._program)
        finally:
            os.set_inheritable(self._slots_fd, False)

    def _spawn(self, command: list[str]) -> int:
        return os.posix_spawn(
            command[0],
            command,
            dict(os.environ),
            file_actions=[(os.POSIX_SPAWN_DUP2, self._read_fd, 0)],
            setsid=True,  # a signal to the worker's process group must not end it
            setsigmask=BLOCKED_AT_FORK,
        )


_HOOK_POLL_S: Final = 0.05
_EXIT: Final = "exit"
_CAUSES: Final = {"warm": ("SIGTERM", "Warm"), "cold": ("SIGQUIT", "Cold"), "restart": ("SIGHUP", "Warm")}
"""``sig`` and ``how`` of ``worker_shutting_down``, by the mode of a shutdown."""


@value_class(frozen=True)
class WorkerInfo:
    """The sender of a worker's signals; ``hostname`` is the worker id, Celery's node name."""

    hostname: str
    app: App
    queues: tuple[str, ...]
    concurrency: int


class HookProcess(PipedProcess):
    """The process in which receivers of ``worker_ready``, ``worker_shutting_down`` and ``worker_shutdown`` are called.

    It is a fork of the supervisor, which itself runs no code of the app after its start: a receiver that blocks there
    would cause the locks of all running jobs to expire. ``is_ready`` is called in the process.
    """

    title, role, stop_timeout_ms = "Hook process", "hooks", 5_000
    kill_hint = "A signal receiver did not return"

    def __init__(
        self,
        worker: WorkerInfo,
        bus: Bus,
        is_ready: Callable[[], bool],
        close_inherited: Callable[[], None],
        logger: FilteringBoundLogger,
    ) -> None:
        super().__init__(close_inherited, logger)
        self._worker = worker
        self._bus = bus
        self._is_ready = is_ready
        self._announces_ready = True

    def start(self) -> None:
        """Fork the process if there is a receiver."""
        if any(one.has_listeners() for one in (worker_ready, worker_shutting_down, worker_shutdown)):
            self._bus.subscribe(WorkerStopping, self._on_stopping)
            super().start()

    def _on_stopping(self, event: WorkerStopping) -> None:
        self.tick(0, 0)  # otherwise, a process that has just died would miss the message
        self._send(event.mode)

    def _send(self, message: str) -> None:
        if self._write_fd is not None:
            with suppress(OSError):  # the process is dead, or a receiver has blocked it for thousands of messages
                os.write(self._write_fd, f"{message}\n".encode())

    def _send_stop(self) -> None:
        """Let the process send ``worker_shutdown``."""
        self._send(_EXIT)
        super()._send_stop()

    def _after_fork(self) -> None:
        super()._after_fork()
        assert self._write_fd is not None
        os.set_blocking(self._write_fd, False)

    def tick(self, now_ms: int, missed: int, /) -> None:
        """Start another process if this one has died. It sends ``worker_ready`` only if no child was ready before."""
        if self._announces_ready:
            self._announces_ready = not self._is_ready()
        super().tick(now_ms, missed)

    # ---- in the process ----

    def _run(self, parent_pid: int) -> None:
        ignore_stop_signals(parent_pid)
        self._close_inherited()  # also the pipe's other end
        while self._announces_ready and not select.select([self._read_fd], [], [], _HOOK_POLL_S)[0]:
            if self._is_ready():
                send_signal(worker_ready, self._worker)
                break
        with os.fdopen(self._read_fd) as messages:
            for line in messages:
                message = line.strip()
                if message == _EXIT:
                    send_signal(worker_shutdown, self._worker)
                    return
                sig, how = _CAUSES[message]
                send_signal(worker_shutting_down, self._worker.hostname, sig=sig, how=how, exitcode=0)


class MetricsProcess(HelperProcess):
    """The process that serves ``/metrics``, and the probes.

    The constructor binds the port, so that the worker does not start with an invalid port; :meth:`start` forks the
    process. The supervisor keeps the socket, so a client that connects while the process is dead is served by the next.
    ``probes`` returns for ``/livez`` and ``/readyz`` what is wrong.
    """

    title, role, stop_timeout_ms = "Metrics exporter", "metric", 1_000
    kill_hint = "It was stopped or suspended"

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        config: Config,
        memory: MetricsMemory,
        worker_id: str,
        read_queues: ReadQueues,
        slots: Callable[[], tuple[int, int]],
        probes: Mapping[str, Callable[[], Sequence[str]]],
        close_inherited: Callable[[], None],
        logger: FilteringBoundLogger,
    ) -> None:
        from bulltask.observe.metrics import bind  # noqa: PLC0415 - prometheus_client is slow to import

        super().__init__(close_inherited, logger)
        self._memory = memory
        self._worker_id = worker_id
        self._read_queues = read_queues
        self._slots = slots
        self._probes = probes
        self._socket: socket.socket = bind(config.metrics_host, config.metrics_port or 0)

    def close_inherited(self) -> None:
        """Close the socket; forks of the supervisor call this, too."""
        self._socket.close()

    def _send_stop(self) -> None:
        assert self._pid is not None
        os.kill(self._pid, signal.SIGTERM)

    def _run(self, parent_pid: int) -> None:
        from bulltask.observe.metrics import MetricsCollector, run_exporter  # noqa: PLC0415 - only for this process

        listener = self._socket.dup()
        self._close_inherited()  # also the other copy of the socket
        collector = MetricsCollector(self._memory, self._worker_id, self._read_queues, self._slots)
        run_exporter(listener, collector, parent_pid, self._probes)  # unblocks the signals once it has handlers


class OutboxProcess(PipedProcess):
    """Runs the relays of an app's outboxes, because the supervisor itself must not wait for a database.

    Told to stop, the process finishes its rows; killing it loses no job.
    """

    title, role, stop_timeout_ms = "Outbox relay", "outbox", 7_000
    kill_hint = "Its last rows are sent when a worker starts again, each once"

    def __init__(self, app: App, close_inherited: Callable[[], None], logger: FilteringBoundLogger) -> None:
        super().__init__(close_inherited, logger)
        self._app = app
        self._wanted = bool(app._outboxes) and app._config.outbox_relay

    def tick(self, now_ms: int, missed: int, /) -> None:
        """Start the process if it is not running."""
        if self._wanted and self._pid is None:
            self._fork()
        super().tick(now_ms, missed)

    def _after_fork(self) -> None:
        super()._after_fork()
        self._logger.info("Outbox relay started", pid=self._pid, outboxes=len(self._app._outboxes))

    def _run(self, parent_pid: int) -> None:
        ignore_stop_signals(parent_pid)
        self._close_inherited()
        for outbox in self._app._outboxes:
            outbox.after_fork()
        from bulltask.outbox.outbox import run_relays  # noqa: PLC0415 - only for this process

        run_relays(self._app._outboxes, lambda: os.read(self._read_fd, 1), self._logger)
