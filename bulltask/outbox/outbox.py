"""Outboxes: jobs are stored in the same transaction as the user's data, and sent after the commit.

Begin with :class:`OutboxBase`, which :mod:`bulltask.outbox.sqlalchemy` and :mod:`bulltask.outbox.django` extend. A row
contains the jobs of one call, as JSON (:class:`StoredCall`). Relays (:class:`Relay`) read committed rows through a
:class:`Store`, add their jobs to Redis (:class:`RowSender`), and delete them.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from typing import Any, Final, Protocol, cast

import structlog

from bulltask.app import App
from bulltask.jobs import clock as loop_timers
from bulltask.jobs.backoff import Backoff, reconnect_delay_ms
from bulltask.jobs.clock import Duration, mono_ms, to_ms, value_class
from bulltask.jobs.errors import (
    BrokerError,
    BulltaskError,
    ConfigError,
    DecodeError,
    JobNotFoundError,
    ResultTimeoutError,
)
from bulltask.jobs.fields import TimeLimits
from bulltask.jobs.job import JobOptions, JobRef, NewJob, ParentLink, PlannedJob, in_order, new_job_id
from bulltask.jobs.names import JobState
from bulltask.jobs.stored_job import Finished
from bulltask.queue.flows import add_flow_once
from bulltask.registry.canvas import Canvas, check_canvas, check_overrides_passed
from bulltask.registry.canvas_plan import CanvasPlan, plan_canvas
from bulltask.registry.protocols import OutboxRelay, ResultReader
from bulltask.registry.request import current_job, origin_of_jobs_sent_by, sent_by
from bulltask.registry.task import AnyTask
from bulltask.transport.call import command
from bulltask.transport.operation import run_sync
from bulltask.transport.produce import traced_flow
from bulltask.transport.scripts.add import IdempotentWrite

__all__ = [
    "TABLE",
    "VERSION",
    "Backlog",
    "NewRow",
    "OutboxBase",
    "Row",
    "Store",
    "StoredCall",
    "TransferOutcome",
    "check_task",
    "run_relays",
]

TABLE: Final = "bulltask_outbox"

VERSION: Final = 1
"""The version of the stored form: increment it if relays of the previous version cannot read a changed form. A relay
ignores rows of newer versions, which newer relays send."""


class OutboxBase:
    """An app's outbox in one database.

    Its subclasses insert rows in the user's transaction. A :class:`Store` gives relays access to them.
    """

    def __init__(self, app: App, store: Store, *, poll_interval: Duration, idempotency_ttl: Duration) -> None:
        self.app = app
        self._store = store
        poll_ms, ttl_ms = to_ms(poll_interval, "poll_interval"), to_ms(idempotency_ttl, "idempotency_ttl")
        if poll_ms < 1 or ttl_ms < 1:
            raise ConfigError("poll_interval and idempotency_ttl of an outbox must be 0.001 s or more")
        self._poll_s = poll_ms / 1000
        self._sender = RowSender(app, ttl_ms)
        app._outboxes.append(self)

    def backlog(self) -> Backlog:
        """Return how many rows are waiting, the age of the oldest, and how many rows have failed."""
        return self._store.backlog(self.app._now_ms())

    def run_relay(self, wait: Callable[[float], bool], logger: Any) -> None:
        """Send rows until ``wait`` returns true; call this in a separate thread."""
        self._relay(logger).run(wait)

    def after_fork(self) -> None:
        """Drop the database connections that this process has inherited."""
        self._store.after_fork()

    def _relay_all(self) -> int:
        relay, count = self._relay(structlog.get_logger("bulltask.outbox")), 0
        while (sent := relay.send_batch()).done or sent.failed:
            count += len(sent.done)
        return count

    def _relay(self, logger: Any) -> Relay:
        return Relay(self._store, self._sender, self._poll_s, self.app._now_ms, logger)

    def _write(self, call: Canvas[Any, Any], insert: Callable[[NewRow], object]) -> Any:
        """Insert the row of a call with ``insert``, and return the call's result handle."""
        plan, now_ms = self._plan(call), self.app._now_ms()

        def write(roots: Sequence[PlannedJob]) -> None:
            with traced_flow(roots):
                insert(_row(roots, now_ms))

        self.app._send_planned(plan.roots, write)
        return plan.result(self._results(), now_ms)

    async def _awrite(self, call: Canvas[Any, Any], insert: Callable[[NewRow], Awaitable[object]]) -> Any:
        """:meth:`_write` for asyncio."""
        plan, now_ms = self._plan(call), self.app._now_ms()

        async def write(roots: Sequence[PlannedJob]) -> None:
            with traced_flow(roots):
                await insert(_row(roots, now_ms))

        await self.app._asend_planned(plan.roots, write)
        return plan.result(self._results(), now_ms)

    def _plan(self, call: Canvas[Any, Any]) -> CanvasPlan:
        check_canvas(call)
        return plan_canvas(check_overrides_passed(call), self.app._config, origin_of_jobs_sent_by(current_job()))

    def _results(self) -> ResultReader:
        return cast("ResultReader", OutboxResults(self.app._results))


