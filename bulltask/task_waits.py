"""Warnings for tasks that wait for the results of other jobs, and for coroutines that block their event loop.

Meanwhile, such a task occupies a slot of its worker. If all running jobs do so, no slot is left for the jobs that they
wait for. Celery raises ``RuntimeError`` instead. bulltask does not, because waiting is safe if another worker runs the
other job.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypedDict

from bulltask.jobs.job import JobRef
from bulltask.user_warnings import warn_user

__all__ = ["WaitOptions", "allow_join_result", "check_wait_options", "warn_about_wait", "warn_in_tasks"]


_allowed: ContextVar[bool] = ContextVar("bulltask_waits_allowed", default=False)
_running_task: Callable[[], str] | None = None
_warned: set[str] = set()


class WaitOptions(TypedDict, total=False):
    """Options of Celery's ``get`` that have no effect here.

    Attributes:
        interval: bulltask waits for an event instead of polling.
        no_ack: Results are not messages, so there is nothing to acknowledge.
        follow_parents: A step of a canvas always fails if a step before it has failed.
        on_message: Results are not messages. This option causes a warning that says what to use instead.
    """

    interval: float
    no_ack: bool
    follow_parents: bool
    on_message: Callable[[Any], object] | None


def check_wait_options(given: WaitOptions) -> None:
    """Warn about an option whose effect the caller may miss.

    Raises:
        TypeError: An option is unknown.
    """
    if unknown := given.keys() - WaitOptions.__annotations__.keys():
        raise TypeError(f"get() got an unexpected keyword argument {min(unknown)!r}")
    if given.get("on_message") is not None:
        warn_user(
            "get(on_message=…) has no effect, because results are not messages: read result.progress, or listen to the "
            "queue's events"
        )


@contextmanager
def allow_join_result() -> Iterator[None]:
    """Let a task wait for the results of other jobs without a warning (Celery's function).

    ``with allow_join_result(): result.get(timeout=10)``. Outside a worker, it has no effect.
    """
    token = _allowed.set(True)
    try:
        yield
    finally:
        _allowed.reset(token)


def warn_in_tasks(running_task: Callable[[], str]) -> None:
    """Turn on the warning in this process, a child of a worker.

    Args:
        running_task: Returns the name of the task that the caller runs in, ``""`` for none.
    """
    global _running_task  # noqa: PLW0603 - it belongs to the process
    _running_task = running_task


def warn_about_wait(ref: JobRef) -> None:
    """Warn, once per task, if a task is about to wait for this job's result and has not turned off the warning."""
    if _allowed.get():
        return
    task = "" if _running_task is None else _running_task()
    if task and task not in _warned:
        _warned.add(task)
        warn_user(
            f"task {task} waits for the result of job {ref.id} in queue {ref.queue}, and occupies a slot of its "
            "worker. If all running jobs wait like this, the jobs that they wait for never start. Use a canvas, such "
            "as a.s() | b.s(), or `await result` in an async task. If other workers run those jobs, in a "
            "separate queue, get(disable_sync_subtasks=False) or allow_join_result() turns off this warning"
        )
    elif not task and _is_in_coroutine():
        warn_user(
            f"get() blocks the event loop while it waits for the result of job {ref.id} in queue {ref.queue}: nothing "
            "else runs on it. Use `await result`, or `await result.aget(timeout=…)`"
        )


def _is_in_coroutine() -> bool:
    """Return whether an ``async def`` function has made this call; notebooks run each of their cells in one."""
    asyncio = sys.modules.get("asyncio")
    if asyncio is None or asyncio._get_running_loop() is None or "ipykernel" in sys.modules:  # noqa: SLF001 - as in get_running_loop()
        return False
    frame = sys._getframe(1)  # noqa: SLF001
    while frame.f_back is not None and not frame.f_code.co_flags & inspect.CO_COROUTINE:
        frame = frame.f_back
    return frame.f_back is not None
