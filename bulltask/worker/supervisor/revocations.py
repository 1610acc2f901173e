"""Jobs that somebody wants ended although they run."""

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

_AT_ONCE: Final = 100
"""So many jobs that nobody holds are ended in one tick, at two round trips each."""


class Revocations:
    """Responsible for ending jobs that are marked as revoked (ADR 25).

    Runs of this worker's are interrupted. A job that nobody runs any more is ended here, by whichever worker comes
    first: its worker died, its attempt failed and another one would follow, or somebody marked a job that never ran. A
    job that another worker runs is that one's.

    While Redis is away nothing is asked. The marks stand in Redis, so none is missed.

    Args:
        broker: clock and settings.
        queues: the worker's queues, in the order of the slots' queue index.
        cancel_jobs: has the runs of some jobs of a queue ended, by its index; returns which of them this worker has.
        client: the supervisor's.
        bus: hears of every job that is ended here.
        backoff: the supervisor's view of an outage.
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
        """Look at the marks of every queue, in one round trip; where there are very many, at some after the others."""
        if self._backoff.is_active:
            return  # others ask already, and each call might take its whole time-out
        now_ms = self._broker.clock.now_ms()
        try:
            calls = [
                open_marks(keys, now_ms, skipped) for keys, skipped in zip(self._queues, self._skipped, strict=True)
            ]
            answers = self._client.try_many(calls)
            for index, marks in enumerate(answers):
                with self._queue_backoff.recording(index):
                    self._heed(index, marks)
                    self._queue_backoff.reset(index)
        except BrokerError as exc:
            self._backoff.record_failure(exc)

    def _heed(self, index: int, marks: RevocationMarks | BulltaskError | None) -> None:
        if isinstance(marks, BulltaskError):
            raise marks
        self._skipped[index] = 0 if marks is None else marks.following
        if marks is None:
            return
        # A lock of ours may have run out while Redis was away: it is ours all the same.
        ours = self._cancel_jobs(index, {*marks.held, *marks.free})
        for job_id in [job_id for job_id in marks.free if job_id not in ours][:_AT_ONCE]:
            self._end(self._queues[index], job_id)

    def _end(self, keys: QueueKeys, job_id: str) -> None:
        try:
            found = run_sync(self._client, self._broker.revocation(keys.queue, job_id, terminate=True))
        except JobError:  # the next job of a job scheduler, which only another client can have marked
            self._client.run(command("ZREM", keys.revoked, job_id))
        else:
            if found is Revocation.REVOKED:
                self._bus.emit(JobRevoked(job_id, keys.queue))
