"""A fork server for Spark's Python processes, which have imported all modules when they start.

Spark starts a Python process for each streaming query, and one for each kind of data source call. Importing pyspark,
pyarrow and bulltask takes such a process 0.9 CPU seconds, a third of the time of the tests with streaming queries.
`spark_python` writes a program for ``PYSPARK_PYTHON``: it sends its arguments, environment and standard files to the
server, which forks the process.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from tests.support.fork_server import redirect
from tests.support.processes import SESSION_VARIABLE

__all__ = ["spark_python"]

STREAMING = "pyspark.sql.streaming.python_streaming_source_runner"
PRELOADED = (
    "bulltask.spark.connector",
    "bulltask.spark.source.readers",
    "pyarrow.compute",
    "pyspark.daemon",
    STREAMING,
)
_MAX_REQUEST = 1_000_000

# It starts in 15 ms, without site-packages, and exits with the forked process.
_PROGRAM = """\
#!{python} -IS
import json, os, socket, sys
if sys.argv[1] != "-m" or not sys.argv[2].startswith("pyspark."):
    os.execv({python!r}, [{python!r}, *sys.argv[1:]])
control = socket.socket(socket.AF_UNIX)
control.connect({path!r})
request = json.dumps([sys.argv[2:], os.getcwd(), dict(os.environ)])
socket.send_fds(control, [request.encode()], [0, 1, 2])
control.recv(1)
"""


@contextmanager
def spark_python(directory: Path) -> Iterator[tuple[Path, int]]:
    """Start the server; yield the program for ``PYSPARK_PYTHON`` and the server's process id."""
    directory.mkdir()
    path, program = directory / "control", directory / "python"
    program.write_text(_PROGRAM.format(python=sys.executable, path=str(path)))
    program.chmod(0o755)
    environ = {**os.environ, "PYTHONHASHSEED": "0"}  # as in Spark's Python processes
    environ.pop(SESSION_VARIABLE, None)  # the processes exit with their JVM: do not count them as left over
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(path))
        listening.listen(64)
        server = subprocess.Popen(
            [sys.executable, "-m", __name__, str(listening.fileno())],
            pass_fds=[listening.fileno()],
            stdin=subprocess.DEVNULL,
            env=environ,
        )
    try:
        yield program, server.pid
    finally:
        server.terminate()
        server.wait()


def serve(listening: socket.socket) -> tuple[list[str], str, dict[str, str]]:
    """Fork for each connection. Returns in the forked process, with its arguments, directory and environment."""
    signal.signal(signal.SIGCHLD, _reap)
    while True:
        control, _ = listening.accept()
        request, files, *_ = socket.recv_fds(control, _MAX_REQUEST, 3)
        if request and os.fork() == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            listening.close()
            control.detach()  # open until this process exits; then the program exits, too
            redirect(files)
            args, directory, environ = json.loads(request)
            return args, directory, environ
        for file in files:
            os.close(file)
        control.close()


def _reap(*_: object) -> None:
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def main() -> NoReturn:
    """Run the server and, in forked processes, Spark's modules."""
    for name in PRELOADED:
        importlib.import_module(name)
    for name in ("pyspark.daemon", STREAMING):
        del sys.modules[name]  # runpy warns about a module that is already imported
    gc.collect()
    gc.freeze()
    args, directory, environ = serve(socket.socket(fileno=int(sys.argv[1])))
    os.chdir(directory)
    os.environ.clear()
    os.environ.update(environ)
    sys.argv[1:] = args[1:]
    runpy.run_module(args[0], run_name="__main__", alter_sys=True)
    sys.exit()


if __name__ == "__main__":
    main()
