"""Handles of jobs that were sent: ``AsyncResult`` of one, ``ResultSet`` of several, ``GroupResult`` of a group.

A handle reads and waits through a :class:`bulltask.registry.protocols.ResultReader`. A failed job's exception is
rebuilt from what its worker stored, without importing anything.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import json
import sys
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from datetime import datetime
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Generic, TypeVar, Unpack, cast, overload

from bulltask.jobs import codec, errors
from bulltask.jobs.clock import Duration, moment_of, mono_ms, to_ms
from bulltask.jobs.errors import (
    BrokerError,
    DecodeError,
    JobError,
    JobExpiredError,
    Reject,
    ResultTimeoutError,
    TaskError,
    TaskRejectedError,
    TaskRevokedError,
    warn_user,
)
from bulltask.jobs.fields import GROUP, arguments_for, class_in_trace, reason_of
from bulltask.jobs.job import JobRef, NewJob
from bulltask.jobs.names import REVOKED, JobState, Revocation, check_reference
from bulltask.jobs.stored_job import Finished, JobSnapshot, StoredSnapshot
from bulltask.registry.protocols import ResultReader, Sender, WaitOptions, allow_join_result
from bulltask.registry.request import current_sender

__all__ = [
    "AsyncResult",
    "GroupResult",
    "RemoteTraceback",
    "ResultSet",
    "allow_join_result",
    "result_of",
]


R = TypeVar("R")

_REJECT: Final = f"{Reject.__module__}.{Reject.__qualname__}"
_ERRORS: Final = Reject.__module__
"""The public module of bulltask's exceptions, which need not be imported."""
_MAX_KEY_LENGTH: Final = 200
_MAX_NESTING: Final = 4
"""How deep an exception's class may be nested in others."""
_AMBIGUOUS: Final = (BrokerError, JobError, DecodeError, ResultTimeoutError, StopIteration, StopAsyncIteration)
"""Not re-raised from ``get()``: callers would take them for errors of ``get()`` itself, or their loop would end."""


