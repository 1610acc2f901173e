"""Slots whose token may lock a job that the child does not know, because a reply was lost."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from bulltask.errors import BrokerError, JobError
from bulltask.transport.client_types import SyncClient
from bulltask.transport.scripts.move import find_by_token, move_from_active_to_wait
from bulltask.worker.broker_backoff import QueueBackoff
from bulltask.worker.child.round_robin import RoundRobin
from bulltask.worker.slot import Slot

__all__ = ["UncertainSlots"]


class UncertainSlots:
    """The slots whose token may lock an unknown job, and the queues that may have the job.

    Args:
        client: Finds and releases the jobs.
        round_robin: The queues.
        skip_queue: Records an error of a queue, given by its index, and does not poll it for a while.
    """

    def __init__(
        self, client: SyncClient, round_robin: RoundRobin, skip_queue: Callable[[int, BrokerError], None]
    ) -> None:
        self._client, self._round_robin, self._skip_queue = client, round_robin, skip_queue
        self._queues: dict[Slot, set[int]] = {}

    def __bool__(self) -> bool:
        return bool(self._queues)

    def __contains__(self, slot: Slot) -> bool:
        return slot in self._queues

    def may_lock(self, slot: Slot, index: int) -> bool:
        """Whether the slot's token may lock a job of queue ``index``."""
        return index in self._queues.get(slot, ())

    def add(self, slot: Slot, index: int | None = None) -> None:
        """Record that the slot's token may lock a job.

        Args:
            slot: The slot.
            index: The queue that may have the job; ``None`` if any of them may have it.
        """
        queues = range(len(self._round_robin.queues)) if index is None else (index,)
        self._queues.setdefault(slot, set()).update(queues)

    def release_jobs(self) -> None:
        """Release the jobs. Queues that are unavailable at the moment are searched the next time.

        Raises:
            BrokerError: Redis is unavailable.
        """
        for index in range(len(self._round_robin.queues) if self._queues else 0):
            slots = [slot for slot, queues in self._queues.items() if index in queues]
            if slots and not self._round_robin.is_skipped(index) and self._release_jobs_of(index, slots):
                for slot in slots:
                    self._queues[slot].discard(index)
        self._queues = {slot: queues for slot, queues in self._queues.items() if queues}

    def _release_jobs_of(self, index: int, slots: list[Slot]) -> bool:
        """Release the jobs of one queue; return False if its node of a cluster is unavailable."""
        keys = self._round_robin.queues[index]
        try:
            for token, job_id in self._client.run(find_by_token(keys, [slot.token for slot in slots])):
                with suppress(JobError):  # the job has since been settled, or acquired by another worker
                    self._client.run(move_from_active_to_wait(keys, job_id, token))
        except BrokerError as exc:
            if not QueueBackoff.affects_queue(exc):
                raise
            self._skip_queue(index, exc)
            return exc.node is None  # the stalled check recovers the jobs of a broken queue
        return True
