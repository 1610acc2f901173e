"""Services of the supervisor that concern all workers of an app.

They make incompatible jobs due again, report queues that no worker consumes, compare the workers' rate limits, and
write what other processes can know about this worker.
"""

from __future__ import annotations

import heapq
import json
import os
import platform
import socket
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import distribution
from itertools import islice
from typing import TYPE_CHECKING, Any, Final

from bulltask.app import App
from bulltask.config.process import memory_kib
from bulltask.jobs.clock import ServerClock
from bulltask.jobs.errors import (
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    BulltaskError,
)
from bulltask.transport.broker import count_unfinished_jobs
from bulltask.transport.call import Call, QueueKeys, SyncClient, command, queue_consumers, texts, texts_by_name
from bulltask.transport.scripts.move import promote_incompatible
from bulltask.transport.scripts.queue import DELAYED_SCORE
from bulltask.transport.workers import (
    MAX_JOBS,
    MAX_TASKS,
    WorkerChild,
    WorkerJob,
    WorkerState,
    register_queues,
    remove_state,
    write_state,
)
from bulltask.worker.async_loop import batches_of, jobs_per_child
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child_pool import ChildPool
from bulltask.worker.slots import (
    BUSY,
    HAS_JOB,
    UNKNOWN_ATTEMPT,
    ChildBlock,
    ControlPage,
    ProcessState,
    SlotState,
    free_slots,
)

if TYPE_CHECKING:
    from structlog.typing import FilteringBoundLogger

__all__ = ["IncompatibleJobs", "QueueCheck", "RateLimitCheck", "StateReport", "own_version"]


_QUEUES_PER_TICK: Final = 100


class IncompatibleJobs:
    """Makes jobs of this worker's tasks due, once when it starts, or consumes another queue.

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
        self._pending: dict[str, tuple[QueueKeys, int]] = {}
        for keys in queues:
            self.add_queue(keys)

    def add_queue(self, keys: QueueKeys) -> None:
        """Make the jobs of a queue due."""
        self._pending[keys.base] = keys, 0

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
        known = self._client.run(command("HGETALL", self._key, parse_reply=texts_by_name))
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


_TTL_MS: Final = 30 * 86_400_000
_NONE: Final = "none"
_MOVED_PER_TICK: Final = 200
_TICKS_UNTIL_MOVED: Final = 2


class RateLimitCheck:
    """Stores the rate limits of this worker's tasks, once when it starts, and compares them with the stored ones.

    The limits are stored in the queue of a task, because all workers of a queue share the times at which jobs start.

    Throttled jobs are due at times of the limit that applied before. If it was raised, the first ones are made due now:
    they start, or are throttled again, and each start advances the next one. If it was removed, all are made due.
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
        self._app = app
        self._queues = queues
        self._limits = _limits_by_queue(app, queues)
        self._pending = {} if app._config.disable_rate_limits else self._limits
        self._changed: set[str] = set()
        self._moves: dict[tuple[QueueKeys, str], tuple[int, int | None]] = {}

    def store_changed(self, task: str) -> None:
        """Store the rate limit of a task that was changed at run time, which other workers may not have changed yet."""
        self._changed.add(task)
        before = self._limits
        self._limits = _limits_by_queue(self._app, self._queues)
        self._pending = self._limits
        for keys, limits in self._limits.items():  # this worker may not have stored the limit before yet
            if task in limits:
                self._note_change(keys, task, before[keys][task], limits[task])

    def add_queue(self, keys: QueueKeys) -> None:
        """Compare and store the limits of another queue, too."""
        self._limits = _limits_by_queue(self._app, self._queues)
        if keys in self._limits and not self._app._config.disable_rate_limits:
            self._pending = {**self._pending, keys: self._limits[keys]}

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Compare and store the limits, until that was done once; make throttled jobs due if a limit was raised."""
        if not (self._pending or self._moves) or self._backoff.is_active:
            return
        try:
            self._move_throttled()
            if not self._pending:
                return
            read = [command("HGETALL", keys.task_rates, parse_reply=texts_by_name) for keys in self._pending]
            calls: list[Call[Any]] = []
            for (keys, limits), others in zip(self._pending.items(), self._client.try_many(read), strict=True):
                calls += self._compare(keys, limits, others if isinstance(others, dict) else {})
            if calls:
                self._client.try_many(calls)
        except BrokerError as exc:
            self._backoff.record_failure(exc)
        else:
            self._pending = {}

    def _note_change(self, keys: QueueKeys, task: str, before: str, after: str) -> None:
        """Remember to make throttled jobs due if a limit was raised; a limit is the time for one job."""
        with suppress(ValueError):  # anybody may have written the stored one
            if before != _NONE and (after == _NONE or float(after) < float(before)):
                self._moves[keys, task] = _TICKS_UNTIL_MOVED, 0 if after == _NONE else None

    def _move_throttled(self) -> None:
        """Make the next throttled jobs due."""
        for place, (ticks, start) in self._moves.items():
            if ticks:  # other workers, and the children, may not have the new limit yet
                self._moves[place] = ticks - 1, start
        places = [(*place, start) for place, (ticks, start) in self._moves.items() if not ticks]
        if not places:
            return
        pages = [
            command("ZRANGE", keys.throttled(task), start or 0, (start or 0) + _MOVED_PER_TICK - 1, parse_reply=texts)
            for keys, task, start in places
        ]
        now_ms, calls = self._app._broker.clock.now_ms(), list[Call[Any]]()
        for (keys, task, start), ids in zip(places, self._client.try_many(pages), strict=True):
            found = ids if isinstance(ids, list) else []
            if found:
                scores = [word for job_id in found for word in (now_ms * DELAYED_SCORE, job_id)]
                calls += [command("ZADD", keys.delayed, "XX", *scores), command("ZADD", keys.marker, now_ms, "1")]
            if start is None or len(found) < _MOVED_PER_TICK:
                del self._moves[keys, task]
            else:
                self._moves[keys, task] = 0, start + len(found)
        if calls:
            self._client.try_many(calls)

    def _compare(self, keys: QueueKeys, limits: Mapping[str, str], others: Mapping[str, str]) -> list[Call[Any]]:
        """Warn of differences from what other workers have stored; return the calls that store this worker's limits."""
        for task, limit in limits.items():
            other, _, worker = others.get(task, limit).partition(" ")
            self._note_change(keys, task, other, limit)
            if other != limit and task not in self._changed:
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


