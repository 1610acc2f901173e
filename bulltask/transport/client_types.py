"""The clients that other modules use: of a single server or of a cluster, sync or asyncio."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol, TypeVar

from bulltask.errors import BulltaskError
from bulltask.transport.call import Call

__all__ = ["AnyAsyncClient", "SyncClient"]

R = TypeVar("R")
T = TypeVar("T")


class SyncClient(Protocol):
    """:class:`~bulltask.transport.client.Client` or :class:`~bulltask.transport.cluster.ClusterClient`.

    The latter sends every call to the node that has its keys. An error of one node affects only the calls to that node.
    """

    @property
    def safe_url(self) -> str:
        """The server's URL without its password."""

    def set_deadline(self, deadline_ms: int | None) -> None:
        """Limit all calls, and connecting, to ``deadline_ms`` (``mono_ms``); ``None``: the endpoint's timeouts."""

    def connect(self) -> None:
        """Connect now instead of on the first call, which sets the clock; raises the errors of :meth:`run`."""

    def run(self, call: Call[R]) -> R:
        """Make one call.

        Raises:
            BrokerError: The server could not be reached or returned an error reply. After ``BrokerUnavailableError`` it
                is unknown whether the call was executed.
            JobError: The script returned an error code.
        """

    def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip (to each node), and return their results in order.

        Args:
            calls: The calls. If it is an iterator, a single server executes the first calls while it builds the next.

        Raises:
            BrokerError, JobError: As in :meth:`run`, for the first call that failed; the others were made, too, unless
                their node is unreachable.
        """

    def run_on_all_nodes(self, call: Call[R]) -> list[R]:
        """Make a call without keys on every server that has keys, and return all results.

        Raises:
            BrokerError: As in :meth:`run`, if it failed on any server.
        """

    def try_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes] | None = None) -> list[Any]:
        """Make independent calls; the result of a failed call is its error.

        Args:
            calls: The calls.
            packed: Their bytes, if they are packed already (:meth:`pack`).

        Raises:
            BrokerUnavailableError: The connection broke; it is unknown which calls were executed. In a cluster, only if
                no node replies: otherwise, it is the result of the calls for the node, whose name it contains.
        """

    def start_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes]) -> Callable[[], list[Any]]:
        """Send independent calls, without waiting for their replies if possible; arguments as in :meth:`try_many`.

        Other calls may be made meanwhile: they read these replies first.

        Returns:
            A function that waits for the replies and returns the results, or raises, as :meth:`try_many` does.

        Raises:
            BrokerUnavailableError: As in :meth:`try_many`.
        """

    def pack(self, call: Call[Any]) -> bytes:
        """Return the bytes that :meth:`send_packed` sends for a call."""

    def send_packed(self, packed: Sequence[bytes]) -> list[Any]:
        """Make calls that another process has packed, in one round trip; return the raw replies, or errors.

        Raises:
            BrokerUnavailableError: As in :meth:`try_many`.
        """

    def wait(self, call: Call[R], wait_ms: int, ping: Callable[[], object]) -> R:
        """Make a call that blocks for up to ``wait_ms``, to the millisecond.

        Redis checks the timeouts of blocked clients only ten times a second, and whenever it receives a command.

        Args:
            call: The blocking command, with the timeout ``wait_ms``.
            wait_ms: Maximum wait.
            ping: Sends a command to the same server on another connection, so that Redis checks the timeouts of blocked
                clients.

        Raises:
            BrokerError: As in :meth:`run`.
        """

    def wait_then(
        self, call: Call[R], then: Call[T], wait_ms: int, ping: Callable[[], object]
    ) -> tuple[R, T | BulltaskError]:
        """Make a call that blocks, as :meth:`wait` does, and one after it, which Redis runs as soon as the first ends.

        Both replies arrive together, so this process wakes up once. If the second call fails, its result is the error.
        The keys of both calls are in the same slot.
        """

    def dry_run(self, calls: Sequence[Call[Any]]) -> list[Any] | None:
        """Queue calls in a transaction and discard it; the replies show which calls Redis would reject.

        Returns ``None`` if the server rejects transactions. Raises the errors of :meth:`run` if the connection breaks.
        """

    def close(self) -> None:
        """Close all connections. A later call opens new ones."""

    def close_if_dead(self) -> None:
        """Close connections that the server has closed (a restart, an idle timeout); the next call opens new ones."""

    def interrupt(self) -> None:
        """Abort the call that another thread is waiting for; it raises ``BrokerUnavailableError`` immediately."""


class AnyAsyncClient(Protocol):
    """:class:`~bulltask.transport.async_client.AsyncClient`, or that of a cluster; any number of tasks share it."""

    async def run(self, call: Call[R]) -> R:
        """Make one call; raises the same errors as :meth:`SyncClient.run`."""

    async def run_many(self, calls: Sequence[Call[Any]], deadline_ms: int | None = None) -> list[Any]:
        """Make several calls in one round trip (to each node); raises the same errors as :meth:`SyncClient.run_many`.

        Args:
            calls: The calls.
            deadline_ms: Deadline (``mono_ms``), in addition to the endpoint's timeouts.
        """

    async def connect(self, deadline_ms: int | None = None) -> None:
        """Connect now instead of on the first call; ``deadline_ms`` as in :meth:`run_many`."""

    async def close(self) -> None:
        """Close the connections. Calls that are waiting fail with ``BrokerUnavailableError``."""
