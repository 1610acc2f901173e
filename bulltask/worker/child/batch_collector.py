"""Collects the jobs of a batch: after the first one, further jobs of the same task from the same queue."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Final

from bulltask.clock import ServerClock, mono_ms
from bulltask.errors import BrokerError, JobError
from bulltask.transport.replies import Fetched
from bulltask.transport.scripts.move import move_from_active_to_wait
from bulltask.worker.child.async_loop import AsyncLoop
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.outcomes import AcquiredJob
from bulltask.worker.control_page import ControlPage
from bulltask.worker.slot import Slot

__all__ = ["BatchCollector"]

_MAX_PER_CALL: Final = 50
"""Maximum number of jobs that one call acquires, because Redis runs nothing else during the call."""
_POLL_MS: Final = 10
"""Interval at which a child checks for a free slot while its other jobs use all slots."""
_FOREVER_MS: Final = 2**52


class BatchCollector:
    """Collects the jobs of a batch.

    Collecting ends when the batch is full, when its time is up, or when the next job in the queue belongs to another
    task, so no job waits for a batch of another task. While collecting, the child acquires no other jobs.

    Args:
        fetcher: Acquires the jobs.
        control: The control page, which counts the permits of a worker with ``--max-jobs``.
        clock: The server's time.
        slots: Manages the child's slots.
        batches: For each batch task, the maximum number of jobs, and how many milliseconds to wait for further jobs.

    Attributes:
        batches: As given.
    """

    def __init__(
        self,
        fetcher: JobFetcher,
        control: ControlPage,
        clock: ServerClock,
        slots: AsyncLoop,
        batches: Mapping[str, tuple[int, int]],
    ) -> None:
        self._fetcher, self._control, self._clock = fetcher, control, clock
        self._slots, self.batches = slots, batches

    def collect(self, first: AcquiredJob) -> list[AcquiredJob]:
        """Return a batch: ``first``, which the child has already acquired, and further jobs of its task."""
        size, wait_ms = self.batches[first.job.name]
        batch, limit = [first], min(size, first.max_concurrent or size)
        end_ms, has_marker = mono_ms() + wait_ms, False
        with suppress(BrokerError):  # the batch runs as it is; the next fetch handles the error
            while len(batch) < limit and self._fetcher.may_collect:
                before = len(batch)
                limit, pause_ms = self._fetch(batch, limit)
                has_marker &= len(batch) == before  # acquiring a job adds the marker again
                left_ms = end_ms - mono_ms()
                if pause_ms == 0:
                    continue
                if pause_ms < 0 or left_ms <= 0 or len(batch) >= limit:
                    break
                has_marker |= self._fetcher.wait_for_queue(first.queue_index, min(pause_ms, left_ms))
        if has_marker:  # another worker may need it while this child runs the batch
            self._fetcher.restore_markers()
        return batch

    def _fetch(self, batch: list[AcquiredJob], limit: int) -> tuple[int, int]:
        """Add the jobs that are waiting.

        Returns:
            The batch's maximum number of jobs, which a job in crash quarantine lowers; and the maximum time in
            milliseconds until there are more jobs: 0 if there may be more now, -1 if no more can be added.
        """
        first = batch[0]
        slots = self._take_slots(min(limit - len(batch), _MAX_PER_CALL))
        if not slots:
            return limit, _POLL_MS
        replies = self._collect(first, slots)
        has_released = False
        for slot, fetched in zip(slots, replies, strict=False):
            acquired = self._fetcher.acquired(first.queue_index, slot, fetched)
            if acquired is None:
                self._return_slot(slot)
            elif self._fits(acquired, batch, limit):
                limit = min(limit, acquired.max_concurrent or limit)
                batch.append(acquired)
                self._settle_permit(used=True)
            else:
                self._release(acquired)
                has_released = True
        for slot in slots[len(replies) :]:
            self._return_slot(slot)
        return limit, -1 if has_released else self._pause_ms(replies, len(slots))

    @staticmethod
    def _fits(acquired: AcquiredJob, batch: Sequence[AcquiredJob], limit: int) -> bool:
        return acquired.job.name == batch[0].job.name and len(batch) < min(limit, acquired.max_concurrent or limit)

    def _collect(self, first: AcquiredJob, slots: Sequence[Slot]) -> list[Fetched]:
        try:
            return self._fetcher.fetch_many(first.queue_index, slots, first.job.name)
        except BrokerError:
            for slot in slots:
                self._return_slot(slot)
            raise

    def _pause_ms(self, replies: Sequence[Fetched], wanted: int) -> int:
        if not replies or (replies[-1].job_id and len(replies) < wanted):
            return -1  # the next job belongs to another task
        last = replies[-1]
        if last.job_id:
            return 0
        if last.limited_ms:
            return -1  # the queue is rate-limited
        return max(1, last.due_ms - self._clock.now_ms()) if last.due_ms else _FOREVER_MS

    def _take_slots(self, count: int) -> list[Slot]:
        slots: list[Slot] = []
        while len(slots) < count and (not self._control.has_permits or self._control.take_permit()):
            slot = self._slots.take_slot()
            if slot is None:
                self._settle_permit(used=False)
                break
            slot.reserve(mono_ms())
            slots.append(slot)
        return slots

    def _release(self, acquired: AcquiredJob) -> None:
        try:
            with suppress(JobError):
                self._fetcher.client.run(move_from_active_to_wait(acquired.keys, acquired.job.id, acquired.slot.token))
        except BrokerError as exc:
            self._fetcher.record_failed_release(exc, acquired.slot, acquired.queue_index)
        self._return_slot(acquired.slot)

    def _return_slot(self, slot: Slot) -> None:
        self._settle_permit(used=False)
        self._fetcher.free_slot(slot)
        self._slots.return_slot(slot)

    def _settle_permit(self, *, used: bool) -> None:
        if self._control.has_permits:
            self._control.settle_permit(used=used)
