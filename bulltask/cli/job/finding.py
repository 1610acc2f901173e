"""A job as Redis has it now."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.config.config import Config
from bulltask.errors import BrokerAuthError
from bulltask.jobs.names import wire_name
from bulltask.queue import Job
from bulltask.transport.call import command
from bulltask.transport.client import Client
from bulltask.transport.scripts.queue import scan_queues, served_queues

__all__ = ["Found", "find", "holding"]

LOG_LINES: Final = 1_000
"""Lines of a job's log that are read, the newest ones."""

PAGES: Final = 1_000
"""Of a thousand keys each: so many are looked through for names of queues, for about a second of Redis' time."""


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


def find(app: App, job_id: str, queue: str | None, known: Collection[str] = ()) -> Found | None:
    """Read a job; ``None`` when Redis has none of that id.

    Args:
        app: whose Redis.
        job_id: its id.
        queue: its queue. If left out, the queues that are known are asked first: ``known``, the app's and those that
            workers serve; then all that have a key among the first million.
        known: queues that somebody else knows of.

    Raises:
        click.UsageError: jobs of several queues have this id.
        BrokerError: Redis cannot be reached.
    """
    names = [queue] if queue else holding(app, job_id, known)
    jobs = [job for name in names if (job := app.queue(name).get_job(job_id))]
    if len(jobs) > 1:
        names = sorted(job.queue for job in jobs)
        raise click.UsageError(
            f"there is a job {job_id!r} in each of the queues {', '.join(names)}: say which with --queue"
        )
    if not jobs:
        return None
    logs = jobs[0].get_logs(0, LOG_LINES - 1, asc=False)
    return Found(jobs[0], str(jobs[0].get_state()), tuple(reversed(logs.lines)), logs.count)


def holding(app: App, job_id: str, known: Collection[str] = ()) -> list[str]:
    """The queues that have a job of this id, looked for where that costs least; see :func:`find`."""
    config = app.config
    named = [config.default_queue, *known, *(task.options.queue or "" for task in app.tasks.values())]
    with app.broker.pool.client() as client:
        near = sorted({*named, *_bare(_served(client, config), config)} - {""})
        if found := _having(client, app, job_id, near):
            return found
        rest = set(_bare(_every(client, config), config)) - set(near)
        return _having(client, app, job_id, sorted(rest))


def _having(client: Client, app: App, job_id: str, queues: list[str]) -> list[str]:
    calls = [command("EXISTS", app.broker.keys(queue).job(job_id), parse_reply=bool) for queue in queues]
    return [queue for queue, there in zip(queues, client.run_many(calls), strict=True) if there] if calls else []


def _served(client: Client, config: Config) -> set[str]:
    try:
        return client.run(served_queues(config.prefix))
    except BrokerAuthError:  # CLIENT LIST is forbidden
        return set()


def _every(client: Client, config: Config) -> set[str]:
    """All queues under the prefix; Redis has no list of them, so its keys are looked through, up to a bound."""
    cursor, found = "0", set[str]()
    for _ in range(PAGES):
        cursor, some = client.run(scan_queues(config.prefix, cursor))
        found.update(some)
        if cursor == "0":
            return found
    click.echo(
        f"Redis has more keys than the {PAGES * 1000:,} that were looked through for names of queues, so there may be"
        " others: say which queue is meant with --queue",
        err=True,
    )
    return found


def _bare(wires: Iterable[str], config: Config) -> list[str]:
    """Those of some queues that the app can name, by its spelling."""
    named = []
    for wire in wires:
        bare = wire[1:-1] if config.queue_hash_tag and wire.startswith("{") and wire.endswith("}") else wire
        if wire_name(bare, hash_tag=config.queue_hash_tag) == wire:
            named.append(bare)
    return named


def _moment(ms: int | None) -> datetime | None:
    try:
        return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # a hash may hold anything
        return None
