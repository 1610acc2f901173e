"""What a server says of itself to everybody, whatever the ACL forbids; and whether it is one that can be used."""

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
    """What ``HELLO`` answers.

    Attributes:
        version: of Redis or Valkey; ``()`` where it is not known.
        clustered: the server is a node of a cluster.
        sentinel: it is none, but a Sentinel.
    """

    version: tuple[int, ...] = ()
    clustered: bool = False
    sentinel: bool = False

    @property
    def may_keep_from_writing(self) -> bool:
        """True when it knows ``EVALSHA_RO``."""
        return self.version >= (7,)


UNKNOWN_SERVER: Final = ServerInfo()
"""What is assumed of a server, or of a proxy before one, that does not know the command."""


def server_info() -> Call[ServerInfo]:
    """Ask; nothing changes by it."""

    return command("HELLO", parse_reply=_judge)


def handshake_calls(clock: ServerClock | None) -> tuple[Call[Any], ...]:
    """What is asked on a new connection: what the server is, and what time it has, if there is a clock to set."""
    return (_HELLO,) if clock is None else (_HELLO, TIME)


def check_server(reply: Any, endpoint: Endpoint) -> None:
    """Refuse a server that cannot be used, before anything is sent that happens to work there.

    Args:
        reply: to ``HELLO``; an error says nothing, as of a proxy that does not know the word.
        endpoint: where it is, and whether a node of a cluster will do.

    Raises:
        BrokerConfigError: it is a Sentinel, or a node of a cluster, in which who asks does not find the way.
    """
    said = _judge(reply)
    if said.sentinel:
        raise faults.sentinel_error(endpoint.safe_url)
    if said.clustered and not endpoint.clustered:
        raise faults.cluster_node_error(endpoint.safe_url)


def _judge(reply: Any) -> ServerInfo:
    if not isinstance(reply, list):  # an error, or whatever a proxy says
        return UNKNOWN_SERVER
    said = dict(zip(reply[::2], reply[1::2], strict=False))
    version = said.get(b"version", b"").decode("ascii", "replace")
    numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
    return ServerInfo(numbers, said.get(b"mode") == b"cluster", said.get(b"mode") == b"sentinel")


def _ms(reply: Any) -> float:
    return int(reply[0]) * 1000 + int(reply[1]) / 1000


_HELLO: Final[Call[ServerInfo]] = server_info()
TIME: Final[Call[float]] = command("TIME", parse_reply=_ms)
"""The server's time in milliseconds."""
