"""Code of an app that runs around its jobs: middleware, receivers of signals, and the lifespan of its children.

:class:`Middleware` is what users write; :class:`SendHooks` calls it in the process that sends, and
``bulltask.worker.run_hooks`` in the child that runs the job. A hook that cannot be called raises ``ConfigError`` when
it is added; a hook that fails affects nothing else.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import json
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Final

from bulltask.config.config import Config
from bulltask.config.process import exit_if_forked
from bulltask.jobs import codec
from bulltask.jobs.errors import BulltaskError, ConfigError, DecodeError, Interrupt
from bulltask.jobs.job import NewJob, PlannedJob, check_size, in_order
from bulltask.jobs.names import FAN_OUT
from bulltask.jobs.payloads import PayloadCodec
from bulltask.observe.signals import PUBLISH_SIGNALS, Signal, after_task_publish, before_task_publish, report_failure
from bulltask.registry.request import Request

__all__ = ["Middleware", "OutgoingJob"]

_SEND: Final = ("before_send", "after_send", "abefore_send", "aafter_send")
_RUN: Final = ("before_run", "after_run", "abefore_run", "aafter_run")


class Middleware:
    """Base class of middleware: override the methods that you need, and call :meth:`bulltask.App.add_middleware`.

    The methods whose names begin with ``a`` are called instead of the others where code can be awaited: around async
    tasks, and around sends with ``await`` (``adelay`` …). By default they call the others.

    ``before_`` methods are called in the order in which middleware was added, ``after_`` methods in the opposite order.
    An exception in a method is logged, and the job is sent or run as if the method had returned. ``before_run`` may end
    the attempt as its task may, by raising ``ReleaseJob``, ``RescheduleJob``, ``RateLimitQueue`` or ``Retry``.
    """

    def before_send(self, job: OutgoingJob) -> None:
        """Called before a job is sent; ``job.headers`` may be changed."""

    def after_send(self, job: OutgoingJob, exception: BaseException | None) -> None:
        """Called after a job was sent.

        Args:
            job: The job.
            exception: The exception that the send raised; Redis may have stored the job nevertheless. ``None`` if the
                send succeeded.
        """

    def before_run(self, request: Request) -> None:
        """Called before a task runs, in the thread and the context in which it runs."""

    def after_run(self, request: Request, result: Any, exception: BaseException | None) -> None:
        """Called after a task has returned or raised, before its outcome is stored.

        It is also called after a time limit or a revocation has ended the task, but not if the child is killed.

        Args:
            request: The job.
            result: The task's return value, ``None`` if it has raised.
            exception: What it has raised, including ``RescheduleJob`` and other requests, and ``CancelledError``.
        """

    async def abefore_send(self, job: OutgoingJob) -> None:
        """:meth:`before_send` for asyncio."""
        self.before_send(job)

    async def aafter_send(self, job: OutgoingJob, exception: BaseException | None) -> None:
        """:meth:`after_send` for asyncio."""
        self.after_send(job, exception)

    async def abefore_run(self, request: Request) -> None:
        """:meth:`before_run` for async tasks."""
        self.before_run(request)

    async def aafter_run(self, request: Request, result: Any, exception: BaseException | None) -> None:
        """:meth:`after_run` for async tasks."""
        self.after_run(request, result, exception)


class MiddlewareList:
    """An app's middleware, in order: those with a method for sending, and those with one for running."""

    def __init__(self) -> None:
        self.sending: tuple[Middleware, ...] = ()
        self.running: tuple[Middleware, ...] = ()

    def add(self, middleware: object) -> None:
        """Add middleware, whose methods must be async where their names say so, and only there."""
        if not isinstance(middleware, Middleware):
            raise ConfigError(f"middleware must be an instance of bulltask.Middleware, not {middleware!r:.200}")
        kind = type(middleware)
        for name in (*_SEND, *_RUN):
            is_async = inspect.iscoroutinefunction(getattr(kind, name))
            if is_async != (name.startswith("a") and not name.startswith("after")):
                form = f"name it a{name}" if is_async else "make it an async def"
                raise ConfigError(f"{kind.__qualname__}.{name} {'is' if is_async else 'is not'} an async def: {form}")
        if _overrides(kind, _SEND):
            self.sending = (*self.sending, middleware)
        if _overrides(kind, _RUN):
            self.running = (*self.running, middleware)

    def add_outermost(self, middleware: Middleware) -> None:
        """Add middleware that is called first before a run, and last after it, unless one of its class exists."""
        if not any(type(one) is type(middleware) for one in self.running):
            self.running = (middleware, *self.running)

    def remove(self, kind: type[Middleware]) -> None:
        """Remove the middleware of a class."""
        self.sending = tuple(one for one in self.sending if type(one) is not kind)
        self.running = tuple(one for one in self.running if type(one) is not kind)


