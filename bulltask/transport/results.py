"""Reads jobs, waits until they finish, and revokes them: :class:`Results`, behind ``AsyncResult``.

A waiter reads the job, then waits for its event on the queue's stream, and reads the job again from time to time,
because its event may have been trimmed. The asyncio waiters of a loop share one reader of the stream.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import compress
from typing import Final

from bulltask.config.config import Config
from bulltask.config.urls import SecretUrl
from bulltask.jobs import clock as loop_timers
from bulltask.jobs import codec
from bulltask.jobs.clock import mono_ms
from bulltask.jobs.errors import (
    RECOVERABLE,
    BrokerError,
    BrokerNotReadyError,
    BrokerUnavailableError,
    DecodeError,
    JobNotFoundError,
    LockMismatchError,
    ResultTimeoutError,
)
from bulltask.jobs.job import INCOMPATIBLE_FIELD, JobRef, RunningJob
from bulltask.jobs.names import FAN_OUT, JobState, Revocation
from bulltask.jobs.payloads import PayloadCodec
from bulltask.jobs.stored_job import Finished, StoredCall, StoredSnapshot
from bulltask.registry.protocols import warn_about_wait
from bulltask.transport.call import AnyAsyncClient, QueueKeys, SyncClient, command, saved_group, text
from bulltask.transport.client import ClientPool
from bulltask.transport.operation import Operation, execute, run_async, run_sync
from bulltask.transport.scripts import job as job_scripts
from bulltask.transport.scripts.add import add_deferred_duplicate
from bulltask.transport.scripts.job import (
    finished_state,
    get_state,
    is_finished,
    job_fields,
    read_fields,
    remove_job,
    snapshot,
)
from bulltask.transport.scripts.move import (
    FetchOptions,
    fail_malformed,
    malformed_finish,
    move_to_finished,
    with_dependents,
)
from bulltask.transport.scripts.queue import ClientRow, list_clients, worker_queues
from bulltask.transport.streams import LONGEST_BLOCK_MS, entries_since, last_id, read_blocking

__all__ = ["FAILOVER_MS", "RECHECK_MS", "Results", "revoke"]


FAILOVER_MS: Final = 60_000
"""How long a waiter tolerates an outage if another server can take over; Sentinel's default settings need 30 s."""

RECHECK_MS: Final = LONGEST_BLOCK_MS
"""Interval at which a waiter reads the job itself, because its event may have been trimmed before it was read."""

_CALL_FIELDS: Final = ("name", "data", "finishedOn")
_CLOCK_MARGIN_MS: Final = 2_000
_REFS_PER_ROUND_TRIP: Final = 1_000
_RETRY_MS: Final = 200
_SHORTEST_EXPLAINED_MS: Final = 500
_DESCRIBE_S: Final = 2.0
_OUTAGE: Final = (BrokerUnavailableError, BrokerNotReadyError)


