"""The load: bulltask sends at a limited rate through the proxy, and Node.js sends directly."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from sqlalchemy import create_engine
from sqlalchemy.orm import Session

from bulltask import App, group
from bulltask.errors import BulltaskError
from bulltask.outbox.sqlalchemy import Outbox
from bulltask.queue import FlowJob
from tests.interop.node_bridge import NodeBridge, NodeError

__all__ = ["ATTEMPTS", "AcknowledgedJobs", "NodeLoad", "Producer", "Sent"]

Outcome = Literal["completed", "failed", "either"]
ATTEMPTS = {"flaky": 2, "aflaky": 2, "stops_its_loop": 2, "kills_its_child": 2}
"""The number of attempts of tasks whose first attempt fails."""


@dataclass(frozen=True, slots=True)
class Sent:
    """An acknowledged job: its kind, queue, expected outcome, and expected number of attempts."""

    kind: str
    queue: str
    outcome: Outcome
    attempts: int = 1


class AcknowledgedJobs:
    """Records acknowledged jobs and failed sends of several threads.

    Attributes:
        jobs: The acknowledged jobs by id.
        failed: The number of failed sends by class of the exception.
        unexpected: Sends that raised an unexpected exception.
    """

    def __init__(self) -> None:
        self.jobs: dict[str, Sent] = {}
        self.failed: Counter[str] = Counter()
        self.unexpected: list[str] = []

    def send(self, sent: Sent, send: Callable[[], list[str]]) -> list[str]:
        """Call ``send``; record and return the ids of the acknowledged jobs that it returns, or record the error."""
        try:
            ids = send()
        except (BulltaskError, NodeError, TimeoutError) as exc:
            self.failed[type(exc).__name__] += 1
            return []
        except Exception as exc:  # noqa: BLE001 - a send must raise only BulltaskError
            self.unexpected.append(f"{sent.kind}: {exc!r}")
            return []
        for job_id in ids:
            self.jobs[job_id] = sent
        return ids


class Producer(threading.Thread):
    """Sends jobs of all kinds until `stop`.

    Args:
        app: The app that sends.
        acknowledged: Records the acknowledged jobs.
        rate: The number of calls per second.
        rng: Chooses the jobs.
        database: The file of the outbox.
    """

    def __init__(
        self, app: App, acknowledged: AcknowledgedJobs, rate: float, rng: random.Random, database: Path
    ) -> None:
        super().__init__(name="producer", daemon=True)
        self._engine = create_engine(f"sqlite:///{database}")
        self._outbox = Outbox(app, self._engine)
        self._outbox.metadata.create_all(self._engine)
        self._app, self._acknowledged, self._pause_s, self._rng = app, acknowledged, 1 / rate, rng
        self._stopped = threading.Event()
        self._calls: list[tuple[int, Callable[[], None]]] = [
            (30, lambda: self.send_one("plain", "main")),
            (15, lambda: self.send_one("nap", "main")),
            (4, lambda: self.send_one("plain", "main", ms=400)),
            (6, lambda: self.send_one("nap", "main", ms=800)),
            (10, lambda: self.send_one("plain", "main", priority=rng.randint(1, 9))),
            (10, lambda: self.send_one("nap", "narrow", ms=50)),
            (5, lambda: self.send_one("plain", "narrow", ms=20)),
            (8, lambda: self.send_one("plain", "main", countdown=rng.uniform(0.1, 6))),
            (6, lambda: self.send_one("flaky", "main")),
            (6, lambda: self.send_one("aflaky", "main")),
            (3, lambda: self.send_one("broken", "main", "failed")),
            (5, lambda: self.send_one("plain", "shared")),
            (2, self._bulk),
            (3, self._flow),
            (8, self._batched),
            (4, lambda: self.send_one("limited", "main")),
            (3, lambda: self.send_one("steps", "main", count=20)),
            (3, self._chord),
            (3, lambda: self._revoke(countdown=3)),
            (2, lambda: self._revoke(ms=200)),
            (4, self._outbox_row),
        ]

    def run(self) -> None:
        """Send jobs at the rate."""
        weights, calls = zip(*self._calls, strict=True)
        while not self._stopped.wait(self._pause_s):
            self._rng.choices(calls, weights)[0]()

    def stop(self) -> None:
        """Stop sending, and wait for the last reply."""
        self._stopped.set()
        self.join()

    def send_remaining_rows(self) -> None:
        """Send the rows of the outbox that could not be sent while Redis was unavailable."""
        self._outbox.relay()

    def send_one(
        self,
        task: str,
        queue: str,
        outcome: Outcome = "completed",
        *,
        countdown: float | None = None,
        priority: int | None = None,
        **arguments: Any,
    ) -> None:
        """Send one job."""
        options: dict[str, Any] = {"queue": queue, "max_retries": 20}
        options |= {"countdown": countdown} if countdown else {}
        options |= {"priority": priority} if priority else {}
        kind = task + ("-delayed" if countdown else "-priority" if priority else "")
        self._acknowledged.send(
            Sent(kind, queue, outcome, ATTEMPTS.get(task, 1)),
            lambda: [self._app.send_task(task, kwargs=arguments, **options).id],
        )

    def _bulk(self) -> None:
        jobs = [self._app._build_job("plain", (), {"ms": 1}, {"queue": "main"}) for _ in range(20)]
        self._acknowledged.send(
            Sent("plain-bulk", "main", "completed"), lambda: [sent.id for sent in self._app.send_many(jobs)]
        )

    def _flow(self) -> None:
        children = [FlowJob("plain", "main", {"ms": 1}), FlowJob("nap", "narrow", {"ms": 1})]

        def send() -> list[str]:
            with self._app.flows() as flows:
                return [flows.add(FlowJob("plain", "main", {"ms": 1}, {}, children)).job.id]

        self._acknowledged.send(Sent("flow", "main", "completed"), send)

    def _batched(self) -> None:
        value, sent = self._rng.randrange(100), Sent("batched", "batches", "completed")
        self._acknowledged.send(
            sent, lambda: [self._app.send_task("batched", (value,), queue="batches", max_retries=20).id]
        )

    def _chord(self) -> None:
        signature = self._app.signature
        members = group(signature(task, kwargs={"ms": 1}, queue="main", max_retries=20) for task in ("plain", "nap"))
        chord = members | signature("total", queue="main", max_retries=20)
        self._acknowledged.send(Sent("chord", "main", "completed"), lambda: [chord.delay().id])

    def _revoke(self, ms: int = 1, **options: Any) -> None:
        """Send a job and revoke it, before or while it runs; Redis may be unavailable in between."""
        sent = Sent("revoked", "main", "either")
        options |= {"queue": "main", "max_retries": 20}
        for job_id in self._acknowledged.send(
            sent, lambda: [self._app.send_task("nap", kwargs={"ms": ms}, **options).id]
        ):
            self._acknowledged.send(sent, partial(self._revoke_job, job_id))

    def _revoke_job(self, job_id: str) -> list[str]:
        self._app.queue("main").revoke(job_id, terminate=True)
        return []

    def _outbox_row(self) -> None:
        """Commit a job to the outbox, which acknowledges it; then send all rows, unless Redis is unavailable."""
        sent = Sent("outbox", "main", "completed")
        self._acknowledged.send(sent, self._commit_row)
        self._acknowledged.send(sent, self._relay)

    def _commit_row(self) -> list[str]:
        call = self._app.signature("plain", kwargs={"ms": 1}, queue="main", max_retries=20)
        with Session(self._engine) as session, session.begin():
            return [self._outbox.send(session, call).id]

    def _relay(self) -> list[str]:
        self._outbox.relay()
        return []


class NodeLoad(threading.Thread):
    """A Node.js worker on ``shared``, and a sender to the queues ``main`` and ``shared``.

    Args:
        node: The official client, with a direct connection to Redis.
        acknowledged: Records the acknowledged jobs.
    """

    def __init__(self, node: NodeBridge, acknowledged: AcknowledgedJobs) -> None:
        super().__init__(name="node", daemon=True)
        self._node, self._acknowledged, self._stopped = node, acknowledged, threading.Event()
        for queue in ("main", "shared"):
            node.call(
                "queue.getJobCounts", queue=f"{{{queue}}}"
            )  # creates the Queue now, as it resets the length of the stream
        node.call(
            "worker.start", queue="{shared}", processor="echo", opts={"lockDuration": 4000, "maxStalledCount": 20}
        )

    def run(self) -> None:
        """Send two jobs per second, alternately to two queues."""
        turn = 0
        while not self._stopped.wait(0.5):
            turn += 1
            queue, task = ("main", "nap") if turn % 2 else ("shared", "plain")
            self._acknowledged.send(Sent(f"{task}-of-node", queue, "completed"), partial(self._add, queue, task, turn))

    def stop(self) -> None:
        """Stop sending; the worker continues."""
        self._stopped.set()
        self.join(30)

    def _add(self, queue: str, task: str, turn: int) -> list[str]:
        opts = {"attempts": 20, "backoff": 100, "jobId": f"node-{turn}"}
        job = self._node.call("queue.add", queue=f"{{{queue}}}", name=task, data={"ms": 5}, opts=opts, timeout=30)
        return [str(job["id"])]
