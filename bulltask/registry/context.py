"""``self`` of a bound task: methods to report progress and to reschedule the job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Never, Unpack, cast, overload

from bulltask.clock import Duration, to_epoch_ms, to_ms
from bulltask.errors import (
    BrokerError,
    ConfigError,
    MaxRetriesExceededError,
    RateLimitQueue,
    ReleaseJob,
    RescheduleJob,
    Retry,
    WaitForChildren,
)
from bulltask.jobs import codec
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import check_queue_name
from bulltask.payloads.payload_codec import PLAIN, PayloadCodec, PayloadFormat
from bulltask.registry.canvas import Canvas
from bulltask.registry.checkpoint_methods import CheckpointMethods
from bulltask.registry.checkpoints import Checkpoints
from bulltask.registry.current_job import current_job
from bulltask.registry.explicit_retries import has_retries_left, max_attempts, no_retries_left
from bulltask.registry.job_client import JobClient, JobCommand
from bulltask.registry.option_types import CallKeywords
from bulltask.registry.option_values import UNLIMITED_RETRIES, expiry_ms
from bulltask.registry.overrides import check_overrides_passed
from bulltask.registry.request import Request
from bulltask.registry.signature import Signature
from bulltask.registry.stamping import Stamper
from bulltask.result import AsyncResult
from bulltask.typed.call import CallConversion
from bulltask.user_warnings import warn_user

__all__ = ["Context", "JobMethods"]


class JobMethods:
    """What a task can do with the job for which it is running: the methods of :class:`Context`, and of task classes."""

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
        return self._context.is_stopping()

    def update_progress(self, progress: codec.Json) -> None:
        """Store the job's progress, which Redis publishes as an event (BullMQ's ``updateProgress``).

        Args:
            progress: Any JSON value; dashboards show a number from 0 to 100, or an object.

        Raises:
            EncodeError: The value is not plain JSON.
            JobNotFoundError: The job was removed.
            BrokerError: Redis is unavailable, or returns an error.
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
            task_id: The job's own id, or ``None``.
            state: Any name, such as ``"PROGRESS"``; default: ``"STARTED"``.
            meta: Any JSON value.

        Raises:
            ConfigError: ``task_id`` is the id of another job.
            EncodeError, JobNotFoundError, BrokerError: As for :meth:`update_progress`.
        """
        reported = self._state(task_id, state, meta)
        self.update_progress(reported)
        self._context.reported = reported["state"], meta

    async def aupdate_state(
        self, task_id: str | None = None, state: str | None = None, meta: codec.Json = None
    ) -> None:
        """:meth:`update_state` for async tasks."""
        reported = self._state(task_id, state, meta)
        await self.aupdate_progress(reported)
        self._context.reported = reported["state"], meta

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
            error.task_args, error.task_kwargs = request.args, request.kwargs
            raise error
        arguments = None if args is None and kwargs is None else self._changed(args, kwargs)
        retry = Retry(
            delay_ms=None if countdown is None else to_ms(countdown, "countdown"),
            exc=exc,
            max_retries=max_retries,
            eta_ms=None if eta is None else to_epoch_ms(eta),
            expires=expiry_ms(expires),
            arguments=arguments,
            data=self._encode_call(*arguments) if arguments and context.job_client else None,
            queue=queue and check_queue_name(queue),
        )
        if is_own and exc is not None and not has_retries_left(cast(RunningJob, job), max_retries):
            context.gave_up = retry, exc.__traceback__
            raise exc
        if is_own and not throw:
            context.retry_at_end = retry
            return retry
        raise retry from exc

    def _changed(
        self, args: Sequence[Any] | None, kwargs: Mapping[str, Any] | None
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments of the running job with those that change."""
        request, arguments = self.request, self._context.task.arguments
        if args is None:  # a positional argument of the call is stored by its name, too
            return tuple(request.args), {**request.kwargs, **(kwargs or {})}
        replaced = arguments.bind_partial(args, {})
        others = request.kwargs if kwargs is None else kwargs
        return tuple(args), {name: value for name, value in others.items() if name not in replaced}

    def _encode_call(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bytes:
        context, request = self._context, self.request
        data = context.task.bind_json(args, kwargs, context.form.serializer)
        what = f"the arguments of the next attempt of job {request.id}"
        dump = None if context.payloads is None else context.payloads.dump_arguments
        return dump(data, request.queue, request.task, context.form, what) if dump else codec.encode(data, what=what)

    def update_data(self, data: Any) -> None:
        """Replace the job's data, which its next attempt receives as arguments (BullMQ's ``updateData``).

        Args:
            data: The task's arguments by name; the next attempt receives them as :attr:`Request.kwargs`.

        Raises:
            EncodeError: The value is not JSON, or an argument does not match its type hint.
            PayloadTooLargeError: Data and options together exceed ``max_payload``.
            JobNotFoundError: The job was removed.
            BrokerError: Redis is unavailable, or returns an error.
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

    def move_to_delayed(self, delay: Duration) -> Never:
        """End this attempt, which does not count, and run the job again after ``delay`` (seconds or ``timedelta``).

        Raises:
            RescheduleJob: Always (a ``BaseException``, which ``except Exception`` does not catch).
            ConfigError: ``delay`` is invalid.
        """
        to_ms(delay, "delay")
        raise RescheduleJob(delay)

    def move_to_wait(self) -> Never:
        """End this attempt and release the job, which is then the next in its queue; the attempt does not count.

        Raises:
            ReleaseJob: Always.
        """
        raise ReleaseJob

    def rate_limit(self, duration: Duration) -> Never:
        """End this attempt, release the job, and rate-limit its queue for ``duration``.

        Use it when a service replies "too many requests". The job is next in its queue, and the attempt does not count.

        If the queue has a global rate limit, all workers stop acquiring its jobs for ``duration``. Otherwise, only
        workers with a ``limiter`` stop, and the child that ran the task: BullMQ does not check a limit for others.

        Args:
            duration: Seconds or ``timedelta``, more than 0. It replaces an existing limit.

        Raises:
            RateLimitQueue: Always (a ``BaseException``, which ``except Exception`` does not catch).
            ConfigError: ``duration`` is invalid.
        """
        if not to_ms(duration, "duration"):
            raise ConfigError(f"the duration must be at least 0.001 s, not {duration!r:.200}")
        raise RateLimitQueue(duration)

    def replace(self, canvas: Canvas[Any, Any]) -> Never:
        """End this attempt, and run a canvas instead of the task (Celery's ``replace``).

        The job waits for the canvas, and then completes with the canvas's result or fails with its error. The next step
        of a chain, for example, therefore waits for the canvas, too. The attempt does not count.

        Args:
            canvas: A signature, chain or group.

        Raises:
            WaitForChildren: Always, once Redis has stored the canvas.
            TypeError: The task was called directly, or an argument does not match.
            BrokerError: Redis is unavailable, or returns an error.
        """
        self.on_replace(self._with_own_stamps(canvas))

    def on_replace(self, sig: Canvas[Any, Any]) -> Never:
        """Called by :meth:`replace`: stores the canvas (Celery's ``on_replace``). A task class may change it first.

        Args:
            sig: The canvas, with the stamps of the running job.

        Raises:
            WaitForChildren: Always. Also raises the errors of :meth:`replace`.
        """
        self._client_for_replace().replace(check_overrides_passed(sig))
        raise WaitForChildren(replaced=True)

    async def areplace(self, canvas: Canvas[Any, Any]) -> Never:
        """:meth:`replace` for async tasks; it does not call :meth:`on_replace`.

        Raises:
            WaitForChildren: Always. Also raises the errors of :meth:`replace`.
        """
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
        """Always raise an error. (Celery would add a member to the chord of the running member.)

        Raises:
            TypeError: Always.
        """
        raise TypeError(
            f"task {self.request.task} cannot add a member to its chord, because the number of a chord's members is "
            "fixed when it is sent; replace this member with a group: self.replace(group(…))"
        )

    def move_to_waiting_children(self) -> Never:
        """End this attempt and run the job again when its pending child jobs have finished; the attempt does not count.

        Without pending child jobs it runs again immediately. If a child job with ``fail_parent_on_failure`` has failed,
        this job fails. Use :meth:`update_data` first to record the task's state.

        Raises:
            WaitForChildren: Always.
        """
        raise WaitForChildren

    def _client_for_replace(self) -> JobClient:
        client = self._context.job_client
        if client is None:
            raise TypeError("replace() needs a job, but the task was called directly; return the result of the call")
        return client

    def _send(self, command: JobCommand, value: bytes | str = b"") -> Any:
        client = self._context.job_client
        return None if client is None else client.send(command, value)

    async def _asend(self, command: JobCommand, value: bytes | str = b"") -> Any:
        client = self._context.job_client
        return None if client is None else await client.asend(command, value)

    def _encode_data(self, data: Any) -> bytes:
        what, request, context = f"data of job {self.request.id}", self.request, self._context
        if context.conversion is not None and isinstance(data, dict) and not context.form.is_pickled:
            data = context.conversion.encode_arguments(data)
        dump = None if context.payloads is None else context.payloads.dump_arguments
        return dump(data, request.queue, request.task, context.form, what) if dump else codec.encode(data, what=what)

    def _loaded(self, results: Mapping[str, Any] | None) -> dict[str, Any]:
        payloads = self._context.payloads
        return payloads.load_results(results)[0] if results and payloads else {}

    def _encode(self, progress: codec.Json) -> bytes:
        context = self._context
        convert = None if context.payloads is None else context.payloads.convert
        encoded = codec.encode(progress, what=f"progress of job {self.request.id}", convert=convert)
        context.has_reported = True
        return encoded


class Context(JobMethods, CheckpointMethods):
    """First argument of a task with ``bind=True``.

    Each attempt has a separate context, even if async tasks run concurrently.

    Attributes:
        request: The running job.
        job_client: Executes commands on the job; ``None`` if the task was called directly.
        conversion: The conversion of the job's arguments.
        payloads: Reads results and writes arguments; ``None`` if the task was called directly.
        form: How the job's data was written.
        task: The task.
        is_stopping: Returns whether the worker is stopping.
        has_reported: Whether the task has called :meth:`update_progress`.
        reported: State and meta of its last :meth:`update_state`, ``None`` before the first.
        retry_at_end: The retry that the task has requested with ``throw=False``.
        state: What the app's lifespan has yielded, unless the task has an attribute of this name.
        gave_up: The last retry that was requested with an ``exc`` although none was left, and the traceback of ``exc``.
    """

    has_reported: bool
    reported: tuple[str, Any] | None
    retry_at_end: Retry | None
    gave_up: tuple[Retry, TracebackType | None] | None
    job_client: JobClient | None
    conversion: CallConversion | None
    payloads: PayloadCodec | None
    form: PayloadFormat
    task: Any
    is_stopping: Callable[[], bool]
    if TYPE_CHECKING:
        state: Any

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
            _task=request.task,
            checkpoints=checkpoints,
            request=request,
            has_reported=False,
            reported=None,
            retry_at_end=None,
            gave_up=None,
            job_client=job_client,
            conversion=conversion,
            payloads=payloads,
            form=form,
            task=task,
            is_stopping=is_stopping,
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
                self.task.set_attribute(name, value)

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
        attempts = self.request.attempts if job is None or job.id != self.request.id else max_attempts(job, None)
        return None if attempts > UNLIMITED_RETRIES else attempts - 1

    @property
    def default_retry_delay(self) -> float:
        """The seconds before the first retry, without jitter: the task's ``default_retry_delay``, or its backoff."""
        return float(self.task.options.backoff(self.app.config).delay_ms / 1000)

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

    def ended_by(self, raised: BaseException | None) -> BaseException | None:
        """Return what has ended the attempt whose function has raised ``raised``: a retry, or the same."""
        if self.retry_at_end is not None and (raised is None or isinstance(raised, Exception)):
            self.retry_at_end.exc = self.retry_at_end.exc or raised
            return self.retry_at_end
        if self.gave_up is not None and raised is not None and self.gave_up[0].exc is raised:
            raised.__traceback__ = self.gave_up[1]  # without the frames of bulltask that have raised it again
            return self.gave_up[0]
        return raised

    @property
    def _context(self) -> Context:
        return self

    def __repr__(self) -> str:
        return f"<Context of {self.request.task} job {self.request.id or '(called directly)'}>"
