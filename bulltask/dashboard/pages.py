"""What each page of the dashboard shows, read from Redis; nothing here knows of HTTP or HTML.

The answers are those of the commands (``bulltask queues``, ``why``, ``jobs``, ``failures``, ``workers``, ``schedule``):
both call the same functions of :mod:`bulltask.queue`. What may not be read is ``None``, never nothing.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

from bulltask.app import App
from bulltask.config.urls import redact_secrets
from bulltask.dashboard.access import Audit, AuditEntry
from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import BulltaskError
from bulltask.jobs.names import address_of, name_in_app
from bulltask.jobs.payloads import describe, is_envelope
from bulltask.queue import Job
from bulltask.queue.overview import Fleet, QueueOverview, find_queues, read_fleet, read_overview
from bulltask.queue.reasons import Explanation
from bulltask.queue.search import FailureGroup, JobFilter, JobSearch
from bulltask.transport.call import QueueKeys

__all__ = ["JobPage", "JobRow", "Overview", "Pages", "QueuePage"]

R = TypeVar("R")

STATES: Final = ("waiting", "active", "delayed", "waiting-children", "failed", "completed")
"""The states in which a queue's jobs are listed; ``waiting`` includes prioritized jobs and due ones."""

PER_PAGE: Final = 50
SCANNED: Final = 20_000
"""How many jobs of a queue a search reads; ``bulltask jobs`` and the lake search further."""

AUDIT_ENTRIES: Final = 200

_SCAN_S: Final = 600
_COST: Final = 0.01
"""The share of one core that a page which stays open may cost: it is read again after a hundred times as long."""
_MIN_AGE_S: Final = 2.0
_HISTORY: Final = 90
_NEWEST_FAILED: Final = 500
_FAILURE_QUEUES: Final = 50
_LOG_LINES: Final = 200


@dataclass(frozen=True, slots=True)
class Sample:
    """How full a queue was at a time."""

    at_s: float
    waiting: int
    finished_per_s: float | None


