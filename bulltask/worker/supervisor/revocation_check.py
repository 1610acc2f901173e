"""Ends jobs that have a revocation request in Redis."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Final

from bulltask.errors import BrokerError, BulltaskError, JobError
from bulltask.events import Bus, JobRevoked
from bulltask.jobs.states import Revocation
from bulltask.transport.broker import Broker
from bulltask.transport.call import command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.cluster_slots import slot_of_key
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.job import RevocationRequests, revocation_requests
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff

__all__ = ["RevocationCheck"]

_MAX_PER_TICK: Final = 100
"""Maximum number of jobs without a worker that one tick fails, with two round trips each."""
_MAX_GROUP: Final = 500
_MAX_GROUPS: Final = 100
"""Maximum number of commands with which one tick looks for requests."""


class RevocationCheck:
    """Ends jobs that have a revocation request in Redis (docs/adr/0025-revoked-jobs.md).

    Attempts in this worker are cancelled. The first worker that reads the request fails a job that is not running:
    the job's worker died, its attempt failed and would be retried, or it has never run. A job that another worker is
    running is left to that worker.

    While Redis is unavailable, nothing is checked. The requests are stored in Redis, so no request is lost.

    Args:
        broker: Clock and settings.
        queues: The worker's queues, in the order of the slots' queue index.
        cancel_jobs: Cancels the attempts of jobs, given the index of their queue and their ids; returns the ids of
            those that this worker is running.
        client: The supervisor's client.
        bus: Receives an event for every job that this service fails.
        backoff: The supervisor's backoff.
    """

    interval_ms = 1_000

    def __init__(
        self,
        broker: Broker,
        queues: Sequence[QueueKeys],
        cancel_jobs: Callable[[int, Collection[str]], Collection[str]],
        client: SyncClient,
        bus: Bus,
        backoff: ReconnectBackoff,
    ) -> None:
        self._broker, self._queues, self._cancel_jobs = broker, queues, cancel_jobs
        self._client, self._bus, self._backoff = client, bus, backoff
        self._queue_backoff = QueueBackoff(queues, bus, broker.config)
        self._skipped = [0] * len(queues)
        self._groups, self._next_group = _groups(queues, in_cluster=broker.topology is not None), 0

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Check the requests of every queue in one round trip; a large number is checked in several ticks."""
        if self._backoff.is_active:
            return  # other services are trying to reconnect, and each call may take its whole timeout
        now_ms = self._broker.clock.now_ms()
        try:
            indexes = self._with_requests()
            calls = [revocation_requests(self._queues[index], now_ms, self._skipped[index]) for index in indexes]
            for index, requests in zip(indexes, self._client.try_many(calls) if calls else (), strict=True):
                with self._queue_backoff.recording(index):
                    self._handle_requests(index, requests)
                    self._queue_backoff.reset(index)
        except BrokerError as exc:
            self._backoff.record_failure(exc)

    def _with_requests(self) -> Sequence[int]:
        """Return the indexes of the queues that may have requests; one command checks up to 500 queues."""
        if len(self._queues) == 1:
            return (0,)
        groups = self._groups[self._next_group :][:_MAX_GROUPS]
        self._next_group = (self._next_group + len(groups)) % len(self._groups)
        replies = self._client.try_many(
            [command("EXISTS", *(self._queues[index].revoked for index in group)) for group in groups]
        )
        found: list[int] = []
        for group, count in zip(groups, replies, strict=True):
            if count == 0:
                for index in group:
                    self._skipped[index] = 0
                    self._queue_backoff.reset(index)
            else:  # after an error reply, too, which may affect only one of the queues
                found += group
        return found

    def _handle_requests(self, index: int, requests: RevocationRequests | BulltaskError | None) -> None:
        if isinstance(requests, BulltaskError):
            raise requests
        self._skipped[index] = 0 if requests is None else requests.next_skipped
        if requests is None:
            return
        # This worker may run jobs without a lock, if the lock expired while Redis was unavailable.
        cancelled = self._cancel_jobs(index, {*requests.locked, *requests.unlocked})
        for job_id in [job_id for job_id in requests.unlocked if job_id not in cancelled][:_MAX_PER_TICK]:
            self._revoke(self._queues[index], job_id)

    def _revoke(self, keys: QueueKeys, job_id: str) -> None:
        try:
            revocation = run_sync(self._client, self._broker.revocation(keys.queue, job_id, terminate=True))
        except JobError:  # another client tried to revoke the next job of a job scheduler, which is impossible
            self._client.run(command("ZREM", keys.revoked, job_id))
        else:
            if revocation is Revocation.REVOKED:
                self._bus.emit(JobRevoked(job_id, keys.queue))


def _groups(queues: Sequence[QueueKeys], *, in_cluster: bool) -> list[list[int]]:
    """Return the indexes of the queues in groups whose keys one command can name."""
    by_slot: dict[int, list[int]] = {}
    for index, keys in enumerate(queues):
        by_slot.setdefault(slot_of_key(keys.base) if in_cluster else 0, []).append(index)
    return [slot[start : start + _MAX_GROUP] for slot in by_slot.values() for start in range(0, len(slot), _MAX_GROUP)]
