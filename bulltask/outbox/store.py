"""Access to an outbox's table; each database library has its implementation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, Protocol

__all__ = ["TABLE", "Backlog", "Row", "Sent", "Store"]

TABLE: Final = "bulltask_outbox"


@dataclass(frozen=True, slots=True)
class Row:
    """A row that waits to be sent.

    Attributes:
        id: Its key; a database never uses it again.
        payload: The stored form of a call.
    """

    id: int
    payload: str


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of rows.

    Attributes:
        done: Keys of the rows with jobs that Redis has stored: they are deleted.
        failed: The errors of rows that can never be sent: they are kept with their error.
    """

    done: Sequence[int]
    failed: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class Backlog:
    """How many rows an outbox has.

    Attributes:
        waiting: The number of committed rows that wait to be sent.
        oldest_s: The age of the oldest of them in seconds, 0 if there is none.
        failed: The number of rows that were set aside with an error.
    """

    waiting: int
    oldest_s: float
    failed: int


class Store(Protocol):
    """The rows of one outbox. Methods raise the errors of the database library."""

    def transfer(self, limit: int, send: Callable[[Sequence[Row]], Sent]) -> Sent:
        """Read waiting rows in the order of their keys, send them, and delete them.

        If ``send`` raises, or the process is killed, the rows stay and are sent again. Relays in other processes do
        not read the same rows at the same time, if the database can lock rows and skip locked ones. Otherwise, the rows
        are sent twice, which adds no job twice, and no transaction is open meanwhile.

        Args:
            limit: Maximum number of rows.
            send: Sends rows.
        """
        ...

    def backlog(self, now_ms: int) -> Backlog:
        """Count the rows; ``now_ms`` is this machine's time."""
        ...

    def after_fork(self) -> None:
        """Drop connections that this process has inherited from its parent, without closing the parent's."""
        ...

    def close(self) -> None:
        """Close the connections of the current thread; the next call opens others."""
        ...
