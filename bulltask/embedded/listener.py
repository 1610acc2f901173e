"""Finds out which program listens on a port, for the error message when the port is in use."""

from __future__ import annotations

import os
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bulltask.embedded.probe import server_info

__all__ = ["Listener", "find_listener"]

_LISTEN = "0A"  # linux/net/tcp_states.h


@dataclass(frozen=True)
class Listener:
    """The program that listens on a port.

    Attributes:
        text: Description, such as ``Redis 7.0.15, process 812 (/usr/bin/redis-server)`` or ``process 4711 (nginx)``.
        is_server: True for a Redis or Valkey server that requires no password.
    """

    text: str
    is_server: bool


def find_listener(port: int) -> Listener:
    """Return the program that listens on a local port, with the details that this user may see."""
    with suppress(OSError):
        info = server_info(port)
        if "redis_version" in info:
            version = info.get("valkey_version") or info["redis_version"]
            flavor = info.get("server_name", "redis").capitalize()
            return Listener(f"{flavor} {version}, process {info.get('process_id')} ({info.get('executable')})", True)
    inodes = {f"socket:[{inode}]" for table in ("tcp", "tcp6") for inode in _listening(table, port)}
    pid = _owner(inodes) if inodes else None
    return Listener(f"process {pid} ({_command(pid)})" if pid else "another program", False)


def _listening(table: str, port: int) -> list[str]:
    try:
        rows = [line.split() for line in Path("/proc/net", table).read_text().splitlines()[1:]]
    except OSError:
        return []
    return [row[9] for row in rows if row[3] == _LISTEN and int(row[1].rpartition(":")[2], 16) == port]


def _owner(links: set[str]) -> int | None:
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # another user's process, or gone
            for fd in (process / "fd").iterdir():
                if os.readlink(fd) in links:  # noqa: PTH115 # a Path would make the link's text a path
                    return int(process.name)
    return None


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return "gone"
