"""A fake clock that tests can advance: delayed jobs become due without waiting."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any, Final

from bulltask.clock import Duration, ServerClock, to_ms, wall_ms
from bulltask.transport.call import Call, command
from bulltask.transport.client_pool import ClientPool
from bulltask.transport.client_types import SyncClient
from bulltask.transport.replies import text
from bulltask.transport.scan import scan_all

__all__ = ["FakeClock"]

_LOCK: Final = ":lock"
_PAGE_SIZE: Final = 1_000


class FakeClock(ServerClock):
    """An app's clock in a test: this machine's time, plus the durations passed to :meth:`advance`.

    Delays, retries, schedules and ``expires`` follow this clock, because BullMQ's scripts receive the current time as
    an argument. The clock also follows libraries that replace Python's clock, such as time-machine and freezegun.

    Rate limits and deduplication end when keys in Redis expire. Therefore, :meth:`advance` makes these keys expire
    earlier. It does not change the locks of running jobs.
    """

    def __init__(self) -> None:
        super().__init__()
        self._ahead_ms = 0
        self._pool: ClientPool | None = None

    def connect(self, pool: ClientPool) -> None:
        """Make the keys in this server expire with the clock."""
        self._pool = pool

    @property
    def due(self) -> bool:
        """False, because the clock does not follow the server."""
        return False

    def now_ms(self) -> int:
        """Return the time in epoch milliseconds."""
        return wall_ms() + self._ahead_ms

    def now(self) -> datetime:
        """Return the time as an aware ``datetime`` in UTC, for example for ``eta=clock.now() + timedelta(hours=1)``."""
        return datetime.fromtimestamp(self.now_ms() / 1000, UTC)

    def advance(self, duration: Duration) -> None:
        """Move the clock forward. This runs no jobs.

        Args:
            duration: Seconds or ``timedelta``.

        Raises:
            ConfigError: ``duration`` is invalid or negative.
        """
        self.advance_ms(to_ms(duration, "duration"))

    def advance_ms(self, ms: int) -> None:
        """Like :meth:`advance`, in milliseconds."""
        self._ahead_ms += ms
        if self._pool is not None and ms > 0:
            with self._pool.client() as client:
                _expire_earlier(client, ms)


def _expire_earlier(client: SyncClient, ms: int) -> None:
    keys = sorted(key for key in scan_all(client, _scan) if not key.endswith(_LOCK))
    for start in range(0, len(keys), _PAGE_SIZE):
        page = keys[start : start + _PAGE_SIZE]
        left = client.run_many([command("PTTL", key) for key in page])
        client.run_many([command("PEXPIRE", key, ttl - ms) for key, ttl in zip(page, left, strict=True) if ttl > 0])


def _scan(cursor: str) -> Call[tuple[str, list[str]]]:
    def parse_reply(reply: Any) -> tuple[str, list[str]]:
        return text(reply[0]), [text(key) for key in reply[1]]

    return command("SCAN", cursor, "COUNT", _PAGE_SIZE, "TYPE", "string", parse_reply=parse_reply)
