"""Sends jobs: :class:`Producer` adds them in round trips of limited size, and retries sends whose reply was lost."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain, groupby
from operator import attrgetter
from typing import Any, ClassVar, Final, NoReturn, Protocol, TypeVar

from bulltask.config.config import Config
from bulltask.jobs import clock as loop_timers
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.jobs.clock import ServerClock, mono_ms
from bulltask.jobs.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.jobs.job import NewJob, PlannedJob, in_order, text_chars
from bulltask.transport.call import AnyAsyncClient, Call, QueueKeys, command
from bulltask.transport.client import ClientPool
from bulltask.transport.cluster_slots import slot_of
from bulltask.transport.scripts.add import (
    IdempotentWrite,
    SendResult,
    add_job,
    add_jobs_once,
    register_as_sender,
    write_queue_meta,
)

__all__ = ["PROTOCOL_VERSION", "Producer", "SendTracer", "traced_flow", "wait_for_replicas"]

BULK: Final = 1_000
"""Maximum number of jobs in one round trip."""

BULK_BYTES: Final = 4_000_000
"""Maximum size of data and headers in one round trip, unless a single job is larger: a thousand large jobs would exceed
a call's timeout, and Redis' limit for a client's memory."""

PROTOCOL_VERSION: Final = "bullmq:5.62.0"
"""The value of a queue's ``meta.version``, which dashboards show."""

_REPLICATION_MS: Final = 1_000

_META_MS: Final = 600_000
"""How often a producer writes what it writes at the first send to a queue."""

R = TypeVar("R")
_Add = Callable[[Sequence[NewJob], int], Iterable[Call[R]]]

_Where = slice | list[int]
_EVERYWHERE: Final = slice(None)
_queue: Callable[[NewJob], str] = attrgetter("queue")
_RETRYABLE: Final = (BrokerUnavailableError, BrokerNotReadyError)


class SendTracer(Protocol):
    """Traces sends: a send takes place in the context, and sends the jobs that the context returns."""

    def sending(self, jobs: Sequence[NewJob], *, is_flow: bool = False) -> AbstractContextManager[Sequence[NewJob]]:
        """Return the context of a send of ``jobs``, or of a flow that consists of them."""
        ...


