"""Calls what an app has hooked into a child: middleware, signals, handlers of task classes, lifespan, output.

Begin with :class:`RunHooks`, for the hooks around an attempt, and :class:`LoopHooks`, for those of a child.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Final, TextIO

from bulltask.app import App
from bulltask.jobs import codec
from bulltask.jobs.errors import BulltaskError, JobExpiredError
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import REVOKED
from bulltask.observe.bus import Bus
from bulltask.observe.events import ChildClosing, ChildReady
from bulltask.observe.hooks import (
    MAY_END_ATTEMPT,
    Lifespan,
    Middleware,
    acall_hook,
    asend_signal,
    call_hook,
    send_signal,
)
from bulltask.observe.signals import (
    TASK_SIGNALS,
    Signal,
    task_failure,
    task_postrun,
    task_prerun,
    task_received,
    task_retry,
    task_revoked,
    task_success,
    worker_process_init,
    worker_process_shutdown,
)
from bulltask.registry.request import ExceptionInfo, Request, current_job, enter_job
from bulltask.registry.task import AnyTask
from bulltask.worker.cancellation import JobTask, end_code
from bulltask.worker.outcomes import CompletedOutcome, FailedOutcome, Outcome, RetriedOutcome

__all__ = [
    "HookedRun",
    "LoopHooks",
    "RunHooks",
    "attach_process_signals",
    "redirect_output",
]


def attach_process_signals(bus: Bus) -> None:
    """Send the signals when the child is ready, and when it has finished its last job."""
    bus.subscribe(ChildReady, lambda _: send_signal(worker_process_init, None))
    bus.subscribe(ChildClosing, lambda event: send_signal(worker_process_shutdown, None, pid=event.pid, exitcode=0))


class LoopHooks:
    """What runs on the event loop of a child before its first job and after the last one."""

    def __init__(self, lifespan: Lifespan) -> None:
        self._lifespan = lifespan

    @property
    def exist(self) -> bool:
        """Whether there are any, so that the event loop starts before the first job."""
        signals = worker_process_init, worker_process_shutdown
        receivers = (receiver for signal in signals for receiver in signal.receivers(None))
        return self._lifespan.is_defined or any(map(inspect.iscoroutinefunction, receivers))

    async def open(self, opened: Callable[[BaseException | None], None]) -> None:
        """Enter the lifespan and call the receivers; the coroutine ends when the lifespan does.

        ``opened`` is called when jobs may start, with the exception that prevents it, if any.
        """

        async def call_receivers() -> None:
            await asend_signal(worker_process_init, None)
            opened(None)

        if self._lifespan.is_defined:
            await self._lifespan.live(opened, call_receivers)
        else:
            await call_receivers()

    async def close(self) -> None:
        """Call the receivers and leave the lifespan."""
        await asend_signal(worker_process_shutdown, None, pid=os.getpid(), exitcode=0)
        if self._lifespan.is_defined:
            await self._lifespan.leave()


HandlerCalls = list[tuple[str, tuple[Any, ...]]]


def handler_calls(request: Request, outcome: Outcome | None, *, started: bool) -> HandlerCalls:
    """Return the handlers that follow an outcome (``None``: it was discarded), with their arguments, in Celery's order.

    Only if the task was called, ``after_return`` is among them.
    """
    call = request.id, request.args, request.kwargs
    match outcome:
        case CompletedOutcome(ignored=False):
            result = outcome.result
            return [("on_success", (result, *call)), ("after_return", ("SUCCESS", result, *call, None))]
        case FailedOutcome():
            info = exception_info(outcome)
            revoked = outcome.category == REVOKED or isinstance(outcome.exception, JobExpiredError)
            calls: HandlerCalls = [] if revoked else [("on_failure", (info.exception, *call, info))]
            state = "REVOKED" if revoked else "FAILURE"
            return [*calls, ("after_return", (state, info.exception, *call, info))] if started else calls
        case RetriedOutcome():
            info = exception_info(outcome)
            return [("on_retry", (info.exception, *call, info))]
        case _:
            return []


def exception_info(outcome: FailedOutcome | RetriedOutcome) -> ExceptionInfo:
    """Return the exception of an attempt, and its traceback."""
    return ExceptionInfo(outcome.exception or BulltaskError(outcome.reason), outcome.trace)


_RUNS_AGAIN: Final = "RETRY"


class HookedRun:
    """A call of a task with its hooks.

    Attributes:
        in_thread: Whether a sync task runs in a thread; the hooks after its outcome then do, too.
        last_variables: An async task's context, or a copy of it that was made when the task ended.
    """

    def __init__(
        self,
        task: AnyTask[..., Any],
        request: Request,
        middleware: tuple[Middleware, ...],
        variables: contextvars.Context | None,
    ) -> None:
        self.task = task
        self._request = request
        self._middleware = middleware
        self._has_started = False
        self._entered: list[Middleware] = []
        self.variables = variables
        self.in_thread = False
        self.last_variables: contextvars.Context | None = None

    def call(self, *args: Any, **kwargs: Any) -> Any:
        """Call a sync task's function and the hooks around it."""
        result, raised = None, None
        try:
            self.enter()
            self.task.before_start(self._request.id, self._request.args, self._request.kwargs)
            result = self.task._target(*args, **kwargs)
        except BaseException as exc:
            raised = exc
            raise
        finally:
            self.leave(result, raised)
        return result

    async def acall(self, *args: Any, **kwargs: Any) -> Any:
        """Call an async task's function and the hooks around it."""
        result, raised = None, None
        try:
            await self.aenter()
            started = self.task.before_start(self._request.id, self._request.args, self._request.kwargs)
            if inspect.isawaitable(started):
                await started
            result = await self.task._target(*args, **kwargs)
        except BaseException as exc:
            raised = exc
            raise
        finally:
            await end_code()
            await self.aleave(result, raised)
        return result

    def enter(self) -> None:
        """Call the hooks before a sync task's function; an ``Interrupt`` that they raise ends the attempt."""
        self._send_prerun()
        for one in self._middleware:
            self._entered.append(one)
            call_hook(one.before_run, "before_run", self._request, passes=MAY_END_ATTEMPT)

    def leave(self, result: Any, raised: BaseException | None) -> None:
        """Call ``after_run`` of each middleware whose ``before_run`` was called, for a sync task."""
        while self._entered:
            call_hook(self._entered.pop().after_run, "after_run", self._request, result, raised)

    async def aenter(self) -> None:
        """:meth:`enter` for an async task."""
        self._send_prerun()
        for one in self._middleware:
            self._entered.append(one)
            await acall_hook(one.abefore_run, "abefore_run", self._request, passes=MAY_END_ATTEMPT)

    async def aleave(self, result: Any, raised: BaseException | None) -> None:
        """:meth:`leave` for an async task."""
        while self._entered:
            await acall_hook(self._entered.pop().aafter_run, "aafter_run", self._request, result, raised)
        task = asyncio.current_task()
        self.last_variables = task.context if isinstance(task, JobTask) else contextvars.copy_context()

    def finished(self, outcome: Outcome | None) -> None:
        """Call the hooks that follow the outcome that Redis has stored; ``None`` if it was discarded."""
        for name, arguments in self._handler_calls(outcome):
            call_hook(getattr(self.task, name), name, *arguments)
        self._send_signals(outcome)

    async def afinished(self, outcome: Outcome | None) -> None:
        """:meth:`finished` for a task with handlers that are coroutine functions."""
        for name, arguments in self._handler_calls(outcome):
            handler = getattr(self.task, name)
            if inspect.iscoroutinefunction(handler):
                await acall_hook(handler, name, *arguments)
            else:
                call_hook(handler, name, *arguments)
        self._send_signals(outcome)

    def _handler_calls(self, outcome: Outcome | None) -> HandlerCalls:
        return handler_calls(self._request, outcome, started=self._has_started) if self.task._has_handlers else []

    def _send_signals(self, outcome: Outcome | None) -> None:
        retval, state = self._send_outcome(outcome)
        if self._has_started:
            self._send(task_postrun, **self._call_arguments(), task=self.task, retval=retval, state=state)

    def _send_prerun(self) -> None:
        self._has_started = True
        send_signal(task_received, self.task, MAY_END_ATTEMPT, request=self._request)
        send_signal(task_prerun, self.task, MAY_END_ATTEMPT, **self._call_arguments(), task=self.task)

    def _send_outcome(self, outcome: Outcome | None) -> tuple[Any, str]:
        """Send the signal of an outcome; return the ``retval`` and the ``state`` of ``task_postrun``."""
        match outcome:
            case CompletedOutcome():
                self._send(task_success, result=outcome.result)
                return outcome.result, "SUCCESS"
            case FailedOutcome(category=category, exception=raised) if category == REVOKED:
                self._send(task_revoked, request=self._request, terminated=True, signum=None, expired=False)
                return raised, "REVOKED"
            case FailedOutcome(exception=JobExpiredError() as raised):
                self._send(task_revoked, request=self._request, terminated=False, signum=None, expired=True)
                return raised, "REVOKED"
            case FailedOutcome():
                info = exception_info(outcome)
                more = {"exception": info.exception, "traceback": info.tb, "einfo": info}
                self._send(task_failure, **self._call_arguments(), **more)
                return info.exception, "FAILURE"
            case RetriedOutcome():
                info = exception_info(outcome)
                self._send(task_retry, request=self._request, reason=info.exception, einfo=info)
                return info.exception, _RUNS_AGAIN
            case _:
                return None, "IGNORED" if outcome is None else _RUNS_AGAIN

    def _send(self, signal: Signal, **named: Any) -> None:
        send_signal(signal, self.task, **named)

    def _call_arguments(self) -> dict[str, Any]:
        request = self._request
        return {"task_id": request.id, "args": request.args, "kwargs": request.kwargs}


