"""Find a job in Redis by its id, in one queue or in all."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.terminal import in_one_line
from bulltask.config.config import Config
from bulltask.jobs.errors import BrokerAuthError, InvalidNameError
from bulltask.jobs.names import bullmq_name, check_queue_name, name_in_app
from bulltask.queue import Job
from bulltask.transport.broker import scan_up_to
from bulltask.transport.call import SyncClient, command
from bulltask.transport.scripts.queue import scan_queues, worker_queues

__all__ = ["FoundJob", "ambiguous", "find_job", "queues_with_job"]

MAX_LOG_LINES: Final = 1_000
"""How many of the newest lines of a job's log are read."""

MAX_PAGES: Final = 1_000
"""How many pages, of a thousand keys each, are scanned for queue names on each server; this takes about a second."""


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job in Redis, with its state and log.

    Attributes:
        job: The job.
        state: Its state.
        logs: The last lines of its log, in order.
        log_lines: Number of lines in the whole log.
    """

    job: Job
    state: str
    logs: tuple[str, ...]
    log_lines: int

    @property
    def added_at(self) -> datetime | None:
        """When it was added, by its sender's clock."""
        return _moment(self.job.timestamp_ms or None)

    @property
    def started_at(self) -> datetime | None:
        """When a worker last acquired it."""
        return _moment(self.job.processed_ms)

    @property
    def finished_at(self) -> datetime | None:
        """When it ended."""
        return _moment(self.job.finished_ms)

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values: times in ISO 8601, durations in seconds."""
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


def find_job(app: App, job_id: str, queue: str | None, known: Collection[str] = ()) -> FoundJob | None:
    """Read a job; ``None`` if Redis has no job with this id.

    Args:
        app: The app whose Redis is searched.
        job_id: The job's id.
        queue: The job's queue. Without it, the known queues are searched first: ``known``, the app's, and those that
            workers process. If none of them has the job, the names of further queues are read with ``SCAN``, from up to
            a million keys on each server.
        known: Names of queues to search first.

    Raises:
        click.UsageError: Several queues have a job with this id.
        BrokerError: Redis cannot be reached.
    """
    names = [queue] if queue else queues_with_job(app, job_id, known)
    jobs = [job for name in names if (job := app.queue(name).get_job(job_id))]
    if len(jobs) > 1:
        raise ambiguous(job_id, sorted(job.queue for job in jobs))
    if not jobs:
        return None
    logs = jobs[0].get_logs(0, MAX_LOG_LINES - 1, asc=False)
    return FoundJob(jobs[0], str(jobs[0].get_state()), tuple(reversed(logs.lines)), logs.count)


def ambiguous(job_id: str, queues: Iterable[str]) -> click.UsageError:
    """Return the error for a job id that exists in several queues."""
    names = ", ".join(map(in_one_line, queues))  # any client with access to Redis may have chosen them
    return click.UsageError(f"several queues have a job {job_id!r}: {names}; choose one with --queue")


def queues_with_job(app: App, job_id: str, known: Collection[str] = ()) -> list[str]:
    """Return the queues that have a job with this id, searching known queues first; see :func:`find_job`."""
    config = app._config
    named = [config.default_queue, *known, *(task.options.queue or "" for task in app.tasks.values())]
    with app._broker.pool.client() as client:
        likely = sorted({*named, *_app_names(_worker_queues(client, config), config)} - {""})
        if queues := _with_job(client, app, job_id, likely):
            return queues
        others = set(_app_names(_scan_queues(client, config), config)) - set(likely)
        return _with_job(client, app, job_id, sorted(others))


def _with_job(client: SyncClient, app: App, job_id: str, queues: list[str]) -> list[str]:
    calls = [command("EXISTS", app._broker.keys(queue).job(job_id), parse_reply=bool) for queue in queues]
    return [queue for queue, exists in zip(queues, client.run_many(calls), strict=True) if exists] if calls else []


def _worker_queues(client: SyncClient, config: Config) -> set[str]:
    try:
        return client.run(worker_queues(config.prefix))
    except BrokerAuthError:  # CLIENT LIST is forbidden
        return set()


def _scan_queues(client: SyncClient, config: Config) -> set[str]:
    """Return all queues under the prefix. Redis has no list of them, so its keys are scanned, up to a limit."""
    queues, is_complete = scan_up_to(client, lambda cursor: scan_queues(config.prefix, cursor), MAX_PAGES)
    if not is_complete:
        click.echo(
            f"Redis has more than the {MAX_PAGES * 1000:,} keys that were scanned for queue names, so there may be "
            "more queues: choose one with --queue",
            err=True,
        )
    return queues


def _app_names(bullmq_names: Iterable[str], config: Config) -> list[str]:
    """Return the queues' names in the app; queues whose names are invalid in bulltask are left out."""
    named = []
    for name in bullmq_names:
        bare = name_in_app(name, hash_tag=config.queue_hash_tag)
        with suppress(InvalidNameError):  # another client's, with control characters
            if bullmq_name(check_queue_name(bare), hash_tag=config.queue_hash_tag) == name:
                named.append(bare)
    return named


def _moment(ms: int | None) -> datetime | None:
    try:
        return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # a hash may contain any value
        return None
