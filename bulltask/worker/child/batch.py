"""A batch: the jobs for which a batch task's function is called once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from bulltask.errors import Interrupt, SoftTimeLimitExceeded, TaskCancelled, WorkerShutdown
from bulltask.registry.batches import BatchJob, ErrorOrResult, split_outcome
from bulltask.registry.task import AnyTask
from bulltask.worker.child.asyncio_tasks import end_code
from bulltask.worker.child.run_hooks import HookedRun

__all__ = ["Batch"]


class Batch:
    """The call of a batch task's function, with the hooks of each job around it.

    Args:
        task: The task.
        jobs: The jobs.
        runs: The hooks of each job, in the same order; empty if there are none.
    """

    def __init__(self, task: AnyTask[..., Any], jobs: Sequence[BatchJob[Any]], runs: Sequence[HookedRun]) -> None:
        self._task, self.jobs, self._runs = task, jobs, runs
        self._called: list[BatchJob[Any]] = []

    def call(self) -> Any:
        """Call a sync function with all jobs except those that have already ended, such as revoked ones."""
        raised, returned = None, None
        try:
            for job, run in zip(self.jobs, self._runs, strict=False):
                with _only_this_job(job):
                    run.enter()
            if self._start():
                returned = self._task.function(list(self._called))
        except BaseException as exc:
            raised = exc
            raise
        finally:
            for run, (error, result) in self._hook_outcomes(raised, returned):
                run.leave(result, error)
        return returned

    async def acall(self) -> Any:
        """:meth:`call` for an async function."""
        raised, returned = None, None
        try:
            for job, run in zip(self.jobs, self._runs, strict=False):
                with _only_this_job(job):
                    await run.aenter()
            if self._start():
                returned = await self._task.function(list(self._called))
        except BaseException as exc:
            raised = exc
            raise
        finally:
            await end_code()
            for run, (error, result) in self._hook_outcomes(raised, returned):
                await run.aleave(result, error)
        return returned

    def outcomes(self, raised: BaseException | None, returned: object) -> list[ErrorOrResult]:
        """Return the outcome of each job.

        Args:
            raised: The exception that ended the call; ``None`` if the function returned.
            returned: What it returned.
        """
        outcomes = split_outcome(self._task.name, self._called, raised, returned)
        by_job = {id(job): outcome for job, outcome in zip(self._called, outcomes, strict=True)}
        return [by_job.get(id(job)) or job.outcome or (raised, None) for job in self.jobs]

    def _start(self) -> list[BatchJob[Any]]:
        self._called = [job for job in self.jobs if job.outcome is None]
        return self._called

    def _hook_outcomes(self, raised: BaseException | None, returned: object) -> list[tuple[HookedRun, ErrorOrResult]]:
        if not self._runs:
            return []
        return list(zip(self._runs, self.outcomes(raised, returned), strict=True))[::-1]


@contextmanager
def _only_this_job(job: BatchJob[Any]) -> Iterator[None]:
    """If a hook raises an interrupt, end only this job, unless the supervisor requested the interrupt."""
    try:
        yield
    except (SoftTimeLimitExceeded, TaskCancelled, WorkerShutdown):
        raise
    except Interrupt as exc:
        job.fail(exc)
