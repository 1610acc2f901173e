"""The journal in which the tasks record their attempts, on a server without faults."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Any

import redis

__all__ = ["Journal", "now_ms"]


def now_ms() -> int:
    """Return this machine's time, which the entries of the journal use."""
    return int(time.time() * 1000)


class Journal:
    """Reads the starts of jobs in a thread.

    Args:
        url: The URL of the journal's server.

    Attributes:
        starts: The start times of a job's attempts in epoch milliseconds, by the job's id.
    """

    def __init__(self, url: str) -> None:
        self.starts: dict[str, list[int]] = defaultdict(list)
        self._by_queue: dict[str, list[int]] = defaultdict(list)
        self._changed, self._stopped = threading.Condition(), False
        self._client = redis.Redis.from_url(url, decode_responses=True, socket_timeout=None)
        self._thread = threading.Thread(target=self._follow, name="journal", daemon=True)
        self._thread.start()

    def wait_for_start(self, job_id: str, timeout: float) -> int | None:
        """Return when the job's first attempt started, or ``None`` after ``timeout`` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self.starts.get(job_id), timeout)
            return self.starts[job_id][0] if self.starts.get(job_id) else None

    def first_start(self, queue: str, since_ms: int, timeout: float) -> int | None:
        """Return when the first attempt since ``since_ms`` in a queue began, or ``None`` after ``timeout`` seconds."""

        def later() -> list[int]:
            return [at_ms for at_ms in self._by_queue[queue][-2_000:] if at_ms >= since_ms]

        with self._changed:
            self._changed.wait_for(later, timeout)
            return min(later(), default=None)

    def attempts(self, job_id: str) -> int:
        """Return the number of attempts of a job so far."""
        return len(self.starts.get(job_id, ()))

    def close(self) -> None:
        """Stop reading."""
        self._stopped = True
        self._thread.join()
        self._client.close()

    def _follow(self) -> None:
        last = "0-0"
        while not self._stopped:
            reply: Any = self._client.xread({"journal": last}, block=500)
            for _, entries in reply or ():
                with self._changed:
                    for entry_id, fields in entries:
                        last = entry_id
                        at_ms = int(entry_id.partition("-")[0])
                        self.starts[fields["job"]].append(at_ms)
                        self._by_queue[fields["queue"]].append(at_ms)
                    self._changed.notify_all()
