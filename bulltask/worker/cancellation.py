"""Cancels a running task: a request of the supervisor interrupts only the task's code.

Begin with :class:`Cancellation` and :func:`call_task`. :class:`JobTask` protects the asyncio tasks of jobs from each
other, and :class:`TaskThreads` runs sync tasks in threads.
"""

from __future__ import annotations

import asyncio
import contextvars
import ctypes
import os
import signal
import sys
import threading
from asyncio import get_running_loop
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, Protocol

import bulltask
from bulltask.config.process import exit_if_forked
from bulltask.jobs.clock import LoopTimer, mono_ms
from bulltask.jobs.errors import Interrupt, SoftTimeLimitExceeded, TaskCancelled, WorkerShutdown
from bulltask.jobs.fields import NO_LIMITS, TimeLimits
from bulltask.jobs.job import RunningJob
from bulltask.registry.request import current_job, job_in
from bulltask.worker.outcomes import AcquiredJob
from bulltask.worker.slots import IDLE_MS, CancelReason, ChildBlock, Deadlines, Slot

__all__ = [
    "Cancellation",
    "InterruptibleCall",
    "JobTask",
    "OwnTask",
    "TaskExecution",
    "TaskThreads",
    "call_task",
    "end_code",
    "made_task",
    "origin_of",
    "place_of",
    "uninterrupted",
]