class RemoteTraceback(Exception):
    """The worker's traceback, set as the cause of an exception that ``AsyncResult.get()`` re-raises."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text.rstrip()}\n"


def _check_wait_options(given: WaitOptions) -> None:
    """Raise ``TypeError`` for an unknown option, and warn about one whose effect the caller may miss."""
    if unknown := given.keys() - WaitOptions.__annotations__.keys():
        raise TypeError(f"get() got an unexpected keyword argument {min(unknown)!r}")
    if given.get("on_message") is not None:
        warn_user(
            "get(on_message=…) has no effect, because results are not messages: read result.progress, or listen to the "
            "queue's events"
        )


class AsyncResult(Generic[R]):
    """A handle for a job: its state, result or exception.

    It works for every job in the queue, including jobs that Node sent or ran. ``get()`` waits for the queue's events,
    and also reads the job every 5 s, so that it does not hang if events were trimmed. Its methods raise ``BrokerError``
    if Redis cannot be reached.

    Args:
        job_id: The job's id.
        queue: The name of the job's queue in the app; default: see :meth:`bulltask.App.AsyncResult`.
        reader: Reads jobs and waits for them; default: that of ``app``.
        sent_ms: When this process sent the job (server time in epoch milliseconds); ``None`` if another process did.
        decode: Converts the JSON result to the task's return type; ``None``: the result is not converted.
        parent: The handle of the previous step, if this process sent the job as a step of a chain.
        app: The app; default: the current app, which is the app created last.

    Attributes:
        children: The handles of the callbacks and steps after this one, if this process sent them with the job.
    """

    def __init__(  # noqa: PLR0913 - handles are made by an app, except as AsyncResult(id)
        self,
        job_id: str,
        queue: str | None = None,
        reader: ResultReader | None = None,
        sent_ms: int | None = None,
        decode: Callable[[Any], R] | None = None,
        parent: Any = None,
        *,
        app: Any = None,
    ) -> None:
        if sent_ms is None:  # the id comes from elsewhere
            check_reference(job_id)
        if queue is None or reader is None:
            app = app or current_sender()
            queue, reader = queue or app._queue_of(job_id), reader or app._results
        self._ref = JobRef(queue, job_id)
        self._reader = reader
        self.parent = parent
        self.children: list[Any] = []
        if parent is not None:
            parent.children.append(self)
        self._sent_ms = sent_ms
        self._decode = decode
        self._ignored = self._waits_not = False

    @property
    def ignored(self) -> bool:
        """Whether the job was sent with ``ignore_result``, by this handle's call (Celery's ``ignored``).

        If you set it, :meth:`get` returns ``None`` without waiting.
        """
        return self._ignored

    @ignored.setter
    def ignored(self, value: bool) -> None:
        self._ignored = self._waits_not = value

    def _mark_ignored(self) -> None:
        """Record that the job was sent with ``ignore_result``; :meth:`get` still waits until it has finished."""
        self._ignored = True

    @property
    def id(self) -> str:
        """The job's id."""
        return self._ref.id

    @property
    def task_id(self) -> str:
        """The job's id, under Celery's name."""
        return self._ref.id

    @property
    def queue(self) -> str:
        """The name of the job's queue in the app."""
        return self._ref.queue

    def get(
        self,
        timeout: Duration | None = None,
        *,
        propagate: bool = True,
        disable_sync_subtasks: bool = True,
        **celery: Unpack[WaitOptions],
    ) -> R:
        """Wait for the job to finish and return the task's return value.

        If a task calls this method in a worker, bulltask warns once per task, because waiting may block the worker.

        Args:
            timeout: Seconds or ``timedelta``; ``None`` waits without a limit.
            propagate: Raise the exception of a failed task; otherwise, return it.
            disable_sync_subtasks: ``False`` turns off that warning, like :func:`allow_join_result`. (Celery raises an
                error instead of warning.)
            celery: Celery's other options, which have no effect.

        Raises:
            ResultTimeoutError: The job did not finish in time; it keeps running.
            JobNotFoundError: The job does not exist, and no event contains its outcome.
            DecodeError: The result does not match the type hint of the task's return value. Or this app does not accept
                its serializer, or has no key for it.
            TaskRevokedError: The job was revoked.
            Exception: The task failed. The task's exception is raised if it was pickled, or if its class is loaded in
                this process; its cause is the worker's traceback. Otherwise, ``TaskError`` is raised, with the
                traceback in its message.
        """
        _check_wait_options(celery)
        if self._waits_not:
            return cast(R, None)
        with nullcontext() if disable_sync_subtasks else allow_join_result():
            finished = self._reader.wait(self._ref, _timeout_ms(timeout), self._sent_ms)
        snapshot = None if finished.completed else self._reader.snapshot(self._ref)
        return self._outcome(finished, snapshot, propagate=propagate)

    async def aget(self, timeout: Duration | None = None, *, propagate: bool = True) -> R:  # noqa: ASYNC109 - as get()
        """:meth:`get` for asyncio. ``await result`` is the same without arguments."""
        finished = await self._reader.await_finished(self._ref, _timeout_ms(timeout), self._sent_ms)
        snapshot = None if finished.completed else await self._reader.asnapshot(self._ref)
        return self._outcome(finished, snapshot, propagate=propagate)

    wait = get

    def __await__(self) -> Generator[Any, None, R]:
        return self.aget().__await__()

    def revoke(self, *, terminate: bool = False) -> Revocation:
        """Revoke the job: it fails with the reason ``revoked``, and ``get()`` raises ``TaskRevokedError``.

        It is not retried. As for every failed job, events are emitted and the parent in a flow is notified. It is safe
        to call this method again.

        Args:
            terminate: Also cancel a running job: its worker raises an exception in the task, and kills the process if
                the task does not end. Without this, a running job continues.

        Returns:
            ``"revoked"``: the job has failed; ``"running"``: it is running and continues; ``"terminating"``: its worker
            will cancel it within about a second (``get()`` waits for that); ``"finished"``: it had already finished;
            ``"unknown"``: it does not exist.

        Raises:
            SchedulerJobError: The job is the next iteration of a job scheduler: remove the scheduler instead.
        """
        return self._reader.revoke(self._ref, terminate=terminate)

    async def arevoke(self, *, terminate: bool = False) -> Revocation:
        """:meth:`revoke` for asyncio."""
        return await self._reader.arevoke(self._ref, terminate=terminate)

    def forget(self) -> None:
        """Remove the job and its result from Redis (Celery's ``forget``).

        Raises:
            LockMismatchError: A worker is running the job.
            SchedulerJobError: The job is the next iteration of a job scheduler: remove the scheduler instead.
        """
        self._reader.forget(self._ref)

    async def aforget(self) -> None:
        """:meth:`forget` for asyncio."""
        await self._reader.aforget(self._ref)

    def collect(self, timeout: Duration | None = None) -> Iterator[tuple[Any, Any]]:
        """Iterate over the handles and results of this job and of all steps after it (Celery's ``collect``).

        The steps after it are known only to the process that sent the canvas: see :attr:`children`. The ``timeout`` is
        for each of them, as for :meth:`get`, whose errors are raised.
        """
        pending: list[Any] = [self]
        while pending:
            handle = pending.pop(0)
            yield handle, handle.get(timeout)
            pending += handle.children

    def as_tuple(self) -> list[Any]:
        """Return the ids of this job and of the steps before it, as Celery does: ``[[id, parent], None]``.

        It is the result of a task that returns this handle.
        """
        return [[self.id, None if self.parent is None else self.parent.as_tuple()], None]

    def snapshot(self) -> JobSnapshot:
        """Return the job's state, progress, result, failure reason and tracebacks, in one round trip.

        If the job has completed, it may raise ``DecodeError``, as :meth:`get` does.
        """
        return self._shown(self._reader.snapshot(self._ref))

    async def asnapshot(self) -> JobSnapshot:
        """:meth:`snapshot` for asyncio."""
        return self._shown(await self._reader.asnapshot(self._ref))

    @property
    def state(self) -> JobState:
        """The job's state, with BullMQ's names; ``JobState.UNKNOWN`` if the job does not exist.

        It also equals Celery's names, ``result.state == "SUCCESS"``: see :class:`bulltask.JobState`.
        """
        return self._reader.snapshot(self._ref).state

    @property
    def status(self) -> str:
        """The state with Celery's names: ``PENDING``, ``STARTED``, ``RETRY``, ``SUCCESS``, ``FAILURE``, ``REVOKED``.

        While the job runs, it is the state that its task has set with ``update_state``. A job that does not exist is
        ``PENDING``.
        """
        return self._reader.snapshot(self._ref).celery_state

    def ready(self) -> bool:
        """Return whether the job has completed or failed."""
        return self.state.finished

    def successful(self) -> bool:
        """Return whether the job has completed."""
        return self.state is JobState.COMPLETED

    def failed(self) -> bool:
        """Return whether the job has failed, without further retries; false if it was revoked or has expired.

        In Redis, such a job has failed, too: ``result.state`` is ``JobState.FAILED``.
        """
        return self.status == "FAILURE"

    @property
    def progress(self) -> codec.Json:
        """The last progress that the task reported with ``update_progress``, ``None`` before the first."""
        return self._reader.snapshot(self._ref).progress

    @property
    def info(self) -> Any:
        """The return value, the exception, or what the task has reported (Celery's ``info``).

        A completed job has the return value. A job that failed or waits for a retry has the exception. For any other
        job, it is the ``meta`` of ``update_state``, or the progress.
        """
        snapshot = self._reader.snapshot(self._ref)
        if snapshot.state is JobState.COMPLETED:
            return self._value(Finished(True, snapshot.returnvalue or "null"))
        if snapshot.state is JobState.FAILED or snapshot.waits_for_retry:
            return self._failure(snapshot.failed_reason, snapshot)
        return snapshot.progress if snapshot.reported is None else snapshot.reported[1]

    result = info
    """Celery's alias for :attr:`info`; :meth:`get` waits for the result."""

    @property
    def traceback(self) -> str | None:
        """The traceback of the last failed attempt, ``None`` if none was stored."""
        traces = self._reader.snapshot(self._ref).stacktrace
        return traces[-1] if traces else None

    @property
    def name(self) -> str | None:
        """The job's name, which is the task's."""
        call = self._reader.call(self._ref)
        return None if call is None else call.name

    @property
    def args(self) -> list[Any] | None:
        """The arguments that are stored without a name; usually empty, because jobs store arguments by name.

        An error if the data is malformed, or this app does not accept it or has no key for it.
        """
        arguments = self._arguments()
        return None if arguments is None else arguments[0]

    @property
    def kwargs(self) -> dict[str, Any] | None:
        """The stored arguments by parameter name, even if they were passed by position; errors as for :attr:`args`."""
        arguments = self._arguments()
        return None if arguments is None else arguments[1]

    @property
    def date_done(self) -> datetime | None:
        """When the job completed or failed, in UTC; ``None`` before."""
        call = self._reader.call(self._ref)
        return None if call is None else moment_of(call.finished_ms)

    def _arguments(self) -> tuple[list[Any], dict[str, Any]] | None:
        call = self._reader.call(self._ref)
        if call is None:
            return None
        data = self._reader.payloads.load_data(call.data, self._ref, call.name).value
        if isinstance(data, dict):
            return [], data
        return data if isinstance(data, list) else [] if data is None else [data], {}

    def _shown(self, stored: StoredSnapshot) -> JobSnapshot:
        is_completed = stored.state is JobState.COMPLETED
        return stored.with_value(self._value(Finished(True, stored.returnvalue or "null")) if is_completed else None)

    def _outcome(self, finished: Finished, snapshot: StoredSnapshot | None, *, propagate: bool) -> R:
        if snapshot is None:
            return self._value(finished)
        failure: Any = self._failure(finished.text, snapshot)
        if propagate:
            raise failure
        return cast(R, failure)

    def _value(self, finished: Finished) -> R:
        loaded = self._reader.payloads.load_result(self._ref, finished.text)
        value: R = loaded.value
        return value if self._decode is None or loaded.is_pickled else self._decode(value)

    def _failure(self, reason: str, snapshot: StoredSnapshot) -> Exception:
        trace = snapshot.stacktrace[-1] if snapshot.stacktrace else ""
        stored = self._reader.payloads.load_error(self._ref, snapshot.error) if snapshot.error else None
        args = arguments_for(reason, stored)
        original = _pickled(stored, snapshot) or self._group(args) or _rebuild(reason, trace, args)
        if original is None:
            kind = TaskRevokedError if reason == REVOKED else TaskError
            kind = TaskRejectedError if class_in_trace(reason, trace) == _REJECT else kind
            return kind(reason, job_id=self.id, remote_traceback=trace)
        if isinstance(original, JobExpiredError):
            original = JobExpiredError(reason, job_id=self.id, remote_traceback=trace)
        original.__cause__ = RemoteTraceback(trace)
        return original

    def _group(self, stored: Sequence[object], depth: int = _MAX_NESTING) -> ExceptionGroup[Exception] | None:
        """Rebuild an exception group, for ``except*``; ``None`` if something else was stored."""
        match stored:
            case [str(kind), str(message), [_, *_] as members] if kind == GROUP and depth:
                pass
            case _:
                return None
        exceptions: list[Exception] = []
        for member in members:
            match member:
                case [str(kind), str(reason), list(args)]:
                    group = self._group(member, depth - 1)
                    exc = group or _instance(_loaded_class(kind), reason, tuple(args) if kind != GROUP else ())
                    exceptions.append(exc or TaskError(reason, job_id=self.id, remote_traceback=""))
                case _:
                    return None
        return ExceptionGroup(message, exceptions) if exceptions else None

    def __repr__(self) -> str:
        return f"<AsyncResult {self.id} of queue {self.queue}>"

    def __eq__(self, other: object) -> bool:
        if isinstance(other, str):  # an id, as in Celery: `job_id in group_result.results`
            return other == self.id
        return isinstance(other, AsyncResult) and other._ref == self._ref

    def __hash__(self) -> int:
        return hash(self.id)


