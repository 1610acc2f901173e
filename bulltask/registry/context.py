"""``self`` of a bound task: the running job's methods, its cursor, and how code finds them.

:class:`JobMethods` has what a task can do with its job; :class:`Context` adds what belongs to one attempt, and task
classes inherit it, too. Before them are the parts that they use: the cursor of ``self.iterate()`` and the commands that
a worker executes. At the end is ``current_task``.
"""

from __future__ import annotations

import itertools
from collections.abc import (
    AsyncIterable,
    AsyncIterator,
    Awaitable,
    Callable,
    Coroutine,
    Iterable,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import suppress
from contextvars import ContextVar
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Never, Protocol, TypeVar, Unpack, cast, overload

from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, mono_ms, to_epoch_ms, to_ms
from bulltask.jobs.errors import (
    BrokerError,
    ConfigError,
    EncodeError,
    InvalidJobError,
    MaxRetriesExceededError,
    PermanentError,
    RateLimitQueue,
    ReleaseJob,
    RescheduleJob,
    Retry,
    WaitForChildren,
    WorkerShutdown,
    warn_user,
)
from bulltask.jobs.fields import NO_CHECKPOINT, Checkpoint
from bulltask.jobs.job import UNLIMITED_ATTEMPTS, RunningJob
from bulltask.jobs.names import check_queue_name
from bulltask.jobs.payloads import PLAIN, PayloadCodec, PayloadFormat
from bulltask.registry.canvas import Canvas, Signature, check_overrides_passed
from bulltask.registry.options import CallKeywords, expiry_ms
from bulltask.registry.request import Request, current_job, enter_job, in_started_thread
from bulltask.registry.results import AsyncResult
from bulltask.registry.stamping import Stamper
from bulltask.registry.types import CallConversion

__all__ = [
    "Checkpoints",
    "Context",
    "JobClient",
    "JobCommand",
    "JobMethods",
    "LazyContext",
    "current_context",
    "current_task",
    "enter_attempt",
    "enter_context",
    "no_retries_left",
    "running_task",
]


_STOPPING: Final = "its worker is stopping; the next attempt continues from the cursor"


class CheckpointStore(Protocol):
    """Stores the checkpoint of a running job."""

    def store_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """Store a checkpoint, and the job's progress (JSON) unless it is ``None``.

        Return False if the lock, which has this token, has expired. Raises an error if another worker has the job, it
        was removed, or Redis is unavailable.
        """

    async def astore_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """:meth:`store_checkpoint` for asyncio."""


class Checkpoints:
    """The checkpoints of one attempt.

    The cursor advances in memory with each item. It is stored in Redis when the interval has passed, when the loop
    ends, and with the outcome of the attempt.

    Attributes:
        total: The number of items, from which the job's progress is computed; ``None`` for no progress.
        in_loop: Whether :meth:`Context.iterate` has been called.
        is_async: Whether the task runs on an event loop, which a write must not block.
    """

    def __init__(
        self,
        stored: str = NO_CHECKPOINT,
        job_id: str = "",
        attempts_started: int = 1,
        interval_ms: int = 0,
        store: CheckpointStore | None = None,
    ) -> None:
        self.job_id = job_id
        self._attempts_started = attempts_started
        self._interval_ms = interval_ms
        self._store = store
        checkpoint = Checkpoint.from_json(stored, job_id)
        self._cursor = checkpoint.cursor
        self._items = checkpoint.items
        self._done = checkpoint.done
        self._exists = stored != NO_CHECKPOINT
        self._changed = False
        self._token = ""
        self._is_stopping: Callable[[], bool] = bool  # never
        self._due_ms = mono_ms() + interval_ms
        self._percent: int | None = None
        self.total: int | None = None
        self.in_loop = self.is_async = False

    @property
    def cursor(self) -> Any:
        """The position after the last finished item; ``None`` before the first one."""
        return self._cursor

    @property
    def done(self) -> bool:
        """Whether the loop has ended, in this attempt or an earlier one."""
        return self._done

    def start(self, token: str, is_stopping: Callable[[], bool], *, is_async: bool) -> None:
        """Begin the attempt; ``token`` is that of the job's lock."""
        self._token = token
        self._is_stopping = is_stopping
        self.is_async = is_async

    def release_if_stopping(self) -> None:
        """End the attempt between two items if the worker is stopping: raises ``WorkerShutdown``."""
        if self._is_stopping():
            raise WorkerShutdown(_STOPPING)

    def advance(self, cursor: Any, *, done: bool = False) -> bool:
        """Record that an item has finished; return whether it is time to store the checkpoint."""
        self._cursor = cursor
        self._items = self._items + 1
        self._done = done
        self._changed = True
        return mono_ms() >= self._due_ms

    def finish(self) -> bool:
        """Record that the loop has ended; return whether this must be stored."""
        is_new = self._changed or not self._done
        self._done = True
        self._changed = is_new
        return is_new

    def save(self) -> None:
        """Store the checkpoint. While Redis is unavailable, it stays in memory and is stored later.

        Raises ``EncodeError`` if the cursor is not plain JSON, and an error if another worker has the job, or it was
        removed.
        """
        checkpoint, progress = self._to_store()
        if self._store is not None:
            with suppress(BrokerError):
                self._changed = not self._store.store_checkpoint(self._token, checkpoint, progress)

    async def asave(self) -> None:
        """:meth:`save` for asyncio."""
        checkpoint, progress = self._to_store()
        if self._store is not None:
            with suppress(BrokerError):
                self._changed = not await self._store.astore_checkpoint(self._token, checkpoint, progress)

    def last(self, *, completed: bool) -> str | None:
        """Return the checkpoint to store with the outcome; ``None`` if Redis has it; a completed job has none."""
        if completed:
            return NO_CHECKPOINT if self._exists else None
        with suppress(EncodeError):  # the attempt has failed with this error already
            return self._encode() if self._changed else None
        return None

    def _to_store(self) -> tuple[str, bytes | None]:
        self._due_ms = mono_ms() + self._interval_ms
        self._exists = True  # even if the reply is lost
        percent = None if not self.total else min(100, 100 * self._items // self.total)
        is_new = percent != self._percent
        self._percent = percent
        return self._encode(), codec.encode(percent) if is_new else None

    def _encode(self) -> str:
        return Checkpoint(self._cursor, self._items, self._attempts_started, self._done).to_json(self.job_id)


JobCommand = Literal[
    "progress", "log", "data", "children_values", "pending_children", "child_failure", "incompatible_since"
]
"""Commands on a job. The first three store progress, append a log line, and replace the data. The others read the
results of child jobs, the number of pending ones, the reason why one has failed, and since when no worker could run the
job."""


class JobClient(CheckpointStore, Protocol):
    """Executes commands on a running task's job."""

    def send(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command; ``value`` is JSON, or the text of a log line."""

    async def asend(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """:meth:`send` for asyncio."""

    def replace(self, canvas: Any, *, retries: int = 0) -> None:
        """Add a canvas as child jobs; its result becomes that of the job.

        If the canvas is the next attempt of the job in another queue, ``retries`` is the number of retries before it.
        """

    async def areplace(self, canvas: Any, *, retries: int = 0) -> None:
        """:meth:`replace` for asyncio."""


def has_retries_left(job: RunningJob, max_retries: int | None) -> bool:
    """Return whether this is not the last attempt of a running job."""
    return job.attempts_made + 1 < job.max_attempts(max_retries)


def no_retries_left(job: RunningJob, max_retries: int | None) -> str:
    """Return why a job that has requested a retry fails."""
    maximum = job.max_attempts(max_retries)
    return f"the task requested a retry, but this was attempt {job.attempts_made + 1} of {maximum}"


T = TypeVar("T")

Items = Iterable[T] | AsyncIterable[T]
Page = Items[T] | Awaitable[Iterable[T]]
Source = Items[T] | Callable[[Any], Page[T]]


class CheckpointedItems(Generic[T]):
    """The items of a checkpointed task's loop, for ``for`` or ``async for``; :meth:`Context.iterate` returns it."""

    def __init__(self, checkpoints: Checkpoints, source: Source[T], cursor: Callable[[T], Any] | None) -> None:
        self._checkpoints = checkpoints
        self._source = source
        self._cursor = cursor

    def __iter__(self) -> Iterator[T]:
        """Return an iterator over the items that are left."""
        checkpoints = self._checkpoints
        if checkpoints.is_async:
            raise TypeError("self.iterate() is used with 'for' in an async task: use 'async for'")
        for page in self._pages():
            for item in _without_await(page.items, page.skipped):
                position = page.position_after(item)
                yield item
                if checkpoints.advance(position, done=page.is_last):
                    checkpoints.save()
                checkpoints.release_if_stopping()
                if page.is_last:
                    break
        if checkpoints.finish():
            checkpoints.save()

    async def __aiter__(self) -> AsyncIterator[T]:
        """Return an asynchronous iterator over the items that are left."""
        checkpoints = self._checkpoints
        for page in self._pages():
            async for item in _with_await(page.items, page.skipped):
                position = page.position_after(item)
                yield item
                if checkpoints.advance(position, done=page.is_last):
                    await checkpoints.asave()
                checkpoints.release_if_stopping()
                if page.is_last:
                    break
        if checkpoints.finish():
            await checkpoints.asave()

    def _pages(self) -> Iterator[_Counted[T] | _AfterCursor[T]]:
        """Yield what the source returns, until nothing is left."""
        checkpoints, source, cursor = self._checkpoints, self._source, self._cursor
        if checkpoints.done:
            return
        checkpoints.release_if_stopping()
        if cursor is None:
            yield _Counted(cast(Items[T], source), checkpoints.cursor, checkpoints.job_id)
            return
        fetch, start = cast(Callable[[Any], Page[T]], source), checkpoints.cursor
        while True:
            page = _AfterCursor(fetch(start), start, cursor, checkpoints.job_id)
            yield page
            if page.is_empty or page.is_last:
                return
            # Decoded like a cursor from Redis, so that the source receives a list instead of a tuple in every call.
            start = codec.decode(page.check_moved(checkpoints.cursor))


class _Counted(Generic[T]):
    """Items whose cursor is the number of finished items; the first ``skipped`` were finished in earlier attempts."""

    is_last = False

    def __init__(self, items: Items[T], start: Any, job_id: str) -> None:
        if not isinstance(start, int | None):
            raise InvalidJobError(
                f"the cursor of job {job_id} is {start!r}, not the number of finished items: has the source of its "
                "task's loop changed since the job started? Send the job again"
            )
        self.items = items
        self.skipped = self._count = start or 0

    def position_after(self, _item: T) -> int:
        """Return the cursor after an item."""
        self._count += 1
        return self._count


class _AfterCursor(Generic[T]):
    """The items that a function has returned for a cursor; ``is_last``: the cursor after this item is ``None``."""

    skipped = 0

    def __init__(self, items: Page[T], start: Any, cursor: Callable[[T], Any], job_id: str) -> None:
        self.items = items
        self.is_empty = True
        self.is_last = False
        self._start = start
        self._cursor = cursor
        self._job_id = job_id

    def position_after(self, item: T) -> Any:
        """Return the cursor after an item; called before the task's code, which may change or delete the item."""
        position = self._cursor(item)
        self.is_last = position is None
        if self.is_empty:
            self.check_moved(position)
            self.is_empty = False
        return position

    def check_moved(self, position: Any) -> bytes:
        """Return a position as JSON; an error if it is where the items begin, so the loop would never end."""
        encoded = codec.encode(position, what=f"the cursor of job {self._job_id}")
        if self._start is not None and encoded == codec.encode(self._start):
            raise PermanentError(
                f"the loop of job {self._job_id} makes no progress: its source was called with the cursor "
                f"{self._start!r} and returned an item with the same cursor; it must return only items after the cursor"
            )
        return encoded


def _without_await(items: Page[T], skipped: int) -> Iterable[T]:
    if isinstance(items, Iterable):
        return itertools.islice(items, skipped, None) if skipped else items
    if isinstance(items, Coroutine):
        items.close()  # otherwise, Python warns that it was never awaited
    raise TypeError(f"self.iterate() cannot loop over {type(items).__name__}: in an async task, use 'async for'")


async def _with_await(items: Page[T], skipped: int) -> AsyncIterator[T]:
    if isinstance(items, Awaitable):
        items = await items
    if isinstance(items, AsyncIterable):  # before Iterable: Django's QuerySet is both
        async for item in items:
            if skipped:
                skipped -= 1
            else:
                yield item
    else:
        for item in _without_await(items, skipped):
            yield item


class JobMethods:
    """What a task can do with the job for which it is running: the methods of :class:`Context`, and of task classes.

    A method that uses Redis raises ``BrokerError`` if Redis is unavailable, or returns an error, and
    ``JobNotFoundError`` if the job was removed.
    """

    request: Request
    """The running job."""

    MaxRetriesExceededError = MaxRetriesExceededError
    OperationalError = BrokerError
    """What a send raises if Redis cannot be reached."""

    @property
    def _context(self) -> Context:
        raise NotImplementedError

    @property
    def stopping(self) -> bool:
        """Whether the task should end soon: its worker is stopping, or its child process is being replaced.

        A task that does not end is interrupted ``shutdown_notice`` seconds before ``shutdown_timeout`` is over. False
        if the task was called directly, and in a worker that lets its last jobs finish (``--burst``, ``--max-jobs``).
        """
        return self._context._is_stopping()

    def update_progress(self, progress: codec.Json) -> None:
        """Store the job's progress, which Redis publishes as an event (BullMQ's ``updateProgress``).

        It may be any JSON value; dashboards show a number from 0 to 100, or an object. ``EncodeError``: it is not plain
        JSON.
        """
        self._send("progress", self._encode(progress))

    async def aupdate_progress(self, progress: codec.Json) -> None:
        """:meth:`update_progress` for async tasks."""
        await self._asend("progress", self._encode(progress))

    def update_state(self, task_id: str | None = None, state: str | None = None, meta: codec.Json = None) -> None:
        """Set a custom state and its ``meta``, which ``result.status`` and ``result.info`` return while the job runs.

        State and ``meta`` are stored as the job's progress, ``{"state": …, "meta": …}``. The job's state in Redis does
        not change. (This is Celery's method.)

        If the task then raises ``Ignore``, the state ``FAILURE`` fails the job, ``SUCCESS`` completes it with the
        result ``meta``, and ``REVOKED`` fails it as revoked: see :class:`bulltask.errors.Ignore`.

        Args:
            task_id: The job's own id, or ``None``; a ``ConfigError`` for another job's.
            state: Any name, such as ``"PROGRESS"``; default: ``"STARTED"``.
            meta: Any JSON value.
        """
        reported = self._state(task_id, state, meta)
        self.update_progress(reported)
        self._context._reported = reported["state"], meta

    async def aupdate_state(
        self, task_id: str | None = None, state: str | None = None, meta: codec.Json = None
    ) -> None:
        """:meth:`update_state` for async tasks."""
        reported = self._state(task_id, state, meta)
        await self.aupdate_progress(reported)
        self._context._reported = reported["state"], meta

    def _state(self, task_id: str | None, state: str | None, meta: codec.Json) -> dict[str, Any]:
        if task_id not in {None, self.request.id}:
            own_id, task = self.request.id, self.request.task
            caller = f"job {own_id}" if own_id else f"task {task}, which is not running in a job,"
            raise ConfigError(f"{caller} cannot set the state of job {task_id}: only that job can")
        return {"state": state or "STARTED", "meta": meta}

    def log(self, line: str) -> None:
        """Append a line to the job's log in Redis, where dashboards show it (BullMQ's ``job.log``).

        The log keeps the newest 1,000 lines; the option ``keep_logs`` or the setting ``max_logs`` changes that number.
        """
        self._send("log", str(line))

    async def alog(self, line: str) -> None:
        """:meth:`log` for async tasks."""
        await self._asend("log", str(line))

    @overload
    def retry(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
        throw: Literal[True] = True,
        eta: datetime | None = None,
        countdown: Duration | None = None,
        max_retries: int | None = None,
        *,
        expires: Duration | datetime | None = None,
        queue: str | None = None,
    ) -> Never: ...
    @overload
    def retry(
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
        *,
        throw: bool,
        eta: datetime | None = None,
        countdown: Duration | None = None,
        max_retries: int | None = None,
        expires: Duration | datetime | None = None,
        queue: str | None = None,
    ) -> Retry: ...

    def retry(  # noqa: PLR0913, PLR0917 - Celery's signature
        self,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        exc: BaseException | None = None,
        throw: bool = True,
        eta: datetime | None = None,
        countdown: Duration | None = None,
        max_retries: int | None = None,
        *,
        expires: Duration | datetime | None = None,
        queue: str | None = None,
        **others: Any,
    ) -> Retry:
        """End this attempt and retry the job; ``raise self.retry(…)`` does the same.

        Args:
            args, kwargs: Other arguments for the next attempt. If only one of them is given, the other arguments stay
                the same.
            exc: The exception that the job fails with if no retry is left.
            throw: ``False``: return the ``Retry``, and retry the job when the task ends: also if it returns a value, or
                raises an ordinary exception.
            eta: The earliest time of the next attempt, instead of ``countdown``; a naive ``datetime`` is UTC.
            countdown: Seconds or ``timedelta`` before the next attempt (default: the job's backoff).
            max_retries: Maximum number of retries; default: ``max_retries`` of the call or the task, else the setting
                ``task_max_explicit_retries``.
            expires: Seconds, ``timedelta`` or ``datetime`` after which a worker fails the job instead of retrying it.
            queue: The queue of the next attempt. The job waits for a child job in that queue, which has its id and its
                number of retries, and then has the outcome of that job.
            others: Celery's other options, which have no effect; a warning says so.

        Raises:
            Retry: A retry is left (a ``BaseException``, which ``except Exception`` does not catch).
            MaxRetriesExceededError: No retry is left, and there is no ``exc``.
            Exception: ``exc``, if no retry is left, or if the task was called directly.
            TypeError, EncodeError, PayloadTooLargeError: The task cannot be called with ``args`` and ``kwargs``.
        """
        for name in others:
            warn_user(f"the option {name} of self.retry() has no effect")
        exc = exc() if isinstance(exc, type) else exc
        request, job, context = self.request, current_job(), self._context
        is_own = job is not None and job.id == request.id
        if request.called_directly and exc is not None:
            raise exc
        if is_own and exc is None and not has_retries_left(cast(RunningJob, job), max_retries):
            error = MaxRetriesExceededError(no_retries_left(cast(RunningJob, job), max_retries))
            error.task_args = request.args
            error.task_kwargs = request.kwargs
            raise error
        arguments = None if args is None and kwargs is None else self._changed(args, kwargs)
        retry = Retry(
            delay_ms=None if countdown is None else to_ms(countdown, "countdown"),
            exc=exc,
            max_retries=max_retries,
            eta_ms=None if eta is None else to_epoch_ms(eta),
            expires=expiry_ms(expires),
            arguments=arguments,
            data=self._encode_call(*arguments) if arguments and context._job_client else None,
            queue=queue and check_queue_name(queue),
        )
        if is_own and exc is not None and not has_retries_left(cast(RunningJob, job), max_retries):
            context._gave_up = retry, exc.__traceback__
            raise exc
        if is_own and not throw:
            context._retry_at_end = retry
            return retry
        raise retry from exc

    def _changed(
        self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the running job with those that change."""
        request, arguments = self.request, self._context.task._codec.arguments
        if args is None:  # a positional argument of the call is stored by its name, too
            return tuple(request.args), {**request.kwargs, **(kwargs or {})}
        replaced = arguments.bind_partial(args, {})
        others = request.kwargs if kwargs is None else kwargs
        return tuple(args), {name: value for name, value in others.items() if name not in replaced}

    def _encode_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        context, request = self._context, self.request
        data = context.task._codec.encode(args, kwargs, context._form.serializer)
        what = f"the arguments of the next attempt of job {request.id}"
        dump = None if context._payloads is None else context._payloads.dump_arguments
        return dump(data, request.queue, request.task, context._form, what) if dump else codec.encode(data, what=what)

    def update_data(self, data: Any) -> None:
        """Replace the job's data, which its next attempt receives as arguments (BullMQ's ``updateData``).

        Args:
            data: The task's arguments by name; the next attempt receives them as :attr:`Request.kwargs`.

        Raises:
            EncodeError: The value is not JSON, or an argument does not match its type hint.
            PayloadTooLargeError: Data and options together exceed ``max_payload``.
        """
        self._send("data", self._encode_data(data))

    async def aupdate_data(self, data: Any) -> None:
        """:meth:`update_data` for async tasks."""
        await self._asend("data", self._encode_data(data))

    def get_children_values(self) -> dict[str, Any]:
        """Return the results of completed child jobs, by the full Redis key of each child job's hash."""
        return self._loaded(self._send("children_values"))

    async def aget_children_values(self) -> dict[str, Any]:
        """:meth:`get_children_values` for async tasks."""
        return self._loaded(await self._asend("children_values"))

    @overload
    def iterate(self, source: Items[T], *, total: int | None = None) -> CheckpointedItems[T]: ...
    @overload
    def iterate(
        self, source: Callable[[Any], Page[T]], *, cursor: Callable[[T], Any], total: int | None = None
    ) -> CheckpointedItems[T]: ...

    def iterate(
        self, source: Source[T], *, cursor: Callable[[T], Any] | None = None, total: int | None = None
    ) -> CheckpointedItems[T]:
        """Loop over items, so that the job continues after the last finished item when it runs again.

        An item has finished when the loop asks for the next one. If the worker stops, the loop ends between two items,
        and the job is released.

        Args:
            source: The items, in the same order in each attempt. The cursor is then the number of finished items, which
                the next attempt skips. Alternatively, a function that receives the cursor (``None`` at first) and
                returns the next items after it, in order. It is called again until it returns no items.
            cursor: Required if ``source`` is a function: returns the cursor after an item, a small JSON value such as a
                primary key. ``None`` means that no item follows.
            total: The number of items. If given, the job's progress is stored in percent, together with its cursor.

        Returns:
            An object for ``for``, and in an async task for ``async for``.

        Raises:
            ConfigError: The task has no ``checkpoint=True``, or has called this method before.
            TypeError: ``source`` is a function without ``cursor``, or ``cursor`` was given without a function.
        """
        checkpoints = self._own_checkpoints()
        if checkpoints.in_loop:
            raise ConfigError(
                f"task {self.request.task!r} calls self.iterate() twice, but a job has one cursor: split it into two "
                "tasks"
            )
        if callable(source) != (cursor is not None):
            raise TypeError("self.iterate() requires cursor= if source is a function, and does not accept it otherwise")
        checkpoints.in_loop = True
        checkpoints.total = total
        return CheckpointedItems(checkpoints, source, cursor)

    @property
    def cursor(self) -> Any:
        """The position after the last finished item or ``None``; raises ``ConfigError`` without ``checkpoint=True``."""
        return self._own_checkpoints().cursor

    def checkpoint(self, cursor: Any) -> None:
        """Move the job's cursor without :meth:`iterate`: call this method after each part of the work.

        Args:
            cursor: Where the next attempt continues: a small JSON value, which :attr:`cursor` returns.

        Raises:
            ConfigError: The task has no ``checkpoint=True``, or uses :meth:`iterate`.
            EncodeError: The value is not plain JSON.
            WorkerShutdown: The worker is stopping (a ``BaseException``, which ``except Exception`` does not catch).
            LockMismatchError, JobNotFoundError: Another worker has the job, or it was removed.
        """
        checkpoints = self._checkpoints_without_loop()
        if checkpoints.advance(cursor):
            checkpoints.save()
        checkpoints.release_if_stopping()

    async def acheckpoint(self, cursor: Any) -> None:
        """:meth:`checkpoint` for async tasks."""
        checkpoints = self._checkpoints_without_loop()
        if checkpoints.advance(cursor):
            await checkpoints.asave()
        checkpoints.release_if_stopping()

    def _checkpoints_without_loop(self) -> Checkpoints:
        checkpoints = self._own_checkpoints()
        if checkpoints.in_loop:
            raise ConfigError(
                f"task {self.request.task!r} uses self.iterate(), which moves the cursor itself: do not call "
                "self.checkpoint()"
            )
        return checkpoints

    def _own_checkpoints(self) -> Checkpoints:
        checkpoints = self._context._checkpoints
        if checkpoints is None:
            raise ConfigError(f"task {self.request.task!r} has no cursor: add checkpoint=True to its decorator")
        return checkpoints

    def move_to_delayed(self, delay: Duration) -> Never:
        """End this attempt, which does not count, and run the job again after ``delay`` (seconds or ``timedelta``).

        Raises:
            RescheduleJob: Always (a ``BaseException``, which ``except Exception`` does not catch).
            ConfigError: ``delay`` is invalid.
        """
        to_ms(delay, "delay")
        raise RescheduleJob(delay)

    def move_to_wait(self) -> Never:
        """End this attempt, which does not count; the job is the next in its queue. Always raises ``ReleaseJob``."""
        raise ReleaseJob

    def rate_limit(self, duration: Duration) -> Never:
        """End this attempt, release the job, and rate-limit its queue for ``duration``.

        Use it when a service replies "too many requests". The job is next in its queue, and the attempt does not count.
        The duration is more than 0 seconds, or a ``timedelta``.

        If the queue has a global rate limit, all workers stop acquiring its jobs for ``duration``. Otherwise, only
        workers with a ``limiter`` stop, and the child that ran the task: BullMQ does not check a limit for others.

        Raises:
            RateLimitQueue: Always (a ``BaseException``, which ``except Exception`` does not catch).
            ConfigError: ``duration`` is invalid.
        """
        if not to_ms(duration, "duration"):
            raise ConfigError(f"the duration must be at least 0.001 s, not {duration!r:.200}")
        raise RateLimitQueue(duration)

    def replace(self, canvas: Canvas[Any, Any]) -> Never:
        """End this attempt, and run a canvas instead of the task (Celery's ``replace``).

        The job waits for the canvas (a signature, chain or group), and then completes with its result or fails with its
        error. The next step of a chain, for example, therefore waits for the canvas, too. The attempt does not count.

        Raises:
            WaitForChildren: Always, once Redis has stored the canvas.
            TypeError: The task was called directly, or an argument does not match.
        """
        self.on_replace(self._with_own_stamps(canvas))

    def on_replace(self, sig: Canvas[Any, Any]) -> Never:
        """Called by :meth:`replace`, with the job's stamps on the canvas, which it stores (Celery's ``on_replace``).

        A task class may change the canvas first. Always raises ``WaitForChildren``, or the errors of :meth:`replace`.
        """
        self._client_for_replace().replace(check_overrides_passed(sig))
        raise WaitForChildren(replaced=True)

    async def areplace(self, canvas: Canvas[Any, Any]) -> Never:
        """:meth:`replace` for async tasks, without :meth:`on_replace`; always raises ``WaitForChildren``."""
        await self._client_for_replace().areplace(check_overrides_passed(self._with_own_stamps(canvas)))
        raise WaitForChildren(replaced=True)

    def _with_own_stamps(self, canvas: Canvas[Any, Any]) -> Canvas[Any, Any]:
        """Add the running job's stamps to a canvas, except those that a call has already."""
        if stamps := self.request.stamps:
            for call in canvas.calls():
                missing = {name: value for name, value in stamps.items() if name not in call.stamps}
                stamper = Stamper()
                call.stamp_with(stamper, stamper.merged({}, missing))
        return canvas

    def add_to_chord(self, sig: Any, lazy: bool = False) -> Never:  # noqa: ARG002 - Celery's signature
        """Always raise ``TypeError``. (Celery would add a member to the chord of the running member.)"""
        raise TypeError(
            f"task {self.request.task} cannot add a member to its chord, because the number of a chord's members is "
            "fixed when it is sent; replace this member with a group: self.replace(group(…))"
        )

    def move_to_waiting_children(self) -> Never:
        """End this attempt and run the job again when its pending child jobs have finished; the attempt does not count.

        Without pending child jobs it runs again immediately. If a child job with ``fail_parent_on_failure`` has failed,
        this job fails. Use :meth:`update_data` first to record the task's state. Always raises ``WaitForChildren``.
        """
        raise WaitForChildren

    def _client_for_replace(self) -> JobClient:
        client = self._context._job_client
        if client is None:
            raise TypeError("replace() needs a job, but the task was called directly; return the result of the call")
        return client

    def _send(self, command: JobCommand, value: bytes | str = b"") -> Any:
        client = self._context._job_client
        return None if client is None else client.send(command, value)

    async def _asend(self, command: JobCommand, value: bytes | str = b"") -> Any:
        client = self._context._job_client
        return None if client is None else await client.asend(command, value)

    def _encode_data(self, data: Any) -> bytes:
        what, request, context = f"data of job {self.request.id}", self.request, self._context
        if context._conversion is not None and isinstance(data, dict) and not context._form.is_pickled:
            data = context._conversion.encode_arguments(data)
        dump = None if context._payloads is None else context._payloads.dump_arguments
        return dump(data, request.queue, request.task, context._form, what) if dump else codec.encode(data, what=what)

    def _loaded(self, results: Mapping[str, Any] | None) -> dict[str, Any]:
        payloads = self._context._payloads
        return payloads.load_results(results)[0] if results and payloads else {}

    def _encode(self, progress: codec.Json) -> bytes:
        context = self._context
        convert = None if context._payloads is None else context._payloads.convert
        encoded = codec.encode(progress, what=f"progress of job {self.request.id}", convert=convert)
        context._has_reported = True
        return encoded


class Context(JobMethods):
    """First argument of a task with ``bind=True``.

    Each attempt has a separate context, even if async tasks run concurrently. ``state`` is what the app's lifespan has
    yielded, unless the task has an attribute of this name.
    """

    task: Any
    if TYPE_CHECKING:
        state: Any

    _checkpoints: Checkpoints | None
    _job_client: JobClient | None
    """Executes commands on the job; ``None`` if the task was called directly."""
    _conversion: CallConversion | None
    _payloads: PayloadCodec | None
    """Reads results and writes arguments; ``None`` if the task was called directly."""
    _form: PayloadFormat
    """How the job's data was written."""
    _is_stopping: Callable[[], bool]
    _has_reported: bool
    """Whether the task has called :meth:`update_progress`."""
    _reported: tuple[str, Any] | None
    """State and meta of its last :meth:`update_state`, ``None`` before the first."""
    _retry_at_end: Retry | None
    """The retry that the task has requested with ``throw=False``."""
    _gave_up: tuple[Retry, TracebackType | None] | None
    """The last retry that was requested with an ``exc`` although none was left, and the traceback of ``exc``."""

    def __init__(  # noqa: PLR0913 - the parts of an attempt, which attempt.py connects
        self,
        request: Request,
        job_client: JobClient | None = None,
        conversion: CallConversion | None = None,
        checkpoints: Checkpoints | None = None,
        payloads: PayloadCodec | None = None,
        form: PayloadFormat = PLAIN,
        *,
        task: Any = None,
        is_stopping: Callable[[], bool] = bool,
    ) -> None:
        # Without __setattr__, which sets attributes of the task.
        vars(self).update(
            request=request,
            task=task,
            _checkpoints=checkpoints,
            _job_client=job_client,
            _conversion=conversion,
            _payloads=payloads,
            _form=form,
            _is_stopping=is_stopping,
            _has_reported=False,
            _reported=None,
            _retry_at_end=None,
            _gave_up=None,
        )

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            """Return an attribute of the task, which in Celery is ``self``."""
            task = vars(self).get("task")
            if task is None or name.startswith("__"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            if name == "state" and not hasattr(task, name):
                return task.app.state
            return getattr(task, name)

        def __setattr__(self, name: str, value: Any) -> None:
            """Set an attribute of the context; any other is set on the task, and kept until the process ends."""
            if name in vars(self) or self.task is None or hasattr(type(self), name):
                object.__setattr__(self, name, value)
            else:
                self.task._set_attribute(name, value)

    @property
    def name(self) -> str:
        """The task's name (Celery's ``self.name``)."""
        return self.request.task

    @property
    def app(self) -> Any:
        """The app that sends the task's calls."""
        return self.task.app

    @property
    def max_retries(self) -> int | None:
        """How many times :meth:`retry` may retry the job, ``None`` for no limit; 0 if the task was called directly."""
        job = current_job()
        attempts = self.request.attempts if job is None or job.id != self.request.id else job.max_attempts()
        return None if attempts >= UNLIMITED_ATTEMPTS else attempts - 1

    @property
    def default_retry_delay(self) -> float:
        """The seconds before the first retry, without jitter: the task's ``default_retry_delay``, or its backoff."""
        return float(self.task._options.backoff(self.app._config).delay_ms / 1000)

    def delay(self, *args: Any, **kwargs: Any) -> AsyncResult[Any]:
        """Send another call of the task (in an async task, use ``await self.task.adelay(…)``)."""
        return cast(AsyncResult[Any], self.task.delay(*args, **kwargs))

    def apply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[Any]]
    ) -> AsyncResult[Any]:
        """Send another call of the task, with options; see :meth:`bulltask.Task.apply_async`."""
        return cast(AsyncResult[Any], self.task.apply_async(args, kwargs, **options))

    def s(self, *args: Any, **kwargs: Any) -> Signature[Any, Any]:
        """Return another call of the task, for :meth:`replace` or a canvas; see :meth:`bulltask.Task.s`."""
        return cast(Signature[Any, Any], self.task.s(*args, **kwargs))

    def si(self, *args: Any, **kwargs: Any) -> Signature[object, Any]:
        """Like :meth:`s`, but ignore the result of the previous call."""
        return cast(Signature[object, Any], self.task.si(*args, **kwargs))

    def signature(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Signature[Any, Any]:
        """Return another call of the task, with options; see :meth:`bulltask.Task.signature`."""
        return cast(Signature[Any, Any], self.task.signature(args, kwargs, **options))

    subtask = signature

    def AsyncResult(self, task_id: str) -> AsyncResult[Any]:
        """Return the handle of a job by its id; see :meth:`bulltask.App.AsyncResult`."""
        return cast(AsyncResult[Any], self.app.AsyncResult(task_id))

    def _ended_by(self, raised: BaseException | None) -> BaseException | None:
        """Return what has ended the attempt whose function has raised ``raised``: a retry, or the same."""
        if self._retry_at_end is not None and (raised is None or isinstance(raised, Exception)):
            self._retry_at_end.exc = self._retry_at_end.exc or raised
            return self._retry_at_end
        if self._gave_up is not None and raised is not None and self._gave_up[0].exc is raised:
            raised.__traceback__ = self._gave_up[1]  # without the frames of bulltask that have raised it again
            return self._gave_up[0]
        return raised

    @property
    def _context(self) -> Context:
        return self

    def __repr__(self) -> str:
        return f"<Context of {self.request.task} job {self.request.id or '(called directly)'}>"


class LazyContext:
    """The context of an attempt. It is created on first use, because most unbound tasks do not need it."""

    __slots__ = ("_create", "created")

    def __init__(self, create: Callable[[], Context], context: Context | None) -> None:
        self._create = create
        self.created = context

    def get(self) -> Context:
        """Return the context."""
        if self.created is None:
            self.created = self._create()
        return self.created


_current: ContextVar[Context | LazyContext | None] = ContextVar("bulltask_context", default=None)


def current_context(task: str) -> Context | None:
    """Return the context of the attempt, or direct call, of a task that this code belongs to; ``None`` for none."""
    context = _running_context()
    return None if context is None or context.name != task else context


def enter_context(context: Context | LazyContext | None) -> Context | LazyContext | None:
    """Make ``context`` the current one, and return the previous one."""
    previous = _current.get()
    _current.set(context)
    return previous


def enter_attempt(job: RunningJob, context: LazyContext) -> None:
    """Make a job and its context the current ones."""
    enter_job(job)
    _current.set(context)


def running_task() -> Any:
    """Return what ``self`` is in the running task if it is bound; ``None`` outside a task, and in a batch."""
    context = _running_context()
    if context is None:
        return None
    return context.task if context.task is not None and context.task._has_base else context


def _running_context() -> Context | None:
    if (context := _current.get()) is None:
        context = in_started_thread(_current)
    return context.get() if isinstance(context, LazyContext) else context


if TYPE_CHECKING:
    _Base = Context
else:
    _Base = object


class _CurrentTask(_Base):
    """A proxy for the running task; outside a task, it equals ``None`` (Celery's ``current_task``)."""

    if not TYPE_CHECKING:  # type checkers would accept any name

        def __getattr__(self, name: str) -> Any:
            if (task := running_task()) is None:
                raise AttributeError(f"current_task has no attribute {name!r}, because no task is running here")
            return getattr(task, name)

    def __bool__(self) -> bool:
        return running_task() is not None

    def __eq__(self, other: object) -> bool:
        return other is self or bool(running_task() == other)

    def __hash__(self) -> int:
        return hash(running_task())

    def __repr__(self) -> str:
        return f"<current_task: {running_task()!r}>"


current_task: _CurrentTask = cast(Any, _CurrentTask)()
"""The running task, for functions that a task calls. It has the attributes of ``self`` in a bound task. Outside a task,
it is false and equals ``None``.

It is a context variable, which ``asyncio.to_thread`` and asyncio tasks inherit. Other threads that a sync task starts
see it while that task is the only one that its process is running. A task that another task calls directly does not
change it."""
