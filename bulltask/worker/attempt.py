"""Runs attempts: finds a job's task, checks the job, calls the function, and returns the outcome.

Begin with :class:`JobStarter` and :class:`AttemptRunner`. :class:`JobPayloads` reads the arguments and writes the
result; :class:`RedisJobClient` is what a bound task's context calls; :class:`BatchRunner` runs batches.
"""

from __future__ import annotations

import contextvars
import functools
import json
import math
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from enum import Enum, auto
from typing import Any, Final, TypeVar

from bulltask.app import App
from bulltask.config.parsers import TaskRate
from bulltask.config.process import exit_if_forked
from bulltask.jobs import codec
from bulltask.jobs.clock import ServerClock, mono_ms, to_ms, value_class
from bulltask.jobs.errors import (
    RECOVERABLE,
    BrokerError,
    BulltaskError,
    EncodeError,
    Ignore,
    Interrupt,
    InvalidJobError,
    JobExpiredError,
    PermanentError,
    SoftTimeLimitExceeded,
    TaskCancelled,
    TaskNotRegisteredError,
    WorkerShutdown,
    incompatible,
)
from bulltask.jobs.fields import (
    NO_LIMITS,
    REPLACEMENT_FIELD,
    Checkpoint,
    ChildResults,
    Replacement,
    TimeLimits,
    storable_arguments,
)
from bulltask.jobs.job import UNLIMITED_ATTEMPTS, JobRef, PlannedJob, RunningJob, check_together
from bulltask.jobs.names import FAN_OUT, REVOKED, STARMAP
from bulltask.jobs.payloads import CLOUDPICKLE, ENVELOPE_START, PLAIN, PayloadCodec, PayloadFormat
from bulltask.jobs.stored_job import FailedJob
from bulltask.observe.counters import MetricsBlock
from bulltask.observe.events import JobStarted
from bulltask.observe.signals import TASK_SIGNALS
from bulltask.queue.schedulers import add_next_iteration, scheduling_retry_delay_ms
from bulltask.registry.batches import BatchJob, ErrorOrResult, split_outcome
from bulltask.registry.canvas import Canvas, Signature
from bulltask.registry.context import Checkpoints, Context, JobClient, JobCommand, LazyContext, enter_attempt
from bulltask.registry.request import FailedRequest, Request, origin_of_replacement
from bulltask.registry.results import AsyncResult, GroupResult
from bulltask.registry.task import AnyTask
from bulltask.transport.broker import Broker
from bulltask.transport.call import AnyAsyncClient, Call, command
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.flow import child_failure, children_values
from bulltask.transport.scripts.job import add_log, update_data, update_progress
from bulltask.transport.scripts.move import MAX_DELAY_MS, incompatible_since, store_checkpoint
from bulltask.worker.cancellation import (
    Cancellation,
    InterruptibleCall,
    TaskExecution,
    TaskThreads,
    call_task,
    end_code,
)
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.outcomes import (
    AcquiredJob,
    CompletedOutcome,
    FailedOutcome,
    IncompatibleOutcome,
    Outcome,
    ReleasedOutcome,
    RescheduledByWorkerOutcome,
    RetriedOutcome,
    WaitingForChildrenOutcome,
    as_permanent,
    decide_retry,
    interrupt_in,
    is_retried,
    requested_outcome,
    with_checkpoint,
)
from bulltask.worker.run_hooks import HookedRun, RunHooks
from bulltask.worker.slots import CancelReason, ChildLimits, Deadlines, Slot
from bulltask.worker.spark_tasks import SparkTaskRunner

__all__ = [
    "THROTTLED",
    "Attempt",
    "AttemptRunner",
    "Batch",
    "BatchRunner",
    "IterationAdder",
    "JobArguments",
    "JobStarter",
    "RedisJobClient",
    "Throttled",
]


_NO_REASON: Final = "the task has set the state FAILURE"


def outcome_of_ignored(
    reported: tuple[str, Any] | None, encode: Callable[[Any], CompletedOutcome | FailedOutcome]
) -> CompletedOutcome | FailedOutcome:
    """Return the outcome of an attempt that ended with ``Ignore`` after reporting this state and meta, if any."""
    state, meta = reported or ("", None)
    match state:
        case "FAILURE":
            return _failed(meta)
        case "REVOKED":
            return FailedOutcome(REVOKED, "", REVOKED, TaskCancelled(REVOKED))
        case "SUCCESS":
            return encode(meta)
        case _:
            return CompletedOutcome(b"null", None, ignored=True)


def _failed(meta: Any) -> FailedOutcome:
    """Return the outcome for a reason, or for Celery's form of an exception: ``exc_type`` and ``exc_message``."""
    kind, reason = "", meta
    if isinstance(meta, dict) and "exc_type" in meta:
        module, reason = meta.get("exc_module"), meta.get("exc_message")
        kind = f"{module}.{meta['exc_type']}" if module and module != "builtins" else str(meta["exc_type"])
    text = _text(reason) or kind or _NO_REASON
    # AsyncResult reads the exception's class from the last line of a Python traceback.
    trace = f"Traceback (most recent call last):\n{kind}: {text}\n" if kind else ""
    return FailedOutcome(text, trace, "permanent", PermanentError(text), expected=True)


def _text(reason: Any) -> str:
    if isinstance(reason, Sequence) and not isinstance(reason, str):
        return "\n".join(map(str, reason))
    return reason if isinstance(reason, str) else "" if reason is None else json.dumps(reason)


R = TypeVar("R")