def _timeout_ms(timeout: Duration | None) -> int | None:
    return None if timeout is None else to_ms(timeout, "timeout")


def _pickled(stored: object, snapshot: StoredSnapshot) -> Exception | None:
    """Return the task's exception if it was pickled and belongs to the last failure."""
    if not isinstance(stored, Exception) or isinstance(stored, _AMBIGUOUS):
        return None
    return stored if reason_of(stored) == snapshot.failed_reason else None


def _rebuild(reason: str, trace: str, stored: tuple[object, ...] = ()) -> Exception | None:
    """Rebuild the task's exception from its traceback, message and stored arguments; ``None`` if that is not safe.

    Any client with access to Redis may have written them. Therefore, nothing is imported: the class must already be
    loaded, be an ``Exception``, and have exactly that name. None of its code runs except ``__str__``. (CVE-2021-23727:
    Celery called any name that it found.)
    """
    return _instance(_loaded_class(class_in_trace(reason, trace)), reason, stored)


def _instance(kind: type[Exception] | None, reason: str, stored: tuple[object, ...]) -> Exception | None:
    if kind is None:
        return None
    if stored and (exc := _without_init(kind, stored)) is not None:
        return exc
    candidates = [exc for args in _possible_args(kind, reason) if (exc := _without_init(kind, args)) is not None]
    exact = [exc for exc in candidates if str(exc) == reason or not exc.args]
    near = [exc for exc in candidates if reason in str(exc)]
    return next(iter(exact + near), None)


