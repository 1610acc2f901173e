"""A harness for the tests of ``bulltask migrate-bull``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import redis

from bulltask import App
from bulltask.jobs.names import bullmq_name
from bulltask.migrate import BullMigration, MigrationReport
from tests.interop.bull_bridge import BullBridge
from tests.interop.node_bridge import NodeBridge
from tests.support.fork_server import ForkedProcess, fork_server

__all__ = ["MigrationHarness"]

STATE_KEYS = ("wait", "paused", "active", "delayed", "completed", "failed", "prioritized")


class MigrationHarness:
    """A queue of Bull and the BullMQ queue that it is migrated to: ``{mail}``, or, in place, the same keys.

    Args:
        url: The server.
        bull: The process of the real Bull.
        node: The process of the official client of BullMQ.
        in_place: Whether the app has no hash tags, so that both queues have the same keys.
    """

    def __init__(self, url: str, bull: BullBridge, node: NodeBridge, *, in_place: bool) -> None:
        self.url, self.bull, self.node, self.in_place = url, bull, node, in_place
        self.name = bullmq_name("mail", hash_tag=not in_place)
        self.app = App("migration", url, queue_hash_tag=not in_place)
        self.redis: Any = redis.Redis.from_url(url, decode_responses=True)
        self._raw = redis.Redis.from_url(url)

    def bull_migration(self, **options: Any) -> BullMigration:
        """Return the migration of Bull's ``mail`` to bulltask's."""
        return BullMigration(self.app.queue("mail"), "mail", **options)

    def migrate(self, **options: Any) -> MigrationReport:
        """Run the whole migration."""
        return self.bull_migration(**options).run()

    def command(self, *args: str) -> subprocess.CompletedProcess[str]:
        """Run the command to its end."""
        return fork_server.run(self._args(self.url, *args), self._environ)

    def start(self, *args: str, url: str) -> AbstractContextManager[ForkedProcess]:
        """Start the command; it is killed at the end if it is still running."""
        return fork_server.running(self._args(url, *args), self._environ)

    @staticmethod
    def _args(url: str, *args: str) -> list[str]:
        return ["-b", url, "migrate-bull", "mail", *args]

    @property
    def _environ(self) -> dict[str, str]:
        return os.environ | {"BULLTASK_QUEUE_HASH_TAG": str(not self.in_place)}

    def dump(self, pattern: str = "*") -> dict[Any, Any]:
        """Return every key as Redis would save it."""
        return {key: self._raw.dump(key) for key in sorted(self._raw.keys(pattern))}

    def hash(self, job_id: str, queue: str = "") -> dict[str, str]:
        """Return the stored hash of a job of Bull's queue, or of another queue."""
        return self.hashes([job_id], queue)[0]

    def hashes(self, job_ids: Sequence[str], queue: str = "") -> list[dict[str, str]]:
        """Return the stored hashes of several jobs."""
        with self.redis.pipeline(transaction=False) as pipeline:
            for job_id in job_ids:
                pipeline.hgetall(f"bull:{queue or 'mail'}:{job_id}")
            fields: list[dict[str, str]] = pipeline.execute()
        return fields

    def node_job(self, job_id: str) -> dict[str, Any]:
        """Return a job as Node's BullMQ has it, with ``state`` and ``logs``."""
        job: dict[str, Any] | None = self.node.call("queue.getJob", queue=self.name, job=job_id)
        assert job is not None, f"Node finds no job {job_id}"
        return job

    def call(self, method: str, *args: object) -> Any:
        """Call a method of Node's ``Queue``."""
        return self.node.call("queue.call", queue=self.name, method=method, args=list(args))

    def counts(self) -> dict[str, int]:
        """Return Node's ``getJobCounts`` without the zeros."""
        return {state: count for state, count in self.call("getJobCounts").items() if count}

    def ids(self, name: str) -> list[str]:
        """Return the ids in all lists and sets of a queue."""
        keys = [f"bull:{name}:{state}" for state in STATE_KEYS]
        with self.redis.pipeline(transaction=False) as pipeline:  # a test polls this method
            for key in keys:
                pipeline.type(key)
            for key, kind in zip(keys, pipeline.execute(), strict=True):
                (pipeline.lrange if kind == "list" else pipeline.zrange)(key, 0, -1)
            return [job_id for ids in pipeline.execute() for job_id in ids]

    def all_ids(self) -> list[str]:
        """Return the ids of both queues, sorted."""
        return sorted(self.ids("mail") + ([] if self.in_place else self.ids("{mail}")))

    def run_all(self, file: Path, processor: str = "record") -> Callable[[], list[str]]:
        """Start a Node worker that records the ids of its jobs; return a function that reads them."""
        self.node.call("worker.start", queue=self.name, processor=processor, args={"file": str(file)})
        return lambda: [line.split()[0] for line in file.read_text().splitlines()] if file.exists() else []

    def close(self) -> None:
        """Close the app and its clients."""
        self.redis.close()
        self._raw.close()
        self.app.close()
