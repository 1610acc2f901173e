"""The interface to an outbox's table, implemented for each database library."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["TABLE", "Backlog", "Row", "Store", "TransferOutcome"]

TABLE: Final = "bulltask_outbox"


@dataclass(frozen=True, slots=True)
class Row:
    """A row that is waiting to be sent.

    Attributes:
        id: The row's key. The database never uses it for another row.
        payload: The stored form of a call.
    """

    id: int
    payload: str


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """The outcome of sending rows.

    Attributes:
        done: Keys of the rows whose jobs Redis has stored. These rows are deleted.
        failed: The errors of the rows that can never be sent, by key. These rows are kept, with their errors.
    """

    done: Sequence[int]
    failed: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Backlog:
    """How many rows an outbox has.

    Attributes:
        waiting: The number of committed rows that are waiting to be sent.
        oldest_s: The age of the oldest of these rows in seconds, 0 if there are none.
        failed: The number of rows that can never be sent. The column ``error`` contains the reason.
    """

    waiting: int
    oldest_s: float
    failed: int


class Store(Protocol):
    """The rows of one outbox. Methods raise the errors of the database library."""

    def send_waiting(self, limit: int, send: Callable[[Sequence[Row]], TransferOutcome]) -> TransferOutcome:
        """Read waiting rows in the order of their keys, send them, and delete them.

        If ``send`` raises, or the process is killed, the rows remain and are sent again. On PostgreSQL, the rows are
        locked while they are sent, and other relays skip them. On other databases, no transaction is open while they
        are sent; another relay may send the same rows, but this adds no job twice.

        Args:
            limit: Maximum number of rows.
            send: Sends rows.
        """
        ...

    def backlog(self, now_ms: int) -> Backlog:
        """Count the rows; ``now_ms`` is this machine's time."""
        ...

    def after_fork(self) -> None:
        """Drop the connections that this process has inherited, without closing them for its parent."""
        ...

    def close(self) -> None:
        """Close the connections of the current thread; the next call opens others."""
        ...
