"""Writes the outcomes of the event loop's jobs, and fetches the next job in the same round trip."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from bulltask import loop_timers
from bulltask.clock import mono_ms
from bulltask.errors import RECOVERABLE, BrokerError, JobError
from bulltask.transport.call import Call
from bulltask.transport.client_types import AnyAsyncClient
from bulltask.transport.replies import Fetched
from bulltask.transport.scripts.move import find_by_token, release_unstarted, renew_lock
from bulltask.transport.steps import adrive
from bulltask.worker.broker_backoff import ReconnectBackoff
from bulltask.worker.child.failed_writes import BackoffStep, OutcomeWriteSteps, WriteStep
from bulltask.worker.child.outcomes import AcquiredJob, Outcome, RateLimitedOutcome
from bulltask.worker.child.settle import Settler

__all__ = ["AsyncOutcomeWriter"]

_SHORT_MS: Final = 5
_MAX_CALLS: Final = 4
"""How many outcomes of jobs that are not short may wait for their replies. If a hundred jobs end at the same time and
are written together, Redis sends the hundred replies together, so the next hundred jobs start, and end, together, too.
Then this loop is idle while they run, and each of them waits until all the others are written. Small groups spread over
time. Short jobs gain more from sharing a round trip."""


class AsyncOutcomeWriter:
    """Writes outcomes; while Redis is unavailable, it repeats the call, and the supervisor renews the job's lock.

    Args:
        settler: Builds the calls, and emits the events.
        client: Returns the loop's client.
        backoff: The backoff of the event loop.
    """

    def __init__(self, settler: Settler, client: Callable[[], AnyAsyncClient], backoff: ReconnectBackoff) -> None:
        self._settler, self._client, self._backoff = settler, client, backoff
        self._calls = asyncio.Semaphore(_MAX_CALLS)

    async def write(
        self, acquired: AcquiredJob, outcome: Outcome, duration_ms: float, *, fetch_next: bool = False
    ) -> Fetched | None:
        """Write the outcome of one job; return the next job, which is locked with the same slot's token, if any."""
        fetched: Fetched | None = None
        written: Outcome | None = outcome
        # The next job would have to wait until the hooks of this one have run.
        fetch_next = fetch_next and not self._settler.have_hooks(outcome)
        acquired.slot.settle(mono_ms())
        try:
            if duration_ms < _SHORT_MS:
                fetched = await self._write(acquired, outcome, fetch_next=fetch_next)
            else:
                async with self._calls:
                    fetched = await self._write(acquired, outcome, fetch_next=fetch_next)
        except (BrokerError, JobError) as exc:
            written = await self._execute(self._settler.failed_writes.steps(acquired, outcome, exc), acquired)
            if fetch_next and isinstance(exc, BrokerError):
                await self._release_unknown(acquired)
        self._backoff.reset()
        if (call := self._settler.after_settle(acquired, written)) is not None:
            await self._run_until_reply(call)
        if (hooks := self._settler.emit(acquired, written, duration_ms)) is not None:
            await hooks
        return fetched

    async def release(self, jobs: Sequence[AcquiredJob]) -> None:
        """Release jobs that have not started, the last one first, so that they keep their order."""
        calls = [release_unstarted(each.keys, each.job.id, each.slot.token) for each in reversed(jobs)]
        # The client sends concurrent calls in order, without waiting for the replies to earlier ones.
        await asyncio.gather(*map(self._run_until_reply, calls))

    async def renew_lock(self, acquired: AcquiredJob, lock_ms: int) -> bool:
        """Renew or reacquire the lock of a job that has not started; return False if the lock is lost."""
        call = renew_lock(acquired.keys, acquired.job.id, acquired.slot.token, lock_ms)
        return await self._run_until_reply(call) is True

    async def _release_unknown(self, acquired: AcquiredJob) -> None:
        """Release the job that a call may have fetched, although its reply was lost or was an error."""
        keys, token = acquired.keys, acquired.slot.token
        for _, job_id in await self._run_until_reply(find_by_token(keys, [token])) or ():
            await self._run_until_reply(release_unstarted(keys, job_id, token))

    async def _write(self, acquired: AcquiredJob, outcome: Outcome, *, fetch_next: bool) -> Fetched | None:
        client = self._client()
        if isinstance(outcome, RateLimitedOutcome):
            await client.run(self._settler.limit_call(acquired, outcome))
        reply: Any = await client.run(self._settler.call(acquired, outcome, fetch_next=fetch_next))
        return reply if fetch_next and isinstance(reply, Fetched) and reply.job_id else None

    async def _execute(self, steps: OutcomeWriteSteps, acquired: AcquiredJob) -> Outcome | None:
        written, _, _ = await adrive(steps, lambda step: self._step(step, acquired), (BrokerError, JobError))
        return written

    async def _step(self, step: BackoffStep | WriteStep | Call[bool], acquired: AcquiredJob) -> Any:
        match step:
            case BackoffStep():
                await self._back_off(step.error)
            case WriteStep():
                await self._write(acquired, step.outcome, fetch_next=False)
            case _:
                return await self._run_until_reply(step)
        return None

    async def _run_until_reply(self, call: Call[Any]) -> Any:
        """Retry a call until there is a reply; return ``False`` after an error reply."""
        while True:
            try:
                return await self._client().run(call)
            except RECOVERABLE as exc:
                await self._back_off(exc)
            except (BrokerError, JobError):
                return False

    async def _back_off(self, exc: BrokerError) -> None:
        await loop_timers.sleep(self._backoff.record_shared_failure(exc) / 1000)
