"""Serves ``/metrics`` from a forked process, so that a slow scrape never holds up the supervisor.

Imported only when metrics are on: it loads ``prometheus_client``.
"""

from __future__ import annotations

import os
import signal
import socket
import socketserver
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.registry import Collector

from bulltask.errors import ConfigError
from bulltask.process import die_with_parent

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["bind", "run_exporter"]

CLIENT_PATIENCE_S = 10
BACKLOG = 16
# What a terminal sends to all of its processes, and the supervisor's own commands: only the supervisor acts on them.
NOT_FOR_US = (
    signal.SIGINT,
    signal.SIGQUIT,
    signal.SIGHUP,
    signal.SIGTSTP,
    signal.SIGTTIN,
    signal.SIGTTOU,
    signal.SIGUSR1,
    signal.SIGUSR2,
    signal.SIGPIPE,
)


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens; done in the supervisor before the fork, so that a wrong port stops the start.

    Args:
        host: an address of this machine; ``""`` means all of them, IPv4.
        port: 0 lets the system choose (``getsockname()`` tells).

    Raises:
        ConfigError: the port is taken, not allowed, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # A restarted worker finds its port in TIME_WAIT; a port that somebody listens on is refused all the same.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as exc:
        listener.close()
        why = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        raise ConfigError(
            f"metrics cannot be served on {host or 'any address'}, port {port}: {why}. Choose another metrics port "
            "(each worker of a machine needs its own), or 0 for any"
        ) from exc
    return listener


def run_exporter(listener: socket.socket, collector: Collector, parent_pid: int) -> None:
    """Serve ``/metrics`` until SIGTERM or the parent's death; the body of the forked process, it does not return.

    Args:
        listener: from `bind`. The parent closes its own after the fork.
        collector: what is served, a `MetricsCollector`; connections it needs are opened after the fork.
        parent_pid: ``os.getpid()`` of the supervisor, taken before the fork.
    """
    _own_signals()
    die_with_parent(signal.SIGKILL, parent_pid)
    registry = CollectorRegistry()
    registry.register(collector)
    with _Server(listener, _with_head(_only_metrics(make_wsgi_app(registry)))) as server:
        server.serve_forever()


def _own_signals() -> None:
    """Drop what the supervisor set up: its wake-up pipe would tell it of signals that were sent to this process."""
    signal.set_wakeup_fd(-1)
    for number in NOT_FOR_US:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # At once and without clean-up: a scrape in another thread may be waiting for Redis.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _only_metrics(app: WSGIApplication) -> WSGIApplication:
    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["PATH_INFO"] in {"/", "/metrics"}:
            return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"Only /metrics is here.\n"]

    return serve


def _with_head(app: WSGIApplication) -> WSGIApplication:
    """Return ``app`` that answers HEAD as it answers GET, without the body; ``prometheus_client`` knows no HEAD."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if environ["REQUEST_METHOD"] != "HEAD":
            return app(environ, start_response)

        started: list[tuple[str, list[tuple[str, str]]]] = []
        written: list[bytes] = []

        def start(status: str, headers: list[tuple[str, str]], *_: object) -> Callable[[bytes], object]:
            started.append((status, headers))
            return written.append

        written.extend(app({**environ, "REQUEST_METHOD": "GET"}, start))
        [(status, headers)] = started
        start_response(status, [*headers, ("Content-Length", str(sum(map(len, written))))])
        return []

    return serve


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    """An HTTP server on a socket that is open already; one thread per scrape, so a client that hangs holds up none."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: WSGIApplication) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        host, port = listener.getsockname()[:2]
        # What WSGIServer.server_bind would have set, without its look-up of this machine's name, which may hang.
        self.server_name, self.server_port = host, port
        self.setup_environ()
        self.set_app(app)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that hung up in the middle is no news."""


class _Handler(WSGIRequestHandler):
    timeout = CLIENT_PATIENCE_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Say nothing: a line for every scrape would drown the worker's log."""
