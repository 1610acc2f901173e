"""Ends jobs that are marked as revoked."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from bulltask.errors import BrokerError, BulltaskError, JobError
from bulltask.events import Bus, JobRevoked
from bulltask.jobs.states import Revocation
from bulltask.transport.broker import Broker
from bulltask.transport.call import command
from bulltask.transport.client import Client
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.job import RevocationMarks, open_marks
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff

__all__ = ["Revocations"]

_MAX_PER_TICK: Final = 100
"""How many jobs without a worker are ended in one tick, at two round trips each."""


class Revocations:
    """Ends jobs that are marked as revoked (docs/adr/0025-revoked-jobs.md).

    Runs in this worker are cancelled. A job that no worker runs is ended by the first worker that sees it: its worker
    died, its attempt failed and a retry would follow, or a client marked a job that never ran. A job that another
    worker runs is left to that worker.

    While Redis is unavailable nothing is checked. The marks are stored in Redis, so none is missed.

    Args:
        broker: Clock and settings.
        queues: The worker's queues, in the order of the slots' queue index.
        cancel_jobs: Cancels the runs of these jobs of a queue, by index; returns the ids of those in this worker.
        client: The supervisor's client.
        bus: Receives an event for every job that is ended here.
        backoff: The supervisor's backoff.
    """

    interval_ms = 1_000

    def __init__(
        self,
        broker: Broker,
        queues: Sequence[QueueKeys],
        cancel_jobs: Callable[[int, Collection[str]], Collection[str]],
        client: Client,
        bus: Bus,
        backoff: ReconnectBackoff,
    ) -> None:
        self._broker, self._queues, self._cancel_jobs = broker, queues, cancel_jobs
        self._client, self._bus, self._backoff = client, bus, backoff
        self._queue_backoff = QueueBackoff(queues, bus, broker.config)
        self._skipped = [0] * len(queues)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check the marks of every queue, in one round trip; a large number of marks is checked in several ticks."""
        if self._backoff.is_active:
            return  # other services try already, and each call may take its whole timeout
        now_ms = self._broker.clock.now_ms()
        try:
            calls = [
                open_marks(keys, now_ms, skipped) for keys, skipped in zip(self._queues, self._skipped, strict=True)
            ]
            answers = self._client.try_many(calls)
            for index, marks in enumerate(answers):
                with self._queue_backoff.recording(index):
                    self._handle_marks(index, marks)
                    self._queue_backoff.reset(index)
        except BrokerError as exc:
            self._backoff.record_failure(exc)

    def _handle_marks(self, index: int, marks: RevocationMarks | BulltaskError | None) -> None:
        if isinstance(marks, BulltaskError):
            raise marks
        self._skipped[index] = 0 if marks is None else marks.following
        if marks is None:
            return
        # Jobs without a lock may still be ours, if the lock ran out while Redis was unavailable.
        ours = self._cancel_jobs(index, {*marks.held, *marks.free})
        for job_id in [job_id for job_id in marks.free if job_id not in ours][:_MAX_PER_TICK]:
            self._revoke(self._queues[index], job_id)

    def _revoke(self, keys: QueueKeys, job_id: str) -> None:
        try:
            found = run_sync(self._client, self._broker.revocation(keys.queue, job_id, terminate=True))
        except JobError:  # the next iteration of a job scheduler, which cannot be revoked; another client has marked it
            self._client.run(command("ZREM", keys.revoked, job_id))
        else:
            if found is Revocation.REVOKED:
                self._bus.emit(JobRevoked(job_id, keys.queue))
