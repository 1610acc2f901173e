"""Asks the sentinels whether they have promoted another primary."""

from __future__ import annotations

from bulltask.transport import discovery
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.known_primary import KnownPrimary
from bulltask.worker.control_page import ControlPage

__all__ = ["PrimaryCheck"]


class PrimaryCheck:
    """Ends the worker's use of a primary that was replaced, even if it still replies.

    In a network partition, the old primary does not know of the failover and executes calls, but its writes will be
    lost. Every client of the supervisor and of the children compares the epoch at which it connected with this one
    after each reply.

    Args:
        endpoint: The endpoint of the sentinels.
        primary: The endpoint's state, which the supervisor's clients share.
        control: Passes the epoch to the children.
    """

    interval_ms = 1_000

    def __init__(self, endpoint: Endpoint, primary: KnownPrimary, control: ControlPage) -> None:
        self._endpoint = endpoint
        primary.publish(control.set_primary_epoch)
        control.set_primary_epoch(primary.epoch)

    def tick(self, _now_ms: int, _missed: int, /) -> None:
        """Ask one of the sentinels, a different one each time."""
        discovery.check(self._endpoint)
