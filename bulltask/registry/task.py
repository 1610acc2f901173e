"""Tasks: functions that can be called in this process or sent to a worker."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Final, Never, ParamSpec, TypeVar, Unpack, cast, overload

from bulltask.config.config import Config
from bulltask.errors import ConfigError
from bulltask.extras import SPARK, look_up
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import STARMAP
from bulltask.payloads.envelope import JSON
from bulltask.ports import DataFrameMapper, Sender
from bulltask.registry.arguments import check_items
from bulltask.registry.call_binding import CallBinding
from bulltask.registry.call_options import CallOptions
from bulltask.registry.canvas import Group
from bulltask.registry.celery_task import CeleryTask
from bulltask.registry.current import current_sender, registered_task
from bulltask.registry.job_plan import JobPlan, build_job, plan_job
from bulltask.registry.named_task import NamedTask
from bulltask.registry.naming import source_location
from bulltask.registry.on_commit_mixin import OnCommitMixin
from bulltask.registry.option_types import CallKeywords
from bulltask.registry.overrides import record_call, send_call, send_recorded
from bulltask.registry.positional import (
    Takes1,
    Takes1To2,
    Takes1To3,
    Takes2,
    Takes2To3,
    Takes3,
    TakesMany,
    Unchecked,
)
from bulltask.registry.signature import Signature
from bulltask.registry.single_jobs import handle
from bulltask.registry.task_class import TaskClass
from bulltask.registry.task_options import TaskOptions
from bulltask.result import AsyncResult

__all__ = ["AnyTask", "AsyncTask", "Task"]

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

_SPARK_MODULES: Final = {"map_dataframe": "bulltask.spark"}
"""The module of the :class:`bulltask.ports.DataFrameMapper`; imported by name, because it is in a layer above."""


class AnyTask(TaskClass, OnCommitMixin[P, R], CeleryTask):
    """Base class of sync and async tasks.

    Args:
        function: The function.
        name: The task's name, which is the job's name in BullMQ.
        options: The decorator's options.
        sender: Returns the app that sends; called for every send, because a shared task's app may be created later.
        bind: Pass a :class:`Context` as the first argument; the task itself if ``has_base``.
        has_base: It is an instance of a user's class.
    """

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
        CallBinding.__init__(self, function, name, options or TaskOptions(), sender, bind=bind)
        if inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            raise ConfigError(
                f"task {name!r} is a generator function, whose values a worker would not store: return a list, or send "
                "a job for each value"
            )
        self.is_async, self.has_base = inspect.iscoroutinefunction(function), has_base
        self.options.check_function(name, is_async=self.is_async, bind=bind)
        self._default_plan: tuple[Config, JobPlan] | None = None
        self.prepare()
        # Without the function's attributes, because a ``name`` or ``options`` among them would replace the task's.
        functools.update_wrapper(cast(Any, self), function, updated=())
        if bind or self.is_batch:
            vars(self)["__signature__"] = self.arguments.signature

    @property
    def location(self) -> str:
        """The function's ``file:line``."""
        return source_location(self.function)

    def delay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """Send a call to a worker, with the task's options; return once Redis has stored the job.

        Raises:
            TypeError: The arguments do not match the function. Nothing was sent.
            EncodeError, PayloadTooLargeError: The arguments do not match their type hints, are not JSON, or are too
                large. Nothing was sent.
            BrokerError: Redis could not be reached in time, despite retries, or returned an error.
        """
        sender = self._sender()
        if type(self).apply_async is not _APPLY_ASYNC or "apply_async" in self.__dict__ or sender.overrides_send_task:
            return self.apply_async(args, kwargs)  # the same as is_overridden, but a call takes longer
        data = self.bind_json(args, kwargs)
        job = self._plan(sender, data).job(data)
        return handle(self, sender, job, sender.send([job])[0])

    async def adelay(self, *args: P.args, **kwargs: P.kwargs) -> AsyncResult[R]:
        """:meth:`delay` for asyncio: ``await add.adelay(1, 2)`` in an async web handler."""
        if self.is_overridden or self.replaces("aapply_async"):
            return await self.aapply_async(args, kwargs)
        sender, data = self._sender(), self.bind_json(args, kwargs)
        job = self._plan(sender, data).job(data)
        return handle(self, sender, job, (await sender.asend([job]))[0])

    def apply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R]]
    ) -> AsyncResult[R]:
        """Send a call with options (Celery's name; this is not a coroutine, see :meth:`aapply_async`).

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            options: ``countdown``, ``eta``, ``expires``, ``priority``, ``queue``, ``job_id``, ``headers``,
                ``max_retries``, ``lifo``, ``deduplication``, ``parent`` …: see
                :class:`bulltask.registry.call_options.CallOptions`; ``link`` and ``link_error``, a signature or a
                list: see :meth:`bulltask.registry.canvas.Canvas.link`.

        Raises:
            TypeError: An option is unknown. Also raises the errors of :meth:`delay`.
        """
        args, kwargs, sender = args or (), kwargs or {}, self._sender()
        if sender.overrides_send_task:
            return cast(AsyncResult[R], cast(Any, sender).send_task(self.name, args, kwargs, **options))
        return send_call(self, args, kwargs, options)

    async def aapply_async(
        self, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None, **options: Unpack[CallKeywords[R]]
    ) -> AsyncResult[R]:
        """:meth:`apply_async` for asyncio."""
        args, kwargs = args or (), kwargs or {}
        if self.is_overridden:
            # The replaced method is a plain one, which must not block the event loop: its call is recorded and awaited.
            app = cast(Any, self._sender())
            own = not self.replaces("apply_async") or self.replaces("aapply_async")
            send = functools.partial(app.send_task, self.name) if own else self.apply_async
            return await send_recorded(*record_call(self, lambda: send(args, kwargs, **options)))
        if "link" in options or "link_error" in options:
            call: Signature[Any, R] = Signature(self, args, kwargs, options)
            call.has_passed_overrides = True
            return cast(AsyncResult[R], await self._sender().asend_canvas(call))
        sender = self._sender()
        job = self.build(self.bind_json(args, kwargs, options.get("serializer")), CallOptions.of(options))
        return handle(self, sender, job, (await sender.asend([job]))[0])

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
        failed attempts are retried, but without waiting for delays.

        Args:
            args, kwargs: The arguments.
            throw: Raise the exception of a call that fails; ``None``: the setting ``task_eager_propagates``.
            options: As for :meth:`apply_async`; those for queues and delays have no effect.

        Returns:
            The result; ``get()`` returns immediately.

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
        """Send one job for each tuple of positional arguments, up to a thousand per round trip.

        The arguments of all calls are checked before the first job is sent.
        """
        calls = check_items(calls, "delay_many()")
        sender = self._sender()
        if self.is_overridden:
            app: Any = sender
            return cast(list[AsyncResult[R]], app.send_many([Signature(self, args) for args in calls]))
        jobs = [self._plan(sender, data).job(data) for data in (self.bind_json(args, {}) for args in calls)]
        return self._results(sender, jobs, sender.send(jobs))

    def map_dataframe(self, df: FrameT, columns: Any = None, **map_options: Any) -> FrameT:
        """Call the task for every distinct row of a Spark DataFrame; return the rows with the outcome of their jobs.

        It requires the ``spark`` extra. :func:`bulltask.spark.map_dataframe` describes all options.

        Args:
            df: The rows.
            columns: The columns with the arguments; default: all columns of ``df``.
            map_options: ``wait``, ``poll``, ``options``, ``write_id``, ``on_duplicate_rows``, ``result_prefix``,
                ``chunk_size``, ``idempotency_ttl``.

        Returns:
            The columns of ``df``, and ``id``, ``state``, ``return_value`` (JSON), ``failed_reason``.

        Raises:
            TypeError: The columns do not match the function, or an option is unknown.
            ConfigError: An option is invalid, a column of ``df`` has the name of a result column, or the task keeps no
                results.
        """
        mapper: DataFrameMapper = look_up("bulltask.spark", "map_dataframe", _SPARK_MODULES, "spark", SPARK)
        return cast(FrameT, mapper(self, df, columns, **map_options))

    def s(self, *args: P.args, **kwargs: P.kwargs) -> Signature[Any, R]:
        """Return a call that is sent later, alone or as part of a canvas (Celery's ``s``).

        Args:
            args, kwargs: The arguments. In a chain, such as ``a.s() | b.s()``, the result of the previous call comes
                first, before these arguments.

        Raises:
            TypeError: The task has no such parameters.
        """
        return Signature(self, args, kwargs)

    def si(self, *args: P.args, **kwargs: P.kwargs) -> Signature[object, R]:
        """Like :meth:`s`, but ignore the result of the previous call (Celery's ``si``)."""
        return Signature(self, args, kwargs, immutable=True)

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
        return self.one_job([self.bind_json(args, {}, JSON) for args in check_items(items, "starmap()")])

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
        """Return a group of :meth:`starmap` calls with up to ``size`` items each (Celery's ``chunks``).

        Raises:
            ConfigError: ``size`` is not an integer of 1 or more.
        """
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ConfigError(f"the size of chunks must be an integer of 1 or more, not {size!r:.200}")
        every = list(check_items(items, "chunks()"))
        return Group([self.starmap(every[start : start + size]) for start in range(0, len(every), size)])

    def one_job(self, items: Sequence[Any]) -> Signature[Never, list[R]]:
        """Return the call of :meth:`starmap` for calls whose arguments are bound and in their JSON form."""
        one = self.result_decoder
        decode = None if one is None else functools.partial(_decode_each, one)
        starmap = NamedTask(STARMAP, self._sender, self.options, decode)
        return Signature(starmap, (), {"task": self.name, "items": items}, immutable=True)

    @property
    def is_overridden(self) -> bool:
        """Whether a subclass, or a patch, has replaced ``apply_async``, or the app's ``send_task``."""
        return self.replaces("apply_async") or self._sender().overrides_send_task

    def replaces(self, method: str) -> bool:
        """Whether a subclass, or a patch, has replaced ``apply_async`` or ``aapply_async``."""
        original = _APPLY_ASYNC if method == "apply_async" else _AAPPLY_ASYNC
        return getattr(type(self), method) is not original or method in vars(self)

    @property
    def sender(self) -> Sender:
        """The app that sends the task's calls."""
        return self._sender()

    def build(self, data: Any, call: CallOptions) -> NewJob:
        """Return the job for bound arguments."""
        config = self._sender().config  # before the options, because task_annotations apply when it is first read
        return build_job(self.name, data, self.options, call, config)

    def _plan(self, sender: Sender, data: Mapping[str, Any]) -> JobPlan:
        """Return the plan for a call without options, cached because building it is half the work of a send.

        Args:
            sender: The app that sends it.
            data: The arguments. The plan depends on them only if ``task_routes`` has a function.
        """
        config = sender.config
        if self._default_plan is None or self._default_plan[0] is not config:  # a shared task may have another app now
            plan = plan_job(self.name, self.options, CallOptions(), config, data)
            if config.routes is not None and config.routes.calls_functions:
                return plan
            self._default_plan = config, plan
        return self._default_plan[1]

    def _results(self, sender: Sender, jobs: Sequence[NewJob], ids: Sequence[str]) -> list[AsyncResult[R]]:
        reader, sent_ms, decode = sender.results, sender.now_ms(), self.result_decoder
        sent = [AsyncResult(job_id, job.queue, reader, sent_ms, decode) for job, job_id in zip(jobs, ids, strict=True)]
        if self.options.ignore_result:
            for result in sent:
                result.mark_ignored()
        return sent

    def __reduce__(self) -> tuple[Any, ...]:
        return registered_task, (self.name, self.function.__module__)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name} at {self.location}>"


# As they are now, because a test may patch them.
_APPLY_ASYNC: Final = AnyTask.apply_async
_AAPPLY_ASYNC: Final = AnyTask.aapply_async


def _decode_each(decode: Callable[[Any], R], results: Iterable[Any]) -> list[R]:
    return [decode(result) for result in results]


_Job = dict[str, Any]
_Errback = Signature[tuple[_Job, str, str], R]
"""An error callback that receives three arguments: a reference to the failed job, the error and the traceback."""


class Task(AnyTask[P, R]):
    """A sync task, created from a plain function."""

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
        return cast(R, self.direct(args, kwargs))


class AsyncTask(AnyTask[P, R]):
    """An async task, created from an ``async def``; many run concurrently on a child's event loop."""

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
        return cast(Coroutine[Any, Any, R], self.direct(args, kwargs))
