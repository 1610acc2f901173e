"""Replies that are read later than their calls are sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bulltask.errors import BrokerUnavailableError

__all__ = ["UnreadReplies"]


class UnreadReplies:
    """The replies to calls that a client has sent without waiting for them.

    The client reads them before it makes another call, and keeps them here until somebody asks for them.

    Args:
        count: How many replies there are.
        receive: Reads that many replies from the connection.
    """

    def __init__(self, count: int, receive: Callable[[int], list[Any]]) -> None:
        self._count, self._receive = count, receive
        self._replies: list[Any] | None = None
        self._error: BrokerUnavailableError | None = None

    def read(self) -> None:
        """Read the replies now, unless they have been read or the connection was closed; keep an error, too."""
        if self._replies is None and self._error is None:
            self._error = BrokerUnavailableError("the replies were not read, because the process was interrupted")
            try:
                self._replies = self._receive(self._count)
            except BrokerUnavailableError as exc:
                self._error = exc

    def abandon(self, reason: str) -> None:
        """Record that the connection was closed before the replies were read."""
        if self._replies is None and self._error is None:
            self._error = BrokerUnavailableError(reason)

    def get(self) -> list[Any]:
        """Return the replies.

        Raises:
            BrokerUnavailableError: They could not be read; it is unknown which calls were executed.
        """
        self.read()
        if self._replies is None:
            assert self._error is not None
            raise self._error
        return self._replies
