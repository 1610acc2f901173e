"""What a server says about itself to every user, whatever the ACL forbids, and whether it can be used."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bulltask.clock import ServerClock
from bulltask.transport import faults
from bulltask.transport.call import Call, command
from bulltask.transport.endpoint import Endpoint

__all__ = ["TIME", "UNKNOWN_SERVER", "ServerInfo", "check_server", "handshake_calls", "server_info"]


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """Reply of ``HELLO``.

    Attributes:
        version: Of Redis or Valkey; ``()`` if unknown.
        clustered: The server is a node of a cluster.
        sentinel: It is a Sentinel, not a server.
    """

    version: tuple[int, ...] = ()
    clustered: bool = False
    sentinel: bool = False

    @property
    def may_keep_from_writing(self) -> bool:
        """True if the server has ``EVALSHA_RO``."""
        return self.version >= (7,)


UNKNOWN_SERVER: Final = ServerInfo()
"""Assumed of a server, or of a proxy in front of one, that does not have the command."""


def server_info() -> Call[ServerInfo]:
    """Build the call of ``HELLO``; it changes nothing."""

    return command("HELLO", parse_reply=_parse)


def handshake_calls(clock: ServerClock | None) -> tuple[Call[Any], ...]:
    """Return the calls for a new connection: what the server is, and its time if there is a clock to set."""
    return (_HELLO,) if clock is None else (_HELLO, TIME)


def check_server(reply: Any, endpoint: Endpoint) -> None:
    """Refuse a server that cannot be used, before a call happens to work there.

    Args:
        reply: To ``HELLO``; an error, as of a proxy that does not have the command, is accepted.
        endpoint: Of the server; says whether a node of a cluster is accepted.

    Raises:
        BrokerConfigError: It is a Sentinel, or a node of a cluster and the caller does not route calls.
    """
    info = _parse(reply)
    if info.sentinel:
        raise faults.sentinel_error(endpoint.safe_url)
    if info.clustered and not endpoint.clustered:
        raise faults.cluster_node_error(endpoint.safe_url)


def _parse(reply: Any) -> ServerInfo:
    if not isinstance(reply, list):  # an error, or any reply of a proxy
        return UNKNOWN_SERVER
    info = dict(zip(reply[::2], reply[1::2], strict=False))
    version = info.get(b"version", b"").decode("ascii", "replace")
    numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
    return ServerInfo(numbers, info.get(b"mode") == b"cluster", info.get(b"mode") == b"sentinel")


def _ms(reply: Any) -> float:
    return int(reply[0]) * 1000 + int(reply[1]) / 1000


_HELLO: Final[Call[ServerInfo]] = server_info()
TIME: Final[Call[float]] = command("TIME", parse_reply=_ms)
"""The server's time in milliseconds."""
