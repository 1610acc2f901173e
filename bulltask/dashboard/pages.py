"""What each page of the dashboard shows, read from Redis; nothing here knows of HTTP or HTML.

The answers are those of the commands (``bulltask queues``, ``why``, ``jobs``, ``failures``, ``workers``, ``schedule``):
both call the same functions of :mod:`bulltask.queue`. What may not be read is ``None``, never an empty list or 0.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta, tzinfo
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

from bulltask.app import App
from bulltask.dashboard.changes import Changes
from bulltask.jobs import codec
from bulltask.jobs.clock import mono_s, zone_of
from bulltask.jobs.errors import BrokerAuthError, BulltaskError, ConfigError, InvalidNameError
from bulltask.jobs.names import address_of, name_in_app
from bulltask.jobs.payloads import describe, is_envelope
from bulltask.jobs.schedules import Repeat, Scheduler
from bulltask.lake.formatting import pluralize
from bulltask.queue import FoundJob, FoundJobs, Job, Queue
from bulltask.queue.flows import Workflow, read_workflow
from bulltask.queue.overview import Fleet, QueueOverview, find_queues, read_fleet, read_overview
from bulltask.queue.reasons import Explanation
from bulltask.queue.schedulers import SCHEDULING_ERRORS, listing_order
from bulltask.queue.search import FailureGroup, LastRun, Match, last_runs, recent_jobs
from bulltask.transport.call import QueueKeys, SyncClient, command
from bulltask.transport.operation import Operation
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.queue import QueueFigures
from bulltask.transport.streams import Entry, id_parts, read_back, read_now

if TYPE_CHECKING:
    from bulltask.dashboard.access import AuditEntry
    from bulltask.lake import History
    from bulltask.lake.storage import Lake

__all__ = [
    "Charts",
    "Filter",
    "JobPage",
    "Overview",
    "Pages",
    "QueuePage",
    "ScheduleRow",
    "Schedules",
    "SearchPage",
    "Span",
]

R = TypeVar("R")

STATES: Final = ("waiting", "active", "delayed", "waiting-children", "failed", "completed")
"""The states in which a queue's jobs are listed; ``waiting`` includes prioritized jobs and due ones."""

PER_PAGE: Final = 50
_SEARCH_S: Final = 0.15
"""How long a page searches for jobs. A search that is continued goes on while its page is open."""
_SEARCHED_AT_ONCE: Final = 500
_ASKED_S: Final = 10.0
"""For how long a search goes on after its page was last read."""
_MAX_SEARCHES: Final = 20
_FOUND_PER_QUEUE: Final = 10
_MAX_FOUND: Final = 100
_MAX_EXACT: Final = 100
_SCHEDULES_PER_QUEUE: Final = 200
_MAX_SCHEDULES: Final = 1_000
_NEXT_TIMES: Final = 5
_RECENT_RUNS: Final = 20

AUDIT_ENTRIES: Final = 200

_SCAN_S: Final = 600
_SCAN_WAIT_S: Final = 0.1
"""How long the overview waits for a scan of all keys, which takes a second if there are hundreds of thousands."""
COST: Final = 0.01
"""The share of one core that a page which stays open may cost: it is read again after a hundred times as long."""
MIN_AGE_S: Final = 2.0
_WAIT_S: Final = 0.05
"""How long a view of many queues waits until they are read again; then it shows what was read before."""
_MANY_QUEUES: Final = 30
_HISTORY: Final = 120
_HISTORY_MS: Final = 3_600_000
_UNSEEN_MS: Final = 600_000
_ALL: Final = "all queues"
_SERIES: Final = 5
"""How many queues a chart shows: those with the most jobs."""
_MINUTES: Final = 180
_PAST_HOURS: Final = 48
_PERCENTILES: Final = (50, 95, 99)
_MAX_NODES: Final = 1_000
_EVENTS: Final = 1_000
NEWEST_FAILED: Final = 500
FAILURE_QUEUES: Final = 50
_LOG_LINES: Final = 200


@dataclass(frozen=True, slots=True)
class Sample:
    """How full a queue was at a time.

    Attributes:
        waiting: How many jobs waited.
        active: How many jobs ran.
        oldest_ms: For how long the oldest job had waited; ``None`` if it is unknown.
        finished_per_s: How many jobs finished per second, in the minute before.
    """

    waiting: int
    active: int
    oldest_ms: int | None
    finished_per_s: float | None


Moment = tuple[int, Mapping[str, Sample]]
"""The server's time, and how full each queue was; ``""`` is all of them."""