def _loaded_class(name: str) -> type[Exception] | None:
    parts = name.rsplit(".", _MAX_NESTING)
    for length in range(len(parts) - 1, -1, -1):  # the longest module name first
        path = ".".join(parts[:length]) or "builtins"
        module = errors if path == _ERRORS else sys.modules.get(path)
        if module is not None:
            cls = _class_in(module, parts[length:])
            return None if cls is None or issubclass(cls, _AMBIGUOUS) else cls
    return None


def _class_in(module: object, path: Sequence[str]) -> type[Exception] | None:
    """Return a module's class, which may be nested (Django's ``Order.DoesNotExist``), without access to attributes."""
    names: Mapping[str, object] = getattr(module, "__dict__", {})
    found: type = object
    for name in path:
        value = names.get(name)
        if not (isinstance(value, type) and value.__name__ == name):
            return None
        found, names = value, vars(value)
    return found if issubclass(found, Exception) else None


def _possible_args(kind: type[Exception], reason: str) -> Iterator[tuple[object, ...]]:
    if reason == kind.__name__:  # the worker writes this for an exception without a message
        yield ()
        return
    yield (reason,)
    if issubclass(kind, KeyError) and len(reason) < _MAX_KEY_LENGTH:  # its message is the repr of its argument
        with suppress(ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            yield (ast.literal_eval(reason),)


def _without_init(kind: type[Exception], args: tuple[object, ...]) -> Exception | None:
    # The nearest built-in __new__, because a class may define another.
    news = (vars(base).get("__new__") for base in kind.__mro__)
    new = next(new for new in news if isinstance(new, BuiltinMethodType))
    try:
        exc: Exception = new(kind, *args)
        exc.args = args
        str(exc)
    except Exception:  # noqa: BLE001 - it may need other arguments, or attributes that only its __init__ sets
        return None
    return exc


T = TypeVar("T")

_Member = AsyncResult[Any]

_POLL_MS: Final = 200
"""How long :meth:`ResultSet.iterate` waits for one member before it looks at all of them again."""


def result_of(
    sender: Sender, job: NewJob, job_id: str, decode: Callable[[Any], Any] | None, *, ignored: bool
) -> AsyncResult[Any]:
    """Return the handle of a job that was sent, and is stored under ``job_id``.

    Args:
        sender: The app.
        job: The job.
        job_id: Its id; after deduplication, that of the existing job.
        decode: Converts the result to the type of its hint.
        ignored: The task's option ``ignore_result``, which applies if the call has none.
    """
    result = AsyncResult(job_id, job.queue, sender._results, sender._now_ms(), decode)
    if ignored if job.options.ignore_result is None else job.options.ignore_result:
        result._mark_ignored()
    return result


class ResultSet(Generic[R]):
    """Several handles: waits for all of their jobs, and reads their states together (Celery's ``ResultSet``).

    The jobs may belong to different queues and apps.

    Args:
        results: The handles, in their order. Each may also be a result set, such as a group's; its result is then a
            list.
        app: Has no effect; for code written for Celery.

    Raises:
        TypeError: A member is a coroutine, such as ``task.adelay(1)`` without ``await``.
    """

    def __init__(self, results: Iterable[AsyncResult[R] | ResultSet[Any]] = (), app: Any = None) -> None:
        del app
        self.results: list[AsyncResult[R] | ResultSet[Any]] = [_checked(result) for result in results]

    def add(self, result: AsyncResult[R] | ResultSet[Any]) -> None:
        """Add a handle, unless it is already a member."""
        if result not in self.results:
            self.results.append(_checked(result))

    def update(self, results: Iterable[AsyncResult[R] | ResultSet[Any]]) -> None:
        """Add several handles, except those that are already members."""
        for result in results:
            self.add(result)

    def remove(self, result: AsyncResult[R] | ResultSet[Any] | str) -> None:
        """Remove a handle, or that of the job with this id; raises ``KeyError`` if it is not a member."""
        for index, member in enumerate(self.results):
            if member == result or (isinstance(result, str) and getattr(member, "id", None) == result):
                del self.results[index]
                return
        raise KeyError(result)

    def discard(self, result: AsyncResult[R] | ResultSet[Any] | str) -> None:
        """Like :meth:`remove`, but do nothing if it is not a member."""
        with suppress(KeyError):
            self.remove(result)

    def clear(self) -> None:
        """Remove all handles."""
        self.results.clear()

    def get(
        self,
        timeout: Duration | None = None,
        *,
        propagate: bool = True,
        disable_sync_subtasks: bool = True,
        **celery: Unpack[WaitOptions],
    ) -> list[R]:
        """Wait for all members, and return the list of their return values, in the members' order.

        Arguments and errors are as for :meth:`bulltask.result.AsyncResult.get`. The ``timeout`` is for all members. If
        members have failed, the exception of the first of them is raised; without ``propagate``, the list contains the
        exceptions.
        """
        deadline = _Deadline(timeout)
        _check_wait_options(celery)
        with nullcontext() if disable_sync_subtasks else allow_join_result():
            return [member.get(deadline.left(), propagate=propagate) for member in self.results]  # type: ignore[misc]

    join = join_native = get
    """Celery's names."""

    async def aget(self, timeout: Duration | None = None, *, propagate: bool = True) -> list[R]:  # noqa: ASYNC109 - as get()
        """:meth:`get` for asyncio. ``await result`` is the same without arguments."""
        try:
            async with asyncio.TaskGroup() as tasks:  # the members of an event loop share one reader for each queue
                waits = [tasks.create_task(member.aget(timeout, propagate=False)) for member in self.results]
        except ExceptionGroup as group:
            raise group.exceptions[0] from None  # one error, as from get()
        outcomes: list[Any] = [wait.result() for wait in waits]
        for outcome in outcomes:
            if propagate and isinstance(outcome, Exception):
                raise outcome
        return outcomes

    def __await__(self) -> Generator[Any, None, list[R]]:
        return self.aget().__await__()

    def iterate(self, timeout: Duration | None = None) -> Iterator[R]:
        """Iterate over the return values as members complete, or raise an exception; the timeout is for all of them."""
        deadline, pending = _Deadline(timeout), self._members()
        while pending:
            states = _finished_states(pending)
            for member, state in zip(pending, states, strict=True):
                if state is not None:
                    yield member.get()
            unfinished = [member for member, state in zip(pending, states, strict=True) if state is None]
            if unfinished and len(unfinished) == len(pending):
                _wait_briefly(unfinished[0], deadline)
            pending = unfinished

    async def __aiter__(self) -> AsyncIterator[R]:
        for wait in asyncio.as_completed([asyncio.ensure_future(member.aget()) for member in self._members()]):
            yield await wait

    def ready(self) -> bool:
        """Return whether all members have completed or failed."""
        return None not in self._states()

    def successful(self) -> bool:
        """Return whether all members have completed."""
        return self.completed_count() == len(self._members())

    def failed(self) -> bool:
        """Return whether a member has failed; see :meth:`bulltask.result.AsyncResult.failed`."""
        members = self._members()
        return any(
            member.failed()
            for member, state in zip(members, _finished_states(members), strict=True)
            if state is JobState.FAILED
        )

    def waiting(self) -> bool:
        """Return whether a member has not finished yet."""
        return not self.ready()

    def completed_count(self) -> int:
        """Return how many members have completed."""
        return self._states().count(JobState.COMPLETED)

    def revoke(self, *, terminate: bool = False) -> list[Revocation]:
        """Revoke all members; see :meth:`bulltask.result.AsyncResult.revoke`. Returns what happened to each."""
        return [member.revoke(terminate=terminate) for member in self._members()]

    async def arevoke(self, *, terminate: bool = False) -> list[Revocation]:
        """:meth:`revoke` for asyncio."""
        return list(await asyncio.gather(*(member.arevoke(terminate=terminate) for member in self._members())))

    def forget(self) -> None:
        """Remove all members and their results from Redis; see :meth:`bulltask.result.AsyncResult.forget`."""
        for member in self._members():
            member.forget()

    async def aforget(self) -> None:
        """:meth:`forget` for asyncio."""
        await asyncio.gather(*(member.aforget() for member in self._members()))

    def _states(self) -> list[JobState | None]:
        return _finished_states(self._members())

    def _members(self) -> list[_Member]:
        """Return the handles of all jobs whose results are items of the list, or of a list in it."""
        found: list[_Member] = []
        for member in self.results:
            found += member._members() if isinstance(member, ResultSet) else [member]  # noqa: SLF001 - this class
        return found

    def __len__(self) -> int:
        return len(self.results)

    def __iter__(self) -> Iterator[AsyncResult[R] | ResultSet[Any]]:
        return iter(self.results)

    @overload
    def __getitem__(self, index: int) -> AsyncResult[R]: ...
    @overload
    def __getitem__(self, index: slice) -> list[AsyncResult[R]]: ...

    def __getitem__(self, index: Any) -> Any:
        return self.results[index]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ResultSet) and other.results == self.results

    __hash__: ClassVar[None]  # type: ignore[assignment] # it can change

    def __repr__(self) -> str:
        return f"<ResultSet of {len(self.results)} members>"


