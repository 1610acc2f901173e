"""The locks of running jobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from bulltask.clock import mono_ms
from bulltask.config import Config
from bulltask.errors import BrokerError
from bulltask.events import Bus, HeartbeatFailed, HeartbeatSucceeded
from bulltask.states import SlotState
from bulltask.transport.client import Client
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts_move import find_by_token, renew_locks
from bulltask.worker.outage import Outage
from bulltask.worker.refusals import Refusals
from bulltask.worker.slots import SlotView

__all__ = ["Heartbeat"]


class Heartbeat:
    """Responsible for renewing the locks of every job that the children hold, one call per queue and tick.

    It runs in the supervisor: a child that holds the GIL, swaps or is stopped keeps its locks. A failed renewal is
    logged and counted and never stops the job (seed 002 §4); the next tick tries again.

    Args:
        queues: the worker's queues, in the order of the slots' queue index.
        views: gives the slots of all living children.
        client: the supervisor's.
        config: lock duration and renewal.
        bus: hears of every renewal.
        outage: the supervisor's view of an outage.
    """

    def __init__(
        self,
        queues: Sequence[QueueKeys],
        views: Callable[[], Iterable[SlotView]],
        client: Client,
        config: Config,
        bus: Bus,
        outage: Outage,
    ) -> None:
        self._queues, self._views, self._client, self._bus, self._outage = queues, views, client, bus, outage
        self._refusals = Refusals(queues, bus, config)
        self._lock_ms = config.lock_ms
        # Twice as often as a lock must be renewed, as BullMQ does: one failed tick costs nothing.
        self.interval_ms = max(50, config.renew_ms // 2)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Renew every lock once."""
        held: list[list[SlotView]] = [[] for _ in self._queues]
        nameless: list[str] = []
        for view in self._views():
            if view.state not in {SlotState.ACTIVE, SlotState.SETTLING}:
                continue
            if view.job_id:
                held[view.queue_index].append(view)
            else:
                nameless.append(view.token)
        lost: BrokerError | None = None
        for index, views in enumerate(held):
            # Redis lost: the others are not tried. Each may take its time-out, and dead children wait meanwhile.
            fault = lost or self._renew(index, views, nameless)
            if fault is not None and not self._refusals.concern_a_queue(fault):
                lost = fault
            for view in views if fault else ():
                self._bus.emit(HeartbeatFailed(self._queues[index].queue, view.job_id, str(fault)))

    def _renew(self, index: int, views: Sequence[SlotView], nameless: Sequence[str]) -> BrokerError | None:
        keys = self._queues[index]
        started_ms = mono_ms()
        try:
            pairs = [(view.token, view.job_id) for view in views]
            if nameless:
                pairs += self._client.run(find_by_token(keys, nameless))
            if not pairs:
                return None
            lost = set(self._client.run(renew_locks(keys, pairs, self._lock_ms)))
        except BrokerError as exc:
            if self._refusals.concern_a_queue(exc):
                self._refusals.note(index, exc)
            else:
                self._outage.failed(exc)
            return exc
        self._outage.over()
        self._refusals.over(index)
        for view in views:
            # While its outcome is written, a job's lock may be gone because it was just settled.
            if view.job_id in lost and view.state is SlotState.ACTIVE and self._still_held(view):
                self._bus.emit(HeartbeatFailed(keys.queue, view.job_id, "the lock is gone or held by another worker"))
        self._bus.emit(HeartbeatSucceeded(keys.queue, len(pairs) - len(lost), mono_ms() - started_ms))
        return None

    def _still_held(self, view: SlotView) -> bool:
        return view in set(self._views())