class _History:
    """Samples of the last hour or two, at most :data:`_HISTORY`, so that there is room for thousands of queues."""

    def __init__(self) -> None:
        self._gap_ms = 0.0
        self.moments: list[Moment] = []

    def add(self, at_ms: int, samples: Mapping[str, Sample]) -> None:
        """Add samples; they replace the last ones, if these are too near to those before.

        If there are too many, every second one goes, or the oldest.
        """
        moments = [moment for moment in self.moments if moment[0] >= at_ms - 2 * _HISTORY_MS]
        if len(moments) > 1 and at_ms - moments[-2][0] < self._gap_ms:
            moments.pop()
        moments.append((at_ms, samples))
        if len(moments) > _HISTORY:
            span_ms = at_ms - moments[0][0]
            if span_ms >= _HISTORY_MS:
                del moments[0]
            else:
                del moments[-2::-2]
                self._gap_ms = span_ms / len(moments)
        self.moments = moments


@dataclass(frozen=True, slots=True)
class Span:
    """A time that a job spent in a state.

    Attributes:
        state: The state; ``stalled`` and ``removed`` are moments.
        from_ms: When it began.
        until_ms: When it ended; ``None`` if it has not.
        start: How much of the job's time had passed, from 0 to 1.
        length: How much of the job's time it took, from 0 to 1.
        note: What else is known of it.
    """

    state: str
    from_ms: int
    until_ms: int | None
    start: float
    length: float
    note: str = ""


@dataclass(frozen=True, slots=True)
class Charts:
    """The figures of one queue, or of several, over time.

    Attributes:
        queues: The queues that are shown.
        times_ms: The times of the samples since this process shows the dashboard.
        waiting: How many jobs waited, by queue; and in all, if there are several.
        oldest_s: For how long the oldest job had waited.
        rate: How many jobs finished per second.
        active: How many jobs ran.
        left_out: How many queues are not shown.
        minutes_ms: The times of BullMQ's metrics; empty if no worker writes them.
        per_minute: How many jobs completed and failed in each minute.
    """

    queues: Sequence[str]
    times_ms: Sequence[int]
    waiting: Mapping[str, Sequence[float | None]]
    oldest_s: Mapping[str, Sequence[float | None]]
    rate: Mapping[str, Sequence[float | None]]
    active: Mapping[str, Sequence[float | None]]
    left_out: int
    minutes_ms: Sequence[int]
    per_minute: Mapping[str, Sequence[float | None]]


@dataclass(frozen=True, slots=True)
class Overview:
    """All queues.

    Attributes:
        queues: The queues, by name.
        history: Samples of the last hour or two, as far as the dashboard was open.
        scanned_all: Whether all keys were scanned for queues that only Node.js uses; ``None``: they are being scanned.
        now_ms: The server's time.
        server: The URL of Redis, without its password.
    """

    queues: Sequence[QueueOverview]
    history: Sequence[Moment]
    scanned_all: bool | None
    now_ms: int
    server: str

    def choose(self, text: str, figure: str | None) -> list[QueueOverview]:
        """Return the queues whose names contain a text, by name, or those first that have most of a figure."""
        found = [queue for queue in self.queues if text.casefold() in queue.keys.queue.casefold()]
        if figure is not None:
            found.sort(key=lambda queue: getattr(queue.figures, figure, None) or 0, reverse=True)  # it may be an error
        return found

    def waiting(self, name: str) -> list[int]:
        """Return how many jobs a queue, by its name in BullMQ, had waiting, over time."""
        return [samples[name].waiting for _, samples in self.history if name in samples]


@dataclass(frozen=True, slots=True)
class Filter:
    """Which jobs of a queue are listed; see :meth:`bulltask.queue.Queue.search`."""

    state: str = "waiting"
    text: str | None = None
    task: str | None = None
    error_fingerprint: str | None = None

    def __str__(self) -> str:
        return ", ".join(f"{name} {value!r}" for name, value in self.fields().items())

    def fields(self) -> dict[str, str]:
        """Return the names and values that are given, for addresses and forms."""
        given = {"text": self.text, "task": self.task, "error": self.error_fingerprint}
        return {"state": self.state} | {name: value for name, value in given.items() if value is not None}

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Filter:
        """Return the filter of an address or form: the opposite of :meth:`fields`.

        Raises ``ConfigError`` if a value is not valid.
        """
        state = str(given.get("state", "") or "waiting")
        if state not in STATES:
            raise ConfigError(f"there is no state {state!r:.100}")
        text, task = (str(given.get(name, "")) or None for name in ("text", "task"))
        error = given.get("error")  # "" is the error of jobs that have none
        return cls(state, text, task, None if error is None else str(error))


