"""Runs attempts: finds a job's task, checks the job, calls the task, and returns the outcome.

Sync and async tasks differ only in the call.
"""

from __future__ import annotations

import contextvars
import functools
import math
import os
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any, Final

from bulltask.app import App
from bulltask.clock import mono_ms, to_ms
from bulltask.config.rate_limits import TaskRate
from bulltask.errors import (
    BrokerError,
    BulltaskError,
    Ignore,
    InvalidJobError,
    JobExpiredError,
    PermanentError,
    TaskNotRegisteredError,
    incompatible,
)
from bulltask.group_result import GroupResult
from bulltask.jobs.checkpoint import Checkpoint
from bulltask.jobs.child_results import Replacement
from bulltask.jobs.errbacks import FailedJob
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import STARMAP
from bulltask.jobs.time_limits import NO_LIMITS, TimeLimits
from bulltask.process import exit_if_forked
from bulltask.registry.batches import BatchJob, ErrorOrResult
from bulltask.registry.checkpoints import Checkpoints
from bulltask.registry.context import Context
from bulltask.registry.job_client import JobClient
from bulltask.registry.option_values import UNLIMITED_RETRIES
from bulltask.registry.request import Request
from bulltask.registry.running import LazyContext, enter_attempt
from bulltask.registry.signature import Signature
from bulltask.registry.task import AnyTask
from bulltask.result import AsyncResult
from bulltask.transport.scripts.incompatible import MAX_DELAY_MS
from bulltask.value_class import value_class
from bulltask.worker.child.cancellation import Cancellation, TaskExecution, call_task
from bulltask.worker.child.ignored import outcome_of_ignored
from bulltask.worker.child.job_payloads import JobArguments, JobPayloads
from bulltask.worker.child.outcomes import (
    CompletedOutcome,
    FailedOutcome,
    IncompatibleOutcome,
    Outcome,
    ReleasedOutcome,
    RetriedOutcome,
    WaitingForChildrenOutcome,
    requested_outcome,
    with_checkpoint,
)
from bulltask.worker.child.retirement import Retirement
from bulltask.worker.child.retry_decision import as_permanent, decide_retry, interrupt_in, is_retried
from bulltask.worker.child.run_hooks import HookedRun, RunHooks
from bulltask.worker.child.spark_tasks import SparkTaskRunner
from bulltask.worker.child.thread_tasks import InterruptibleCall, TaskThreads
from bulltask.worker.slot import Deadlines, Slot

__all__ = ["Attempt", "AttemptRunner"]

_MIN_DELAY_MS: Final = 1_000
_FAILED_CHILD_JOB: Final = re.compile(r"child (?P<key>.+) failed", re.DOTALL)
"""BullMQ's reason for a parent job that failed because of a child job."""
_STARTED_TOO_OFTEN: Final = "job started more than allowable limit"
"""The same message as in Node's BullMQ, because alerts may search for it."""


class _FailedChildJobError(Exception):
    """A child job has failed, so its parent fails for the same reason."""

    def __init__(self, reason: str, trace: str, failed_job: FailedJob, original: Exception | list[Any] | None) -> None:
        super().__init__(reason)
        self.reason, self.trace, self.failed_job, self.original = reason, trace, failed_job, original


@value_class
class Attempt:
    """A job with its task and valid arguments.

    Attributes:
        rate: The task's rate limit, which decides whether the job may start; ``None`` for most tasks.
    """

    job: RunningJob
    task: AnyTask[..., Any]
    arguments: JobArguments
    limits: TimeLimits = NO_LIMITS
    context: Context | None = None
    rate: TaskRate | None = None


