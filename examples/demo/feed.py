"""What can be heard of the worker from outside: BullMQ's event stream, and the worker's own log."""

from __future__ import annotations

import json
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import IO, Any

import redis

PATIENCE = 20.0  # seconds without a sound after which something is wrong


class DemoFailed(Exception):
    """Something did not happen as the demo says it does."""


@dataclass(frozen=True)
class Heard:
    """One event of the stream (``source`` is ``"event"``) or one line of the log (``"worker"``)."""

    at: float
    source: str
    what: str
    job_id: str
    fields: dict[str, Any]


class Feed:
    """Everything that was heard, and what has not been told yet.

    The stream is read with a plain Redis client: what BullMQ's clients see is the proof, not what bulltask says of
    itself.
    """

    def __init__(self) -> None:
        self.events: list[Heard] = []
        self.log: deque[str] = deque(maxlen=12)
        self._untold: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def listen(self, url: str, stream: str) -> None:
        """Read a queue's event stream from its beginning."""
        self._start(lambda: self._read_stream(url, stream))

    def read_log(self, lines: IO[str]) -> None:
        """Read the worker's log until the worker ends."""
        self._start(lambda: self._read_log(lines))

    def follow(self, job_id: str) -> Iterator[Heard]:
        """What is heard of one job, and what the worker says of itself, until the job has ended.

        Raises:
            DemoFailed: nothing was heard for a long time, or the worker has gone.
        """
        while True:
            try:
                heard = self._untold.get(timeout=PATIENCE)
            except queue.Empty:
                raise DemoFailed(f"job {job_id} did not end: nothing was heard of it for {PATIENCE:g} s") from None
            if heard.what == "gone":
                raise DemoFailed(f"the {heard.source} ended before job {job_id} did")
            if heard.job_id == job_id or (heard.source == "worker" and not heard.job_id):
                yield heard
                if heard.source == "event" and heard.what in {"completed", "failed"}:
                    return

    def close(self) -> None:
        """Stop listening."""
        self._stop.set()
        for thread in self._threads:
            thread.join(5)

    def _start(self, read: Any) -> None:
        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        self._threads.append(thread)

    def _hear(self, source: str, what: str, fields: dict[str, Any], job_id: str) -> None:
        heard = Heard(time.perf_counter(), source, what, job_id, fields)
        if source == "event":
            self.events.append(heard)
        self._untold.put(heard)

    def _read_stream(self, url: str, stream: str) -> None:
        cursor = "0"
        with redis.Redis.from_url(url, decode_responses=True) as client:
            found: Any = True
            while found or not self._stop.is_set():  # after a stop, what is still unread is read
                try:
                    found = client.xread({stream: cursor}, count=1_000, block=200)
                except redis.RedisError:
                    self._hear("server", "gone", {}, "")
                    return
                for entry_id, fields in found[0][1] if found else ():
                    cursor = entry_id
                    self._hear("event", fields["event"], fields, fields.get("jobId", ""))

    def _read_log(self, lines: IO[str]) -> None:
        for line in lines:
            self.log.append(line.rstrip())
            try:
                fields = json.loads(line)
                self._hear("worker", fields["event"], fields, fields.get("job_id", ""))
            except (ValueError, KeyError, TypeError):
                continue  # not a line of the log: Python says something; it is kept for the case of a failure
        self._hear("worker", "gone", {}, "")
