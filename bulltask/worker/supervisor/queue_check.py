"""Reports queues that workers of the app have consumed, that contain jobs, and that no worker consumes any more.

This happens when a queue is renamed in the code while it contains jobs.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from bulltask.app import App
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError, BulltaskError
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.inspect import count_unfinished_jobs
from bulltask.transport.keys import queue_consumers
from bulltask.transport.replies import text
from bulltask.worker.broker_backoff import ReconnectBackoff

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["QueueCheck"]

_LIVE_MS: Final = 150_000
_KEPT_MS: Final = 30 * 86_400_000


class QueueCheck:
    """A service that records which queues this worker consumes, and looks for those that no worker consumes any more.

    Args:
        app: The app.
        queues: The worker's queues.
        worker_id: The worker's id.
        client: The supervisor's client.
        backoff: The supervisor's backoff.
        logger: Logs a warning for each such queue that contains jobs.
    """

    interval_ms = 60_000

    def __init__(
        self,
        app: App,
        queues: Sequence[str],
        worker_id: str,
        client: SyncClient,
        backoff: ReconnectBackoff,
        logger: FilteringBoundLogger,
    ) -> None:
        self._broker, self._queues, self._worker_id = app.broker, queues, worker_id
        self._client, self._backoff, self._logger = client, backoff, logger
        self._key = queue_consumers(app.config.prefix, app.name)
        self._reported: set[str] = set()

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Record this worker's queues, and look for others."""
        try:
            self._check(self._broker.clock.now_ms())
        except (BrokerUnavailableError, BrokerNotReadyError) as exc:
            if exc.node is None:  # otherwise, the other nodes of the cluster may be available
                self._backoff.record_failure(exc)
        except BulltaskError as exc:
            self._logger.debug("Queues without workers not checked", error=str(exc))
        else:
            self._backoff.reset()

    def leave(self) -> None:
        """Record that this worker stops, so that the next one knows that nobody consumes its queues."""
        if not self._backoff.is_active:
            with suppress(BrokerError):
                self._client.run(command("HDEL", self._key, f"worker:{self._worker_id}"))

    def _check(self, now_ms: int) -> None:
        fields = [f"worker:{self._worker_id}", json.dumps([now_ms, list(self._queues)])]
        for queue in self._queues:
            fields += [f"queue:{queue}", str(now_ms)]
        self._client.run(command("HSET", self._key, *fields))
        self._client.run(command("PEXPIRE", self._key, _KEPT_MS))
        read: Call[Mapping[str, str]] = command("HGETALL", self._key, parse_reply=_fields)
        known = self._client.run(read)
        workers = {name: json.loads(value) for name, value in known.items() if name.startswith("worker:")}
        dead = [name for name, (seen_ms, _) in workers.items() if abs(now_ms - seen_ms) > _LIVE_MS]
        consumed = {queue for name in workers.keys() - dead for queue in workers[name][1]}
        seen = {name.removeprefix("queue:"): int(value) for name, value in known.items() if name.startswith("queue:")}
        left = sorted(seen.keys() - consumed)
        counts = dict(zip(left, count_unfinished_jobs(self._client, list(map(self._broker.keys, left))), strict=True))
        for queue in {queue for queue, jobs in counts.items() if jobs} - self._reported:
            self._reported.add(queue)
            self._logger.warning(
                "No worker consumes a queue that contains jobs",
                queue=queue,
                jobs=counts[queue],
                last_worker=datetime.fromtimestamp(seen[queue] // 1000, UTC).isoformat(),
                hint="If the queue was renamed, start a worker with -Q and the old name until the jobs have run",
            )
        dead += [f"queue:{queue}" for queue, jobs in counts.items() if not jobs]
        if dead:
            self._client.run(command("HDEL", self._key, *dead))


def _fields(reply: Any) -> Mapping[str, str]:
    return dict(zip(map(text, reply[::2]), map(text, reply[1::2]), strict=True))