class AttemptRunner:
    """Runs attempts.

    Args:
        app: Tasks, settings and error categories.
        job_client: Creates a job's client, which stores a bound task's progress and log lines.
        spark: Runs tasks with ``spark=True``.
        cancellation: Passes the supervisor's cancel requests to running tasks.
        retirement: Checks the child's memory after each task.
        threads: The threads in which sync tasks run, if any.
        worker_id: The worker's id, for ``request.hostname``.

    Attributes:
        hooks: The hooks around attempts.
        is_stopping: Returns whether tasks should end soon, checkpointed ones between two items.
        is_eager: Whether jobs run in the process that has sent them, for ``request.is_eager``.
        waits_for_other_workers: Whether a job that this worker cannot run is delayed, so that another one can take it.
    """

    def __init__(  # noqa: PLR0913 - the parts of a child, which main.py connects
        self,
        app: App,
        job_client: Callable[[RunningJob], JobClient],
        spark: SparkTaskRunner,
        cancellation: Cancellation,
        retirement: Retirement,
        threads: TaskThreads,
        *,
        worker_id: str = "",
    ) -> None:
        self._app, self._config, self._job_client, self._spark = app, app.config, job_client, spark
        self._cancellation, self._retirement, self._pid = cancellation, retirement, os.getpid()
        self._threads, self._worker_id, self._payloads = threads, worker_id, JobPayloads(app)
        self.is_stopping: Callable[[], bool] = lambda: False
        self.is_eager, self.waits_for_other_workers = False, True
        self._task_limits: dict[str, TimeLimits] = {}
        self._task_rates: dict[str, TaskRate | None] = {}
        self._main_context: contextvars.Context | None = None
        self.hooks = RunHooks(app)

    def begin(self, job: RunningJob) -> Attempt | Outcome:
        """Return the attempt, or an outcome if the task must not or cannot be called."""
        if job.malformed:
            return FailedOutcome(job.deferred_failure, "", "permanent", malformed=True)
        task: AnyTask[..., Any] | None = self._app.tasks.get(job.name)
        try:
            self._check(job)
            if job.replacement:
                return self._outcome_of_replacement(job)
            if task is None:
                raise self._not_registered(job.name)  # noqa: TRY301 - handled like a problem with the arguments
            arguments, context = self._arguments(job, task)
        except BrokerError:
            return ReleasedOutcome()  # the results of its child jobs could not be read; the job is next in its queue
        except _FailedChildJobError as exc:
            error = self._payloads.error(job, task, exc.original)
            failed_job = exc.failed_job
            original = exc.original if isinstance(exc.original, Exception) else None
            return FailedOutcome(exc.reason, exc.trace, "permanent", original, failed_job=failed_job, error=error)
        except Exception as exc:  # noqa: BLE001 - whatever a job's data contains, the child must survive
            return self._outcome_before_start(as_permanent(exc), job, task)
        return Attempt(job, task, arguments, self._limits(job, task), context, self._rate(task))

    @property
    def may_start(self) -> bool:
        """False while all threads for sync tasks are busy."""
        return not self._threads.all_busy

    @property
    def cancellation(self) -> Cancellation:
        """Passes cancel requests to running tasks."""
        return self._cancellation

    def only_context(self) -> contextvars.Context | None:
        """Return the context of the sync task on the main thread; ``None`` if there is none, or other tasks, too."""
        return None if self._cancellation.runs_async else self._main_context

    def runs_off_main_thread(self, attempt: Attempt, slot: Slot) -> bool:
        """Return whether :meth:`acall` must run the attempt, not :meth:`call`; reserve a thread if it needs one."""
        if attempt.task.is_async:
            return True
        # Spark's session is bound to the thread that has created it.
        if not self._threads.enabled or attempt.task.options.spark:
            return False
        self._threads.reserve(slot)
        return True

    def free_thread(self, slot: Slot) -> None:
        """Free the thread that was reserved for a job that does not start."""
        self._threads.free(slot)

    def call(self, attempt: Attempt, slot: Slot) -> Outcome:
        """Run a sync task.

        Any exception ends the attempt, not the child: ``sys.exit()`` in a task fails its job.
        """
        # A copy, so that one task's context variables are not visible to the next one.
        variables = contextvars.copy_context()
        context = self._lazy_context(attempt)
        variables.run(enter_attempt, attempt.job, context)
        target = self._hooked(attempt, variables).call if self.hooks.has_hooks(attempt.task) else attempt.task.target
        function: Callable[..., Any] = functools.partial(call_task, self._cancellation.raise_if_cancelled, target)
        if attempt.task.options.spark:
            function = self._spark.wrap(attempt.job, slot.token, function, attempt.context)
        execution = self._start_execution(attempt, slot, alone=True)
        function = functools.partial(variables.run, function, *attempt.arguments.args, **attempt.arguments.kwargs)
        self._main_context = variables
        ended = self.execute(execution, function)
        self._main_context = None
        outcome = self.outcome(attempt, *ended, context)
        if type(outcome) is RetriedOutcome and (moved := _in_other_queue(attempt, outcome)) is not None:
            with suppress(BulltaskError):  # otherwise, the job is retried in its own queue
                self._job_client(attempt.job).replace(moved, retries=attempt.job.attempts_made + 1)
                return WaitingForChildrenOutcome(replaced=True)
        return outcome

    async def acall(self, attempt: Attempt, slot: Slot) -> Outcome:
        """Run an async task, or a sync task in a thread.

        The caller creates a separate asyncio task, and so a separate context, for it, and awaits nothing else in it,
        because the task's code may have cancelled it. :meth:`amove` follows.
        """
        execution = self._start_execution(attempt, slot, alone=False)
        enter_attempt(attempt.job, context := self._lazy_context(attempt))
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
        target: Callable[..., Any] = attempt.task.target
        if self.hooks.has_hooks(attempt.task):
            variables = None if attempt.task.is_async else contextvars.copy_context()
            hooked = self._hooked(attempt, variables)
            hooked.in_thread = not attempt.task.is_async
            target = hooked.acall if variables is None else functools.partial(variables.run, hooked.call)
        return functools.partial(target, *attempt.arguments.args, **attempt.arguments.kwargs)

    def execute(self, execution: TaskExecution, function: Callable[[], Any]) -> ErrorOrResult:
        """Call a function on the main thread."""
        self._cancellation.enter(execution)
        try:
            result = function()
        except BaseException as exc:  # noqa: BLE001 - any exception ends the attempt
            return execution.resolve(exc) or exc, None
        else:
            return execution.resolve(None), result
        finally:
            self._retirement.check_memory()

    async def aexecute(
        self, execution: TaskExecution, task: AnyTask[..., Any], bound: Callable[[], Callable[[], Any]]
    ) -> ErrorOrResult:
        """Call a function on the event loop, or in a thread if the task is sync; ``bound`` returns it."""
        entered = self._cancellation.enter_async(execution)
        raised: BaseException | None = None
        result: object = None
        try:
            if task.is_async:
                result = await bound()()
            else:
                raised, result = await self._call_in_thread(execution, bound())
        except BaseException as exc:  # noqa: BLE001 - as in execute()
            raised = exc
        try:
            exit_if_forked(self._pid, raised)
            return execution.resolve(raised), result
        finally:
            self._cancellation.leave_async(entered)
            self._retirement.check_memory()

    async def _call_in_thread(
        self, execution: TaskExecution, function: Callable[[], Any]
    ) -> tuple[BaseException | None, Any]:
        def started(call: InterruptibleCall) -> None:
            execution.call = call

        return await self._threads.run(execution.slot, started, call_task, lambda: None, function)

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
        if job.expires_ms is not None and (late_ms := self._app.now_ms() - job.expires_ms) > 0:
            raise JobExpiredError(f"the job expired {late_ms / 1000:.3f} s before it was acquired")

    def _arguments(self, job: RunningJob, task: AnyTask[..., Any]) -> tuple[JobArguments, Context | None]:
        arguments = self._payloads.arguments(job, task, lambda: self._job_client(job).send("children_values"))
        if task.is_batch:
            request = self._request(job, task, arguments.args, arguments.kwargs)
            return replace(arguments, args=(BatchJob(arguments.args[0], request),), kwargs={}), None
        if not (task.bind or task.has_base):
            return arguments, None
        context = self._context(job, task, arguments)
        if not task.bind or task.target is not task.function:  # __call__ of a task class passes the task itself
            return arguments, context
        return replace(arguments, args=(task if task.has_base else context, *arguments.args)), context

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
        return _FailedChildJobError(reason, trace, failed_job, self._payloads.error_of_child(child["key"], error))

    def _limits(self, job: RunningJob, task: AnyTask[..., Any]) -> TimeLimits:
        """Return the job's limits, else its task's, else the app's."""
        defaults = self._task_limits.get(task.name)
        if defaults is None:
            limits = task.options.time_limits.with_defaults(self._config.time_limits)
            defaults = self._task_limits[task.name] = NO_LIMITS if limits == NO_LIMITS else limits
        return job.opts.time_limits.with_defaults(defaults)

    def _rate(self, task: AnyTask[..., Any]) -> TaskRate | None:
        """Return the task's rate limit, else the app's."""
        if task.name not in self._task_rates:
            self._task_rates[task.name] = task.options.rate(self._config)
        return self._task_rates[task.name]

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
        now_ms = self._app.now_ms()
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

    def _context(self, job: RunningJob, task: AnyTask[..., Any], arguments: JobArguments) -> Context:
        client, checkpoints = self._job_client(job), None
        if task.options.checkpoint:
            interval_ms = to_ms(task.options.checkpoint_interval)
            checkpoints = Checkpoints(job.checkpoint, job.id, job.attempts_started, interval_ms, client)
        request, payloads = self._request(job, task, arguments.args, arguments.kwargs), self._payloads.codec
        return Context(
            request,
            client,
            task.conversion,
            checkpoints,
            payloads,
            arguments.form,
            task=task,
            is_stopping=self.is_stopping,
        )

    def _lazy_context(self, attempt: Attempt) -> LazyContext:
        create = functools.partial(self._context, attempt.job, attempt.task, attempt.arguments)
        return LazyContext(create, attempt.context)

    def _request(
        self, job: RunningJob, task: AnyTask[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Request:
        request = Request.of(job, args, kwargs, self._limits(job, task), self._app.name, self._worker_id)
        return replace(request, is_eager=True) if self.is_eager else request

    def _hooked(self, attempt: Attempt, variables: contextvars.Context | None) -> HookedRun:
        job, task, arguments, context = attempt.job, attempt.task, attempt.arguments, attempt.context
        request = self._request(job, task, arguments.args, arguments.kwargs) if context is None else context.request
        return self.hooks.start(job, task, request, variables)

    def _start_execution(self, attempt: Attempt, slot: Slot, *, alone: bool) -> TaskExecution:
        if attempt.limits is not NO_LIMITS:
            self._cancellation.set_deadlines(slot, self.deadlines(attempt, attempt.limits, alone=alone))
        context = attempt.context
        if attempt.task.options.checkpoint and context is not None and context.checkpoints is not None:
            context.checkpoints.start(slot.token, self.is_stopping, is_async=attempt.task.is_async)
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
        """Return the outcome of an attempt whose function has raised an exception, or returned a result.

        Args:
            attempt: The attempt.
            raised, result: How it has ended.
            context: Its context, ``None`` in a batch.
        """
        made = None if context is None else context.created
        if made is not None:
            raised = made.ended_by(raised)
        if raised is not None:
            raised = interrupt_in(raised) or raised
        if raised is None:
            outcome: Outcome = self._encode_result(attempt, result)
        elif isinstance(raised, Ignore):
            reported = None if made is None else made.reported
            outcome = outcome_of_ignored(reported, functools.partial(self._encode_result, attempt))
        else:
            outcome = requested_outcome(raised) or self._outcome_of_exception(raised, attempt)
        checkpoints = None if attempt.context is None else attempt.context.checkpoints
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
        job, task = attempt.job, attempt.task
        if not job.parent_key and job.opts.bulltask.get("ignore_result", task.options.ignore_result) is True:
            return CompletedOutcome(b"null", result)
        try:
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
    }
    if outcome.expires_ms is not None or job.expires_ms is not None:
        options["expires"] = datetime.fromtimestamp((outcome.expires_ms or job.expires_ms or 0) / 1000, UTC)
    if "max_explicit_retries" not in job.opts.bulltask:  # the call or the task sets one limit for all retries
        options["max_retries"] = min(max(0, job.attempts - 1), UNLIMITED_RETRIES)
    has_unique_id = "jobId" not in job.opts and not job.id.isdecimal()  # not from a caller, or a queue's counter
    if has_unique_id and not job.opts.retries_before:
        options["job_id"] = job.id
    return Signature(attempt.task, args, kwargs, options)