@dataclass(frozen=True, slots=True)
class QueuePage:
    """A queue.

    Attributes:
        overview: How full it is.
        explanation: Why it does not move.
        found: Some of its jobs.
        counts: How many jobs each state has.
        limited_s: For how many more seconds a rate limit stops it, 0 if none does.
        is_searching: Whether further jobs are being searched.
    """

    overview: QueueOverview
    explanation: Explanation
    found: FoundJobs
    counts: Mapping[str, int]
    limited_s: float
    is_searching: bool


@dataclass(frozen=True, slots=True)
class SearchPage:
    """What was found in all queues.

    Attributes:
        exact: The queues that have a job with exactly this id.
        jobs: Jobs that have the text in their id, name, data or error.
        scanned: How many jobs were read for them.
        searched: How many queues were searched for them.
        queues: How many queues there are.
    """

    exact: Sequence[str]
    jobs: Sequence[FoundJob]
    scanned: int
    searched: int
    queues: int


@dataclass(frozen=True, slots=True)
class ScheduleRow:
    """A schedule, its last run, and its next times, none if it is paused.

    ``recent`` are its last runs if only this schedule is shown.
    """

    queue: str
    item: Scheduler
    last: LastRun | None
    next_ms: Sequence[int]
    recent: Sequence[Match] = ()


@dataclass(frozen=True, slots=True)
class Schedules:
    """The schedules of all queues, the next one first, the paused ones last; ``total`` is how many there are."""

    rows: Sequence[ScheduleRow]
    total: int


@dataclass(frozen=True, slots=True)
class Past:
    """What the lake says of the last hours.

    Attributes:
        times_ms: When the hours began.
        ended: How many attempts ended, by outcome.
        wait_s: For how long the attempts had waited, by percentile; ``None`` in hours in which none ended.
        run_s: How long they took.
    """

    times_ms: Sequence[int]
    ended: Mapping[str, Sequence[float | None]]
    wait_s: Mapping[str, Sequence[float | None]]
    run_s: Mapping[str, Sequence[float | None]]


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
    timeline: Sequence[Span]
    is_timeline_complete: bool
    now_ms: int


class _Answer:
    """What was read for a page, which other tabs with this page are shown, too."""

    def __init__(self) -> None:
        self._value: Any = None
        self._error: Exception | None = None
        self._read_at_s = -1e9
        self._took_s = 0.0
        self._is_forgotten = False
        self._lock = threading.Lock()
        self._reader: threading.Thread | None = None

    def get(self, read: Callable[[], R], *, slow: bool) -> R:
        """Return what was read a moment ago, or read it; threads that ask at the same time wait.

        If it is ``slow`` to read, the last answer is returned, unless it is old, and a thread reads the next one.
        """
        if slow and self._age_s < 2 * self._kept_s:
            if not self._is_fresh and (self._reader is None or not self._reader.is_alive()):
                self._reader = threading.Thread(target=self._read, args=(read,), name="bulltask-reader", daemon=True)
                self._reader.start()
                self._reader.join(_WAIT_S)
        else:
            self._read(read)
        if self._error is not None:
            raise self._error
        value: R = self._value
        return value

    def forget(self) -> None:
        """Read it again when it is next asked for."""
        self._is_forgotten = True

    @property
    def _age_s(self) -> float:
        return mono_s() - self._read_at_s

    @property
    def _kept_s(self) -> float:
        return max(MIN_AGE_S, self._took_s / COST)

    @property
    def _is_fresh(self) -> bool:
        return not self._is_forgotten and self._age_s < self._kept_s

    def _read(self, read: Callable[[], Any]) -> None:
        with self._lock:
            if self._is_fresh:
                return
            self._is_forgotten = False
            started_s = mono_s()
            try:
                self._value = read()
                self._error = None
            except Exception as exc:  # noqa: BLE001 - raised to all who ask
                self._error = exc
            self._read_at_s = mono_s()
            self._took_s = self._read_at_s - started_s


class _Search:
    """A search for a page of a queue's jobs. With a cursor, it goes on in a thread while its page is open."""

    def __init__(self, queue: Queue, wanted: Filter, cursor: str | None) -> None:
        self.found = FoundJobs((), 0, 0, cursor)
        self.is_running = False
        self._queue = queue
        self._wanted = wanted
        self._goes_on = cursor is not None
        self._is_done = False
        self._asked_s = 0.0

    def run_until(self, until_s: float) -> None:
        """Search for about so long; if the search goes on, a thread does it."""
        self._asked_s = mono_s()
        if self.is_running:
            return
        while not self._is_done:
            self._step()
            if mono_s() >= until_s:
                break
        if self._goes_on and not self._is_done:
            self.is_running = True
            threading.Thread(target=self._run, name="bulltask-search", daemon=True).start()

    def _run(self) -> None:
        try:
            while not self._is_done and mono_s() < self._asked_s + _ASKED_S:
                self._step()
        except BulltaskError:
            pass  # the page says so when it is read again
        finally:
            self.is_running = False

    def _step(self) -> None:
        """Read a part of the jobs."""
        before, wanted = self.found, self._wanted
        found = self._queue.search(
            states=wanted.state,
            text=wanted.text,
            task=wanted.task,
            error_fingerprint=wanted.error_fingerprint,
            limit=PER_PAGE - len(before.jobs),
            scan=_SEARCHED_AT_ONCE,
            cursor=before.cursor,
        )
        jobs = (*before.jobs, *found.jobs)
        self._is_done = found.cursor is None or len(jobs) >= PER_PAGE
        self.found = FoundJobs(jobs, before.scanned + found.scanned, found.total, found.cursor)