def _overrides(kind: type[Middleware], names: tuple[str, ...]) -> bool:
    return any(getattr(kind, name) is not getattr(Middleware, name) for name in names)


@dataclass(slots=True, kw_only=True)
class OutgoingJob:
    """A job that is being sent.

    Attributes:
        id: The job's id.
        task: The task's name.
        queue: The queue's name in the app.
        headers: The job's headers, which ``before_send`` may change; a worker finds them in ``request.headers``. The
            values must be JSON.
        stored_id: The id of the job in Redis; if this job is a duplicate, the id of the existing job. ``None`` until
            the job was sent.
    """

    id: str
    task: str
    queue: str
    headers: dict[str, Any] = field(default_factory=dict)
    stored_id: str | None = None
    _job: NewJob
    _payloads: PayloadCodec | None = None

    @classmethod
    def of(cls, job: NewJob, payloads: PayloadCodec | None = None) -> OutgoingJob:
        """Return ``job`` as hooks see it; ``payloads`` reads data that is encrypted, compressed or pickled."""
        headers = json.loads(job.options.headers) if job.options.headers else {}
        return cls(id=job.id, task=job.name, queue=job.queue, headers=headers, _job=job, _payloads=payloads)

    @property
    def data(self) -> Any:
        """A copy of the job's data: the arguments by name; a list if the task is not registered in the app.

        If the data is pickled and the app does not accept pickles, it is the stored envelope.
        """
        job = self._job
        if self._payloads is not None:
            with suppress(DecodeError):  # a pickle, which this app does not accept
                return self._payloads.load_data(job.data, job.ref, job.name).value
        return codec.decode(job.data)

    @property
    def body(self) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """The data in the shape of Celery's message body: positional arguments, keyword arguments, nothing."""
        data = self.data
        return ([], dict(data), {}) if isinstance(data, Mapping) else (list(data), {}, {})

    @property
    def job(self) -> NewJob:
        """The job as it was before the hooks."""
        return self._job


MAY_END_ATTEMPT: Final = (Interrupt, asyncio.CancelledError)
"""Exceptions that end the attempt if a hook before the task raises them, or if a cancel request raises them there."""


def call_hook(hook: Callable[..., Any], on: str, *args: Any, passes: tuple[type[BaseException], ...] = ()) -> None:
    """Call a hook, and log what it raises, including ``SystemExit``, except ``passes``. A process that it forks exits.

    ``on`` names what it is called for, in the log line.
    """
    pid, raised = os.getpid(), None
    try:
        hook(*args)
    except BaseException as exc:  # noqa: BLE001 - see the docstring
        raised = exc
    _handle(pid, hook, on, raised, passes)


async def acall_hook(
    hook: Callable[..., Coroutine[Any, Any, Any]], on: str, *args: Any, passes: tuple[type[BaseException], ...] = ()
) -> None:
    """:func:`call_hook` for coroutine functions."""
    pid, raised = os.getpid(), None
    try:
        await hook(*args)
    except BaseException as exc:  # noqa: BLE001 - see call_hook()
        raised = exc
    _handle(pid, hook, on, raised, passes)