class Results:
    """Reads jobs, waits until they finish, and revokes them; a :class:`~bulltask.registry.protocols.ResultReader`.

    Args:
        pool: Clients for short calls.
        waiters: Clients whose calls may block for :data:`RECHECK_MS`.
        async_client: Returns the running loop's client for short calls.
        watcher: Returns the running loop's watcher for a queue.
        keys: Returns a queue's keys by its name in the app.
        revocation: Returns the operation that revokes a job, and cancels its attempt if the second argument is true.

    Attributes:
        payloads: Reads results and exceptions from their stored form; the broker sets it.
        outage_timeout_ms: How long a waiter tolerates an outage (:class:`_OutageTolerance`).
        url: The server's URL without its password, for messages.
    """

    payloads: PayloadCodec
    outage_timeout_ms: int | None = None
    url = ""

    def __init__(
        self,
        pool: ClientPool,
        waiters: ClientPool,
        async_client: Callable[[], AnyAsyncClient],
        watcher: Callable[[str], StreamWatcher],
        keys: Callable[[str], QueueKeys],
        revocation: Callable[[JobRef, bool], Operation[Revocation]],
    ) -> None:
        self._pool = pool
        self._waiters = waiters
        self._async_client = async_client
        self._watcher = watcher
        self._keys = keys
        self._revocation = revocation

    def snapshot(self, ref: JobRef) -> StoredSnapshot:
        """Read the job's current state, in one round trip."""
        keys = self._keys(ref.queue)
        state, fields = self._pool.run_many([get_state(keys, ref.id), read_fields(keys, ref.id)])
        return snapshot(state, fields)

    async def asnapshot(self, ref: JobRef) -> StoredSnapshot:
        """:meth:`snapshot` for asyncio."""
        keys = self._keys(ref.queue)
        state, fields = await self._async_client().run_many([get_state(keys, ref.id), read_fields(keys, ref.id)])
        return snapshot(state, fields)

    def call(self, ref: JobRef) -> StoredCall | None:
        """Read the job's name and arguments, and when it finished."""
        return StoredCall.from_fields(*self._pool.run(job_fields(self._keys(ref.queue), ref.id, _CALL_FIELDS)))

    def finished_states(self, refs: Sequence[JobRef]) -> list[JobState | None]:
        """Return how the jobs finished, as in :meth:`bulltask.registry.protocols.ResultReader.finished_states`."""
        states: list[JobState | None] = []
        for start in range(0, len(refs), _REFS_PER_ROUND_TRIP):
            part = refs[start : start + _REFS_PER_ROUND_TRIP]
            states += self._pool.run_many([finished_state(self._keys(ref.queue), ref.id) for ref in part])
        return states

    def queue_of(self, job_id: str, queues: Sequence[str]) -> str | None:
        """Return the first of the queues that has a job with this id."""
        calls = [command("EXISTS", self._keys(queue).job(job_id), parse_reply=bool) for queue in queues]
        return next(compress(queues, self._pool.run_many(calls)), None)

    def forget(self, ref: JobRef) -> None:
        """Remove the job, but not its child jobs."""
        _check_removed(ref, self._pool.run(remove_job(self._keys(ref.queue), ref.id, children=False)))

    async def aforget(self, ref: JobRef) -> None:
        """:meth:`forget` for asyncio."""
        _check_removed(ref, await self._async_client().run(remove_job(self._keys(ref.queue), ref.id, children=False)))

    def save_group(self, queue: str, group_id: str, members: str, keep_ms: int | None) -> None:
        """Store the references of a group's members; see :meth:`ResultReader.save_group`."""
        key, expiry = saved_group(self._keys(queue).prefix, group_id), () if keep_ms is None else ("PX", keep_ms)
        self._pool.run(command("SET", key, members, *expiry))

    def load_group(self, queue: str, group_id: str) -> str | None:
        """Read what :meth:`save_group` stored."""
        key = saved_group(self._keys(queue).prefix, group_id)
        return self._pool.run(command("GET", key, parse_reply=lambda reply: None if reply is None else text(reply)))

    def forget_group(self, queue: str, group_id: str) -> None:
        """Remove what :meth:`save_group` stored."""
        self._pool.run(command("DEL", saved_group(self._keys(queue).prefix, group_id)))

    def revoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        """Fail the job if it is not running; otherwise, with ``terminate``, request that its worker cancel it."""
        with self._pool.client() as client:
            client.connect()  # connecting sets the clock, whose time the calls contain
            return run_sync(client, self._revocation(ref, terminate))

    async def arevoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        """:meth:`revoke` for asyncio."""
        client = self._async_client()
        await client.connect()
        return await run_async(client, self._revocation(ref, terminate))

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """Wait until the job has finished; arguments and errors as in :meth:`ResultReader.wait`."""
        keys, deadline_ms = self._keys(ref.queue), _deadline(timeout_ms)
        tolerance, replied = _OutageTolerance(self.outage_timeout_ms), False
        with self._waiters.client() as client:
            while True:
                try:
                    # The end of the stream is read before the state, so later events come after the cursor.
                    cursor, finished = self._read_end(client, keys, ref, sent_ms)
                    tolerance.record_success()
                    finished = finished or self._read_until(client, keys, ref, cursor, deadline_ms)
                    replied = True
                except _OUTAGE as exc:
                    finished, replied = None, False
                    threading.Event().wait(tolerance.pause_ms(exc) / 1000)
                if finished is not None:
                    return finished
                if deadline_ms is not None and mono_ms() >= deadline_ms:
                    raise _timed_out(ref, timeout_ms, self._describe(ref) if replied and _explains(timeout_ms) else "")

    def _describe(self, ref: JobRef) -> str:
        with suppress(BrokerError):
            return run_sync(self._pool, describe_unfinished(self._keys(ref.queue), ref.id, self.url))
        return ""

    async def _adescribe(self, ref: JobRef) -> str:
        with suppress(BrokerError, TimeoutError):
            async with loop_timers.timeout(_DESCRIBE_S):
                operation = describe_unfinished(self._keys(ref.queue), ref.id, self.url)
                return await run_async(self._async_client(), operation)
        return ""

    def _read_end(
        self, client: SyncClient, keys: QueueKeys, ref: JobRef, sent_ms: int | None
    ) -> tuple[str, Finished | None]:
        try:
            cursor, finished = client.run_many([last_id(keys), is_finished(keys, ref.id)])
        except JobNotFoundError:
            since = _since(sent_ms)
            if since is None:
                raise
            for _, fields in client.run(entries_since(keys, since)):
                if (finished := _finished_in(fields, ref.id)) is not None:
                    return since, finished
            raise
        return cursor, finished

    def _read_until(
        self, client: SyncClient, keys: QueueKeys, ref: JobRef, cursor: str, deadline_ms: int | None
    ) -> Finished | None:
        warn_about_wait(ref)
        recheck_ms = mono_ms() + RECHECK_MS
        until_ms = recheck_ms if deadline_ms is None else min(recheck_ms, deadline_ms)
        while (left_ms := until_ms - mono_ms()) > 0:
            for entry_id, fields in client.run(read_blocking(keys, cursor, left_ms)):
                cursor = entry_id
                if (finished := _finished_in(fields, ref.id)) is not None:
                    return finished
        return None

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio; the waiters of one event loop share one reader for each queue."""
        if timeout_ms == 0:  # read without waiting; asyncio's timeout would cancel the read before it starts
            finished = await self._aread_outcome(self._keys(ref.queue), ref, sent_ms)
            if finished is None:
                raise _timed_out(ref, timeout_ms, "")
            return finished
        try:
            async with (
                loop_timers.timeout(None if timeout_ms is None else timeout_ms / 1000),
                self._watcher(ref.queue).on(ref.id) as future,
            ):
                return await self._wait_for_outcome(future, ref, sent_ms)
        except TimeoutError:
            raise _timed_out(ref, timeout_ms, await self._adescribe(ref) if _explains(timeout_ms) else "") from None

    async def _wait_for_outcome(self, future: asyncio.Future[Finished], ref: JobRef, sent_ms: int | None) -> Finished:
        keys, tolerance = self._keys(ref.queue), _OutageTolerance(self.outage_timeout_ms)
        while True:
            pause_ms = RECHECK_MS
            try:
                finished = await self._aread_outcome(keys, ref, sent_ms)
                tolerance.record_success()
            except _OUTAGE as exc:
                finished, pause_ms = None, tolerance.pause_ms(exc)
            if finished is None:
                with suppress(TimeoutError):
                    async with loop_timers.timeout(pause_ms / 1000):
                        finished = await asyncio.shield(future)
            if finished is not None:
                return finished

    async def _aread_outcome(self, keys: QueueKeys, ref: JobRef, sent_ms: int | None) -> Finished | None:
        client = self._async_client()
        try:
            return await client.run(is_finished(keys, ref.id))
        except JobNotFoundError:
            since = _since(sent_ms)
            for _, fields in await client.run(entries_since(keys, since)) if since else ():
                if (finished := _finished_in(fields, ref.id)) is not None:
                    return finished
            raise


class _OutageTolerance:
    """Decides how long a waiter tolerates an outage: ``outage_timeout_ms``.

    By default, an outage before the first read is an error. A later one is tolerated for at least five seconds: the
    next read is due after :data:`RECHECK_MS`, and may be retried for as long.
    """

    def __init__(self, outage_timeout_ms: int | None = None) -> None:
        self._outage_timeout_ms = outage_timeout_ms
        self._until_ms = 0 if outage_timeout_ms is None else mono_ms() + outage_timeout_ms

    def record_success(self) -> None:
        """Record that Redis replied."""
        self._until_ms = mono_ms() + (self._outage_timeout_ms or 2 * RECHECK_MS)

    def pause_ms(self, exc: BrokerError) -> int:
        """Return how long to wait before the next read, or raise ``exc``."""
        if mono_ms() >= self._until_ms:
            raise exc
        return _RETRY_MS


class StreamWatcher:
    """Notifies an event loop's tasks when a queue's jobs finish, with one reader for all of them."""

    def __init__(self, keys: QueueKeys, client: AnyAsyncClient) -> None:
        self._keys = keys
        self._client = client
        self._waiting: dict[str, set[asyncio.Future[Finished]]] = {}
        self._reader: asyncio.Task[None] | None = None
        self._started: asyncio.Event = asyncio.Event()
        self._changing = asyncio.Lock()

    def on(self, job_id: str) -> _Registration:
        """Return a context manager with a future for the job's outcome; enter it before reading the job's state."""
        return _Registration(self, job_id)

    async def enter(self, job_id: str) -> asyncio.Future[Finished]:
        """Register a waiter, and wait until the reader has reached the end of the stream."""
        future: asyncio.Future[Finished] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(job_id, set()).add(future)
        try:
            async with self._changing:
                if self._reader is None or self._reader.done():
                    self._started.clear()
                    self._reader = asyncio.create_task(self._read(), name=f"bulltask-events-{self._keys.queue}")
                await self._started.wait()
        except BaseException:  # cancelled: the registration would keep the reader running
            await self.leave(job_id, future)
            raise
        return future

    async def leave(self, job_id: str, future: asyncio.Future[Finished]) -> None:
        """Remove a waiter; the last one stops the reader and closes its connection."""
        future.cancel()
        waiters = self._waiting.get(job_id, set())
        waiters.discard(future)
        if not waiters:
            self._waiting.pop(job_id, None)
        async with self._changing:  # a new waiter must not receive the client while it is being closed
            if not self._waiting and self._reader is not None:
                reader = self._reader
                self._reader = None
                reader.cancel()
                with suppress(asyncio.CancelledError):
                    await reader
                await self._client.close()

    async def _read(self) -> None:
        cursor = ""
        while True:
            try:
                cursor = cursor or await self._client.run(last_id(self._keys))
                self._started.set()
                for entry_id, fields in await self._client.run(read_blocking(self._keys, cursor, RECHECK_MS)):
                    cursor = entry_id
                    self._notify(fields)
            except BrokerError:
                # Waiters read the job itself every few seconds, which raises the same error in their task.
                self._started.set()
                await loop_timers.sleep(_RETRY_MS / 1000)

    def _notify(self, fields: dict[bytes, bytes]) -> None:
        job_id = codec.decode_text(fields.get(b"jobId"))
        for future in self._waiting.get(job_id, ()):
            finished = _finished_in(fields, job_id)
            if finished is not None and not future.done():
                future.set_result(finished)


class _Registration:
    def __init__(self, watcher: StreamWatcher, job_id: str) -> None:
        self._watcher = watcher
        self._job_id = job_id

    async def __aenter__(self) -> asyncio.Future[Finished]:
        self._future = await self._watcher.enter(self._job_id)
        return self._future

    async def __aexit__(self, *exc_info: object) -> None:
        await self._watcher.leave(self._job_id, self._future)


def _finished_in(fields: dict[bytes, bytes], job_id: str) -> Finished | None:
    if codec.decode_text(fields.get(b"jobId")) != job_id:
        return None
    match fields.get(b"event"):
        case b"completed":
            return Finished(True, codec.decode_text(fields.get(b"returnvalue")))
        case b"failed":
            return Finished(False, codec.decode_text(fields.get(b"failedReason")))
        case _:
            return None


def _since(sent_ms: int | None) -> str | None:
    return None if sent_ms is None else f"{max(0, sent_ms - _CLOCK_MARGIN_MS)}-0"


def _deadline(timeout_ms: int | None) -> int | None:
    return None if timeout_ms is None else mono_ms() + timeout_ms


def _check_removed(ref: JobRef, removed: bool) -> None:
    if not removed:
        raise LockMismatchError(ref.id, ref.queue, "The job is active and cannot be removed.")


def _explains(timeout_ms: int | None) -> bool:
    """Return whether an error says why the job has not finished; not if the caller is polling."""
    return timeout_ms is not None and timeout_ms >= _SHORTEST_EXPLAINED_MS


def _timed_out(ref: JobRef, timeout_ms: int | None, why: str) -> ResultTimeoutError:
    return ResultTimeoutError(
        f"job {ref.id} in queue {ref.queue} did not finish within {(timeout_ms or 0) / 1000:g} s"
        f"{f': {why}' if why else ''}. The job is not affected, and you can call get() again"
    )


_LOCK_OWNER: Final = "revoked"  # the token of a lock that is held for one step


def revoke(
    keys: QueueKeys, job_id: str, config: Config, now_ms: Callable[[], int], *, terminate: bool
) -> Operation[Revocation]:
    """Fail a job that is not running; with ``terminate``, request that the worker of a running job cancel it.

    ``now_ms`` returns the server's time; it is called once there is a connection.
    """
    job = yield from _read(keys, job_id)
    try:
        revocation = yield from execute(job_scripts.revoke(keys, job, config, now_ms(), terminate=terminate))
    except BrokerError as exc:
        if isinstance(exc, RECOVERABLE) or not (yield from _fail_malformed(keys, job, config, now_ms(), exc)):
            raise
        return Revocation.REVOKED
    if revocation is Revocation.REVOKED and job.deduplication_id:
        # BullMQ 5.72 and newer may defer a duplicate until this job has finished.
        yield from execute(add_deferred_duplicate(keys, job.deduplication_id, job_id, now_ms()))
    return revocation


def _fail_malformed(keys: QueueKeys, job: RunningJob, config: Config, now_ms: int, exc: BrokerError) -> Operation[bool]:
    """Fail a job that made the script fail with an error, if the job's hash is malformed."""
    options = FetchOptions.from_config(config, keys, _LOCK_OWNER, "")
    failure = malformed_finish(str(exc), job.keep("removeOnFail", config.keep_failed))
    finish = move_to_finished(keys, job.id, options, failure, fetch_next=False, now_ms=now_ms)
    finish = with_dependents(keys, job, finish, None, now_ms)
    return (yield from execute(fail_malformed(keys, finish, _LOCK_OWNER, only_malformed=True)))