class Pages:
    """Reads what pages show. Methods may be called by several threads; they are as slow as Redis.

    However many tabs show a page, it is read once in two seconds, and less often if reading takes long.
    """

    def __init__(self, app: App, lake: str | Path | Lake | None = None) -> None:
        self.app = app
        self.changes = Changes(app)
        self.has_history = lake is not None
        self._lake = lake
        self._history_lock = threading.Lock()
        self._lake_history: History | None = None
        self._answers: dict[tuple[object, ...], _Answer] = {}
        self._searches: dict[tuple[object, ...], _Search] = {}
        self._queue_count = 0
        self._keys_of: dict[str, QueueKeys] = {}
        self._scanned: tuple[str, ...] = ()
        self._scanned_all: bool | None = None
        self._scan_at_s = 0.0
        self._history = _History()

    def _once(self, key: tuple[object, ...], read: Callable[[], R], *, of_all: bool = False) -> R:
        """Return what was read for this key a moment ago, or read it; ``of_all``: it is read of all queues."""
        if len(self._answers) > 1_000:
            self._answers.clear()
        slow = of_all and self._queue_count > _MANY_QUEUES
        return self._answers.setdefault(key, _Answer()).get(read, slow=slow)

    def forget(self) -> None:
        """Read everything again when it is next asked for, because something was changed."""
        for answer in list(self._answers.values()):
            answer.forget()
        self._searches = {key: search for key, search in self._searches.items() if search.is_running}

    @contextmanager
    def _client(self) -> Iterator[SyncClient]:
        """Lend a connection, which has set the clock."""
        with self.app._broker.pool.client() as client:
            client.connect()
            yield client

    # ---- pages ----

    def overview(self) -> Overview:
        """Read how full all queues are."""
        return self._once(("overview",), self._read_overview, of_all=True)

    def _read_overview(self) -> Overview:
        app = self.app
        with self._client() as client:
            if mono_s() >= self._scan_at_s:
                self._scan_at_s = mono_s() + _SCAN_S
                scan = threading.Thread(target=self._scan, name="bulltask-scan", daemon=True)
                scan.start()
                scan.join(_SCAN_WAIT_S)
            named = {*app.tasks.queues, *(app._config.queues or ())}
            known = {*(app._broker.keys(name).name for name in named), *self._scanned}
            found = find_queues(client, app._config.prefix, known, scan=False)
            self._queue_count = len(found.names)
            now_ms = app._broker.clock.now_ms()
            overview = read_overview(client, [self._keys(name) for name in found.names], now_ms)
        figures = {queue.keys.name: queue.figures for queue in overview}
        samples = {name: _sample(its) for name, its in figures.items() if not isinstance(its, BulltaskError)}
        self._history.add(now_ms, {"": _total(samples.values()), **samples})
        return Overview(overview, self._history.moments, self._scanned_all, now_ms, app._broker.endpoint.safe_url)

    def _scan(self) -> None:
        """Scan all keys for queues that only Node.js uses."""
        try:
            with self._client() as client:
                found = find_queues(client, self.app._config.prefix)
            self._scanned = found.names
            self._scanned_all = found.scanned_all
        except BulltaskError:
            self._scan_at_s = 0.0  # the page says why Redis cannot be read

    def _keys(self, name: str) -> QueueKeys:
        """Return a queue by its name in BullMQ; the names of its keys are made once, because there may be thousands."""
        if (keys := self._keys_of.get(name)) is None:
            config = self.app._config
            keys = QueueKeys(config.prefix, name, name_in_app(name, hash_tag=config.queue_hash_tag))
            self._keys_of[name] = keys
        return keys

    def charts(self, queue: str | None) -> Charts:
        """Read the figures of a queue over time, or of those queues that have the most jobs."""
        return self._once(("charts", queue), lambda: self._read_charts(queue))

    def _read_charts(self, queue: str | None) -> Charts:
        overview = self.overview()
        busy = sorted(overview.queues, key=_size, reverse=True) if queue is None else overview.queues
        names = [one.keys for one in busy if queue is None or one.keys.queue == queue]
        shown = names[:_SERIES]
        moments: list[Moment] = []
        for moment in overview.history:
            if moments and moment[0] - moments[-1][0] > _UNSEEN_MS:
                moments.append((moments[-1][0] + 1, {}))  # no line through a time in which nothing was read
            moments.append(moment)

        def lines(read: Callable[[Sample], float | None]) -> dict[str, list[float | None]]:
            names_of_lines = {keys.queue: keys.name for keys in shown}
            if len(names) > 1:
                names_of_lines = {_ALL: "", **names_of_lines}
            return {
                title: [read(found[name]) if name in found else None for _, found in moments]
                for title, name in names_of_lines.items()
            }

        minutes, per_minute = ([], {}) if queue is None else self._read_metrics(queue, overview.now_ms)
        return Charts(
            queues=[keys.queue for keys in shown],
            times_ms=[at_ms for at_ms, _ in moments],
            waiting=lines(lambda one: one.waiting),
            oldest_s=lines(lambda one: None if one.oldest_ms is None else one.oldest_ms / 1000),
            rate=lines(lambda one: one.finished_per_s),
            active=lines(lambda one: one.active),
            left_out=len(names) - len(shown),
            minutes_ms=minutes,
            per_minute=per_minute,
        )

    def _read_metrics(self, name: str, now_ms: int) -> tuple[list[int], dict[str, list[float | None]]]:
        """Read BullMQ's metrics: the minutes, and how many jobs completed and failed in each."""
        queue, found = self.app.queue(name), dict[str, list[int]]()
        for kind in ("completed", "failed"):
            metrics = queue.get_metrics(kind, 0, _MINUTES - 1)
            if metrics.previous_ms:
                # The minute of the last job is not stored yet, nor are those since then, in which none has finished.
                idle = min(_MINUTES, max(0, now_ms // 60_000 - metrics.previous_ms // 60_000))
                found[kind] = [0] * idle + [metrics.count - metrics.previous_count, *metrics.data]
        length = min(_MINUTES, max(map(len, found.values()), default=0))
        if not length:
            return [], {}
        last_ms = now_ms - now_ms % 60_000
        times = [last_ms - 60_000 * back for back in reversed(range(length))]
        padded = {kind: (data + [0] * length)[:length][::-1] for kind, data in found.items()}
        return times, {kind: [float(value) for value in data] for kind, data in padded.items()}

    @property
    def history(self) -> History:
        """The jobs in the lake; raises ``ConfigError`` if there is none."""
        if self._lake is None:
            raise ConfigError("the dashboard was started without a lake")
        from bulltask.lake import History  # noqa: PLC0415 - slow, and needs an extra

        with self._history_lock:
            if self._lake_history is None:
                self._lake_history = History(self._lake)
            return self._lake_history

    def past(self, queue: str | None) -> Past:
        """Read how many attempts ended in each of the last hours, and how long they took, from the lake."""
        return self._once(("past", queue), lambda: self._read_past(queue))

    def _read_past(self, queue: str | None) -> Past:
        history, now = self.history, datetime.fromtimestamp(self.app._now_ms() / 1000, UTC)
        first = now.replace(minute=0, second=0, microsecond=0) - timedelta(hours=_PAST_HOURS - 1)
        hours = [first + timedelta(hours=number) for number in range(_PAST_HOURS)]
        ended = {}
        for outcome in ("completed", "failed"):
            counts = {point.at: point.attempts for point in history.attempt_counts(outcome, queue=queue, since=first)}
            ended[outcome] = [counts.get(hour, 0) for hour in hours]
        durations = {}
        for metric in ("wait", "run"):
            found = {
                point.at: point.percentiles for point in history.latency(metric, _PERCENTILES, queue=queue, since=first)
            }
            durations[metric] = {
                f"p{number}": [found[hour][number] if hour in found else None for hour in hours]
                for number in _PERCENTILES
            }
        return Past([int(hour.timestamp() * 1000) for hour in hours], ended, durations["wait"], durations["run"])

    def workflow(self, queue: str, job_id: str) -> Workflow | None:
        """Read the workflow of a job: the jobs that wait for it and for which it waits; ``None`` if it is unknown."""
        return self._once(("workflow", queue, job_id), lambda: self._read_workflow(queue, job_id))

    def _read_workflow(self, queue: str, job_id: str) -> Workflow | None:
        read = read_workflow(lambda: self.app._broker, queue, job_id, _MAX_NODES)
        return self.app.queue(queue).context.run(read)

    def fleet(self) -> tuple[Fleet, int]:
        """Read the workers of all queues; the second value is the server's time."""
        return self._once(("fleet",), self._read_fleet, of_all=True)

    def _read_fleet(self) -> tuple[Fleet, int]:
        queues = [queue.keys for queue in self.overview().queues]
        with self._client() as client:
            now_ms = self.app._broker.clock.now_ms()
            return read_fleet(client, queues, now_ms), now_ms

    def failures(self) -> Sequence[FailureGroup]:
        """Read the failed jobs of all queues, grouped by task and error: each queue's newest ones."""
        return self._once(("failures",), self._read_failures, of_all=True)

    def _read_failures(self) -> Sequence[FailureGroup]:
        failed = [
            queue.keys.queue
            for queue in self.overview().queues
            if not isinstance(queue.figures, BulltaskError) and queue.figures.failed
        ]
        read = []
        for name in failed[:FAILURE_QUEUES]:
            with suppress(InvalidNameError):  # other clients have named it; the overview shows it
                read.append(self.app.queue(name).group_failures(scan=NEWEST_FAILED))
        return sorted((group for found in read for group in found.groups), key=lambda group: -group.count)

    def audit(self) -> Sequence[AuditEntry]:
        """Read the newest entries of the audit log."""
        from bulltask.dashboard.access import Audit  # noqa: PLC0415 - needs an extra that bulltask top does not need

        return self._once(("audit",), lambda: Audit(self.app).newest(AUDIT_ENTRIES))

    def queue(self, name: str, wanted: Filter, cursor: str | None) -> QueuePage:
        """Read a queue and some of its jobs; ``cursor`` is that of the previous page."""
        return self._once(("queue", name, wanted, cursor), lambda: self._read_queue(name, wanted, cursor))

    def _read_queue(self, name: str, wanted: Filter, cursor: str | None) -> QueuePage:
        until_s, queue = mono_s() + _SEARCH_S, self.app.queue(name)
        with self._client() as client:
            now_ms = self.app._broker.clock.now_ms()
            [overview] = read_overview(client, [self.app._broker.keys(name)], now_ms)
        if isinstance(overview.figures, BulltaskError):
            raise overview.figures
        explanation, limited_s = queue.explain(), queue.get_rate_limit_ttl()
        search = self._searches.get((name, wanted, cursor)) or _Search(queue, wanted, cursor)
        search.run_until(until_s)
        if search.is_running:
            self._searches[name, wanted, cursor] = search
            for old in list(self._searches)[:-_MAX_SEARCHES]:
                self._searches.pop(old, None)
        counts = _counts(overview.figures)
        return QueuePage(overview, explanation, search.found, counts, limited_s, search.is_running)

    def search(self, text: str) -> SearchPage:
        """Find jobs in all queues: one with this id, or with this text among the newest jobs of each state."""
        return self._once(("search", text), lambda: self._search(text))

    def _search(self, text: str) -> SearchPage:
        until_s, queues = mono_s() + _SEARCH_S, self.overview().queues
        with self._client() as client:
            # Other keys of a queue, such as "meta", are no jobs: they have no name, or are no hash.
            calls = [job_fields(queue.keys, text, ("name",)) for queue in queues if text]
            replies = client.try_many(calls) if calls else []
        exact: list[str] = []
        for queue, reply in zip(queues, replies, strict=bool(text)):
            if isinstance(reply, BrokerAuthError):
                raise reply
            if not isinstance(reply, BulltaskError) and reply[0] is not None:
                exact.append(queue.keys.queue)
        jobs, scanned, searched = list[FoundJob](), 0, 0
        for queue in queues if text and not exact else ():
            if mono_s() >= until_s or len(jobs) >= _MAX_FOUND:
                break
            searched += 1
            for state in _states_with_jobs(queue):
                if mono_s() >= until_s:
                    break
                page = self.app.queue(queue.keys.queue).search(
                    states=state, text=text, limit=_FOUND_PER_QUEUE, scan=_SEARCHED_AT_ONCE
                )
                jobs += page.jobs
                scanned += page.scanned
        return SearchPage(exact[:_MAX_EXACT], jobs[:_MAX_FOUND], scanned, searched, len(queues))

    def schedules(self) -> Schedules:
        """Read the schedules of all queues."""
        return self._once(("schedules",), self._read_schedules, of_all=True)

    def _read_schedules(self) -> Schedules:
        queues = [queue.keys for queue in self.overview().queues]
        with self._client() as client:
            stored = [key for keys in queues for key in (keys.repeat, keys.paused_schedulers)]
            counts = client.run_many([command("ZCARD", key, parse_reply=int) for key in stored]) if stored else []
        rows, total = list[ScheduleRow](), 0
        for keys, count, paused_count in zip(queues, counts[::2], counts[1::2], strict=True):
            total += count
            if len(rows) >= _MAX_SCHEDULES:
                total += paused_count
            elif count or paused_count:
                queue = self.app.queue(keys.queue)
                paused = queue.schedulers.list_paused() if paused_count else ()
                total += len(paused)  # fewer if a client of BullMQ has added some again
                items = [
                    *(queue.schedulers.list(0, _SCHEDULES_PER_QUEUE - 1, asc=True) if count else ()),
                    *paused[:_SCHEDULES_PER_QUEUE],
                ]
                runs = queue.context.run(last_runs(queue.context, items)) if items else []
                rows += [
                    ScheduleRow(keys.queue, item, last, () if item.paused_ms is not None else (item.next_ms,))
                    for item, last in zip(items, runs, strict=True)
                ]
        return Schedules(sorted(rows, key=lambda row: listing_order(row.item)), total)

    def schedule(self, queue: str, scheduler_id: str) -> ScheduleRow | None:
        """Read a schedule with its last runs; ``None`` if there is none with this id."""
        return self._once(("schedule", queue, scheduler_id), lambda: self._read_schedule(queue, scheduler_id))

    def _read_schedule(self, name: str, scheduler_id: str) -> ScheduleRow | None:
        queue = self.app.queue(name)
        item = queue.schedulers.get(scheduler_id)
        if item is None:
            return None
        [last] = queue.context.run(last_runs(queue.context, [item]))
        recent = queue.context.run(recent_jobs(queue.context, scheduler_id, _RECENT_RUNS))
        return ScheduleRow(name, item, last, self._next_times(item), recent)

    def _next_times(self, item: Scheduler) -> Sequence[int]:
        """Return the next times of a schedule, none if it is paused, as far as its rule can be read."""
        if item.paused_ms is not None:
            return ()
        times, zone = [item.next_ms], zone_of(self.app._config.timezone)
        left = _NEXT_TIMES if item.limit is None else min(_NEXT_TIMES, item.limit - item.iterations + 1)
        with suppress(*SCHEDULING_ERRORS):  # another client has written a malformed rule
            while len(times) < left and (following := _following(item.rule, times[-1], zone)) is not None:
                times.append(following)
        return times

    def job(self, queue: str, job_id: str) -> JobPage | None:
        """Read a job; ``None`` if there is none with this id."""
        return self._once(("job", queue, job_id), lambda: self._read_job(queue, job_id))

    def _read_job(self, name: str, job_id: str) -> JobPage | None:
        job = self.app.queue(name).get_job(job_id)
        if job is None:
            return None
        logs = job.get_logs(0, _LOG_LINES - 1, asc=False)
        explanation = job.explain()
        children = {kind: number for kind, number in job.get_dependencies_count().items() if number}
        now_ms, state = self.app._now_ms(), str(explanation.state or "unknown")
        entries, is_complete = self._read_events(job, now_ms)
        return JobPage(
            job=job,
            state=state,
            explanation=explanation,
            logs=tuple(reversed(logs.lines)),
            log_count=logs.count,
            children=children,
            parent=self._parent(job),
            data=describe(job.data) if is_envelope(job.data) else job.data_text,
            timeline=timeline(job, state, entries, now_ms),
            is_timeline_complete=is_complete,
            now_ms=now_ms,
        )

    def _read_events(self, job: Job, now_ms: int) -> tuple[list[tuple[int, str]], bool]:
        """Return the times and events of a job in its queue's stream, as far as they are there, and if these are all.

        A busy queue has thousands of entries while a job runs: the first and last ones of its time are read.
        """
        context = job.context
        since_ms = min(max(0, job.timestamp_ms - _SKEW_MS), now_ms)  # a hash may contain any time
        until_ms = max(since_ms, min(job.finished_ms or now_ms, now_ms) + _SKEW_MS)
        try:
            first, last = context.run(_first_and_last(context.keys, since_ms, until_ms))
        except BrokerAuthError:  # who may not read events sees what the job's fields say
            return [], False
        wanted = job.id.encode("utf-8", "surrogateescape")
        found = [
            (id_parts(entry_id)[0], codec.decode_text(fields.get(b"event")))
            for entry_id, fields in sorted({**dict(first), **dict(last)}.items(), key=lambda entry: id_parts(entry[0]))
            if fields.get(b"jobId") == wanted and id_parts(entry_id)[0] <= until_ms
        ]
        has_all = len(last) < _EVENTS or (bool(first) and id_parts(last[-1][0]) <= id_parts(first[-1][0]))
        return found, has_all and bool(found) and found[0][1] == "added"

    def _parent(self, job: Job) -> tuple[str, str] | None:
        """Return the queue, by its name in the app, and the id of a job's parent."""
        if job.parent_key is None:
            return None
        config = self.app._config
        _, name, job_id = address_of(job.parent_key, config.prefix)
        return name_in_app(name, hash_tag=config.queue_hash_tag), job_id


def _following(rule: Repeat, after_ms: int, zone: tzinfo) -> int | None:
    """Return the time of a rule after another of its times; ``None`` if there is none."""
    if rule.pattern is not None:
        return rule.next_ms(after_ms, zone)
    if rule.every_ms is None or (rule.end_ms is not None and after_ms + rule.every_ms > rule.end_ms):
        return None
    return after_ms + rule.every_ms


# ---- the timeline of a job ----

_SKEW_MS: Final = 2_000
"""How far the clock of a sender may be from the server's, by whose clock events are stored."""

_BEGIN: Final = frozenset(("waiting", "delayed", "active", "waiting-children", "completed", "failed", "stalled"))
"""Events that begin a state of the same name."""


def timeline(job: Job, state: str, events: Sequence[tuple[int, str]], now_ms: int) -> list[Span]:
    """Return the states of a job, from its events, and where they are missing from its fields."""
    moments = [(ms, event, "") for ms, event in events if event in _BEGIN]
    if not events or events[0][1] != "added":
        moments = [*_before(job, moments), *moments]
    elif not moments or moments[0][0] > events[0][0] + 1:
        moments.insert(0, (events[0][0], "waiting", ""))
    last = moments[-1][1]
    if state in {"completed", "failed"} and job.finished_ms and last != state:
        if job.processed_ms and last != "active":
            moments.append((job.processed_ms, "active", ""))
        moments.append((job.finished_ms, state, ""))
    elif state == "active" and job.processed_ms and last != "active":
        moments.append((job.processed_ms, "active", ""))
    is_over = moments[-1][1] in {"completed", "failed"}
    end_ms = moments[-1][0] if is_over else max(now_ms, moments[-1][0])
    whole_ms = max(1, end_ms - moments[0][0])
    ends: list[int | None] = [*(ms for ms, _, _ in moments[1:]), None]
    return [
        Span(
            name,
            from_ms,
            from_ms if until_ms is None and is_over else until_ms,
            (from_ms - moments[0][0]) / whole_ms,
            max(0, (end_ms if until_ms is None else until_ms) - from_ms) / whole_ms,
            note,
        )
        for (from_ms, name, note), until_ms in zip(moments, ends, strict=True)
    ]


def _before(job: Job, moments: Sequence[tuple[int, str, str]]) -> list[tuple[int, str, str]]:
    """Return what a job's fields say of the time before its first known event."""
    first = "delayed" if job.delay_ms else "waiting"
    attempts = job.attempts_started - sum(name == "active" for _, name, _ in moments)
    is_last_known = bool(moments) or job.processed_ms is None
    earlier = attempts if is_last_known else attempts - 1
    note = "" if earlier < 1 else f"and {pluralize(earlier, 'earlier attempt', 'd')}, whose times are not known"
    found = [(job.timestamp_ms, first, note)]
    if not is_last_known and job.processed_ms is not None:
        found.append((job.processed_ms, "active", ""))
    return found


def _states_with_jobs(queue: QueueOverview) -> list[str]:
    """Return the states in which a queue has jobs to list."""
    if isinstance(queue.figures, BulltaskError):
        return []
    counts = _counts(queue.figures)
    return [state for state in STATES if counts[state]]


def _counts(figures: QueueFigures) -> Mapping[str, int]:
    """Return how many jobs a queue has in each of :data:`STATES`, and in those of BullMQ."""
    return {**figures.jobs, "waiting": figures.waiting}


def _sample(figures: QueueFigures) -> Sample:
    rate = None if figures.window_ms is None else figures.finished * 1000 / figures.window_ms
    return Sample(figures.waiting, figures.active, figures.oldest_ms if figures.waiting else 0, rate)


def _total(samples: Collection[Sample]) -> Sample:
    oldest = [sample.oldest_ms for sample in samples if sample.oldest_ms is not None]
    rates = [sample.finished_per_s for sample in samples if sample.finished_per_s is not None]
    return Sample(
        waiting=sum(sample.waiting for sample in samples),
        active=sum(sample.active for sample in samples),
        oldest_ms=max(oldest, default=None),
        finished_per_s=sum(rates) if rates else None,
    )


def _size(queue: QueueOverview) -> int:
    """Return how much goes on in a queue."""
    figures = queue.figures
    return -1 if isinstance(figures, BulltaskError) else figures.waiting + figures.active + figures.finished


def _first_and_last(keys: QueueKeys, since_ms: int, until_ms: int) -> Operation[tuple[list[Entry], list[Entry]]]:
    """Read the first and the last entries of a time in a queue's stream; the last ones begin with the newest."""
    first, last = yield [read_now(keys, str(since_ms)), read_back(keys, str(until_ms), str(since_ms), _EVENTS)]
    return first, last
