"""Runs short jobs on the main thread, several per round trip (docs/adr/0038-prefetching-short-jobs.md)."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any, Final, NamedTuple

from bulltask.jobs.clock import mono_ms, mono_s
from bulltask.jobs.errors import BrokerError, BrokerUnavailableError, JobError
from bulltask.transport.call import Call
from bulltask.worker.attempt import THROTTLED, Attempt, AttemptRunner, JobStarter
from bulltask.worker.fetch import JobFetcher
from bulltask.worker.finish import OutcomeWriter
from bulltask.worker.outcomes import AcquiredJob, Outcome, RateLimitedOutcome
from bulltask.worker.slots import LONG_MS, ChildBlock, ControlPage, Slot, SlotState

__all__ = ["PrefetchCount", "PrefetchLoop"]


FLUSH_MS: Final = 5
"""The jobs of one round trip should together take no longer than this. An outcome waits longer only if the next job is
unexpectedly long."""

_OVERLAP_MS: Final = 0.75 * LONG_MS
"""Of jobs up to this duration, one is prefetched. The supervisor would often release it if they took longer."""

_CPU_SAMPLE: Final = 17
"""The CPU time of one of so many jobs is measured; a prime, because tasks may take turns."""

_DECAY: Final = 0.8
"""After ten short jobs, a long one counts for a tenth of its duration."""
_LONGEST_MS: Final = 1_000.0


class PrefetchCount:
    """Decides how many jobs a child acquires in one round trip.

    One long job makes it acquire the next ones one at a time; it acquires several only after several short ones in a
    row. Of jobs that are too long to share a round trip, it prefetches one, which runs while Redis handles the outcome
    of the one before it.

    Args:
        maximum: The largest number; 0 and 1 turn prefetching off.

    Attributes:
        jobs: How many jobs to acquire in one round trip.
        expected_ms: How long the next job may take: as long as the slowest of the latest ones.
    """

    def __init__(self, maximum: int) -> None:
        self._maximum = max(1, maximum)
        self.expected_ms = _LONGEST_MS
        self.jobs = 1

    def record(self, duration_ms: float) -> None:
        """Record how long a job took; after a long one, the next jobs are acquired one at a time."""
        if duration_ms > LONG_MS:
            duration_ms = _LONGEST_MS
        self.expected_ms = slowest_ms = min(max(duration_ms, self.expected_ms * _DECAY), _LONGEST_MS)
        jobs = int(FLUSH_MS / slowest_ms) if slowest_ms else self._maximum
        if jobs < 2:
            jobs = 2 if slowest_ms <= _OVERLAP_MS else 1
        self.jobs = min(self._maximum, jobs)

    def record_long_job(self) -> None:
        """Prefetch no more, as after a long job: jobs that run alongside others, or in a batch, are not prefetched."""
        self.expected_ms = _LONGEST_MS
        self.jobs = 1


_WRITTEN: Final = {SlotState.WRITTEN, SlotState.RELEASING}
_NO_REPLY: Final = BrokerUnavailableError("the supervisor received no reply when it wrote this outcome")
_WAKE_MS: Final = 100
"""How often a child asks the supervisor, which looks at it only now and then, to watch it: not for each single job."""
_RECHECK_MS: Final = 1_000
"""Interval at which a child checks whether a queue has a global concurrency or rate limit."""


class _EndedJob(NamedTuple):
    """A job whose attempt has ended, and whose outcome may not be written yet; the call may also fetch a job."""

    acquired: AcquiredJob
    outcome: Outcome
    duration_ms: float
    call: Call[Any]
    fetches: bool
    packed: bytes


class PrefetchLoop:
    """Runs jobs while they are short: writes their outcomes, and fetches the next jobs, in one round trip.

    While jobs are ready, the loop does not wait for that round trip: it runs them first, and then reads the replies.

    The child holds the lock of its block of shared memory except while a task's code is running. If the task takes
    too long, the supervisor releases the jobs that have not started and writes the outcomes that are still here, so no
    job waits for a long one.

    Attributes:
        count: How many jobs to prefetch; also records the jobs that this loop does not run.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one for each part that it connects
        self,
        fetcher: JobFetcher,
        starter: JobStarter,
        runner: AttemptRunner,
        writer: OutcomeWriter,
        block: ChildBlock,
        control: ControlPage,
        maximum: int,
        unprefetched_tasks: Collection[str],
        wake_supervisor: Callable[[], None] = lambda: None,
    ) -> None:
        self._fetcher = fetcher
        self._starter = starter
        self._call = runner.counting_cpu(writer.counts, _CPU_SAMPLE)
        self._writer = writer
        self._pool = fetcher.pool
        self._block = block
        self._control = control
        self.count = PrefetchCount(maximum)
        self._unprefetched_tasks = unprefetched_tasks
        self._wake_supervisor = wake_supervisor
        self._wake_at_ms = 0
        self._prefetches = False
        self._recheck_at_ms = 0
        self._ready: deque[AcquiredJob] = deque()
        self._sent: Sequence[_EndedJob] = ()
        self._replies: Callable[[], Sequence[Any]] = tuple

    @property
    def is_useful(self) -> bool:
        """Whether to run the next jobs with :meth:`run`."""
        prefetches = self.count.jobs > 1
        if prefetches != self._prefetches:
            self._block.prefetches = self._prefetches = prefetches
        if prefetches and not self._control.watches and (now_ms := mono_ms()) >= self._wake_at_ms:
            self._wake_at_ms = now_ms + _WAKE_MS
            self._wake_supervisor()
        may_fetch = self._fetcher.may_fetch_next and not self._fetcher.round_robin.cancelled
        return prefetches and self._control.watches and may_fetch and self._block.can_lock

    def record_idle(self) -> None:
        """Record that there is no job, so the supervisor need not watch this child."""
        if self._prefetches:
            self._block.prefetches = self._prefetches = False

    def run(self, first: AcquiredJob) -> AcquiredJob | None:
        """Run a job and those that follow it; return a job that needs the child for itself, if any.

        The slots of all other jobs have been given back.
        """
        self._block.lock()
        try:
            # Checked again, because the supervisor stops watching only while it has the lock.
            if not self._control.watches or self._runs_alone(first):
                return first
            return self._run(first)
        finally:
            self._block.unlock()

    def _run(self, first: AcquiredJob) -> AcquiredJob | None:
        """Repeat three phases: run the jobs that are ready, write their outcomes, and make further jobs ready."""
        ready = self._ready
        first.slot.activate(first.queue_index, first.job.id, mono_ms(), SlotState.PREFETCHED)
        ready.append(first)
        alone: AcquiredJob | None = None
        while (ready or self._sent) and alone is None:
            ended = self._run_ready()
            self._read_replies()  # of the round before
            if (acquired := self._next_ready()) is not None and self._runs_alone(acquired):
                alone = ready.popleft()
            # No other job ends in the same round after one whose task has rate-limited the queue.
            limits_queue = bool(ended) and isinstance(ended[-1].outcome, RateLimitedOutcome)
            fetch = alone is None and not limits_queue
            if ended:
                fetching = self._write(ended, fetch=fetch)
                self._refill(ended[-1].acquired.queue_index, fetching, fetch=fetch)
            if limits_queue or not self._fetcher.may_collect:
                break
        self._read_replies()
        if self._next_ready() is not None:
            self._fetcher.release_unstarted(list(ready))
            self._pool.give_back(*(acquired.slot for acquired in ready))
            ready.clear()
        if alone is not None:
            alone.slot.enter(SlotState.ACTIVE, mono_ms())
        return alone

    def _wanted(self) -> int:
        """Return how many jobs should be ready at the start of the next round."""
        # While a queue is cancelled, OutcomeWriter chooses from which queue the next job is fetched.
        return self.count.jobs if self._fetcher.may_collect and not self._fetcher.round_robin.cancelled else 0

    # ---- running ----

    def _runs_alone(self, acquired: AcquiredJob) -> bool:
        return bool(acquired.max_concurrent) or acquired.job.name in self._unprefetched_tasks

    def _run_ready(self) -> list[_EndedJob]:
        """Run the jobs that are ready until their outcomes should be written."""
        ended: list[_EndedJob] = []
        wanted, began_ms = self._wanted(), mono_ms()
        if wanted and began_ms >= self._recheck_at_ms:
            self._recheck_at_ms = began_ms + _RECHECK_MS
            wanted = 1  # fetchAhead, which checks the queue's limits, acquires the others
        fetching = sum(item.fetches for item in self._sent)
        while (acquired := self._next_ready()) is not None:
            next_end_ms = mono_ms() - began_ms + self.count.expected_ms
            if self._runs_alone(acquired) or (ended and next_end_ms >= FLUSH_MS):
                break
            self._ready.popleft()
            acquired.slot.enter(SlotState.ACTIVE, mono_ms())
            attempt = self._starter.begin(acquired)
            if attempt is THROTTLED:
                continue
            outcome, duration_ms = self._outcome(attempt, acquired.slot)
            if self._writer.counts is not None:
                self._writer.ending(acquired, outcome, duration_ms)
            call, fetches = self._writer.call(acquired, outcome, fetch_next=fetching < wanted)
            item = _EndedJob(acquired, outcome, duration_ms, call, fetches, self._fetcher.client.pack(call))
            ended.append(item)
            fetching += item.fetches
            is_stored = acquired.slot.end(item.packed, mono_ms())
            if not is_stored or isinstance(outcome, RateLimitedOutcome) or self._fetcher.closing:
                break
            if 2 * len(ended) >= wanted and self._ready:
                break  # the other half runs while Redis executes the calls of this one
        return ended

    def _next_ready(self) -> AcquiredJob | None:
        """Return the next job; forget those that the supervisor has released, which may run elsewhere by now."""
        while self._ready and self._ready[0].slot.state != SlotState.PREFETCHED:
            self._give_back(self._ready.popleft().slot)
        return self._ready[0] if self._ready else None

    def _outcome(self, attempt: Attempt | Outcome, slot: Slot) -> tuple[Outcome, float]:
        if not isinstance(attempt, Attempt):
            return attempt, 0.0
        started = mono_s()
        self._block.running_since_ms = mono_ms()
        self._block.unlock()
        try:
            outcome = self._call(attempt, slot)
        finally:
            self._block.lock()
            self._block.running_since_ms = 0
        duration_ms = (mono_s() - started) * 1000
        self.count.record(duration_ms)
        return outcome, duration_ms

    # ---- writing ----

    def _write(self, ended: Sequence[_EndedJob], *, fetch: bool) -> int:
        """Send the calls that write the outcomes; return how many of them fetch a job."""
        unwritten = [item for item in ended if item.acquired.slot.state not in _WRITTEN]
        for item in ended:
            if item.acquired.slot.state in _WRITTEN:
                self._handle_reply(item, None)
        if not (fetch and self._fetcher.may_fetch_next):
            unwritten = [self._without_fetch(item) for item in unwritten]
        self._send(unwritten)
        return sum(item.fetches for item in unwritten)

    def _give_back(self, slot: Slot) -> None:
        """Give back a slot that the supervisor has taken over."""
        if slot.state == SlotState.RELEASING:
            self._fetcher.record_lost_reply(slot, slot.read().queue_index)
        self._pool.give_back(slot)

    def _without_fetch(self, item: _EndedJob) -> _EndedJob:
        call, _ = self._writer.call(item.acquired, item.outcome, fetch_next=False)
        return item._replace(call=call, fetches=False, packed=self._fetcher.client.pack(call))

    def _send(self, items: Sequence[_EndedJob]) -> None:
        """Send the calls; :meth:`_read_replies` reads the replies."""
        without_reply = [item for item in items if item.acquired.slot.state == SlotState.NO_REPLY]
        items = [item for item in items if item.acquired.slot.state != SlotState.NO_REPLY]
        for item in items:
            item.acquired.slot.enter(SlotState.FINISHING, mono_ms())
        if items:
            self._replies = self._start(items)
            self._sent = items
        for item in without_reply:
            self._handle_reply(item, _NO_REPLY)

    def _start(self, items: Sequence[_EndedJob]) -> Callable[[], Sequence[Any]]:
        """Send the calls; return a function that returns their results or errors."""
        client = self._fetcher.client
        try:
            for item in items:
                if isinstance(item.outcome, RateLimitedOutcome):
                    client.run(self._writer.limit_call(item.acquired, item.outcome))
            return client.start_many([item.call for item in items], [item.packed for item in items])
        except BrokerError as exc:
            errors = [exc] * len(items)
        return lambda: errors

    def _read_replies(self) -> None:
        """Read the replies to the calls that were sent, and make the jobs in them ready."""
        items = self._sent
        self._sent = ()
        if not items:
            return
        try:
            replies = self._replies()
        except BrokerError as exc:
            replies = [exc] * len(items)
        for item, reply in zip(items, replies, strict=True):
            self._handle_reply(item, reply)

    def _handle_reply(self, item: _EndedJob, reply: Any) -> None:
        """Handle the reply to a call, or its error. The supervisor may have taken the slot over in the meantime."""
        acquired, next_job, state = item.acquired, None, item.acquired.slot.state
        written: Outcome | None = item.outcome
        if state in _WRITTEN:
            self._writer.ended(acquired, written, item.duration_ms)
            self._give_back(acquired.slot)
            self._writer.after_write(acquired, written, item.duration_ms)
            return
        if isinstance(reply, BrokerError | JobError):
            error = _NO_REPLY if state == SlotState.NO_REPLY else reply
            written = self._writer.recover(acquired, item.outcome, error, item.duration_ms)
        elif item.fetches and state != SlotState.RELEASED:
            next_job = self._fetcher.adopt(acquired.queue_index, acquired.slot, reply, SlotState.PREFETCHED)
        if self._writer.counts is not None:
            self._writer.ended(acquired, written, item.duration_ms)
        if next_job is None:
            self._pool.give_back(acquired.slot)
        else:
            self._ready.append(next_job)
        self._writer.after_write(acquired, written, item.duration_ms)

    # ---- acquiring ----

    def _refill(self, index: int, fetching: int, *, fetch: bool) -> None:
        """Read the replies, unless enough jobs are ready or on their way, and acquire those that are missing.

        ``index`` is the queue of the last job, and ``fetching`` how many of the calls that were sent fetch a job.
        """
        missing = self._wanted() - len(self._ready) - fetching if fetch else 0
        # The supervisor can only take over a call that was sent if the slot contains it.
        if self._ready and fetch and missing <= 0 and all(item.acquired.slot.is_sent for item in self._sent):
            return
        expected = len(self._ready) + fetching
        self._read_replies()
        if missing <= 0 or len(self._ready) < expected:  # the queue is empty
            return
        index = self._fetcher.round_robin.after(index)
        count = self._wanted() - len(self._ready)
        self._ready += self._fetcher.acquire_many(index, count, state=SlotState.PREFETCHED)
