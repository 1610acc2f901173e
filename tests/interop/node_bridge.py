"""Drive the official Node client of BullMQ from Python through JSON lines to one Node process (node/bridge.js)."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import tempfile
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self
from urllib.parse import unquote, urlsplit

__all__ = ["NodeBridge", "NodeError"]

SCRIPT = Path(__file__).parent / "node" / "bridge.js"
END_MS = 3_000  # node/bridge.js takes 2 s at most


class NodeError(Exception):
    """The official client threw, or the Node process has exited; the message is the client's."""


class NodeBridge:
    """A long-lived Node process with the official client.

    ::

        with NodeBridge.to("redis://127.0.0.1:6379/0") as node:
            node.call("worker.start", queue="mail", processor="echo")
            job = node.call("queue.add", queue="mail", name="send", data={"to": "x"})
            node.call("job.waitUntilFinished", queue="mail", job=job["id"])

    Operations and their fields are those of ``node/operations.js``.

    Args:
        connection: The default ``connection`` of every call: ``host``, ``port``, ``db``, ``password``.
        prefix: The default prefix of all keys.
        package: The client's package in package.json, where each version has a name.
    """

    client = "Node"

    def __init__(
        self, connection: Mapping[str, Any] | None = None, *, prefix: str = "bull", package: str = "bullmq"
    ) -> None:
        self._defaults: dict[str, Any] = {"connection": dict(connection or {}), "prefix": prefix}
        self._ids = itertools.count(1)
        self._replies: dict[int, dict[str, Any]] = {}
        self._events: list[dict[str, Any]] = []
        self._exited = False
        self._changed = threading.Condition()
        # Not a pipe: it is not read, and Node would block when it is full.
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 (closed by close())
        self._process = subprocess.Popen(
            self._command(package), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors
        )
        self._reader = threading.Thread(target=self._read, name="node-bridge", daemon=True)
        self._reader.start()

    def _command(self, package: str) -> list[str]:
        """Return the command; the client in another language (official/bridge.py) is another program."""
        return ["node", str(SCRIPT), package]

    @classmethod
    def to(cls, url: str, *, prefix: str = "bull", package: str = "bullmq") -> Self:
        """Start a bridge to the server of a ``redis://`` URL."""
        return cls(connection_of(url), prefix=prefix, package=package)

    @property
    def pid(self) -> int:
        """Process id of the client."""
        return self._process.pid

    def call(self, op: str, *, timeout: float = 60.0, **fields: Any) -> Any:
        """Run one operation and return its value.

        Args:
            op: ``"queue.add"``, ``"worker.start"`` …
            timeout: Seconds to wait for the reply.
            **fields: The operation's arguments, by their names in ``node/operations.js``.

        Raises:
            NodeError: The operation threw, or Node has exited.
            TimeoutError: No reply came in time.
        """
        number = next(self._ids)
        line = json.dumps({"id": number, "op": op, **self._defaults, **fields}).encode() + b"\n"
        assert self._process.stdin is not None
        try:
            with self._changed:  # lines of two threads must not mix
                self._process.stdin.write(line)
                self._process.stdin.flush()
        except (OSError, ValueError) as exc:
            raise NodeError(f"{op}: {self.client} has exited{self._stderr()}") from exc
        reply = self._wait(lambda: self._replies.pop(number, None), timeout, f"a reply to {op}")
        if "error" in reply:
            raise NodeError(reply["error"])
        return reply["ok"]

    def wait_event(
        self, name: str, predicate: Callable[[dict[str, Any]], bool] = lambda args: True, timeout: float = 60.0
    ) -> dict[str, Any]:
        """Return the ``args`` of the first matching event, including past events.

        Args:
            name: ``"completed"``, ``"progress"``, ``"worker.error"`` …
            predicate: Whether an event with these ``args`` matches.
            timeout: Seconds.

        Raises:
            NodeError: Node has exited.
            TimeoutError: No such event came in time; the message lists the events that did.
        """

        def find() -> dict[str, Any] | None:
            return next((event for event in self._events if event["event"] == name and predicate(event["args"])), None)

        args: dict[str, Any] = self._wait(find, timeout, f"the event {name!r}")["args"]
        return args

    def events(self, name: str | None = None) -> list[dict[str, Any]]:
        """Return all events so far (``event``, ``args``, ``queue``, ``stream``), or those of one name, in order."""
        with self._changed:
            return [event for event in self._events if name in (None, event["event"])]

    def reset(self) -> None:
        """Close every queue, worker and listener, and forget all events."""
        self.call("reset")
        with self._changed:
            self._events.clear()

    def close(self) -> None:
        """End Node in any state. A second call does nothing."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()  # it exits at the end of its input
        try:
            self._process.wait(END_MS / 1000)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._reader.join()
        self._errors.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        with self._process.stdout as lines:
            for line in lines:
                message = json.loads(line)
                with self._changed:
                    if "event" in message:
                        self._events.append(message)
                    else:
                        self._replies[message["id"]] = message
                    self._changed.notify_all()
        with self._changed:
            self._exited = True
            self._changed.notify_all()

    def _wait(self, find: Callable[[], dict[str, Any] | None], timeout: float, what: str) -> dict[str, Any]:
        message: dict[str, Any] | None = None

        def check() -> bool:
            nonlocal message
            message = find()
            return message is not None or self._exited

        with self._changed:
            self._changed.wait_for(check, timeout)
            seen = [event["event"] for event in self._events[-20:]]
        if message is not None:
            return message
        if self._exited:
            raise NodeError(f"{self.client} exited before {what} came{self._stderr()}")
        raise TimeoutError(f"{what} did not come within {timeout:g} s; last events: {seen}{self._stderr()}")

    def _stderr(self) -> str:
        if self._errors.closed:
            return ""
        # Not read(): it would move the position, which Node shares and writes at.
        text = os.pread(self._errors.fileno(), 100_000, 0).decode(errors="replace").strip()
        return f"\n{text[-2_000:]}" if text else ""


def connection_of(url: str) -> dict[str, Any]:
    """Return a ``redis://`` URL as the connection options of ioredis."""
    parts = urlsplit(url)
    connection = {
        "host": parts.hostname or "127.0.0.1",
        "port": parts.port or 6379,
        "db": int(parts.path.strip("/") or 0),
        "username": unquote(parts.username or ""),
        "password": unquote(parts.password or ""),
    }
    return {name: value for name, value in connection.items() if value != ""}
