"""Changes of single jobs (:data:`JOB_CHANGES`), and of many jobs, which run in the background: first counted, then
confirmed, then made, with their progress.

They are the changes of ``bulltask jobs``. They belong to this process: when it ends, what was not changed stays as it
is, and the change can be started again.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from bulltask.app import App
from bulltask.jobs.clock import Duration, mono_s
from bulltask.jobs.errors import BulltaskError, ConfigError, JobNotFoundError
from bulltask.queue import Job, Queue

if TYPE_CHECKING:
    from bulltask.dashboard.pages import Filter

__all__ = ["JOB_CHANGES", "Change", "Changes", "Phase"]


def _job(queue: Queue, job_id: str) -> Job:
    if (job := queue.get_job(job_id)) is None:
        raise JobNotFoundError(job_id, queue.context.keys.name)
    return job


def _retry(queue: Queue, job_id: str) -> str:
    job = _job(queue, job_id)
    job.retry("completed" if job.is_completed() else "failed")
    return f"Job {job_id} waits again."


def _promote(queue: Queue, job_id: str) -> str:
    _job(queue, job_id).promote()
    return f"Job {job_id} waits for a worker."


def _remove(queue: Queue, job_id: str) -> str:
    _job(queue, job_id).remove()
    return f"Job {job_id} is removed."


def _revoke(queue: Queue, job_id: str) -> str:
    return f"Job {job_id}: {queue.revoke(job_id, terminate=True)}."


JOB_CHANGES: Final[Mapping[str, Callable[[Queue, str], str]]] = {
    "retry": _retry,
    "promote": _promote,
    "remove": _remove,
    "revoke": _revoke,
}
"""Changes of a job; each says what it has done."""


_MAX_RUNNING: Final = 8
_MAX_KEPT: Final = 20
"""How many changes, with the ids of their jobs in temporary files, are kept."""
_CONFIRM_S: Final = 3_600
"""For how long a change can be confirmed after its jobs were counted."""


class Phase(StrEnum):
    """How far a change is."""

    COUNTING = "counting"
    COUNTED = "counted"
    CHANGING = "changing"
    DONE = "done"
    STOPPED = "stopped"
    FAILED = "failed"


class _Stopped(Exception):
    """A user has stopped the change."""


class Change:
    """A change of all jobs of a queue that match a filter.

    Attributes:
        id: Its id, which cannot be guessed.
        queue: The queue.
        action: ``retry``, ``promote``, ``remove`` or ``revoke``.
        wanted: Which jobs.
        older_than: Only jobs that finished, or were added, longer ago, in seconds.
        user: Who has started it.
        phase: How far it is.
        steps, of: How many jobs were read, or changed, in this phase, and how many there are.
        error: Why it failed, ``""`` if it did not.
    """

    def __init__(
        self, app: App, queue: str, action: str, wanted: Filter, *, older_than: Duration | None, user: str
    ) -> None:
        self.id = secrets.token_urlsafe(9)
        self.queue = queue
        self.action = action
        self.wanted = wanted
        self.older_than = older_than
        self.user = user
        self.phase = Phase.COUNTING
        self.steps = 0
        self.of = 0
        self.error = ""
        self.begun_s = mono_s()
        self._stops = False
        self._ready = threading.Event()
        self._bulk = app.queue(queue).bulk(
            action,
            states=wanted.state,
            task=wanted.task,
            error_fingerprint=wanted.error_fingerprint,
            text=wanted.text,
            older_than=older_than,
            terminate=action == "revoke" and wanted.state == "active",
        )

    @property
    def matched(self) -> int:
        """How many jobs match."""
        return self._bulk.matched

    @property
    def done(self) -> int:
        """How many of them were changed."""
        return self._bulk.done

    @property
    def reasons(self) -> Mapping[str, int]:
        """Why others were not, with the number of jobs."""
        return dict(self._bulk.reasons)

    @property
    def errors(self) -> Sequence[tuple[str, str]]:
        """The first of the jobs that were not changed, with their errors."""
        return [(job_id, str(error)) for job_id, error in list(self._bulk.errors)]

    @property
    def is_running(self) -> bool:
        """Whether jobs are being counted or changed."""
        return self.phase in {Phase.COUNTING, Phase.CHANGING}

    @property
    def is_stale(self) -> bool:
        """Whether its jobs were counted so long ago that they must be counted again."""
        return mono_s() - self.begun_s > _CONFIRM_S

    def stop(self) -> None:
        """Stop it after the round trip that it is making."""
        self._stops = True

    def wait(self, seconds: float) -> None:
        """Wait until the jobs are counted or changed, at most so long."""
        self._ready.wait(seconds)

    def begin(self, phase: Phase) -> None:
        """Count or change the jobs, in a thread that does not keep the process from ending."""
        self.phase = phase
        self.steps = 0
        self.of = 0
        self._ready.clear()
        threading.Thread(target=self._work, name=f"bulltask-{self.action}", daemon=True).start()

    def _work(self) -> None:
        try:
            if self.phase is Phase.COUNTING:
                self._bulk.find(self._note)
                self.phase = Phase.COUNTED
            else:
                self._bulk.run(self._note)
                self.phase = Phase.DONE
        except _Stopped:
            self.phase = Phase.STOPPED
        except BulltaskError as exc:
            self.error = str(exc)
            self.phase = Phase.FAILED
        except BaseException:
            self.error = "An unexpected error; the log of the dashboard has it."
            self.phase = Phase.FAILED
            raise
        finally:
            self._ready.set()

    def _note(self, steps: int, of: int) -> None:
        self.steps = steps
        self.of = of
        if self._stops:
            raise _Stopped


class Changes:
    """The changes of this process."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._lock = threading.Lock()
        self._changes: dict[str, Change] = {}

    def get(self, change_id: str) -> Change | None:
        """Return a change, ``None`` if there is none, or it was long ago."""
        return self._changes.get(change_id)

    def count(self, queue: str, action: str, wanted: Filter, *, older_than: Duration | None, user: str) -> Change:
        """Begin to count the jobs that a change would change; nothing is changed."""
        change = Change(self._app, queue, action, wanted, older_than=older_than, user=user)
        with self._lock:
            self._check_running()
            for old in list(self._changes.values())[: -_MAX_KEPT + 1]:
                if not old.is_running:
                    del self._changes[old.id]
            self._changes[change.id] = change
            change.begin(Phase.COUNTING)
        return change

    def run(self, change: Change) -> None:
        """Begin to change exactly the jobs that were counted; raises ``ConfigError`` if that is not possible now."""
        with self._lock:
            if change.phase is not Phase.COUNTED:
                raise ConfigError(f"this change is not waiting to be confirmed: it is {change.phase}")
            if change.is_stale:
                raise ConfigError("these jobs were counted more than an hour ago: count them again")
            self._check_running()
            change.begin(Phase.CHANGING)

    def _check_running(self) -> None:
        if sum(change.is_running for change in self._changes.values()) >= _MAX_RUNNING:
            raise ConfigError(f"{_MAX_RUNNING} other changes are running: wait until one of them has ended")
