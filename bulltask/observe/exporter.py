"""Serves ``/metrics`` in a forked process, so that a slow scrape never delays the supervisor.

Imported only if metrics are enabled, because it loads ``prometheus_client``.
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
from bulltask.observe.http_requests import LOCAL_HOSTS, RequestDeadline, host_of
from bulltask.process import die_with_parent

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["bind", "run_exporter"]

CLIENT_TIMEOUT_S = 10
BACKLOG = 16
# Signals that a terminal sends to its process group, or that are commands for the supervisor, which handles them.
IGNORED_SIGNALS = (
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
    """Return a listening socket. Called before the fork, so that an invalid port prevents the worker from starting.

    Args:
        host: An address of this machine; ``""`` for all IPv4 addresses.
        port: 0 lets the system choose one (see ``getsockname()``).

    Raises:
        ConfigError: The port is in use or not allowed, or the address does not belong to this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        # After a restart the port may be in TIME_WAIT. A port that is in use is still rejected.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
    except (OSError, OverflowError) as exc:
        listener.close()
        reason = (exc.strerror if isinstance(exc, OSError) else None) or str(exc)
        raise ConfigError(
            f"metrics cannot be served on {host or 'any address'}, port {port}: {reason}. Choose another metrics port "
            "(each worker on a machine needs a different one), or 0 for any free port"
        ) from exc
    return listener


def run_exporter(listener: socket.socket, collector: Collector, parent_pid: int) -> None:
    """Serve ``/metrics`` until SIGTERM or the parent's death. Runs in the forked process and does not return.

    Args:
        listener: The socket from `bind`. The parent closes its copy after the fork.
        collector: The `MetricsCollector`; it opens its connections after the fork.
        parent_pid: ``os.getpid()`` of the supervisor, read before the fork.
    """
    _reset_signals()
    die_with_parent(signal.SIGKILL, parent_pid)
    registry = CollectorRegistry()
    registry.register(collector)
    is_local = listener.getsockname()[0] in {"127.0.0.1", "::1"}
    with _Server(listener, _with_head(_only_metrics(make_wsgi_app(registry), is_local=is_local))) as server:
        server.serve_forever()


def _reset_signals() -> None:
    """Replace the supervisor's handlers, which would write this process's signals to the supervisor's wakeup pipe."""
    signal.set_wakeup_fd(-1)
    for number in IGNORED_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    # Exit without cleanup, because a scrape in another thread may be waiting for Redis.
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _only_metrics(app: WSGIApplication, *, is_local: bool) -> WSGIApplication:
    """Return an app that serves only the metrics; if it listens on this machine only, only for its own names."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if is_local and host_of(environ.get("HTTP_HOST", "")).lower() not in {"", *LOCAL_HOSTS}:
            start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"Only requests to this machine are allowed.\n"]
        if environ["PATH_INFO"] in {"/", "/metrics"}:
            return app(environ, start_response)
        start_response("404 Not Found", [("Content-Type", "text/plain; charset=utf-8")])
        return [b"Not found; the metrics are at /metrics.\n"]

    return serve


def _with_head(app: WSGIApplication) -> WSGIApplication:
    """Add support for HEAD requests, which ``prometheus_client`` lacks."""

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
    """An HTTP server on an open socket; one thread per scrape, so that a client that hangs does not block others."""

    daemon_threads = True

    def __init__(self, listener: socket.socket, app: WSGIApplication) -> None:
        super().__init__(listener.getsockname()[:2], _Handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listener
        host, port = listener.getsockname()[:2]
        # As in WSGIServer.server_bind, but without looking up this machine's name, which may hang.
        self.server_name, self.server_port = host, port
        self.setup_environ()
        self.set_app(app)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because a client may close its connection at any time."""


class _Handler(RequestDeadline, WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing, because a line for every scrape would flood the worker's log."""
