"""The processes of the demo: a throw-away server and a real worker. Both end with the demo, however it ends."""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Any, TypeVar, cast

from bulltask.config.settings import SETTINGS
from bulltask.embedded import EmbeddedServer
from bulltask.process import die_with_parent

HERE = Path(__file__).parent
WORKER = ["worker", "-A", "tasks", "-c", "2", "-l", "warning"]
STOP_TIMEOUT = 20.0  # seconds that the worker has for its last jobs
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
Returned = TypeVar("Returned")


class Interrupted(BaseException):
    """Somebody wants the demo to end now."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def end_on_signals() -> None:
    """Turn Ctrl-C, TERM and the end of the terminal into `Interrupted`, once: the clean-up is not interrupted."""
    for number in ENDING:
        signal.signal(number, _interrupt)


def run_async(work: Callable[..., Coroutine[Any, Any, Returned]], *arguments: object) -> Returned:
    """Run a coroutine to its end, or to the signal that ends the demo.

    Raised anywhere in the event loop, `Interrupted` would leave a loop half made, or be taken for the error of a
    callback and be lost. So a signal is noted here, and cancels the coroutine.
    """
    heard: list[int] = []
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any] | None]] = []

    def hear(number: int, _: FrameType | None) -> None:
        heard.append(number)
        for loop, task in running:
            loop.call_soon_threadsafe(cast("asyncio.Task[Any]", task).cancel)

    async def until_a_signal() -> Returned:
        running.append((asyncio.get_running_loop(), asyncio.current_task()))
        try:
            if heard:
                raise asyncio.CancelledError
            return await work(*arguments)
        finally:
            running.clear()

    for number in ENDING:
        signal.signal(number, hear)
    try:
        return asyncio.run(until_a_signal())
    finally:
        end_on_signals()
        if heard:
            _interrupt(heard[0], None)


def ignore_signals() -> None:
    """From here on the demo ends by itself."""
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)


def forget_settings() -> None:
    """Drop bulltask's settings from the environment: a ``BULLTASK_BROKER_URL`` may lead to your production."""
    for name in SETTINGS:
        os.environ.pop(f"BULLTASK_{name.upper()}", None)


@contextmanager
def throw_away_server() -> Iterator[EmbeddedServer]:
    """A server on a port of its own with a directory of its own: nobody else's data is touched."""
    with (
        tempfile.TemporaryDirectory(prefix="bulltask-demo-", ignore_cleanup_errors=True) as folder,
        EmbeddedServer(folder) as server,
    ):
        os.environ["BULLTASK_BROKER_URL"] = server.url
        yield server


class DemoWorker:
    """A ``bulltask worker`` in a process of its own, as in a second terminal; its log comes as JSON lines.

    Args:
        folder: where its ``tasks.py`` is.
        options: further ones of the command.
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
            start_new_session=True,  # Ctrl-C in the terminal is for the demo, which then stops the worker
            preexec_fn=functools.partial(die_with_parent, signal.SIGKILL, os.getpid()),  # noqa: PLW1509 - no threads yet
        )
        self.log = cast("IO[str]", self._process.stderr)

    def stop(self) -> int:
        """Stop it in good order, or kill it when that takes too long; return its exit code."""
        self._process.terminate()
        try:
            return self._process.wait(STOP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()


def _interrupt(number: int, _: FrameType | None) -> None:
    ignore_signals()
    raise Interrupted(number)
