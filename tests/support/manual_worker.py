"""Take and end jobs by hand: what a worker does, one step at a time."""

from __future__ import annotations

import json
from typing import Any

from bulltask.transport.broker import Broker
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.move import FetchOptions, FinishOptions, move_to_active, move_to_finished

__all__ = ["ManualWorker"]


class ManualWorker:
    """A worker's hand on one queue.

    Attributes:
        token: locks what it takes.
    """

    token = "manual-worker"

    def __init__(self, broker: Broker, keys: QueueKeys) -> None:
        self._broker, self.keys = broker, keys
        self._client = broker.client()
        self._claim = FetchOptions(self.token, 30_000, "manual")

    def acquire(self) -> str:
        """Take the next job; its id, ``""`` when there is none."""
        self._client.connect()
        return self._client.run(move_to_active(self.keys, self._claim, self._broker.clock.now_ms())).job_id

    def finish(self, job_id: str, value: Any = None, *, failure: str | None = None) -> None:
        """Complete a taken job with ``value``, or fail it."""
        ok = failure is None
        text = json.dumps(value) if ok else str(failure)
        ending = FinishOptions(ok, text.encode(), {"count": -1}, 1)
        self._client.run(
            move_to_finished(
                self.keys, job_id, self._claim, ending, fetch_next=False, now_ms=self._broker.clock.now_ms()
            )
        )

    def complete(self, value: Any = None) -> str:
        """Take the next job and complete it; its id."""
        job_id = self.acquire()
        self.finish(job_id, value)
        return job_id

    def fail(self, reason: str = "no") -> str:
        """Take the next job and fail it; its id."""
        job_id = self.acquire()
        self.finish(job_id, failure=reason)
        return job_id

    def close(self) -> None:
        """Close its connection."""
        self._client.close()
