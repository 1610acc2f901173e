"""Asks the sentinels whether they have promoted another primary."""

from __future__ import annotations

from contextlib import suppress
from typing import Final

from bulltask.errors import BrokerUnavailableError
from bulltask.transport import discovery
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.known_primary import KnownPrimary
from bulltask.worker.control_page import ControlPage
from bulltask.worker.supervisor.call_limits import CallLimits

__all__ = ["PrimaryCheck"]

_CHECK_MS: Final = 1_000


class PrimaryCheck:
    """Ends the worker's use of a primary that was replaced, even if it still replies.

    During a planned failover and in a network partition, the old primary executes calls, but its writes will be lost.
    Every client of the supervisor and of the children compares what it knew when it connected with what this service
    passes to it, after each reply.

    Args:
        endpoint: The endpoint of the sentinels.
        primary: The endpoint's state, which the supervisor's clients share.
        control: Passes the state to the children.
        limits: Ends the wait for sentinels that hang when the worker must stop.
    """

    interval_ms = 50

    def __init__(self, endpoint: Endpoint, primary: KnownPrimary, control: ControlPage, limits: CallLimits) -> None:
        self._endpoint, self._primary, self._limits = endpoint, primary, limits
        primary.check_ms = _CHECK_MS
        primary.publish(control.set_primary)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Read the events of all sentinels, and ask one of them every second."""
        with suppress(BrokerUnavailableError):
            self._limits.interrupt(lambda: discovery.refresh(self._endpoint))
            self._primary.record_events()