def send_signal(signal: Signal, sender: Any, passes: tuple[type[BaseException], ...] = (), **named: Any) -> None:
    """:func:`call_hook` for every receiver of a signal; ``named`` are its other arguments."""
    for receiver in signal.receivers(sender):
        if signal.is_async and inspect.iscoroutinefunction(receiver):
            continue  # see asend_signal()
        pid, raised = os.getpid(), None
        try:
            receiver(signal=signal, sender=sender, **named)
        except BaseException as exc:  # noqa: BLE001 - see call_hook()
            raised = exc
        _handle(pid, receiver, signal.name, raised, passes)


async def asend_signal(signal: Signal, sender: Any, **named: Any) -> None:
    """:func:`send_signal` for the receivers that are coroutine functions."""
    for receiver in signal.receivers(sender):
        if inspect.iscoroutinefunction(receiver):
            call = functools.partial(receiver, signal=signal, sender=sender, **named)
            await acall_hook(functools.update_wrapper(call, receiver), signal.name)


def _handle(
    pid: int, hook: object, on: str, raised: BaseException | None, passes: tuple[type[BaseException], ...]
) -> None:
    exit_if_forked(pid, raised)
    if raised is None:
        return
    if isinstance(raised, passes):
        raise raised
    report_failure(hook, on, raised)


class SendHooks:
    """The hooks around an app's sends.

    The job is sent even if a hook raises an ``Exception``. If the headers that the hooks have set cannot be stored, the
    job is sent with the sender's headers.
    """

    def __init__(self, middleware: MiddlewareList, config: Callable[[], Config]) -> None:
        self._middleware = middleware
        self._config = config

    @property
    def has_hooks(self) -> bool:
        """Whether there is any hook."""
        return PUBLISH_SIGNALS.active or bool(self._middleware.sending)

    def send(self, jobs: Sequence[NewJob], send: Callable[[Sequence[NewJob]], list[str]]) -> list[str]:
        """Send ``jobs`` with ``send``, and call the hooks before and after it; return their ids."""
        outgoing = self._outgoing(jobs)
        for job in outgoing:
            for one in self._middleware.sending:
                _call(one.before_send, job)
        changed = [self._after_signal(job) for job in outgoing]
        raised: BaseException | None = None
        try:
            ids = send(changed)
            _publish(outgoing, ids)
        except BaseException as exc:
            raised = exc
            raise
        finally:
            for one, job in self._after(outgoing):
                _call(one.after_send, job, raised)
        return ids

    async def asend(
        self, jobs: Sequence[NewJob], send: Callable[[Sequence[NewJob]], Awaitable[list[str]]]
    ) -> list[str]:
        """:meth:`send` for asyncio."""
        outgoing = self._outgoing(jobs)
        for job in outgoing:
            for one in self._middleware.sending:
                await _acall(one.abefore_send, job)
        changed = [self._after_signal(job) for job in outgoing]
        raised: BaseException | None = None
        try:
            ids = await send(changed)
            _publish(outgoing, ids)
        except BaseException as exc:
            raised = exc
            raise
        finally:
            for one, job in self._after(outgoing):
                await _acall(one.aafter_send, job, raised)
        return ids

    def send_canvas(self, roots: Sequence[PlannedJob], send: Callable[[Sequence[PlannedJob]], None]) -> None:
        """Send the jobs of a canvas with ``send``, and call the hooks before and after it for each call of a task."""
        if not self.has_hooks:
            send(roots)
            return
        planned = _calls(roots)

        def send_changed(jobs: Sequence[NewJob]) -> list[str]:
            ids = _change(planned, jobs)
            send(roots)
            return ids

        self.send([one.job for one in planned], send_changed)

    async def asend_canvas(
        self, roots: Sequence[PlannedJob], send: Callable[[Sequence[PlannedJob]], Awaitable[None]]
    ) -> None:
        """:meth:`send_canvas` for asyncio."""
        if not self.has_hooks:
            await send(roots)
            return
        planned = _calls(roots)

        async def send_changed(jobs: Sequence[NewJob]) -> list[str]:
            ids = _change(planned, jobs)
            await send(roots)
            return ids

        await self.asend([one.job for one in planned], send_changed)

    def _outgoing(self, jobs: Sequence[NewJob]) -> list[OutgoingJob]:
        payloads = PayloadCodec(self._config())
        return [OutgoingJob.of(job, payloads) for job in jobs]

    def _after(self, outgoing: Sequence[OutgoingJob]) -> list[tuple[Middleware, OutgoingJob]]:
        return [(one, job) for job in outgoing for one in reversed(self._middleware.sending)]

    def _after_signal(self, outgoing: OutgoingJob) -> NewJob:
        """Send ``before_task_publish``, and return the job with the headers of all hooks."""
        if before_task_publish.receivers(outgoing.task):
            message = _message(outgoing)
            properties = {"correlation_id": outgoing.id, "priority": outgoing.job.options.priority}
            before_task_publish.send(outgoing.task, **message, properties=properties, declare=[], retry_policy={})
            own = {"id": outgoing.id, "task": outgoing.task}
            headers: dict[Any, Any] = message["headers"]
            outgoing.headers = {name: value for name, value in headers.items() if own.get(name) != value}
        return self._with_headers(outgoing)

    def _with_headers(self, outgoing: OutgoingJob) -> NewJob:
        job = outgoing.job
        try:
            what = f"headers of task {job.name}, set by a hook"
            headers = codec.encode(outgoing.headers, what=what).decode() if outgoing.headers else ""
            if headers == job.options.headers:
                return job
            options = replace(job.options, headers=headers)
            if (limit := self._config().max_payload) is not None:
                check_size(job.data, options, limit, what)
        except (BulltaskError, TypeError, ValueError) as exc:
            report_failure(type(self), "headers", exc)
            return job
        return replace(job, options=options)


