"""Metrics for Prometheus: their declarations, :class:`MetricsCollector`, and :func:`run_exporter`, which serves them.

The exporter is a forked process, so that a slow scrape never delays the supervisor. This module is imported only if
metrics are enabled, because it loads ``prometheus_client``.
"""

from __future__ import annotations

import os
import platform
import signal
import socket
import socketserver
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Protocol
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bulltask.config.process import die_with_parent, memory_kib
from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import ConfigError
from bulltask.observe.counters import BUCKETS, COUNTERS, Histogram, MetricsMemory
from bulltask.observe.http_requests import LOCAL_HOSTS, RequestDeadline, host_of

if TYPE_CHECKING:
    from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

__all__ = [
    "METRICS",
    "MetricDeclaration",
    "MetricsCollector",
    "QueuesCollector",
    "ReadQueues",
    "bind",
    "run_exporter",
    "serve",
]


@dataclass(frozen=True, slots=True)
class MetricDeclaration:
    """A metric: its type, which is ``counter``, ``gauge`` or ``histogram``, its help text and its labels."""

    type: str
    help: str
    labels: tuple[str, ...] = ()


_Declared = MetricDeclaration

OF_WORKERS: Final[Mapping[str, MetricDeclaration]] = {
    "bulltask_attempts_total": _Declared("counter", "Attempts that have ended", ("queue", "task", "status")),
    "bulltask_task_run_seconds": _Declared("histogram", "Run time of attempts", ("queue", "task")),
    "bulltask_task_cpu_seconds_total": _Declared("counter", "CPU time of attempts of sync tasks", ("queue", "task")),
    "bulltask_queue_wait_seconds": _Declared(
        "histogram", "Time from when a job could run until its first attempt started", ("queue", "task")
    ),
    "bulltask_rate_limit_waits_total": _Declared(
        "counter", "Times that a rate limit of a task or queue made a job or a child wait", ("queue", "limit")
    ),
    "bulltask_slots": _Declared("gauge", "Jobs that the running children can run at a time"),
    "bulltask_slots_busy": _Declared("gauge", "Jobs that the children are running"),
    "bulltask_children": _Declared("gauge", "Running child processes"),
    "bulltask_children_replaced_total": _Declared("counter", "Child processes that were replaced", ("reason",)),
    "bulltask_child_crashes_total": _Declared("counter", "Child processes that died unexpectedly", ("cause",)),
    "bulltask_process_resident_memory_bytes": _Declared("gauge", "Resident memory (RSS) of a process", ("process",)),
    "bulltask_process_cpu_seconds_total": _Declared("counter", "CPU time of a process", ("process",)),
    "bulltask_build_info": _Declared("gauge", "1; the versions are in the labels", ("version", "python")),
    "bullmq_jobs_processed_total": _Declared("counter", "Attempts by outcome", ("queue", "status")),
    "bullmq_jobs_failed_total": _Declared("counter", "Failed jobs, by reason", ("queue", "reason")),
    "bullmq_job_duration_seconds": _Declared("histogram", "Duration of attempts, for every outcome", ("queue",)),
    "bullmq_lock_extend_duration_seconds": _Declared("histogram", "Duration of the calls that renew locks", ("queue",)),
    "bullmq_stalled_jobs_total": _Declared("counter", "Jobs that were recovered after their process died", ("queue",)),
    "bullmq_heartbeat_success_total": _Declared("counter", "Locks renewed", ("queue",)),
    "bullmq_heartbeat_failure_total": _Declared("counter", "Locks that could not be renewed", ("queue",)),
    "bullmq_stalled_checker_skipped_total": _Declared(
        "counter", "Stalled checks skipped because the previous one was still running", ("queue",)
    ),
    "bullmq_queue_length": _Declared("gauge", "Jobs in each state", ("queue", "state")),
    "bullmq_active_workers": _Declared(
        "gauge", "Running child processes, which serve all queues of the worker", ("queue", "worker_id")
    ),
    "bullmq_children_replaced_total": _Declared(
        "counter", "Child processes that were replaced, by reason", ("reason",)
    ),
    "bullmq_redis_connection_status": _Declared("gauge", "1 for the current status, 0 for the other one", ("status",)),
    "bullmq_redis_reconnect_attempts_total": _Declared("counter", "Attempts to reconnect to Redis"),
}
"""The metrics that only workers have. Those that begin with ``bullmq_`` are the first ones; their names remain."""

