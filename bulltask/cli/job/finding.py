"""A job as Redis has it now."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.names import wire_name
from bulltask.queue import Job
from bulltask.transport.scripts_history import some_queues

__all__ = ["Found", "find"]

LOG_LINES: Final = 1_000
"""Lines of a job's log that are read, the newest ones."""


@dataclass(frozen=True, slots=True)
class Found:
    """A job of Redis.

    Attributes:
        job: its fields.
        state: where it is.
        logs: its log, the oldest line first; the last ones of a long log.
        log_lines: how many there are.
    """

    job: Job
    state: str
    logs: tuple[str, ...]
    log_lines: int

    @property
    def added_at(self) -> datetime | None:
        """When it was made, by its sender's clock."""
        return _moment(self.job.timestamp_ms or None)

    @property
    def started_at(self) -> datetime | None:
        """When a worker took it last."""
        return _moment(self.job.processed_ms)

    @property
    def finished_at(self) -> datetime | None:
        """When it ended."""
        return _moment(self.job.finished_ms)

    def plain(self) -> dict[str, Any]:
        """Return it as values of JSON: times as ISO 8601, lengths of time in seconds."""
        job = self.job
        times = {"added_at": self.added_at, "started_at": self.started_at, "finished_at": self.finished_at}
        return {
            "state": self.state,
            "name": job.name,
            "data": job.data if job.data is not None else job.data_text,
            "opts": dict(job.opts),
            **{name: None if moment is None else moment.isoformat() for name, moment in times.items()},
            "delay": job.delay_ms / 1000,
            "priority": job.priority,
            "attempts": job.attempts,
            "attempts_made": job.attempts_made,
            "attempts_started": job.attempts_started,
            "stalled_count": job.stalled_count,
            "worker": job.processed_by,
            "progress": job.progress,
            "returnvalue": job.returnvalue,
            "failed_reason": job.failed_reason,
            "stacktrace": list(job.stacktrace),
            "logs": list(self.logs),
            "log_lines": self.log_lines,
            "parent_key": job.parent_key,
            "deduplication_id": job.deduplication_id,
            "scheduler_id": job.scheduler_id,
        }


def find(app: App, job_id: str, queue: str | None) -> Found | None:
    """Read a job; ``None`` when Redis has none of that id.

    Args:
        app: whose Redis.
        job_id: its id.
        queue: its queue; all queues under the app's prefix are asked if left out.

    Raises:
        click.UsageError: jobs of several queues have this id.
        BrokerError: Redis cannot be reached.
    """
    jobs = [job for name in ([queue] if queue else _queues(app)) if (job := app.queue(name).get_job(job_id))]
    if len(jobs) > 1:
        names = ", ".join(job.queue for job in jobs)
        raise click.UsageError(f"there is a job {job_id!r} in each of the queues {names}: say which with --queue")
    if not jobs:
        return None
    logs = jobs[0].get_logs(0, LOG_LINES - 1, asc=False)
    return Found(jobs[0], str(jobs[0].get_state()), tuple(reversed(logs.lines)), logs.count)


def _queues(app: App) -> list[str]:
    """All queues under the app's prefix that it can name, by its spelling."""
    config, cursor, found = app.config, "0", set[str]()
    with app.broker.pool.client() as client:
        while True:
            cursor, some = client.run(some_queues(config.prefix, cursor))
            found.update(some)
            if cursor == "0":
                break
    named = []
    for wire in sorted(found):
        bare = wire[1:-1] if config.queue_hash_tag and wire.startswith("{") and wire.endswith("}") else wire
        if wire_name(bare, hash_tag=config.queue_hash_tag) == wire:
            named.append(bare)
    return named


def _moment(ms: int | None) -> datetime | None:
    try:
        return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # a hash may hold anything
        return None
