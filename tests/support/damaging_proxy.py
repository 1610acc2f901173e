"""A proxy that damages replies from Redis after the commands have run: changed, missing, repeated, in wrong order."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Self

from tests.support.flaky_proxy import Frames

__all__ = ["DamagingProxy"]

Damage = Callable[[list[bytes]], list[bytes]]
CHUNK = 65_536


class DamagingProxy:
    """Forwards commands unchanged, and passes complete replies to ``damage``; `None` forwards them unchanged.

    Args:
        port: The server's port on 127.0.0.1.

    Attributes:
        port: The proxy's port.
        damage: Receives the replies that arrived together on a connection; returns what the client receives.
        damaged: How many times ``damage`` has changed something.
    """

    def __init__(self, port: int) -> None:
        self._upstream, self._listener = port, socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.damage: Damage | None = None
        self.damaged = 0
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._start(self._accept)

    def reset(self) -> None:
        """End all connections."""
        for each in tuple(self._sockets):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """End all connections and threads."""
        self._closed = True
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.reset()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, target: Callable[..., None], *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(("127.0.0.1", self._upstream))
            self._sockets |= {client, server}
            self._start(self._pass, client, server, None)
            self._start(self._pass, server, client, Frames())

    def _pass(self, source: socket.socket, target: socket.socket, frames: Frames | None) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                target.sendall(data if frames is None else b"".join(self._changed(frames.feed(data))))
        for each in (source, target):
            self._sockets.discard(each)
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        if frames is not None:
            source.close()
            target.close()

    def _changed(self, replies: list[bytes]) -> list[bytes]:
        if self.damage is None or not replies:
            return replies
        result = self.damage(list(replies))
        self.damaged += result != replies
        return result
