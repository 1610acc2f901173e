"""``AsyncResult``: what became of a job, for sync and async code alike."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Generator, Iterator
from contextlib import suppress
from types import BuiltinMethodType
from typing import Any, Final, Generic, TypeVar

from bulltask.clock import Duration, to_ms
from bulltask.errors import BrokerError, DecodeError, JobError, ResultTimeoutError, TaskError, TaskRevokedError
from bulltask.jobs import codec
from bulltask.jobs.failures import REASON_CHARS
from bulltask.jobs.job import JobRef
from bulltask.jobs.states import REVOKED, JobState, Revocation
from bulltask.jobs.stored_job import Finished, JobSnapshot
from bulltask.ports import ResultReader

__all__ = ["AsyncResult", "RemoteTraceback"]

R = TypeVar("R")

_PYTHON_TRACE: Final = "Traceback (most recent call last):"
_CLASS: Final = re.compile(r"[\w.]+")
_LONGEST_KEY: Final = 200
_AMBIGUOUS: Final = (BrokerError, JobError, DecodeError, ResultTimeoutError, StopIteration, StopAsyncIteration)
"""A task's own exception of these kinds would say something about ``get()`` itself, or end the caller's loop."""


class RemoteTraceback(Exception):
    """The traceback of the worker, shown as the cause of an exception that was raised again here."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.text = text

    def __str__(self) -> str:
        return f"\n\n{self.text.rstrip()}\n"


class AsyncResult(Generic[R]):
    """The handle of one sent job.

    Works for every job of the queue, also for those that Node sent or ran. Waiting uses the queue's event stream and
    re-checks the job's state, so it neither polls nor hangs when events were trimmed.

    Args:
        job_id: the job's id.
        queue: its queue as the user spells it.
        reader: reads jobs and waits for them.
        sent_ms: server time at which the job was sent, if this process sent it.
    """

    def __init__(self, job_id: str, queue: str, reader: ResultReader, sent_ms: int | None = None) -> None:
        self._ref, self._reader, self._sent_ms = JobRef(queue, job_id), reader, sent_ms

    @property
    def id(self) -> str:
        """The job's id."""
        return self._ref.id

    @property
    def queue(self) -> str:
        """The job's queue as the user spells it."""
        return self._ref.queue

    def get(self, timeout: Duration | None = None) -> R:
        """Wait for the job to end and return the task's return value.

        Args:
            timeout: seconds or ``timedelta``; ``None`` waits for ever.

        Raises:
            ResultTimeoutError: it has not ended in time (the job goes on).
            JobNotFoundError: Redis has no such job (any more) and no event says how it ended.
            BrokerError: Redis could not be asked.
            TaskRevokedError: the job was revoked.
            Exception: the task failed: the exception that it raised if its class is loaded in this process, with
                the worker's traceback as cause; else ``TaskError`` with that traceback in its text.
        """
        finished = self._reader.wait(self._ref, _timeout_ms(timeout), self._sent_ms)
        if not finished.completed:
            raise self._failure(finished.text, self._reader.snapshot(self._ref))
        return self._value(finished)

    async def aget(self, timeout: Duration | None = None) -> R:  # noqa: ASYNC109 - the same words as get()
        """:meth:`get` for asyncio; ``await result`` is the same without a timeout."""
        finished = await self._reader.await_finished(self._ref, _timeout_ms(timeout), self._sent_ms)
        if not finished.completed:
            raise self._failure(finished.text, await self._reader.asnapshot(self._ref))
        return self._value(finished)

    def __await__(self) -> Generator[Any, None, R]:
        return self.aget().__await__()

    def revoke(self, *, terminate: bool = False) -> Revocation:
        """Have the job not run: it fails now, as ``revoked``, and ``get()`` raises ``TaskRevokedError``.

        It is not retried. What belongs to a job that fails happens: events, the parent of a flow hears of it.

        Args:
            terminate: if it runs, have its worker end it: the task is interrupted, and its process is killed if it
                does not react. Without this a job that runs goes on.

        Returns:
            ``"revoked"``; ``"running"``: it runs and goes on; ``"terminating"``: its worker ends it within about a
            second, ``get()`` tells when; ``"finished"``: it had ended before; ``"unknown"``: there is no such job.

        Raises:
            SchedulerJobError: it is the next one of a job scheduler: remove that instead.
            BrokerError: Redis could not be asked. The call may simply be made again.
        """
        return self._reader.revoke(self._ref, terminate=terminate)

    async def arevoke(self, *, terminate: bool = False) -> Revocation:
        """:meth:`revoke` for asyncio."""
        return await self._reader.arevoke(self._ref, terminate=terminate)

    def snapshot(self) -> JobSnapshot:
        """What Redis holds of the job now: state, progress, result, failure, tracebacks; one round trip."""
        return self._reader.snapshot(self._ref)

    async def asnapshot(self) -> JobSnapshot:
        """:meth:`snapshot` for asyncio."""
        return await self._reader.asnapshot(self._ref)

    @property
    def state(self) -> JobState:
        """The job's state in BullMQ's words; ``JobState.UNKNOWN`` when Redis has no such job (any more)."""
        return self.snapshot().state

    def ready(self) -> bool:
        """True when the job has completed or failed."""
        return self.state.finished

    def successful(self) -> bool:
        """True when the job has completed."""
        return self.state is JobState.COMPLETED

    def failed(self) -> bool:
        """True when the job has failed for good."""
        return self.state is JobState.FAILED

    @property
    def progress(self) -> codec.Json:
        """What the task last reported with ``update_progress``; ``None`` before that."""
        return self.snapshot().progress

    @property
    def info(self) -> Any:
        """Celery's ``info``: the return value when completed, the exception when failed, else the progress."""
        snapshot = self.snapshot()
        if snapshot.state is JobState.COMPLETED:
            return self._value(Finished(True, snapshot.returnvalue or "null"))
        if snapshot.state is JobState.FAILED:
            return self._failure(snapshot.failed_reason, snapshot)
        return snapshot.progress

    @property
    def traceback(self) -> str | None:
        """The traceback of the last failed attempt, ``None`` when none was stored."""
        traces = self.snapshot().stacktrace
        return traces[-1] if traces else None

    def _value(self, finished: Finished) -> R:
        value: R = codec.decode(finished.text or "null", what=f"return value of job {self.id}")
        return value

    def _failure(self, reason: str, snapshot: JobSnapshot) -> Exception:
        trace = snapshot.stacktrace[-1] if snapshot.stacktrace else ""
        original = _rebuild(reason, trace)
        if original is None:
            kind = TaskRevokedError if reason == REVOKED else TaskError
            return kind(reason, job_id=self.id, remote_traceback=trace)
        original.__cause__ = RemoteTraceback(trace)
        return original

    def __repr__(self) -> str:
        return f"<AsyncResult {self.id} of queue {self.queue}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, AsyncResult) and other._ref == self._ref

    def __hash__(self) -> int:
        return hash(self._ref)


