"""Waits for the marker of an empty queue, and fetches the job in the same wake-up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

from bulltask.clock import mono_ms
from bulltask.errors import BrokerError, BulltaskError, Interrupt
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.cluster_slots import slot_of_key
from bulltask.transport.hash_slot_waits import HashSlotWaits
from bulltask.transport.replies import Fetched, text
from bulltask.worker.child.round_robin import RoundRobin
from bulltask.worker.wakeup_pipe import WakeupPipe

__all__ = ["QueueWait", "WaitInterrupted"]

_CONCURRENCY_POLL_MS: Final = 1_000
"""Polling interval of a queue with global concurrency, because no marker is added when another worker's job ends."""
_CONCURRENCY_CHECK_MS: Final = 5_000
"""Interval at which a child checks whether a queue has global concurrency."""

_Marker = tuple[int, float]
"""The queue's index, and the time from which there may be a job, in milliseconds."""


class WaitInterrupted(Interrupt):
    """A signal ended the wait for a marker."""


class QueueWait:
    """Waits until one of the queues may have a job.

    Args:
        broker: Creates the connection for blocking calls.
        client: The child's client for short calls.
        round_robin: The queues, and when to poll them again.
        wakeup_pipe: Ends the wait early if there is no queue whose marker can be waited for.
        may_acquire: Returns whether the child may acquire jobs; if not, a wait ends immediately.
        record_error: Records that a queue, given by its index, cannot be waited for at the moment; for a cluster.
    """

    def __init__(
        self,
        broker: Broker,
        client: SyncClient,
        round_robin: RoundRobin,
        wakeup_pipe: WakeupPipe,
        may_acquire: Callable[[], bool],
        record_error: Callable[[int, BrokerError], None],
    ) -> None:
        self._client, self._round_robin, self._wakeup_pipe = client, round_robin, wakeup_pipe
        self._may_acquire, self._drain_delay_ms = may_acquire, broker.config.drain_delay_ms
        self._record_error = record_error
        self._blocking_client = broker.blocking_client(self._drain_delay_ms)
        # In a cluster, the command has a key, so that it goes to the node that has the queue.
        is_cluster = broker.topology is not None
        self._ping_call: Call[Any] = command("EXISTS", round_robin.queues[0].probe) if is_cluster else command("PING")
        self._hash_slots = [slot_of_key(keys.base) for keys in round_robin.queues]
        self._hash_slot_waits = broker.hash_slot_waits(self._drain_delay_ms) if len(set(self._hash_slots)) > 1 else None
        self._queues = {keys.marker.encode(): index for index, keys in enumerate(round_robin.queues)}
        self._max_wait_ms, self._check_at_ms = self._drain_delay_ms, 0
        self._concurrent: set[int] = set()
        self._is_waiting = False

    def wait(self, fetch: Call[Fetched] | None = None) -> Fetched | BulltaskError | None:
        """Wait until a queue may have a job, or a delayed job is due.

        Args:
            fetch: A call that Redis runs at the end of the wait, on the same connection.

        Returns:
            The result of ``fetch``, or its error; ``None`` if it was not made.

        Raises:
            WaitInterrupted: A signal has ended the wait. Redis may have run ``fetch``.
            BrokerError: As in :meth:`SyncClient.run`.
        """
        waitable = self._round_robin.waitable()
        if mono_ms() >= self._check_at_ms:
            self._check_global_concurrency()
        wait_ms = self._round_robin.wait_ms(self._max_wait_ms)
        if not waitable:
            self._wakeup_pipe.wait(wait_ms)
            self._round_robin.reopen(self._concurrent)
            return None
        popped, fetched = self._pop_marker(waitable, wait_ms, fetch)
        if popped is None and self._may_acquire():
            # There was no marker, but only a fetch promotes delayed jobs and replaces a lost marker.
            self._round_robin.reopen(self._concurrent)
        return fetched

    def wait_for_marker(self, queues: Sequence[int], wait_ms: int) -> bool:
        """Wait for a marker of these queues; return whether this child has taken one. Raises as :meth:`wait` does."""
        return self._pop_marker(queues, wait_ms, None)[0] is not None

    def interrupt(self) -> None:
        """End a wait if jobs must no longer be acquired; called by a signal handler."""
        if self._is_waiting and not self._may_acquire():
            self._is_waiting = False  # a second signal must not interrupt the handling of the first one
            raise WaitInterrupted

    def close(self) -> None:
        """Close the connections; they are opened again when needed."""
        self._blocking_client.close()
        if self._hash_slot_waits is not None:
            self._hash_slot_waits.close()

    def _pop_marker(
        self, queues: Sequence[int], wait_ms: int, fetch: Call[Fetched] | None
    ) -> tuple[_Marker | None, Fetched | BulltaskError | None]:
        fetched: Fetched | BulltaskError | None = None
        try:
            self._is_waiting = True
            if not self._may_acquire():
                return None, None
            if self._hash_slot_waits is not None:
                popped = self._pop_in_hash_slots(self._hash_slot_waits, queues, wait_ms)
            elif fetch is None:
                popped = self._blocking_client.wait(self._pop_call(queues, wait_ms), wait_ms, self._ping)
            else:
                call = self._pop_call(queues, wait_ms)
                popped, fetched = self._blocking_client.wait_then(call, fetch, wait_ms, self._ping)
        finally:
            self._is_waiting = False
        if popped is not None:
            self._round_robin.record_marker(*popped)
        return popped, fetched

    def _pop_in_hash_slots(self, hash_slot_waits: HashSlotWaits, queues: Sequence[int], wait_ms: int) -> _Marker | None:
        """Pop a marker of queues that are in several slots of a cluster."""
        indexes: dict[int, list[int]] = {}
        for index in queues:
            indexes.setdefault(self._hash_slots[index], []).append(index)
        results = hash_slot_waits.wait({slot: self._pop_call(own, wait_ms) for slot, own in indexes.items()}, wait_ms)
        popped: list[_Marker] = []
        for slot, result in results.items():
            if isinstance(result, BrokerError):
                for index in indexes[slot]:
                    self._record_error(index, result)
            elif result is not None:
                popped.append(result)
        # The child takes one job, so other workers may need the other markers.
        if len(popped) > 1:
            markers = [self._round_robin.queues[index].marker for index, _ in popped[1:]]
            self._client.try_many([command("ZADD", marker, 0, "0") for marker in markers])
        return popped[0] if popped else None

    def _pop_call(self, queues: Sequence[int], wait_ms: int) -> Call[_Marker | None]:
        markers = [self._round_robin.queues[index].marker for index in queues]
        return command("BZPOPMIN", *markers, f"{wait_ms / 1000:.3f}", parse_reply=self._read_marker)

    def _ping(self) -> None:
        self._client.run(self._ping_call)

    def _check_global_concurrency(self) -> None:
        """Check which queues have global concurrency, because a fetch that returns no job does not say why."""
        indexes = {*self._round_robin.polled, *self._concurrent}
        metas = [self._round_robin.queues[index].meta for index in indexes]
        replies = self._client.try_many([command("HGET", meta, "concurrency") for meta in metas])
        self._concurrent = {index for index, limit in zip(indexes, replies, strict=True) if isinstance(limit, bytes)}
        drain_ms = self._drain_delay_ms
        self._max_wait_ms = min(drain_ms, _CONCURRENCY_POLL_MS) if self._concurrent else drain_ms
        self._check_at_ms = mono_ms() + _CONCURRENCY_CHECK_MS

    def _read_marker(self, reply: Any) -> _Marker | None:
        return None if reply is None else (self._queues[reply[0]], float(text(reply[2])))
