"""One queue from both sides: bulltask's app and workers, and the official Node client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import redis

from bulltask import App, AsyncResult
from bulltask.jobs.names import wire_name
from bulltask.transport.keys import QueueKeys
from tests.interop.node_bridge import NodeBridge
from tests.interop.tasks import register
from tests.support.programs import ROOT
from tests.support.streams import Entry, Stream
from tests.support.worker import Worker

__all__ = ["CLOCKS_MS", "SideBySide", "ran"]

CLOCKS_MS = 20
"""How far apart two processes may be about the time: Node asks this machine, bulltask the server, some ms ago."""
QUEUE = "mail"
WORKER = """
from tests.interop.tasks import register

register(app)
"""


class SideBySide:
    """A queue that bulltask calls ``mail`` and Node ``{mail}``, or both ``mail``.

    "ours" is bulltask's, "Node" the official client's.

    Args:
        url: the server, empty.
        node: the Node process.
        directory: for the workers' modules.
        hash_tag: ``queue_hash_tag``.

    Attributes:
        name: what Node calls the queue.
        app: sends our jobs.
        keys: the queue's.
        redis: a client that returns ``str``.
        stream: the queue's events as they are in Redis.
        journal: what the task ``hold`` tells.
        workers: ours, in the order of their start.
    """

    def __init__(self, url: str, node: NodeBridge, directory: Path, *, hash_tag: bool) -> None:
        self.url, self.node, self._directory, self._hash_tag = url, node, directory, hash_tag
        self.name = wire_name(QUEUE, hash_tag=hash_tag)
        self.keys = QueueKeys("bull", self.name, QUEUE)
        self.redis: Any = redis.Redis.from_url(url, decode_responses=True)
        self.stream, self.journal = Stream(url, self.keys.events), Stream(url, "journal")
        self._apps: list[App] = []
        self.workers: list[Worker] = []
        self.app = self.sender()

    # ---- ours ----------------------------------------------------------------------------------------------------

    def sender(self, **settings: object) -> App:
        """Make an app that sends to the queue, with the tasks of ``tasks.py``."""
        said = {"task_default_queue": QUEUE, "queue_hash_tag": self._hash_tag, **settings}
        self._apps.append(App("sender", self.url, **said))
        register(self._apps[-1])
        return self._apps[-1]

    def send(self, task: str, /, *, options: dict[str, Any] | None = None, **arguments: Any) -> AsyncResult[Any]:
        """Send one of our jobs."""
        return self.app.send_task(task, kwargs=arguments, **(options or {}))

    def worker(self, *, children: int = 1, queues: Sequence[str] = (), **settings: object) -> Worker:
        """Start one of our workers with the tasks of ``tasks.py``.

        Args:
            children: how many it has.
            queues: what it serves, as bulltask spells it; only ``mail`` if left out.
            settings: by their public names.
        """
        said = {
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
                settings=said,
                environ={"PYTHONPATH": str(ROOT), "JOURNAL_URL": self.url},
            )
        )
        return self.workers[-1]

    def result(self, job_id: str) -> AsyncResult[Any]:
        """Our handle of a job, whoever sent it."""
        return self.app.result(job_id)

    def started(self, job_id: str, count: int = 1) -> Entry:
        """Wait for the ``count``-th start of a job of the task ``hold``."""
        return self.journal.wait_for(count, what="start", job=job_id)[-1]

    def open_gate(self, gate: str = "gate") -> None:
        """Let one job of the task ``hold`` end."""
        self.redis.rpush(f"gate:{gate}", "open")

    # ---- Node ----------------------------------------------------------------------------------------------------

    def add(self, name: str, data: object = None, **opts: object) -> str:
        """Node adds a job with options in its own spelling; return the id."""
        job = self.node.call("queue.add", queue=self.name, name=name, data={} if data is None else data, opts=opts)
        return str(job["id"])

    def node_worker(self, processor: str = "echo", args: dict[str, object] | None = None, **options: object) -> str:
        """Start a Node worker; return its handle."""
        handle = self.node.call("worker.start", queue=self.name, processor=processor, args=args or {}, opts=options)
        return str(handle)

    def finished(self, job_id: str) -> Any:
        """Node waits for the job's end (``waitUntilFinished``) and gives its return value, or raises its failure."""
        return self.node.call("job.waitUntilFinished", queue=self.name, job=job_id)

    def seen(self, job_id: str) -> dict[str, Any]:
        """The job as Node's ``Job`` shows it, with ``state`` and ``logs``."""
        job: dict[str, Any] | None = self.node.call("queue.getJob", queue=self.name, job=job_id)
        assert job is not None, f"Node finds no job {job_id}"
        return job

    def gone(self, job_id: str) -> bool:
        """True when Node finds no such job."""
        return self.node.call("queue.getJob", queue=self.name, job=job_id) is None

    def counts(self) -> dict[str, int]:
        """Node's ``getJobCounts`` without the zeros."""
        found: dict[str, int] = self.node.call("queue.getJobCounts", queue=self.name)
        return {state: count for state, count in found.items() if count}

    def call(self, method: str, *args: object) -> Any:
        """Call a method of Node's ``Queue``."""
        return self.node.call("queue.call", queue=self.name, method=method, args=list(args))

    def job_call(self, job_id: str, method: str, *args: object) -> Any:
        """Call a method of Node's ``Job``."""
        return self.node.call("job.call", queue=self.name, job=job_id, method=method, args=list(args))

    def listen(self) -> None:
        """Start Node's ``QueueEvents``; from now on events can be waited for."""
        self.node.call("events.start", queue=self.name)

    def wait_for_event(self, event: str, job_id: str | None = None, **fields: object) -> dict[str, Any]:
        """Wait until ``QueueEvents`` has passed on such an event; return its arguments."""
        wanted = fields if job_id is None else {"jobId": job_id, **fields}
        return self.node.wait_event(event, _with(wanted))

    def all_heard(self, event: str, job_id: str) -> list[dict[str, Any]]:
        """The arguments of every such event of the job so far."""
        return [found["args"] for found in self.node.events(event) if found["args"].get("jobId") == job_id]

    # ---- what is in Redis ----------------------------------------------------------------------------------------

    def waits_ms(self, job_id: str) -> list[int]:
        """How long the job was to wait after each failed attempt: from the ``delayed`` event to when it says."""
        return [int(event["delay"]) - event.ms for event in self.stream.all(event="delayed", jobId=job_id)]

    def close(self) -> None:
        """End our side; Node has a fixture of its own."""
        for worker in self.workers:
            worker.close()
        self.stream.close()
        self.journal.close()
        self.redis.close()
        for app in self._apps:
            app.close()


def ran(file: str) -> list[str]:
    """The ids of the jobs that the task or processor ``record`` has written, in order."""
    return [line.split()[0] for line in Path(file).read_text().splitlines()]


def _with(wanted: dict[str, object]) -> Callable[[dict[str, Any]], bool]:
    return lambda args: wanted.items() <= args.items()
