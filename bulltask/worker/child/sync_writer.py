"""Writes the outcomes of the main thread's jobs, and fetches the next job in the same round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from bulltask.clock import mono_ms
from bulltask.errors import RECOVERABLE, BrokerError, BrokerUnavailableError, BulltaskError, JobError
from bulltask.transport.call import Call
from bulltask.transport.steps import drive
from bulltask.worker.child.failed_writes import BackoffStep, OutcomeWriteSteps, WriteStep
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.child.outcomes import AcquiredJob, Outcome, RateLimitedOutcome
from bulltask.worker.child.settle import Settler

__all__ = ["OutcomeWriter"]


class OutcomeWriter:
    """Writes outcomes; while Redis is unavailable, it repeats the call, and the supervisor renews the job's lock.

    Args:
        fetcher: Its client makes the calls; it also acquires the next job.
        settler: Builds the calls, and emits the events.
    """

    def __init__(self, fetcher: JobFetcher, settler: Settler) -> None:
        self._fetcher, self._settler = fetcher, settler

    def write(self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float) -> AcquiredJob | None:
        """Write the outcome of one job; return the next job if the call has fetched it."""
        fetcher, written, fetch_error = self._fetcher, outcome, None
        acquired.slot.settle(mono_ms())
        try:
            next_job = self._exchange(acquired, outcome, fetch=fetcher.may_fetch_next)
        except (BrokerError, JobError) as exc:
            steps = self._settler.failed_writes.steps(acquired, outcome, exc)
            written, next_job, fetch_error = self._execute(steps, acquired, fetch=True)
        if fetch_error is not None:
            fetcher.fail_malformed(acquired.queue_index, acquired.slot, fetch_error)
        if next_job is None:
            fetcher.free_slot(acquired.slot)
        self.after_write(acquired, written, duration_ms)
        return next_job

    def call(self, acquired: AcquiredJob, outcome: Outcome, *, fetch_next: bool) -> Call[Any]:
        """Return the call that writes an outcome, and fetches the next job if that would be in the same queue."""
        fetch_next = fetch_next and len(self._fetcher.round_robin.queues) == 1
        return self._settler.call(acquired, outcome, fetch_next=fetch_next)

    def limit_call(self, acquired: AcquiredJob, outcome: RateLimitedOutcome) -> Call[None]:
        """Return the call to make before the one that :meth:`call` returns; see :meth:`Settler.limit_call`."""
        return self._settler.limit_call(acquired, outcome)

    def write_many(self, ended: Sequence[tuple[AcquiredJob, Outcome]], duration_ms: float) -> None:
        """Write the outcomes in one round trip. Each job has its own call, so an error affects only one job."""
        for acquired, _ in ended:
            acquired.slot.settle(mono_ms())
        for (acquired, outcome), error in zip(ended, self._write_batch(ended), strict=True):
            written: Outcome | None = outcome
            if isinstance(error, BrokerError | JobError):
                written = self.recover(acquired, outcome, error)
            self.after_write(acquired, written, duration_ms)
            self._fetcher.free_slot(acquired.slot)

    def recover(self, acquired: AcquiredJob, outcome: Outcome, error: BulltaskError) -> Outcome | None:
        """Write an outcome whose first write has failed; return the outcome that Redis has stored, if any.

        If the script stored the outcome and then failed on the next job, that job is failed.
        """
        steps = self._settler.failed_writes.steps(acquired, outcome, error)
        written: Outcome | None
        written, _, fetch_error = self._execute(steps, acquired, fetch=False)
        if fetch_error is not None:
            self._fetcher.fail_malformed(acquired.queue_index, acquired.slot, fetch_error)
        return written

    def after_write(self, acquired: AcquiredJob, written: Outcome | None, duration_ms: float) -> None:
        """Make the call that follows an outcome, emit its event, and call the hooks."""
        self._fetcher.backoff.reset()
        if (call := self._settler.after_settle(acquired, written)) is not None:
            self._run_until_reply(call)
        if (hooks := self._settler.emit(acquired, written, duration_ms)) is not None:
            asyncio.run(hooks)  # those of an async task whose function was not called

    def _write_batch(self, ended: Sequence[tuple[AcquiredJob, Outcome]]) -> Sequence[object]:
        """Return the reply to each call, or its error."""
        try:
            limits = [
                self._settler.limit_call(acquired, outcome)
                for acquired, outcome in ended
                if isinstance(outcome, RateLimitedOutcome)
            ]
            calls = [self._settler.call(acquired, outcome, fetch_next=False) for acquired, outcome in ended]
            return self._fetcher.client.try_many([*limits, *calls])[len(limits) :]
        except BrokerError as exc:
            return [exc] * len(ended)

    def _exchange(self, acquired: AcquiredJob, outcome: Outcome, *, fetch: bool) -> AcquiredJob | None:
        """Write the outcome and fetch the next job, from the same or another queue, in one round trip."""
        fetcher, slot = self._fetcher, acquired.slot
        if isinstance(outcome, RateLimitedOutcome):
            fetcher.client.run(self._settler.limit_call(acquired, outcome))
        index = fetcher.round_robin.after(acquired.queue_index)
        same = index == acquired.queue_index
        call = self._settler.call(acquired, outcome, fetch_next=fetch and same)
        if not fetch or (same and call.script is not None and call.script.name != "moveToFinished"):
            fetcher.client.run(call)
            return None
        if same:
            return fetcher.acquired(index, slot, fetcher.client.run(call))
        settled, fetched = fetcher.client.try_many([call, fetcher.fetch_call(index, slot)])
        if isinstance(settled, BulltaskError):
            fetcher.release_fetched(index, slot, fetched)
            raise settled
        if isinstance(fetched, BulltaskError):
            # The outcome is stored. The next fetch raises the same error and handles it.
            if isinstance(fetched, BrokerUnavailableError):  # another node of a cluster
                fetcher.record_lost_call(fetched, slot, index)
            elif isinstance(fetched, BrokerError):
                fetcher.fail_malformed(index, slot, fetched)
            return None
        return fetcher.acquired(index, slot, fetched)

    def _execute(self, steps: OutcomeWriteSteps, acquired: AcquiredJob, *, fetch: bool) -> Any:
        return drive(steps, lambda step: self._step(step, acquired, fetch=fetch), (BrokerError, JobError))

    def _step(self, step: BackoffStep | WriteStep | Call[bool], acquired: AcquiredJob, *, fetch: bool) -> Any:
        match step:
            case BackoffStep():
                self._fetcher.record_lost_call(step.error, acquired.slot, acquired.queue_index)
                self._fetcher.back_off(step.error)
            case WriteStep():
                fetch = fetch and self._fetcher.may_fetch_next and not step.uncertain
                return self._exchange(acquired, step.outcome, fetch=fetch)
            case _:
                return self._run_until_reply(step)
        return None

    def _run_until_reply(self, call: Call[Any]) -> Any:
        """Retry a call until there is a reply; return ``False`` after an error reply."""
        while True:
            try:
                return self._fetcher.client.run(call)
            except RECOVERABLE as exc:
                self._fetcher.back_off(exc)
            except (BrokerError, JobError):
                return False