def _checked(member: T) -> T:
    """Return a member of a set; an error if it is no handle yet, as in ``ResultSet([task.adelay(1)])``."""
    if inspect.iscoroutine(member) or asyncio.isfuture(member):
        raise TypeError(f"a result set consists of results such as `await task.adelay(…)`: await {member!r:.200} first")
    return member


class _Deadline:
    """A deadline shared by the waits for several results."""

    def __init__(self, timeout: Duration | None) -> None:
        self._at_ms = None if timeout is None else mono_ms() + to_ms(timeout, "timeout")

    def left_ms(self) -> int | None:
        return None if self._at_ms is None else max(0, self._at_ms - mono_ms())

    def left(self) -> float | None:
        left_ms = self.left_ms()
        return None if left_ms is None else left_ms / 1000


def _finished_states(members: Sequence[_Member]) -> list[JobState | None]:
    states: list[JobState | None] = [None] * len(members)
    for reader in {id(member._reader): member._reader for member in members}.values():  # each app has one
        own = [index for index, member in enumerate(members) if member._reader is reader]
        for index, state in zip(own, reader.finished_states([members[index]._ref for index in own]), strict=True):
            states[index] = state
    return states


def _wait_briefly(member: _Member, deadline: _Deadline) -> None:
    left_ms = deadline.left_ms()
    try:
        member._reader.wait(member._ref, _POLL_MS if left_ms is None else min(left_ms, _POLL_MS), None)
    except ResultTimeoutError:
        if left_ms == 0:
            raise


