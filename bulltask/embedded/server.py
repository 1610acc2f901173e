"""A server process that is a child of this process."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from bulltask.embedded.binary import ServerBinary, find_binary
from bulltask.embedded.keeper import tie_to_parent
from bulltask.embedded.launch import (
    MAX_PORT_ATTEMPTS,
    PortTakenError,
    ServerLog,
    lock_directory,
    pick_port,
    restrict_clients,
    server_command,
    server_environment,
    wait_for_exit,
    wait_until_ready,
)
from bulltask.embedded.probe import HOST
from bulltask.errors import BrokerUnavailableError

__all__ = ["STARTED_HERE", "EmbeddedServer"]

STARTED_HERE: Final[set[int]] = set()
"""The ports of the servers that this process has started, and of its proxies to them."""


class EmbeddedServer:
    """A Valkey or Redis process, with methods to start and stop it.

    The server listens on 127.0.0.1 only, evicts nothing and writes every change to an append-only file, which is synced
    every second. ``kill -9`` therefore usually loses no acknowledged write, but may lose the last two seconds if the
    disk is slow. A power failure may lose the last second. The server stops with the process that started it, even if
    that process is killed; a forked child of that process neither stops the server nor changes its files.

    Args:
        data_dir: Directory of the server's files, created if missing; for one server at a time, and for one flavor and
            major version (`DataDirectory` separates those).
        port: TCP port on 127.0.0.1; ``None`` chooses a free port.
        binary: The program; ``None`` calls `find_binary`.
        appendonly: False keeps everything in memory only.
        password: Required from clients; ``None`` for none.
        restricted: Without ``password``, let only the user ``admin`` reconfigure the server. Its password is in the
            file ``admin.password``, which only this user can read.
        extra: Further arguments of the server, such as ``["--maxmemory", "50mb"]``.
    """

    def __init__(  # noqa: PLR0913 - each is one property of the server
        self,
        data_dir: Path | str,
        *,
        port: int | None = None,
        binary: ServerBinary | None = None,
        appendonly: bool = True,
        password: str | None = None,
        restricted: bool = True,
        extra: Sequence[str] = (),
    ) -> None:
        self.data_dir = Path(data_dir).absolute()
        self.binary = binary or find_binary()
        self.run_id = ""
        self._port = port
        self._appendonly = appendonly
        self._password = password
        self._restricted = restricted and password is None
        self._extra = [*extra, *(["-"] if password is not None else [])]  # "-": more settings come from stdin
        self._process: subprocess.Popen[bytes] | None = None
        self._owner = 0

    @property
    def port(self) -> int:
        """The TCP port on 127.0.0.1, which later calls to `start` use again.

        Raises:
            BrokerUnavailableError: The server has not been started yet.
        """
        if self._port is None:
            raise BrokerUnavailableError("the server has not been started yet: call start() first")
        return self._port

    @property
    def url(self) -> str:
        """``redis://127.0.0.1:PORT/0``, with the password if there is one."""
        secret = f":{self._password}@" if self._password is not None else ""
        return f"redis://{secret}{HOST}:{self.port}/0"

    @property
    def pid(self) -> int:
        """Process id of the server, even after it has exited.

        Raises:
            BrokerUnavailableError: The server has not been started yet.
        """
        if self._process is None:
            raise BrokerUnavailableError("the server has not been started yet: call start() first")
        return self._process.pid

    @property
    def running(self) -> bool:
        """True while the server's process runs, in the process that started it."""
        return self._process is not None and self._owner == os.getpid() and self._process.poll() is None

    def start(self, *, timeout: float = 60.0) -> str:
        """Start the server and wait until it accepts commands; do nothing if it is already running.

        Args:
            timeout: Seconds; a large append-only file takes a while to load.

        Returns:
            The URL for clients.

        Raises:
            BrokerUnavailableError: The port or the directory is in use, the directory is not writable, or the server
                exited; the message gives the cause, with the last lines of the log.
        """
        if self.running:
            return self.url
        fixed_port = self._port
        for _ in range(MAX_PORT_ATTEMPTS):
            try:
                self._start_on(pick_port() if fixed_port is None else fixed_port, timeout)
            except PortTakenError:
                if fixed_port is not None:
                    raise
            else:
                return self.url
        raise BrokerUnavailableError(
            f"the server could not start: other processes took {MAX_PORT_ATTEMPTS} free ports first. Try again"
        )

    def stop(self, *, timeout: float = 10.0) -> None:
        """Stop the server (``SIGTERM``), wait, and kill it if it has not exited after ``timeout`` seconds."""
        if self.running and self._process is not None:
            self._process.terminate()
            if wait_for_exit(self._process, timeout) is None:
                self.kill()

    def kill(self) -> None:
        """Kill the server (``SIGKILL``) and wait until it is gone."""
        if self.running and self._process is not None:
            self._process.kill()
            self._process.wait()

    def wait(self, timeout: float | None = None) -> int | None:
        """Wait until the server exits and return its code, ``None`` if still running after ``timeout`` seconds."""
        if self._process is None or self._owner != os.getpid():
            return None
        return wait_for_exit(self._process, timeout)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _start_on(self, port: int, timeout: float) -> None:
        lock_fd = lock_directory(self.data_dir)
        log = ServerLog(self.data_dir)
        try:
            extra = [*(restrict_clients(self.data_dir) if self._restricted else []), *self._extra]
            command = server_command(self.binary, self.data_dir, port, appendonly=self._appendonly, extra=extra)
            with log.path.open("ab") as output:
                settings = _settings(self._password)
                try:
                    self._process = process = _run_in_permanent_thread(
                        lambda: _spawn(command, settings, lock_fd, output.fileno())
                    )
                finally:
                    os.close(settings)
        finally:
            os.close(lock_fd)  # the server has inherited it
        self._owner, self._port = os.getpid(), port
        STARTED_HERE.add(port)
        try:
            self.run_id = wait_until_ready(
                port,
                process.pid,
                lambda seconds: self.wait(seconds) is not None,
                password=self._password,
                timeout=timeout,
            )
        except BaseException:
            self.kill()
            raise
        if not self.run_id:
            raise log.failure(port)


