"""What the methods of ``Queue`` and ``Job`` that read return, and their operations on many jobs.

A read or a change of many jobs is split into several calls, so that no call blocks Redis for long.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import Any, Final, Generic, Self, TypeVar, overload

from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.codec import MAX_SAFE_INTEGER
from bulltask.jobs.errors import BrokerError, BrokerOutOfMemoryError, ConfigError, DecodeError
from bulltask.jobs.job import NewJob
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.context import QueueContext, check_positive
from bulltask.registry.results import AsyncResult
from bulltask.transport.call import command, text, texts
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts import flow as flow_scripts
from bulltask.transport.scripts import queue as scripts
from bulltask.transport.scripts.job import get_logs, read_job
from bulltask.transport.scripts.queue import Metrics, PageCursor, page_after, state_size
from bulltask.transport.workers import forget_queues

__all__ = [
    "ALL_STATES",
    "STATES_IN_ORDER",
    "ChildFailures",
    "ClientInfo",
    "Dependencies",
    "DependencyPage",
    "JobFields",
    "JobLogs",
    "JobPages",
    "Metrics",
    "QueueSummary",
    "RateLimit",
    "clean",
    "drain",
    "get_clients",
    "get_dependencies",
    "get_dependency_page",
    "get_failed_children",
    "get_job_counts",
    "get_job_ids",
    "get_job_logs",
    "get_jobs",
    "move_to_wait",
    "obliterate",
    "read_jobs",
    "sent_job",
    "set_paused",
    "states_of",
]


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class QueueSummary:
    """A queue's job counts in five groups. Jobs that are waiting for child jobs are not counted.

    Attributes:
        waiting: Ready to run: ``waiting``, ``paused`` or ``prioritized``.
        active: Acquired by a worker.
        completed, failed: Finished and still kept.
        delayed: Due later.
    """

    waiting: int
    active: int
    completed: int
    failed: int
    delayed: int


@dataclass(frozen=True, slots=True)
class RateLimit:
    """A queue's global rate limit: at most ``max`` jobs are acquired per ``duration`` seconds."""

    max: int
    duration: float


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """A connection of a worker or an event reader.

    Attributes:
        name: The worker id (the name of a Node.js worker), ``""`` if it has none.
        raw_name: The connection's name in ``CLIENT LIST``.
        address: ``host:port`` of the connection.
        age: Seconds since it was opened.
        idle: Seconds since its last command.
        fields: All columns of ``CLIENT LIST``, by their Redis names.
    """

    name: str
    raw_name: str
    address: str
    age: int
    idle: int
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class JobLogs:
    """Lines of a job's log; ``count`` is the total number of lines."""

    lines: tuple[str, ...]
    count: int


@dataclass(frozen=True, slots=True)
class Dependencies:
    """A job's children by outcome; each is identified by its full key (``bull:{mail}:7``).

    Attributes:
        processed: Completed children, with their return values.
        unprocessed: Children that have not finished.
        ignored: Failed child jobs whose failure is ignored, with the reasons.
        failed: Failed child jobs whose failure fails the job.
    """

    processed: Mapping[str, Any]
    unprocessed: tuple[str, ...]
    ignored: Mapping[str, str]
    failed: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class DependencyPage:
    """Some children, by full key, with return value, failure reason or ``None``; ``total``: all of this kind."""

    items: Mapping[str, Any]
    total: int


@dataclass(frozen=True, slots=True)
class ChildFailures:
    """A job's failed child jobs, by full key: the ignored ones, with the reasons, and those that fail the job."""

    ignored: Mapping[str, str]
    failed: tuple[str, ...]


class _Field(Generic[T]):
    """A field of a job, which :class:`JobFields` reads from its :class:`StoredJob`."""

    def __init__(self, doc: str) -> None:
        self.__doc__ = doc

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, job: None, owner: type) -> Self: ...
    @overload
    def __get__(self, job: JobFields, owner: type) -> T: ...

    def __get__(self, job: JobFields | None, owner: type) -> Self | T:
        return self if job is None else getattr(job.stored, self._name)


