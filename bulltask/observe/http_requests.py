"""What the HTTP servers check in a request: when it has arrived, and the host that it is for."""

from __future__ import annotations

import contextlib
import socket
import threading
from http.server import BaseHTTPRequestHandler

__all__ = ["LOCAL_HOSTS", "RequestDeadline", "host_of"]

LOCAL_HOSTS = frozenset({"127.0.0.1", "localhost", "[::1]"})
"""Values of the header ``Host``, without a port, of requests to this machine.

DNS rebinding: a web page in a browser on this machine can make its host name resolve to 127.0.0.1.
"""


def host_of(header: str) -> str:
    """Return the header ``Host`` without the port."""
    return header if header.endswith("]") else header.rpartition(":")[0] or header


class RequestDeadline(BaseHTTPRequestHandler):
    """A handler whose ``timeout`` applies to the whole request.

    The base class's applies to each read, so a client that sends a byte every few seconds would keep a thread for ever.
    """

    timeout = 10

    def setup(self) -> None:
        """Start the time."""
        super().setup()
        self._timer = threading.Timer(self.timeout, self._give_up)
        self._timer.daemon = True
        self._timer.start()

    def parse_request(self) -> bool:
        """Read the headers; afterwards, the response may take any time."""
        is_complete = super().parse_request()
        self._timer.cancel()
        return is_complete

    def finish(self) -> None:
        """Stop the timer's thread."""
        self._timer.cancel()
        super().finish()

    def _give_up(self) -> None:
        with contextlib.suppress(OSError):  # the client has closed the connection
            self.connection.shutdown(socket.SHUT_RD)