def _settings(password: str | None) -> int:
    """Return a pipe that contains the password, because any user on this machine can read the command line."""
    reading, writing = os.pipe()
    if password is not None:
        escaped = "".join(f"\\x{byte:02x}" for byte in password.encode())
        os.write(writing, f'requirepass "{escaped}"\n'.encode())
    os.close(writing)
    return reading


def _spawn(command: Sequence[str], settings: int, lock_fd: int, output: int) -> subprocess.Popen[bytes]:
    with warnings.catch_warnings():
        # Python 3.12 and newer warn about a fork while threads are running; this child only calls prctl and execs.
        warnings.filterwarnings("ignore", category=DeprecationWarning, message=".*multi-threaded.*fork")
        return subprocess.Popen(  # noqa: S603 # the program was found by find_binary
            command,
            stdin=settings,
            stdout=output,
            stderr=output,
            env=server_environment(),
            pass_fds=[lock_fd],
            umask=0o077,  # the data is for this user only, even in a directory that others can read
            start_new_session=True,  # Ctrl-C in the terminal is for this process, which then stops the server
            preexec_fn=tie_to_parent(),  # noqa: PLW1509 # a single prctl call, resolved before the fork
        )


_spawner: tuple[int, ThreadPoolExecutor] | None = None


def _run_in_permanent_thread(spawn: Callable[[], subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Run ``spawn`` in the main thread, or in a thread that lives as long as this process.

    Linux kills the server when the *thread* that forked it exits: a server that was started in a web framework's worker
    thread would stop with the request.
    """
    global _spawner  # noqa: PLW0603 # one thread per process
    if threading.current_thread() is threading.main_thread() or sys.platform != "linux":
        return spawn()
    if _spawner is None or _spawner[0] != os.getpid():  # a fork inherits the executor, but not its thread
        _spawner = os.getpid(), ThreadPoolExecutor(1, thread_name_prefix="bulltask-embedded")
    return _spawner[1].submit(spawn).result()