def _timeout_ms(timeout: Duration | None) -> int | None:
    return None if timeout is None else to_ms(timeout, "timeout")


def _rebuild(reason: str, trace: str) -> Exception | None:
    """Make the task's own exception from its traceback and its message, or ``None`` where that is not safe.

    What stands in Redis may have been written by anybody who can write there. So nothing is imported: the class must
    be loaded already, be an ``Exception``, and be found under exactly that name; and no code of it runs but its
    ``__str__``. (CVE-2021-23727: Celery called whatever name it found.)
    """
    kind = _loaded_class(_class_name(reason, trace))
    if kind is None:
        return None
    made = [exc for args in _possible_args(kind, reason) if (exc := _without_init(kind, args)) is not None]
    exact = [exc for exc in made if str(exc) == reason or not exc.args]
    near = [exc for exc in made if reason in str(exc)]
    return next(iter(exact + near), None)


def _class_name(reason: str, trace: str) -> str:
    """The class as the traceback spells it: what stands on the last line before the message, however long that is.

    The message is searched for as text. Compiling one of 20 MB (Node sets no limit) as a pattern takes half a minute.
    """
    if _PYTHON_TRACE not in trace:
        return ""
    text, said = trace.rstrip(), reason.rstrip()
    if text.endswith(f": {said}"):
        return text[: -len(said) - 2].rpartition("\n")[2]
    lines = text if len(said) <= REASON_CHARS else ""  # a longer one was not written by bulltask
    end = len(lines)
    while (end := lines.rfind(f": {said}\n", 0, end)) >= 0:  # notes come after the message
        name = lines[lines.rfind("\n", 0, end) + 1 : end]
        if _CLASS.fullmatch(name):
            return name
    return text.rpartition("\n")[2]


def _loaded_class(name: str) -> type[Exception] | None:
    module_name, _, class_name = name.rpartition(".")
    found = getattr(sys.modules.get(module_name or "builtins"), "__dict__", {}).get(class_name)
    if not (isinstance(found, type) and issubclass(found, Exception) and found.__name__ == class_name):
        return None
    return None if issubclass(found, _AMBIGUOUS) else found


def _possible_args(kind: type[Exception], reason: str) -> Iterator[tuple[object, ...]]:
    if reason == kind.__name__:  # what a worker writes for an exception without a message
        yield ()
        return
    yield (reason,)
    if issubclass(kind, KeyError) and len(reason) < _LONGEST_KEY:  # its message is the repr of its argument
        with suppress(ValueError, SyntaxError):
            yield (ast.literal_eval(reason),)


def _without_init(kind: type[Exception], args: tuple[object, ...]) -> Exception | None:
    # The nearest __new__ that is Python's own: a class may have written one itself.
    news = (vars(base).get("__new__") for base in kind.__mro__)
    new = next(new for new in news if isinstance(new, BuiltinMethodType))
    try:
        exc: Exception = new(kind, *args)
        exc.args = args
        str(exc)
    except Exception:  # noqa: BLE001 - it may need other arguments, or attributes that only its __init__ sets
        return None
    return exc
