"""Tasks: functions that can be called in this process, or sent to a worker.

``Task`` and ``AsyncTask`` differ in the type of a call; ``AnyTask`` has what a user calls or overrides, then what the
rest of the package uses. A task has a ``CallCodec``, which turns calls into the data of jobs and back. At the end are
the class attributes of users' task classes, and Django's setup.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import fields
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Concatenate, Final, Generic, Never, ParamSpec, TypeVar, Unpack, cast, overload

from bulltask.config.config import Config
from bulltask.jobs.errors import SPARK, BulltaskError, ConfigError, MissingExtraError, look_up
from bulltask.jobs.job import JobRef, NewJob
from bulltask.jobs.names import STARMAP
from bulltask.jobs.payloads import CLOUDPICKLE, JSON, PayloadCodec
from bulltask.registry.batches import (
    PARAMETER,
    BatchArguments,
    batch_types,
    call_for_one,
    check_batch_function,
    from_wire,
    to_wire,
)
from bulltask.registry.call import Arguments, JobPlan, NamedTask, build_job, check_items, plan_job
from bulltask.registry.canvas import (
    Group,
    Signature,
    Takes1,
    Takes1To2,
    Takes1To3,
    Takes2,
    Takes2To3,
    Takes3,
    TakesMany,
    Unchecked,
    record_call,
    send_call,
    send_recorded,
)
from bulltask.registry.context import (
    Checkpoints,
    Context,
    JobMethods,
    current_context,
    enter_context,
)
from bulltask.registry.options import TASK_OPTIONS, CallKeywords, CallOptions, SingleCallKeywords, TaskOptions
from bulltask.registry.protocols import Sender
from bulltask.registry.request import (
    ExceptionInfo,
    Request,
    current_job,
    current_sender,
    registered_task,
    source_location,
)
from bulltask.registry.results import AsyncResult, result_of
from bulltask.registry.types import CallConversion, CallTypes, Definitions, Schema

__all__ = [
    "OPTIONS",
    "AnyTask",
    "AsyncTask",
    "CallCodec",
    "Task",
    "attributes_of_class",
    "close_connections",
    "installed_packages",
    "options_of_class",
    "run_checks",
    "set_up_django",
]


if TYPE_CHECKING:  # at run time, defaults need Python 3.13
    import typing_extensions

    P = typing_extensions.ParamSpec("P", default=...)
    R = typing_extensions.TypeVar("R", default=Any)
else:
    P = ParamSpec("P")
    R = TypeVar("R")
Q = ParamSpec("Q")
A = TypeVar("A")
B = TypeVar("B")
C = TypeVar("C")
FrameT = TypeVar("FrameT")


HANDLERS: Final = ("before_start", "on_success", "on_failure", "on_retry", "after_return")

_FIELDS: Final = frozenset(field.name for field in fields(TaskOptions)) - {"unlimited_retries"}
_EFFECTIVE: Final = frozenset(["max_retries", "default_retry_delay"])
OPTIONS: Final = _FIELDS | TASK_OPTIONS
_RESERVED: Final = frozenset(
    "function _bind _build _codec _default_plan _direct _has_async_handlers _has_base _has_handlers _is_async "
    "_is_batch _is_builtin _location _options _sender _target".split()
)
"""Attributes that a user's task class cannot have."""

_SPARK_MODULES: Final = {"map_dataframe": "bulltask.spark"}
"""The module of a function that is imported by name, because it is in a layer above."""


