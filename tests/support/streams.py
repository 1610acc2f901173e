"""Wait for entries in Redis streams: a queue's events, and the journal that a test's tasks write."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import redis

from tests.support.server_clients import client_of

__all__ = ["ROUND_TRIP_MS", "Entry", "Stream", "server_ms"]

ROUND_TRIP_MS = 50
"""The server's time is known only to within half a round trip, and the machine may be busy."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a stream.

    Attributes:
        ms: The time at which the entry was written, in epoch milliseconds, by the server's clock.
        fields: The entry's fields.
    """

    ms: int
    fields: dict[str, str]

    def __getitem__(self, name: str) -> str:
        """Return a field by its name."""
        return self.fields[name]


class Stream:
    """Reads one stream from its beginning, and keeps all entries that it has read.

    Args:
        url: The URL of the server.
        key: The key of the stream.
    """

    def __init__(self, url: str, key: str) -> None:
        # No socket timeout: redis-py's default would end a long wait.
        self._client = client_of(url, decode_responses=True, protocol=2, socket_timeout=None)
        self._key, self._last = key, "0-0"
        self.seen: list[Entry] = []

    def all(self, **fields: str) -> list[Entry]:
        """Return the entries with these field values so far."""
        self._read(None)
        return self._matching(fields)

    def wait_for(self, count: int = 1, timeout: float = 60.0, **fields: str) -> list[Entry]:
        """Wait until ``count`` entries with these field values were written; return the first ``count`` of them.

        Raises:
            TimeoutError: They were not written in time; the message contains the last entries.
        """
        deadline = time.monotonic() + timeout
        while len(found := self._matching(fields)) < count:
            left_ms = int((deadline - time.monotonic()) * 1000)
            if left_ms <= 0:
                recent = "\n".join(f"  {entry.ms} {entry.fields}" for entry in self.seen[-30:])
                raise TimeoutError(
                    f"{self._key}: {len(found)} of {count} entries with {fields} in {timeout:g} s; the last:\n{recent}"
                )
            self._read(left_ms)
        return found[:count]

    def close(self) -> None:
        """Close the connection."""
        self._client.close()

    def _matching(self, fields: dict[str, str]) -> list[Entry]:
        return [entry for entry in self.seen if fields.items() <= entry.fields.items()]

    def _read(self, block_ms: int | None) -> None:
        reply: Any = self._client.xread({self._key: self._last}, block=block_ms)
        for _, entries in reply or ():
            for entry_id, values in entries:
                self._last = entry_id
                self.seen.append(Entry(int(entry_id.partition("-")[0]), values))


def server_ms(client: redis.Redis) -> int:
    """Return the server's time in epoch milliseconds, comparable with the ``ms`` of entries."""
    seconds, micros = client.time()
    return int(seconds) * 1000 + int(micros) // 1000