# What other processes can know about this worker: its state in Redis, and the registry of queues.


_WRITE_MS: Final = 5_000
_STATE_TTL_MS: Final = 15_000
_CLEAN_MS: Final = 60_000
_SHORT_STATES_PER_TICK: Final = 12
"""About 25 queues a second, with four commands each."""
_SHORT_FACTOR: Final = 6
"""How much less often the short states are written. Who reads one looks for the whole state, which expires sooner."""
_REGISTER_MS: Final = 300_000
_LONG_JOB_MS: Final = 1_000
"""A job that takes longer is in the state within a second of this time; shorter ones only by chance."""
_JOB_STATES: Final = {SlotState.ACTIVE: "active", SlotState.PREFETCHED: "prefetched"}


class StateReport:
    """Writes the worker's state to Redis every few seconds and when it changes, and registers its queues.

    It needs no child, and costs nothing per job. While the worker has no job, it writes only so often that the state
    does not expire. The short states are written less often, with many queues at most 25 a second.
    """

    interval_ms = 500

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        app: App,
        queues: Sequence[QueueKeys],
        worker_id: str,
        pool: ChildPool,
        control: ControlPage,
        max_jobs: int | None,
        client: SyncClient,
        backoff: ReconnectBackoff,
        logger: FilteringBoundLogger,
    ) -> None:
        self._queues = queues
        self._pool = pool
        self._control = control
        self._max_jobs = max_jobs
        self._client = client
        self._clock = app._broker.clock
        self._backoff = backoff
        self._logger = logger
        self._per_child = jobs_per_child(app)
        self._app = app
        self._constant = _constant_state(app, queues, worker_id)
        self._changes_number = 0
        self._due_ms = self._register_at_ms = self._clean_at_ms = self._written_ms = 0
        self._written: tuple[object, object] | None = None
        self._short_state = ""
        self._short: deque[tuple[int, QueueKeys]] = deque()

    def add_queue(self, keys: QueueKeys) -> None:
        """Write the whole state and a short one now, and register the queues, because there is another one."""
        started_ms = self._constant.started_ms
        constant = _constant_state(self._app, self._queues, self._constant.id)
        self._constant = replace(constant, started_ms=started_ms, cancelled=self._constant.cancelled)
        self._due_ms = self._register_at_ms = 0
        self._short.appendleft((0, keys))

    def tick(self, now_ms: int, _missed: int, /) -> None:
        """Write what is due."""
        if self._backoff.is_active:
            return
        status, jobs = self._status(), self._long_jobs(now_ms)
        calls: list[Call[Any]] = []
        try:
            server_ms = self._clock.now_ms()
            if now_ms >= self._due_ms or self._has_changed(status, jobs, now_ms):
                calls += self._whole_state(server_ms, now_ms)
                self._written = status, jobs
            calls += self._short_states(server_ms, now_ms)
            if now_ms >= self._register_at_ms:
                self._register_at_ms = now_ms + _REGISTER_MS
                calls += register_queues(self._queues[0].prefix, (keys.name for keys in self._queues), server_ms)
            replies = self._client.try_many(calls) if calls else []
        except BrokerError as exc:
            self._backoff.record_failure(exc)
            self._due_ms = self._register_at_ms = self._clean_at_ms = 0
        else:
            rejected = (reply for reply in replies if isinstance(reply, BrokerOutOfMemoryError | BrokerNotReadyError))
            if (error := next(rejected, None)) is not None and error.node is None:
                self._backoff.record_failure(error)  # it replies to reads, but does not serve the worker
                self._due_ms = 0
            for text in {str(reply) for reply in replies if isinstance(reply, BulltaskError)}:
                self._logger.debug("State of the worker not stored", error=text)

    def leave(self) -> None:
        """Remove the state, because this worker stops."""
        if not self._backoff.is_active:
            worker_id = self._constant.id
            calls = [call for keys in self._queues for call in remove_state(keys, worker_id)]
            with suppress(BrokerError):
                self._client.try_many(calls)

    def _status(self) -> tuple[object, ...]:
        halted = self._pool.halted
        children = tuple((block.pid, _child_state(block, halted)) for block, _ in self._pool.blocks())
        return self._control.run_state, self._pool.target, children, self._control.changes_number

    def _long_jobs(self, now_ms: int) -> frozenset[tuple[str, int]]:
        return frozenset(
            (slot.token, slot.order)
            for _, slots in self._pool.blocks()
            for slot in slots
            if slot.state == SlotState.ACTIVE and now_ms - slot.since_ms >= _LONG_JOB_MS
        )

    def _has_changed(self, status: object, jobs: object, now_ms: int) -> bool:
        if self._written is None:
            return True
        written_status, written_jobs = self._written
        is_recent = now_ms - self._written_ms < _LONG_JOB_MS
        return status != written_status or (jobs != written_jobs and not is_recent)

    def _whole_state(self, server_ms: int, now_ms: int) -> list[Call[Any]]:
        state, must_clean = self._state(server_ms, now_ms), now_ms >= self._clean_at_ms
        if must_clean:
            self._clean_at_ms = now_ms + _CLEAN_MS
        is_idle = not any(child.jobs for child in state.children)
        self._written_ms = now_ms
        self._due_ms = now_ms + (_STATE_TTL_MS // 2 if is_idle else _WRITE_MS)
        return write_state(self._queues[0], state, clean=must_clean)

    def _short_states(self, server_ms: int, now_ms: int) -> Iterator[Call[Any]]:
        state = self._control.run_state
        period_ms = max(_SHORT_FACTOR * _WRITE_MS, len(self._queues) * self.interval_ms // _SHORT_STATES_PER_TICK)
        if state != self._short_state:
            self._short_state = state
            self._short = deque((0, keys) for keys in self._queues[1:])
        for _ in range(_SHORT_STATES_PER_TICK):
            if not self._short or self._short[0][0] > now_ms:
                return
            _, keys = self._short.popleft()
            self._short.append((now_ms + period_ms, keys))
            ttl_ms = period_ms * _STATE_TTL_MS // _WRITE_MS
            short = replace(self._constant, is_short=True, queues=(keys.queue,), state=state)
            yield from write_state(keys, replace(short, at_ms=server_ms, ttl_ms=ttl_ms))

    def _state(self, server_ms: int, now_ms: int) -> WorkerState:
        children, left_out = self._children(server_ms - now_ms)
        if self._control.changes_number != self._changes_number:  # an order has changed rate limits, or queues
            self._changes_number = self._control.changes_number
            cancelled = tuple(json.loads(self._control.changes())["cancelled"])
            self._constant = replace(self._constant, rate_limits=_rate_limits(self._app), cancelled=cancelled)
        return replace(
            self._constant,
            at_ms=server_ms,
            ttl_ms=_STATE_TTL_MS,
            state=self._control.run_state,
            concurrency=self._pool.target,
            children=children,
            jobs_left_out=left_out,
            slots=self._per_child * self._pool.target,
            busy=sum(slot.state in BUSY for _, slots in self._pool.blocks() for slot in slots),
            permits=None if self._max_jobs is None else max(0, self._max_jobs - self._control.permits_used),
        )

    def _children(self, offset_ms: int) -> tuple[tuple[WorkerChild, ...], int]:
        """Return the children with their jobs, and how many jobs were left out."""
        blocks, halted = list(self._pool.blocks()), self._pool.halted
        taken = [
            (slot.since_ms, index, slot)
            for index, (_, slots) in enumerate(blocks)
            for slot in slots
            if slot.state in HAS_JOB
        ]
        oldest = heapq.nsmallest(MAX_JOBS, taken, key=lambda item: item[0])
        jobs: dict[int, list[WorkerJob]] = {index: [] for index in range(len(blocks))}
        for _, index, slot in oldest:
            view = slot.read()
            if view.state in HAS_JOB and view.attempt != UNKNOWN_ATTEMPT:
                state, queue = _JOB_STATES.get(view.state, "finishing"), self._queues[view.queue_index].queue
                jobs[index].append(
                    WorkerJob(id=view.job_id, queue=queue, since_ms=view.since_ms + offset_ms, state=state)
                )
        return tuple(
            WorkerChild(
                pid=block.pid,
                rss_kib=_rss_kib(block.pid),
                state=_child_state(block, halted),
                jobs=tuple(jobs[index]),
                free=free_slots(slots, self._per_child),
            )
            for index, (block, slots) in enumerate(blocks)
        ), len(taken) - len(oldest)


def _child_state(block: ChildBlock, halted: Mapping[int, str]) -> str:
    if block.pid in halted:
        return halted[block.pid]
    if block.run_state is ProcessState.INIT:
        return "starting"
    return "run" if block.run_state is ProcessState.RUN and not block.reached_limit else "closing"


def _rss_kib(pid: int) -> int | None:
    try:
        return memory_kib(pid) or None
    except OSError:  # it has exited
        return None


def _rate_limits(app: App) -> dict[str, str]:
    names = sorted(app.tasks)[:MAX_TASKS]
    rates = {name: app.tasks[name]._options.rate(app._config) for name in names}
    return {name: str(rate) for name, rate in rates.items() if rate is not None}


def own_version() -> str:
    """Return bulltask's version; ``importlib.metadata.version()`` imports a parser of e-mails."""
    metadata = distribution("bulltask").read_text("METADATA") or ""
    return metadata.partition("\nVersion: ")[2].partition("\n")[0]


def _constant_state(app: App, queues: Sequence[QueueKeys], worker_id: str) -> WorkerState:
    """Return the state without what changes."""
    config, names = app._config, sorted(app.tasks)
    limits = {
        keys.queue: {"max": limit["max"], "duration_ms": limit["duration"]}
        for keys in queues
        if (limit := config.limiter(keys.queue)) is not None
    }
    return WorkerState(
        id=worker_id,
        host=socket.gethostname(),
        pid=os.getpid(),
        app=app.name,
        version=own_version(),
        python=platform.python_version(),
        started_ms=app._broker.clock.now_ms(),
        queues=tuple(keys.queue for keys in queues),
        home=queues[0].name,
        tasks=tuple(names[:MAX_TASKS]),
        tasks_left_out=max(0, len(names) - MAX_TASKS),
        rate_limits=_rate_limits(app),
        limiter=limits,
        lock_ms=config.lock_ms,
        stalled_interval_ms=None if config.skip_stalled_check else config.stalled_interval_ms,
        broker=app._broker.endpoint.safe_url,
        batches={
            task: {"size": size, "wait_ms": ms} for task, (size, ms) in islice(batches_of(app).items(), MAX_TASKS)
        },
    )