class AnyTask(JobMethods, Generic[P, R]):
    """Base class of sync and async tasks, and of users' task classes, in which ``self`` is the task, as in Celery.

    Args:
        function: The function.
        name: The task's name, which is the job's name in BullMQ.
        options: The decorator's options.
        sender: Returns the app that sends; called for every send, because a shared task's app may be created later.
        bind: Pass a :class:`Context` as the first argument; the task itself if ``has_base``.
        has_base: It is an instance of a user's class.
    """

    _is_builtin = True  # in the class itself; the classes of users do not have it

    name: str
    function: Callable[..., Any]
    _options: TaskOptions
    _sender: Callable[[], Sender]
    _bind: bool
    _codec: CallCodec
    _is_async: bool
    _is_batch: bool
    _has_base: bool
    _has_handlers: bool
    _has_async_handlers: bool
    _target: Callable[..., Any]
    """What a worker calls: the function, or the task itself if its class has its own ``__call__``."""

    if TYPE_CHECKING:  # options; at run time, __getattr__ reads those that the user's class does not set
        max_retries: int | None
        default_retry_delay: Any
        rate_limit: Any
        queue: str | None
        priority: int | None
        throws: Any
        autoretry_for: Any

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "_is_builtin" in vars(cls):
            return
        if taken := sorted(_RESERVED & vars(cls).keys()):
            raise ConfigError(
                f"{cls.__qualname__}.{taken[0]} would replace an attribute that bulltask uses; give it another name"
            )

    def __init__(
        self,
        function: Callable[..., Any] | None = None,
        name: str = "",
        options: TaskOptions | None = None,
        sender: Callable[[], Sender] = current_sender,
        *,
        bind: bool = False,
        has_base: bool = False,
    ) -> None:
        if function is None:  # super().__init__() in the class of a user
            return
        self.name = name
        self.function = function
        self._options = options or TaskOptions()
        self._sender = sender
        self._bind = bind
        self._codec = CallCodec(function, name, self._options, sender, bind=bind)
        self._is_batch = self._codec.is_batch
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"task {name!r} is a generator function, whose values a worker would not store: return a list, or send "
                "a job for each value"
            )
        self._is_async = inspect.iscoroutinefunction(function)
        self._has_base = has_base
        self._options.check_function(name, is_async=self._is_async, bind=bind)
        self._default_plan: tuple[Config, JobPlan] | None = None
        self._prepare()
        # Without the function's attributes, because a ``name`` or ``options`` among them would replace the task's.
        functools.update_wrapper(cast(Any, self), function, updated=())
        if bind or self._is_batch:
            vars(self)["__signature__"] = self._codec.arguments.signature

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self._location}>"

    def __reduce__(self) -> tuple[Any, ...]:
        return registered_task, (self.name, self.function.__module__)

    # ---- sending -----------------------------------------------------------------------------------------------------

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send a call to a worker, with the task's options; return once Redis has stored the job.

        Raises:
            TypeError: The arguments do not match the function. Nothing was sent.
            EncodeError, PayloadTooLargeError: The arguments do not match their type hints, are not JSON, or are too
                large. Nothing was sent.
            BrokerError: Redis could not be reached in time, despite retries, or returned an error.
        """
        sender = self._sender()
        if type(self).apply_async is not _APPLY_ASYNC or "apply_async" in self.__dict__ or sender._overrides_send_task:
            return self.apply_async(args, kwargs)  # the same as is_overridden, but a call takes longer
        data = self._codec.encode(args, kwargs)
        job = self._plan(sender, data).job(data)
        ignored, decode = self._options.ignore_result, self._codec.result_decoder
        return result_of(sender, job, sender._send([job])[0], decode, ignored=ignored)

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """:meth:`delay` for asyncio: ``await add.adelay(1, 2)`` in an async web handler."""
        if self._is_overridden or self._replaces("aapply_async"):
            return await self.aapply_async(args, kwargs)
        sender, data = self._sender(), self._codec.encode(args, kwargs)
        job = self._plan(sender, data).job(data)
        ignored, decode = self._options.ignore_result, self._codec.result_decoder
        return result_of(sender, job, (await sender._asend([job]))[0], decode, ignored=ignored)

    def apply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R]]
    ) -> AsyncResult[R]:
        """Send a call with options (Celery's name; this is not a coroutine, see :meth:`aapply_async`).

        Args:
            args, kwargs: Positional arguments, and keyword arguments.
            options: ``countdown``, ``eta``, ``expires``, ``priority``, ``queue``, ``job_id``, ``headers``,
                ``max_retries``, ``lifo``, ``deduplication``, ``parent`` …: see
                :class:`bulltask.registry.options.CallOptions`; ``link`` and ``link_error``, a signature or a list: see
                :meth:`bulltask.registry.canvas.Canvas.link`.

        Raises:
            TypeError: An option is unknown. Also raises the errors of :meth:`delay`.
        """
        args, kwargs, sender = args or (), kwargs or {}, self._sender()
        if sender._overrides_send_task:
            return cast(AsyncResult[R], cast(Any, sender).send_task(self.name, args, kwargs, **options))
        return send_call(self, args, kwargs, options)

    async def aapply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R]]
    ) -> AsyncResult[R]:
        """:meth:`apply_async` for asyncio."""
        args, kwargs = args or (), kwargs or {}
        if self._is_overridden:
            # The replaced method is a plain one, which must not block the event loop: its call is recorded and awaited.
            app = cast(Any, self._sender())
            own = not self._replaces("apply_async") or self._replaces("aapply_async")
            send = functools.partial(app.send_task, self.name) if own else self.apply_async
            return await send_recorded(*record_call(self, lambda: send(args, kwargs, **options)))
        if "link" in options or "link_error" in options:
            call: Signature[Any, R] = Signature(self, args, kwargs, options)
            call.has_passed_overrides = True
            return cast(AsyncResult[R], await self._sender()._asend_canvas(call))
        sender = self._sender()
        job = self._build(self._codec.encode(args, kwargs, options.get("serializer")), CallOptions.of(options))
        ignored, decode = self._options.ignore_result, self._codec.result_decoder
        return result_of(sender, job, (await sender._asend([job]))[0], decode, ignored=ignored)

    def apply(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        throw: bool | None = None,
        **options: Unpack[CallKeywords[R]],
    ) -> AsyncResult[R]:
        """Run a call in this process, without Redis, and return its result (Celery's ``apply``).

        Unlike a plain call, it behaves like a job in a worker: arguments and result are converted to JSON and back, and
        failed attempts are retried, but without waiting for delays. ``get()`` returns immediately.

        Args:
            args, kwargs: The arguments.
            throw: Raise the exception of a call that fails; ``None``: the setting ``task_eager_propagates``.
            options: As for :meth:`apply_async`; those for queues and delays have no effect.

        Raises:
            TypeError, EncodeError, PayloadTooLargeError: As for :meth:`delay`. The function was not called.
            Exception: The function's exception, after the last attempt, if ``throw`` is true.
            BulltaskError: The job has not finished after a thousand attempts.
        """
        return Signature[Any, R](self, args, kwargs, options).apply(throw=throw)

    @overload
    def delay_many(
        self: Takes1To3[A, B, C], calls: Iterable[tuple[A] | tuple[A, B] | tuple[A, B, C]]
    ) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self: Takes2To3[A, B, C], calls: Iterable[tuple[A, B] | tuple[A, B, C]]) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self: Takes3[A, B, C], calls: Iterable[tuple[A, B, C]]) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self: Takes1To2[A, B], calls: Iterable[tuple[A] | tuple[A, B]]) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self: Takes2[A, B], calls: Iterable[tuple[A, B]]) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self: Takes1[A], calls: Iterable[Sequence[A]]) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self: Takes2[A, A], calls: Iterable[Sequence[A]]) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self: Takes3[A, A, A], calls: Iterable[Sequence[A]]) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self: TakesMany, calls: Iterable[Sequence[Any]]) -> list[AsyncResult[R]]: ...
    @overload
    def delay_many(self, calls: Iterable[Unchecked]) -> list[AsyncResult[R]]: ...

    def delay_many(self, calls: Iterable[Any]) -> list[AsyncResult[R]]:
        """Send one job for each tuple of arguments, up to a thousand per round trip; all are checked first."""
        calls = check_items(calls, "delay_many()")
        sender = self._sender()
        if self._is_overridden:
            app: Any = sender
            return cast(list[AsyncResult[R]], app.send_many([Signature(self, args) for args in calls]))
        jobs = [self._plan(sender, data).job(data) for data in (self._codec.encode(args, {}) for args in calls)]
        return self._results(sender, jobs, sender._send(jobs))

    def _results(self, sender: Sender, jobs: Sequence[NewJob], ids: Sequence[str]) -> list[AsyncResult[R]]:
        reader, sent_ms, decode = sender._results, sender._now_ms(), self._codec.result_decoder
        sent = [AsyncResult(job_id, job.queue, reader, sent_ms, decode) for job, job_id in zip(jobs, ids, strict=True)]
        if self._options.ignore_result:
            for result in sent:
                result._mark_ignored()
        return sent

    def map_dataframe(self, df: FrameT, columns: Any = None, **map_options: Any) -> FrameT:
        """Call the task for every distinct row of a Spark DataFrame; return the rows with the outcome of their jobs.

        It requires the ``spark`` extra. :func:`bulltask.spark.map_dataframe` describes all options and errors.

        Args:
            df: The rows.
            columns: The columns with the arguments; default: all columns of ``df``.
            map_options: ``wait``, ``poll``, ``options``, ``write_id``, ``on_duplicate_rows``, ``result_prefix``,
                ``chunk_size``, ``idempotency_ttl``.

        Returns:
            The columns of ``df``, and ``id``, ``state``, ``return_value`` (JSON), ``failed_reason``.
        """
        mapper: Callable[..., Any] = look_up("bulltask.spark", "map_dataframe", _SPARK_MODULES, "spark", SPARK)
        return cast(FrameT, mapper(self, df, columns, **map_options))

    def delay_on_commit(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send a call when the current Django transaction commits (Celery's ``delay_on_commit``).

        Outside a transaction, the call is sent immediately. If the transaction is rolled back, nothing is sent. The
        arguments are checked and converted now. The returned handle's id is final, but the job does not exist before
        the commit. (Celery returns ``None``.)

        If the send fails, a ``BrokerError`` is raised where the transaction ends, after the database has committed. To
        have the error logged instead, use :meth:`apply_async_on_commit` with ``robust``.

        Raises:
            TypeError, EncodeError, PayloadTooLargeError: As for ``delay``.
            MissingExtraError: Django is not installed.
        """
        return self.apply_async_on_commit(args, kwargs)

    def apply_async_on_commit(
        self,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
        *,
        using: str | None = None,
        robust: bool = False,
        **options: Unpack[SingleCallKeywords],
    ) -> AsyncResult[R]:
        """Send a call with options when the current Django transaction commits, as :meth:`delay_on_commit` does.

        If the call is a duplicate (``deduplication``), the handle's id changes at the commit to that of the existing
        job.

        Args:
            args, kwargs: The arguments.
            using: The alias of the database: the call is sent when the transaction in this database commits. Default:
                ``"default"``.
            robust: If the send fails, the error is logged instead of raised, and the transaction's other callbacks run.
                The call is then lost.
            options: As for ``apply_async``, except ``link`` and ``link_error``. ``countdown`` and ``expires`` count
                from the commit.

        Raises:
            TypeError: An option is unknown. Also raises the errors of :meth:`delay_on_commit`.
        """
        if linked := options.keys() & {"link", "link_error"}:
            raise TypeError(
                f"apply_async_on_commit() does not accept {min(linked)}; use "
                "transaction.on_commit(lambda: task.apply_async(…))"
            )
        if self._is_overridden:
            task: Any = self
            call, returned = record_call(task, lambda: task.apply_async(args, kwargs, **options))
            return (
                cast(AsyncResult[R], returned)
                if call is None
                else self._send_on_commit(call.job(), using, robust=robust)
            )
        job = self._build(self._codec.encode(args, kwargs or {}, options.get("serializer")), CallOptions.of(options))
        return self._send_on_commit(job, using, robust=robust)

    def _send_on_commit(self, job: NewJob, using: str | None = None, *, robust: bool = False) -> AsyncResult[R]:
        sender = self._sender()
        result = AsyncResult(job.id, job.queue, sender._results, sender._now_ms(), self._codec.result_decoder)

        def send() -> None:
            (stored_id,) = sender._send([job])
            if stored_id != job.id:
                result._ref = JobRef(job.queue, stored_id)

        send.__qualname__ = f"the send of job {job.id} of task {job.name}"  # Django logs this name, if robust
        _transaction().on_commit(send, using=using, robust=robust)
        return result

    # ---- calls that are sent later -----------------------------------------------------------------------------------

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature[Any, R]:
        """Return a call that is sent later, alone or as part of a canvas (Celery's ``s``).

        In a chain, such as ``a.s() | b.s()``, the result of the previous call comes before these arguments. Raises
        ``TypeError`` if the task has no such parameters.
        """
        return Signature(self, args, kwargs)

    def si(self, *args: P.args, **kwargs: P.kwargs) -> Signature[object, R]:
        """Like :meth:`s`, but ignore the result of the previous call (Celery's ``si``)."""
        return Signature(self, args, kwargs, immutable=True)

    def signature(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> Signature[Any, Any]:
        """Return a call that is sent later. Type checkers check only the arguments of ``task.s(…).set(…)``.

        ``options`` are those of :meth:`apply_async`, and ``immutable=True``. Arguments and errors are as for :meth:`s`.
        """
        immutable = bool(options.pop("immutable", False))
        task: Any = self
        return Signature(task, args, kwargs, options, immutable=immutable)

    subtask = signature

    def map(self: Takes1[A], items: Iterable[A]) -> Signature[Never, list[R]]:
        """Return a call that runs the task for one item after another, in a single job (Celery's ``map``)."""
        task: Any = self
        return cast(Signature[Never, list[R]], task.starmap([(item,) for item in check_items(items, "map()")]))

    @overload
    def starmap(
        self: Takes1To3[A, B, C], items: Iterable[tuple[A] | tuple[A, B] | tuple[A, B, C]]
    ) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(
        self: Takes2To3[A, B, C], items: Iterable[tuple[A, B] | tuple[A, B, C]]
    ) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(self: Takes3[A, B, C], items: Iterable[tuple[A, B, C]]) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(self: Takes1To2[A, B], items: Iterable[tuple[A] | tuple[A, B]]) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(self: Takes2[A, B], items: Iterable[tuple[A, B]]) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(self: Takes1[A], items: Iterable[Sequence[A]]) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(self: Takes2[A, A], items: Iterable[Sequence[A]]) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(self: Takes3[A, A, A], items: Iterable[Sequence[A]]) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(self: TakesMany, items: Iterable[Sequence[Any]]) -> Signature[Never, list[R]]: ...
    @overload
    def starmap(self, items: Iterable[Unchecked]) -> Signature[Never, list[R]]: ...

    def starmap(self, items: Iterable[Any]) -> Signature[Never, list[R]]:
        """Like :meth:`map`, for items that are positional arguments (Celery's ``starmap``)."""
        # The worker converts the items of this job, whatever its serializer is.
        return self._starmap_encoded([self._codec.encode(args, {}, JSON) for args in check_items(items, "starmap()")])

    @overload
    def chunks(
        self: Takes1To3[A, B, C], items: Iterable[tuple[A] | tuple[A, B] | tuple[A, B, C]], size: int
    ) -> Group[Never, list[R]]: ...
    @overload
    def chunks(
        self: Takes2To3[A, B, C], items: Iterable[tuple[A, B] | tuple[A, B, C]], size: int
    ) -> Group[Never, list[R]]: ...
    @overload
    def chunks(self: Takes3[A, B, C], items: Iterable[tuple[A, B, C]], size: int) -> Group[Never, list[R]]: ...
    @overload
    def chunks(self: Takes1To2[A, B], items: Iterable[tuple[A] | tuple[A, B]], size: int) -> Group[Never, list[R]]: ...
    @overload
    def chunks(self: Takes2[A, B], items: Iterable[tuple[A, B]], size: int) -> Group[Never, list[R]]: ...
    @overload
    def chunks(self: Takes1[A], items: Iterable[Sequence[A]], size: int) -> Group[Never, list[R]]: ...
    @overload
    def chunks(self: Takes2[A, A], items: Iterable[Sequence[A]], size: int) -> Group[Never, list[R]]: ...
    @overload
    def chunks(self: Takes3[A, A, A], items: Iterable[Sequence[A]], size: int) -> Group[Never, list[R]]: ...
    @overload
    def chunks(self: TakesMany, items: Iterable[Sequence[Any]], size: int) -> Group[Never, list[R]]: ...
    @overload
    def chunks(self, items: Iterable[Unchecked], size: int) -> Group[Never, list[R]]: ...

    def chunks(self, items: Iterable[Any], size: int) -> Group[Never, list[R]]:
        """Return a group of :meth:`starmap` calls of ``size`` items, at least 1; raises ``ConfigError`` otherwise."""
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"the size of chunks must be an integer of 1 or more, not {size!r:.200}")
        every = list(check_items(items, "chunks()"))
        return Group([self.starmap(every[start : start + size]) for start in range(0, len(every), size)])

    def _starmap_encoded(self, items: Sequence[Any]) -> Signature[Never, list[R]]:
        """Return the call of :meth:`starmap` for calls whose arguments are bound and in their JSON form."""
        one = self._codec.result_decoder
        decode = None if one is None else lambda results: [one(result) for result in results]
        starmap = NamedTask(STARMAP, self._sender, self._options, decode)
        return Signature(starmap, (), {"task": self.name, "items": items}, immutable=True)

    # ---- for the user's class to override ----------------------------------------------------------------------------

    def before_start(self, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called before the function, within its time limits; an exception fails the attempt."""

    def on_success(self, retval: Any, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called after Redis has stored the result."""

    def on_failure(
        self, exc: BaseException, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], einfo: ExceptionInfo
    ) -> Any:
        """Called after the job has failed in Redis, when no retry is left."""

    def on_retry(
        self, exc: BaseException, task_id: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], einfo: ExceptionInfo
    ) -> Any:
        """Called after a failed attempt, once Redis has stored that the job will be retried."""

    def after_return(
        self,
        status: str,
        retval: Any,
        task_id: str,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        einfo: ExceptionInfo | None,
    ) -> Any:
        """Called after ``on_success`` or ``on_failure``; ``status`` is ``SUCCESS``, ``FAILURE`` or ``REVOKED``."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the task's function; a class for ``app.register_task`` defines this method instead."""
        if not self._has_base:
            return self._direct(args, kwargs)
        return self.function(self, *args, **kwargs) if self._bind else self.function(*args, **kwargs)

    # ---- the app, and the running job --------------------------------------------------------------------------------

    @property
    def app(self) -> Any:
        """The app that sends the task's calls."""
        return self._sender()

    def AsyncResult(self, task_id: str) -> AsyncResult[Any]:
        """Return the handle of a job by its id; see :meth:`bulltask.App.AsyncResult`."""
        app: Any = self._sender()
        result: AsyncResult[Any] = app.AsyncResult(task_id)
        return result

    @property
    def request(self) -> Request:  # type: ignore[override]
        """The request of the job that this code runs for (Celery's ``task.request``); empty outside a job."""
        if (context := current_context(self.name)) is not None:
            return context.request
        job = current_job()
        if job is None or job.name != self.name:
            return Request(task=self.name, called_directly=True)
        try:
            loaded = PayloadCodec(self._sender()._config).load_arguments(job)
            pickled = self._codec.pickled_parameters(loaded.value) if loaded.is_pickled else ()
            return Request.of(job, *self._codec.decode(loaded.value, pickled))
        except BulltaskError:  # the task is not called, but hooks learn of the failure
            return Request.of(job, (), {})

    if not TYPE_CHECKING:  # type checkers would accept any name

        @property
        def rate_limit(self) -> Any:
            """The option ``rate_limit``; while a job of the task runs, :meth:`Context.rate_limit`, as on ``self``."""
            options = vars(self).get("_options")
            if options is None or current_context(self.name) is not None:
                return super().rate_limit
            return options.rate_limit

        def __getattr__(self, name: str) -> Any:
            """Return an option of the task, such as ``self.queue``; in a job, the effective ``self.max_retries``."""
            options = vars(self).get("_options")
            if name in _EFFECTIVE and options is not None and (context := current_context(self.name)) is not None:
                return getattr(context, name)
            if options is not None and name in _FIELDS:
                return getattr(options, name)
            hint = ""
            if options is None and not name.startswith("__"):
                hint = "; register the task first: task = app.register_task(…)"
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    # ---- for the package: what canvas and workers use ----------------------------------------------------------------

    @property
    def _location(self) -> str:
        """The function's ``file:line``."""
        return source_location(self.function)

    @property
    def _is_overridden(self) -> bool:
        """Whether a subclass, or a patch, has replaced ``apply_async``, or the app's ``send_task``."""
        return self._replaces("apply_async") or self._sender()._overrides_send_task

    def _replaces(self, method: str) -> bool:
        """Whether a subclass, or a patch, has replaced ``apply_async`` or ``aapply_async``."""
        original = _APPLY_ASYNC if method == "apply_async" else _AAPPLY_ASYNC
        return getattr(type(self), method) is not original or method in vars(self)

    def _build(self, data: Any, call: CallOptions) -> NewJob:
        """Return the job for bound arguments."""
        config = self._sender()._config  # before the options, because task_annotations apply when it is first read
        return build_job(self.name, data, self._options, call, config)

    def _plan(self, sender: Sender, data: Mapping[str, Any]) -> JobPlan:
        """Return the plan for a call without options; it is cached, unless ``task_routes`` has a function."""
        config = sender._config
        if self._default_plan is None or self._default_plan[0] is not config:  # a shared task may have another app now
            plan = plan_job(self.name, self._options, CallOptions(), config, data)
            if config.routes is not None and config.routes.calls_functions:
                return plan
            self._default_plan = config, plan
        return self._default_plan[1]

    def _direct(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call the function in this process, as ``task(…)`` and ``super().__call__(…)`` do."""
        if self._is_batch:
            request = Request(task=self.name, args=args, kwargs=kwargs, called_directly=True)
            return call_for_one(
                self.function, self._codec.arguments.bind(args, kwargs), request, is_async=self._is_async
            )
        if not self._has_base:
            given = (self._direct_context(args, kwargs),) if self._bind else ()
            return self.function(*given, *args, **kwargs)
        if self._target is not self.function and current_context(self.name) is not None:
            return self.run(*args, **kwargs)  # from the __call__ of the user's class, in an attempt
        context = self._direct_context(args, kwargs)
        if self._is_async:
            return _awaited(context, lambda: self.run(*args, **kwargs))
        previous = enter_context(context)
        try:
            return self.run(*args, **kwargs)
        finally:
            enter_context(previous)

    @property
    def _context(self) -> Context:
        return current_context(self.name) or self._direct_context((), {})

    def _direct_context(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Context:
        checkpoints = Checkpoints() if self._options.checkpoint else None
        request = Request(task=self.name, args=args, kwargs=kwargs, called_directly=True)
        return Context(request, checkpoints=checkpoints, task=self)

    def _set_attribute(self, name: str, value: object) -> None:
        """Set an attribute for ``self`` of a bound task, as in Celery, where ``self`` is the task."""
        if name in _RESERVED or hasattr(type(self), name):
            raise AttributeError(f"self.{name} would replace an attribute that bulltask uses; give it another name")
        setattr(self, name, value)

    def _set_options(self, options: TaskOptions) -> None:
        self._options = self._codec.options = options

    def _prepare(self) -> None:
        """Check the user's class, and look up which methods it overrides.

        An ``async def`` method needs an ``async def`` function, which needs an ``async def __call__``; and the class of
        a batch task overrides no method.
        """
        kind = type(self)
        overridden = [name for name in HANDLERS if getattr(kind, name) is not getattr(AnyTask, name)]
        self._has_handlers = bool(overridden)
        self._has_async_handlers = any(inspect.iscoroutinefunction(getattr(kind, name)) for name in overridden)
        has_call = not _is_builtin(next(base for base in kind.__mro__ if "__call__" in vars(base)))
        if self._is_batch and (names := overridden + ["__call__"] * has_call):
            raise ConfigError(
                f"{kind.__qualname__}.{names[0]} would be called for one job, but the function of batch task "
                f"{self.name!r} is called for many; give the task another base="
            )
        self._target = cast(Any, self) if has_call else self.function
        if not self._is_async:
            overridden += ["__call__"] if has_call else []
            if wrong := [name for name in overridden if inspect.iscoroutinefunction(getattr(kind, name))]:
                raise ConfigError(
                    f"{kind.__qualname__}.{wrong[0]} is an async def, but the task {self.name!r} is not; make the "
                    "method a plain one, or give the task another base="
                )
        elif has_call and not inspect.iscoroutinefunction(kind.__call__):
            raise ConfigError(
                f"the task {self.name!r} is an async def, so {kind.__qualname__}.__call__ must also be an async def "
                "that awaits self.run(…); or give the task another base="
            )


# As they are now, because a test may patch them.
_APPLY_ASYNC: Final = AnyTask.apply_async
_AAPPLY_ASYNC: Final = AnyTask.aapply_async


_Job = dict[str, Any]
_Errback = Signature[tuple[_Job, str, str], R]
"""An error callback that receives three arguments: a reference to the failed job, the error and the traceback."""


class Task(AnyTask[P, R]):
    """A sync task, created from a plain function."""

    _is_builtin = True

    @overload
    def s(self: Callable[Concatenate[A, Q], R], *args: Q.args, **kwargs: Q.kwargs) -> Signature[A, R]: ...
    @overload
    def s(  # type: ignore[misc] # mypy: a task with other parameters is no such callable
        self: Callable[Concatenate[_Job, str, str, Q], R], *args: Q.args, **kwargs: Q.kwargs
    ) -> _Errback[R]: ...
    @overload
    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature[Never, R]: ...

    def s(self, *args: Any, **kwargs: Any) -> Signature[Any, Any]:
        """Return a call that is sent later; see :meth:`AnyTask.s`."""
        return Signature(self, args, kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Call the function in this process, without a worker."""
        return cast(R, self._direct(args, kwargs))


class AsyncTask(AnyTask[P, R]):
    """An async task, created from an ``async def``; many run concurrently on a child's event loop."""

    _is_builtin = True

    @overload
    def s(
        self: Callable[Concatenate[A, Q], Coroutine[Any, Any, R]], *args: Q.args, **kwargs: Q.kwargs
    ) -> Signature[A, R]: ...
    @overload
    def s(  # type: ignore[misc]
        self: Callable[Concatenate[_Job, str, str, Q], Coroutine[Any, Any, R]], *args: Q.args, **kwargs: Q.kwargs
    ) -> _Errback[R]: ...
    @overload
    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature[Never, R]: ...

    def s(self, *args: Any, **kwargs: Any) -> Signature[Any, Any]:
        """Return a call that is sent later; see :meth:`AnyTask.s`."""
        return Signature(self, args, kwargs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> Coroutine[Any, Any, R]:
        """Call the function in this process, without a worker, and return its coroutine."""
        return cast(Coroutine[Any, Any, R], self._direct(args, kwargs))


async def _awaited(context: Context, call: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    previous = enter_context(context)
    try:
        return await call()
    finally:
        enter_context(previous)


def _transaction() -> ModuleType:
    try:
        return import_module("django.db.transaction")
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] != "django":
            raise
        raise MissingExtraError(
            "delay_on_commit() needs Django, which is not installed: pip install 'bulltask[django]'"
        ) from exc


class CallCodec:
    """Encodes a task's calls as the data of jobs, and decodes it; a batch task's call has one argument."""

    def __init__(
        self,
        function: Callable[..., Any],
        name: str,
        options: TaskOptions,
        sender: Callable[[], Sender],
        *,
        bind: bool,
    ) -> None:
        self._function = function
        self._name = name
        self.options = options
        self._bind = bind
        self._sender = sender
        self.is_batch = options.batch is not None
        if self.is_batch:
            check_batch_function(function, name, bind=bind, spark=options.spark)
            self.arguments: Arguments = BatchArguments(name)
        else:
            self.arguments = Arguments(function, name, skip_first=bind)

    @functools.cached_property
    def types(self) -> CallTypes:
        """The types of the parameters and the return value, derived from their hints.

        The hints are evaluated on first use, because they may name classes that are defined after the task.
        """
        if self.is_batch:
            return batch_types(self._function, self._name)
        return CallTypes(self._function, self._name, skip_first=self._bind)

    @functools.cached_property
    def conversion(self) -> CallConversion | None:
        """The conversion of calls by their hints, or ``None``; an error if ``typed=True`` cannot be kept."""
        typed = self.options.enforced_hints
        typed = self._sender()._typed if typed is None else typed
        return self.types.conversion(typed, lambda: bool(self._sender()._config.encryption_keys))

    @functools.cached_property
    def result_decoder(self) -> Callable[[Any], Any] | None:
        """Converts a JSON result to the hinted return type; ``None`` if results are not converted.

        With Celery's option ``pydantic=True``, a caller receives the JSON, as in Celery.
        """
        conversion = self.conversion
        if conversion is None or not conversion.converts_result or self.options.pydantic:
            return None
        return conversion.decode_result

    @functools.cached_property
    def _default_serializer(self) -> str:
        return self._sender()._serializer

    def data_schema(self, definitions: Definitions) -> Schema:
        """Return the JSON Schema of a job's data; for a batch task, that of its one argument."""
        if not self.is_batch:
            return self.types.data_schema(definitions)
        schema = self.types.type_of(PARAMETER).schema(definitions)
        if schema.get("type") != "array":
            return schema
        return {"type": "array", "prefixItems": [schema], "minItems": 1, "maxItems": 1}

    def check_types(self) -> None:
        """Evaluate the type hints now, so that a worker's children inherit them and errors are raised at startup."""
        _ = self.conversion

    def check_partial(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Raise ``TypeError`` if the arguments cannot be completed to form a valid call."""
        self.arguments.bind_partial(args, kwargs)

    def encode(self, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None) -> Any:
        """Return a call's data: the arguments by parameter name; for a batch task, its one argument.

        They are in their JSON form unless they will be pickled, by this serializer or, if it is ``None``, the task's.
        Raises ``TypeError`` if they do not match the signature, and ``EncodeError`` if one does not match its type
        hint.
        """
        data = self._encoded(self.arguments.bind(args, kwargs), serializer)
        return to_wire(data) if self.is_batch else data

    def encode_after(
        self, count: int, args: Sequence[Any], kwargs: Mapping[str, Any], serializer: str | None = None
    ) -> tuple[Any, list[str]]:
        """Encode a call whose first arguments are not known yet; see :meth:`Arguments.bind_after`."""
        data, names = self.arguments.bind_after(count, args, kwargs)
        return ([], [""]) if self.is_batch else (self._encoded(data, serializer), names)

    def decode(self, data: Any, pickled: Collection[str] = ()) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a job's data as positional and keyword arguments, converted to the types of their hints.

        Parameters whose values were pickled are not converted. Raises ``InvalidJobError`` if the data does not match
        the signature or a type hint.
        """
        args, kwargs = (from_wire(data, self._name), {}) if self.is_batch else self.arguments.unbind(data)
        conversion = self.conversion
        if conversion is None:
            return args, kwargs
        return conversion.decode_arguments(args, kwargs, pickled)

    def pickled_parameters(self, data: Any) -> set[str]:
        """Return the parameters whose values are in pickled data, and are therefore not converted."""
        conversion = self.conversion
        return set(data) if isinstance(data, dict) else set() if conversion is None else set(conversion.parameters)

    def _encoded(self, data: dict[str, Any], serializer: str | None) -> dict[str, Any]:
        conversion = self.conversion
        if conversion is None:
            return data
        used = serializer or self.options.serializer or self._default_serializer
        return data if used == CLOUDPICKLE else conversion.encode_arguments(data)


def _is_builtin(kind: type) -> bool:
    """Return whether a base class of a task is not a user's."""
    return "_is_builtin" in vars(kind) or kind in (JobMethods, Generic, object)


def options_of_class(kind: type) -> dict[str, Any]:
    """Return the options that a user's task class sets as class attributes."""
    found: dict[str, Any] = {}
    for base in reversed(kind.__mro__):
        if not _is_builtin(base):
            for name in OPTIONS & vars(base).keys():
                value = vars(base)[name]
                value = value.__func__ if isinstance(value, staticmethod) else value
                if name == "retry_backoff" or not hasattr(type(value), "__get__"):
                    found[name] = value
    return found


def attributes_of_class(kind: type) -> set[str]:
    """Return the names of the attributes that a user's task class and its base classes define."""
    own = (base for base in kind.__mro__ if not _is_builtin(base))
    return {name for base in own for name in vars(base) if not name.startswith("__")}


_VARIABLE = "DJANGO_SETTINGS_MODULE"


def set_up_django() -> bool:
    """Call ``django.setup()`` if the environment names Django's settings, as Celery does before it imports tasks.

    Without it, a task module that imports a model would raise ``AppRegistryNotReady``. Return whether Django is ready.
    """
    if not os.environ.get(_VARIABLE) or importlib.util.find_spec("django") is None:
        return False
    if not importlib.import_module("django.apps").apps.ready:
        importlib.import_module("django").setup()
    return True


def run_checks() -> None:
    """Run Django's system checks, as Celery's worker does: they import the URLconf, whose modules may define tasks.

    What the checks find is ignored, as in Celery. The environment variable ``CELERY_SKIP_CHECKS`` skips them.
    """
    if not os.environ.get("CELERY_SKIP_CHECKS"):
        importlib.import_module("django.core.checks").run_checks()


def close_connections() -> None:
    """Close the database connections of this thread, if Django is in use, so that forked children do not share them."""
    if "django.db" in sys.modules and importlib.import_module("django.apps").apps.ready:
        importlib.import_module("django.db").connections.close_all()


def installed_packages() -> list[str]:
    """Return the packages in ``INSTALLED_APPS``; raises ``ConfigError`` if this process does not use Django."""
    if not set_up_django():
        raise ConfigError(
            f"autodiscover_tasks() without packages needs Django and the environment variable {_VARIABLE}; pass the "
            "names of the packages, as in autodiscover_tasks(['shop', 'mail'])"
        )
    return [config.name for config in importlib.import_module("django.apps").apps.get_app_configs()]