class Producer:
    """Adds jobs. A send that is retried because the connection broke adds no job twice.

    A send whose reply was lost is retried: bulltask creates the job ids, and the add scripts return the id of an
    existing job without adding it again. (With ids from Redis' counter, 10 lost replies in 30 sends led to 40 jobs.)

    Attributes:
        tracer: Traces the sends of all apps in this process; ``None`` if they are not traced.
    """

    tracer: ClassVar[SendTracer | None] = None

    def __init__(
        self,
        pool: ClientPool,
        async_client: Callable[[], AnyAsyncClient],
        keys: Callable[[str], QueueKeys],
        clock: ServerClock,
        config: Config,
        *,
        is_cluster: bool = False,
    ) -> None:
        self._pool = pool
        self._async_client = async_client
        self._keys = keys
        self._clock = clock
        self._config = config
        self._is_cluster = is_cluster
        self._queues_with_meta: set[str] = set()
        self._meta_due_ms = 0

    def send(self, jobs: Sequence[NewJob]) -> list[str]:
        """Add ``jobs`` in order, up to :data:`BULK` per round trip, and return the ids under which they are stored.

        If deduplication finds an existing job, its id is returned instead of the given job's.

        Raises:
            ConfigError: In a Redis Cluster, a job's parent is in another slot. Nothing was sent.
            BrokerError: A round trip failed after all retries, or at its deadline. Jobs of earlier round trips are
                stored; it is unknown whether the jobs of the failed one are. Sending the same jobs again is safe.
        """
        if self.tracer is None:
            return self._send(jobs, self._add)
        with self.tracer.sending(jobs) as traced:
            return self._send(traced, self._add)

    def send_once(self, jobs: Sequence[NewJob], write: IdempotentWrite) -> list[SendResult]:
        """Add the jobs that ``write`` has not added before. Returns a result for each of ``jobs``.

        A round trip whose reply was lost is retried; its jobs are then reported as duplicates.
        """

        def add(part: Sequence[NewJob], now_ms: int) -> Iterator[Call[list[SendResult]]]:
            for queue, group in groupby(part, key=_queue):
                yield from add_jobs_once(self._keys(queue), list(group), now_ms, write)

        return list(chain.from_iterable(self._send(jobs, add)))

    async def asend(self, jobs: Sequence[NewJob]) -> list[str]:
        """:meth:`send` for asyncio."""
        if self.tracer is None:
            return await self._asend(jobs)
        with self.tracer.sending(jobs) as traced:
            return await self._asend(traced)

    async def _asend(self, jobs: Sequence[NewJob]) -> list[str]:
        ids: list[str] = []
        for part in self._parts(jobs):
            budget = RetryBudget(self._config, part)
            while True:
                client, deadline_ms = self._async_client(), budget.next_deadline_ms()
                try:
                    await client.connect(deadline_ms)
                    calls, where = self._request(part, self._add(part, self._clock.now_ms()))
                    ids += self._results(part, await client.run_many(list(calls), deadline_ms), where)
                    break
                except _RETRYABLE as exc:
                    await loop_timers.sleep(budget.pause_ms(exc) / 1000)
        return ids

    def _send(self, jobs: Sequence[NewJob], add: _Add[R]) -> list[R]:
        sent: list[R] = []
        for part in self._parts(jobs):
            budget = RetryBudget(self._config, part)
            while True:
                try:
                    with self._pool.client(budget.next_deadline_ms()) as client:
                        client.connect()  # connecting sets the clock, whose time the calls contain
                        calls, where = self._request(part, add(part, self._clock.now_ms()))
                        sent += self._results(part, client.run_many(calls), where)
                    break
                except _RETRYABLE as exc:
                    threading.Event().wait(budget.pause_ms(exc) / 1000)
        return sent

    def _add(self, part: Sequence[NewJob], now_ms: int) -> Iterable[Call[str]]:
        if len(part) == 1:
            return [add_job(self._keys(part[0].queue), part[0], now_ms)]
        return (add_job(self._keys(job.queue), job, now_ms) for job in part)  # Redis adds while the next one is built

    def _parts(self, jobs: Sequence[NewJob]) -> Sequence[Sequence[NewJob]]:
        """Divide jobs into round trips; raises ``ConfigError`` if a cluster cannot store a job's parent with it."""
        if self._is_cluster:
            from bulltask.transport.cluster import check_one_slot  # noqa: PLC0415 - only for a cluster

            for job in jobs:
                if job.parent is not None or job.options.canvas:
                    check_one_slot([(self._keys(job.queue), job)])
        return [jobs] if len(jobs) == 1 else split_jobs(jobs)

    def _request(self, part: Sequence[NewJob], adds: Iterable[Call[Any]]) -> tuple[Iterable[Call[Any]], _Where]:
        """Return all calls of a round trip, and where the results of ``adds`` are among theirs.

        The other calls write the metadata of queues that this producer has not sent to lately and register them, and
        wait for replicas.
        """
        meta: list[Call[Any]] = []
        if mono_ms() >= self._meta_due_ms:
            self._meta_due_ms = mono_ms() + _META_MS
            self._queues_with_meta.clear()
        new = [self._keys(queue) for queue in set(map(_queue, part)) - self._queues_with_meta]
        for keys in new:
            meta += write_queue_meta(keys, PROTOCOL_VERSION, self._config.max_events)
        if new and not self._is_cluster:  # there, the registry may be on a node that is not available
            meta.append(register_as_sender(new, self._clock.now_ms()))
        if not self._config.publish_replicas:
            return (chain(meta, adds), slice(len(meta), None)) if meta else (adds, _EVERYWHERE)
        # In a cluster, there is a wait after the calls of each slot, because each node has its own replicas.
        calls = [*meta, *adds]
        waits = (wait_for_replicas(self._config, self._keys(queue)) for queue in set(map(_queue, part)))
        wait_of = {self._slot(wait[0]): wait for wait in waits}
        slots = [self._slot(call) for call in calls]
        request: list[Call[Any]] = []
        positions = [0] * len(calls)
        for slot, members in groupby(sorted(range(len(calls)), key=slots.__getitem__), slots.__getitem__):
            for index in members:
                positions[index] = len(request)
                request.append(calls[index])
            request += wait_of[slot]
        return request, positions[len(meta) :]

    def _results(self, part: Sequence[NewJob], results: list[Any], where: _Where) -> list[Any]:
        """Record that the metadata was written; return the results of the calls that add jobs."""
        self._queues_with_meta.update(map(_queue, part))
        return results[where] if isinstance(where, slice) else [results[position] for position in where]

    def _slot(self, call: Call[Any]) -> int:
        return (slot_of([call]) if self._is_cluster else None) or 0


