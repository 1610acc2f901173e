"""Acquires jobs: chooses the queue, reserves a slot, calls Redis, and adopts the job in the reply.

Begin with :class:`JobFetcher`. :class:`RoundRobin` is the order of the queues; :class:`MarkerWait` waits for a marker
while they are empty, and fetches the job in the same wake-up.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final

from bulltask.config.config import Config
from bulltask.config.parsers import TaskRate
from bulltask.jobs.clock import ServerClock, mono_ms
from bulltask.jobs.codec import MAX_SAFE_INTEGER
from bulltask.jobs.errors import BrokerError, BrokerUnavailableError, BulltaskError, Interrupt, JobError
from bulltask.jobs.job import RunningJob
from bulltask.observe.bus import Bus
from bulltask.observe.counters import MetricsBlock
from bulltask.observe.events import JobThrottled
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, Fetched, FetchedJob, NoJob, QueueKeys, SyncClient, command, text
from bulltask.transport.cluster_slots import slot_of_key
from bulltask.transport.scripts.move import (
    FetchOptions,
    collect_batch,
    fetch_ahead,
    fetch_now,
    find_by_token,
    move_from_active_to_wait,
    move_to_active,
    release_unstarted,
    renew_lock,
    start_or_throttle,
)
from bulltask.worker.broker_backoff import (
    CRASHES_FIELD,
    MalformedJobHandler,
    QueueBackoff,
    ReconnectBackoff,
    max_concurrent,
)
from bulltask.worker.outcomes import AcquiredJob
from bulltask.worker.slots import ControlPage, Slot, SlotPool, SlotState, WakeupPipe

if TYPE_CHECKING:
    from bulltask.transport.cluster import HashSlotWaits

__all__ = [
    "FetchOptionsCache",
    "JobFetcher",
    "RoundRobin",
]


class FetchOptionsCache(dict[tuple[QueueKeys, str], FetchOptions]):
    """The fetch options of each queue and slot, by the queue's keys and the slot's token: they are always the same."""

    def __init__(self, config: Config, worker_id: str) -> None:
        super().__init__()
        self._config = config
        self._worker_id = worker_id

    def __missing__(self, key: tuple[QueueKeys, str]) -> FetchOptions:
        keys, token = key
        self[key] = FetchOptions.from_config(self._config, keys, token, self._worker_id)
        return self[key]


_NEVER_MS: Final = 2**62
_BUSY_SHARE: Final = 10

EMPTY_POLL_MS: Final = 100
"""Interval at which an empty queue is polled while other queues are busy."""
POLLED_BY_WORKER: Final = 300
"""How many queues without a marker the idle children of a worker poll together in five seconds: each poll executes
about ten commands in Redis. If a worker has more queues, their turns take longer."""
_PERIOD_MS: Final = 5_000
MAX_LIMIT_MS: Final = 5_000
"""Maximum time until a rate-limited queue is polled again, as often as an empty one: the limit may be removed early."""


class RoundRobin:
    """The order in which queues are polled, and when an empty one is polled again.

    A child polls all queues at once only if they are few. If they are many, it polls those whose marker it has, those
    whose delayed job is due, and the others a few at a time, in turn: a queue without a marker has a job only if a
    marker was lost.

    Attributes:
        polled: The indexes of the queues that were opened at the start, or by the last :meth:`reopen`.
        cancelled: The indexes of the queues from which no jobs are fetched at the moment (:meth:`cancel`).
    """

    def __init__(self, queues: Sequence[QueueKeys], clock: ServerClock, at_once: int | None = None) -> None:
        self.queues = queues
        self._clock = clock
        self._turn = 0
        self.cancelled: frozenset[int] = frozenset()
        self._closed_until_ms = [0] * len(queues)
        self._limited_until_ms = [0] * len(queues)
        self._due_at_ms = [0] * len(queues)
        self._at_once = at_once or len(queues)
        self._are_many = len(queues) > self._at_once
        self._open: set[int] = set()
        self.polled: Sequence[int] = range(len(queues))
        self._opened_ms = 0
        self._next_opened = 0
        self._next_poll_ms = 0
        if self._are_many:
            self._closed_until_ms = [_NEVER_MS] * len(queues)
            self._next_opened = random.randrange(len(queues))  # noqa: S311 - so that not all children poll the same queues
            self.polled = self._open_next(self._at_once)

    def candidates(self) -> Iterator[int]:
        """Yield the indexes of queues that may have a job, in the order of their turns."""
        now_ms, turn = mono_ms(), self._turn
        if not self._are_many:
            for step in range(len(self.queues)):
                index = (turn + step) % len(self.queues)
                if self._closed_until_ms[index] <= now_ms:
                    yield index
            return
        if now_ms >= self._next_poll_ms:  # not only while the child waits: it may be busy with other queues
            self._next_poll_ms = now_ms + EMPTY_POLL_MS
            self._open_due()
            self._open_next(max(1, self._at_once // _BUSY_SHARE))
        for index in sorted(self._open, key=lambda index: (index - turn) % len(self.queues)):
            if self._closed_until_ms[index] <= now_ms:
                yield index

    def acquired_from(self, index: int) -> None:
        """Record that a job from this queue was acquired, so it is the next queue's turn."""
        self._turn = (index + 1) % len(self.queues)

    def after(self, index: int) -> int:
        """Return the queue to fetch from after a job of queue ``index``; ``index`` if no other queue may have a job."""
        if len(self.queues) == 1:
            return index
        self.acquired_from(index)
        following = next(self.candidates(), index)
        if following in self.cancelled:
            return next(other for other in range(len(self.queues)) if other not in self.cancelled)
        return following

    def may_stay(self, index: int) -> bool:
        """Whether the next fetch may be from the same queue: it has no limit now, and no other queue may have a job.

        The event loop's thread calls this; it changes nothing.
        """
        now_ms = mono_ms()
        if self._limited_until_ms[index] > now_ms:
            return False
        # tuple(), because the main thread changes the set
        others: Iterable[int] = tuple(self._open) if self._are_many else range(len(self.queues))
        if self._are_many and now_ms >= self._next_poll_ms:
            return False
        return all(other == index or self._closed_until_ms[other] > now_ms for other in others)

    def record_empty(self, index: int, no_job: NoJob) -> None:
        """Record that the queue had no job, and when to poll it again."""
        self._closed_until_ms[index] = _NEVER_MS if self._are_many else mono_ms() + EMPTY_POLL_MS
        self._open.discard(index)
        self._due_at_ms[index] = no_job.due_ms
        self.rate_limited(index, no_job.limited_ms)
        if index in self.cancelled:
            self._skip_cancelled(index)

    def rate_limited(self, index: int, limit_ms: int) -> None:
        """Record that the queue is rate-limited for ``limit_ms``; the event loop's thread calls this too."""
        # At most MAX_LIMIT_MS: a limit may be removed early, and only a fetch promotes delayed jobs.
        self._close(index, min(limit_ms, MAX_LIMIT_MS))

    def record_error(self, index: int, pause_ms: int) -> None:
        """Record that Redis returned an error reply to a fetch: do not poll the queue for ``pause_ms``."""
        self._close(index, pause_ms)
        self._due_at_ms[index] = 0  # a due time in the past would end every wait immediately

    def is_skipped(self, index: int) -> bool:
        """Whether the queue is not polled at the moment: it is rate-limited, or in a backoff after an error."""
        return self._limited_until_ms[index] > mono_ms() and index not in self.cancelled

    def cancel(self, queues: Collection[str]) -> None:
        """Fetch no jobs from these queues, and from all others again; at least one queue is not among them."""
        before = self.cancelled
        self.cancelled = frozenset(index for index, keys in enumerate(self.queues) if keys.queue in queues)
        for index in before - self.cancelled:
            self._limited_until_ms[index] = 0
            self._reopen(index)
        for index in self.cancelled:
            self._skip_cancelled(index)

    def _skip_cancelled(self, index: int) -> None:
        self._closed_until_ms[index] = self._limited_until_ms[index] = _NEVER_MS
        self._due_at_ms[index] = 0
        self._open.discard(index)

    def record_marker(self, index: int, score_ms: float) -> None:
        """Record the queue's marker: a job is waiting now, or one is due at ``score_ms`` (server time)."""
        if score_ms <= self._clock.now_ms():
            self._reopen(index)
            if self._are_many:
                self._turn = index
        else:
            self._due_at_ms[index] = int(min(score_ms, MAX_SAFE_INTEGER))  # a client may store any delay

    def reopen(self, also: Iterable[int] = ()) -> None:
        """Poll the queues again, because only a fetch promotes delayed jobs and replaces a lost marker.

        Of many queues, poll those whose turn it is, and ``also`` these.
        """
        if not self._are_many:
            self._closed_until_ms = [until if until > mono_ms() else 0 for until in self._limited_until_ms]
            return
        # A wait may end early, when a delayed job is due.
        elapsed_ms = min(mono_ms() - self._opened_ms, _PERIOD_MS)
        self._open_due()
        self.polled = self._open_next(max(1, self._at_once * elapsed_ms // _PERIOD_MS))
        for index in also:
            self._reopen(index)

    def _open_next(self, count: int) -> Sequence[int]:
        self._opened_ms = mono_ms()
        indexes = [(self._next_opened + step) % len(self.queues) for step in range(count)]
        self._next_opened = (self._next_opened + count) % len(self.queues)
        for index in indexes:
            self._reopen(index)
        return indexes

    def _open_due(self) -> None:
        server_ms = self._clock.now_ms()
        for index, due_ms in enumerate(self._due_at_ms):
            if 0 < due_ms <= server_ms:
                self._reopen(index)

    def _reopen(self, index: int) -> None:
        if index in self.cancelled:
            return
        self._closed_until_ms[index] = self._limited_until_ms[index]
        self._open.add(index)

    def waitable(self) -> list[int]:
        """Return the queues whose markers to wait for: those that are neither rate-limited nor in a backoff."""
        now_ms = mono_ms()
        return [index for index, until in enumerate(self._limited_until_ms) if until <= now_ms]

    def wait_ms(self, max_ms: int) -> int:
        """Return how long to wait for a marker: until a delayed job is due or a limit ends, at most ``max_ms``."""
        now_ms, server_ms = mono_ms(), self._clock.now_ms()
        waits = [due - server_ms for due in self._due_at_ms if due]
        waits += [until - now_ms for until in self._limited_until_ms if until > now_ms]
        return max(1, min([max_ms, *waits]))

    def _close(self, index: int, pause_ms: int) -> None:
        until_ms = mono_ms() + pause_ms
        self._limited_until_ms[index] = max(self._limited_until_ms[index], until_ms)
        self._closed_until_ms[index] = max(self._closed_until_ms[index], until_ms)
        if pause_ms > 0 and self._are_many:
            self._reopen(index)  # when the pause has ended


_CONCURRENCY_POLL_MS: Final = 1_000
"""Polling interval of a queue with global concurrency, because no marker is added when another worker's job ends."""
_CONCURRENCY_CHECK_MS: Final = 5_000
"""Interval at which a child checks whether a queue has global concurrency."""

_LATE_MS: Final = 120
"""By how much later than its timeout an idle Redis ends a wait: it looks ten times a second."""

_Marker = tuple[int, float]
"""The queue's index, and the time from which there may be a job, in milliseconds."""


class WaitInterrupted(Interrupt):
    """A signal ended the wait for a marker."""


class MarkerWait:
    """Waits until one of the queues may have a job."""

    def __init__(
        self,
        broker: Broker,
        client: SyncClient,
        round_robin: RoundRobin,
        wakeup_pipe: WakeupPipe,
        may_acquire: Callable[[], bool],
        record_error: Callable[[int, BrokerError], None],
    ) -> None:
        self._client = client
        self._round_robin = round_robin
        self._wakeup_pipe = wakeup_pipe
        self._may_acquire = may_acquire
        self._drain_delay_ms = broker.config.drain_delay_ms
        self._record_error = record_error
        self._blocking_client = broker.blocking_client(self._drain_delay_ms)
        # In a cluster, the command has a key, so that it goes to the node that has the queue.
        is_cluster = broker.topology is not None
        self._ping_call: Call[Any] = command("EXISTS", round_robin.queues[0].probe) if is_cluster else command("PING")
        self._hash_slots = [slot_of_key(keys.base) for keys in round_robin.queues]
        self._hash_slot_waits = broker.hash_slot_waits(self._drain_delay_ms) if len(set(self._hash_slots)) > 1 else None
        self._queues = {keys.marker.encode(): index for index, keys in enumerate(round_robin.queues)}
        self._max_wait_ms = self._drain_delay_ms
        self._check_at_ms = 0
        self._concurrent: set[int] = set()
        self._is_waiting = False

    def wait(self, fetch: Call[Fetched] | None = None) -> Fetched | BulltaskError | None:
        """Wait until a queue may have a job, or a delayed job is due.

        Redis runs ``fetch`` at the end of the wait, on the same connection. Its result, or error, is returned;
        ``None`` if it was not made. A signal may end the wait (``WaitInterrupted``) when Redis has already run it.
        """
        waitable = self._round_robin.waitable()
        if mono_ms() >= self._check_at_ms:
            self._check_global_concurrency()
        wait_ms = self._round_robin.wait_ms(self._max_wait_ms)
        if not waitable:
            self._wakeup_pipe.wait(wait_ms)
            self._round_robin.reopen(self._concurrent)
            return None
        popped, fetched = self._pop_marker(waitable, wait_ms, fetch)
        if popped is None and self._may_acquire():
            # There was no marker, but only a fetch promotes delayed jobs and replaces a lost marker.
            self._round_robin.reopen(self._concurrent)
        return fetched

    def wait_for_marker(self, queues: Sequence[int], wait_ms: int) -> bool:
        """Wait for a marker of these queues; return whether this child has taken one. Raises as :meth:`wait` does."""
        return self._pop_marker(queues, wait_ms, None)[0] is not None

    def interrupt(self, *, anyway: bool = False) -> None:
        """End a wait if jobs must no longer be acquired, or ``anyway``; called by a signal handler."""
        if self._is_waiting and (anyway or not self._may_acquire()):
            self._is_waiting = False  # a second signal must not interrupt the handling of the first one
            raise WaitInterrupted

    def close(self) -> None:
        """Close the connections; they are opened again when needed."""
        self._blocking_client.close()
        if self._hash_slot_waits is not None:
            self._hash_slot_waits.close()

    def _pop_marker(
        self, queues: Sequence[int], wait_ms: int, fetch: Call[Fetched] | None
    ) -> tuple[_Marker | None, Fetched | BulltaskError | None]:
        fetched: Fetched | BulltaskError | None = None
        try:
            self._is_waiting = True
            if not self._may_acquire():
                return None, None
            # A PING lets Redis end a wait to the millisecond. Without a job that is due, it may be late.
            ping_ms = wait_ms + _LATE_MS if wait_ms == self._drain_delay_ms else wait_ms
            if self._hash_slot_waits is not None:
                popped = self._pop_in_hash_slots(self._hash_slot_waits, queues, wait_ms)
            elif fetch is None:
                popped = self._blocking_client.wait(self._pop_call(queues, wait_ms), ping_ms, self._ping)
            else:
                call = self._pop_call(queues, wait_ms)
                popped, fetched = self._blocking_client.wait_then(call, fetch, ping_ms, self._ping)
        finally:
            self._is_waiting = False
        if popped is not None:
            self._round_robin.record_marker(*popped)
        return popped, fetched

    def _pop_in_hash_slots(self, hash_slot_waits: HashSlotWaits, queues: Sequence[int], wait_ms: int) -> _Marker | None:
        """Pop a marker of queues that are in several slots of a cluster."""
        indexes: dict[int, list[int]] = {}
        for index in queues:
            indexes.setdefault(self._hash_slots[index], []).append(index)
        results = hash_slot_waits.wait({slot: self._pop_call(own, wait_ms) for slot, own in indexes.items()}, wait_ms)
        popped: list[_Marker] = []
        for slot, result in results.items():
            if isinstance(result, BrokerError):
                for index in indexes[slot]:
                    self._record_error(index, result)
            elif result is not None:
                popped.append(result)
        # The child takes one job, so other workers may need the other markers.
        if len(popped) > 1:
            markers = [self._round_robin.queues[index].marker for index, _ in popped[1:]]
            self._client.try_many([command("ZADD", marker, 0, "0") for marker in markers])
        return popped[0] if popped else None

    def _pop_call(self, queues: Sequence[int], wait_ms: int) -> Call[_Marker | None]:
        markers = [self._round_robin.queues[index].marker for index in queues]
        return command("BZPOPMIN", *markers, f"{wait_ms / 1000:.3f}", parse_reply=self._read_marker)

    def _ping(self) -> None:
        self._client.run(self._ping_call)

    def _check_global_concurrency(self) -> None:
        """Check which queues have global concurrency, because a fetch that returns no job does not say why."""
        indexes = {*self._round_robin.polled, *self._concurrent}
        metas = [self._round_robin.queues[index].meta for index in indexes]
        replies = self._client.try_many([command("HGET", meta, "concurrency") for meta in metas])
        self._concurrent = {index for index, limit in zip(indexes, replies, strict=True) if isinstance(limit, bytes)}
        drain_ms = self._drain_delay_ms
        self._max_wait_ms = min(drain_ms, _CONCURRENCY_POLL_MS) if self._concurrent else drain_ms
        self._check_at_ms = mono_ms() + _CONCURRENCY_CHECK_MS

    def _read_marker(self, reply: Any) -> _Marker | None:
        return None if reply is None else (self._queues[reply[0]], float(text(reply[2])))


_PAUSE_MS: Final = 60_000
_PERMIT_MS: Final = 100
"""With ``--max-jobs``, each fetch needs a permit. A child without one checks at this interval whether another child has
returned a permit."""


class JobFetcher:
    """Acquires jobs from the worker's queues.

    It has two connections: one for short calls, used only by the main thread, and one for blocking waits.

    Attributes:
        has_several_queues: Whether the next job may come from another queue.
        may_wait: Returns whether a job that the wait fetches could start.
        counts: Where fetches that a queue's rate limit has stopped are counted, if metrics are on.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - the parts of a child that it connects
        self,
        broker: Broker,
        queues: Sequence[str],
        bus: Bus,
        worker_id: str,
        wakeup_pipe: WakeupPipe,
        control: ControlPage,
        pool: SlotPool,
    ) -> None:
        self.pool = pool
        self.counts: MetricsBlock | None = None
        self._clock = broker.clock
        self._config = broker.config
        self._control = control
        self.bus = bus
        self._wakeup_pipe = wakeup_pipe
        self._fetch_options = FetchOptionsCache(broker.config, worker_id)
        self.client = broker.worker_client()
        self.backoff = ReconnectBackoff(bus, self._config)
        config = self._config
        children = config.children if config.autoscale is None else config.autoscale.maximum
        at_once = max(1, POLLED_BY_WORKER // children)
        keys = [broker.keys(queue) for queue in queues]
        self.round_robin = RoundRobin(keys, self._clock, at_once)
        self.has_several_queues = len(keys) > 1
        self._queue_backoff = QueueBackoff(self.round_robin.queues, bus, self._config)
        self._malformed = MalformedJobHandler(self._clock, self._config, bus)
        self._marker_wait = MarkerWait(
            broker, self.client, self.round_robin, wakeup_pipe, lambda: self.may_acquire, self._skip_queue
        )
        self.closing = self._stop_requested = False
        self.may_wait: Callable[[], bool] = lambda: True

    @property
    def may_acquire(self) -> bool:
        """False while this child is closing, the worker is paused, or there is no permit for another job."""
        return not (self.closing or self._control.paused or self._control.exhausted)

    @property
    def may_fetch_next(self) -> bool:
        """Whether the call that finishes a job may fetch the next one; not if each fetch needs a permit."""
        return not (self.closing or self._control.paused or self._control.has_permits)

    @property
    def stops_checkpointed_tasks(self) -> bool:
        """Whether checkpointed tasks should end between two items, because this child was asked to stop.

        A child that has acquired its last job (``worker_max_tasks_per_child``) is only closing, and finishes that job.
        """
        return (self._stop_requested or self._control.stopping) and not self._control.finishing

    @property
    def may_collect(self) -> bool:
        """Whether several jobs may be acquired: not if those of a call without a reply must be released first."""
        return self.may_acquire and not self.pool.without_reply

    def cancel_queues(self, queues: Collection[str]) -> None:
        """Acquire no jobs from these queues, only from the others, and end a wait; called by a signal handler."""
        cancelled = self.round_robin.cancelled
        self.round_robin.cancel(queues)
        if self.round_robin.cancelled != cancelled:
            self._marker_wait.interrupt(anyway=True)

    def close(self) -> None:
        """Acquire no more jobs, stop checkpointed tasks, and end a wait; called by a signal handler."""
        self.closing = self._stop_requested = True
        self.interrupt_wait()

    def interrupt_wait(self) -> None:
        """End a wait if jobs must no longer be acquired; called by a signal handler."""
        self._marker_wait.interrupt()

    def acquire(self, slot: Slot) -> AcquiredJob | None:
        """Wait for a job and acquire it into ``slot``.

        ``None``: the child is closing, or must not wait; the slot has then been given back.
        """
        while not self.closing:
            if not self.may_acquire:
                self._pause(slot)
                continue
            slot.enter(SlotState.RESERVED, mono_ms())
            try:
                self.client.connect()  # also sets the clock, which decides when delayed jobs are due
                self._release_jobs_without_reply()
                # Checked again, because the worker may have been paused while this child connected.
                acquired = self._poll(slot) if self.may_acquire else None
                self.backoff.reset()
                if acquired is not None:
                    return acquired
                self.pool.clear(slot)
                if not self.may_wait():
                    break
                if (acquired := self._wait(slot)) is not None:
                    return acquired
            except WaitInterrupted:
                self._end_wait()
            except BrokerError as exc:
                self.record_lost_call(exc, slot, 0)  # it affects all queues, so the index is not used
                self.back_off(exc)
        self.pool.give_back(slot)
        return None

    def _pause(self, slot: Slot) -> None:
        """Wait until jobs may be acquired, or close if the worker is stopping."""
        self.pool.clear(slot)
        if self._control.stopping:
            self.close()
        else:
            self._wakeup_pipe.wait(_PERMIT_MS if self._control.exhausted else _PAUSE_MS)  # a signal ends it

    def record_lost_call(self, exc: BrokerError, slot: Slot, index: int) -> None:
        """Record that the reply to a call for queue ``index`` was lost; the slot's token may lock a job."""
        if isinstance(exc, BrokerUnavailableError):
            self.record_lost_reply(slot, None if exc.node is None else index)
            if exc.node is None:
                # If one connection is half-open, the other may be, too, which would cost another timeout.
                self.disconnect()

    def record_failed_release(self, exc: BrokerError, slot: Slot, index: int) -> None:
        """Record that a job of queue ``index`` could not be released: unlike a fetch, after any error."""
        self.record_lost_reply(slot, index)
        self.record_lost_call(exc, slot, index)

    def record_lost_reply(self, slot: Slot, index: int | None = None) -> None:
        """Record that the slot's token may lock a job; it is released before the next job is acquired.

        Any queue may have the job if ``index`` is ``None``.
        """
        queues = range(len(self.round_robin.queues)) if index is None else (index,)
        self.pool.without_reply.setdefault(slot, set()).update(queues)

    def _release_jobs_without_reply(self) -> None:
        """Release the jobs that a fetch without a reply may have locked, except those of skipped queues."""
        without_reply = self.pool.without_reply
        for index in sorted(set[int]().union(*without_reply.values())):
            slots = [slot for slot, queues in without_reply.items() if index in queues]
            if not self.round_robin.is_skipped(index) and self._release_jobs_of(index, slots):
                for slot in slots:
                    without_reply[slot].discard(index)
                    if not without_reply[slot]:
                        del without_reply[slot]

    def _release_jobs_of(self, index: int, slots: list[Slot]) -> bool:
        """Release the jobs of one queue; return False if its node of a cluster is unavailable."""
        keys = self.round_robin.queues[index]
        try:
            for token, job_id in self.client.run(find_by_token(keys, [slot.token for slot in slots])):
                with suppress(JobError):  # the job has since finished, or was acquired by another worker
                    release = move_from_active_to_wait(keys, job_id, token)
                    self._malformed.release(self.client.run, keys, token, job_id, release)
        except BrokerError as exc:
            if not QueueBackoff.affects_queue(exc):
                raise
            self._skip_queue(index, exc)
            return exc.node is None  # the stalled check recovers the jobs of a broken queue
        return True

    def disconnect(self) -> None:
        """Close the connections; they are opened again when needed."""
        self.client.close()
        self._marker_wait.close()

    def release_fetched(self, index: int, slot: Slot, fetched: Fetched | BulltaskError) -> None:
        """Release the job that was fetched in the same round trip as an outcome that could not be written."""
        if isinstance(fetched, BrokerUnavailableError):
            self.record_lost_call(fetched, slot, index)
        elif isinstance(fetched, BrokerError):
            self.fail_malformed(index, slot, fetched)
        elif isinstance(fetched, FetchedJob):
            try:
                self.client.run(release_unstarted(self.round_robin.queues[index], fetched.job_id, slot.token))
            except BrokerError as exc:
                self.record_failed_release(exc, slot, index)

    def renew_lock(self, acquired: AcquiredJob) -> bool:
        """Renew or reacquire the lock of an acquired job. Returns False if the lock is lost."""
        return self.client.run(self._renew_call(acquired.keys, acquired.slot, acquired.job.id))

    def fail_malformed(self, index: int, slot: Slot, exc: BrokerError) -> bool:
        """Fail the job locked by a fetch from queue ``index`` that failed with ``exc``, if the job is malformed.

        If it was not, and another fetch would fail, too, the job is released, later if Redis becomes unavailable.
        """
        keys, was_malformed = self.round_robin.queues[index], False
        try:
            for token, job_id in self.client.run(find_by_token(keys, [slot.token])):
                if self._malformed.fail_if_malformed(self.client.run, keys, token, job_id, exc):
                    was_malformed = True
                else:
                    with suppress(JobError):
                        self.client.run(move_from_active_to_wait(keys, job_id, token))
        except BrokerError as error:
            self.record_failed_release(error, slot, index)
        return was_malformed

    def back_off(self, exc: BrokerError) -> None:
        """Wait before the next attempt after ``exc``."""
        self._wakeup_pipe.wait(self.backoff.record_failure(exc))

    def fetch_call(self, index: int, slot: Slot) -> Call[Fetched]:
        """Return the call that fetches the next job from queue ``index``."""
        keys = self.round_robin.queues[index]
        return move_to_active(keys, self._fetch_options[keys, slot.token], self._clock.now_ms())

    def fetch_many(self, index: int, slots: Sequence[Slot], task: str | None = None) -> list[Fetched]:
        """Fetch up to one job for each reserved slot: of one task, until a job of another one is next, or of any task.

        Jobs of any task are not fetched from a queue that has a limit for all workers. Jobs that a call may have
        acquired before it failed with a ``BrokerError`` are released later, or failed if they are malformed.
        """
        keys, now_ms = self.round_robin.queues[index], self._clock.now_ms()
        if index in self.round_robin.cancelled:
            return []
        options = [self._fetch_options[keys, slot.token] for slot in slots]
        try:
            if task is not None:
                return self.client.run(collect_batch(keys, options, task, now_ms))
            return [] if options[0].limiter is not None else self.client.run(fetch_ahead(keys, options, now_ms))
        except BrokerError as exc:
            for slot in slots:
                self.record_lost_call(exc, slot, index)
                if not isinstance(exc, BrokerUnavailableError):
                    self.fail_malformed(index, slot, exc)
            if exc.node is not None:
                self._skip_queue(index, exc)
            raise

    def acquire_many(
        self, index: int, count: int, task: str | None = None, state: SlotState = SlotState.ACTIVE
    ) -> list[AcquiredJob]:
        """Acquire up to ``count`` jobs, as :meth:`fetch_many` does; none after an error; the next fetch handles it."""
        slots = self.pool.take_reserved(count)
        replies: Sequence[Fetched] = ()
        if slots:
            with suppress(BrokerError):
                replies = self.fetch_many(index, slots, task)
        jobs: list[AcquiredJob] = []
        for slot, fetched in zip(slots, replies, strict=False):
            acquired = self.adopt(index, slot, fetched, state)
            if acquired is None:
                self.pool.give_back(slot)
            else:
                jobs.append(acquired)
        self.pool.give_back(*slots[len(replies) :])
        return jobs

    def release_unstarted(self, jobs: Sequence[AcquiredJob]) -> None:
        """Release jobs that have not started, the last one first, so that they keep their order."""
        jobs = jobs[::-1]
        errors: Sequence[object] = ()
        try:
            if jobs:
                errors = self.client.try_many([release_unstarted(job.keys, job.job.id, job.slot.token) for job in jobs])
        except BrokerError as exc:
            errors = [exc] * len(jobs)
        for job, error in zip(jobs, errors, strict=True):
            if isinstance(error, BrokerError):
                self.record_failed_release(error, job.slot, job.queue_index)

    def wait_for_queue(self, index: int, wait_ms: int) -> bool:
        """Wait for the marker of one queue; return whether this child has taken it."""
        try:
            return self._marker_wait.wait_for_marker([index], min(wait_ms, self._config.drain_delay_ms))
        except WaitInterrupted:
            return True  # the interrupted call may have taken it

    def adopt(
        self, index: int, slot: Slot, fetched: Fetched, state: SlotState = SlotState.ACTIVE
    ) -> AcquiredJob | None:
        """Return the job in a fetch's reply, and set its slot to ``state``; ``None`` if the queue had no job."""
        if isinstance(fetched, NoJob):
            if fetched.limited_ms and self.counts is not None:
                self.counts.add(self.round_robin.queues[index].queue, "queue_limited")
            self.round_robin.record_empty(index, fetched)
            return None
        keys, now_ms = self.round_robin.queues[index], mono_ms()
        if self.has_several_queues:
            self.round_robin.acquired_from(index)
        reserved_ms = slot.activate(index, fetched.job_id, now_ms, state)
        is_late = now_ms - reserved_ms > self._config.lock_ms // 2
        if is_late and not self._renew_late_lock(keys, slot, fetched.job_id):
            return None
        job = RunningJob.read(keys.queue, fetched.job_id, fetched.fields)
        limit = max_concurrent(fetched.fields, self._config.max_crashes) if CRASHES_FIELD in fetched.fields else 0
        return AcquiredJob(slot, index, keys, job, limit)

    def throttle_if_limited(self, acquired: AcquiredJob, rate: TaskRate) -> bool:
        """Delay an acquired job if its task has reached its rate limit, and give its slot back; False if it may start.

        While Redis is unavailable, the call is retried, and the supervisor renews the job's lock.
        """
        job, interrupted, delay_ms = acquired.job, False, None
        # An active job whose lock the call removes would be reported.
        acquired.slot.enter(SlotState.FINISHING, mono_ms())
        while True:
            call = start_or_throttle(acquired.keys, job, acquired.slot.token, rate, self._clock.now_ms())
            try:
                # After a lost reply, the job still has its lock unless that call has delayed it.
                delay_ms = None if interrupted and not self.renew_lock(acquired) else self.client.run(call)
                self.backoff.reset()
                break
            except BrokerError as exc:
                interrupted = True
                self.back_off(exc)
            except JobError:  # this process was suspended for longer than the lock lasts
                if interrupted:
                    break  # the stalled check recovers the job if no other worker has it
                interrupted = True
        if delay_ms:
            self.bus.emit(JobThrottled(job.id, job.queue, job.name, delay_ms))
        if delay_ms == 0:
            acquired.slot.enter(SlotState.ACTIVE, mono_ms())
        else:
            self.pool.give_back(acquired.slot)
        return delay_ms != 0

    def _renew_late_lock(self, keys: QueueKeys, slot: Slot, job_id: str) -> bool:
        """Renew or reacquire a lock after this process was suspended; False if another worker has the job."""
        try:
            return self.client.run(self._renew_call(keys, slot, job_id))
        except BrokerError:
            self.record_lost_reply(slot)  # released as soon as Redis is available
            return False

    def _renew_call(self, keys: QueueKeys, slot: Slot, job_id: str) -> Call[bool]:
        return renew_lock(keys, job_id, slot.token, self._config.lock_ms)

    def _poll(self, slot: Slot) -> AcquiredJob | None:
        if not self._control.has_permits:
            return self._poll_queues(slot)
        if not self._control.take_permit():
            return None
        acquired = None
        try:
            acquired = self._poll_queues(slot)
        finally:
            self._control.record_permit(used=acquired is not None)
        return acquired

    def _poll_queues(self, slot: Slot) -> AcquiredJob | None:
        for index in self.round_robin.candidates():
            if index in self.pool.without_reply.get(slot, ()):
                continue  # its token may already lock a job of this queue
            fetched = self._fetch(index, slot)
            if fetched is not None and (acquired := self.adopt(index, slot, fetched)) is not None:
                return acquired
        return None

    def _fetch(self, index: int, slot: Slot) -> Fetched | None:
        while not (self.closing or self._control.paused):
            try:
                fetched = self.client.run(self.fetch_call(index, slot))
            except BrokerError as exc:
                if not self._queue_backoff.affects_queue(exc):
                    raise
                self.record_lost_call(exc, slot, index)
                if exc.node is not None or not self.fail_malformed(index, slot, exc):
                    self._skip_queue(index, exc)
                    return None
            else:
                self._queue_backoff.reset(index)
                return fetched
        return None

    def _skip_queue(self, index: int, exc: BrokerError) -> None:
        """Do not poll a queue for a while, because Redis, or its node of a cluster, returned an error."""
        self.round_robin.record_error(index, self._queue_backoff.record_failure(index, exc))

    def _wait(self, slot: Slot) -> AcquiredJob | None:
        """Wait until a queue may have a job; return the job if the wait has fetched it, too."""
        slot.waiting = True
        try:
            acquired = self._wait_and_fetch(slot)
        finally:
            slot.waiting = False
        if self.may_acquire:
            return acquired
        self.restore_markers()
        if acquired is not None:  # the worker was paused or stopped meanwhile
            self.release_unstarted([acquired])
        return None

    def _wait_and_fetch(self, slot: Slot) -> AcquiredJob | None:
        # With several queues, it is not known in advance from which one to fetch.
        if self.has_several_queues or self._control.has_permits:
            self._marker_wait.wait()
            return None
        slot.enter(SlotState.RESERVED, mono_ms())
        keys = self.round_robin.queues[0]
        try:
            fetched = self._marker_wait.wait(fetch_now(keys, self._fetch_options[keys, slot.token]))
        except BaseException:
            self.record_lost_reply(slot)  # Redis may have run the fetch
            raise
        if isinstance(fetched, FetchedJob | NoJob):
            return self.adopt(0, slot, fetched)
        if isinstance(fetched, BrokerError):
            self.fail_malformed(0, slot, fetched)
        return None

    def _end_wait(self) -> None:
        """Undo what an interrupted wait may have done: it may have popped a marker, and acquired a job."""
        self.restore_markers()
        with suppress(BrokerError):  # released later, or by the supervisor when this child has exited
            self._release_jobs_without_reply()

    def restore_markers(self) -> None:
        """Add the markers again, because an interrupted wait may have popped one that another worker needs."""
        with suppress(BrokerError):  # other workers poll again within drain_delay
            self.client.run_many([command("ZADD", keys.marker, 0, "0") for keys in self.round_robin.queues])