def check_task(task: object) -> None:
    """Check the task in ``outbox.delay(task, …)``.

    Raises:
        TypeError: It is not a task.
    """
    if not isinstance(task, AnyTask):
        raise TypeError(
            f"outbox.delay needs a task and its arguments, not {type(task).__qualname__}; outbox.send takes signatures "
            "such as task.s(…), and other canvases. Nothing was written"
        )


def _row(roots: Sequence[PlannedJob], now_ms: int) -> NewRow:
    call = StoredCall.from_jobs(roots, now_ms)
    if call.single is not None and (job := current_job()) is not None:
        (roots[0].job,) = sent_by(job, [call.single])
    return NewRow(VERSION, now_ms, call.encode())


@value_class
class NewRow:
    """A row to insert: the stored form of a call, its version, and the time of the call in epoch milliseconds."""

    version: int
    created_ms: int
    payload: str


@dataclass(frozen=True, slots=True)
class Row:
    """A row that is waiting to be sent: the stored form of a call, and a key that the database never uses again."""

    id: int
    payload: str


@value_class
class TransferOutcome:
    """The outcome of sending rows, by their keys.

    Attributes:
        done: Rows whose jobs Redis has stored. These rows are deleted.
        failed: Rows that can never be sent. These rows are kept, with their errors.
    """

    done: Sequence[int]
    failed: Mapping[int, str]


@value_class
class Backlog:
    """How many rows an outbox has.

    Attributes:
        waiting: The number of committed rows that are waiting to be sent.
        oldest_s: The age of the oldest of these rows in seconds, 0 if there are none.
        failed: The number of rows that can never be sent. The column ``error`` contains the reason.
        errors: The first of these rows, with their errors, by their ids.
        table: The name of the table.
    """

    waiting: int
    oldest_s: float
    failed: int
    errors: Mapping[str, str]
    table: str


ERRORS_SHOWN: Final = 3
"""How many failed rows a :class:`Backlog` has."""


class Store(Protocol):
    """The rows of one outbox. Methods raise the errors of the database library."""

    def send_waiting(self, limit: int, send: Callable[[Sequence[Row]], TransferOutcome]) -> TransferOutcome:
        """Read up to ``limit`` waiting rows in the order of their keys, send them, and delete them.

        If ``send`` raises, or the process is killed, the rows remain and are sent again. On PostgreSQL, the rows are
        locked while they are sent, and other relays skip them. On other databases, no transaction is open while they
        are sent; another relay may send the same rows, but this adds no job twice.
        """
        ...

    def backlog(self, now_ms: int) -> Backlog:
        """Count the rows; ``now_ms`` is this machine's time."""
        ...

    def after_fork(self) -> None:
        """Drop the connections that this process has inherited, without closing them for its parent."""
        ...

    def close(self) -> None:
        """Close the connections of the current thread; the next call opens others."""
        ...


_HOUR_MS: Final = 3_600_000
_DEFAULTS: Final = JobOptions()
_NOT_IN_JSON: Final = {"backoff": Backoff, "time_limits": TimeLimits}
"""Fields of the options that are objects, and their classes."""


