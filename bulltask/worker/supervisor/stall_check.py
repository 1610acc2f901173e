"""Jobs whose worker is gone."""

from __future__ import annotations

from collections.abc import Sequence

from bulltask.clock import ServerClock
from bulltask.config import Config
from bulltask.errors import BrokerError
from bulltask.events import Bus, JobStalled, StalledCheckSkipped
from bulltask.transport.client import Client
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts_move import move_stalled_jobs_to_wait
from bulltask.worker.outage import Outage
from bulltask.worker.refusals import Refusals

__all__ = ["StallCheck"]


class StallCheck:
    """Responsible for finding jobs whose lock has run out, whoever had them, and putting them back to wait.

    Every worker of a queue checks; a key in Redis lets one check per interval through (PROTOCOL 4.5). A cycle that is
    still under way when the next is due makes that one fall out, and it is counted (seed 002 §4).

    Args:
        queues, client, clock, config, bus, outage: as in :class:`Heartbeat`.
    """

    def __init__(
        self,
        queues: Sequence[QueueKeys],
        client: Client,
        clock: ServerClock,
        config: Config,
        bus: Bus,
        outage: Outage,
    ) -> None:
        self._queues, self._client, self._clock, self._bus, self._outage = queues, client, clock, bus, outage
        self._refusals = Refusals(queues, bus, config)
        self._max_stalled = config.max_stalled_count
        self.interval_ms = config.stalled_interval_ms
        # Ticks do not drift, so a key that lived for the whole interval would still be there at the next tick by a
        # millisecond, every other time, and the jobs of a dead worker would wait for one more interval.
        self._throttle_ms = self.interval_ms * 9 // 10

    def tick(self, _now_ms: int, missed: int, /) -> None:
        """Check every queue once."""
        if missed:
            for keys in self._queues:
                self._bus.emit(StalledCheckSkipped(keys.queue, missed))
        try:
            for index in range(len(self._queues)):
                with self._refusals.noted(index):
                    self._check(index)
        except BrokerError as exc:  # the other queues would each wait for the same time-out
            self._outage.failed(exc)
        else:
            self._outage.over()

    def _check(self, index: int) -> None:
        keys = self._queues[index]
        call = move_stalled_jobs_to_wait(keys, self._max_stalled, self._throttle_ms, self._clock.now_ms())
        stalled = self._client.run(call)
        self._refusals.over(index)
        for job_id in stalled:
            self._bus.emit(JobStalled(job_id, keys.queue, None))