@cache
def _libraries() -> tuple[str, ...]:
    import sysconfig  # noqa: PLC0415 - its tables are large, and only a task that misuses the event loop needs them

    paths = {sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    return (*paths, str(Path(bulltask.__file__).parent))


_CANCELS_OTHERS: Final = "tried to cancel the asyncio tasks of other jobs or of bulltask, which was prevented"


class TaskOwner(Protocol):
    """The loop's side of :class:`JobTask` and :class:`OwnTask`."""

    def end_cancelled(self, task: asyncio.Task[None], /) -> None:
        """Release the jobs of an asyncio task that was cancelled before it could start."""

    def report(
        self, job: RunningJob | None, problem: str, where: str = "", raised: BaseException | None = None
    ) -> None:
        """Report what a job's code did to the event loop."""


class JobTask(asyncio.Task[None]):
    """Runs the code of a job, or of a batch. Another job cannot cancel it, as by cancelling all tasks of the loop.

    bulltask itself cancels it with ``asyncio.Task.cancel``. After ``code_ended``, only hooks follow.
    """

    __slots__ = ("code_ended", "context", "jobs", "owner")
    code_ended: bool
    context: contextvars.Context
    jobs: Sequence[AcquiredJob]
    owner: TaskOwner

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, unless another job has requested it, or the job's code has ended."""
        if self.code_ended or self.done():
            return False
        by = current_job()
        if by is not None and by is not self.jobs[0].job:
            self.owner.report(by, _CANCELS_OTHERS, place_of(sys._getframe()))  # noqa: SLF001 - the documented way
            return False
        self.add_done_callback(self.owner.end_cancelled)
        return super().cancel(msg)


class OwnTask(asyncio.Task[None]):
    """Runs bulltask's own code, which no job can cancel."""

    __slots__ = ("owner",)
    owner: TaskOwner

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the task, unless a job has requested it."""
        by = current_job()
        if by is not None:
            self.owner.report(by, _CANCELS_OTHERS, place_of(sys._getframe()))  # noqa: SLF001
            return False
        return super().cancel(msg)


class MadeTask(asyncio.Task[Any]):
    """An asyncio task that other code has made, perhaps that of a job."""

    __slots__ = ("made_by",)
    made_by: RunningJob | None


def made_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> MadeTask:
    """Make an asyncio task: the loop's task factory."""
    task = MadeTask(coroutine, loop=loop, **options)
    task.made_by = current_job()
    return task


def origin_of(raised: BaseException | None) -> tuple[RunningJob | None, str]:
    """Return the job whose code has ended the loop with an exception, and the place."""
    job, place, trace = None, "", None if raised is None else raised.__traceback__
    while trace is not None:
        frame, trace = trace.tb_frame, trace.tb_next
        if frame.f_code is asyncio.Handle._run.__code__:  # noqa: SLF001 - its frame has the context of the code
            job = job_in(frame.f_locals["self"]._context)  # noqa: SLF001
        elif job is not None:
            place = place_of(frame, frame.f_back) or place
    return job, place


def place_of(frame: FrameType | None, outermost: FrameType | None = None) -> str:
    """Return the file and the line of the innermost frame that is not a library's, up to ``outermost``; or ``""``."""
    while frame is not None and frame is not outermost and frame.f_code.co_filename.startswith(_libraries()):
        frame = frame.f_back
    if frame is None or frame is outermost:
        return ""
    return f"{frame.f_code.co_filename}:{frame.f_lineno} in {frame.f_code.co_qualname}"


async def end_code() -> None:
    """Protect the hooks that follow the code of a job from what it has cancelled."""
    task = asyncio.current_task()
    if isinstance(task, JobTask):
        task.code_ended = True
    if task is not None and task.cancelling():
        with suppress(asyncio.CancelledError):
            await asyncio.sleep(0)


_set_async_exc: Final = ctypes.pythonapi.PyThreadState_SetAsyncExc


class InterruptibleCall:
    """A call of a function in a thread, which the event loop's thread can interrupt.

    Python runs signal handlers only on the main thread, so a limit cannot be a signal here. Instead, the interpreter
    raises an exception in the thread before its next bytecode instruction. A thread that waits in C code (for a socket,
    a lock or a process) receives it only when it runs Python code again.
    """

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._thread_id: int | None = None
        self._early: type[Interrupt] | None = None
        self._ended = self._interrupting = False

    def run(self) -> tuple[BaseException | None, Any]:
        """Call the function; return its exception, or ``None``, and its result."""
        # The exception is returned, not raised: a future cannot hold a StopIteration.
        try:
            try:
                self._thread_id = threading.get_ident()
                if self._early is not None:
                    raise self._early
                return None, self._function()
            finally:
                self._end()
        except BaseException as exc:  # noqa: BLE001 - sys.exit() in a task fails its job
            return exc, None

    def interrupt(self, kind: type[Interrupt]) -> None:
        """Raise an exception of this class in the function, if it is still running; never after it has returned."""
        self._interrupting = True
        try:
            if self._thread_id is None:
                self._early = kind
            elif not self._ended:
                _set_async_exc(ctypes.c_ulong(self._thread_id), ctypes.py_object(kind))
        finally:
            self._interrupting = False

    def _end(self) -> None:
        """Prevent interrupts from now on, because the thread's next code is not the task's."""
        while True:
            try:
                self._ended = True
                while self._interrupting:
                    os.sched_yield()
                _set_async_exc(ctypes.c_ulong(threading.get_ident()), None)
            except Interrupt:  # it arrived just after the function had returned
                continue
            return


class TaskThreads:
    """Manages the threads in which a child runs sync tasks; without threads, these run on the main thread."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.enabled = count > 0
        self._busy: set[Slot] = set()  # each change is atomic
        self._executor = ThreadPoolExecutor(count, "bulltask-task") if count else None

    @property
    def all_busy(self) -> bool:
        """Whether no thread is free, so that the child must not acquire another job, which may need one."""
        return self._executor is not None and len(self._busy) >= self._count

    def reserve(self, slot: Slot) -> None:
        """Reserve a thread for the job in ``slot``; :meth:`run` frees it."""
        self._busy.add(slot)

    def free(self, slot: Slot) -> None:
        """Free the thread that was reserved for ``slot``, if any."""
        self._busy.discard(slot)

    async def run(
        self, slot: Slot, started: Callable[[InterruptibleCall], None], function: Callable[..., Any], *args: Any
    ) -> tuple[BaseException | None, Any]:
        """Run a function in the thread that was reserved for ``slot``; return its exception, or ``None``, and result.

        ``started`` receives the call before it starts, so that it can be interrupted.
        """
        assert self._executor is not None
        # A copy, as for a task on the main thread: a task's context variables are not visible to the next one.
        call = InterruptibleCall(partial(contextvars.copy_context().run, function, *args))
        started(call)
        try:
            return await get_running_loop().run_in_executor(self._executor, call.run)
        finally:
            self.free(slot)


# Cancels a running task: a cancel request from the supervisor interrupts only the task's code.
#
# The request is stored in the attempt's slot (:mod:`bulltask.worker.slots`); ``SIGUSR2`` makes the child read it.
#
# A sync task runs on the main thread, where Python runs signal handlers, so the handler raises an exception there. It
# must never raise while bulltask's code is running, because that could interrupt reading a reply or writing an outcome.
# A flag that is set before a task and reset after it would not suffice, because a signal may arrive just before or
# after the change. The handler therefore inspects the stack: it raises only if :func:`call_task`, which does nothing
# but call the task's function, is on it. The exception leaves that call and becomes the attempt's outcome. The handler
# ignores a signal that arrives earlier, because :func:`call_task` checks for a request first, and a signal that arrives
# later, because the execution has ended.
#
# A sync task in a thread is interrupted by the interpreter (:class:`InterruptibleCall`).
#
# An async task is cancelled with ``asyncio.Task.cancel()``, which takes effect only at an ``await``. While the task
# runs, only its own code awaits.


_RAISED: Final = (SoftTimeLimitExceeded, TaskCancelled, WorkerShutdown)
_IN_THREADS: Final[Mapping[CancelReason, type[Interrupt]]] = {
    CancelReason.SOFT_LIMIT: SoftTimeLimitExceeded,
    CancelReason.SHUTDOWN: WorkerShutdown,
}
_POLL_S: Final = 0.25
"""The event loop polls for requests at this interval, because no signal handler runs while a sync task runs C code."""


def call_task(begin: Callable[[], None], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a task's function. The signal handler raises only while this function is on the stack.

    ``begin`` raises if the execution is cancelled before it starts. A process that the function forks exits when it
    returns from the function.
    """
    pid = os.getpid()
    begin()
    try:
        result = function(*args, **kwargs)
    except BaseException as exc:
        exit_if_forked(pid, exc)
        raise
    if os.getpid() != pid:
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

    Attributes:
        execution: What the main thread runs; a request cancels it within :func:`call_task`.
        polling: Set while async jobs are running, so that the event loop polls for requests.
        on_signal: Called when the supervisor sends the signal: it may have changed something else, too.
    """

    def __init__(
        self,
        block: ChildBlock,
        cancel_spark: Callable[[], None],
        loop: Callable[[], asyncio.AbstractEventLoop | None],
    ) -> None:
        self._block = block
        self._cancel_spark = cancel_spark
        self._running_loop = loop
        self.execution: TaskExecution | None = None
        self.on_signal: Callable[[], None] = lambda: None
        self.wake_supervisor: Callable[[], None] = lambda: None
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
        soon_ms = mono_ms() + IDLE_MS
        is_short = 0 < deadlines.soft_at_ms < soon_ms or 0 < deadlines.hard_at_ms < soon_ms
        if is_short and not self._block.has_short_limits:
            self._block.has_short_limits = True
            self.wake_supervisor()

    @property
    def runs_async(self) -> bool:
        """Whether tasks are running on the event loop, or in threads."""
        return bool(self._async)

    # ---- sync tasks: the main thread ----

    def raise_if_cancelled(self) -> None:
        """Raise ``SoftTimeLimitExceeded``, ``TaskCancelled`` or ``WorkerShutdown`` for a pending cancel request."""
        execution = self.execution
        if execution is None:
            return
        if not execution.other_slots and execution.slot.cancel_reason is CancelReason.NONE:
            return  # nearly every job
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
        self.on_signal()
        if _in_task_code(frame):
            self.raise_if_cancelled()

    def _repeat_if_dropped(self, previous_hook: Callable[[Any], Any]) -> None:
        """Apply a request again if its exception was lost: Python drops exceptions in finalizers and C callbacks."""

        def hook(unraisable: sys.UnraisableHookArgs) -> None:
            execution = self.execution
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
        lost_ms = now_ms - self._turned_ms
        held_by = self._held_by
        self._held_by = None
        is_known = self._block.loop_held
        self._block.loop_held = False
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
        # The newest first: jobs that end and are released at once keep their order.
        for task, execution in tuple(reversed(self._async.items())):
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