@value_class
class JobArguments:
    """The arguments of an attempt, and how they, and results that the job receives, were written."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    form: PayloadFormat = PLAIN
    with_pickled_result: bool = False


class JobPayloads:
    """Reads and writes the payloads of jobs."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._config = app._config
        self._tasks = app.tasks
        self.codec = PayloadCodec(app._config)
        self._convert = app._config.convert
        self._result_forms: dict[str, PayloadFormat] = {}

    def arguments(
        self, job: RunningJob, task: AnyTask[..., Any], job_client: Callable[[RunningJob], JobClient]
    ) -> JobArguments:
        """Return a job's arguments, converted to the types of their hints unless they were pickled.

        Raises:
            DecodeError: The data, or a result that the job receives, is malformed or not accepted.
            InvalidJobError: The data does not match the task.
        """
        canvas = job.opts.canvas
        loaded = self.codec.load_arguments(job)
        data, is_pickled = loaded.value, loaded.is_pickled
        pickled = task._codec.pickled_parameters(data) if is_pickled else set()
        result_is_pickled = False
        received = ChildResults.from_wire(canvas) if canvas else None
        if canvas and "request" in canvas:
            self._give_attributes(data, canvas["request"])
        if received is not None:
            results, result_is_pickled = self.codec.load_results(job_client(job).send("children_values"))
            add = functools.partial(received.add_to, data, results, job.id)
            data = self._without_values(job, InvalidJobError, "the job's data", add)
            pickled |= {received.parameter} if result_is_pickled else set()
        form = PayloadFormat(CLOUDPICKLE) if is_pickled else PLAIN
        if not self._config.encryption_keys:
            return JobArguments(*task._codec.decode(data, pickled), form, result_is_pickled)
        unbind = functools.partial(task._codec.decode, data, pickled)
        what = f"the job's data does not match task {job.name}"
        return JobArguments(*self._without_values(job, InvalidJobError, what, unbind), form, result_is_pickled)

    def _give_attributes(self, data: Any, parameter: object) -> None:
        """Give the reference of the failed job, which an error callback receives, the attributes of a request."""
        place: Any = 0 if isinstance(data, list) else parameter
        with suppress(LookupError, TypeError):  # another client may have changed the data
            if isinstance(data[place], list):  # *args
                data, place = data[place], 0
            if isinstance(data[place], dict):
                data[place] = FailedRequest(data[place], self._app)

    def plain_reader(self, task: AnyTask[..., Any]) -> Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] | None:
        """Return the function that reads most jobs' arguments from their decoded data; ``None``: :meth:`arguments`."""
        if self._config.encryption_keys:
            return None
        codec = task._codec
        return codec.decode if codec.conversion is not None or task._is_batch else codec.arguments.unbind

    def plain_encoder(self, task: AnyTask[..., Any]) -> Callable[[object], bytes] | None:
        """Return the function that writes the task's return values as JSON; ``None`` if :meth:`result` must do more."""
        config = self._config
        is_json = task._options.result_form(config) == PLAIN and not config.encryption_keys
        if not is_json or task._codec.conversion is not None or task.name in {STARMAP, FAN_OUT}:
            return None
        what = f"the return value of task {task.name}"
        return functools.partial(codec.encode, what=what, limit=config.max_payload, convert=self._convert)

    def result(self, job: RunningJob, task: AnyTask[..., Any], arguments: JobArguments, value: Any) -> bytes:
        """Return the stored form of a return value; raises ``EncodeError`` or ``PayloadTooLargeError``."""
        conversion, form, what = (
            task._codec.conversion,
            self._form(task, arguments),
            f"the return value of task {job.name}",
        )
        if conversion is not None and not form.is_pickled:
            value = self._without_values(job, EncodeError, what, functools.partial(conversion.encode_result, value))
        if form is PLAIN and not self._config.encryption_keys:
            return codec.encode(value, what=what, limit=self._config.max_payload, convert=self._convert)
        return self.codec.dump_result(value, JobRef(job.queue, job.id), form, what)

    def result_of_replacement(
        self, job: RunningJob, of_results: Callable[[Mapping[str, Any]], Any], results: Mapping[str, Any]
    ) -> tuple[bytes, Any]:
        """Return the result of a job that was replaced with a canvas, as it is stored and as a value."""
        loaded, is_pickled = self.codec.load_results(results)
        value, config = of_results(loaded), self._config
        form = PayloadFormat(CLOUDPICKLE if is_pickled else config.result_serializer, config.result_compression)
        what = f"the return value of job {job.id}"
        return self.codec.dump_result(value, JobRef(job.queue, job.id), form, what), value

    def error(self, job: RunningJob, task: AnyTask[..., Any] | None, exc: BaseException | list[Any] | None) -> str:
        """Return an exception as it is stored; if the job's serializer is JSON, its arguments.

        ``""``: the message is enough to rebuild it, or it cannot be stored.
        """
        if not isinstance(exc, Exception | list):
            return ""
        own, ref = None if task is None else task._options.serializer, JobRef(job.queue, job.id)
        if isinstance(exc, Exception) and (own or self._config.result_serializer) == CLOUDPICKLE:
            return self.codec.dump_error(exc, ref)
        arguments = exc if isinstance(exc, list) else storable_arguments(exc)
        return self.codec.dump_error_arguments(arguments, ref) if arguments else ""

    def _without_values(self, job: RunningJob, kind: type[BulltaskError], what: str, call: Callable[[], R]) -> R:
        return self.codec.without_values(job.queue, what, kind, call) if self._config.encryption_keys else call()

    def _form(self, task: AnyTask[..., Any], arguments: JobArguments) -> PayloadFormat:
        """Return how a result is written; a job that passes other results on keeps their serializer."""
        if task.name == STARMAP:
            task = self._tasks.get(arguments.kwargs.get("task", "")) or task
        form = self._result_forms.get(task.name)
        if form is None:
            form = task._options.result_form(self._config)
            form = self._result_forms[task.name] = PLAIN if form == PLAIN else form  # result() compares the identity
        passes_on = task.name == FAN_OUT and arguments.with_pickled_result
        return form._replace(serializer=CLOUDPICKLE) if passes_on else form


