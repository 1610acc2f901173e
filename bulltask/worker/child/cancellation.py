"""Cancels a running task: a cancel request from the supervisor interrupts only the task's code.

The request is stored in the attempt's slot (:mod:`bulltask.worker.slots`); ``SIGUSR2`` makes the child read it.

A sync task runs on the main thread, where Python runs signal handlers, so the handler raises an exception there. It
must never raise while bulltask's code is running, because that could interrupt reading a reply or writing an outcome. A
flag that is set before a task and reset after it would not suffice, because a signal may arrive just before or after
the change. The handler therefore inspects the stack: it raises only if :func:`call_task`, which does nothing but call
the task's function, is on it. The exception leaves that call and becomes the attempt's outcome. The handler ignores a
signal that arrives earlier, because :func:`call_task` checks for a request first, and a signal that arrives later,
because the execution has ended.

A sync task in a thread is interrupted by the interpreter (:mod:`bulltask.worker.child.thread_tasks`).

An async task is cancelled with ``asyncio.Task.cancel()``, which takes effect only at an ``await``. While the task runs,
only its own code awaits.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

from bulltask.clock import mono_ms
from bulltask.errors import Interrupt, SoftTimeLimitExceeded, TaskCancelled, WorkerShutdown
from bulltask.jobs.job import RunningJob
from bulltask.jobs.time_limits import NO_LIMITS, TimeLimits
from bulltask.loop_timers import LoopTimer
from bulltask.process import exit_if_forked
from bulltask.worker.child.asyncio_tasks import JobTask
from bulltask.worker.child.thread_tasks import InterruptibleCall
from bulltask.worker.slot import Deadlines, Slot
from bulltask.worker.slots import ChildBlock
from bulltask.worker.states import CancelReason

__all__ = ["Cancellation", "TaskExecution", "call_task", "uninterrupted"]

_RAISED: Final = (SoftTimeLimitExceeded, TaskCancelled, WorkerShutdown)
_IN_THREADS: Final[Mapping[CancelReason, type[Interrupt]]] = {
    CancelReason.SOFT_LIMIT: SoftTimeLimitExceeded,
    CancelReason.SHUTDOWN: WorkerShutdown,
}
_POLL_S: Final = 0.25
"""The event loop polls for requests at this interval, because no signal handler runs while a sync task runs C code."""


def call_task(begin: Callable[[], None], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a task's function. The signal handler raises only while this function is on the stack.

    A process that the function forks exits when it returns from the function.

    Args:
        begin: Raises if the execution is cancelled before it starts.
        function, args, kwargs: The call.
    """
    pid = os.getpid()
    begin()
    try:
        result = function(*args, **kwargs)
    except BaseException as exc:
        exit_if_forked(pid, exc)
        raise
    exit_if_forked(pid)
    return result


