"""A producer and worker that moves jobs as fast as Redis allows, with BullMQ's scripts for many jobs per round trip."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final, Self

from bulltask.jobs.job import JobOptions, NewJob
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, FetchedJob, QueueKeys
from bulltask.transport.scripts.add import add_job
from bulltask.transport.scripts.move import FetchOptions, FinishOptions, move_to_active, move_to_finished

__all__ = ["LoadGenerator"]

_KINDS: Final = (JobOptions(), JobOptions(), JobOptions(priority=3), JobOptions(delay_ms=20))
_COMPLETES: Final = FinishOptions(True, b"1", {"count": -1}, 1)
_FAILS: Final = FinishOptions(False, b"no", {"count": -1}, 1)


class LoadGenerator:
    """Acquires and finishes a queue's jobs, and adds as many new ones, in a separate thread.

    Use it in a ``with`` block. The added jobs are waiting, prioritized or delayed, and every fifth job fails. Ids are
    appended to both lists after Redis has replied.

    Args:
        broker: The broker.
        keys: The keys of the queue.
        concurrency: The number of active jobs, and of jobs per round trip.

    Attributes:
        added: The ids of all added jobs.
        finished: The ids of all completed or failed jobs.
    """

    def __init__(self, broker: Broker, keys: QueueKeys, concurrency: int = 50) -> None:
        self._broker, self._keys, self._concurrency = broker, keys, concurrency
        self._options = FetchOptions("load", 30_000, "load")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._move)
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self.added: list[str] = []
        self.finished: list[str] = []

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        if self._failure is not None:
            raise self._failure

    def wait_for(self, count: int) -> None:
        """Wait until ``count`` jobs have finished."""
        with self._changed:
            reached = self._changed.wait_for(lambda: len(self.finished) >= count or self._failure is not None, 60)
        assert self._failure is None, self._failure
        assert reached, f"only {len(self.finished)} of {count} jobs finished"

    def _move(self) -> None:
        client = self._broker.client()
        try:
            client.connect()
            active_ids = list[str]()
            while not self._stop.is_set():
                calls = self._calls(active_ids)
                replies: list[Any] = client.run_many(calls)
                with self._changed:
                    self.finished += active_ids
                    self.added += replies[len(calls) - self._concurrency :]
                    self._changed.notify_all()
                fetched = replies[: len(calls) - self._concurrency]
                active_ids = [reply.job_id for reply in fetched if isinstance(reply, FetchedJob)]
        except BaseException as exc:  # noqa: BLE001 - raised again in the test's thread
            with self._changed:
                self._failure = exc
                self._changed.notify_all()
        finally:
            client.close()

    def _calls(self, active_ids: Sequence[str]) -> list[Call[Any]]:
        """Finish the active jobs, acquire the next ones, and add as many new ones."""
        keys, now_ms, first = self._keys, self._broker.clock.now_ms(), len(self.added)
        calls: list[Call[Any]] = [
            move_to_finished(
                keys,
                job_id,
                self._options,
                _FAILS if number % 5 == 0 else _COMPLETES,
                fetch_next=True,
                now_ms=now_ms,
            )
            for number, job_id in enumerate(active_ids)
        ]
        calls += [move_to_active(keys, self._options, now_ms) for _ in range(self._concurrency - len(active_ids))]
        for number in range(first, first + self._concurrency):
            job = NewJob(keys.queue, f"m{number}", "send", b"{}", _KINDS[number % len(_KINDS)])
            calls.append(add_job(keys, job, now_ms))
        return calls
