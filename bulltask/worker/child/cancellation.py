"""Ending a run from outside: what the supervisor has ordered reaches the task's own code, and nothing else.

The order stands in the run's slot (:mod:`bulltask.worker.slots`), and ``SIGUSR2`` says that there is one.

A sync task runs on the main thread, where Python runs signal handlers, so the handler raises an exception right there.
It must never do so while the child's own code runs: a connection would be left in the middle of an answer, an outcome
half written. A flag that is set before a task and reset after it would leave gaps. So the handler looks at the frames
below it: it raises only if :func:`call_users`, which does nothing but call the task's function, is among them.
Whatever is raised there comes out of that call and is the run's outcome. A signal that comes before it does nothing,
for :func:`call_users` looks at the order itself first; one that comes after it does nothing, for the run has ended.

An async task is cancelled, which asyncio does only where the task waits. That is in its own code from the moment at
which it is first called to the moment at which it returns.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any, Final

from bulltask.errors import SoftTimeLimitExceeded, TaskCancelled
from bulltask.jobs.time_limits import TimeLimits
from bulltask.process import end_if_forked
from bulltask.worker.slots import ChildBlock, Deadlines, Slot
from bulltask.worker.states import CancelReason

__all__ = ["Cancellation", "TaskRun", "call_task", "uninterrupted"]

_LOOK_S: Final = 0.25
"""So often the event loop looks for orders by itself: a sync task in C code keeps the main thread from its signals."""


def call_task(begin: Callable[[], None], function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Call a task's function. While this is on the stack, and then only, the signal handler may raise.

    A process that the function forks ends here, when it returns or raises.

    Args:
        begin: raises where the run is to end before it has begun.
        function, args, kwargs: the call.
    """
    pid = os.getpid()
    begin()
    try:
        result = function(*args, **kwargs)
    except BaseException as exc:
        end_if_forked(pid, exc)
        raise
    end_if_forked(pid)
    return result


