"""Reads properties of a server that every user may read, whatever its ACL; checks that the server is usable."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bulltask.clock import ServerClock
from bulltask.transport import redis_errors
from bulltask.transport.call import Call, command
from bulltask.transport.endpoint import Endpoint

__all__ = ["TIME", "UNKNOWN_SERVER", "ServerInfo", "check_server", "handshake_calls", "server_info"]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Reply to ``HELLO``.

    Attributes:
        version: The version of Redis or Valkey; ``()`` if unknown.
        clustered: Whether the server is a node of a cluster.
        sentinel: Whether it is a Sentinel.
        role: ``master`` or ``replica``; ``""`` if unknown.
    """

    version: tuple[int, ...] = ()
    clustered: bool = False
    sentinel: bool = False
    role: str = ""

    @property
    def has_read_only_scripts(self) -> bool:
        """True if the server has ``EVALSHA_RO``."""
        return self.version >= (7,)


UNKNOWN_SERVER: Final = ServerInfo()
"""The properties of a server that does not support ``HELLO``, or is behind a proxy that does not."""


def server_info() -> Call[ServerInfo]:
    """Build the call for ``HELLO``; it changes nothing."""

    return command("HELLO", parse_reply=_parse)


def handshake_calls(clock: ServerClock | None) -> tuple[Call[Any], ...]:
    """Return the calls for a new connection: ``HELLO``, and ``TIME`` if there is a clock to set."""
    return (_HELLO,) if clock is None else (_HELLO, TIME)


def check_server(reply: Any, endpoint: Endpoint) -> None:
    """Check that the server can be used, before the first call.

    Args:
        reply: The reply to ``HELLO``; an error is accepted, because a proxy may not have the command.
        endpoint: The server's endpoint, which says whether the caller routes calls in a cluster, or the endpoint of
            sentinels that reported this server as the primary.

    Raises:
        BrokerNotReadyError: The sentinels' reply is outdated: the server is not a primary.
        BrokerUnavailableError: It is not a reply to ``HELLO``.
        BrokerConfigError: The server is a Sentinel, or a node of a cluster and the caller does not route calls.
    """
    info = redis_errors.parsed(_parse, reply, endpoint.safe_url)
    if info.sentinel:
        raise redis_errors.sentinel_error(endpoint.safe_url)
    if info.clustered and not endpoint.clustered:
        raise redis_errors.cluster_node_error(endpoint.safe_url)
    if endpoint.primary is not None and info.role not in {"", "master"}:
        endpoint.primary.ask_next()
        raise redis_errors.replica_error(endpoint.safe_url, info.role)


def _parse(reply: Any) -> ServerInfo:
    if not isinstance(reply, list):  # an error, or any reply from a proxy
        return UNKNOWN_SERVER
    info = dict(zip(reply[::2], reply[1::2], strict=False))
    version, role = (info.get(name, b"").decode("ascii", "replace") for name in (b"version", b"role"))
    numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
    return ServerInfo(numbers, info.get(b"mode") == b"cluster", info.get(b"mode") == b"sentinel", role)


def _ms(reply: Any) -> float:
    return int(reply[0]) * 1000 + int(reply[1]) / 1000


_HELLO: Final[Call[ServerInfo]] = server_info()
TIME: Final[Call[float]] = command("TIME", parse_reply=_ms)
"""The server's time in milliseconds."""
