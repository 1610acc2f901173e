"""Runs batch tasks: one call of a function, and an outcome for each of its jobs."""

from __future__ import annotations

import contextvars
import functools
from collections.abc import Sequence

from bulltask.errors import TaskCancelled
from bulltask.jobs.time_limits import NO_LIMITS
from bulltask.registry.batches import ErrorOrResult
from bulltask.worker.child.attempt import Attempt, AttemptRunner
from bulltask.worker.child.batch import Batch
from bulltask.worker.child.cancellation import TaskExecution, call_task
from bulltask.worker.child.outcomes import Outcome
from bulltask.worker.slot import Slot
from bulltask.worker.states import CancelReason

__all__ = ["BatchRunner"]

BatchAttempts = Sequence[tuple[Attempt, Slot]]


class BatchRunner:
    """Runs batches.

    Args:
        runner: Runs attempts.
    """

    def __init__(self, runner: AttemptRunner) -> None:
        self._runner, self._cancellation = runner, runner.cancellation

    def call(self, members: BatchAttempts) -> list[Outcome]:
        """Call a sync function for the jobs of a batch; return the outcome of each."""
        batch = self._batch(members, variables := contextvars.copy_context())
        execution = self._start(members, batch, alone=True)
        function = functools.partial(variables.run, call_task, self._cancellation.raise_if_cancelled, batch.call)
        return self._outcomes(members, batch, self._runner.execute(execution, function))

    async def acall(self, members: BatchAttempts) -> list[Outcome]:
        """Call an async function, or a sync one in a thread."""
        task = members[0][0].task
        variables = None if task.is_async else contextvars.copy_context()
        batch = self._batch(members, variables)
        execution = self._start(members, batch, alone=False)
        function = batch.acall if variables is None else functools.partial(variables.run, batch.call)
        return self._outcomes(members, batch, await self._runner.aexecute(execution, task, lambda: function))

    def _batch(self, members: BatchAttempts, variables: contextvars.Context | None) -> Batch:
        jobs, runs, hooks = [attempt.arguments.args[0] for attempt, _ in members], [], self._runner.hooks
        if hooks.has_hooks(members[0][0].task):
            runs = [
                hooks.start(attempt.job, attempt.task, job.request, variables)
                for (attempt, _), job in zip(members, jobs, strict=True)
            ]
        return Batch(members[0][0].task, jobs, runs)

    def _start(self, members: BatchAttempts, batch: Batch, *, alone: bool) -> TaskExecution:
        """Give all jobs the same deadlines, from the shortest limits. A job that is already revoked does not run."""
        limits, slots, in_batch = NO_LIMITS, [slot for _, slot in members], len(members) > 1
        for attempt, _ in members:
            limits = limits.shortest(attempt.limits)
        for attempt, slot in members:
            deadlines = self._runner.deadlines(attempt, limits, alone=alone, in_batch=in_batch)
            if limits == NO_LIMITS:
                slot.set_deadlines(deadlines)
            else:
                self._cancellation.set_deadlines(slot, deadlines)
        for job, slot in zip(batch.jobs, slots, strict=True):
            if in_batch and slot.cancel_reason is CancelReason.REVOKED:
                job.fail(TaskCancelled("revoked"))
        return TaskExecution(slots[0], members[0][0].job.name, limits, other_slots=tuple(slots[1:]))

    def _outcomes(self, members: BatchAttempts, batch: Batch, of_call: ErrorOrResult) -> list[Outcome]:
        of_jobs = batch.outcomes(*of_call)
        return [self._runner.outcome(attempt, *each) for (attempt, _), each in zip(members, of_jobs, strict=True)]
