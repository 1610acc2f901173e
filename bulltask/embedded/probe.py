"""Sends single commands to a local server over a socket, without a Redis client."""

from __future__ import annotations

import socket
from typing import BinaryIO

__all__ = ["HOST", "send_command", "server_info"]

HOST = "127.0.0.1"


def send_command(port: int, *args: str, password: str | None = None, timeout: float = 1.0) -> str:
    """Send one command to 127.0.0.1 and return its reply as text.

    Args:
        port: The server's TCP port.
        args: The command and its arguments.
        password: Sent with ``AUTH`` before the command.
        timeout: Seconds for connecting and for each read.

    Returns:
        A simple reply or an error with its first character (``+PONG``, ``-LOADING …``), a bulk reply without it.

    Raises:
        OSError: No reply, a timeout, or a reply that is not in Redis' protocol.
    """
    with socket.create_connection((HOST, port), timeout) as connection, connection.makefile("rb") as replies:
        if password is not None:
            connection.sendall(_encode("AUTH", password))
            _read(replies)  # with a wrong password, the reply to the command is an error
        connection.sendall(_encode(*args))
        return _read(replies)


def server_info(port: int, *, password: str | None = None, timeout: float = 1.0) -> dict[str, str]:
    """Return the fields of ``INFO server``; empty if the server returns an error.

    Raises:
        OSError: No reply, a timeout, or a reply that is not in Redis' protocol.
    """
    text = send_command(port, "INFO", "server", password=password, timeout=timeout)
    pairs = (line.partition(":") for line in text.splitlines() if ":" in line and not line.startswith(("#", "-")))
    return {name: value for name, _, value in pairs}


def _encode(*args: str) -> bytes:
    raw = [arg.encode() for arg in args]
    return b"*%d\r\n" % len(raw) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in raw)


def _read(replies: BinaryIO) -> str:
    head = replies.readline(65536)
    if head.startswith((b"+", b"-")) and head.endswith(b"\r\n"):
        return head[:-2].decode(errors="replace")
    if head.startswith(b"$") and head[1:-2].isdigit():
        length = int(head[1:-2])
        return replies.read(length + 2)[:length].decode(errors="replace")
    raise ConnectionError(f"not a Redis server: it replied {head[:40]!r}")
