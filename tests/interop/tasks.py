"""The tasks that the interop tests run in bulltask's workers; the jobs come from Node or from bulltask."""

from __future__ import annotations

import asyncio
import os
from time import monotonic
from typing import Any

from bulltask import App, BatchJob, Context, PermanentError

__all__ = ["register"]

ERRORS: dict[str, type[Exception]] = {
    "ValueError": ValueError,  # permanent in bulltask's jobs, retried in Node's
    "ConnectionError": ConnectionError,  # transient
    "PermanentError": PermanentError,
}


def register(app: App) -> None:
    """Register the functions of this module as tasks of ``app``, by their names."""
    for function in (echo, aecho, add, spread, fail, huge, spin):
        app.task(name=function.__name__)(function)
    for bound in (busy, fail_until, move, report, areport, record, arecord):
        app.task(bind=True, name=bound.__name__)(bound)
    app.task(name="lengths", batch=10, batch_wait=0.2)(lengths)
    app.task(name="limited", soft_time_limit=0.3)(limited)
    app.task(name="one_an_hour", rate_limit="1/h")(echo)


def echo(value: Any = None) -> Any:
    """Return the argument."""
    return value


async def aecho(value: Any = None) -> Any:
    """Return the argument, on the child's event loop."""
    await asyncio.sleep(0)
    return value


def add(x: int, y: int = 10) -> int:
    """Return the sum."""
    return x + y


def spread(first: Any, *rest: Any, **more: Any) -> list[Any]:
    """Return how the arguments arrived."""
    return [first, list(rest), more]


def fail(message: str = "it failed", error: str = "ConnectionError") -> None:
    """Raise an error."""
    raise ERRORS[error](message)


def huge(kind: str) -> Any:
    """Return a value that JSON or Node cannot represent."""
    return {"integer": {"total": 2**53}, "nan": float("nan"), "infinity": [float("inf")]}[kind]


def spin(seconds: float) -> str:
    """Compute for a number of seconds, holding the interpreter."""
    until = monotonic() + seconds
    while monotonic() < until:
        pass
    return "spun"


def limited(seconds: float) -> str:
    """Compute for a number of seconds, unless the task's soft time limit comes first."""
    return spin(seconds)


def fail_until(self: Context, attempt: int, error: str = "ConnectionError") -> int:
    """Raise in every attempt before the given one; return the number of failed attempts."""
    if self.request.retries + 1 < attempt:
        raise ERRORS[error](f"attempt {self.request.retries + 1} failed")
    return self.request.retries


def busy(self: Context, duration: float) -> int:
    """Rate-limit the queue when the job first runs; return the number of attempts_started when it runs again."""
    if self.request.attempts_started == 1:
        self.rate_limit(duration)
    return self.request.attempts_started


def move(self: Context, queue: str, *, fails: bool = False) -> str:
    """Move the job to a queue; there, return or raise its name."""
    if self.request.queue != queue:
        self.retry(queue=queue, countdown=0)
    if fails:
        raise PermanentError(queue)
    return queue


def report(self: Context, steps: list[Any]) -> int:
    """Report each step as progress and as a line of the job's log."""
    for step in steps:
        self.update_progress(step)
        self.log(f"at {step}")
    return len(steps)


async def areport(self: Context, steps: list[Any]) -> int:
    """Do the same on the child's event loop."""
    for step in steps:
        await self.aupdate_progress(step)
        await self.alog(f"at {step}")
    return len(steps)


def record(self: Context, file: str) -> int:
    """Append "<job id> <process id>" to a file; return the process id."""
    return _note(file, self.request.id)


async def arecord(self: Context, file: str) -> int:
    """Do the same on the child's event loop."""
    return _note(file, self.request.id)


def _note(file: str, job_id: str) -> int:
    # One write in append mode, so that lines of several processes do not mix.
    handle = os.open(file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(handle, f"{job_id} {os.getpid()}\n".encode())
    finally:
        os.close(handle)
    return os.getpid()


def lengths(jobs: list[BatchJob[dict[str, str]]]) -> list[int]:
    """Return the length of each job's text; a job without a text fails."""
    for job in jobs:
        if not job.data["text"]:
            job.fail(PermanentError("no text"))
    return [len(job.data["text"]) for job in jobs]