def _calls(roots: Sequence[PlannedJob]) -> list[PlannedJob]:
    """Return the calls of tasks in a canvas, without the jobs that bulltask adds between them."""
    return [planned for planned in in_order(roots) if planned.job.name != FAN_OUT]


def _change(planned: Sequence[PlannedJob], jobs: Sequence[NewJob]) -> list[str]:
    for one, job in zip(planned, jobs, strict=True):
        one.job = job
    return [job.id for job in jobs]


def _publish(outgoing: Sequence[OutgoingJob], ids: Sequence[str]) -> None:
    """Send ``after_task_publish`` for jobs that Redis has stored under ``ids``."""
    for job, stored_id in zip(outgoing, ids, strict=True):
        job.stored_id = stored_id
        if after_task_publish.receivers(job.task):
            after_task_publish.send(job.task, **_message(job))


def _message(outgoing: OutgoingJob) -> dict[str, Any]:
    headers = {"id": outgoing.id, "task": outgoing.task, **outgoing.headers}
    return {"body": outgoing.body, "exchange": "", "routing_key": outgoing.queue, "headers": headers}


def _call(hook: Callable[..., Any], *args: Any) -> None:
    try:
        hook(*args)
    except Exception as exc:  # noqa: BLE001 - see SendHooks
        report_failure(hook, hook.__name__, exc)


async def _acall(hook: Callable[..., Awaitable[Any]], *args: Any) -> None:
    try:
        await hook(*args)
    except Exception as exc:  # noqa: BLE001 - see SendHooks
        report_failure(hook, getattr(hook, "__name__", ""), exc)