def _read(keys: QueueKeys, job_id: str) -> Operation[RunningJob]:
    """Read what is needed to revoke a job: its options, and which jobs follow a fan-out job."""
    name, opts = yield from execute(job_scripts.job_fields(keys, job_id, ("name", "opts")))
    fields = [b"opts", opts or b"{}", b"name", name or b""]
    if name == FAN_OUT.encode():
        (data,) = yield from execute(job_scripts.job_fields(keys, job_id, ("data",)))
        fields += [b"data", data or b"null"]
    try:
        return RunningJob.from_hash(keys.queue, job_id, fields)
    except DecodeError as exc:  # a job that cannot be read can still be revoked
        return RunningJob.placeholder(keys.queue, job_id, str(exc))


_FIELDS: Final = ("name", "failedReason", "pb", "atm", INCOMPATIBLE_FIELD)
_MAX_TEXT: Final = 300
_MAX_QUEUES: Final = 5


def describe_unfinished(keys: QueueKeys, job_id: str, url: str) -> Operation[str]:
    """Return what the job is waiting for, and on which server; ``""`` if it has finished in the meantime."""
    state, fields, is_paused = yield [
        get_state(keys, job_id),
        job_fields(keys, job_id, _FIELDS),
        command("HEXISTS", keys.meta, "paused"),
    ]
    name, reason, worker, attempts, incompatible = (codec.decode_text(value)[:_MAX_TEXT] for value in fields)
    if state.finished or state is JobState.UNKNOWN:
        return ""
    match state:
        case JobState.ACTIVE:
            why = f" on worker {worker}" if worker else ""
        case JobState.WAITING_CHILDREN:
            why = ": its child jobs have not finished"
        case _ if incompatible.startswith(f"{attempts or 0}:"):
            why = f", because no worker could run it: {reason}"
        case _ if reason:
            why = f", because an attempt failed: {reason}"
        case _ if is_paused:
            why = ", because the queue is paused"
        case _:
            why = yield from _workers(keys, url)
    return f"its task is {name!r}, and it is {state}{why}"


def _workers(keys: QueueKeys, url: str) -> Operation[str]:
    """Return how many workers the queue has; ``""`` if the server does not say."""
    own = keys.client_name()
    try:
        rows: list[ClientRow] = yield from execute(list_clients(own, f"{own}:w:", database=SecretUrl(url).database))
        others: set[str] = set() if rows else (yield from execute(worker_queues(keys.prefix)))
    except BrokerError:  # CLIENT LIST is forbidden
        return ""
    if rows:
        return f"; workers that are connected to this queue: {len(rows)}"
    served = f", only to {_names(sorted(others))}" if others else ""
    return (
        f", because no worker is connected to this queue at {url}{served}. Start one with `bulltask worker -A APP -Q "
        f"{keys.queue}`, with the same broker_url"
    )


def _names(queues: Sequence[str]) -> str:
    shown = ", ".join(name.strip("{}") for name in queues[:_MAX_QUEUES])
    return shown if len(queues) <= _MAX_QUEUES else f"{shown} and {len(queues) - _MAX_QUEUES} other queues"
