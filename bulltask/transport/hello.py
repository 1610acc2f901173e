"""What a server says of itself to everybody, whatever the ACL forbids."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from bulltask.transport.call import Call, command

__all__ = ["SILENT", "Hello", "hello"]


@dataclass(frozen=True, slots=True)
class Hello:
    """What ``HELLO`` answers.

    Attributes:
        version: of Redis or Valkey; ``()`` where it is not known.
        clustered: the server is a node of a cluster.
    """

    version: tuple[int, ...] = ()
    clustered: bool = False

    @property
    def may_keep_from_writing(self) -> bool:
        """True when it knows ``EVALSHA_RO``."""
        return self.version >= (7,)


SILENT: Final = Hello()
"""What is assumed of a server, or of a proxy before one, that does not know the command."""


def hello() -> Call[Hello]:
    """Ask; nothing changes by it."""

    def judge(reply: Any) -> Hello:
        said = {bytes(name): value for name, value in zip(reply[::2], reply[1::2], strict=True)}
        version = said.get(b"version", b"").decode("ascii", "replace")
        numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
        return Hello(numbers, said.get(b"mode") == b"cluster")

    return command("HELLO", judge=judge)
