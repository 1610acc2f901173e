"""Being seen by Node's ``getWorkers()`` and the boards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerOutOfMemoryError
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.worker.broker_backoff import ReconnectBackoff

__all__ = ["SUPERVISOR_TIMEOUT_MS", "Presence"]

SUPERVISOR_TIMEOUT_MS: Final = 3_000
"""No call of the supervisor takes longer: signals and dead children wait meanwhile."""


class Presence:
    """Responsible for one connection per queue that carries the worker's name, and for noticing that Redis is away.

    While there is an outage a ``PING`` is not enough: a Redis that is read-only or full answers it.

    BullMQ recognises a worker by the name of a connection (PROTOCOL 4.2), and a connection has one name.

    Args:
        broker: makes the connections.
        queues: the worker's queues as the user spells them.
        worker_id: shown as the worker's name.
        backoff: the supervisor's view of an outage.
    """

    interval_ms = 1_000

    def __init__(self, broker: Broker, queues: Sequence[str], worker_id: str, backoff: ReconnectBackoff) -> None:
        self._clients: list[Client] = [
            broker.client(broker.keys(queue).client_name(worker_id), timeout_ms=SUPERVISOR_TIMEOUT_MS)
            for queue in queues
        ]
        self._backoff = backoff
        self._no_write: Call[object] = command("SET", broker.keys(queues[0]).probe, "", "XX")

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Keep the connections alive."""
        try:
            for client in self._clients:
                client.run(command("PING"))
        except BrokerError as exc:
            self._backoff.record_failure(exc)
        else:
            if not self._backoff.is_active or self._takes_writes():
                self._backoff.reset()

    def _takes_writes(self) -> bool:
        """Whether a Redis that answers a ``PING`` would also change something, if there were anything to change."""
        try:
            self._clients[0].run(self._no_write)
        except (BrokerNotReadyError, BrokerOutOfMemoryError):
            return False
        except BrokerError:
            return True  # that is no answer to this question
        return True

    def close(self) -> None:
        """Disappear."""
        for client in self._clients:
            client.close()
