"""Process jobs on bulltask's side: with the code of its workers, or manually."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC
from types import SimpleNamespace
from typing import Any, Final, Literal, Protocol, cast
from unittest import mock

from bulltask import App
from bulltask.errors import NoPendingChildrenError, PermanentError
from bulltask.events import Bus
from bulltask.jobs import codec
from bulltask.jobs.job import RunningJob
from bulltask.queue import Job, Queue
from bulltask.queue.schedulers import add_next_iteration
from bulltask.transport.call import Call, Fetched, FetchedJob, NoJob, SyncClient
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.move import (
    FetchOptions,
    move_from_active_to_wait,
    move_to_active,
    move_to_delayed,
    move_to_waiting_children,
)
from bulltask.worker.finish import Finisher
from bulltask.worker.outcomes import AcquiredJob, CompletedOutcome, FailedOutcome, RetriedOutcome, decide_retry

__all__ = ["FORMS", "LOCK_MS", "WORKER", "ActiveJob", "Form", "ManualProcessor", "Processor", "WorkerProcessor"]

Form = Literal["worker", "sync", "async"]
FORMS: Final[tuple[Form, ...]] = ("worker", "sync", "async")
LOCK_MS: Final = 300_000
WORKER: Final = "w"

_KINDS: Final[dict[str, type[Exception]]] = {
    "ConnectionError": ConnectionError,
    "ValueError": ValueError,
    "PermanentError": PermanentError,
}
Failure = tuple[str, str, str]
"""Kind, message, traceback."""


@dataclass(frozen=True, slots=True)
class ActiveJob:
    """An acquired job; ``handle`` is the processor's object for it."""

    id: str
    token: str
    handle: Any


class Processor(Protocol):
    """Acquires and finishes jobs."""

    def acquire(self, token: str) -> ActiveJob | None: ...
    def complete(self, held: ActiveJob, token: str, value: Any, *, fetch_next: bool) -> ActiveJob | None: ...
    def fail(self, held: ActiveJob, token: str, failure: Failure, *, fetch_next: bool) -> ActiveJob | None: ...
    def delay(self, held: ActiveJob, token: str, ms: int) -> None: ...
    def release(self, held: ActiveJob, token: str) -> None: ...
    def await_children(self, held: ActiveJob, token: str) -> bool: ...
    def close(self) -> None: ...


class ManualProcessor:
    """Processes jobs manually, with a sync or an async queue."""

    def __init__(self, queue: Queue) -> None:
        self._queue = queue

    def acquire(self, token: str) -> ActiveJob | None:
        return self._held(self._queue.get_next_job(token, worker=WORKER))

    def complete(self, held: ActiveJob, token: str, value: Any, *, fetch_next: bool) -> ActiveJob | None:
        return self._held(held.handle.move_to_completed(value, token, fetch_next=fetch_next))

    def fail(self, held: ActiveJob, token: str, failure: Failure, *, fetch_next: bool) -> ActiveJob | None:
        kind, message, trace = failure
        with mock.patch("traceback.format_exception", return_value=[trace]):
            return self._held(held.handle.move_to_failed(_KINDS[kind](message), token, fetch_next=fetch_next))

    def delay(self, held: ActiveJob, token: str, ms: int) -> None:
        held.handle.move_to_delayed(ms / 1000, token)

    def release(self, held: ActiveJob, token: str) -> None:
        held.handle.move_to_wait(token)

    def await_children(self, held: ActiveJob, token: str) -> bool:
        return bool(held.handle.move_to_waiting_children(token))

    def close(self) -> None:
        pass

    def _held(self, job: Job | None) -> ActiveJob | None:
        return None if job is None else ActiveJob(job.id, job.token, job)


class WorkerProcessor:
    """Processes jobs with the code of a worker.

    Args:
        queue: The queue.
        client: The client that sends the calls.
        settings: The app's settings.
    """

    def __init__(self, queue: Queue, client: SyncClient, settings: dict[str, Any]) -> None:
        context = queue.context
        self._keys, self._clock, self._client = context.keys, context.broker.clock, client
        self._app = App("differential", context.broker.endpoint.url, **settings)
        self._finisher = Finisher(self._app.conf.freeze(), self._clock, Bus(), WORKER)

    def acquire(self, token: str) -> ActiveJob | None:
        claim = FetchOptions(token, LOCK_MS, WORKER)
        return self._held(self._client.run(move_to_active(self._keys, claim, self._clock.now_ms())), token)

    def complete(self, held: ActiveJob, token: str, value: Any, *, fetch_next: bool) -> ActiveJob | None:
        outcome = CompletedOutcome(codec.encode(value, what="value"), value)
        return self._finish(self._finisher.call(_with(held, token), outcome, fetch_next=fetch_next), token)

    def fail(self, held: ActiveJob, token: str, failure: Failure, *, fetch_next: bool) -> ActiveJob | None:
        kind, message, trace = failure
        acquired = _with(held, token)
        outcome = decide_retry(_KINDS[kind](message), acquired.job, None, self._app)
        assert isinstance(outcome, FailedOutcome | RetriedOutcome)
        return self._finish(self._finisher.call(acquired, replace(outcome, trace=trace), fetch_next=fetch_next), token)

    def delay(self, held: ActiveJob, token: str, ms: int) -> None:
        now_ms = self._clock.now_ms()
        self._client.run(move_to_delayed(self._keys, held.id, token, ms, failure=None, now_ms=now_ms))

    def release(self, held: ActiveJob, token: str) -> None:
        self._client.run(move_from_active_to_wait(self._keys, held.id, token))

    def await_children(self, held: ActiveJob, token: str) -> bool:
        try:
            self._client.run(move_to_waiting_children(self._keys, held.id, token, self._clock.now_ms()))
        except NoPendingChildrenError:
            return False
        return True

    def close(self) -> None:
        self._app.close()

    def _finish(self, call: tuple[Call[Any], bool], token: str) -> ActiveJob | None:
        reply = self._client.run(call[0])
        return self._held(reply, token) if isinstance(reply, FetchedJob) else None

    def _held(self, fetched: Fetched, token: str) -> ActiveJob | None:
        if isinstance(fetched, NoJob):
            return None
        job = RunningJob.from_hash(self._keys.queue, fetched.job_id, fetched.fields)
        if job.is_repeated:
            run_sync(self._client, add_next_iteration(self._keys, job, self._clock.now_ms(), UTC))
        acquired = AcquiredJob(cast(Any, SimpleNamespace(token=token)), 0, self._keys, job, 0)
        if job.deferred_failure:
            failed = FailedOutcome(job.deferred_failure, "", "permanent")
            return self._finish(self._finisher.call(acquired, failed, fetch_next=True), token)
        return ActiveJob(job.id, token, acquired)


def _with(held: ActiveJob, token: str) -> AcquiredJob:
    acquired: AcquiredJob = held.handle
    return replace(acquired, slot=cast(Any, SimpleNamespace(token=token)))
