"""Makes jobs due that wait for a worker that can run them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from bulltask.clock import ServerClock
from bulltask.errors import BrokerError, BulltaskError
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.incompatible import promote_incompatible
from bulltask.worker.broker_backoff import ReconnectBackoff

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["IncompatibleJobs"]

_QUEUES_PER_TICK: Final = 100


class IncompatibleJobs:
    """Makes jobs of this worker's tasks due, once when it starts.

    Other workers, such as those with an older version of the app, could not run them, and have delayed them by up to a
    minute.

    Args:
        queues: The worker's queues.
        tasks: The names of its tasks.
        client: The supervisor's client.
        clock: The server's time.
        backoff: The supervisor's backoff.
        logger: Receives a line for each queue that had such jobs.
    """

    interval_ms = 1_000

    def __init__(
        self,
        queues: Sequence[QueueKeys],
        tasks: Sequence[str],
        client: SyncClient,
        clock: ServerClock,
        backoff: ReconnectBackoff,
        logger: FilteringBoundLogger,
    ) -> None:
        self._tasks, self._client, self._clock, self._backoff, self._logger = tasks, client, clock, backoff, logger
        self._pending: dict[str, tuple[QueueKeys, int]] = {keys.base: (keys, 0) for keys in queues}

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Make the jobs of some queues due, until all queues were checked."""
        if not self._pending or self._backoff.is_active:
            return
        pages = list(self._pending.values())[:_QUEUES_PER_TICK]
        try:
            now_ms = self._clock.now_ms()
            replies = self._client.try_many([promote_incompatible(keys, self._tasks, at, now_ms) for keys, at in pages])
        except BrokerError as exc:
            self._backoff.record_failure(exc)
            return
        for (keys, _), reply in zip(pages, replies, strict=True):
            del self._pending[keys.base]
            if isinstance(reply, BulltaskError):
                continue  # the other services report it; the jobs are due within a minute anyway
            due, skipped = reply
            if due:
                self._logger.info("Jobs that waited for this worker are due", queue=keys.queue, jobs=due)
            if skipped is not None:
                self._pending[keys.base] = keys, skipped