def uninterrupted(action: Callable[[], None]) -> Callable[[int, FrameType | None], None]:
    """Return a signal handler that no order interrupts: what it does must be done to the end."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        action()

    return handle


_TASK_CODE: Final[CodeType] = call_task.__code__
_QUIET: Final[CodeType] = uninterrupted(lambda: None).__code__


@dataclass(slots=True)
class TaskRun:
    """A run of a task.

    Attributes:
        slot: where the supervisor's orders stand.
        task: the task's name.
        limits: what it may take.
        acknowledged: the order that its code was told of.
    """

    slot: Slot
    task: str
    limits: TimeLimits
    acknowledged: CancelReason = CancelReason.NONE

    def take_request(self) -> CancelReason:
        """The order that the run has not been told of, which it is from now on."""
        reason = self.slot.cancel_reason
        if reason <= self.acknowledged:
            return CancelReason.NONE
        self.acknowledged = reason
        self.slot.acknowledge()
        return reason

    def resolve(self, raised: BaseException | None) -> BaseException | None:
        """Return what the run ended with, ``None`` for its return value.

        A task may do as it likes about a soft limit. Nothing that it does makes good a hard one, or a revocation.

        Args:
            raised: what came out of the task, ``None`` if it has returned.
        """
        match self.acknowledged:
            case CancelReason.REVOKED:
                ended: BaseException = raised if isinstance(raised, TaskCancelled) else TaskCancelled("revoked")
            case CancelReason.HARD_LIMIT:
                ended = self.limits.hard_exceeded(self.task)
            case CancelReason.SOFT_LIMIT if isinstance(raised, asyncio.CancelledError):
                ended = self.limits.soft_exceeded(self.task)
            case _:
                return raised
        # Where the task was is what its author wants to know.
        return ended if raised is None else ended.with_traceback(raised.__traceback__)


class Cancellation:
    """Responsible for telling runs that the supervisor wants them ended.

    Args:
        block: says whether the supervisor must look at the child's runs.
        cancel_spark: ends what the sync task waits for on Spark.
        loop: gives the child's event loop, ``None`` while there is none.
    """

    def __init__(
        self,
        block: ChildBlock,
        cancel_spark: Callable[[], None],
        loop: Callable[[], asyncio.AbstractEventLoop | None],
    ) -> None:
        self._block, self._cancel_spark, self._running_loop = block, cancel_spark, loop
        self._sync: TaskRun | None = None
        self._async: dict[asyncio.Task[Any], TaskRun] = {}
        self._is_polling = False

    def install(self) -> None:
        """Obey from now on."""
        signal.signal(signal.SIGUSR2, self._on_signal)
        self._watch_lost(sys.unraisablehook)

    def limit(self, slot: Slot, deadlines: Deadlines) -> None:
        """Have the supervisor end the run in ``slot`` in time."""
        slot.set_deadlines(deadlines)
        self._block.has_deadlines = True

    # ---- sync tasks: the main thread ----

    def enter(self, run: TaskRun) -> None:
        """Make ``run`` the one that is interrupted inside of :func:`call_users`, whose ``begin`` is :meth:`obey`."""
        self._sync = run

    def raise_if_cancelled(self) -> None:
        """Raise what the supervisor has ordered, if it has.

        Raises:
            SoftTimeLimitExceeded: the run takes longer than its soft limit.
            TaskCancelled: its job was revoked.
        """
        run = self._sync
        if run is None or run.slot.cancel_reason is CancelReason.HARD_LIMIT:  # there, this child is being killed
            return
        reason = run.take_request()
        if reason is CancelReason.NONE:
            return
        with suppress(Exception):
            self._cancel_spark()
        raise TaskCancelled("revoked") if reason is CancelReason.REVOKED else run.limits.soft_exceeded(run.task)

    def _on_signal(self, _number: int, frame: FrameType | None) -> None:
        if self._async and (loop := self._running_loop()) is not None:
            with suppress(RuntimeError):  # it has ended
                loop.call_soon_threadsafe(self._look)
        if _in_task_code(frame):
            self.raise_if_cancelled()

    def _watch_lost(self, before: Callable[[Any], Any]) -> None:
        """Python prints and drops what is raised in a finalizer or a callback from C. Then the task is told again."""

        def hook(unraisable: sys.UnraisableHookArgs) -> None:
            run = self._sync
            if run is not None and isinstance(unraisable.exc_value, SoftTimeLimitExceeded | TaskCancelled):
                run.acknowledged = CancelReason.NONE
                run.slot.acknowledge(False)
            before(unraisable)

        sys.unraisablehook = hook

    # ---- async tasks: the event loop's thread ----

    def enter_async(self, run: TaskRun) -> None:
        """The current asyncio task is in the run's own code until :meth:`leave_async`."""
        task = asyncio.current_task()
        assert task is not None
        self._async[task] = run
        if not self._is_polling:
            self._is_polling = True
            asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def leave_async(self) -> None:
        """The current asyncio task is in the child's code again; what cancelled it is forgotten."""
        task = asyncio.current_task()
        assert task is not None
        del self._async[task]
        while task.cancelling():
            task.uncancel()

    def _look_again(self) -> None:
        self._look()
        self._is_polling = bool(self._async)
        if self._is_polling:
            asyncio.get_running_loop().call_later(_LOOK_S, self._look_again)

    def _look(self) -> None:
        for task, run in tuple(self._async.items()):
            match run.take_request():
                case CancelReason.NONE:
                    pass
                case CancelReason.REVOKED:
                    task.cancel("revoked")
                case CancelReason.HARD_LIMIT:
                    task.cancel(str(run.limits.hard_exceeded(run.task)))
                case CancelReason.SOFT_LIMIT:
                    task.cancel(str(run.limits.soft_exceeded(run.task)))


def _in_task_code(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code is not _QUIET:
        if frame.f_code is _TASK_CODE:
            return True
        frame = frame.f_back
    return False
