"""A harness for tests with real workers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import redis

from bulltask import App, AsyncResult
from bulltask.jobs.names import bullmq_name
from bulltask.testing.worker import wait_until
from bulltask.transport.call import QueueKeys
from tests.support.flaky_proxy import FlakyProxy
from tests.support.server_clients import client_of
from tests.support.streams import Entry, Stream
from tests.support.worker import Worker

__all__ = ["WorkerHarness"]


class WorkerHarness:
    """Starts workers, sends jobs, and reads the queue's events and the tasks' journal.

    Args:
        url: The single server for the journal, and for the queues unless ``broker_url`` is set.
        directory: The directory for the workers' modules.
        record: Records a name and a value in the test report.
        broker_url: The servers for the queues: another topology, or a server that the test may disturb.

    Attributes:
        redis: A client for the queues' server.
        keys: The keys of the default queue.
        journal: The entries that tasks record: ``what``, ``pid``, ``job``.
        events: BullMQ's events of the default queue: ``event``, ``jobId``, …
        app: An app that sends jobs.
    """

    def __init__(
        self, url: str, directory: Path, record: Callable[[str, object], None], *, broker_url: str = ""
    ) -> None:
        self.url, self._journal_url, self._directory, self._record = broker_url or url, url, directory, record
        self._workers: list[Worker] = []
        self._apps: list[App] = []
        self._streams: list[Stream] = []
        self._proxies: list[FlakyProxy] = []
        self.keys = self.keys_of("default")
        self.redis = client_of(self.url, decode_responses=True, socket_timeout=None)
        self._gates = redis.Redis.from_url(url)
        self.journal = self.stream(url, "journal")
        self.events = self.stream(self.url, self.keys.events)
        self.app = self.sender()

    @staticmethod
    def keys_of(queue: str) -> QueueKeys:
        """Return the keys of a queue."""
        return QueueKeys("bull", bullmq_name(queue, hash_tag=True), queue)

    def stream(self, url: str, key: str) -> Stream:
        """Read another stream."""
        self._streams.append(Stream(url, key))
        return self._streams[-1]

    def proxy(self) -> FlakyProxy:
        """Start a proxy to the queues' server that can inject errors; skip the test if there are several servers."""
        if not self.url.startswith("redis://"):
            pytest.skip("a proxy forwards to one server")
        self._proxies.append(FlakyProxy("127.0.0.1", int(self.url.rpartition(":")[2].partition("/")[0])).start())
        return self._proxies[-1]

    def sender(self, url: str = "", **settings: Any) -> App:
        """Create another app that sends jobs."""
        self._apps.append(App("sender", url or self.url, **settings))
        return self._apps[-1]

    def worker(
        self,
        source: str = "",
        *,
        via: FlakyProxy | None = None,
        children: int = 2,
        settings: Mapping[str, object] | None = None,
        **more: Any,
    ) -> Worker:
        """Start a worker whose module is `APP` and ``source``.

        Args:
            source: Source code of more tasks.
            via: The proxy between the worker and the server, if any.
            children: The number of children.
            settings: ``BULLTASK_`` settings by their public names.
            more: Other arguments of `Worker`.
        """
        url = self.url if via is None else f"redis://{via.host}:{via.port}/0"
        merged = {"broker_url": url, "worker_concurrency": children, **(settings or {})}
        directory = self._directory / f"worker-{len(self._workers)}"
        environ = {"JOURNAL_URL": self._journal_url, **more.pop("environ", {})}
        self._workers.append(Worker(directory, source, settings=merged, environ=environ, **more))
        return self._workers[-1]

    def hold(self, gate: str = "gate", **options: Any) -> AsyncResult[Any]:
        """Send a job that records its start and waits until `open_gate`."""
        return self.app.send_task("hold", kwargs={"gate": gate}, **options)

    def open_gate(self, gate: str = "gate", times: int = 1) -> None:
        """Let ``times`` jobs pass a gate, now or later."""
        self._gates.rpush(f"gate:{gate}", *["open"] * times)

    def wait_for_start(self, job: AsyncResult[Any], count: int = 1, timeout: float = 60.0) -> Entry:
        """Wait until a job has started for the ``count``-th time; return the journal entry."""
        return self.journal.wait_for(count, timeout, what="start", job=job.id)[-1]

    def start_count(self, job: AsyncResult[Any]) -> int:
        """Return how many times a job has started so far."""
        return len(self.journal.all(what="start", job=job.id))

    def wait_for_event(self, event: str, job: AsyncResult[Any], count: int = 1, timeout: float = 60.0) -> Entry:
        """Wait for the ``count``-th event of this kind for a job."""
        return self.events.wait_for(count, timeout, event=event, jobId=job.id)[-1]

    def wait_until_idle(self, children: int, queue: str = "default") -> None:
        """Wait until ``children`` children wait for the queue's marker and the marker does not exist."""
        marker = self.keys_of(queue).marker

        def idle() -> bool:
            return len(self.idle_connections()) >= children and not self.redis.exists(marker)

        wait_until(idle, 60.0, f"{children} idle children")

    def idle_connections(self) -> set[str]:
        """Return the ids of the connections that wait for a marker."""
        clients: Any = self.redis.client_list()
        return {client["id"] for client in clients if client["cmd"] == "bzpopmin" and "b" in client["flags"]}

    def field(self, job: AsyncResult[Any], name: str) -> Any:
        """Return a field of a job's hash."""
        return self.redis.hget(self.keys.job(job.id), name)

    def report(self, **figures: object) -> None:
        """Record measurements in the test report; ``pytest -s`` prints them."""
        for name, value in figures.items():
            self._record(name, value)
        sys.stdout.write("  " + ", ".join(f"{name}={value}" for name, value in figures.items()) + "\n")

    def close(self) -> None:
        """Stop the workers and close all connections."""
        for worker in self._workers:
            worker.close()
        for app in self._apps:
            app.close()
        for proxy in self._proxies:
            proxy.close()
        for stream in self._streams:
            stream.close()
        self.redis.close()
        self._gates.close()