class RunHooks:
    """The hooks around the attempts of a child.

    The hooks before and after the task's function run in the same thread as the function and within its time limits. An
    ``Interrupt`` that is raised by a hook before the function ends the attempt. Signals about outcomes are sent after
    Redis has stored the outcome, in the task's context.

    Attributes:
        runs: The calls with hooks whose outcome is not stored yet, by the identity of the job.
    """

    def __init__(self, app: App) -> None:
        self._tasks = app.tasks
        self._middleware = app._middleware
        self.runs: dict[int, HookedRun] = {}

    def has_hooks(self, task: AnyTask[..., Any]) -> bool:
        """Return whether there is any hook for a task; nothing else is called if there is none."""
        return task._has_handlers or TASK_SIGNALS.active or bool(self._middleware.running)

    def follow(self, outcome: Outcome | None) -> bool:
        """Return whether hooks may follow an outcome: the run had hooks, or the task was not called."""
        if self.runs:
            return True
        if not isinstance(outcome, FailedOutcome | RetriedOutcome):
            return False
        return TASK_SIGNALS.active or self._tasks.have_handlers

    def start(
        self, job: RunningJob, task: AnyTask[..., Any], request: Request, variables: contextvars.Context | None
    ) -> HookedRun:
        """Return the call with hooks to make instead of the task's function; only a sync task has variables."""
        # By identity: the same job may run twice here, if its lock was lost.
        run = self.runs[id(job)] = HookedRun(task, request, self._middleware.running, variables)
        return run

    def finished(self, job: RunningJob, outcome: Outcome | None) -> Coroutine[Any, Any, None] | None:
        """Call the hooks that follow an outcome, in the context of the task.

        If the task has async handlers or has run in a thread, a coroutine that calls them is returned.
        """
        run = self.runs.pop(id(job), None) or self._not_started(job, outcome)
        if run is None:
            return None
        variables = run.variables
        if variables is None and current_job() is not job:  # bulltask.testing and eager mode
            variables = run.last_variables
        if run.task._has_async_handlers:
            return _in_context(run.afinished(outcome), variables)
        if run.in_thread and variables is not None:
            # Not on the event loop, which they may block, and where Django's ORM refuses to work.
            return asyncio.to_thread(variables.run, run.finished, outcome)
        if variables is None:
            run.finished(outcome)
        else:
            variables.run(run.finished, outcome)
        return None

    def _not_started(self, job: RunningJob, outcome: Outcome | None) -> HookedRun | None:
        """Return the run of a job whose task was not called, if signals follow."""
        task: AnyTask[..., Any] | None = self._tasks.get(job.name)
        if task is None or not isinstance(outcome, FailedOutcome | RetriedOutcome):
            return None
        if isinstance(outcome, FailedOutcome) and outcome.failed_job is not None:
            return None  # a later step of a canvas, which Celery does not send: the failure has been reported
        variables = contextvars.copy_context()
        variables.run(enter_job, job)
        try:
            data = codec.decode(job.data)
            request = Request.of(job, (), data if isinstance(data, Mapping) else {})
        except BulltaskError:
            request = Request(id=job.id, task=job.name, queue=job.queue)
        return HookedRun(task, request, (), variables)


