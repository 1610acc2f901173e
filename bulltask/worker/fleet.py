"""Services of the supervisor that concern all workers of an app.

They make incompatible jobs due again, report queues that no worker consumes, and compare the workers' rate limits.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from bulltask.app import App
from bulltask.jobs import codec
from bulltask.jobs.clock import ServerClock
from bulltask.jobs.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError, BulltaskError
from bulltask.transport.broker import count_unfinished_jobs
from bulltask.transport.call import Call, QueueKeys, SyncClient, command, queue_consumers, text
from bulltask.transport.scripts.move import promote_incompatible
from bulltask.worker.broker_backoff import ReconnectBackoff

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["IncompatibleJobs", "QueueCheck", "RateLimitCheck"]


_QUEUES_PER_TICK: Final = 100


class IncompatibleJobs:
    """Makes jobs of this worker's tasks due, once when it starts.

    Other workers, such as those with an older version of the app, could not run them, and have delayed them by up to a
    minute.
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
        self._tasks = tasks
        self._client = client
        self._clock = clock
        self._backoff = backoff
        self._logger = logger
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


# Reports queues that workers of the app have consumed, that contain jobs, and that no worker consumes any more.
#
# This happens when a queue is renamed in the code while it contains jobs.


_LIVE_MS: Final = 150_000
_KEPT_MS: Final = 30 * 86_400_000


class QueueCheck:
    """Records which queues this worker consumes, and looks for those that no worker consumes any more."""

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
        self._broker = app._broker
        self._queues = queues
        self._worker_id = worker_id
        self._client = client
        self._backoff = backoff
        self._logger = logger
        self._key = queue_consumers(app._config.prefix, app.name)
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


_TTL_MS: Final = 30 * 86_400_000
_NONE: Final = "none"


class RateLimitCheck:
    """Stores the rate limits of this worker's tasks, once when it starts, and compares them with the stored ones.

    The limits are stored in the queue of a task, because all workers of a queue share the times at which jobs start.
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
        self._worker_id = worker_id
        self._client = client
        self._backoff = backoff
        self._logger = logger
        self._pending = {} if app._config.disable_rate_limits else _limits_by_queue(app, queues)

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
    by_name, routes = {keys.queue: keys for keys in queues}, app._config.routes
    limits: dict[QueueKeys, dict[str, str]] = {}
    for task in app.tasks.values():
        routed = [] if task._options.queue or routes is None else routes.queues([task.name])
        rate = task._options.rate(app._config)
        for queue in routed or [task._options.queue or app._config.default_queue]:
            if queue in by_name:
                text = _NONE if rate is None else f"{rate.interval_ms / 1000:.6g}"
                limits.setdefault(by_name[queue], {})[task.name] = text
    return limits