class RedisJobClient:
    """Executes commands for one running job; a :class:`~bulltask.registry.context.JobClient`."""

    def __init__(self, job: RunningJob, broker: Broker, aclient: Callable[[], AnyAsyncClient]) -> None:
        self._job = job
        self._broker = broker
        self._aclient = aclient
        self._keys = broker.keys(job.queue)
        self._pool = broker.pool
        self._config = broker.config

    def send(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command on a connection from the pool."""
        return self._pool.run(self._call(command, value))

    async def asend(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command on the child's event loop."""
        return await self._aclient().run(self._call(command, value))

    def store_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """Store the job's checkpoint and progress on a connection from the pool."""
        is_stored = self._pool.run(store_checkpoint(self._keys, self._job.id, token, checkpoint))
        if is_stored and progress is not None:
            self.send("progress", progress)
        return is_stored

    async def astore_checkpoint(self, token: str, checkpoint: str, progress: bytes | None) -> bool:
        """Store the job's checkpoint and progress on the child's event loop."""
        is_stored = await self._aclient().run(store_checkpoint(self._keys, self._job.id, token, checkpoint))
        if is_stored and progress is not None:
            await self.asend("progress", progress)
        return is_stored

    def replace(self, canvas: Canvas[Any, Any], *, retries: int = 0) -> None:
        """Add a canvas as child jobs of the job; the canvas's result becomes the job's result."""
        roots, mark = self._replacement(canvas, retries)
        from bulltask.queue.sync.flow import FlowProducer  # noqa: PLC0415 - a tenth of the worker's modules

        FlowProducer(broker=lambda: self._broker).add_planned(roots, [mark])

    async def areplace(self, canvas: Canvas[Any, Any], *, retries: int = 0) -> None:
        """:meth:`replace` for asyncio."""
        roots, mark = self._replacement(canvas, retries)
        from bulltask.queue.aio.flow import AsyncFlowProducer  # noqa: PLC0415 - a tenth of the worker's modules

        await AsyncFlowProducer(broker=lambda: self._broker).add_planned(roots, [mark])

    def _replacement(self, canvas: Canvas[Any, Any], retries: int) -> tuple[list[PlannedJob], Call[Any]]:
        from bulltask.registry.canvas_plan import plan_replacement  # noqa: PLC0415 - only for a canvas

        ref = JobRef(self._job.queue, self._job.id)
        origin = origin_of_replacement(self._job)
        roots, replacement = plan_replacement(canvas, self._config, ref, origin, retries=retries)
        return roots, command("HSET", self._keys.job(self._job.id), REPLACEMENT_FIELD, replacement.to_json())

    def _call(self, name: JobCommand, value: Any) -> Call[Any]:  # noqa: PLR0911 - one for each command
        keys, job = self._keys, self._job
        match name:
            case "progress":
                return update_progress(keys, job.id, value)
            case "log":
                return add_log(keys, job.id, value, job.opts.get("kl"), self._config.max_logs)
            case "data":
                check_together(value, job.opts, self._config.max_payload, f"the data of job {job.id}")
                return update_data(keys, job.id, value)
            case "children_values":
                return children_values(keys, job.id)
            case "pending_children":
                return command("SCARD", keys.dependencies(job.id), parse_reply=int)
            case "incompatible_since":
                return incompatible_since(keys, job.id)
            case "child_failure":
                return child_failure(value, keys.prefix, hash_tag=self._config.queue_hash_tag)


_MIN_DELAY_MS: Final = 1_000
_FAILED_CHILD_JOB: Final = re.compile(r"child (?P<key>.+) failed", re.DOTALL)
"""BullMQ's reason for a parent job that failed because of a child job."""
_STARTED_TOO_OFTEN: Final = "job started more than allowable limit"
"""The same message as in Node's BullMQ, because alerts may search for it."""


class _FailedChildJobError(Exception):
    """A child job has failed, so its parent fails for the same reason."""

    def __init__(self, reason: str, trace: str, failed_job: FailedJob, original: Exception | list[Any] | None) -> None:
        super().__init__(reason)
        self.reason = reason
        self.trace = trace
        self.failed_job = failed_job
        self.original = original


@value_class
class TaskPlan:
    """What a child decides about a task once, before the first job of the task.

    Attributes:
        limits, rate: Its time and rate limits, else the app's.
        off_main_thread: Whether its function runs on the event loop, or in a thread.
        needs_context: Whether its function is called with a context, or with a job of a batch.
        read_arguments: Returns the arguments in a job's decoded data; ``None`` if they may be encrypted.
        encode_result: Writes a return value, if that takes no more than JSON; ``None`` if it does.
    """

    task: AnyTask[..., Any]
    limits: TimeLimits
    rate: TaskRate | None
    off_main_thread: bool
    needs_context: bool
    read_arguments: Callable[[Any], tuple[tuple[Any, ...], dict[str, Any]]] | None
    encode_result: Callable[[object], bytes] | None


@value_class
class Attempt:
    """A job with its task, its plan, valid arguments, and the job's time limits, else the task's."""

    job: RunningJob
    task: AnyTask[..., Any]
    arguments: JobArguments
    plan: TaskPlan
    limits: TimeLimits = NO_LIMITS
    context: Context | None = None


class AttemptRunner:
    """Runs attempts.

    Attributes:
        is_stopping: Returns whether tasks should end soon, checkpointed ones between two items.
        is_eager: Whether jobs run in the process that has sent them, for ``request.is_eager``.
        waits_for_other_workers: Whether a job that this worker cannot run is delayed, so that another one can take it.
        keeps_plans: Whether the tasks do not change any more, so that each has one :class:`TaskPlan`.
    """

    def __init__(  # noqa: PLR0913 - the parts of a child
        self,
        app: App,
        job_client: Callable[[RunningJob], JobClient],
        spark: SparkTaskRunner,
        cancellation: Cancellation,
        child_limits: ChildLimits,
        threads: TaskThreads,
        *,
        worker_id: str = "",
    ) -> None:
        self._app = app
        self._config = app._config
        self._job_client = job_client
        self._spark = spark
        self.cancellation = cancellation
        self._child_limits = child_limits
        self._pid = os.getpid()
        self.threads = threads
        self._worker_id = worker_id
        self._payloads = JobPayloads(app)
        self.is_stopping: Callable[[], bool] = lambda: False
        self.is_eager = False
        self.waits_for_other_workers = True
        self.keeps_plans = True
        self._plans: dict[str, TaskPlan] = {}
        self._limits_starts = app._config.max_started_attempts is not None
        self._main_context: contextvars.Context | None = None
        self._middleware = app._middleware
        self.hooks = RunHooks(app)

    def begin(self, job: RunningJob) -> Attempt | Outcome:  # noqa: C901 - what a job may need before it starts
        """Return the attempt, or an outcome if the task must not or cannot be called."""
        if job.malformed:
            return FailedOutcome(job.deferred_failure, "", "permanent", malformed=True)
        plan = self._plans.get(job.name)
        task: AnyTask[..., Any] | None = self._app.tasks.get(job.name) if plan is None else plan.task
        context = None
        try:
            if job.deferred_failure or job.releases or self._limits_starts or job.opts.may_expire:
                self._check(job)
            if job.replacement:
                return self._outcome_of_replacement(job)
            if task is None:
                raise self._not_registered(job.name)  # noqa: TRY301 - handled like a problem with the arguments
            plan = plan or self._new_plan(task)
            if plan.read_arguments is None or job.opts.canvas or job.data.startswith(ENVELOPE_START):
                arguments = self._payloads.arguments(job, task, self._job_client)
            else:  # nearly every job
                arguments = JobArguments(*plan.read_arguments(codec.decode(job.data, what=f"data of job {job.id}")))
            own = job.opts.time_limits
            limits = plan.limits if own is NO_LIMITS else own.with_defaults(plan.limits)
            if plan.needs_context:
                arguments, context = self._with_context(job, task, arguments, limits)
        except BrokerError:
            return ReleasedOutcome()  # the results of its child jobs could not be read; the job is next in its queue
        except _FailedChildJobError as exc:
            error = self._payloads.error(job, task, exc.original)
            failed_job = exc.failed_job
            original = exc.original if isinstance(exc.original, Exception) else None
            return FailedOutcome(exc.reason, exc.trace, "permanent", original, failed_job=failed_job, error=error)
        except Exception as exc:  # noqa: BLE001 - whatever a job's data contains, the child must survive
            return self._outcome_before_start(as_permanent(exc), job, task)
        return Attempt(job, task, arguments, plan, limits, context)

    def _new_plan(self, task: AnyTask[..., Any]) -> TaskPlan:
        """Return the plan of a task; a hint that cannot be evaluated is an error of its jobs."""
        plans = self._plans  # forget_plans() may replace it meanwhile
        limits = task._options.time_limits.with_defaults(self._config.time_limits)
        plan = TaskPlan(
            task=task,
            limits=NO_LIMITS if limits == NO_LIMITS else limits,
            rate=task._options.rate(self._config),
            # Spark's session is bound to the thread that has created it.
            off_main_thread=task._is_async or (self.threads.enabled and not task._options.spark),
            needs_context=task._is_batch or task._bind or task._has_base,
            read_arguments=self._payloads.plain_reader(task),
            encode_result=self._payloads.plain_encoder(task),
        )
        if self.keeps_plans:
            plans[task.name] = plan
        return plan

    def forget_plans(self) -> None:
        """Plan the tasks again, because their limits were changed; a signal handler calls this."""
        self._plans = {}

    @property
    def may_start(self) -> bool:
        """False while all threads for sync tasks are busy."""
        return not self.threads.all_busy

    def only_context(self) -> contextvars.Context | None:
        """Return the context of the sync task on the main thread; ``None`` if there is none, or other tasks, too."""
        return None if self._main_context is None or self.cancellation.runs_async else self._main_context

    def reserve_thread(self, attempt: Attempt, slot: Slot) -> None:
        """Reserve a thread, if a task that :meth:`acall` runs needs one."""
        if not attempt.task._is_async:
            self.threads.reserve(slot)

    def counting_cpu(self, counts: MetricsBlock | None, every: int = 1) -> Callable[[Attempt, Slot], Outcome]:
        """Return :meth:`call`, with which the CPU time of this thread is counted, too, if there are counts.

        Reading the clock costs a very short job about a percent. With ``every``, so many calls count as the last of
        them.
        """
        if counts is None:
            return self.call
        left = (every + 1) // 2

        def call(attempt: Attempt, slot: Slot) -> Outcome:
            nonlocal left
            left -= 1
            if left:
                return self.call(attempt, slot)
            left, started_s = every, time.thread_time()
            outcome = self.call(attempt, slot)
            counts.used_cpu(attempt.job.queue, attempt.job.name, every * (time.thread_time() - started_s))
            return outcome

        return call

    def call(self, attempt: Attempt, slot: Slot) -> Outcome:
        """Run a sync task.

        Any exception ends the attempt, not the child: ``sys.exit()`` in a task fails its job.
        """
        job, task, arguments = attempt.job, attempt.task, attempt.arguments
        # A copy, so that one task's context variables are not visible to the next one.
        variables = contextvars.copy_context()
        context = LazyContext(functools.partial(self._context, job, task, arguments, attempt.limits), attempt.context)
        variables.run(enter_attempt, job, context)
        has_hooks = task._has_handlers or TASK_SIGNALS.active or self._middleware.running  # as RunHooks.has_hooks
        target = self._hooked(attempt, variables).call if has_hooks else task._target
        function: Callable[..., Any] = functools.partial(call_task, self.cancellation.raise_if_cancelled, target)
        if task._options.spark:
            function = self._spark.wrap(job, slot.token, function, attempt.context)
        if attempt.limits is NO_LIMITS and attempt.context is None:
            execution = TaskExecution(slot, job.name, NO_LIMITS)
        else:
            execution = self._start_execution(attempt, slot, alone=True)
        function = functools.partial(variables.run, function, *arguments.args, **arguments.kwargs)
        self._main_context = variables
        raised, result = self.execute(execution, function)
        self._main_context = None
        if raised is None and context.created is None:
            return self._encode_result(attempt, result)
        outcome = self.outcome(attempt, raised, result, context)
        if type(outcome) is RetriedOutcome and (moved := _in_other_queue(attempt, outcome)) is not None:
            with suppress(BulltaskError):  # otherwise, the job is retried in its own queue
                self._job_client(job).replace(moved, retries=job.attempts_made + 1)
                return WaitingForChildrenOutcome(replaced=True)
        return outcome

    async def acall(self, attempt: Attempt, slot: Slot) -> Outcome:
        """Run an async task, or a sync task in a thread.

        The caller creates a separate asyncio task, and so a separate context, for it, and awaits nothing else in it,
        because the task's code may have cancelled it. :meth:`amove` follows.
        """
        execution = self._start_execution(attempt, slot, alone=False)
        create = functools.partial(self._context, attempt.job, attempt.task, attempt.arguments, attempt.limits)
        enter_attempt(attempt.job, context := LazyContext(create, attempt.context))
        ending = await self.aexecute(execution, attempt.task, functools.partial(self._bound, attempt))
        return self.outcome(attempt, *ending, context)

    async def amove(self, attempt: Attempt, outcome: RetriedOutcome) -> Outcome:
        """Move the job of an async task to another queue if ``self.retry(queue=…)`` has requested it."""
        if (moved := _in_other_queue(attempt, outcome)) is not None:
            with suppress(BulltaskError):
                await self._job_client(attempt.job).areplace(moved, retries=attempt.job.attempts_made + 1)
                return WaitingForChildrenOutcome(replaced=True)
        return outcome

    def _bound(self, attempt: Attempt) -> Callable[[], Any]:
        """Return the call of a task that does not run on the main thread, with its hooks."""
        target: Callable[..., Any] = attempt.task._target
        if self.hooks.has_hooks(attempt.task):
            variables = None if attempt.task._is_async else contextvars.copy_context()
            hooked = self._hooked(attempt, variables)
            hooked.in_thread = not attempt.task._is_async
            target = hooked.acall if variables is None else functools.partial(variables.run, hooked.call)
        return functools.partial(target, *attempt.arguments.args, **attempt.arguments.kwargs)

    def execute(self, execution: TaskExecution, function: Callable[[], Any]) -> ErrorOrResult:
        """Call a function on the main thread."""
        self.cancellation.execution = execution
        try:
            result = function()
        except BaseException as exc:  # noqa: BLE001 - any exception ends the attempt
            return execution.resolve(exc) or exc, None
        else:
            return execution.resolve(None) if execution.acknowledged else None, result
        finally:
            if self._child_limits.limits_memory:
                self._child_limits.check_memory()

    async def aexecute(
        self, execution: TaskExecution, task: AnyTask[..., Any], bound: Callable[[], Callable[[], Any]]
    ) -> ErrorOrResult:
        """Call a function on the event loop, or in a thread if the task is sync; ``bound`` returns it."""
        entered = self.cancellation.enter_async(execution)
        raised: BaseException | None = None
        result: object = None
        try:
            if task._is_async:
                result = await bound()()
            else:
                raised, result = await self._call_in_thread(execution, bound())
        except BaseException as exc:  # noqa: BLE001 - as in execute()
            raised = exc
        try:
            exit_if_forked(self._pid, raised)
            return execution.resolve(raised), result
        finally:
            self.cancellation.leave_async(entered)
            if self._child_limits.limits_memory:
                self._child_limits.check_memory()

    async def _call_in_thread(
        self, execution: TaskExecution, function: Callable[[], Any]
    ) -> tuple[BaseException | None, Any]:
        def started(call: InterruptibleCall) -> None:
            execution.call = call

        return await self.threads.run(execution.slot, started, call_task, lambda: None, function)

    def close(self) -> None:
        """Close the Spark session that the tasks of this child share."""
        self._spark.close()

    def _check(self, job: RunningJob) -> None:
        if job.deferred_failure:
            in_canvas = job.canvas or job.replacement
            raise self._failure_of_child_job(job) if in_canvas else PermanentError(job.deferred_failure)
        if job.releases and job.releases >= (self._config.max_releases or math.inf):
            raise PermanentError(
                f"the job was released {job.releases:,} times in a row without progress (max_releases); to wait, use "
                "self.move_to_delayed(seconds)"
            )
        limit = self._config.max_started_attempts
        if limit is not None:
            before_checkpoint = Checkpoint.from_json(job.checkpoint, job.id).attempts_started  # do not count
            if job.attempts_started > limit + before_checkpoint:
                raise PermanentError(_STARTED_TOO_OFTEN)
        if job.expires_ms is not None and (late_ms := self._app._now_ms() - job.expires_ms) > 0:
            raise JobExpiredError(f"the job expired {late_ms / 1000:.3f} s before it was acquired")

    def _with_context(
        self, job: RunningJob, task: AnyTask[..., Any], arguments: JobArguments, limits: TimeLimits
    ) -> tuple[JobArguments, Context | None]:
        if task._is_batch:
            request = self._request(job, arguments, limits)
            return replace(arguments, args=(BatchJob(arguments.args[0], request),), kwargs={}), None
        context = self._context(job, task, arguments, limits)
        if not task._bind or task._target is not task.function:  # __call__ of a task class passes the task itself
            return arguments, context
        return replace(arguments, args=(task if task._has_base else context, *arguments.args)), context

    def _outcome_of_replacement(self, job: RunningJob) -> Outcome:
        """Return the outcome of a job whose task has replaced itself with a canvas: the canvas's result."""
        client, replacement = self._job_client(job), Replacement.from_json(job.replacement)
        if client.send("pending_children"):
            return WaitingForChildrenOutcome(replaced=True)  # the child process was killed before it could move the job
        results = client.send("children_values")
        return CompletedOutcome(*self._payloads.result_of_replacement(job, replacement.result, results))

    def _failure_of_child_job(self, job: RunningJob) -> Exception:
        """Return the error of a canvas job that fails because a child job has failed: the child job's error."""
        child = _FAILED_CHILD_JOB.fullmatch(job.deferred_failure)
        failure = None if child is None else self._job_client(job).send("child_failure", child["key"])
        if child is None or failure is None:
            return PermanentError(job.deferred_failure)
        reason, trace, failed_job, error = failure
        original = self._payloads.codec.load_error_by_key(child["key"], error) if error else None
        return _FailedChildJobError(reason, trace, failed_job, original)

    def _not_registered(self, task: str) -> InvalidJobError:
        return incompatible(InvalidJobError(f"task {task!r} is not registered in app {self._app.name!r}"))

    def _outcome_before_start(self, error: PermanentError, job: RunningJob, task: AnyTask[..., Any] | None) -> Outcome:
        """Return the outcome of a job that this worker cannot run: it waits for another worker, or it fails.

        The delay is as long as the job has been waiting, so it doubles each time, up to a minute.
        """
        limit_ms = self._config.incompatible_timeout_ms
        may_wait = limit_ms != 0 and self.waits_for_other_workers
        if not (may_wait and isinstance(error, InvalidJobError) and error.is_incompatible):
            return self._outcome_of_error(error, job, task)
        try:
            stored = self._job_client(job).send("incompatible_since")
        except BrokerError:
            return ReleasedOutcome()
        now_ms = self._app._now_ms()
        # After an attempt, in a worker that could run the job, the time starts again.
        attempts_made, _, since = str(stored).partition(":")
        is_first = attempts_made != str(job.attempts_made) or not since.isdecimal()
        since_ms = now_ms if is_first else int(since)
        waited_ms = max(0, now_ms - since_ms)
        if limit_ms is not None and waited_ms >= limit_ms:
            for_s = f"no worker could run it for {limit_ms / 1000:,g} s, see incompatible_timeout"
            return self._outcome_of_error(InvalidJobError(f"{error} ({for_s})"), job, task)
        delay_ms = min(waited_ms + _MIN_DELAY_MS, MAX_DELAY_MS)
        return IncompatibleOutcome(delay_ms, str(error), f"{job.attempts_made}:{since_ms}", is_first)

    def _context(
        self, job: RunningJob, task: AnyTask[..., Any], arguments: JobArguments, limits: TimeLimits
    ) -> Context:
        client, checkpoints = self._job_client(job), None
        if task._options.checkpoint:
            interval_ms = to_ms(task._options.checkpoint_interval)
            checkpoints = Checkpoints(job.checkpoint, job.id, job.attempts_started, interval_ms, client)
        request, payloads = self._request(job, arguments, limits), self._payloads.codec
        return Context(
            request,
            client,
            task._codec.conversion,
            checkpoints,
            payloads,
            arguments.form,
            task=task,
            is_stopping=self.is_stopping,
        )

    def _request(self, job: RunningJob, arguments: JobArguments, limits: TimeLimits) -> Request:
        request = Request.of(job, arguments.args, arguments.kwargs, limits, self._app.name, self._worker_id)
        return replace(request, is_eager=True) if self.is_eager else request

    def _hooked(self, attempt: Attempt, variables: contextvars.Context | None) -> HookedRun:
        job, task, arguments, context = attempt.job, attempt.task, attempt.arguments, attempt.context
        request = self._request(job, arguments, attempt.limits) if context is None else context.request
        return self.hooks.start(job, task, request, variables)

    def _start_execution(self, attempt: Attempt, slot: Slot, *, alone: bool) -> TaskExecution:
        if attempt.limits is not NO_LIMITS:
            self.cancellation.set_deadlines(slot, self.deadlines(attempt, attempt.limits, alone=alone))
        context = attempt.context
        if attempt.task._options.checkpoint and context is not None and context._checkpoints is not None:
            context._checkpoints.start(slot.token, self.is_stopping, is_async=attempt.task._is_async)
        return TaskExecution(slot, attempt.job.name, attempt.limits)

    def deadlines(self, attempt: Attempt, limits: TimeLimits, *, alone: bool, in_batch: bool = False) -> Deadlines:
        """Return the deadlines of an attempt that starts now, with these limits."""
        now_ms = mono_ms()
        hard_ms = limits.hard_ms or 0
        # Computed now, because the retry policy may be user code, which the supervisor never runs.
        will_retry = hard_ms > 0 and is_retried(
            limits.hard_exceeded(attempt.job.name), attempt.job, attempt.task, self._app
        )
        return Deadlines(
            soft_at_ms=0 if limits.soft_ms is None else now_ms + limits.soft_ms,
            hard_at_ms=now_ms + hard_ms if hard_ms else 0,
            hard_ms=hard_ms,
            is_async=not alone,
            will_retry=will_retry,
            in_batch=in_batch,
        )

    def outcome(
        self, attempt: Attempt, raised: BaseException | None, result: object, context: LazyContext | None = None
    ) -> Outcome:
        """Return the outcome of an attempt that has ended like this; a batch has no context."""
        made = None if context is None else context.created
        if made is not None:
            raised = made._ended_by(raised)
        if raised is not None:
            raised = interrupt_in(raised) or raised
        if raised is None:
            outcome: Outcome = self._encode_result(attempt, result)
        elif isinstance(raised, Ignore):
            reported = None if made is None else made._reported
            outcome = outcome_of_ignored(reported, functools.partial(self._encode_result, attempt))
        else:
            outcome = requested_outcome(raised) or self._outcome_of_exception(raised, attempt)
        checkpoints = None if attempt.context is None else attempt.context._checkpoints
        return outcome if checkpoints is None else with_checkpoint(outcome, checkpoints)

    def _outcome_of_exception(self, exc: BaseException, attempt: Attempt) -> Outcome:
        job, task = attempt.job, attempt.task
        if task.name == STARMAP:  # it looks up its task, and reads the arguments of all calls, before the first call
            if isinstance(exc, TaskNotRegisteredError):
                name = attempt.arguments.kwargs.get("task", "")
                return self._outcome_before_start(self._not_registered(name), job, task)
            if isinstance(exc, InvalidJobError) and exc.is_incompatible:
                return self._outcome_before_start(exc, job, task)
        return self._outcome_of_error(exc, job, task)

    def _outcome_of_error(self, exc: BaseException, job: RunningJob, task: AnyTask[..., Any] | None) -> Outcome:
        outcome = decide_retry(exc, job, task, self._app)
        if isinstance(outcome, FailedOutcome) and (error := self._payloads.error(job, task, outcome.exception)):
            outcome = replace(outcome, error=error)
        exit_if_forked(self._pid)  # a user's backoff function or category rule may have forked
        return outcome

    def _encode_result(self, attempt: Attempt, result: object) -> CompletedOutcome | FailedOutcome:
        job, task, encode = attempt.job, attempt.task, attempt.plan.encode_result
        if not job.parent_key and job.opts.bulltask.get("ignore_result", task._options.ignore_result) is True:
            return CompletedOutcome(b"null", result)
        try:
            if encode is not None:
                return CompletedOutcome(encode(result), result)
            return CompletedOutcome(self._payloads.result(job, task, attempt.arguments, result), result)
        except Exception as exc:  # noqa: BLE001 - a retry would not help, so the job fails even with attempts left
            if isinstance(result, AsyncResult | GroupResult):  # return other.delay(): Celery stores the ids
                return self._encode_result(attempt, result.as_tuple())
            return FailedOutcome(str(exc), "", "permanent")


def _in_other_queue(attempt: Attempt, outcome: RetriedOutcome) -> Signature[Any, Any] | None:
    """Return the next attempt of a job that ``self.retry(queue=…)`` moves to another queue; ``None`` for other jobs."""
    job, retry = attempt.job, outcome.requested
    if retry is None or retry.queue in {None, job.queue}:
        return None
    arguments, context = attempt.arguments, attempt.context
    args = arguments.args if context is None else context.request.args
    args, kwargs = retry.arguments or (args, arguments.kwargs)
    options = {
        "queue": retry.queue,
        "countdown": outcome.delay_ms / 1000,
        "priority": job.priority,
        "headers": job.headers,
        "soft_time_limit": job.opts.time_limits.soft_s,
        "time_limit": job.opts.time_limits.hard_s,
        "telemetry_metadata": job.opts.get("tm"),
    }
    if outcome.expires_ms is not None or job.expires_ms is not None:
        options["expires"] = datetime.fromtimestamp((outcome.expires_ms or job.expires_ms or 0) / 1000, UTC)
    if "max_explicit_retries" not in job.opts.bulltask:  # the call or the task sets one limit for all retries
        options["max_retries"] = min(max(1, job.attempts), UNLIMITED_ATTEMPTS) - 1
    has_unique_id = "jobId" not in job.opts and not job.id.isdecimal()  # not from a caller, or a queue's counter
    if has_unique_id and not job.opts.retries_before:
        options["job_id"] = job.id
    return Signature(attempt.task, args, kwargs, options)


_ITERATION_LOCK_LOST_MS: Final = 1_000
"""Delay of a job whose lock was lost while its next iteration was being added."""


class IterationAdder:
    """Adds the next iteration of a job scheduler when a child acquires the current one.

    The next iteration is added before the current job runs, so the scheduler continues even if that job fails.
    """

    def __init__(self, fetcher: JobFetcher, clock: ServerClock, zone: tzinfo) -> None:
        self._fetcher = fetcher
        self._clock = clock
        self._zone = zone

    def add_next(self, acquired: AcquiredJob) -> RescheduledByWorkerOutcome | None:
        """Add the next iteration; return the current job's outcome if that is not possible.

        While Redis is unavailable, the call is retried, and the supervisor renews the job's lock. After an error
        reply, or if the schedule is malformed, the job is rescheduled.
        """
        interrupted = False
        while True:
            try:
                self._add(acquired)
                # Redis may have been unavailable for longer than the lock lasts, so another worker may have the job.
                lost = interrupted and not self._fetcher.renew_lock(acquired)
            except RECOVERABLE as exc:
                interrupted = True
                self._fetcher.back_off(exc)
            except Exception as exc:  # noqa: BLE001 - a malformed schedule must not stop the child
                return RescheduledByWorkerOutcome(
                    scheduling_retry_delay_ms(acquired.job.attempts_started), str(exc) or type(exc).__name__
                )
            else:
                self._fetcher.backoff.reset()
                return RescheduledByWorkerOutcome(_ITERATION_LOCK_LOST_MS, "its lock was lost") if lost else None

    def _add(self, acquired: AcquiredJob) -> None:
        run_sync(
            self._fetcher.client, add_next_iteration(acquired.keys, acquired.job, self._clock.now_ms(), self._zone)
        )


class Throttled(Enum):
    """The answer for a job whose task has reached its rate limit: it is delayed, and its slot has been given back."""

    THROTTLED = auto()


THROTTLED: Final = Throttled.THROTTLED


class JobStarter:
    """Starts acquired jobs."""

    def __init__(
        self,
        fetcher: JobFetcher,
        runner: AttemptRunner,
        iteration_adder: IterationAdder,
        wait_until_running: Callable[[int], None],
        child_limits: ChildLimits,
        counts: MetricsBlock | None = None,
    ) -> None:
        self._counts = counts
        self._fetcher = fetcher
        self._runner = runner
        self._iteration_adder = iteration_adder
        self._wait_until_running = wait_until_running
        self._child_limits = child_limits

    def begin(self, acquired: AcquiredJob) -> Attempt | Outcome | Throttled:
        """Return the attempt, its outcome if the task is not called, or :data:`THROTTLED`."""
        job = acquired.job
        if acquired.max_concurrent:
            # Before the job's data is decoded, because decoding may crash the child.
            self._wait_until_running(acquired.max_concurrent)
        attempt = self._runner.begin(job)
        # If no worker can run the job, it waits, and its schedule with it: otherwise, one job a period would wait.
        if job.is_repeated and not isinstance(attempt, IncompatibleOutcome):
            attempt = self._iteration_adder.add_next(acquired) or attempt
        if (
            isinstance(attempt, Attempt)
            and attempt.plan.rate is not None
            and self._fetcher.throttle_if_limited(acquired, attempt.plan.rate)
        ):
            return THROTTLED
        bus = self._fetcher.bus
        if bus.listeners[JobStarted]:
            bus.emit(JobStarted(job.id, job.queue, job.name, job.attempts_started))
        if self._counts is not None and job.attempts_started <= 1:
            self._counts.waited(job.queue, job.name, job.waited_ms)
        if self._child_limits.exist and self._child_limits.count_job():
            self._fetcher.closing = True  # this is the last job
        return attempt


class Batch:
    """The call of a batch task's function, with the hooks of each job around it, if there are any."""

    def __init__(self, task: AnyTask[..., Any], jobs: Sequence[BatchJob[Any]], runs: Sequence[HookedRun]) -> None:
        self._task = task
        self.jobs = jobs
        self._runs = runs
        self._called: list[BatchJob[Any]] = []

    def call(self) -> Any:
        """Call a sync function with all jobs except those that have already ended, such as revoked ones."""
        raised, returned = None, None
        try:
            for job, run in zip(self.jobs, self._runs, strict=False):
                with _only_this_job(job):
                    run.enter()
            if self._start():
                returned = self._task.function(list(self._called))
        except BaseException as exc:
            raised = exc
            raise
        finally:
            for run, (error, result) in self._hook_outcomes(raised, returned):
                run.leave(result, error)
        return returned

    async def acall(self) -> Any:
        """:meth:`call` for an async function."""
        raised, returned = None, None
        try:
            for job, run in zip(self.jobs, self._runs, strict=False):
                with _only_this_job(job):
                    await run.aenter()
            if self._start():
                returned = await self._task.function(list(self._called))
        except BaseException as exc:
            raised = exc
            raise
        finally:
            await end_code()
            for run, (error, result) in self._hook_outcomes(raised, returned):
                await run.aleave(result, error)
        return returned

    def outcomes(self, raised: BaseException | None, returned: object) -> list[ErrorOrResult]:
        """Return the outcome of each job, after the call has raised an exception or returned this."""
        outcomes = split_outcome(self._task.name, self._called, raised, returned)
        by_job = {id(job): outcome for job, outcome in zip(self._called, outcomes, strict=True)}
        return [by_job.get(id(job)) or job.outcome or (raised, None) for job in self.jobs]

    def _start(self) -> list[BatchJob[Any]]:
        self._called = [job for job in self.jobs if job.outcome is None]
        return self._called

    def _hook_outcomes(self, raised: BaseException | None, returned: object) -> list[tuple[HookedRun, ErrorOrResult]]:
        if not self._runs:
            return []
        return list(zip(self._runs, self.outcomes(raised, returned), strict=True))[::-1]


@contextmanager
def _only_this_job(job: BatchJob[Any]) -> Iterator[None]:
    """If a hook raises an interrupt, end only this job, unless the supervisor requested the interrupt."""
    try:
        yield
    except (SoftTimeLimitExceeded, TaskCancelled, WorkerShutdown):
        raise
    except Interrupt as exc:
        job.fail(exc)


BatchAttempts = Sequence[tuple[Attempt, Slot]]


class BatchRunner:
    """Runs batches."""

    def __init__(self, runner: AttemptRunner) -> None:
        self._runner = runner
        self._cancellation = runner.cancellation

    def call(self, members: BatchAttempts) -> list[Outcome]:
        """Call a sync function for the jobs of a batch; return the outcome of each."""
        batch = self._batch(members, variables := contextvars.copy_context())
        execution = self._start(members, batch, alone=True)
        function = functools.partial(variables.run, call_task, self._cancellation.raise_if_cancelled, batch.call)
        return self._outcomes(members, batch, self._runner.execute(execution, function))

    async def acall(self, members: BatchAttempts) -> list[Outcome]:
        """Call an async function, or a sync one in a thread."""
        task = members[0][0].task
        variables = None if task._is_async else contextvars.copy_context()
        batch = self._batch(members, variables)
        execution = self._start(members, batch, alone=False)
        function = batch.acall if variables is None else functools.partial(variables.run, batch.call)
        return self._outcomes(members, batch, await self._runner.aexecute(execution, task, lambda: function))

    def _batch(self, members: BatchAttempts, variables: contextvars.Context | None) -> Batch:
        jobs, runs, hooks = [attempt.arguments.args[0] for attempt, _ in members], [], self._runner.hooks
        if hooks.has_hooks(members[0][0].task):
            runs = [
                hooks.start(attempt.job, attempt.task, job.request, variables)
                for (attempt, _), job in zip(members, jobs, strict=True)
            ]
        return Batch(members[0][0].task, jobs, runs)

    def _start(self, members: BatchAttempts, batch: Batch, *, alone: bool) -> TaskExecution:
        """Give all jobs the same deadlines, from the shortest limits. A job that is already revoked does not run."""
        limits, slots, in_batch = NO_LIMITS, [slot for _, slot in members], len(members) > 1
        for attempt, _ in members:
            limits = limits.shortest(attempt.limits)
        for attempt, slot in members:
            deadlines = self._runner.deadlines(attempt, limits, alone=alone, in_batch=in_batch)
            if limits == NO_LIMITS:
                slot.set_deadlines(deadlines)
            else:
                self._cancellation.set_deadlines(slot, deadlines)
        for job, slot in zip(batch.jobs, slots, strict=True):
            if in_batch and slot.cancel_reason is CancelReason.REVOKED:
                job.fail(TaskCancelled("revoked"))
        return TaskExecution(slots[0], members[0][0].job.name, limits, other_slots=tuple(slots[1:]))

    def _outcomes(self, members: BatchAttempts, batch: Batch, of_call: ErrorOrResult) -> list[Outcome]:
        of_jobs = batch.outcomes(*of_call)
        return [self._runner.outcome(attempt, *each) for (attempt, _), each in zip(members, of_jobs, strict=True)]