@contextmanager
def traced_flow(roots: Sequence[PlannedJob]) -> Iterator[None]:
    """Trace what adds the jobs of these trees, which receive the context of the trace, if sends are traced."""
    if Producer.tracer is None or not roots:
        yield
        return
    planned = list(in_order(roots))
    with Producer.tracer.sending([one.job for one in planned], is_flow=True) as jobs:
        for one, job in zip(planned, jobs, strict=True):
            one.job = job
        yield


def wait_for_replicas(config: Config, keys: QueueKeys) -> list[Call[Any]]:
    """Return the calls that wait until replicas have received what the server has written; ``[]`` for none.

    ``WAIT`` covers only what its connection has written. A send that is retried on another connection may find all jobs
    and write nothing, so another write comes first, to a queue in the same slot.

    The parser raises ``BrokerNotReadyError`` if too few replicas have received it. The jobs are stored on the server
    itself.
    """
    replicas = config.publish_replicas
    if not replicas:
        return []
    limit_ms = config.publish_timeout_ms or _REPLICATION_MS
    wait_ms = max(1, min(_REPLICATION_MS, config.command_timeout_ms // 2, limit_ms // 4))

    def parse_reply(reply: Any) -> None:
        if int(reply) < replicas:
            raise BrokerNotReadyError(
                f"only {int(reply)} of {replicas} replicas (broker_publish_replicas) have received the jobs within "
                f"{wait_ms} ms"
            )

    return [
        command("SET", keys.replicated, "", "PX", 1),
        command("WAIT", replicas, wait_ms, parse_reply=parse_reply),
    ]


def split_jobs(jobs: Sequence[NewJob]) -> list[list[NewJob]]:
    """Divide jobs into parts of at most :data:`BULK` jobs and :data:`BULK_BYTES`; a larger job is a part of its own."""
    parts: list[list[NewJob]] = []
    size = 0
    for job in jobs:
        job_size = len(job.data) + text_chars(job.options)
        if not parts or len(parts[-1]) == BULK or size + job_size > BULK_BYTES:
            parts.append([])
            size = 0
        parts[-1].append(job)
        size += job_size
    return parts


class RetryBudget:
    """The remaining attempts, and the remaining time, for a round trip that sends jobs."""

    def __init__(self, config: Config, jobs: Sequence[NewJob]) -> None:
        self._config = config
        self._jobs = jobs
        self._failed = 0
        self._never_connected = True
        self._limit_ms = config.publish_timeout_ms
        self._deadline_ms = None if self._limit_ms is None else mono_ms() + self._limit_ms

    def next_deadline_ms(self) -> int | None:
        """Return the deadline of the attempt that starts now (``mono_ms``), ``None`` for no limit.

        If more attempts may follow, the deadline is after half of the remaining time, because on a half-open connection
        only the next attempt, with a new connection, reaches Redis.
        """
        if self._deadline_ms is None or self._failed == self._config.publish_retries:
            return self._deadline_ms
        remaining_ms = self._limit_ms if not self._failed and self._limit_ms else self._deadline_ms - mono_ms()
        return self._deadline_ms - remaining_ms // 2

    def pause_ms(self, exc: BrokerError) -> int:
        """Return how long to wait after a failed attempt, or raise its error if no attempt, or no time, is left."""
        self._never_connected &= isinstance(exc, BrokerUnavailableError) and exc.refused
        self._failed += 1
        config = self._config
        pause_ms = reconnect_delay_ms(
            self._failed, first_ms=config.reconnect_delay_ms, cap_ms=config.reconnect_delay_max_ms
        )
        remaining_ms = pause_ms * 2 if self._deadline_ms is None else self._deadline_ms - mono_ms()
        if self._failed > config.publish_retries or remaining_ms <= 0:
            self._give_up(exc)
        return min(pause_ms, remaining_ms // 2)

    def _give_up(self, exc: BrokerError) -> NoReturn:
        if self._never_connected:
            raise exc  # every connection was refused, so nothing was sent
        first, last = self._jobs[0], self._jobs[-1]
        jobs = f"job {first.id}" if first is last else f"{len(self._jobs)} jobs, {first.id} to {last.id},"
        stored = "it" if first is last else "some of them"
        raise type(exc)(
            f"{exc}. Gave up sending {jobs} after {self._failed} attempts; Redis may have stored {stored}. "
            "If you send again, use the same job_id, so that no job is added twice"
        ) from exc
