"""Results whose ``get()`` runs the jobs that are due, or raises, instead of waiting for a worker."""

from __future__ import annotations

from typing import TYPE_CHECKING

from bulltask.errors import ResultTimeoutError
from bulltask.jobs.job import JobRef
from bulltask.jobs.states import JobState
from bulltask.jobs.stored_job import Finished, StoredSnapshot
from bulltask.transport.results import Results

if TYPE_CHECKING:
    from bulltask.testing.inline_worker import InlineWorker

__all__ = ["InlineResults", "UnattendedResults"]

_FIRST_MS = 0
"""A start position before all events, so that the outcome of a removed job is always found in the event stream."""


class UnattendedResults(Results):
    """The results of an app in a test that has no worker: waiting for a job would never end.

    Args:
        results: The app's other results, whose connections it uses.
    """

    def __init__(self, results: Results) -> None:
        vars(self).update(vars(results))

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """Return the outcome of a job that has finished.

        Raises:
            ResultTimeoutError: It has not finished.
            JobNotFoundError: The job does not exist, and no event contains its outcome.
        """
        _check_finished(ref, self.snapshot(ref))
        return super().wait(ref, timeout_ms, sent_ms)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio."""
        _check_finished(ref, await self.asnapshot(ref))
        return await super().await_finished(ref, timeout_ms, sent_ms)


class InlineResults(Results):
    """The results of an app whose jobs an :class:`InlineWorker` runs.

    Args:
        results: The app's other results, whose connections it uses.
        worker: Runs the jobs.
    """

    def __init__(self, results: Results, worker: InlineWorker) -> None:
        vars(self).update(vars(results))
        self._worker = worker

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:  # noqa: ARG002
        """Run jobs until ``ref`` has finished, and return its outcome.

        Raises:
            ResultTimeoutError: It cannot run, or is not due within the timeout.
            JobNotFoundError: The job does not exist, and no event contains its outcome.
        """
        if _may_run(self.snapshot(ref).state):
            self._worker.run_until_finished(ref, timeout_ms)
            snapshot = self.snapshot(ref)
            self._check(ref, snapshot, timeout_ms)
            if snapshot.state.finished:
                return _outcome(snapshot)
        elif self._worker.is_running(ref):
            raise ResultTimeoutError(f"job {ref.id} in queue {ref.queue} waits for its own result")
        return super().wait(ref, timeout_ms, _FIRST_MS)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:  # noqa: ARG002
        """:meth:`wait` for asyncio."""
        if _may_run((await self.asnapshot(ref)).state):
            await self._worker.arun_until_finished(ref, timeout_ms)
            snapshot = await self.asnapshot(ref)
            self._check(ref, snapshot, timeout_ms)
            if snapshot.state.finished:
                return _outcome(snapshot)
        return await super().await_finished(ref, timeout_ms, _FIRST_MS)

    def _check(self, ref: JobRef, snapshot: StoredSnapshot, timeout_ms: int | None) -> None:
        if not _may_run(snapshot.state):
            return
        within = "" if timeout_ms is None else f" within {timeout_ms / 1000:g} s of the test's clock"
        reason = f" (its last attempt failed: {snapshot.failed_reason})" if snapshot.failed_reason else ""
        if task := self._worker.unregistered_task(ref.queue):
            reason = f"; task {task!r}, which is next in its queue, is not registered in the app: import its module"
        raise ResultTimeoutError(
            f"job {ref.id} in queue {ref.queue} is still {snapshot.state}, and no job is due{within}{reason}"
        )


def _check_finished(ref: JobRef, snapshot: StoredSnapshot) -> None:
    if not snapshot.state.finished and snapshot.state is not JobState.UNKNOWN:
        raise ResultTimeoutError(
            f"job {ref.id} in queue {ref.queue} is {snapshot.state}, and this test has no worker that could run it: "
            "derive the test case from bulltask.contrib.django.test.JobsMixin, or use the pytest fixture "
            "bulltask_worker"
        )


def _may_run(state: JobState) -> bool:
    """Return whether a worker has not acquired the job yet; an active one may be running in another process."""
    return not state.finished and state not in {JobState.ACTIVE, JobState.UNKNOWN}


def _outcome(snapshot: StoredSnapshot) -> Finished:
    if snapshot.state is JobState.COMPLETED:
        return Finished(True, snapshot.returnvalue or "null")
    return Finished(False, snapshot.failed_reason)
