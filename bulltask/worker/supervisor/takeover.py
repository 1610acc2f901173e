"""Takes jobs over from a child whose current job takes too long (docs/adr/0038-prefetching-short-jobs.md)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched, parse_fetched
from bulltask.transport.scripts.move import find_by_token, release_unstarted
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.control_page import ControlPage
from bulltask.worker.slot import Slot
from bulltask.worker.slots import LONG_MS, ChildBlock
from bulltask.worker.states import SlotState

__all__ = ["Takeover", "next_job"]

_INTERVAL_MS: Final = 20
_IDLE_INTERVAL_MS: Final = 100
_LINGER_MS: Final = 2_000
"""How long the supervisor keeps watching after the last child has stopped prefetching."""

_WAITING: Final = {SlotState.PREFETCHED, SlotState.ENDED}


def next_job(reply: Any) -> Fetched | BrokerError | None:
    """Return the job that the call of a stored outcome has fetched, an error, or ``None`` for an error code."""
    if isinstance(reply, BrokerError):
        return reply
    try:
        return None if isinstance(reply, int) and reply < 0 else parse_fetched(reply)
    except (TypeError, ValueError) as exc:
        return BrokerUnavailableError(f"Redis sent a reply that does not belong to the call: {exc}")


class Takeover:
    """Releases the jobs that a child has prefetched, and writes its outcomes, while a job keeps the child busy.

    It runs in the supervisor, so it also works while the job holds the GIL. Children prefetch only while this service
    watches them, which it does while their jobs are short.

    Args:
        children: Returns the block and the slots of each child.
        control: The control page, in which the children read that they are watched.
        queues, client, backoff: As in :class:`~bulltask.worker.supervisor.heartbeat.Heartbeat`.
    """

    def __init__(
        self,
        children: Callable[[], Iterable[tuple[ChildBlock, Sequence[Slot]]]],
        control: ControlPage,
        queues: Sequence[QueueKeys],
        client: SyncClient,
        backoff: ReconnectBackoff,
    ) -> None:
        self._children, self._control, self._queues = children, control, queues
        self._client, self._backoff = client, backoff
        self._last_wanted_ms = 0

    @property
    def interval_ms(self) -> int:
        """Milliseconds between ticks; short while children prefetch."""
        return _INTERVAL_MS if self._control.watches else _IDLE_INTERVAL_MS

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Take over the jobs of the children that have been running one job for too long."""
        children = tuple(self._children())
        if any(block.prefetches for block, _ in children):
            self._control.watches, self._last_wanted_ms = True, now_ms
        elif self._control.watches and now_ms - self._last_wanted_ms > _LINGER_MS:
            self._stop_watching([block for block, _ in children])
        if not self._control.watches or self._backoff.is_active:
            return
        for block, slots in children:
            if _is_delayed(block, slots, now_ms) and block.try_lock():
                try:
                    if _is_delayed(block, slots, mono_ms()):
                        self._take_over(slots)
                finally:
                    block.unlock()

    def _stop_watching(self, blocks: Sequence[ChildBlock]) -> None:
        self._control.watches = False
        for block in blocks:
            if block.try_lock():
                block.unlock()
        # A child sets `prefetches`, takes the lock, and reads `watches`; this method clears `watches`, takes the lock,
        # and reads `prefetches`. So at least one side sees what the other has written.
        self._control.watches = any(block.prefetches for block in blocks)

    def _take_over(self, slots: Sequence[Slot]) -> None:
        try:
            slots = sorted(slots, key=lambda slot: slot.order)
            unexecuted = self._release_fetched([slot for slot in slots if slot.is_sent])
            self._write_outcomes(unexecuted + [slot for slot in slots if slot.state == SlotState.ENDED])
            prefetched = [slot for slot in slots if slot.state == SlotState.PREFETCHED]
            self._release([(slot, slot.read().job_id) for slot in prefetched], SlotState.FREE)
        except BrokerError as exc:
            self._backoff.record_failure(exc)

    def _release_fetched(self, slots: Sequence[Slot]) -> list[Slot]:
        """Release the jobs that sent calls have fetched; return the slots whose call Redis has not executed yet.

        The child has sent a call, and does not read the reply until its current job has ended. The token locks the next
        job if Redis has executed the call, or still the job that has ended if it has not.
        """
        fetched, pending = [], []
        views = [(slot, slot.read()) for slot in slots]
        for index in {view.queue_index for _, view in views}:
            of_queue = [(slot, view.job_id) for slot, view in views if view.queue_index == index]
            locked = dict(self._client.run(find_by_token(self._queues[index], [slot.token for slot, _ in of_queue])))
            for slot, ended_id in of_queue:
                job_id = locked.get(slot.token)
                if job_id is None:
                    slot.record_takeover(SlotState.RELEASED, mono_ms())
                elif job_id == ended_id:
                    pending.append(slot)
                else:
                    fetched.append((slot, job_id))
        self._release(fetched, SlotState.RELEASED)
        return pending

    def _write_outcomes(self, slots: Sequence[Slot]) -> None:
        """Write the outcomes that the child has stored; jobs that the same calls have fetched are released."""
        if not slots:
            return
        try:
            replies = self._client.send_packed([slot.outcome for slot in slots])
        except BrokerUnavailableError:
            for slot in slots:
                slot.record_takeover(SlotState.UNCERTAIN, mono_ms())
            raise
        unstarted = []
        for slot, job in zip(slots, map(next_job, replies), strict=True):
            if isinstance(job, BrokerUnavailableError):  # of one node of a cluster, or the reply was damaged
                slot.record_takeover(SlotState.UNCERTAIN, mono_ms())
            if not isinstance(job, Fetched):
                continue  # the child makes the call again, and handles the error
            slot.record_takeover(SlotState.WRITTEN, mono_ms())
            if job.job_id:
                unstarted.append((slot, job.job_id))
        self._release(unstarted, SlotState.WRITTEN)

    def _release(self, jobs: Sequence[tuple[Slot, str]], after: SlotState) -> None:
        """Release jobs, the last one first, so that they keep their order; set their slots to the state ``after``.

        The state is ``RELEASING`` meanwhile, because the child must not start a job that Redis may have released. It
        remains if there is no reply; the child then looks for the job.
        """
        jobs = jobs[::-1]
        for slot, _ in jobs:
            slot.record_takeover(SlotState.RELEASING, mono_ms())
        calls = [release_unstarted(self._queues[slot.read().queue_index], job_id, slot.token) for slot, job_id in jobs]
        for (slot, _), reply in zip(jobs, self._client.try_many(calls) if calls else (), strict=True):
            if not isinstance(reply, BrokerError):  # a JobError means that the lock is lost
                slot.record_takeover(after, mono_ms())


def _is_delayed(block: ChildBlock, slots: Sequence[Slot], now_ms: int) -> bool:
    """Whether one job has been running for too long, and others wait for it."""
    since_ms = block.running_since_ms
    return 0 < since_ms <= now_ms - LONG_MS and any(slot.state in _WAITING or slot.is_sent for slot in slots)
