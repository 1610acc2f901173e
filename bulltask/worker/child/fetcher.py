"""Taking jobs: one at a time, from the queue whose turn it is, waiting on markers when all are empty."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError, BrokerUnavailableError, BulltaskError, Interrupt, JobError
from bulltask.events import Bus, JobPickedUp
from bulltask.jobs.job import RunningJob
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched, text
from bulltask.transport.scripts.move import find_by_token, keep_lock, move_from_active_to_wait, move_to_active
from bulltask.worker.broker_backoff import QueueBackoff, ReconnectBackoff
from bulltask.worker.child.claims import Claims
from bulltask.worker.child.outcomes import AcquiredJob
from bulltask.worker.child.round_robin import RoundRobin
from bulltask.worker.malformed import MalformedJobs
from bulltask.worker.quarantine import max_concurrent
from bulltask.worker.slots import ControlPage, Slot
from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["JobFetcher", "WaitInterrupted"]


_PAUSE_MS: Final = 60_000
_MAXIMUM_MS: Final = 1_000
"""A queue with a global maximum is asked again this often: other clients tell nobody when a job of theirs has left."""
_LOOK_MS: Final = 5_000
"""So often a child looks whether a queue has one."""


class WaitInterrupted(Interrupt):
    """A signal ended the wait for a marker."""


class JobFetcher:
    """Responsible for taking jobs from the worker's queues.

    Args:
        broker: makes the connections: one for short calls, which is the main thread's alone, and one that waits.
        queues: the queues' names as the user spells them, in the order given.
        bus: hears of every job taken.
        worker_id: written into each job as who processes it.
        wakeup_pipe: how waiting ends early.
        control: what the supervisor wants of all children.
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
        self._bus, self._wakeup_pipe, self._claims = bus, wakeup_pipe, Claims(broker.config, worker_id)
        self.client, self._waiter = broker.client(), broker.blocking_client(self._config.drain_delay_ms)
        self.backoff = ReconnectBackoff(bus, self._config)
        self.round_robin = RoundRobin([broker.keys(queue) for queue in queues], self._clock)
        self._queue_backoff = QueueBackoff(self.round_robin.queues, bus, self._config)
        self._malformed = MalformedJobs(self.client, self._clock, self._config, bus)
        self._queues = {keys.marker.encode(): index for index, keys in enumerate(self.round_robin.queues)}
        self._uncertain: set[Slot] = set()
        self._longest_ms, self._look_at_ms = self._config.drain_delay_ms, 0
        self.closing = False
        self._waiting = False

    @property
    def may_acquire(self) -> bool:
        """False while this child must take no jobs: it is closing, or the worker is paused."""
        return not (self.closing or self._control.paused)

    def close(self) -> None:
        """Take no more jobs; called by the signal handler, so a wait must end at once."""
        self.closing = True
        self.interrupt_wait()

    def interrupt_wait(self) -> None:
        """The supervisor may want something else than before; called by the signal handler."""
        if self._waiting and not self.may_acquire:
            self._waiting = False  # once: a second signal must not interrupt what the first one brought about
            raise WaitInterrupted

    def acquire(self, slot: Slot) -> AcquiredJob | None:
        """Wait for a job and take it into ``slot``; ``None`` when the child is closing."""
        while not self.closing:
            if not self.may_acquire:
                self.release(slot)
                self._wakeup_pipe.wait(_PAUSE_MS)  # a signal ends it
                continue
            slot.reserve(mono_ms())
            try:
                self.client.connect()  # sets the clock, by which delayed jobs are promoted
                self._release_unseen()
                acquired = (
                    self._poll(slot) if self.may_acquire else None
                )  # a worker may be paused while a child connects
                self.backoff.reset()
                if acquired is not None:
                    return acquired
                self.release(slot)
                self._wait()
            except WaitInterrupted:
                self._restore_markers()
            except BrokerError as exc:
                self.record_lost_call(exc, slot)
                self.back_off(exc)
        self.release(slot)
        return None

    def release(self, slot: Slot) -> None:
        """The slot holds no job; or one that nobody has seen, for which the supervisor looks when the child ends."""
        if slot in self._uncertain:
            slot.reserve(mono_ms())
        else:
            slot.free(mono_ms())

    def record_lost_call(self, exc: BrokerError, slot: Slot) -> None:
        """A call that may have taken a job broke: the job, if there is one, is locked with the slot's token."""
        if isinstance(exc, BrokerUnavailableError):
            self._uncertain.add(slot)
            # Where one connection is half-open the other may be as well, and would take another timeout to find out.
            self.disconnect()

    def disconnect(self) -> None:
        """Close the connections; they are opened again when they are needed."""
        self.client.close()
        self._waiter.close()

    def release_fetched(self, index: int, slot: Slot, fetched: Fetched | BulltaskError) -> None:
        """Put back what a fetch of queue ``index`` brought: the outcome that travelled with it was refused."""
        if isinstance(fetched, Fetched) and fetched.job_id:
            self.client.run(move_from_active_to_wait(self.round_robin.queues[index], fetched.job_id, slot.token))

    def keeps_lock(self, acquired: AcquiredJob) -> bool:
        """True when a job in hand is still this child's; a lock that has run out is taken again."""
        return self.client.run(self._keep_lock(acquired.keys, acquired.slot, acquired.job.id))

    def fail_malformed(self, index: int, slot: Slot, exc: BrokerError) -> bool:
        """Set the job of queue ``index`` aside that a fetch took into ``slot`` before it stopped with ``exc``.

        A job that was not to blame is given back. When Redis is lost meanwhile, that is done later.

        Returns:
            True if the job was to blame, so that asking again helps.
        """
        keys, was_malformed = self.round_robin.queues[index], False
        try:
            for token, job_id in self.client.run(find_by_token(keys, [slot.token])):
                if self._malformed.fail_if_malformed(keys, token, job_id, exc):
                    was_malformed = True
                else:
                    with suppress(JobError):
                        self.client.run(move_from_active_to_wait(keys, job_id, token))
        except BrokerError as fault:
            self.record_lost_call(fault, slot)
        return was_malformed

    def back_off(self, exc: BrokerError) -> None:
        """Wait before the next try after ``exc``."""
        self._wakeup_pipe.wait(self.backoff.record_failure(exc))

    def fetch_call(self, index: int, slot: Slot) -> Call[Fetched]:
        """The call that takes the next job of queue ``index``."""
        keys = self.round_robin.queues[index]
        return move_to_active(keys, self._claims.of(keys, slot.token), self._clock.now_ms())

    def acquired(self, index: int, slot: Slot, fetched: Fetched) -> AcquiredJob | None:
        """Turn a fetch's reply into a job in hand; ``None`` when the queue had none."""
        if not fetched.job_id:
            self.round_robin.empty(index, fetched)
            return None
        self.round_robin.acquired_from(index)
        keys, asked_ms = self.round_robin.queues[index], slot.since_ms
        slot.activate(index, fetched.job_id, mono_ms())
        if mono_ms() - asked_ms > self._config.lock_ms // 2 and not self._keeps_late(keys, slot, fetched.job_id):
            return None
        job = RunningJob.read(keys.queue, fetched.job_id, fetched.fields)
        if self._bus.wants(JobPickedUp):
            self._bus.emit(JobPickedUp(job.id, job.queue, job.name, job.attempts_started))
        return AcquiredJob(slot, index, keys, job, max_concurrent(fetched.fields, self._config.max_crashes))

    def _keeps_late(self, keys: QueueKeys, slot: Slot, job_id: str) -> bool:
        """This process stood still before it heard of its job: another worker may have it by now."""
        try:
            return self.client.run(self._keep_lock(keys, slot, job_id))
        except BrokerError:
            self._uncertain.add(slot)  # given back as soon as Redis answers
            return False

    def _keep_lock(self, keys: QueueKeys, slot: Slot, job_id: str) -> Call[bool]:
        return keep_lock(keys, job_id, slot.token, self._config.lock_ms)

    def _poll(self, slot: Slot) -> AcquiredJob | None:
        for index in self.round_robin.candidates():
            fetched = self._fetch(index, slot)
            if fetched is not None and (acquired := self.acquired(index, slot, fetched)) is not None:
                return acquired
        return None

    def _fetch(self, index: int, slot: Slot) -> Fetched | None:
        while self.may_acquire:
            try:
                fetched = self.client.run(self.fetch_call(index, slot))
            except BrokerError as exc:
                if not self._queue_backoff.concerns_queue(exc):
                    raise
                if not self.fail_malformed(index, slot, exc):
                    self.round_robin.refused(index, self._queue_backoff.record_failure(index, exc))
                    return None
            else:
                self._queue_backoff.reset(index)
                return fetched
        return None

    def _release_unseen(self) -> None:
        """Put back what calls with a lost reply have taken: nobody knows more of these jobs than their token."""
        if not self._uncertain:
            return
        tokens = [slot.token for slot in self._uncertain]
        for index, keys in enumerate(self.round_robin.queues):
            with self._queue_backoff.recording(index):  # what a broken queue has of ours is left to the stalled check
                for token, job_id in self.client.run(find_by_token(keys, tokens)):
                    with suppress(JobError):  # settled or taken over in between: it is no longer ours to give back
                        self.client.run(move_from_active_to_wait(keys, job_id, token))
        self._uncertain.clear()

    def _wait(self) -> None:
        waitable = self.round_robin.waitable()
        if mono_ms() >= self._look_at_ms:
            self._look_for_maxima()
        wait_ms = self.round_robin.wait_ms(self._longest_ms)
        if not waitable:
            self._wakeup_pipe.wait(wait_ms)
            self.round_robin.open_all()
            return
        markers = [self.round_robin.queues[index].marker for index in waitable]
        try:
            self._waiting = True
            if not self.may_acquire:
                return
            call = command("BZPOPMIN", *markers, f"{wait_ms / 1000:.3f}", parse_reply=_read_marker)
            popped = self._waiter.wait(call, wait_ms, lambda: self.client.run(command("PING")))
        finally:
            self._waiting = False
        if popped is None:
            # Nothing was announced, and yet asking is due: it alone promotes delayed jobs, and heals a lost marker.
            self.round_robin.open_all()
        else:
            self.round_robin.marked(self._queues[popped[0]], popped[1])

    def _look_for_maxima(self) -> None:
        """A fetch does not say whether it found no job or was refused for the queue's global maximum."""
        asked = self.client.try_many([command("HGET", keys.meta, "concurrency") for keys in self.round_robin.queues])
        drain_ms = self._config.drain_delay_ms
        self._longest_ms = min(drain_ms, _MAXIMUM_MS) if any(isinstance(most, bytes) for most in asked) else drain_ms
        self._look_at_ms = mono_ms() + _LOOK_MS

    def _restore_markers(self) -> None:
        """A wait was cut off: the marker may have been handed to this child, and another worker should hear of it."""
        with suppress(BrokerError):  # others look again within drain_delay
            self.client.run_many([command("ZADD", keys.marker, 0, "0") for keys in self.round_robin.queues])


def _read_marker(reply: Any) -> tuple[bytes, float] | None:
    return None if reply is None else (reply[0], float(text(reply[2])))