OF_QUEUES: Final[Mapping[str, MetricDeclaration]] = {
    "bulltask_queue_jobs": _Declared("gauge", "Jobs in each state", ("queue", "state")),
    "bulltask_queue_oldest_waiting_seconds": _Declared(
        "gauge", "How long the oldest of the jobs that are next has been waiting", ("queue",)
    ),
    "bulltask_queue_due_delayed_jobs": _Declared(
        "gauge", "Delayed jobs that are due, but that no worker has asked for", ("queue",)
    ),
    "bulltask_queue_scheduler_lag_seconds": _Declared(
        "gauge", "How long the next job of a job scheduler is overdue", ("queue",)
    ),
    "bulltask_queue_paused": _Declared("gauge", "1 if the queue is paused", ("queue",)),
    "bulltask_queue_workers": _Declared("gauge", "Workers of bulltask that process the queue", ("queue",)),
}
"""The metrics of queues, which workers have for their own queues, and ``bulltask exporter`` for all."""

OF_EXPORTER: Final[Mapping[str, MetricDeclaration]] = {
    "bulltask_exporter_redis_up": _Declared("gauge", "1 if the exporter could read the queues"),
    "bulltask_exporter_queues": _Declared("gauge", "Queues that the exporter reads"),
    "bulltask_exporter_queues_left_out": _Declared("gauge", "Queues that it does not read, because there are too many"),
    "bulltask_exporter_read_seconds": _Declared("gauge", "How long the last reading of the queues took"),
}
"""The metrics that only ``bulltask exporter`` has."""

METRICS: Final[Mapping[str, MetricDeclaration]] = {**OF_WORKERS, **OF_QUEUES, **OF_EXPORTER}
"""All metrics."""


class _QueueFigures(Protocol):
    """What Redis says about a queue: see :class:`bulltask.transport.scripts.queue.QueueFigures`."""

    @property
    def jobs(self) -> Mapping[str, int]: ...
    @property
    def waiting(self) -> int: ...
    @property
    def due(self) -> int: ...
    @property
    def oldest_ms(self) -> int | None: ...
    @property
    def scheduler_lag_ms(self) -> int: ...
    @property
    def is_paused(self) -> bool: ...
    @property
    def workers(self) -> Sequence[str]: ...


ReadQueues = Callable[[], Mapping[str, _QueueFigures]]
"""Reads the queues from Redis."""


class _Families:
    """The families of one scrape, in the order of their declarations."""

    def __init__(self, declared: Mapping[str, MetricDeclaration]) -> None:
        kinds = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
        self._families: dict[str, Any] = {
            name: kinds[metric.type](name, metric.help, labels=metric.labels) for name, metric in declared.items()
        }

    def add(self, name: str, value: float, *labels: str) -> None:
        self._families[name].add_metric(labels, value)

    def add_histogram(self, name: str, histogram: Histogram, bounds: Sequence[float], *labels: str) -> None:
        texts = (*map(floatToGoString, bounds), "+Inf")
        self._families[name].add_metric(labels, list(zip(texts, histogram.buckets, strict=True)), histogram.seconds)

    def add_queues(self, queues: Mapping[str, _QueueFigures]) -> None:
        for queue, figures in queues.items():
            for state, count in figures.jobs.items():
                self.add("bulltask_queue_jobs", count, queue, state)
            if figures.oldest_ms is not None or not figures.waiting:  # otherwise, it is unknown
                self.add("bulltask_queue_oldest_waiting_seconds", (figures.oldest_ms or 0) / 1000, queue)
            self.add("bulltask_queue_due_delayed_jobs", figures.due, queue)
            self.add("bulltask_queue_scheduler_lag_seconds", figures.scheduler_lag_ms / 1000, queue)
            self.add("bulltask_queue_paused", figures.is_paused, queue)
            self.add("bulltask_queue_workers", len(figures.workers), queue)

    def add_build_info(self) -> None:
        self.add("bulltask_build_info", 1, version("bulltask"), platform.python_version())

    def __iter__(self) -> Iterator[Metric]:
        return iter(self._families.values())


_CANCELLED: Final = ("hard_limit", "revoked", "blocked_loop", "exit_timeout", "other")
"""Reasons of ``bulltask_children_replaced_total`` that the metric before it counted as one."""


_STATUSES: Final = ("completed", "failed", "retried")


