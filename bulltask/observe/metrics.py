"""Metrics for Prometheus: :class:`MetricsCollector` reads the counters, :func:`run_exporter` serves them.

The exporter is a forked process, so that a slow scrape never delays the supervisor. This module is imported only if
metrics are enabled, because it loads ``prometheus_client``.
"""

from __future__ import annotations

import os
import signal
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from types import MappingProxyType
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bulltask.config.process import die_with_parent
from bulltask.jobs.errors import ConfigError
from bulltask.observe.counters import BUCKETS, Histogram, MetricsMemory, QueueTotals
from bulltask.observe.http_requests import LOCAL_HOSTS, RequestDeadline, host_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = ["MetricsCollector", "QueueLengths", "bind", "run_exporter"]

QueueLengths = Callable[[], Mapping[str, Mapping[str, int]]]
"""Reads from Redis how many jobs each queue has in each state (``wait``, ``active``, …)."""

_BOUNDS = (*map(floatToGoString, BUCKETS), "+Inf")


class MetricsCollector(Collector):
    """Collects the metrics of one scrape.

    ``queue_lengths`` is called once per scrape, never by two threads at a time. If it raises, the scrape has no lengths
    and reports the connection as lost.
    """

    def __init__(self, memory: MetricsMemory, worker_id: str, queue_lengths: QueueLengths) -> None:
        self._memory = memory
        self._worker_id = worker_id
        self._queue_lengths = queue_lengths
        self._one_scrape = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics; every queue and status is present from the start, with the value 0."""
        with self._one_scrape:
            return [*self._jobs(self._memory.totals()), *self._connections()]

    def _jobs(self, totals: Mapping[str, QueueTotals]) -> Iterator[Metric]:
        processed = CounterMetricFamily(
            "bullmq_jobs_processed_total", "Attempts by outcome", labels=("queue", "status")
        )
        failed = CounterMetricFamily("bullmq_jobs_failed_total", "Failed jobs, by reason", labels=("queue", "reason"))
        for queue, total in totals.items():
            processed.add_metric((queue, "completed"), total.completed)
            processed.add_metric((queue, "failed"), total.failed)
            processed.add_metric((queue, "retried"), total.retried)
            for reason, count in total.failed_by.items():
                failed.add_metric((queue, reason), count)
        yield processed
        yield failed
        for name, help_text, part in (
            ("bullmq_job_duration_seconds", "Duration of attempts, for every outcome", attrgetter("durations")),
            (
                "bullmq_lock_extend_duration_seconds",
                "Duration of the calls that renew locks",
                attrgetter("lock_renewals"),
            ),
        ):
            yield _histograms(name, help_text, {queue: part(total) for queue, total in totals.items()})
        for name, help_text, value in (
            ("bullmq_stalled_jobs_total", "Jobs that were recovered after their process died", attrgetter("stalled")),
            ("bullmq_heartbeat_success_total", "Locks renewed", attrgetter("heartbeats")),
            ("bullmq_heartbeat_failure_total", "Locks that could not be renewed", attrgetter("heartbeat_failures")),
            (
                "bullmq_stalled_checker_skipped_total",
                "Stalled checks skipped because the previous one was still running",
                attrgetter("skipped"),
            ),
        ):
            family = CounterMetricFamily(name, help_text, labels=("queue",))
            for queue, total in totals.items():
                family.add_metric((queue,), value(total))
            yield family

    def _connections(self) -> Iterator[Metric]:
        lengths = GaugeMetricFamily("bullmq_queue_length", "Jobs in each state", labels=("queue", "state"))
        connected = self._memory.connected()
        try:
            for queue, states in self._queue_lengths().items():
                for state, length in states.items():
                    lengths.add_metric((queue, state), length)
        except Exception:  # noqa: BLE001 - without Redis the counters and the connection status are still reported
            connected = False
        yield lengths
        workers = GaugeMetricFamily(
            "bullmq_active_workers",
            "Running child processes, which serve all queues of the worker",
            labels=("queue", "worker_id"),
        )
        children = self._memory.live_children()
        for queue in self._memory.queues:
            workers.add_metric((queue, self._worker_id), children)
        yield workers
        replaced = CounterMetricFamily(
            "bullmq_children_replaced_total", "Child processes that were replaced, by reason", labels=("reason",)
        )
        for reason, count in self._memory.exits().items():
            replaced.add_metric((reason,), count)
        yield replaced
        status = GaugeMetricFamily(
            "bullmq_redis_connection_status", "1 for the current status, 0 for the other one", labels=("status",)
        )
        status.add_metric(("connected",), connected)
        status.add_metric(("disconnected",), not connected)
        yield status
        yield CounterMetricFamily(
            "bullmq_redis_reconnect_attempts_total", "Attempts to reconnect to Redis", value=self._memory.reconnects()
        )


def _histograms(name: str, help_text: str, histograms: Mapping[str, Histogram]) -> Metric:
    family = HistogramMetricFamily(name, help_text, labels=("queue",))
    for queue, histogram in histograms.items():
        family.add_metric((queue,), list(zip(_BOUNDS, histogram.buckets, strict=True)), histogram.seconds)
    return family


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

    The host ``""`` means all IPv4 addresses, the port 0 lets the system choose one (see ``getsockname()``).

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


Probes = Mapping[str, Callable[[], Sequence[str]]]
"""By its path, such as ``/livez``: returns what is wrong with the worker."""


def run_exporter(
    listener: socket.socket, collector: Collector, parent_pid: int, probes: Probes = MappingProxyType({})
) -> None:
    """Serve ``/metrics`` and ``probes`` until SIGTERM or the parent's death.

    Runs in the forked process and does not return.

    The parent closes its copy of the listener after the fork, and ``parent_pid`` was read before it. The collector
    opens its connections after the fork.
    """
    _reset_signals()
    die_with_parent(signal.SIGKILL, parent_pid)
    registry = CollectorRegistry()
    registry.register(collector)
    is_local = listener.getsockname()[0] in {"127.0.0.1", "::1"}
    with _Server(listener, _with_head(_route(make_wsgi_app(registry), probes, is_local=is_local))) as server:
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


def _route(app: WSGIApplication, probes: Probes, *, is_local: bool) -> WSGIApplication:
    """Return an app for metrics and probes; if it listens on this machine only, only for its own names."""

    def serve(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        if is_local and host_of(environ.get("HTTP_HOST", "")).lower() not in {"", *LOCAL_HOSTS}:
            start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [b"Only requests to this machine are allowed.\n"]
        if environ["PATH_INFO"] in {"/", "/metrics"}:
            return app(environ, start_response)
        if (probe := probes.get(environ["PATH_INFO"])) is not None:
            problems = probe()
            status = "503 Service Unavailable" if problems else "200 OK"
            start_response(status, [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")])
            return ["\n".join([*(problems or ["ok"]), ""]).encode()]
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
        self.server_name = host
        self.server_port = port
        self.setup_environ()
        self.set_app(app)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log nothing, because a client may close its connection at any time."""


class _Handler(RequestDeadline, WSGIRequestHandler):
    timeout = CLIENT_TIMEOUT_S

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base class's name
        """Log nothing, because a line for every scrape would flood the worker's log."""
