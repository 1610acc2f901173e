"""Acquires jobs from the queues in turn; waits for a marker when all queues are empty."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from bulltask.clock import mono_ms
from bulltask.config.rate_limits import TaskRate
from bulltask.errors import BrokerError, BrokerUnavailableError, BulltaskError, JobError
from bulltask.events import Bus, JobStarted, JobThrottled
from bulltask.jobs.job import RunningJob
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched
from bulltask.transport.scripts.fetch import collect_batch, fetch_ahead, fetch_now, move_to_active
from bulltask.transport.scripts.move import find_by_token, move_from_active_to_wait, release_unstarted, renew_lock
from bulltask.transport.scripts.start import start_or_throttle
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff
from bulltask.worker.child.fetch_options import FetchOptionsCache
from bulltask.worker.child.outcomes import AcquiredJob
from bulltask.worker.child.queue_wait import QueueWait, WaitInterrupted
from bulltask.worker.child.round_robin import POLLED_BY_WORKER, RoundRobin
from bulltask.worker.child.uncertain_slots import UncertainSlots
from bulltask.worker.control_page import ControlPage
from bulltask.worker.malformed import MalformedJobHandler
from bulltask.worker.quarantine import max_concurrent
from bulltask.worker.slot import Slot
from bulltask.worker.states import SlotState
from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["JobFetcher"]


_PAUSE_MS: Final = 60_000
_PERMIT_MS: Final = 100
"""With ``--max-jobs``, each fetch needs a permit. A child without one checks at this interval whether another child has
returned a permit."""


class JobFetcher:
    """Acquires jobs from the worker's queues.

    Args:
        broker: Creates two connections: one for short calls, used only by the main thread, and one for blocking waits.
        queues: The queues' names in the app, in the given order.
        bus: Receives an event for every acquired job.
        worker_id: Stored in each job as the worker that processes it.
        wakeup_pipe: Ends a wait early.
        control: The control page, which shows whether the worker is paused.

    Attributes:
        may_wait: Returns whether a job that the wait fetches could start.
    """

    def __init__(
        self,
        broker: Broker,
        queues: Sequence[str],
        bus: Bus,
        worker_id: str,
        wakeup_pipe: WakeupPipe,
        control: ControlPage,
    ) -> None:
        self._clock, self._config, self._control = broker.clock, broker.config, control
        self._bus, self._wakeup_pipe = bus, wakeup_pipe
        self._fetch_options = FetchOptionsCache(broker.config, worker_id)
        self.client = broker.worker_client()
        self.backoff = ReconnectBackoff(bus, self._config)
        config = self._config
        children = config.children if config.autoscale is None else config.autoscale.maximum
        at_once = max(1, POLLED_BY_WORKER // children)
        keys = [broker.keys(queue) for queue in queues]
        self.round_robin = RoundRobin(keys, self._clock, at_once)
        self._queue_backoff = QueueBackoff(self.round_robin.queues, bus, self._config)
        self._malformed = MalformedJobHandler(self.client, self._clock, self._config, bus)
        self._uncertain = UncertainSlots(self.client, self.round_robin, self._skip_queue)
        self._queue_wait = QueueWait(
            broker, self.client, self.round_robin, wakeup_pipe, lambda: self.may_acquire, self._skip_queue
        )
        self.closing = self._stop_requested = False
        self.may_wait: Callable[[], bool] = lambda: True

    @property
    def may_acquire(self) -> bool:
        """False while this child is closing, the worker is paused, or there is no permit for another job."""
        return not (self.closing or self._control.paused or self._control.exhausted)

    @property
    def may_fetch_next(self) -> bool:
        """Whether the call that settles a job may fetch the next one; not if each fetch needs a permit."""
        return not (self.closing or self._control.paused or self._control.has_permits)

    @property
    def stops_checkpointed_tasks(self) -> bool:
        """Whether checkpointed tasks should end between two items, because this child was asked to stop.

        A child that has acquired its last job (``worker_max_tasks_per_child``) is only closing, and finishes that job.
        """
        return (self._stop_requested or self._control.stopping) and not self._control.finishing

    @property
    def may_collect(self) -> bool:
        """Whether several jobs may be acquired: not if those of a call without a reply must be released first."""
        return self.may_acquire and not self._uncertain

    def close(self) -> None:
        """Acquire no more jobs, and end a wait; called by a signal handler."""
        self.closing = self._stop_requested = True
        self.interrupt_wait()

    def interrupt_wait(self) -> None:
        """End a wait if jobs must no longer be acquired; called by a signal handler."""
        self._queue_wait.interrupt()

    def acquire(self, slot: Slot) -> AcquiredJob | None:
        """Wait for a job and acquire it into ``slot``; return ``None`` when the child is closing, or must not wait."""
        while not self.closing:
            if not self.may_acquire:
                self._pause(slot)
                continue
            slot.reserve(mono_ms())
            try:
                self.client.connect()  # also sets the clock, which decides when delayed jobs are due
                self._uncertain.release_jobs()
                # Checked again, because the worker may have been paused while this child connected.
                acquired = self._poll(slot) if self.may_acquire else None
                self.backoff.reset()
                if acquired is not None:
                    return acquired
                self.free_slot(slot)
                if not self.may_wait():
                    return None
                if (acquired := self._wait(slot)) is not None:
                    return acquired
            except WaitInterrupted:
                self._end_wait()
            except BrokerError as exc:
                self.record_lost_call(exc, slot, 0)  # it affects all queues, so the index is not used
                self.back_off(exc)
        self.free_slot(slot)
        return None

    def _pause(self, slot: Slot) -> None:
        """Wait until jobs may be acquired, or close if the worker is stopping."""
        self.free_slot(slot)
        if self._control.stopping:
            self.close()
        else:
            self._wakeup_pipe.wait(_PERMIT_MS if self._control.exhausted else _PAUSE_MS)  # a signal ends it

    def free_slot(self, slot: Slot) -> None:
        """Free the slot; keep it reserved if a call without a reply may have locked a job with its token."""
        if slot in self._uncertain:
            slot.reserve(mono_ms())
        else:
            slot.free(mono_ms())

    def record_lost_call(self, exc: BrokerError, slot: Slot, index: int) -> None:
        """Record that the reply to a call for queue ``index`` was lost.

        The call may have acquired a job with the slot's token.
        """
        if isinstance(exc, BrokerUnavailableError):
            self.record_uncertain(slot, None if exc.node is None else index)
            if exc.node is None:
                # If one connection is half-open, the other may be, too, which would cost another timeout.
                self.disconnect()

    def record_failed_release(self, exc: BrokerError, slot: Slot, index: int) -> None:
        """Record that a job of queue ``index`` could not be released: unlike a fetch, after any error."""
        self.record_uncertain(slot, index)
        self.record_lost_call(exc, slot, index)

    def record_uncertain(self, slot: Slot, index: int | None = None) -> None:
        """Record that the slot's token may lock a job; it is released before the next job is acquired.

        Args:
            slot: The slot.
            index: The queue that may have the job; ``None`` if any of them may have it.
        """
        self._uncertain.add(slot, index)

    def disconnect(self) -> None:
        """Close the connections; they are opened again when needed."""
        self.client.close()
        self._queue_wait.close()

    def release_fetched(self, index: int, slot: Slot, fetched: Fetched | BulltaskError) -> None:
        """Release the job that was fetched in the same round trip as an outcome that could not be written."""
        if isinstance(fetched, BrokerUnavailableError):
            self.record_lost_call(fetched, slot, index)
        elif isinstance(fetched, Fetched) and fetched.job_id:
            try:
                self.client.run(move_from_active_to_wait(self.round_robin.queues[index], fetched.job_id, slot.token))
            except BrokerError as exc:
                self.record_failed_release(exc, slot, index)

    def renew_lock(self, acquired: AcquiredJob) -> bool:
        """Renew or reacquire the lock of an acquired job. Returns False if the lock is lost."""
        return self.client.run(self._renew_call(acquired.keys, acquired.slot, acquired.job.id))

    def fail_malformed(self, index: int, slot: Slot, exc: BrokerError) -> bool:
        """Fail the job locked by a fetch from queue ``index`` that failed with ``exc``, if the job is malformed.

        A job that is not malformed is released; if Redis becomes unavailable, it is released later.

        Returns:
            True if the job was malformed, so that another fetch may succeed.
        """
        keys, was_malformed = self.round_robin.queues[index], False
        try:
            for token, job_id in self.client.run(find_by_token(keys, [slot.token])):
                if self._malformed.fail_if_malformed(keys, token, job_id, exc):
                    was_malformed = True
                else:
                    with suppress(JobError):
                        self.client.run(move_from_active_to_wait(keys, job_id, token))
        except BrokerError as error:
            self.record_failed_release(error, slot, index)
        return was_malformed

    def back_off(self, exc: BrokerError) -> None:
        """Wait before the next attempt after ``exc``."""
        self._wakeup_pipe.wait(self.backoff.record_failure(exc))

    def fetch_call(self, index: int, slot: Slot) -> Call[Fetched]:
        """Return the call that fetches the next job from queue ``index``."""
        keys = self.round_robin.queues[index]
        return move_to_active(keys, self._fetch_options.get(keys, slot.token), self._clock.now_ms())

    def fetch_many(self, index: int, slots: Sequence[Slot], task: str | None = None) -> list[Fetched]:
        """Fetch up to one job for each slot.

        Args:
            index: The queue.
            slots: The slots, which are reserved.
            task: Stop when the next job belongs to another task. Without it, fetch jobs of any task, but none from a
                queue that has a limit for all workers.

        Raises:
            BrokerError: Jobs that the call may have acquired are released later, or failed if they are malformed.
        """
        keys, now_ms = self.round_robin.queues[index], self._clock.now_ms()
        options = [self._fetch_options.get(keys, slot.token) for slot in slots]
        try:
            if task is not None:
                return self.client.run(collect_batch(keys, options, task, now_ms))
            return [] if options[0].limiter is not None else self.client.run(fetch_ahead(keys, options, now_ms))
        except BrokerError as exc:
            for slot in slots:
                self.record_lost_call(exc, slot, index)
                if not isinstance(exc, BrokerUnavailableError):
                    self.fail_malformed(index, slot, exc)
            if exc.node is not None:
                self._skip_queue(index, exc)
            raise

    def release_unstarted(self, jobs: Sequence[AcquiredJob]) -> None:
        """Release jobs that have not started, the last one first, so that they keep their order; free their slots."""
        jobs = jobs[::-1]
        errors: Sequence[object] = ()
        try:
            if jobs:
                errors = self.client.try_many([release_unstarted(job.keys, job.job.id, job.slot.token) for job in jobs])
        except BrokerError as exc:
            errors = [exc] * len(jobs)
        for job, error in zip(jobs, errors, strict=True):
            if isinstance(error, BrokerError):
                self.record_failed_release(error, job.slot, job.queue_index)
            self.free_slot(job.slot)

    def wait_for_queue(self, index: int, wait_ms: int) -> bool:
        """Wait for the marker of one queue; return whether this child has taken it."""
        try:
            return self._queue_wait.wait_for_marker([index], min(wait_ms, self._config.drain_delay_ms))
        except WaitInterrupted:
            return True  # the interrupted call may have taken it

    def acquired(
        self, index: int, slot: Slot, fetched: Fetched, state: SlotState = SlotState.ACTIVE
    ) -> AcquiredJob | None:
        """Return the job in a fetch's reply, and set its slot to ``state``; ``None`` if the queue had no job."""
        if not fetched.job_id:
            self.round_robin.record_empty(index, fetched)
            return None
        self.round_robin.acquired_from(index)
        keys, reserved_ms = self.round_robin.queues[index], slot.since_ms
        now_ms = mono_ms()
        slot.activate(index, fetched.job_id, now_ms, state)
        is_late = now_ms - reserved_ms > self._config.lock_ms // 2
        if is_late and not self._renew_late_lock(keys, slot, fetched.job_id):
            return None
        job = RunningJob.read(keys.queue, fetched.job_id, fetched.fields)
        return AcquiredJob(slot, index, keys, job, max_concurrent(fetched.fields, self._config.max_crashes))

    def emit_started(self, job: RunningJob) -> None:
        """Emit ``JobStarted`` for an acquired job."""
        if self._bus.wants(JobStarted):
            self._bus.emit(JobStarted(job.id, job.queue, job.name, job.attempts_started))

    def throttle_if_limited(self, acquired: AcquiredJob, rate: TaskRate) -> bool:
        """Delay an acquired job and free its slot if its task has reached its rate limit; False if the job may start.

        While Redis is unavailable, the call is retried, and the supervisor renews the job's lock.
        """
        job, interrupted, delay_ms = acquired.job, False, None
        acquired.slot.settle(mono_ms())  # an active job whose lock the call removes would be reported
        while True:
            call = start_or_throttle(acquired.keys, job, acquired.slot.token, rate, self._clock.now_ms())
            try:
                # After a lost reply, the job still has its lock unless that call has delayed it.
                delay_ms = None if interrupted and not self.renew_lock(acquired) else self.client.run(call)
                self.backoff.reset()
                break
            except BrokerError as exc:
                interrupted = True
                self.back_off(exc)
            except JobError:  # this process was suspended for longer than the lock lasts
                if interrupted:
                    break  # the stalled check recovers the job if no other worker has it
                interrupted = True
        if delay_ms:
            self._bus.emit(JobThrottled(job.id, job.queue, job.name, delay_ms))
        if delay_ms == 0:
            acquired.slot.start(mono_ms())
        else:
            self.free_slot(acquired.slot)
        return delay_ms != 0

    def _renew_late_lock(self, keys: QueueKeys, slot: Slot, job_id: str) -> bool:
        """Renew or reacquire a lock after this process was suspended; False if another worker has the job."""
        try:
            return self.client.run(self._renew_call(keys, slot, job_id))
        except BrokerError:
            self.record_uncertain(slot)  # released as soon as Redis is available
            return False

    def _renew_call(self, keys: QueueKeys, slot: Slot, job_id: str) -> Call[bool]:
        return renew_lock(keys, job_id, slot.token, self._config.lock_ms)

    def _poll(self, slot: Slot) -> AcquiredJob | None:
        if not self._control.has_permits:
            return self._poll_queues(slot)
        if not self._control.take_permit():
            return None
        acquired = None
        try:
            acquired = self._poll_queues(slot)
        finally:
            self._control.settle_permit(used=acquired is not None)
        return acquired

    def _poll_queues(self, slot: Slot) -> AcquiredJob | None:
        for index in self.round_robin.candidates():
            if self._uncertain.may_lock(slot, index):
                continue  # its token may already lock a job of this queue
            fetched = self._fetch(index, slot)
            if fetched is not None and (acquired := self.acquired(index, slot, fetched)) is not None:
                return acquired
        return None

    def _fetch(self, index: int, slot: Slot) -> Fetched | None:
        while not (self.closing or self._control.paused):
            try:
                fetched = self.client.run(self.fetch_call(index, slot))
            except BrokerError as exc:
                if not self._queue_backoff.affects_queue(exc):
                    raise
                self.record_lost_call(exc, slot, index)
                if exc.node is not None or not self.fail_malformed(index, slot, exc):
                    self._skip_queue(index, exc)
                    return None
            else:
                self._queue_backoff.reset(index)
                return fetched
        return None

    def _skip_queue(self, index: int, exc: BrokerError) -> None:
        """Do not poll a queue for a while, because Redis, or its node of a cluster, returned an error."""
        self.round_robin.record_error(index, self._queue_backoff.record_failure(index, exc))

    def _wait(self, slot: Slot) -> AcquiredJob | None:
        """Wait until a queue may have a job; return the job if the wait has fetched it, too."""
        slot.waiting = True
        try:
            acquired = self._wait_and_fetch(slot)
        finally:
            slot.waiting = False
        if self.may_acquire:
            return acquired
        self.restore_markers()
        if acquired is not None:  # the worker was paused or stopped meanwhile
            self.release_unstarted([acquired])
        return None

    def _wait_and_fetch(self, slot: Slot) -> AcquiredJob | None:
        # With several queues, it is not known in advance from which one to fetch.
        if len(self.round_robin.queues) > 1 or self._control.has_permits:
            self._queue_wait.wait()
            return None
        slot.reserve(mono_ms())
        keys = self.round_robin.queues[0]
        try:
            fetched = self._queue_wait.wait(fetch_now(keys, self._fetch_options.get(keys, slot.token)))
        except BaseException:
            self.record_uncertain(slot)  # Redis may have run the fetch
            raise
        if isinstance(fetched, BrokerError):
            self.fail_malformed(0, slot, fetched)
        return self.acquired(0, slot, fetched) if isinstance(fetched, Fetched) else None

    def _end_wait(self) -> None:
        """Undo what an interrupted wait may have done: it may have popped a marker, and acquired a job."""
        self.restore_markers()
        with suppress(BrokerError):  # released later, or by the supervisor when this child has exited
            self._uncertain.release_jobs()

    def restore_markers(self) -> None:
        """Add the markers again, because an interrupted wait may have popped one that another worker needs."""
        with suppress(BrokerError):  # other workers poll again within drain_delay
            self.client.run_many([command("ZADD", keys.marker, 0, "0") for keys in self.round_robin.queues])
