"""A queue that bulltask's app and workers share with an official client: Node's, or the Python one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from bulltask import App, AsyncResult
from bulltask.jobs.names import bullmq_name
from bulltask.transport.call import QueueKeys
from tests.interop.node_bridge import NodeBridge
from tests.interop.tasks import register
from tests.support.programs import ROOT
from tests.support.streams import Entry, Stream
from tests.support.worker import Worker

__all__ = ["CLOCK_TOLERANCE_MS", "InteropQueue", "recorded_ids"]

CLOCK_TOLERANCE_MS = 20
"""How far apart the clocks of two processes may be: Node uses this machine's, bulltask the server's, some ms old."""
QUEUE = "mail"
WORKER = """
from tests.interop.tasks import register

register(app)
"""


class InteropQueue:
    """A queue that bulltask calls ``mail`` and Node ``{mail}``, or both ``mail``.

    Args:
        url: The URL of an empty server.
        node: The process of the official client.
        directory: Where the workers' modules are written.
        hash_tag: The setting ``queue_hash_tag``.

    Attributes:
        name: The queue's name in BullMQ.
        app: The app that sends bulltask's jobs.
        keys: The queue's keys.
        redis: A client that returns ``str``.
        stream: The queue's events as they are in Redis.
        journal: What the task ``hold`` has recorded.
        workers: bulltask's workers, in the order of their start.
    """

    def __init__(self, url: str, node: NodeBridge, directory: Path, *, hash_tag: bool) -> None:
        self.url, self.node, self._directory, self._hash_tag = url, node, directory, hash_tag
        self.name = bullmq_name(QUEUE, hash_tag=hash_tag)
        self.keys = QueueKeys("bull", self.name, QUEUE)
        self.redis: Any = redis.Redis.from_url(url, decode_responses=True)
        self.stream, self.journal = Stream(url, self.keys.events), Stream(url, "journal")
        self._apps: list[App] = []
        self.workers: list[Worker] = []
        self.app = self.sender()

    # ---- bulltask ------------------------------------------------------------------------------------------------

    def sender(self, **settings: object) -> App:
        """Create an app that sends to the queue, with the tasks of ``tasks.py``."""
        merged: dict[str, Any] = {"task_default_queue": QUEUE, "queue_hash_tag": self._hash_tag, **settings}
        self._apps.append(App("sender", self.url, **merged))
        register(self._apps[-1])
        return self._apps[-1]

    def send(self, task: str, /, *, options: dict[str, Any] | None = None, **arguments: Any) -> AsyncResult[Any]:
        """Send a job with bulltask."""
        return self.app.send_task(task, kwargs=arguments, **(options or {}))

    def worker(self, *, children: int = 1, queues: Sequence[str] = (), **settings: object) -> Worker:
        """Start a bulltask worker with the tasks of ``tasks.py``.

        Args:
            children: The number of child processes.
            queues: The names of its queues in the app; ``mail`` by default.
            settings: Settings by their public names.
        """
        merged = {
            "broker_url": self.url,
            "task_default_queue": QUEUE,
            "queue_hash_tag": self._hash_tag,
            "worker_concurrency": children,
            **settings,
        }
        self.workers.append(
            Worker(
                self._directory / f"worker-{len(self.workers)}",
                WORKER,
                options=["-Q", ",".join(queues or [QUEUE])],
                settings=merged,
                environ={"PYTHONPATH": str(ROOT), "JOURNAL_URL": self.url},
            )
        )
        return self.workers[-1]

    def result(self, job_id: str) -> AsyncResult[Any]:
        """Return bulltask's result handle for a job."""
        return self.app.result(job_id)

    def wait_for_start(self, job_id: str, count: int = 1) -> Entry:
        """Wait for the ``count``-th start of a job of the task ``hold``."""
        return self.journal.wait_for(count, what="start", job=job_id)[-1]

    def open_gate(self, gate: str = "gate") -> None:
        """Let one job of the task ``hold`` complete."""
        self.redis.rpush(f"gate:{gate}", "open")

    # ---- Node ----------------------------------------------------------------------------------------------------

    def add(self, name: str, data: object = None, **opts: object) -> str:
        """Add a job with Node, with options by BullMQ's names; return the id."""
        job = self.node.call("queue.add", queue=self.name, name=name, data={} if data is None else data, opts=opts)
        return str(job["id"])

    def node_worker(self, processor: str = "echo", args: dict[str, object] | None = None, **options: object) -> str:
        """Start a Node worker; return its handle."""
        handle = self.node.call("worker.start", queue=self.name, processor=processor, args=args or {}, opts=options)
        return str(handle)

    def node_result(self, job_id: str) -> Any:
        """Wait for a job with Node's ``waitUntilFinished``; return its value, or raise its failure."""
        return self.node.call("job.waitUntilFinished", queue=self.name, job=job_id)

    def node_job(self, job_id: str) -> dict[str, Any]:
        """Return a job as Node's ``Job`` has it, with ``state`` and ``logs``."""
        job: dict[str, Any] | None = self.node.call("queue.getJob", queue=self.name, job=job_id)
        assert job is not None, f"Node finds no job {job_id}"
        return job

    def is_gone(self, job_id: str) -> bool:
        """Return whether Node does not find the job."""
        return self.node.call("queue.getJob", queue=self.name, job=job_id) is None

    def counts(self) -> dict[str, int]:
        """Return Node's ``getJobCounts`` without the zeros."""
        counts: dict[str, int] = self.node.call("queue.getJobCounts", queue=self.name)
        return {state: count for state, count in counts.items() if count}

    def call(self, method: str, *args: object) -> Any:
        """Call a method of Node's ``Queue``."""
        return self.node.call("queue.call", queue=self.name, method=method, args=list(args))

    def job_call(self, job_id: str, method: str, *args: object) -> Any:
        """Call a method of Node's ``Job``."""
        return self.node.call("job.call", queue=self.name, job=job_id, method=method, args=list(args))

    def listen(self) -> None:
        """Start Node's ``QueueEvents``, whose events the test can then wait for."""
        self.node.call("events.start", queue=self.name)

    def wait_for_event(self, event: str, job_id: str | None = None, **fields: object) -> dict[str, Any]:
        """Wait until Node's ``QueueEvents`` has received such an event; return its arguments."""
        expected = fields if job_id is None else {"jobId": job_id, **fields}
        return self.node.wait_event(event, _contains(expected))

    def node_events(self, event: str, job_id: str) -> list[dict[str, Any]]:
        """Return the arguments of every such event of the job so far."""
        return [entry["args"] for entry in self.node.events(event) if entry["args"].get("jobId") == job_id]

    # ---- Redis ---------------------------------------------------------------------------------------------------

    def waits_ms(self, job_id: str) -> list[int]:
        """Return the planned waits after each failed attempt: from the ``delayed`` event to the time in it."""
        return [int(event["delay"]) - event.ms for event in self.stream.all(event="delayed", jobId=job_id)]

    def close(self) -> None:
        """Close workers, clients and apps; the official client has a separate fixture."""
        for worker in self.workers:
            worker.close()
        self.stream.close()
        self.journal.close()
        self.redis.close()
        for app in self._apps:
            app.close()


def recorded_ids(file: str) -> list[str]:
    """Return the ids of the jobs that the task or processor ``record`` has written, in order."""
    return [line.split()[0] for line in Path(file).read_text().splitlines()]


def _contains(expected: dict[str, object]) -> Callable[[dict[str, Any]], bool]:
    return lambda args: expected.items() <= args.items()
