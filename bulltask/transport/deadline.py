"""A time by which a whole reply must be here: redis-py's timeout starts anew with each piece of it."""

from __future__ import annotations

from typing import Any

from redis._parsers import _HiredisParser
from redis.exceptions import TimeoutError as RedisTimeout

from bulltask.clock import mono_ms

__all__ = ["DeadlineParser", "set_deadline"]

_SLACK_S = 0.01  # changing a socket's timeout costs a system call


class DeadlineParser(_HiredisParser):
    """redis-py's parser, which stops reading at ``ends_ms`` (``mono_ms``) even while bytes keep dripping in."""

    ends_ms: int | None = None

    def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:
        """Read the next piece of a reply.

        Raises:
            RedisTimeout: the deadline has passed.
        """
        if self.ends_ms is not None and self._sock is not None:
            left_s = (self.ends_ms - mono_ms()) / 1000
            if left_s <= 0:
                raise RedisTimeout("the reply was not complete in time")
            if (now_s := self._sock.gettimeout()) is None or now_s > left_s + _SLACK_S:
                self._sock.settimeout(left_s)
        return super().read_from_socket(*args, **kwargs)  # type: ignore[no-untyped-call]


def set_deadline(connection: Any, ends_ms: int) -> None:
    """Allow what is sent and read next until ``ends_ms`` (``mono_ms``); on a new connection, its handshake."""
    connection._parser.ends_ms = ends_ms  # noqa: SLF001 - redis-py has no public name for either
    if (sock := connection._sock) is None:  # noqa: SLF001
        return
    left_s = max(1, ends_ms - mono_ms()) / 1000
    if (now_s := sock.gettimeout()) is None or abs(now_s - left_s) > _SLACK_S:
        sock.settimeout(left_s)
