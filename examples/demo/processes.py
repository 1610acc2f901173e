"""The demo's processes: a temporary server and a worker. Both stop with the demo, even if it is killed."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar, cast

from bulltask.config.config import SETTINGS
from bulltask.config.process import die_with_parent
from bulltask.embedded import EmbeddedServer

HERE = Path(__file__).parent
WORKER = ["worker", "-A", "tasks", "-c", "2", "-l", "warning"]
STOP_TIMEOUT = 20.0  # for the worker's last jobs
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Returned = TypeVar("Returned")


class Interrupted(BaseException):
    """The demo received a signal to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def install_signal_handlers() -> None:
    """Raise `Interrupted` on Ctrl-C, TERM and HUP, but only once, so that the cleanup is not interrupted."""
    sys.unraisablehook = _repeat_if_dropped
    for number in STOP_SIGNALS:
        signal.signal(number, _interrupt)


def run_async(work: Callable[..., Coroutine[Any, Any, Returned]], *arguments: object) -> Returned:
    """Run a coroutine until it ends or a signal stops the demo.

    If a signal handler raised `Interrupted` inside the event loop, the loop could be left in an invalid state, or the
    exception could be treated as a callback's error. Therefore, the handler only cancels the coroutine.
    """
    received: list[int] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    def receive(number: int, _: FrameType | None) -> None:
        received.append(number)
        for loop, task in running:
            loop.call_soon_threadsafe(cast("asyncio.Task[Any]", task).cancel)

    async def run_until_signal() -> Returned:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        try:
            if received:
                raise asyncio.CancelledError
            return await work(*arguments)
        finally:
            running.clear()

    for number in STOP_SIGNALS:
        signal.signal(number, receive)
    try:
        return asyncio.run(run_until_signal())
    finally:
        install_signal_handlers()
        if received:
            _interrupt(received[0], None)


def ignore_signals() -> None:
    """Ignore further signals."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def clear_settings() -> None:
    """Remove bulltask's settings from the environment: ``BULLTASK_BROKER_URL`` may be a production server."""
    for name in SETTINGS:
        os.environ.pop(f"BULLTASK_{name.upper()}", None)


@contextmanager
def temporary_server() -> Iterator[EmbeddedServer]:
    """Run a server on a free port with a temporary directory."""
    with (
        tempfile.TemporaryDirectory(prefix="bulltask-demo-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer(folder) as server,
    ):
        os.environ["BULLTASK_BROKER_URL"] = server.url
        yield server


class DemoWorker:
    """A ``bulltask worker`` in a separate process; its log has JSON lines.

    Args:
        folder: The directory of ``tasks.py``.
        options: Additional options of the command.
    """

    def __init__(self, folder: Path = HERE, options: Sequence[str] = ()) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bulltask", *WORKER, *options],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            start_new_session=True,  # the demo handles Ctrl-C in the terminal, and then stops the worker
            preexec_fn=functools.partial(die_with_parent, signal.SIGKILL, os.getpid()),  # noqa: PLW1509 - no threads yet
        )
        self.log = cast("IO[str]", self._process.stderr)

    def stop(self) -> int:
        """Shut the worker down, kill it after a timeout, and return its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _interrupt(number: int, _: FrameType | None) -> None:
    ignore_signals()
    raise Interrupted(number)


def _repeat_if_dropped(dropped: sys.UnraisableHookArgs) -> None:
    """Send the signal again if it arrived in a finalizer, where Python drops exceptions."""
    if not isinstance(dropped.exc_value, Interrupted):
        sys.__unraisablehook__(dropped)
        return
    install_signal_handlers()
    threading.Timer(0.01, os.kill, (os.getpid(), dropped.exc_value.number)).start()