def uninterrupted(action: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    """Return a signal handler that runs ``action`` without interruption by a cancel request."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        action()

    return handle


_LATE_MS: Final = 100
"""A poll that is this late shows that the loop was blocked."""

_TASK_CODE: Final[CodeType] = call_task.__code__
_UNINTERRUPTED_CODE: Final[CodeType] = uninterrupted(lambda: None).__code__


@dataclass(slots=True)
class TaskExecution:
    """One execution of a task.

    Attributes:
        slot: The slot, which contains the supervisor's cancel request.
        task: The task's name.
        limits: Its time limits.
        acknowledged: The latest request that was passed to the task.
        call: The call, if the task runs in a separate thread.
        other_slots: The slots of the other jobs of a batch. Limits apply to the whole batch; during the call, none of
            its jobs can be cancelled alone.
        is_postponed: Whether its deadlines were postponed because unknown code had blocked the event loop.
    """

    slot: Slot
    task: str
    limits: TimeLimits
    acknowledged: CancelReason = CancelReason.NONE
    call: InterruptibleCall | None = None
    other_slots: tuple[Slot, ...] = ()
    is_postponed: bool = False

    @property
    def requested(self) -> CancelReason:
        """Why the supervisor is cancelling the execution."""
        if not self.other_slots:
            return self.slot.cancel_reason
        reasons = (slot.cancel_reason for slot in (self.slot, *self.other_slots))
        return max((reason for reason in reasons if reason is not CancelReason.REVOKED), default=CancelReason.NONE)

    def take(self, reason: CancelReason) -> CancelReason:
        """Acknowledge a request, and return it if the task has not received it yet, else ``NONE``."""
        for slot in self.other_slots:
            slot.acknowledge()
        if reason <= self.acknowledged:
            return CancelReason.NONE
        self.acknowledged = reason
        self.slot.acknowledge()
        return reason

    def resolve(self, raised: BaseException | None) -> BaseException | None:
        """Return the exception that ends the attempt; ``None`` if the task's return value is its result.

        A task may handle a soft limit or a shutdown and continue. After a hard limit or a revocation the attempt fails,
        even if the task returns.

        Args:
            raised: The exception that the task raised, ``None`` if it has returned.
        """
        match self.acknowledged:
            case CancelReason.REVOKED:
                exc: BaseException = raised if isinstance(raised, TaskCancelled) else TaskCancelled("revoked")
            case CancelReason.HARD_LIMIT:
                exc = self.limits.hard_exceeded(self.task)
            # In a thread, Python raises the exception without a message.
            case CancelReason.SOFT_LIMIT if isinstance(raised, asyncio.CancelledError | SoftTimeLimitExceeded):
                exc = self.limits.soft_exceeded(self.task)
            case CancelReason.SHUTDOWN if isinstance(raised, asyncio.CancelledError | WorkerShutdown):
                exc = WorkerShutdown()
            case _:
                return raised
        # The traceback shows where the task was interrupted.
        return exc if raised is None else exc.with_traceback(raised.__traceback__)


class Cancellation:
    """Passes the supervisor's cancel requests to running tasks.

    Args:
        block: The child's block, in which the supervisor reads whether attempts have deadlines.
        cancel_spark: Cancels the Spark jobs that the sync task is waiting for.
        loop: Returns the child's event loop, ``None`` while there is none.

    Attributes:
        polling: Set while async jobs are running, so that the event loop polls for requests.
    """

    def __init__(
        self,
        block: ChildBlock,
        cancel_spark: Callable[[], None],
        loop: Callable[[], asyncio.AbstractEventLoop | None],
    ) -> None:
        self._block, self._cancel_spark, self._running_loop = block, cancel_spark, loop
        self._sync: TaskExecution | None = None
        self._async: dict[asyncio.Task[Any], TaskExecution] = {}
        self.polling = threading.Event()
        self._turned_ms = 0
        self._held_by: TaskExecution | None = None

    def install(self) -> None:
        """Handle cancel requests from now on."""
        signal.signal(signal.SIGUSR2, self._on_signal)
        self._repeat_if_dropped(sys.unraisablehook)

    def set_deadlines(self, slot: Slot, deadlines: Deadlines) -> None:
        """Set the deadlines of the execution in ``slot``; the supervisor enforces them."""
        slot.set_deadlines(deadlines)
        self._block.has_deadlines = True

    @property
    def runs_async(self) -> bool:
        """Whether tasks are running on the event loop, or in threads."""
        return bool(self._async)

    # ---- sync tasks: the main thread ----

    def enter(self, execution: TaskExecution) -> None:
        """Make ``execution`` the one that a request cancels within :func:`call_task`."""
        self._sync = execution

    def raise_if_cancelled(self) -> None:
        """Raise the exception for a pending cancel request, if there is one.

        Raises:
            SoftTimeLimitExceeded: The execution has exceeded its soft limit.
            TaskCancelled: The job was revoked.
            WorkerShutdown: The worker is about to kill this child.
        """
        execution = self._sync
        if execution is None:
            return
        requested = execution.requested
        if requested is CancelReason.HARD_LIMIT:  # the supervisor kills this child
            return
        reason = execution.take(requested)
        if reason is CancelReason.NONE:
            return
        with suppress(Exception):
            self._cancel_spark()
        if reason is CancelReason.REVOKED:
            raise TaskCancelled("revoked")
        if reason is CancelReason.SHUTDOWN:
            raise WorkerShutdown
        raise execution.limits.soft_exceeded(execution.task)

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if self._async and (loop := self._running_loop()) is not None:
            with suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._poll)
        if _in_task_code(frame):
            self.raise_if_cancelled()

    def _repeat_if_dropped(self, previous_hook: Callable[[Any], Any]) -> None:
        """Apply a request again if its exception was lost: Python drops exceptions in finalizers and C callbacks."""

        def hook(unraisable: sys.UnraisableHookArgs) -> None:
            execution = self._sync
            if execution is not None and isinstance(unraisable.exc_value, _RAISED):
                execution.acknowledged = CancelReason.NONE
                execution.slot.acknowledge(False)
            previous_hook(unraisable)

        sys.unraisablehook = hook

    # ---- async tasks: the event loop's thread ----

    def enter_async(self, execution: TaskExecution) -> asyncio.Task[Any]:
        """Allow requests to cancel the current asyncio task, which is returned, until :meth:`leave_async`."""
        task = asyncio.current_task()
        assert task is not None
        self._async[task] = execution
        if not self.polling.is_set():
            self._turned_ms = self._block.loop_turned_ms = mono_ms()
            self.polling.set()
            LoopTimer(_POLL_S, self._poll_again)
        return task

    def leave_async(self, task: asyncio.Task[Any]) -> None:
        """Stop requests from cancelling an asyncio task."""
        del self._async[task]

    def _poll_again(self) -> None:
        self._poll()
        if self._async:
            LoopTimer(_POLL_S, self._poll_again)
        else:
            self.polling.clear()
            self._block.loop_turned_ms = 0

    def late_ms(self) -> int:
        """Return for how long the event loop has not polled although it should have; 0 if it is not late."""
        late_ms = mono_ms() - self._turned_ms - round(_POLL_S * 1000)
        return late_ms if self.polling.is_set() and late_ms >= _LATE_MS else 0

    def hold(self, job: RunningJob | None, task: asyncio.Task[Any] | None) -> None:
        """Record that the code of this job, in its own asyncio task or in another one, is blocking the event loop."""
        for one, execution in tuple(self._async.items()):
            if one is task or (task is None and isinstance(one, JobTask) and one.jobs[0].job is job):
                self._held_by = execution
                execution.slot.hold_loop(True)
        self._block.loop_held = True

    def _turn(self) -> None:
        """Record that the event loop turns. After a block, the other attempts get the lost time back."""
        if not self.polling.is_set():
            return
        now_ms, late_ms = mono_ms(), self.late_ms()
        lost_ms, held_by, self._held_by = now_ms - self._turned_ms, self._held_by, None
        is_known, self._block.loop_held = self._block.loop_held, False
        self._turned_ms = self._block.loop_turned_ms = now_ms
        if held_by is not None:
            held_by.slot.hold_loop(False)
        if not late_ms or (not is_known and len(self._async) == 1):
            return
        for execution in self._async.values():
            reason = execution.slot.cancel_reason
            is_cancelled = execution.acknowledged or reason in {CancelReason.SHUTDOWN, CancelReason.REVOKED}
            if execution is held_by or is_cancelled or execution.limits is NO_LIMITS or execution.is_postponed:
                continue
            execution.is_postponed = not is_known  # only once, because it may be this one that blocks the loop
            for slot in (execution.slot, *execution.other_slots):
                slot.postpone(lost_ms)

    def _poll(self) -> None:
        self._turn()
        for task, execution in tuple(self._async.items()):
            reason = execution.take(execution.requested)
            if reason is not CancelReason.NONE and execution.call is not None:
                execution.call.interrupt(_IN_THREADS.get(reason, TaskCancelled))
                continue
            match reason:
                case CancelReason.NONE:
                    pass
                case CancelReason.REVOKED:
                    asyncio.Task.cancel(task, "revoked")
                case CancelReason.SHUTDOWN:
                    asyncio.Task.cancel(task, WorkerShutdown().reason)
                case CancelReason.HARD_LIMIT:
                    asyncio.Task.cancel(task, str(execution.limits.hard_exceeded(execution.task)))
                case CancelReason.SOFT_LIMIT:
                    asyncio.Task.cancel(task, str(execution.limits.soft_exceeded(execution.task)))


def _in_task_code(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _UNINTERRUPTED_CODE:
        if frame.f_code is _TASK_CODE:
            return True
        frame = frame.f_back
    return False
