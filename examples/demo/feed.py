"""Read BullMQ's event stream and the worker's log."""

from __future__ import annotations

# redis-py imports this for its first connection. If Ctrl-C interrupted the import, other threads could not connect.
import email.parser  # noqa: F401
import json
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import redis

TIMEOUT_S = 20.0  # the demo fails if there is no new entry for this long


class DemoFailed(Exception):
    """A step had an unexpected result."""


@dataclass(frozen=True)
class Entry:
    """An event from the stream (``source`` is ``"event"``) or a line from the log (``"worker"``)."""

    at: float
    source: str
    name: str
    job_id: str
    fields: dict[str, Any]


class Feed:
    """The entries of the event stream and the log.

    The stream is read with a plain Redis client, so that the demo checks the data in Redis and not only bulltask's API.
    """

    def __init__(self) -> None:
        self.events: list[Entry] = []
        self.log: deque[str] = deque(maxlen=12)
        self._pending: queue.SimpleQueue[Entry] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def listen(self, url: str, stream: str) -> None:
        """Read a queue's event stream from its beginning."""
        self._start(lambda: self._read_stream(url, stream))

    def read_log(self, lines: IO[str]) -> None:
        """Read the worker's log until the worker exits."""
        self._start(lambda: self._read_log(lines))

    def follow(self, job_id: str) -> Iterator[Entry]:
        """Yield the entries of one job, and log lines without a job, until the job has finished.

        Raises:
            DemoFailed: There was no entry for :data:`TIMEOUT_S`, or the worker exited.
        """
        while True:
            try:
                entry = self._pending.get(timeout=TIMEOUT_S)
            except queue.Empty:
                raise DemoFailed(f"job {job_id} did not finish: no event for {TIMEOUT_S:g} s") from None
            if entry.name == "closed":
                raise DemoFailed(f"the {entry.source} exited before job {job_id} finished")
            if entry.job_id == job_id or (entry.source == "worker" and not entry.job_id):
                yield entry
                if entry.source == "event" and entry.name in {"completed", "failed"}:
                    return

    def close(self) -> None:
        """Stop reading."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5)

    def _start(self, read: Any) -> None:
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _add(self, source: str, name: str, fields: dict[str, Any], job_id: str) -> None:
        entry = Entry(time.perf_counter(), source, name, job_id, fields)
        if source == "event":
            self.events.append(entry)
        self._pending.put(entry)

    def _read_stream(self, url: str, stream: str) -> None:
        cursor = "0"
        with redis.Redis.from_url(url, decode_responses=True) as client:
            streams: Any = True
            while streams or not self._stop.is_set():  # reads the remaining entries after close()
                try:
                    streams = client.xread({stream: cursor}, count=1_000, block=200)
                except redis.RedisError:
                    self._add("server", "closed", {}, "")
                    return
                for entry_id, fields in streams[0][1] if streams else ():
                    cursor = entry_id
                    self._add("event", fields["event"], fields, fields.get("jobId", ""))

    def _read_log(self, lines: IO[str]) -> None:
        for line in lines:
            self.log.append(line.rstrip())
            try:
                fields = json.loads(line)
                self._add("worker", fields["event"], fields, fields.get("job_id", ""))
            except (ValueError, KeyError, TypeError):
                continue  # not a JSON line, but Python's own output; kept in self.log for the error message
        self._add("worker", "closed", {}, "")