@value_class
class StoredCall:
    """The jobs of one call: a single job, or the trees of a canvas.

    Times are absolute: ``countdown`` and ``expires`` count from the call, even if the jobs reach Redis later.
    ``write_id`` identifies the write to Redis, so that sending the row again adds nothing
    (:class:`bulltask.transport.scripts.add.IdempotentWrite`).
    """

    write_id: str
    roots: Sequence[PlannedJob]

    @classmethod
    def from_jobs(cls, roots: Sequence[PlannedJob], now_ms: int) -> StoredCall:
        """Return the call, which was made at ``now_ms``, with absolute times; the jobs are changed in place."""
        for planned in in_order(roots):
            planned.job = replace(planned.job, options=_with_absolute_times(planned.job.options, now_ms))
        call = cls("", roots)
        if call.single is not None and not call.single.has_custom_id:
            # A set of ids expires some time after its last job, so the jobs of each hour share a set.
            return cls(f"outbox-{now_ms // _HOUR_MS}", roots)
        # After its job has been removed, a job_id may be used again. The second call is then another write.
        return cls(f"outbox-{new_job_id()}", roots)

    @property
    def single(self) -> NewJob | None:
        """The job of a call that consists of one job; ``None`` for a canvas of several jobs."""
        first = self.roots[0]
        return None if len(self.roots) > 1 or first.children or first.dependents else first.job

    def encode(self) -> str:
        """Return the stored form."""
        every = list(in_order(self.roots))
        index = {planned: number for number, planned in enumerate(every)}
        jobs = [
            {
                **_encoded_job(planned.job),
                **({"chosen": True} if planned.has_custom_id else {}),
                **({"children": [index[child] for child in planned.children]} if planned.children else {}),
                **({"dependents": [index[one] for one in planned.dependents]} if planned.dependents else {}),
            }
            for planned in every
        ]
        stored = {"write": self.write_id, "roots": len(self.roots), "jobs": jobs}
        return json.dumps(stored, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> StoredCall:
        """Read the stored form.

        Raises:
            DecodeError: It was not written by an outbox of this version.
        """
        try:
            stored = json.loads(text)
            planned = [PlannedJob(_decoded_job(job), job.get("chosen", False)) for job in stored["jobs"]]
            for one, job in zip(planned, stored["jobs"], strict=True):
                one.children += [planned[index] for index in job.get("children", ())]
                one.dependents += [planned[index] for index in job.get("dependents", ())]
            return cls(stored["write"], planned[: stored["roots"]])
        except (LookupError, TypeError, ValueError, AttributeError, BulltaskError) as exc:
            raise DecodeError(f"the row was not written by an outbox of this version: {exc!r:.200}") from exc


def _with_absolute_times(options: JobOptions, now_ms: int) -> JobOptions:
    if options.delay_ms:
        options = replace(options, delay_ms=0, eta_ms=max(options.eta_ms or 0, now_ms + options.delay_ms))
    if options.expires_in_ms is not None:
        options = replace(options, expires_in_ms=None, expires_ms=now_ms + options.expires_in_ms)
    return options


def _encoded_job(job: NewJob) -> dict[str, Any]:
    stored: dict[str, Any] = {"queue": job.queue, "id": job.id, "name": job.name, "data": job.data.decode()}
    options = {
        field.name: asdict(value) if field.name in _NOT_IN_JSON and value is not None else value
        for field in fields(JobOptions)
        if (value := getattr(job.options, field.name)) != getattr(_DEFAULTS, field.name)
    }
    if options:
        stored["options"] = options
    if job.parent is not None:
        stored["parent"] = {"key": job.parent.key, "data": dict(job.parent.data)}
    for name in ("has_children", "timestamp_ms", "has_custom_id"):
        if value := getattr(job, name):
            stored[name] = value
    return stored


def _decoded_job(stored: Mapping[str, Any]) -> NewJob:
    options = dict(stored.get("options", {}))
    for name, class_ in _NOT_IN_JSON.items():
        if options.get(name) is not None:
            options[name] = class_(**options[name])
    parent = stored.get("parent")
    return NewJob(
        queue=stored["queue"],
        id=stored["id"],
        name=stored["name"],
        data=stored["data"].encode(),
        options=JobOptions(**options),
        parent=None if parent is None else ParentLink(parent["key"], parent["data"]),
        has_children=stored.get("has_children", False),
        timestamp_ms=stored.get("timestamp_ms"),
        has_custom_id=stored.get("has_custom_id", False),
    )


_BATCH: Final = 500
_FIRST_RETRY_MS: Final = 100
_MAX_RETRY_MS: Final = 10_000
_REPORT_MS: Final = 60_000
_STOP_S: Final = 5.0


class Relay:
    """Sends the rows of one outbox.

    It may be killed at any moment, and any number of relays may read the same table.
    """

    def __init__(self, store: Store, sender: RowSender, poll_s: float, now_ms: Callable[[], int], logger: Any) -> None:
        self._store = store
        self._sender = sender
        self._poll_s = poll_s
        self._now_ms = now_ms
        self._logger = logger
        self._failures = 0
        self._report_at_ms = mono_ms() + _REPORT_MS

    def run(self, wait: Callable[[float], bool]) -> None:
        """Send rows until ``wait`` returns true."""
        wait_s = 0.0
        while not wait(wait_s):
            wait_s = self._send_rows()
            self._report()
        self._close()

    def send_batch(self) -> TransferOutcome:
        """Send up to 500 rows, and log those that can never be sent."""
        sent = self._store.send_waiting(_BATCH, self._sender.send)
        for row_id, error in sent.failed.items():
            self._logger.error(
                "Outbox row failed", row=row_id, error=error, hint="To send it again, set the column error to NULL"
            )
        return sent

    def _send_rows(self) -> float:
        """Send a batch; return the seconds to wait before the next one."""
        try:
            if self._failures:
                self._sender.check()  # before the rows are locked, because it may take until all timeouts have passed
            sent = self.send_batch()
        except Exception as exc:  # noqa: BLE001 - a relay must survive outages of the database and Redis
            self._failures += 1
            wait_ms = reconnect_delay_ms(self._failures, first_ms=_FIRST_RETRY_MS, cap_ms=_MAX_RETRY_MS)
            delay = wait_ms / 1000
            self._logger.warning("Outbox rows could not be sent", error=_text(exc), attempt=self._failures, delay=delay)
            self._close()
            return delay
        if self._failures:
            self._logger.info("Outbox relay recovered", after_attempts=self._failures)
            self._failures = 0
        return 0.0 if len(sent.done) + len(sent.failed) == _BATCH else self._poll_s

    def _report(self) -> None:
        """Once a minute, log if a row has been waiting for more than a minute, or if rows have failed."""
        if mono_ms() < self._report_at_ms:
            return
        self._report_at_ms = mono_ms() + _REPORT_MS
        try:
            backlog: Backlog = self._store.backlog(self._now_ms())
        except Exception:  # noqa: BLE001 - the next attempt to send logs the error
            self._close()
            return
        if backlog.failed or backlog.oldest_s * 1000 > _REPORT_MS:
            self._logger.warning(
                "Outbox rows are waiting", rows=backlog.waiting, oldest_s=backlog.oldest_s, failed=backlog.failed
            )

    def _close(self) -> None:
        with suppress(Exception):  # a broken connection may refuse to be closed
            self._store.close()


def run_relays(outboxes: Sequence[OutboxRelay], until: Callable[[], object], logger: Any) -> None:
    """Run the relay of each outbox in a thread until ``until`` returns; call this in the main thread."""
    stopping = threading.Event()
    threads = [
        threading.Thread(target=outbox.run_relay, args=(stopping.wait, logger), name="outbox-relay", daemon=True)
        for outbox in outboxes
    ]
    for thread in threads:
        thread.start()
    until()
    stopping.set()
    deadline_ms = mono_ms() + int(_STOP_S * 1000)
    for thread in threads:
        thread.join(max(0, deadline_ms - mono_ms()) / 1000)


class RowSender:
    """Sends rows to an app's server.

    If a relay is killed after it has sent a row, but before it has deleted the row, another relay sends the row again.
    By then, the jobs may have run and been removed. Therefore, Redis remembers the ids of added jobs for ``ttl_ms``.
    """

    def __init__(self, app: App, ttl_ms: int) -> None:
        self._app = app
        self._ttl_ms = ttl_ms

    def check(self) -> None:
        """Raise ``BrokerError`` if Redis does not answer."""
        if self._app._broker.eager is None:
            self._app._broker.pool.run(command("PING"))

    def send(self, rows: Sequence[Row]) -> TransferOutcome:
        """Send rows in order; ``BrokerError``: some of them may have been sent."""
        calls, failed = _decode(rows)
        if self._app._broker.eager is not None:
            return self._send_each(calls, failed)
        try:
            self._send(list(calls.values()))
        except Exception as exc:
            if _affects_all_rows(exc):
                raise
            return self._send_each(calls, failed)
        return TransferOutcome(list(calls), failed)

    def _send_each(self, calls: dict[int, StoredCall], failed: dict[int, str]) -> TransferOutcome:
        """Send the rows one by one, because at least one of them was rejected."""
        done: list[int] = []
        rejected: BrokerError | None = None
        for row_id, call in calls.items():
            try:
                self._send([call])
                done.append(row_id)
            except Exception as exc:
                if _affects_all_rows(exc):
                    raise
                if isinstance(exc, BrokerError):
                    rejected = exc
                failed[row_id] = _text(exc)
        if rejected is not None and not done:
            raise rejected  # the server may be rejecting everything
        return TransferOutcome(done, failed)

    def _send(self, calls: Sequence[StoredCall]) -> None:
        broker = self._app._broker
        if broker.eager is not None:
            for call in calls:
                broker.eager.run(call.roots)
            return
        for write_id, group in groupby(calls, key=lambda call: call.write_id):
            same_write = list(group)
            if jobs := [job for call in same_write if (job := call.single) is not None]:
                broker.producer.send_once(jobs, IdempotentWrite(write_id, self._ttl_ms))
            else:
                with broker.pool.client() as client:
                    client.connect()  # sets the clock; the calls contain its time
                    run_sync(client, add_flow_once(same_write[0].roots, broker, write_id, self._ttl_ms))


def _decode(rows: Sequence[Row]) -> tuple[dict[int, StoredCall], dict[int, str]]:
    calls, failed = dict[int, StoredCall](), dict[int, str]()
    for row in rows:
        try:
            calls[row.id] = StoredCall.decode(row.payload)
        except DecodeError as exc:
            failed[row.id] = _text(exc)
    return calls, failed


def _affects_all_rows(exc: Exception) -> bool:
    """Whether other rows would also fail. A plain ``BrokerError`` is an error reply that may affect only one row."""
    return isinstance(exc, BrokerError) and type(exc) is not BrokerError


def _text(exc: Exception) -> str:
    return f"{type(exc).__name__}: {exc}"


_POLL_S: Final = 0.05


class OutboxResults:
    """A :class:`bulltask.registry.protocols.ResultReader` that also waits until a relay has sent the job."""

    def __init__(self, reader: ResultReader) -> None:
        self._reader = reader

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """Wait until the job has finished; ``ResultTimeoutError``: it was not sent, or did not finish, in time."""
        deadline_ms = None if timeout_ms is None else mono_ms() + timeout_ms
        while True:
            is_sent = self._reader.snapshot(ref).state is not JobState.UNKNOWN
            try:
                # An unknown job may have finished and been removed. Then the reader finds its event without waiting.
                return self._reader.wait(ref, _left(deadline_ms) if is_sent else 0, sent_ms)
            except (JobNotFoundError, ResultTimeoutError) as exc:
                _check(exc, deadline_ms, ref, is_sent=is_sent)
            threading.Event().wait(_POLL_S)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio."""
        deadline_ms = None if timeout_ms is None else mono_ms() + timeout_ms
        while True:
            is_sent = (await self._reader.asnapshot(ref)).state is not JobState.UNKNOWN
            try:
                return await self._reader.await_finished(ref, _left(deadline_ms) if is_sent else 0, sent_ms)
            except (JobNotFoundError, ResultTimeoutError) as exc:
                _check(exc, deadline_ms, ref, is_sent=is_sent)
            await loop_timers.sleep(_POLL_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def _left(deadline_ms: int | None) -> int | None:
    return None if deadline_ms is None else max(0, deadline_ms - mono_ms())


def _check(exc: Exception, deadline_ms: int | None, ref: JobRef, *, is_sent: bool) -> None:
    """Raise an error if there is nothing more to wait for."""
    if is_sent and isinstance(exc, ResultTimeoutError):
        raise exc
    if deadline_ms is not None and mono_ms() >= deadline_ms:
        raise ResultTimeoutError(
            f"job {ref.id} in queue {ref.queue} is not in Redis: no relay has sent it yet, its transaction was rolled "
            "back, or it has finished and was removed"
        ) from exc
