"""A worker without a loop: tests acquire and finish jobs one step at a time."""

from __future__ import annotations

import json
from typing import Any

from bulltask.transport.broker import Broker
from bulltask.transport.call import FetchedJob, QueueKeys
from bulltask.transport.scripts.move import FetchOptions, FinishOptions, move_to_active, move_to_finished

__all__ = ["ManualWorker"]


class ManualWorker:
    """Acquires and finishes one queue's jobs when its methods are called.

    Attributes:
        token: The token of the worker's locks.
        keys: The keys of the queue.
    """

    token = "manual-worker"

    def __init__(self, broker: Broker, keys: QueueKeys) -> None:
        self._broker, self.keys = broker, keys
        self._client = broker.client()
        self._options = FetchOptions(self.token, 30_000, "manual")

    def acquire(self) -> str:
        """Acquire the next job; return its id, or ``""`` if there is none."""
        self._client.connect()
        fetched = self._client.run(move_to_active(self.keys, self._options, self._broker.clock.now_ms()))
        return fetched.job_id if isinstance(fetched, FetchedJob) else ""

    def finish(self, job_id: str, value: Any = None, *, failure: str | None = None) -> None:
        """Complete an acquired job with ``value``, or fail it."""
        ok = failure is None
        text = json.dumps(value) if ok else str(failure)
        ending = FinishOptions(ok, text.encode(), {"count": -1}, 1)
        self._client.run(
            move_to_finished(
                self.keys, job_id, self._options, ending, fetch_next=False, now_ms=self._broker.clock.now_ms()
            )
        )

    def complete(self, value: Any = None) -> str:
        """Acquire the next job and complete it; return its id."""
        job_id = self.acquire()
        self.finish(job_id, value)
        return job_id

    def fail(self, reason: str = "no") -> str:
        """Acquire the next job and fail it; return its id."""
        job_id = self.acquire()
        self.finish(job_id, failure=reason)
        return job_id

    def close(self) -> None:
        """Close the connection."""
        self._client.close()
