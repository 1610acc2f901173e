"""Warns at start if another worker has another rate limit for one of this worker's tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from bulltask.app import App
from bulltask.errors import BrokerError
from bulltask.jobs import codec
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.worker.broker_backoff import ReconnectBackoff

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["RateLimitCheck"]

_TTL_MS: Final = 30 * 86_400_000
_NONE: Final = "none"


class RateLimitCheck:
    """Stores the rate limits of this worker's tasks, once when it starts, and compares them with the stored ones.

    The limits are stored in the queue of a task, because all workers of a queue share the times at which jobs start.

    Args:
        app: The app, with its tasks.
        queues: The worker's queues.
        worker_id: The worker.
        client: The supervisor's client.
        backoff: The supervisor's backoff.
        logger: Receives a warning for each task with another limit.
    """

    interval_ms = 1_000

    def __init__(
        self,
        app: App,
        queues: Sequence[QueueKeys],
        worker_id: str,
        client: SyncClient,
        backoff: ReconnectBackoff,
        logger: FilteringBoundLogger,
    ) -> None:
        self._worker_id, self._client, self._backoff, self._logger = worker_id, client, backoff, logger
        self._pending = {} if app.config.disable_rate_limits else _limits_by_queue(app, queues)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Compare and store the limits, until that was done once."""
        if not self._pending or self._backoff.is_active:
            return
        try:
            stored = self._client.try_many([command("HGETALL", keys.task_rates) for keys in self._pending])
            calls: list[Call[Any]] = []
            for (keys, limits), flat in zip(self._pending.items(), stored, strict=True):
                calls += self._compare(keys, limits, flat if isinstance(flat, list) else [])
            if calls:
                self._client.try_many(calls)
        except BrokerError as exc:
            self._backoff.record_failure(exc)
        else:
            self._pending = {}

    def _compare(self, keys: QueueKeys, limits: Mapping[str, str], flat: Sequence[bytes]) -> list[Call[Any]]:
        """Warn of differences, and return the calls that store this worker's limits."""
        words = [codec.decode_text(word) for word in flat]
        others = dict(zip(words[::2], words[1::2], strict=False))
        for task, limit in limits.items():
            other, _, worker = others.get(task, limit).partition(" ")
            if other != limit:
                self._logger.warning(
                    "Another worker has another rate limit for a task",
                    task=task,
                    queue=keys.queue,
                    seconds_per_job=limit,
                    other=other,
                    other_worker=worker,
                    hint="The limit of the worker that acquires a job applies: set the same one in all services, or "
                    "restart workers with the old one",
                )
        new = {task: limit for task, limit in limits.items() if limit != _NONE or task in others}
        words = [word for task, limit in new.items() for word in (task, f"{limit} {self._worker_id}")]
        if not words:
            return []
        return [command("HSET", keys.task_rates, *words), command("PEXPIRE", keys.task_rates, _TTL_MS)]


def _limits_by_queue(app: App, queues: Sequence[QueueKeys]) -> dict[QueueKeys, dict[str, str]]:
    """Return the limits of the tasks by the queues of their jobs; a limit is the time for one job."""
    by_name, routes = {keys.queue: keys for keys in queues}, app.config.routes
    limits: dict[QueueKeys, dict[str, str]] = {}
    for task in app.tasks.values():
        routed = [] if task.options.queue or routes is None else routes.queues([task.name])
        rate = task.options.rate(app.config)
        for queue in routed or [task.options.queue or app.config.default_queue]:
            if queue in by_name:
                text = _NONE if rate is None else f"{rate.interval_ms / 1000:.6g}"
                limits.setdefault(by_name[queue], {})[task.name] = text
    return limits
