"""Makes the worker visible to Node's ``getWorkers()`` and to dashboards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerOutOfMemoryError
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.worker.broker_backoff import ReconnectBackoff

__all__ = ["SUPERVISOR_TIMEOUT_MS", "NamedConnections"]

_MAX_CONNECTIONS: Final = 64
_SHARE_OF_CLIENTS: Final = 16

SUPERVISOR_TIMEOUT_MS: Final = 3_000
"""Timeout of each of the supervisor's calls, during which it handles neither signals nor dead children."""


class NamedConnections:
    """Keeps one named connection per queue open, and detects when Redis is unavailable or available again.

    BullMQ identifies a queue's workers by the names of connections (``CLIENT SETNAME``), and a connection has one name.
    Of a worker with many queues, only the first ones have a connection, because the server's other clients need theirs.

    During an outage ``PING`` does not suffice, because a Redis that is read-only or out of memory still replies to it.

    Args:
        connect: Creates a client whose connection has the given name.
        broker: The keys of the queues.
        queues: The names of the worker's queues in the app.
        worker_id: Shown by dashboards as the worker's name.
        backoff: The supervisor's backoff.
    """

    interval_ms = 1_000

    def __init__(
        self,
        connect: Callable[[str], SyncClient],
        broker: Broker,
        queues: Sequence[str],
        worker_id: str,
        backoff: ReconnectBackoff,
    ) -> None:
        self._queue_count, queues = len(queues), queues[:_MAX_CONNECTIONS]
        self._clients = [connect(broker.keys(queue).client_name(worker_id)) for queue in queues]
        self._backoff = backoff
        # In a cluster, a command with a key, so that only the node that has the queue shows the connection.
        self._pings: list[Call[object]] = [
            command("PING") if broker.topology is None else command("EXISTS", broker.keys(queue).probe)
            for queue in queues
        ]
        self._write_probe: Call[object] = command("SET", broker.keys(queues[0]).probe, "", "XX")

    def limit(self, max_clients: int | None) -> int:
        """Limit the number of connections before they are opened; return how many queues have none.

        Args:
            max_clients: How many clients the server allows, if known.
        """
        if max_clients is not None:
            share = max(1, max_clients // _SHARE_OF_CLIENTS)
            del self._clients[share:], self._pings[share:]
        return self._queue_count - len(self._clients)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Keep the connections open."""
        try:
            for client, ping in zip(self._clients, self._pings, strict=True):
                try:
                    client.run(ping)
                except BrokerError as exc:
                    if exc.node is None:
                        raise  # otherwise, the other nodes of the cluster may be available
        except BrokerError as exc:
            self._backoff.record_failure(exc)
        else:
            if not self._backoff.is_active or self._accepts_writes():
                self._backoff.reset()

    def _accepts_writes(self) -> bool:
        """Whether Redis accepts writes: ``SET … XX`` on a key that does not exist changes nothing."""
        try:
            self._clients[0].run(self._write_probe)
        except (BrokerNotReadyError, BrokerOutOfMemoryError):
            return False
        except BrokerError:
            return True  # another error, unrelated to writes
        return True

    def close(self) -> None:
        """Close the connections."""
        for client in self._clients:
            client.close()