class GroupResult(ResultSet[R]):
    """The handle of a group: a result set of its members, in order.

    Args:
        group_id: The group's id.
        results: The members' handles. A member that ends with a group has a ``GroupResult``.
        parent: The handle of the previous step, if the group is a step of a chain.

    Attributes:
        children: The handles of the steps after the group, if this process sent it as a step of a chain.
    """

    results: list[AsyncResult[R] | GroupResult[Any]]  # type: ignore[assignment]

    if TYPE_CHECKING:

        def __iter__(self) -> Iterator[AsyncResult[R] | GroupResult[Any]]: ...

    def __init__(self, group_id: str, results: Sequence[AsyncResult[R] | GroupResult[Any]], parent: Any = None) -> None:
        super().__init__(results)
        self.id = group_id
        self.parent = parent
        self.children: list[Any] = []
        if parent is not None:
            parent.children.append(self)

    def as_tuple(self) -> list[Any]:
        """Return the ids of the group, of the steps before it and of its members; see ``AsyncResult.as_tuple``."""
        parent = None if self.parent is None else self.parent.as_tuple()
        members: list[Any] = [member.as_tuple() for member in self.results]
        for member, ids in zip(self.results, members, strict=True):
            if member.parent is self.parent:
                ids[0][1] = None  # the step before the group is its own parent, once
        return [[self.id, parent], members]

    def save(self, keep: Duration | None = 86_400) -> None:
        """Store the group, so that :meth:`restore` finds it by its id.

        It is stored for ``keep``, seconds or a ``timedelta``, by default a day; ``None`` for no limit.
        """
        keep_ms = None if keep is None else max(1, to_ms(keep, "keep"))
        reader, queue = self._store()
        reader.save_group(queue, self.id, json.dumps(self._addresses()), keep_ms)

    def delete(self) -> None:
        """Remove what :meth:`save` stored; the members' jobs are kept (:meth:`forget` removes those)."""
        reader, queue = self._store()
        reader.forget_group(queue, self.id)

    def _store(self) -> tuple[ResultReader, str]:
        """Return what stores the group, and a queue on its server; an empty group belongs to the current app."""
        members = self._members()
        if members:
            return members[0]._reader, members[0].queue
        app = current_sender()
        return app._results, app._config.default_queue

    @classmethod
    def restore(cls, group_id: str, app: Sender | None = None) -> GroupResult[Any] | None:
        """Return a group that any process has stored with :meth:`save`; ``None`` if there is none, or it has expired.

        The ``app`` has the same server and prefix; default: the current app, which is the app created last.

        Raises:
            DecodeError: What is stored is malformed.
        """
        app = app or current_sender()
        stored = app._results.load_group(app._config.default_queue, group_id)
        try:
            return None if stored is None else cls._from_addresses(json.loads(stored), app._results)
        except (KeyError, IndexError, TypeError, ValueError, RecursionError):
            text = (
                f"what is stored for group {group_id} is malformed: save it again, or remove it with GroupResult.delete"
            )
            raise DecodeError(text) from None

    def _addresses(self) -> Any:
        members = [it._addresses() if isinstance(it, GroupResult) else [it.queue, it.id] for it in self.results]  # noqa: SLF001
        return {"id": self.id, "members": members}

    @classmethod
    def _from_addresses(cls, stored: Any, reader: ResultReader) -> GroupResult[Any]:
        members: list[Any] = [
            cls._from_addresses(it, reader) if isinstance(it, dict) else AsyncResult(it[1], it[0], reader)
            for it in stored["members"]
        ]
        return cls(stored["id"], members)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, GroupResult) and (other.id, other.results) == (self.id, self.results)

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(self.id)

    def __repr__(self) -> str:
        return f"<GroupResult {self.id} of {len(self.results)} members>"