@dataclass(frozen=True, slots=True)
class Overview:
    """All queues.

    Attributes:
        queues: The queues, by name.
        history: Their last samples since this process shows the dashboard.
        scanned_all: Whether all keys were scanned for queues that only Node.js uses.
        now_ms: The server's time.
        server: The URL of Redis, without its password.
    """

    queues: Sequence[QueueOverview]
    history: Mapping[str, Sequence[Sample]]
    scanned_all: bool
    now_ms: int
    server: str


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job in a list."""

    id: str
    name: str
    state: str
    since_ms: int
    reason: str


@dataclass(frozen=True, slots=True)
class QueuePage:
    """A queue.

    Attributes:
        overview: How full it is.
        explanation: Why it does not move.
        jobs: Some of its jobs.
        counts: How many jobs each state has.
        scanned: How many jobs the search has read.
        has_more: Whether more jobs follow.
    """

    overview: QueueOverview
    explanation: Explanation
    jobs: Sequence[JobRow]
    counts: Mapping[str, int]
    scanned: int
    has_more: bool
    now_ms: int


@dataclass(frozen=True, slots=True)
class JobPage:
    """A job, why it does not run, its log, and its family."""

    job: Job
    state: str
    explanation: Explanation
    logs: Sequence[str]
    log_count: int
    children: Mapping[str, int]
    parent: tuple[str, str] | None
    data: str
    now_ms: int


@dataclass(slots=True)
class _Answer:
    """What was read for a page, which other tabs with this page are shown, too."""

    value: Any = None
    error: BaseException | None = None
    read_at_s: float = -1e9
    took_s: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def is_fresh(self) -> bool:
        return mono_s() - self.read_at_s < max(_MIN_AGE_S, self.took_s / _COST)


class Pages:
    """Reads what pages show. Methods may be called by several threads; they are as slow as Redis.

    However many tabs show a page, it is read once in two seconds, and less often if reading takes long.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._answers: dict[tuple[object, ...], _Answer] = {}
        self._scanned: set[str] = set()
        self._scanned_all = True
        self._scan_at_s = 0.0
        self._history: dict[str, deque[Sample]] = {}

    def _once(self, key: tuple[object, ...], read: Callable[[], R]) -> R:
        """Return what was read for this key a moment ago, or read it; threads that ask at the same time wait."""
        if len(self._answers) > 1_000:
            self._answers.clear()
        answer = self._answers.setdefault(key, _Answer())
        with answer.lock:
            if not answer.is_fresh:
                started_s = mono_s()
                try:
                    answer.value, answer.error = read(), None
                except BulltaskError as exc:
                    answer.error = exc
                answer.read_at_s = mono_s()
                answer.took_s = answer.read_at_s - started_s
            if answer.error is not None:
                raise answer.error
            found: R = answer.value
            return found

    def forget(self) -> None:
        """Read everything again when it is next asked for, because something was changed."""
        for answer in self._answers.values():
            answer.read_at_s = -1e9

    # ---- pages ----

    def overview(self) -> Overview:
        """Read how full all queues are."""
        return self._once(("overview",), self._read_overview)

    def _read_overview(self) -> Overview:
        app = self._app
        with app._broker.pool.client() as client:
            client.connect()
            is_due = mono_s() >= self._scan_at_s
            known = {app._broker.keys(name).name for name in self._named()} | self._scanned
            found = find_queues(client, app._config.prefix, known, scan=is_due)
            if is_due:
                self._scanned, self._scanned_all = set(found.names), found.scanned_all
                self._scan_at_s = mono_s() + _SCAN_S
            now_ms = app._broker.clock.now_ms()
            overview = read_overview(client, [self._keys(name) for name in found.names], now_ms)
        for queue in overview:
            self._remember(queue)
        history = {name: tuple(samples) for name, samples in self._history.items()}
        return Overview(overview, history, self._scanned_all, now_ms, app._broker.endpoint.safe_url)

    def _named(self) -> Iterator[str]:
        """Yield the queues that the app names."""
        for task in self._app.tasks.values():
            if task._options.queue:
                yield task._options.queue
        yield from self._app._config.queues or ()

    def _keys(self, name: str) -> QueueKeys:
        config = self._app._config
        return QueueKeys(config.prefix, name, name_in_app(name, hash_tag=config.queue_hash_tag))

    def _remember(self, queue: QueueOverview) -> None:
        if isinstance(queue.figures, BulltaskError):
            return
        figures, window_ms = queue.figures, queue.figures.window_ms
        rate = None if window_ms is None else figures.finished * 1000 / window_ms
        samples = self._history.setdefault(queue.keys.name, deque(maxlen=_HISTORY))
        samples.append(Sample(mono_s(), figures.waiting, rate))

    def fleet(self) -> tuple[Fleet, int]:
        """Read the workers of all queues; the second value is the server's time."""
        return self._once(("fleet",), self._read_fleet)

    def _read_fleet(self) -> tuple[Fleet, int]:
        queues = [queue.keys for queue in self.overview().queues]
        with self._app._broker.pool.client() as client:
            client.connect()
            now_ms = self._app._broker.clock.now_ms()
            return read_fleet(client, queues, now_ms), now_ms

    def failures(self) -> Sequence[FailureGroup]:
        """Read the failed jobs of all queues, grouped by task and error: each queue's newest ones."""
        return self._once(("failures",), self._read_failures)

    def _read_failures(self) -> Sequence[FailureGroup]:
        failed = [
            queue.keys.queue
            for queue in self.overview().queues
            if not isinstance(queue.figures, BulltaskError) and queue.figures.failed
        ]
        read = [self._app.queue(name).group_failures(scan=_NEWEST_FAILED) for name in failed[:_FAILURE_QUEUES]]
        return sorted((group for found in read for group in found.groups), key=lambda group: -group.count)

    def audit(self) -> Sequence[AuditEntry]:
        """Read the newest entries of the audit log."""
        return self._once(("audit",), lambda: Audit(self._app).newest(AUDIT_ENTRIES))

    def queue(self, name: str, state: str, text: str, page: int) -> QueuePage:
        """Read a queue and some of its jobs.

        Args:
            name: The queue's name in the app.
            state: One of :data:`STATES`.
            text: Part of a job's id, name, data or failure reason; ``""`` for all jobs.
            page: Which page of jobs, from 0.
        """
        return self._once(("queue", name, state, text, page), lambda: self._read_queue(name, state, text, page))

    def _read_queue(self, name: str, state: str, text: str, page: int) -> QueuePage:
        queue = self._app.queue(name)
        with self._app._broker.pool.client() as client:
            client.connect()
            now_ms = self._app._broker.clock.now_ms()
            [overview] = read_overview(client, [self._app._broker.keys(name)], now_ms)
        explanation = queue.explain()
        counts = queue.get_job_counts()
        rows, scanned, has_more = self._find(name, state, text, page)
        return QueuePage(overview, explanation, rows, counts, scanned, has_more, now_ms)

    def _find(self, name: str, state: str, text: str, page: int) -> tuple[list[JobRow], int, bool]:
        """Return a page of jobs, how many were read, and whether more follow."""
        wanted = JobFilter(states=(state,), text=text or None)
        context = self._app._queue_context(name, None)  # noqa: SLF001 - a public search would serve programs, too
        search = JobSearch(context, wanted, more=("name", "timestamp", "finishedOn", "failedReason"))
        found: list[JobRow] = []
        last = (page + 1) * PER_PAGE
        while len(found) <= last and search.scanned < SCANNED:
            matches = context.run(search.next())
            if matches is None:
                break
            found += [
                JobRow(match.id, match.name, match.state, match.since_ms, redact_secrets(match.reason))
                for match in matches
            ]
        return found[last - PER_PAGE : last], search.scanned, len(found) > last

    def job(self, queue: str, job_id: str) -> JobPage | None:
        """Read a job; ``None`` if there is none with this id."""
        return self._once(("job", queue, job_id), lambda: self._read_job(queue, job_id))

    def _read_job(self, name: str, job_id: str) -> JobPage | None:
        job = self._app.queue(name).get_job(job_id)
        if job is None:
            return None
        logs = job.get_logs(0, _LOG_LINES - 1, asc=False)
        explanation = job.explain()
        children = {kind: number for kind, number in job.get_dependencies_count().items() if number}
        return JobPage(
            job=job,
            state=str(explanation.state or "unknown"),
            explanation=explanation,
            logs=tuple(reversed(logs.lines)),
            log_count=logs.count,
            children=children,
            parent=self._parent(job),
            data=describe(job.data) if is_envelope(job.data) else job.data_text,
            now_ms=self._app._now_ms(),
        )

    def _parent(self, job: Job) -> tuple[str, str] | None:
        """Return the queue, by its name in the app, and the id of a job's parent."""
        if job.parent_key is None:
            return None
        config = self._app._config
        _, name, job_id = address_of(job.parent_key, config.prefix)
        return name_in_app(name, hash_tag=config.queue_hash_tag), job_id