class JobFields:
    """A job's fields as they were when it was read or added, with the changes made through this object's methods.

    Times are epoch milliseconds. Those that bulltask writes are the server's; Node.js writes its machine's.
    ``refresh()`` reads all fields again.
    """

    __slots__ = ("_context", "_discarded", "_stored", "_token")

    id = _Field[str]("The job's id.")
    queue = _Field[str]("The name of its queue in the app.")
    name = _Field[str]("Its name; bulltask's workers run the task with that name.")
    data = _Field[Any]("Its data; also ``None`` if it is malformed JSON: see :attr:`data_text`.")
    data_text = _Field[str]("Its data as stored.")
    opts = _Field[Mapping[str, Any]]("Its options under the names that BullMQ stores.")
    timestamp_ms = _Field[int]("When it was created.")
    delay_ms = _Field[int]("Its delay; 0 once it has been promoted.")
    priority = _Field[int]("Its priority, 0 for none.")
    attempts_made = _Field[int]("Its attempts that count toward the maximum: they completed or failed.")
    attempts_started = _Field[int]("How many times a worker has acquired it.")
    stalled_count = _Field[int]("How many times it has stalled.")
    processed_ms = _Field[int | None]("When a worker last acquired it.")
    finished_ms = _Field[int | None]("When it finished.")
    processed_by = _Field[str | None]("Id of the worker that last acquired it, or the name of a Node.js worker.")
    progress = _Field[Any]("Its last progress, from ``update_progress``.")
    returnvalue = _Field[Any]("The return value of a completed job.")
    failed_reason = _Field[str | None]("Why the last attempt failed.")
    stacktrace = _Field[tuple[str, ...]]("One traceback for each failed attempt.")
    deferred_failure = _Field[str | None]("If set, the job will fail with this reason when it is next acquired.")
    parent = _Field[Mapping[str, Any] | None](
        "Its parent's ``id`` and ``queueKey``, and how its failure affects the parent, as stored."
    )
    parent_key = _Field[str | None]("Full key of its parent's hash.")
    deduplication_id = _Field[str | None]("Its deduplication id.")
    scheduler_id = _Field[str | None]("The job scheduler that added it.")
    next_iteration_id = _Field[str | None](
        "The job that its scheduler added after it (Node's ``nextRepeatableJobId``)."
    )

    def __init__(self, context: QueueContext, stored: StoredJob, token: str = "") -> None:
        self._context = context
        self._stored = stored
        self._token = token
        self._discarded = False

    @property
    def context(self) -> QueueContext:
        """The context of the job's queue."""
        return self._context

    @property
    def stored(self) -> StoredJob:
        """All fields as a :class:`StoredJob`."""
        return self._stored

    def change(self, **fields: Any) -> None:
        """Update the fields that an operation has changed in Redis."""
        self._stored = replace(self._stored, **fields)

    def assign(self, stored: StoredJob) -> None:
        """Replace all fields with newly read fields."""
        self._stored = stored

    @property
    def token(self) -> str:
        """The token of its lock, if ``get_next_job()`` acquired the job; ``""`` otherwise."""
        return self._token

    @property
    def is_discarded(self) -> bool:
        """True after :meth:`discard`."""
        return self._discarded

    def discard(self) -> None:
        """Make this object's ``move_to_failed()`` final, even if attempts are left; nothing is stored."""
        self._discarded = True

    @property
    def key(self) -> str:
        """Full key of its hash; its parent refers to it by this key."""
        return self._context.keys.job(self._stored.id)

    @property
    def attempts(self) -> int:
        """Maximum number of attempts; 0 and 1 both mean a single attempt."""
        attempts = self._stored.opts.get("attempts")
        return int(attempts) if isinstance(attempts, int | float) else 0

    def result(self) -> AsyncResult[Any]:
        """Return its result, as ``delay()`` would have returned it."""
        return AsyncResult(self.id, self.queue, self._context.broker.results, self.timestamp_ms)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.id} ({self.name}) of queue {self.queue}>"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, JobFields) and other.key == self.key

    def __hash__(self) -> int:
        return hash(self.key)


def sent_job(job: NewJob, job_id: str) -> StoredJob:
    """Return a job that was just sent as a stored job, without reading it; ``job_id`` is the id that Redis returned."""
    parent, now_ms = job.parent, job.timestamp_ms or 0
    return StoredJob(
        queue=job.queue,
        id=job_id,
        name=job.name,
        data_text=job.data.decode(),
        data=codec.decode(job.data),
        opts=job.opts(now_ms),
        timestamp_ms=now_ms,
        delay_ms=max(0, job.options.delay_at(now_ms)),
        priority=job.options.priority,
        attempts_made=0,
        attempts_started=0,
        stalled_count=0,
        processed_ms=None,
        finished_ms=None,
        processed_by=None,
        progress=None,
        returnvalue=None,
        failed_reason=None,
        stacktrace=(),
        deferred_failure=None,
        parent=None if parent is None else parent.data,
        parent_key=None if parent is None else parent.key,
        deduplication_id=job.options.deduplication_id,
        scheduler_id=None,
        next_iteration_id=None,
    )


