"""A connection to Redis without a client library, which would reconnect and retry automatically."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Self

from tests.support.flaky_proxy import Frames

SILENCE = 0.3  # seconds without a byte until `receives_nothing` returns


def request(*args: str) -> bytes:
    texts = [arg.encode() for arg in args]
    return b"*%d\r\n" % len(texts) + b"".join(b"$%d\r\n%s\r\n" % (len(text), text) for text in texts)


class RawConnection:
    """A TCP connection to Redis."""

    def __init__(self, port: int, timeout: float = 10) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout)
        self.frames, self.replies = Frames(), list[bytes]()

    def send(self, *args: str) -> None:
        self.socket.sendall(request(*args))

    def receive(self) -> bytes:
        while not self.replies:
            data = self.socket.recv(65_536)
            if not data:
                raise EOFError
            self.replies += self.frames.feed(data)
        return self.replies.pop(0)

    def ask(self, *args: str) -> bytes:
        self.send(*args)
        return self.receive()

    def receives_nothing(self) -> bool:
        self.socket.settimeout(SILENCE)
        try:
            return not self.socket.recv(1)
        except TimeoutError:
            return True
        finally:
            self.socket.settimeout(10)

    def is_reset(self) -> bool:
        try:
            self.socket.recv(1)
        except ConnectionResetError:
            return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()


Connect = Callable[[], RawConnection]