class DjangoConnections(Middleware):
    """Responsible for the connections of Django's ORM and caches in a worker.

    Before and after each task, connections that are broken, or older than ``CONN_MAX_AGE``, are closed. Otherwise,
    every task after a restart of the database would fail. A connection inside a transaction stays open, because the
    transaction belongs to a test.

    All async tasks of a child share one thread for Django's ORM, and therefore one connection. While other tasks are
    running, only broken connections are closed, because those tasks may be reading from a cursor.
    """

    def __init__(self) -> None:
        self._async_runs = 0

    def before_run(self, request: Request) -> None:  # noqa: ARG002 - the signature of middleware
        """Close old connections, and delete the queries of earlier tasks that Django has recorded (``DEBUG``)."""
        _prepare()

    def after_run(self, request: Request, result: Any, exception: BaseException | None) -> None:  # noqa: ARG002
        """Close old database connections, and the connections of caches."""
        _clean_up()

    async def abefore_run(self, request: Request) -> None:  # noqa: ARG002
        """:meth:`before_run` in the thread in which Django's async methods run."""
        self._async_runs += 1
        await _in_django_thread(_prepare, lambda: self._async_runs == 1)

    async def aafter_run(self, request: Request, result: Any, exception: BaseException | None) -> None:  # noqa: ARG002
        """:meth:`after_run` in the thread in which Django's async methods run."""
        self._async_runs -= 1
        await _in_django_thread(_clean_up, lambda: self._async_runs == 0)


def _prepare(can_close_old: Callable[[], bool] = lambda: True) -> None:
    _close_unusable(can_close_old)
    import_module("django.db").reset_queries()


def _clean_up(can_close_old: Callable[[], bool] = lambda: True) -> None:
    _close_unusable(can_close_old)
    import_module("django.core.cache").caches.close_all()


def _close_unusable(can_close_old: Callable[[], bool]) -> None:
    for connection in import_module("django.db").connections.all(initialized_only=True):
        if connection.in_atomic_block:
            continue
        if can_close_old():
            connection.close_if_unusable_or_obsolete()
        elif connection.errors_occurred and not connection.is_usable():
            connection.close()


async def _in_django_thread(function: Callable[..., None], *args: Any) -> None:
    await import_module("asgiref.sync").sync_to_async(function)(*args)


LifespanFunction = Callable[[], AsyncIterator[Any] | AbstractAsyncContextManager[Any]]
"""An async generator function, or a function that returns an async context manager, without arguments."""


class Lifespan:
    """The context manager that an app has registered with ``@app.lifespan``, if any, and what it has yielded."""

    def __init__(self) -> None:
        self._function: LifespanFunction | None = None
        self.state: Any = None
        self._leave = asyncio.Event()
        self._left = asyncio.Event()

    @property
    def is_defined(self) -> bool:
        """Whether the app has a lifespan."""
        return self._function is not None

    def define(self, function: LifespanFunction) -> None:
        """Register the function, which must have no arguments; an app has one lifespan."""
        name = getattr(function, "__qualname__", repr(function))
        if self._function is not None:
            other = getattr(self._function, "__qualname__", repr(self._function))
            raise ConfigError(
                f"the app already has the lifespan {other}, so {name} cannot be another one: enter both context "
                "managers in one, with contextlib.AsyncExitStack"
            )
        if not callable(function) or inspect.iscoroutinefunction(function):
            raise ConfigError(f"the lifespan {name} must yield once: `async def {name}(): … yield …`")
        try:
            inspect.signature(function).bind()
        except TypeError as exc:
            raise ConfigError(f"the lifespan {name} is called without arguments: {exc}") from None
        self._function = function

    async def live(self, failed: Callable[[BaseException], None], entered: Callable[[], Awaitable[None]]) -> None:
        """Enter the context manager, and leave it after :meth:`leave`, in the same asyncio task.

        ``failed`` is called with what it raises when it is entered, ``entered`` when it has been entered.
        """
        function, has_entered = self._function, False
        assert function is not None
        manager: Any = asynccontextmanager(function) if inspect.isasyncgenfunction(function) else function
        self._leave = asyncio.Event()
        self._left = asyncio.Event()
        try:
            async with manager() as self.state:
                has_entered = True
                await entered()
                await self._leave.wait()
        except BaseException as exc:  # noqa: BLE001 - a lifespan must not end the child
            if has_entered:
                report_failure(function, "lifespan", exc)
            else:
                failed(exc)
        finally:
            self._left.set()

    async def leave(self) -> None:
        """Leave the context manager; call this on the same event loop."""
        self._leave.set()
        await self._left.wait()