ALL_STATES: Final = tuple("active completed delayed failed paused prioritized waiting waiting-children".split())
_JOBS_PER_ROUND_TRIP: Final = 500
_IDS_PER_CALL: Final = 5_000


def states_of(names: Iterable[str]) -> list[str]:
    """Return states, by default all; ``waiting`` includes ``paused``. It raises ``ConfigError`` for other names."""
    states: dict[str, None] = {}
    for state in [names] if isinstance(names, str) else names:
        if state not in ALL_STATES and state != "wait":
            raise ConfigError(f"unknown state {state!r:.200}; use {', '.join(ALL_STATES)}")
        states[str(state)] = None
    if "waiting" in states:
        states["paused"] = None
    return list(states) or list(ALL_STATES)


def read_jobs(context: QueueContext, ids: Sequence[str]) -> Operation[list[StoredJob]]:
    """Read jobs by their ids, in that order; removed jobs are left out."""
    keys, jobs = context.keys, list[StoredJob]()
    for start in range(0, len(ids), _JOBS_PER_ROUND_TRIP):
        calls = [read_job(keys, job_id) for job_id in ids[start : start + _JOBS_PER_ROUND_TRIP]]
        jobs += [stored for stored in (yield calls) if stored is not None]
    return jobs


def get_job_ids(
    context: QueueContext, states: Iterable[str], start: int, end: int, *, asc: bool
) -> Operation[list[str]]:
    """Read the ids of jobs ``start`` to ``end`` in each state, a page at a time if there are many."""
    found: dict[str, list[str]] = {_key_of(state): [] for state in states_of(states)}
    is_paged = start >= 0 and end >= -1
    # Jobs leave the first places of an ascending order, so a later page would miss some; the descending order grows
    # there, so that a later page repeats some.
    is_reversed = asc and (start, end) == (0, -1)
    left = list(found)
    while left:
        size = max(1, _IDS_PER_CALL // len(left))
        last = start + size - 1
        if not is_paged or 0 <= end < last:
            last = end
        call = scripts.get_ranges(context.keys, left, start, last, asc=asc and not is_reversed)
        pages = yield from execute(call)
        for state, ids in zip(left, pages, strict=True):
            found[state] += ids
        start = last + 1
        has_more = is_paged and (end == -1 or start <= end)
        left = [state for state, ids in zip(left, pages, strict=True) if has_more and len(ids) == size]
    return list(dict.fromkeys(job for ids in found.values() for job in (reversed(ids) if is_reversed else ids)))


def get_jobs(
    context: QueueContext, states: Iterable[str], start: int, end: int, *, asc: bool
) -> Operation[list[StoredJob]]:
    """Read jobs ``start`` to ``end`` in each state."""
    ids = yield from get_job_ids(context, states, start, end, asc=asc)
    return (yield from read_jobs(context, ids))


def get_job_counts(context: QueueContext, states: Iterable[str]) -> Operation[dict[str, int]]:
    """Count the jobs in each state."""
    names = states_of(states)
    counts = yield from execute(scripts.get_counts(context.keys, [_key_of(state) for state in names]))
    return dict(zip(names, counts.values(), strict=True))


def get_job_logs(context: QueueContext, job_id: str, start: int, end: int, *, asc: bool) -> Operation[JobLogs]:
    """Read lines of a job's log."""
    lines, count = yield get_logs(context.keys, job_id, start, end, asc=asc)
    return JobLogs(tuple(lines), count)


def get_clients(context: QueueContext, *, events: bool) -> Operation[list[ClientInfo]]:
    """List the connections of workers, or of event readers."""
    name = context.keys.client_name()
    marker = f"{name}:w:"
    wanted = (f"{name}:qe", "") if events else (name, marker)
    rows = yield from execute(scripts.list_clients(*wanted, database=context.broker.endpoint.url.database))
    return [
        ClientInfo(
            row.name[len(marker) :] if row.name.startswith(marker) else "",
            row.name,
            row.address,
            int(row.fields.get("age", 0)),
            int(row.fields.get("idle", 0)),
            row.fields,
        )
        for row in rows
    ]


def get_dependencies(context: QueueContext, parent_id: str) -> Operation[Dependencies]:
    """Read all children of a job, in one transaction."""
    processed, unprocessed, ignored, failed = (yield flow_scripts.all_dependencies(context.keys, parent_id))[-1]
    return Dependencies(processed, tuple(unprocessed), ignored, tuple(failed))


def get_failed_children(context: QueueContext, parent_id: str) -> Operation[ChildFailures]:
    """Read a job's failed child jobs, ignored or not."""
    keys = context.keys
    ignored, failed = yield [
        flow_scripts.ignored_failures(keys, parent_id),
        flow_scripts.unsuccessful_children(keys, parent_id),
    ]
    return ChildFailures(ignored, tuple(failed))


def get_dependency_page(
    context: QueueContext, parent_id: str, kind: str, start: int, end: int
) -> Operation[DependencyPage]:
    """Read a job's child jobs ``start`` to ``end``: failed jobs in order of failure, others in Redis' order."""
    keys = context.keys
    if kind == "failed":
        failed, total = yield flow_scripts.unsuccessful_page(keys, parent_id, start, end)
        return DependencyPage(dict.fromkeys(failed), total)
    collections = {"processed": keys.processed, "pending": keys.dependencies, "ignored": keys.ignored}
    if kind not in collections:
        raise ConfigError(f"kind must be processed, pending, ignored or failed, not {kind!r:.200}")
    items, cursor, total = dict[str, Any](), ("0", 0), 0
    while True:
        call = flow_scripts.paginate(collections[kind](parent_id), start + len(items), end, cursor)
        cursor, part, total = yield from execute(call)
        items.update(_child(item, is_json=kind == "processed") for item in part)
        if cursor[0] == "0" or (0 <= end < start + len(items)):
            return DependencyPage(items, total)


def _key_of(state: str) -> str:
    return "wait" if state == "waiting" else state


def _child(item: Any, *, is_json: bool) -> tuple[str, Any]:
    if not isinstance(item, list):
        return text(item), None
    key, value = item
    if not is_json:
        return text(key), codec.decode_text(value)
    try:
        return text(key), codec.decode(value)
    except DecodeError:
        return text(key), codec.decode_text(value)


# In the order in which jobs pass through them: a job that moves in the meantime is returned twice, not missed.
STATES_IN_ORDER: Final = (
    "waiting-children",
    "delayed",
    "wait",
    "paused",
    "prioritized",  # runs after those without a priority
    "active",
    "completed",
    "failed",
)
_REMEMBERED: Final = 10


class JobPages:
    """A position among the jobs in some states (default: all); each :meth:`next` reads a page of ``size`` jobs.

    With ``asc``, it begins in each state with the job that runs next (or finished first); otherwise, it ends with it.
    ``start`` is the position in the first state.
    """

    def __init__(
        self, context: QueueContext, states: Iterable[str], size: int, *, asc: bool, start: PageCursor | None = None
    ) -> None:
        check_positive(size, "page_size")
        if not isinstance(asc, bool):
            raise ConfigError(f"asc must be true or false, not {asc!r:.200}")
        wanted = {_key_of(state) for state in states_of(states)}
        self._context = context
        self._size = size
        self._asc = asc
        self._states = deque(state for state in STATES_IN_ORDER if state in wanted)
        self._cursor = PageCursor() if start is None else start
        self._left = -1
        self._recent_pages: deque[frozenset[str]] = deque(maxlen=_REMEMBERED)

    @property
    def cursor(self) -> PageCursor:
        """The position in the state that is being read."""
        return self._cursor

    def next(self) -> Operation[list[StoredJob] | None]:
        """Return the next jobs, ``None`` at the end; a page is empty if its jobs have just been removed."""
        ids = yield from self.next_ids()
        return None if ids is None else (yield from read_jobs(self._context, ids))

    def next_ids(self) -> Operation[list[str] | None]:
        """Return the ids of the next jobs, ``None`` at the end."""
        while self._states:
            if ids := (yield from self._next_ids(self._states[0])):
                return ids
            self._states.popleft()
            self._cursor = PageCursor()
            self._left = -1
            self._recent_pages.clear()
        return None

    def _next_ids(self, state: str) -> Operation[list[str]]:
        """Return ids that were not on any of the last pages; an empty list when the state has no more jobs."""
        if self._left < 0:
            # Bounded, so that the iteration ends even if jobs are added faster than it reads them.
            self._left = 2 * (yield from execute(state_size(self._context.keys, state))) + _REMEMBERED * self._size
        while self._left > 0:
            call = page_after(self._context.keys, state, self._cursor, self._size, asc=self._asc)
            ids, self._cursor = yield from execute(call)
            if not ids:
                return []
            self._left -= len(ids)
            # After a whole page of jobs has left the state, page_after() goes back, so that it misses none. Jobs that
            # have already been returned are skipped.
            new_ids = [job_id for job_id in ids if not any(job_id in page for page in self._recent_pages)]
            self._recent_pages.append(frozenset(ids))
            if new_ids:
                return new_ids
        return []


_PER_CALL: Final = 100
"""Maximum number of jobs that one call checks, moves or removes, which keeps Redis busy for up to 3 ms."""

_CLEANABLE: Final = ("completed", "failed", "waiting", "active", "paused", "delayed", "prioritized")
_RETRIABLE: Final = ("failed", "completed")


def set_paused(context: QueueContext, *, paused: bool, by: str = "") -> Operation[None]:
    """Pause or resume a queue, after merging its lists ``wait`` and ``paused`` into one."""
    while (yield from execute(scripts.set_paused(context.keys, paused=paused, note=context.new_pause(by)))):
        pass


def clean(context: QueueContext, grace: Duration, limit: int, state: str) -> Operation[list[str]]:
    """Remove old jobs in one state and return their ids."""
    if state not in {*_CLEANABLE, "wait"}:
        raise ConfigError(f"state must be one of {', '.join(_CLEANABLE)}, not {state!r:.200}")
    if limit < 0:
        raise ConfigError(f"limit must be 0 (no limit) or more, not {limit}")
    removed = yield from _clean(
        context, _key_of(state), context.now_ms() - to_ms(grace, "grace"), limit or MAX_SAFE_INTEGER
    )
    with suppress(BrokerOutOfMemoryError):  # the jobs are removed, which is how to free memory
        yield from execute(command("XADD", context.keys.events, "*", "event", "cleaned", "count", len(removed)))
    return removed


def drain(context: QueueContext, *, delayed: bool) -> Operation[None]:
    """Remove the jobs that are waiting now, and the delayed ones if requested."""
    for state in ("wait", "paused", *(["delayed"] if delayed else []), "prioritized"):
        size = yield from execute(scripts.state_size(context.keys, state))
        yield from _clean(context, state, None, size)


def _clean(context: QueueContext, state: str, before_ms: int | None, limit: int) -> Operation[list[str]]:
    """Remove the old ones of the next ``limit`` jobs in a state, and return their ids."""
    removed, position = list[str](), ""
    while limit > 0:
        size = min(_PER_CALL, limit)
        page = yield from execute(scripts.clean_page(context.keys, state, before_ms, size, position))
        removed += page.removed
        limit, position = limit - page.checked, page.position
        if page.checked < size:
            break
    return removed


def obliterate(context: QueueContext, count: int, *, force: bool) -> Operation[None]:
    """Pause the queue and remove it, ``count`` jobs per call."""
    yield from set_paused(context, paused=True)
    while (yield from execute(scripts.obliterate(context.keys, min(count, _PER_CALL), force=force))):
        # BullMQ's script deletes this set at the end with DEL, which blocks Redis if it is large.
        yield from execute(command("UNLINK", context.keys.stalled))
    keys = context.keys  # bulltask's other keys of the queue expire
    yield from execute(command("UNLINK", keys.revoked, keys.lock_expiries, keys.marked_stalled, keys.pause_note))
    while paused := (
        yield from execute(command("ZRANGE", keys.paused_schedulers, 0, _PER_CALL - 1, parse_reply=texts))
    ):
        yield from execute(command("UNLINK", *map(keys.paused_scheduler, paused)))
        yield from execute(command("ZREM", keys.paused_schedulers, *paused))
    with suppress(BrokerError):  # the user may not, or that node of the cluster is down: it is listed a while longer
        yield from execute(forget_queues(keys.prefix, [keys.name]))


def move_to_wait(
    context: QueueContext, state: str, count: int, before_ms: int | None, *, revoked: bool = False
) -> Operation[None]:
    """Move all jobs in one state back to waiting, ``count`` per call; revoked jobs only if ``revoked`` is true."""
    if state not in {*_RETRIABLE, "delayed"}:
        raise ConfigError(f"state must be one of {', '.join(_RETRIABLE)}, not {state!r:.200}")
    if count < 1:
        raise ConfigError(f"count must be 1 or more, not {count}")
    count = min(count, _PER_CALL)
    if before_ms is None and state != "delayed":
        # Not the current time: the clock of the worker that finished the newest job may be some milliseconds ahead.
        newest = yield from execute(scripts.score_at(context.keys, state, -1))
        if newest is None:
            return
        before_ms = ceil(min(max(float(newest), 0), MAX_SAFE_INTEGER))
    if state == "failed" and not revoked and before_ms is not None:
        more, after = True, ""
        while more:
            more, after = yield from execute(scripts.retry_failed(context.keys, count, before_ms, after))
        return
    while (yield from execute(scripts.move_jobs_to_wait(context.keys, state, count, before_ms))):
        pass
