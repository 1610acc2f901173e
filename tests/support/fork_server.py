"""A fork server that starts ``python -m bulltask`` in processes that have already imported all modules.

Importing bulltask, redis and their dependencies takes half a CPU second, and the tests start some 1,500 workers. The
server has also read the Lua scripts and the metadata of packages, which takes a fifth of a worker's start. A forked
process runs ``python -m bulltask`` as a child of the tests, with a separate directory, environment and output.
Variables that the interpreter reads when it starts (``PYTHON…``) have the same values as in the tests.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import metadata
from pathlib import Path
from typing import IO, Any, NoReturn

__all__ = ["ForkServer", "ForkedProcess", "fork_server", "redirect"]

PRELOADED = ("bulltask.app", "bulltask.cli.main", "bulltask.cli.worker", "bulltask.worker.run", "encodings.idna")
_PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
_MAX_REQUEST = 1_000_000


class ForkedProcess:
    """A process that the server forked, with the methods of `subprocess.Popen` that the tests use.

    Args:
        pid: The process id; the process is a child of this process.
        stdout: The process's standard output.
        stderr: The process's standard error, if that is a separate file.
    """

    def __init__(self, pid: int, stdout: IO[str], stderr: IO[str] | None = None) -> None:
        self.pid, self.stdout, self.stderr = pid, stdout, stderr
        self.returncode: int | None = None
        self._reaping = threading.Lock()

    def poll(self) -> int | None:
        """Return the exit code, negative for a signal; None while it runs."""
        with self._reaping:
            if self.returncode is None:
                pid, status = os.waitpid(self.pid, os.WNOHANG)
                if pid:
                    self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait until the process exits; return the exit code.

        Raises:
            subprocess.TimeoutExpired: The process is still running.
        """
        if (code := self.poll()) is not None:
            return code
        handle = os.pidfd_open(self.pid)
        try:
            select.select([handle], [], [], timeout)
        finally:
            os.close(handle)
        if (code := self.poll()) is None:
            raise subprocess.TimeoutExpired("bulltask", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        """Send the process a signal, unless it has exited."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill the process."""
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """Forks processes. The server starts with the first request and exits at `close`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None
        self._owner = 0
        self._starting = threading.Lock()

    @property
    def pids(self) -> set[int]:
        """The server's process id, as a set; empty if the server is not running."""
        return set() if self._process is None else {self._process.pid}

    def start(
        self, args: Sequence[str], directory: Path, environ: Mapping[str, str], stdin: int, *, new_session: bool
    ) -> ForkedProcess:
        """Start ``python -m bulltask ARGS`` with its standard output and error in one pipe.

        Args:
            args: The arguments.
            directory: The working directory.
            environ: The complete environment.
            stdin: A file descriptor, or `subprocess.DEVNULL`.
            new_session: Whether the process starts a new session.
        """
        reader, writer = os.pipe()
        try:
            pid = self._fork([list(args), str(directory.absolute()), dict(environ), new_session], stdin, writer, writer)
        except BaseException:
            os.close(reader)
            raise
        finally:
            os.close(writer)
        return ForkedProcess(pid, os.fdopen(reader, encoding="utf-8"))

    @contextmanager
    def running(self, args: Sequence[str], environ: Mapping[str, str]) -> Iterator[ForkedProcess]:
        """Run ``python -m bulltask ARGS`` in the current directory, with its outputs in files; kill it at the end."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            request = [list(args), str(Path.cwd()), dict(environ), False]
            process = ForkedProcess(self._fork(request, subprocess.DEVNULL, out.fileno(), err.fileno()), out, err)
            try:
                yield process
            finally:
                process.kill()
                process.wait()

    def run(self, args: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run ``python -m bulltask ARGS`` in the current directory and wait until it exits."""
        with self.running(args, environ) as process:
            code = process.wait(60)
            assert process.stderr is not None
            for file in (process.stdout, process.stderr):
                file.seek(0)
            return subprocess.CompletedProcess(args, code, process.stdout.read(), process.stderr.read())

    def close(self) -> None:
        """Stop the server; processes that it forked continue to run."""
        if self._process is None or self._control is None or self._owner != os.getpid():
            return
        self._control.close()  # the server exits at the end of its input
        self._process.wait()
        self._process = self._control = None

    def _fork(self, request: list[Any], stdin: int, stdout: int, stderr: int) -> int:
        with self._starting, Path(os.devnull).open() as null:
            stdin_fd = null.fileno() if stdin == subprocess.DEVNULL else stdin
            if self._control is None or self._owner != os.getpid():  # a forked test process starts its own server
                self._launch()
            assert self._control is not None
            # The forked process is orphaned immediately; its nearest subreaper, this process, becomes its parent.
            prctl(_PR_SET_CHILD_SUBREAPER, 1)
            try:
                socket.send_fds(self._control, [json.dumps(request).encode()], [stdin_fd, stdout, stderr])
                answer = self._control.recv(100)
            finally:
                prctl(_PR_SET_CHILD_SUBREAPER, 0)
        if not answer:
            raise RuntimeError("the fork server has exited")
        return int(answer)

    def _launch(self) -> None:
        control, server_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with server_end:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(server_end.fileno())],
                pass_fds=[server_end.fileno()],
                stdin=subprocess.DEVNULL,
                env={name: value for name, value in os.environ.items() if not name.startswith("BULLTASK_W")},
            )
        self._control, self._owner = control, os.getpid()
        atexit.register(self.close)