class MetricsCollector(Collector):
    """Collects the metrics of one scrape of a worker.

    Args:
        read_queues: Called once per scrape, never by two threads at a time. If it raises, the scrape has no metrics of
            queues and reports the connection as lost.
        slots: Returns how many jobs the running children can run at a time, and how many they are running.
    """

    def __init__(
        self,
        memory: MetricsMemory,
        worker_id: str,
        read_queues: ReadQueues,
        slots: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._memory = memory
        self._worker_id = worker_id
        self._read_queues = read_queues
        self._slots = slots
        self._one_scrape = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics; every queue and status is present from the start, with the value 0."""
        with self._one_scrape:
            families = _Families({**OF_WORKERS, **OF_QUEUES})
            self._add_jobs(families)
            self._add_processes(families)
            self._add_connections(families)
            return families

    def _add_jobs(self, families: _Families) -> None:
        for queue, total in self._memory.totals().items():
            for counter, (metric, *labels) in COUNTERS.items():
                families.add(metric, total.counts[counter], queue, *labels)
            families.add("bullmq_jobs_processed_total", total.failed, queue, "failed")
            for reason, count in total.failed_by.items():
                families.add("bullmq_jobs_failed_total", count, queue, reason)
            families.add_histogram("bullmq_job_duration_seconds", total.durations, BUCKETS, queue)
            families.add_histogram("bullmq_lock_extend_duration_seconds", total.lock_renewals, BUCKETS, queue)
        buckets = self._memory.buckets
        for (queue, task), of_task in self._memory.task_totals().items():
            for status in _STATUSES:
                families.add("bulltask_attempts_total", getattr(of_task, status), queue, task, status)
            families.add_histogram("bulltask_task_run_seconds", of_task.run, buckets, queue, task)
            families.add_histogram("bulltask_queue_wait_seconds", of_task.wait, buckets, queue, task)
            if of_task.cpu_s:  # otherwise, it is not measured: such as that of an async task
                families.add("bulltask_task_cpu_seconds_total", of_task.cpu_s, queue, task)

    def _add_processes(self, families: _Families) -> None:
        memory = self._memory
        children, (slots, busy) = memory.live_children(), self._slots()
        for queue in memory.queues:
            families.add("bullmq_active_workers", children, queue, self._worker_id)
        families.add("bulltask_children", children)
        families.add("bulltask_slots", slots)
        families.add("bulltask_slots_busy", busy)
        exits = dict(memory.exits())
        for reason, count in exits.items():
            families.add("bulltask_children_replaced_total", count, reason)
        cancelled = sum(exits.pop(reason) for reason in _CANCELLED)
        for reason, count in {**exits, "cancelled": cancelled}.items():
            families.add("bullmq_children_replaced_total", count, reason)
        for cause, count in memory.crashes().items():
            families.add("bulltask_child_crashes_total", count, cause)
        for name, pid in memory.pids().items():
            with suppress(OSError):  # it has just exited
                families.add("bulltask_process_resident_memory_bytes", memory_kib(pid) * 1024, name)
                families.add("bulltask_process_cpu_seconds_total", _cpu_seconds(pid), name)
        families.add_build_info()

    def _add_connections(self, families: _Families) -> None:
        connected = self._memory.connected()
        try:
            queues = self._read_queues()
        except Exception:  # noqa: BLE001 - without Redis the counters and the connection status are still reported
            connected = False
        else:
            families.add_queues(queues)
            for queue, figures in queues.items():
                for state, count in figures.jobs.items():
                    families.add("bullmq_queue_length", count, queue, state)
        families.add("bullmq_redis_connection_status", connected, "connected")
        families.add("bullmq_redis_connection_status", not connected, "disconnected")
        families.add("bullmq_redis_reconnect_attempts_total", self._memory.reconnects())


class QueuesCollector(Collector):
    """Collects the metrics of one scrape of ``bulltask exporter``: all queues of a server.

    Args:
        read_queues: Reads the queues; called at most once in ``cache_s``. If it raises, the scrape has no metrics of
            queues: a queue that is missing is not an empty one.
        left_out: Returns how many queues it has not read.
    """

    def __init__(self, read_queues: ReadQueues, left_out: Callable[[], int], cache_s: float) -> None:
        self._read_queues = read_queues
        self._left_out = left_out
        self._cache_s = cache_s
        self._next_read_s = 0.0
        self._queues: Mapping[str, _QueueFigures] | None = None
        self._took_s = 0.0
        self._one_scrape = threading.Lock()

    def collect(self) -> Iterable[Metric]:
        """Return the current metrics, or those of a few seconds ago."""
        with self._one_scrape:
            self._read()
            families = _Families({**OF_QUEUES, **OF_EXPORTER, "bulltask_build_info": METRICS["bulltask_build_info"]})
            families.add("bulltask_exporter_redis_up", self._queues is not None)
            if self._queues is not None:
                families.add("bulltask_exporter_queues", len(self._queues))
                families.add("bulltask_exporter_queues_left_out", self._left_out())
                families.add_queues(self._queues)
            families.add("bulltask_exporter_read_seconds", self._took_s)
            families.add_build_info()
            return families

    def _read(self) -> None:
        started_s = mono_s()
        if started_s < self._next_read_s:
            return
        try:
            self._queues = self._read_queues()
        except Exception:  # noqa: BLE001 - reported by a metric
            self._queues = None
        ended_s = mono_s()
        self._took_s = ended_s - started_s
        self._next_read_s = ended_s + self._cache_s


def _cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process so far; 0 on systems without ``/proc``."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as stat:  # noqa: PTH123 - for each process
            fields = stat.read().rpartition(")")[2].split()
    except FileNotFoundError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


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
    serve(listener, collector, probes)


def serve(listener: socket.socket, collector: Collector, probes: Probes = MappingProxyType({})) -> None:
    """Serve ``/metrics`` and ``probes`` until the process ends."""
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
