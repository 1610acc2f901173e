"""A process that sends a canvas, and is killed after a number of bytes."""

from __future__ import annotations

import os
import signal
import socket
from typing import Any

import redis

from bulltask import App, group
from bulltask.registry.canvas_plan import plan_canvas

__all__ = ["CanvasSender"]


class CanvasSender:
    """Sends a canvas in a forked process: a group, then two calls that receive its results.

    Args:
        url: The server, which is emptied after each canvas.
        jobs: The number of jobs.
    """

    def __init__(self, url: str, jobs: int) -> None:
        self._url, self._jobs = url, jobs
        self._app = App("sender", url)
        members = group(self._app.signature("member", kwargs={"n": number}) for number in range(jobs - 2))
        canvas = members | self._app.signature("body") | self._app.signature("body")
        # Planned once, as delay() does first: it sends nothing, and takes longer than sending.
        self._plan = plan_canvas(canvas, self._app._config, {})
        self._redis = redis.Redis.from_url(url, decode_responses=True)

    def record(self) -> bytes:
        """Send a canvas, and return the bytes of its commands."""
        reader, writer = os.pipe()
        if os.fork() == 0:
            with os.fdopen(writer, "wb") as output:
                self._send(lambda sock, data: (output.write(data), send_all(sock, data)))
            os._exit(0)
        os.close(writer)
        with os.fdopen(reader, "rb") as source:
            recorded = source.read()
        os.wait()
        if (stored := self._stored()) != self._jobs:
            raise RuntimeError(f"a sender that is not killed stores {stored} of {self._jobs} jobs")
        return recorded

    def killed_after(self, size: int) -> int:
        """Send a canvas, kill the sender with ``SIGKILL`` after ``size`` bytes; return how many jobs are stored."""
        if os.fork() == 0:
            left = size

            def send_until_killed(sock: Any, data: Any) -> None:
                nonlocal left
                send_all(sock, bytes(data)[:left])
                left -= len(data)
                if left <= 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            self._send(send_until_killed)
            os._exit(0)
        os.wait()
        return self._stored()

    def _send(self, replacement: Any) -> None:
        """Send the canvas through ``replacement``, which takes the place of ``socket.sendall``."""
        self._app.queue("default").count()  # connect first, because the app has no connection after the fork
        socket.socket.sendall = replacement  # type: ignore[method-assign]
        self._app.flows().add_planned(self._plan.roots)

    def _stored(self) -> int:
        self._redis.ping()
        keys: Any = self._redis.keys("bull:{default}:*-*-*")
        stored: int = sum(key.count(":") == 2 for key in keys)
        self._redis.flushdb()
        return stored


send_all = socket.socket.sendall