async def _in_context(coroutine: Coroutine[Any, Any, None], variables: contextvars.Context | None) -> None:
    """Run a coroutine in a context, ``None`` for the current one."""
    await (coroutine if variables is None else asyncio.create_task(coroutine, context=variables))


_LOGGER: Final = "bulltask.output"


def redirect_output(level: str, bus: Bus) -> None:
    """Log the lines that code of this process writes to ``sys.stdout`` and ``sys.stderr``, the last one at its end."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None:  # closed
            output = _LoggedOutput(stream, logging.getLevelNamesMapping()[level.upper()])
            setattr(sys, name, output)
            bus.subscribe(ChildClosing, output.end_line)


class _LoggedOutput:
    """A text stream whose lines are logged; everything else is the original stream's.

    Programs that a task starts still write to the original stream's descriptor.
    """

    def __init__(self, stream: TextIO, level: int) -> None:
        self._stream = stream
        self._level = level
        self._local = threading.local()
        self._logger = logging.getLogger(_LOGGER)

    def write(self, text: str) -> int:
        """Log the complete lines, and keep the rest until its line is complete."""
        local = self._local
        if getattr(local, "is_logging", False):  # a handler of the app writes to sys.stderr
            return self._stream.write(text)
        job, (before, line) = current_job(), getattr(local, "rest", (None, ""))
        if line and before is not job:  # the job before has printed no newline
            self._log([line], before)
            line = ""
        *lines, line = (line + text).split("\n")
        local.rest = job, line
        self._log(lines, job)
        return len(text)

    def writelines(self, lines: Any) -> None:
        """Write several texts."""
        for line in lines:
            self.write(line)

    def end_line(self, _: ChildClosing) -> None:
        """Log a line that has no end."""
        job, line = getattr(self._local, "rest", (None, ""))
        self._log([line], job)

    def isatty(self) -> bool:
        """Return false: lines are logged."""
        return False

    def _log(self, lines: list[str], job: Any) -> None:
        extra = None if job is None else {"job_id": job.id, "task": job.name}
        self._local.is_logging = True
        try:
            for line in lines:
                if line.strip():
                    self._logger.log(self._level, "%s", line.rstrip(), extra=extra)
        finally:
            self._local.is_logging = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