fork_server = ForkServer()
"""The fork server of this process."""


def prctl(option: int, value: int) -> None:
    """Call prctl(2) for this process."""
    if ctypes.CDLL(None, use_errno=True).prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise OSError(ctypes.get_errno(), "prctl")


def serve(control: socket.socket) -> tuple[list[str], str, dict[str, str], bool]:
    """Fork for each request until the input ends. Returns in the forked process, with the process's arguments."""
    while True:
        request, files, *_ = socket.recv_fds(control, _MAX_REQUEST, 3)
        if not request:
            sys.exit()
        (wait, go), (names, name) = os.pipe(), os.pipe()
        if (between := os.fork()) == 0:
            if pid := os.fork():
                os.write(name, str(pid).encode())
                os._exit(0)
            prepare_child(control, files, wait, go)
            os.close(names)
            os.close(name)
            args, directory, environ, new_session = json.loads(request)
            return args, directory, environ, new_session
        os.waitpid(between, 0)  # from now on, the tests are the forked process's parent
        control.send(os.read(names, 100))
        for file in (*files, wait, go, names, name):
            os.close(file)


def prepare_child(control: socket.socket, files: list[int], wait: int, go: int) -> None:
    """Redirect the standard files, and wait until the tests are this process's parent."""
    control.close()
    os.close(go)
    os.read(wait, 1)
    os.close(wait)
    redirect(files)


def redirect(files: Sequence[int]) -> None:
    """Make the open files this process's standard input, output and error."""
    for number, file in enumerate(files):
        os.dup2(file, number)
    for file in files:
        os.close(file)


def run_main() -> int:
    """Run ``python -m bulltask``; return the exit code."""
    try:
        runpy.run_module("bulltask", run_name="__main__", alter_sys=True)
    except SystemExit as exc:
        if isinstance(exc.code, int | None):
            return exc.code or 0
        raise
    return 0


def end(code: int) -> NoReturn:
    """End this process as the interpreter does, but without destroying all objects.

    That takes a fifth of the CPU time of a worker that runs one job (0.05 of 0.25 s), because the memory is shared with
    the server until it is written. Tests of how the interpreter ends start a fresh one.
    """
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    try:
        for file in (sys.stdout, sys.stderr):
            file.flush()
    except (AttributeError, OSError, ValueError):  # a closed stream has a meaning: the interpreter decides
        sys.exit(code)
    os._exit(code)


def main() -> NoReturn:
    """Run the server and, in forked processes, ``python -m bulltask``."""
    installed = sys.path[1:]  # not this file's directory
    for name in os.environ.get("PYTHONPATH", "").split(os.pathsep):
        if name in installed:
            installed.remove(name)
    # Workers, and redis-py for each connection, read the metadata of packages, which takes longer than connecting.
    metadata.version = functools.cache(metadata.version)
    for name in PRELOADED:
        importlib.import_module(name)
    for package in ("bulltask", "redis"):
        metadata.version(package)
    importlib.import_module("bulltask.transport.permissions").worker_commands()
    gc.collect()
    gc.freeze()
    args, directory, environ, new_session = serve(socket.socket(fileno=int(sys.argv[1])))
    gc.unfreeze()
    if new_session:
        os.setsid()
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    time.tzset()
    paths = [path for path in environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = [str(Path.cwd()), *paths, *installed]
    sys.argv[1:] = args
    sys.orig_argv[1:] = ["-m", "bulltask", *args]
    end(run_main())


if __name__ == "__main__":
    main()
