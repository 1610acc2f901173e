"""Adds a flow once, even if it is sent again after its jobs have run and been removed."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from bulltask.errors import BulltaskError
from bulltask.jobs.flow import PlannedJob
from bulltask.queue.flow_send import FlowSender, ServerFacts
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, command
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.flow import key_exists

__all__ = ["add_flow_once"]


def add_flow_once(roots: Sequence[PlannedJob], broker: Broker, write_id: str, ttl_ms: int) -> Operation[bool]:
    """Return the operation that adds a flow unless the same write has already added it.

    The operation returns whether it added the flow. A key in Redis marks the write. The connection watches this key,
    and the transaction that adds the jobs sets it, so only one of two senders can add them. After any error, the
    operation can be run again.

    Args:
        roots: The trees of jobs.
        broker: Keys, clock and settings.
        write_id: Identifies the write; never used for another flow.
        ttl_ms: How long the key is kept, in milliseconds.

    Raises:
        BrokerNotReadyError: Another sender has changed the key.
        BulltaskError: As for ``FlowProducer.add``.
    """
    marker = broker.keys(roots[0].job.queue).added_ids(write_id)
    _, was_added = yield [command("WATCH", marker), key_exists(marker)]
    try:
        if not was_added:
            also: list[Call[Any]] = [command("SET", marker, 1, "PX", ttl_ms)]
            yield from FlowSender(roots, broker, ServerFacts(), also).try_once()
    except BulltaskError:
        yield from _unwatch()
        raise
    yield from _unwatch()
    return not was_added


def _unwatch() -> Operation[None]:
    """Stop watching the key; otherwise, it could abort a transaction of the connection's next user."""
    with suppress(BulltaskError):  # if the connection is broken, the server has stopped watching
        yield from execute(command("UNWATCH"))
