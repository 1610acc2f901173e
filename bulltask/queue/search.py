"""Find jobs by a filter, change many of them, group failed jobs, and find when schedules ran last.

Redis has no index of jobs, so a search reads a queue's jobs page by page, and of each job only the fields that the
filter needs. No call blocks Redis for long: a page of ids is one call, and each job is read by another.
"""

from __future__ import annotations

import json
import re
import weakref
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import tzinfo
from enum import StrEnum
from itertools import islice
from math import isfinite
from tempfile import SpooledTemporaryFile
from typing import Any, Final, NamedTuple

from bulltask.config.urls import redact_secrets
from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, to_ms, zone_of
from bulltask.jobs.codec import MAX_SAFE_INTEGER, int_field, json_field, mapping_field
from bulltask.jobs.errors import BulltaskError, ConfigError, JobError, JobStateError, LockMismatchError
from bulltask.jobs.failure_reasons import error_fingerprint, plain_reason
from bulltask.jobs.fields import error_type
from bulltask.jobs.names import REVOKED, Revocation
from bulltask.jobs.schedules import Scheduler, iteration_id
from bulltask.queue.context import QueueContext, check_positive
from bulltask.queue.fields import STATES_IN_ORDER, JobPages, states_of
from bulltask.queue.schedulers import SCHEDULING_ERRORS
from bulltask.transport.call import Call, command, texts, texts_by_name
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.job import get_state, job_fields, promote, remove_job, reprocess_job
from bulltask.transport.scripts.queue import (
    DELAYED_SCORE,
    LISTS,
    SETS,
    PageCursor,
    count_by_score,
    state_size,
)

__all__ = [
    "Action",
    "BulkChangeBase",
    "FailureGroup",
    "FailureGroups",
    "FoundJob",
    "FoundJobs",
    "JobFilter",
    "JobSearch",
    "LastRun",
    "Match",
    "Progress",
    "actions_in",
    "as_states",
    "due_times",
    "find_jobs",
    "group_failures",
    "held_jobs",
    "last_runs",
    "recent_jobs",
]

Progress = Callable[[int, int], object]
"""Called after each round trip with how many jobs are done, and how many there are."""

SCANNED: Final = 1_000_000
"""How many jobs of a queue are read by default, if none is changed."""

_FINISHED: Final = ("completed", "failed")
_PAGE_SIZE: Final = 500
_DATA_PAGE_SIZE: Final = 200  # the data of a job may be large
_TRACES_PER_ROUND_TRIP: Final = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """Which jobs of a queue; a job must satisfy all conditions.

    Attributes:
        states: BullMQ's states (default: all). ``waiting`` are all jobs that could run now: with and without a
            priority, in a paused queue, and delayed ones that are due.
        task: The job's name, exactly.
        error: Part of the reason of its last failure; case is ignored.
        error_fingerprint: The text of its last failure with ``#`` for its variable parts, as in :class:`FailureGroup`.
        text: Part of its id, name, data as stored, or failure reason; case is ignored.
        before_ms: It finished before this time; if it has not finished, it was created before it.
        after_ms: It finished, or was created, at this time or later.
        revoked: Whether revoked jobs match.
    """

    states: tuple[str, ...] = ()
    task: str | None = None
    error: str | None = None
    error_fingerprint: str | None = None
    text: str | None = None
    before_ms: int | None = None
    after_ms: int | None = None
    revoked: bool = True

    def at(self, now_ms: int, older_than: Duration | None, newer_than: Duration | None) -> JobFilter:
        """Return the filter with its times, which count back from ``now_ms``."""
        return replace(
            self,
            before_ms=None if older_than is None else now_ms - to_ms(older_than, "older_than"),
            after_ms=None if newer_than is None else now_ms - to_ms(newer_than, "newer_than"),
        )

    @property
    def has_error(self) -> bool:
        """Whether it names an error."""
        return self.error is not None or self.error_fingerprint is not None

    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields that :meth:`matches` reads."""
        has_text = self.text is not None
        has_time = self.before_ms is not None or self.after_ms is not None
        needed = {
            "name": self.task is not None or has_text,
            "timestamp": has_time,
            "finishedOn": has_time,
            "failedReason": self.has_error or has_text or not self.revoked,
            "data": has_text,
        }
        return tuple(name for name, is_needed in needed.items() if is_needed)

    def matches(self, match: Match) -> bool:
        """Return whether a job satisfies all conditions except the one on its state."""
        if self.task is not None and match.name != self.task:
            return False
        if self.before_ms is not None and match.since_ms >= self.before_ms:
            return False
        if self.after_ms is not None and match.since_ms < self.after_ms:
            return False
        if not self.revoked and match.reason == REVOKED:
            return False
        if not self._matches_error(match.reason):
            return False
        texts = () if self.text is None else (match.id, match.name, match.reason, match.text("data"))
        return self.text is None or self.text.casefold() in "\0".join(texts).casefold()

    def _matches_error(self, reason: str) -> bool:
        if self.error is not None and self.error.casefold() not in reason.casefold():
            return False
        return self.error_fingerprint is None or self.error_fingerprint == _fingerprint(redact_secrets(reason))


def _fingerprint(reason: str) -> str:
    """Return a failure's text, in which secrets are hidden, with ``#`` for its variable parts."""
    return error_fingerprint(reason) or ""


def as_states(states: Iterable[str] | str) -> tuple[str, ...]:
    """Return the states of an argument that is one state or several."""
    return (states,) if isinstance(states, str) else tuple(states)


class Match:
    """A job that a search has read, with some fields of its hash as stored."""

    __slots__ = ("_fields", "id", "state")

    def __init__(self, job_id: str, state: str, fields: Mapping[bytes, bytes]) -> None:
        self.id = job_id
        self.state = state
        self._fields = fields

    def text(self, field: str) -> str:
        """Return a field as text, ``""`` if it is missing or was not read."""
        return codec.decode_text(self._fields.get(field.encode()))

    @property
    def name(self) -> str:
        """The job's name."""
        return self.text("name")

    @property
    def reason(self) -> str:
        """Why its last attempt failed, as plain text."""
        return plain_reason(self.text("failedReason")) or ""

    @property
    def since_ms(self) -> int:
        """When it finished; when it was created, if it has not finished."""
        return int_field(self._fields, b"finishedOn") or int_field(self._fields, b"timestamp") or 0

    @property
    def ran_ms(self) -> int:
        """When it finished; when it started, or was created, if it has not finished."""
        return int_field(self._fields, b"finishedOn") or int_field(self._fields, b"processedOn") or self.since_ms


class JobSearch:
    """A search through a queue's jobs; each :meth:`next` reads a page.

    Args:
        context: The queue.
        wanted: Which jobs.
        asc: Begin with the job that finished first; otherwise, finished jobs begin with the newest.
        newest_first: Begin with the newest of the waiting jobs. BullMQ searches a list from there to remove a job, so
            removing a job takes time only for the newer ones that stay.
        more: Further fields to read of each job.
        size: How many jobs to read at a time.
        only: Which ids to read; the others count as scanned.
        start: Where to begin, a :attr:`position` of another search with the same arguments.

    Attributes:
        scanned: How many jobs were read.
    """

    def __init__(  # noqa: PLR0913 - independent of each other
        self,
        context: QueueContext,
        wanted: JobFilter,
        *,
        asc: bool = False,
        newest_first: bool = False,
        more: Sequence[str] = (),
        size: int | None = None,
        only: Callable[[str], bool] | None = None,
        start: tuple[str, PageCursor] | None = None,
    ) -> None:
        self.scanned = 0
        self._context = context
        self._wanted = wanted
        self._asc = asc
        self._newest_first = newest_first
        self._fields = tuple(dict.fromkeys((*wanted.fields(), *more)))
        self._size = size or (_DATA_PAGE_SIZE if "data" in self._fields else _PAGE_SIZE)
        self._only = only
        names = {"wait" if state == "waiting" else state for state in states_of(wanted.states)}
        self._only_due = "waiting" in wanted.states and "delayed" not in names
        if "waiting" in wanted.states:
            names |= {"prioritized", "delayed"}
        self._states = deque(state for state in STATES_IN_ORDER if state in names)
        self._all_states = tuple(self._states)
        self._pages: JobPages | None = None
        if start is not None:
            self._resume(*start)

    def _resume(self, state: str, cursor: PageCursor) -> None:
        if state not in self._all_states:
            raise ConfigError(f"the cursor is from another search: this one does not read {state!r:.200} jobs")
        while self._states[0] != state:
            self._states.popleft()
        if cursor != PageCursor():
            self._pages = self._begin(state, cursor)

    @property
    def position(self) -> tuple[str, PageCursor] | None:
        """The state that is read next, and the position in it; ``None`` at the end."""
        if not self._states:
            return None
        return self._states[0], PageCursor() if self._pages is None else self._pages.cursor

    def count(self) -> Operation[int]:
        """Count the jobs in the filter's states, which is the most that the search reads."""
        keys, due = self._context.keys, f"({self._due_score()}"
        sizes: list[int] = yield [
            count_by_score(keys, state, "-inf", due) if self.is_due(state) else state_size(keys, state)
            for state in self._all_states
        ]
        return sum(sizes)

    def is_due(self, state: str) -> bool:
        """Whether only due jobs of this state are searched."""
        return self._only_due and state == "delayed"

    def _due_score(self) -> int:
        return (self._context.now_ms() + 1) * DELAYED_SCORE

    def next(self) -> Operation[list[Match] | None]:
        """Return the jobs of the next page that match, perhaps none; ``None`` at the end."""
        while self._states:
            state = self._states[0]
            if self._pages is None:
                self._pages = self._begin(state)
            ids = yield from self._pages.next_ids()
            if ids is not None:
                self.scanned += len(ids)
                matches = yield from self._read(state, ids if self._only is None else list(filter(self._only, ids)))
                if self._is_past(state, matches):
                    self._next_state()
                return [match for match in matches if self._wanted.matches(match)]
            self._next_state()
        return None

    def _next_state(self) -> None:
        self._states.popleft()
        self._pages = None

    def _begin(self, state: str, start: PageCursor | None = None) -> JobPages:
        """Begin at the first job that may match: finished jobs are sorted by the time when they finished."""
        if self.is_due(state):
            due = start or PageCursor(score=str(self._due_score()), ids=("",))
            return JobPages(self._context, [state], self._size, asc=False, start=due)
        asc = self._asc if state in _FINISHED else not (self._newest_first and state in LISTS)
        if start is not None:
            return JobPages(self._context, [state], self._size, asc=asc, start=start)
        limit_ms = self._wanted.after_ms if asc else self._wanted.before_ms
        start = None if limit_ms is None or state not in _FINISHED else PageCursor(score=str(limit_ms), ids=("",))
        return JobPages(self._context, [state], self._size, asc=asc, start=start)

    def _is_past(self, state: str, page: Sequence[Match]) -> bool:
        """Return whether the jobs after this page finished too late, or too early."""
        if state not in _FINISHED or not page:
            return False
        last_ms = page[-1].since_ms
        if self._asc:
            return self._wanted.before_ms is not None and last_ms >= self._wanted.before_ms
        return self._wanted.after_ms is not None and 0 < last_ms < self._wanted.after_ms

    def _read(self, state: str, ids: Sequence[str]) -> Operation[list[Match]]:
        """Read the fields of jobs; those that were removed in the meantime are left out."""
        if not self._fields or not ids:
            return [Match(job_id, state, {}) for job_id in ids]
        found = yield from _read_fields(self._context, ids, self._fields)
        return [Match(job_id, state, fields) for job_id, fields in zip(ids, found, strict=True) if fields]


def _read_fields(
    context: QueueContext, ids: Sequence[str], fields: Sequence[str]
) -> Operation[list[dict[bytes, bytes]]]:
    """Return those of the fields that each job has."""
    names = [name.encode() for name in fields]
    rows: list[list[bytes | None]] = yield [job_fields(context.keys, job_id, fields) for job_id in ids]
    return [{name: value for name, value in zip(names, row, strict=True) if value is not None} for row in rows]


def due_times(context: QueueContext, ids: Sequence[str]) -> Operation[list[int | None]]:
    """Return when delayed jobs are due, ``None`` for a job that is not delayed."""
    scores: list[bytes | float | None] = yield [command("ZSCORE", context.keys.delayed, job_id) for job_id in ids]
    return [None if score is None else int(float(score) // DELAYED_SCORE) for score in scores]


_MAX_HELD: Final = 1_000


def held_jobs(context: QueueContext, wanted: JobFilter, more: Sequence[str]) -> Operation[list[tuple[Match, str]]]:
    """Return the delayed jobs that match and that are held: ``throttled`` by the rate limit of their task, or
    ``incompatible``, because no worker knows their task or can read their data.

    Of each kind, and of each task, the next 1,000 are read. Jobs that are due are left out.
    """
    keys = context.keys
    rates = yield from execute(command("HGETALL", keys.task_rates, parse_reply=texts_by_name))
    lists = {keys.throttled(task): "throttled" for task in rates} | {keys.incompatible: "incompatible"}
    found: list[list[str]] = yield [command("ZRANGE", key, 0, _MAX_HELD - 1, parse_reply=texts) for key in lists]
    kinds = {job_id: kind for ids, kind in zip(found, lists.values(), strict=True) for job_id in ids}
    names = tuple(dict.fromkeys(("timestamp", *wanted.fields(), *more)))
    read = yield from _read_fields(context, list(kinds), names)
    times = yield from due_times(context, list(kinds))
    held = []
    for (job_id, kind), fields, due_ms in zip(kinds.items(), read, times, strict=True):
        match = Match(job_id, "delayed", fields)
        if due_ms is not None and due_ms > context.now_ms() and wanted.matches(match):
            held.append((match, kind))
    return held


@dataclass(frozen=True, slots=True)
class FoundJob:
    """A job that ``queue.search()`` has found; ``queue.get_job(found.id)`` reads it.

    Attributes:
        id: Its id.
        queue: Its queue.
        name: The task's name.
        state: Its state in BullMQ; ``waiting`` also for a delayed job that is due, if waiting jobs were searched.
        since_ms: When it finished; when it was created, if it has not finished.
        failed_reason: Why its last attempt failed, ``""`` if none did; secrets in it are hidden.
    """

    id: str
    queue: str
    name: str
    state: str
    since_ms: int
    failed_reason: str


@dataclass(frozen=True, slots=True)
class FoundJobs:
    """A page of the jobs that ``queue.search()`` has found.

    Attributes:
        jobs: The jobs. Those that run next, or finished last, come first in their states.
        scanned: How many jobs were read for this page.
        total: How many jobs the queue has in these states.
        cursor: Where the next page begins; ``None`` on the last page. If it is not ``None`` and there are fewer jobs
            than ``limit``, the search has read ``scan`` jobs.
    """

    jobs: tuple[FoundJob, ...]
    scanned: int
    total: int
    cursor: str | None


_LISTED_FIELDS: Final = ("name", "timestamp", "finishedOn", "failedReason")
_IDS_IN_CURSOR: Final = 3


def find_jobs(
    context: QueueContext,
    wanted: JobFilter,
    ages: tuple[Duration | None, Duration | None],
    limits: tuple[int, int],
    cursor: str | None,
) -> Operation[FoundJobs]:
    """Find jobs for ``queue.search()``; ``limits`` are how many to return, and to read."""
    wanted, (limit, scan) = wanted.at(context.now_ms(), *ages), limits
    # One more than asked for shows whether others follow.
    size = None if wanted.fields() else min(limit + 1, _PAGE_SIZE)
    start, seen = (None, "") if cursor is None else _read_cursor(cursor)
    search = JobSearch(context, wanted, more=_LISTED_FIELDS, size=size, start=start)
    total = yield from search.count()
    found: list[Match] = []
    following: str | None = None
    while search.scanned < scan:
        before = search.position
        page = yield from search.next()
        if page is None:
            return FoundJobs(tuple(_found(context, search, job) for job in found), search.scanned, total, None)
        ids = [match.id for match in page]
        page = page[ids.index(seen) + 1 :] if seen in ids else page
        seen = ""
        left = limit - len(found)
        found += page[:left]
        if len(page) > left:
            following = _write_cursor(before, found[-1].id)
            break
    else:
        following = _write_cursor(search.position, "")
    return FoundJobs(tuple(_found(context, search, job) for job in found), search.scanned, total, following)


def _found(context: QueueContext, search: JobSearch, match: Match) -> FoundJob:
    is_waiting = match.state in {"wait", "paused", "prioritized"} or search.is_due(match.state)
    state = "waiting" if is_waiting else match.state
    return FoundJob(match.id, context.queue, match.name, state, match.since_ms, redact_secrets(match.reason))


def _write_cursor(position: tuple[str, PageCursor] | None, seen: str) -> str | None:
    """Return where the next page begins: at ``position``, but after the job ``seen`` if it is still there."""
    if position is None:
        return None
    state, at = position
    return codec.cursor_of([state, at.score, at.distance, at.ids[:_IDS_IN_CURSOR], seen])


def _read_cursor(cursor: str) -> tuple[tuple[str, PageCursor], str]:
    return codec.read_cursor(cursor, _start_of)


def _start_of(parts: Any) -> tuple[tuple[str, PageCursor], str]:
    state, score, distance, ids, seen = parts
    known = PageCursor(str(score), int(distance), tuple(map(str, ids)))
    if not 0 <= known.distance <= MAX_SAFE_INTEGER or (score and not (isfinite(float(score)) and known.ids)):
        raise ValueError("no search ends there")
    return (str(state), known), str(seen)


class Action(StrEnum):
    """A change of many jobs."""

    RETRY = "retry"
    PROMOTE = "promote"
    REMOVE = "remove"
    REVOKE = "revoke"


_UNFINISHED: Final = ("waiting", "paused", "prioritized", "delayed", "waiting-children", "active")
_STATES_OF: Final[Mapping[Action, tuple[tuple[str, ...], tuple[str, ...]]]] = {
    Action.RETRY: (_FINISHED, ("failed",)),
    Action.PROMOTE: (("delayed",), ("delayed",)),
    Action.REMOVE: ((*_UNFINISHED, *_FINISHED), ()),
    Action.REVOKE: (_UNFINISHED, _UNFINISHED),
}
"""For each action the states in which it is possible, and its default states."""


def actions_in(state: str) -> tuple[Action, ...]:
    """Return the actions that are possible for jobs in a state."""
    return tuple(action for action, (possible, _) in _STATES_OF.items() if state in possible)


def _change_states(action: Action, states: Sequence[str]) -> tuple[str, ...]:
    """Return the states of the jobs to change; raises ``ConfigError`` if the action is not possible in one of them."""
    possible, default = _STATES_OF[action]
    if not (states or default):
        raise ConfigError(f"{action} needs a state: {', '.join(possible)}")
    if wrong := [state for state in states if state not in possible]:
        raise ConfigError(f"{action} is not possible for {wrong[0]} jobs, only for: {', '.join(possible)}")
    return tuple(states) or default


def _change(
    context: QueueContext, action: Action, job_id: str, state: str, *, terminate: bool = False
) -> Operation[None]:
    """Change a job that a search has found in a state; raises a ``JobError`` if that is no longer possible.

    Args:
        context: The queue.
        action: The change.
        job_id: The job.
        state: The state in which it was found, as Redis calls it: ``wait`` for ``waiting``.
        terminate: Cancel a running job that is revoked.
    """
    keys = context.keys
    if action is Action.RETRY:
        opts, parent_key = yield from execute(job_fields(keys, job_id, ("opts", "parentKey")))
        lifo = (mapping_field({b"opts": opts or b"{}"}, b"opts") or {}).get("lifo") is True
        yield from execute(reprocess_job(keys, job_id, state, has_parent=bool(parent_key), lifo=lifo))
    elif action is Action.PROMOTE:
        yield from execute(promote(keys, job_id))
    elif action is Action.REVOKE:
        outcome = yield from context.broker.revocation(context.queue, job_id, terminate=terminate)
        if outcome not in {Revocation.REVOKED, Revocation.TERMINATING}:
            raise JobStateError(job_id, keys.name, _NOT_REVOKED[outcome])
    else:
        yield from _remove(context, job_id, state)


_NOT_REVOKED: Final = {
    Revocation.RUNNING: "The job is running; use --terminate, or terminate=True, to cancel it.",
    Revocation.FINISHED: "The job has finished.",
    Revocation.UNKNOWN: "The job does not exist.",
}


def _remove(context: QueueContext, job_id: str, state: str) -> Operation[None]:
    keys = context.keys
    calls: list[Call[Any]] = [job_fields(keys, job_id, ("finishedOn",))]
    if state in SETS:
        calls.append(command("ZSCORE", keys.base + state, job_id))
    (finished,), *scores = yield calls
    if None in scores or (finished is not None and state not in _FINISHED):
        raise JobStateError(job_id, keys.name, f"It is no longer {state}.")
    if not (yield from execute(remove_job(keys, job_id, children=True))):
        raise LockMismatchError(job_id, keys.name, "The job or one of its child jobs is active and cannot be removed.")


_CHANGED_PER_ROUND_TRIP: Final = 200
_ERRORS_KEPT: Final = 20
_IN_MEMORY: Final = 1_000_000  # bytes


class BulkChangeBase:
    """What ``BulkChange`` and ``AsyncBulkChange`` share.

    The ids of the jobs are written to a temporary file if there are many, so that memory does not grow with them.

    Attributes:
        action: ``retry``, ``promote``, ``remove`` or ``revoke``.
        scanned: How many jobs ``find`` has read.
        matched: How many of them match.
        done: How many of these were changed.
        reasons: Why others were not, with the number of jobs.
        errors: The first 20 of these jobs, with their errors.
    """

    def __init__(
        self,
        context: QueueContext,
        action: str,
        wanted: JobFilter,
        ages: tuple[Duration | None, Duration | None],
        limits: tuple[int | None, int | None],
        *,
        terminate: bool,
    ) -> None:
        if action not in set(Action):
            raise ConfigError(f"action must be {', '.join(Action)}, not {action!r:.200}")
        self.action = Action(action)
        if terminate and self.action is not Action.REVOKE:
            raise ConfigError(f"terminate is not possible with {action}, only with revoke")
        is_retry_of_all = self.action is Action.RETRY and not wanted.has_error
        states = _change_states(self.action, wanted.states)
        self._wanted = replace(wanted, states=states, revoked=not is_retry_of_all)
        self._wanted.at(0, *ages)  # or an error now
        self._ages = ages
        limit, scan = limits
        self._limit = None if limit is None else check_positive(limit, "limit")
        self._scan = None if scan is None else check_positive(scan, "scan")
        self._terminate = terminate
        self._context = context
        self._ids = SpooledTemporaryFile(_IN_MEMORY, prefix="bulltask-jobs-")  # noqa: SIM115 - it is read later
        weakref.finalize(self, self._ids.close)
        self._is_found = False
        self._clear()

    def _clear(self) -> None:
        self.scanned = self.matched = self.done = 0
        self.reasons: Counter[str] = Counter()
        self.errors: list[tuple[str, JobError]] = []
        self._changed_to = 0  # the position in the file
        self._ids.seek(0)
        self._ids.truncate()

    def _find(self, progress: Progress | None) -> Operation[int]:
        """Write the id and state of each job that matches to the file, and return their number."""
        self._is_found = False
        self._clear()
        context = self._context
        # With a limit, those that `bulltask jobs` shows; otherwise, the oldest failed job is the first to run again.
        every = self._limit is None
        takes_out = every and self.action in {Action.REMOVE, Action.REVOKE}
        wanted = self._wanted.at(context.now_ms(), *self._ages)
        search = JobSearch(context, wanted, asc=every, newest_first=takes_out)
        total = yield from search.count()
        while self.matched != self._limit and (self._scan is None or search.scanned < self._scan):
            page = yield from search.next()
            if page is None:
                break
            matches = page if self._limit is None else page[: self._limit - self.matched]
            self._ids.writelines(json.dumps((match.id, match.state)).encode() + b"\n" for match in matches)
            self.matched += len(matches)
            self.scanned = search.scanned
            if progress is not None:
                progress(self.scanned, total)
        self._is_found = True
        return self.matched

    def _next(self) -> list[tuple[str, str]]:
        """Return the ids and states of the next jobs to change."""
        self._ids.seek(self._changed_to)
        return [json.loads(line) for line in islice(iter(self._ids.readline, b""), _CHANGED_PER_ROUND_TRIP)]

    def _changes(self, jobs: Sequence[tuple[str, str]]) -> list[Operation[None]]:
        return [_change(self._context, self.action, *job, terminate=self._terminate) for job in jobs]

    def _note(
        self, jobs: Sequence[tuple[str, str]], errors: Sequence[BulltaskError | None], progress: Progress | None
    ) -> None:
        """Count what has become of the jobs of a round trip; raises the server's error, if there is one."""
        if error := next((error for error in errors if error is not None and not isinstance(error, JobError)), None):
            raise error
        for (job_id, _), error in zip(jobs, errors, strict=True):
            if not isinstance(error, JobError):
                self.done += 1
                continue
            self.reasons[(type(error).__doc__ or "").strip().splitlines()[0]] += 1
            if len(self.errors) < _ERRORS_KEPT:
                self.errors.append((job_id, error))
        self._changed_to = self._ids.tell()
        if progress is not None:
            progress(self.done + self.reasons.total(), self.matched)


_MAX_GROUPS: Final = 10_000
_TYPES_READ: Final = 100


@dataclass(slots=True)
class FailureGroup:
    """Failed jobs of one task with one class and fingerprint of error.

    Attributes:
        queue, task: The queue and the task.
        type: The class of the error, ``""`` if it is not known.
        error: The text of the error, with ``#`` for its variable parts.
        example: The id of the newest of these jobs.
        example_error: Its error; secrets in it are hidden.
        last_ms, first_ms: When the newest and the oldest of them failed.
        count: How many they are.
        is_uniform: Whether the errors of all have the same text.
    """

    queue: str
    task: str
    type: str
    error: str
    example: str
    example_error: str
    last_ms: int
    first_ms: int
    count: int = 0
    is_uniform: bool = True


@dataclass(frozen=True, slots=True)
class FailureGroups:
    """The failed jobs of a queue, in groups.

    Attributes:
        groups: Those with the most jobs first.
        scanned: How many failed jobs were read.
        total: How many the queue has.
    """

    groups: tuple[FailureGroup, ...]
    scanned: int
    total: int


class _Failures:
    """Groups the failed jobs of a queue."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context
        self._groups: dict[tuple[str, str, str], FailureGroup] = {}
        self._types: dict[tuple[str, str], Counter[str]] = {}

    def add(self, page: Sequence[Match]) -> Operation[None]:
        reasons = [redact_secrets(match.reason) for match in page]
        prints = [_fingerprint(reason) for reason in reasons]
        types = yield from self._find_types(page, prints)
        for match, reason, fingerprint, kind in zip(page, reasons, prints, types, strict=True):
            # A revoked job has an error with a class only if it was running.
            key = (match.name, "" if reason == REVOKED else kind, fingerprint)
            if key not in self._groups and len(self._groups) >= _MAX_GROUPS:
                key = ("(others)", "", "(others)")
            group = self._groups.get(key)
            if group is None:
                since_ms = match.since_ms
                group = FailureGroup(self._context.queue, *key, match.id, reason, since_ms, since_ms)
                self._groups[key] = group
            group.count += 1
            group.is_uniform &= reason == group.example_error
            group.first_ms = min(group.first_ms, match.since_ms)
            group.last_ms = max(group.last_ms, match.since_ms)

    def most_frequent(self) -> tuple[FailureGroup, ...]:
        return tuple(sorted(self._groups.values(), key=lambda group: (-group.count, -group.last_ms)))

    def _find_types(self, page: Sequence[Match], prints: Sequence[str]) -> Operation[list[str]]:
        """Return the class of each job's error.

        Only tracebacks have it, and they are long. So if the first jobs with a fingerprint have the same class, others
        with this fingerprint have it, too, unless there is no word in it.
        """
        found, unknown = [""] * len(page), []
        for index, (match, fingerprint) in enumerate(zip(page, prints, strict=True)):
            key = (match.name, fingerprint)
            if key not in self._types and len(self._types) >= _MAX_GROUPS:
                continue
            seen = self._types.setdefault(key, Counter())
            if len(seen) == 1 and seen.total() >= _TYPES_READ and any(map(str.isalpha, fingerprint)):
                found[index] = next(iter(seen))
            else:
                unknown.append((index, seen))
        types = yield from _error_types(self._context, [page[index] for index, _ in unknown])
        for (index, seen), kind in zip(unknown, types, strict=True):
            found[index] = kind
            seen[kind] += 1
        return found


def group_failures(
    context: QueueContext, wanted: JobFilter, newer_than: Duration | None, scan: int, progress: Progress | None
) -> Operation[FailureGroups]:
    """Group the failed jobs of a queue that match, newest first, until ``scan`` jobs have been read."""
    failures, wanted = _Failures(context), wanted.at(context.now_ms(), None, newer_than)
    search = JobSearch(context, wanted, more=("name", "failedReason", "finishedOn"))
    total = yield from search.count()
    while search.scanned < scan and (page := (yield from search.next())) is not None:
        yield from failures.add(page)
        if progress is not None:
            progress(search.scanned, min(total, scan))
    return FailureGroups(failures.most_frequent(), search.scanned, total)


def _error_types(context: QueueContext, jobs: Sequence[Match]) -> Operation[list[str]]:
    """Return the class of each failed job's error, from its last traceback; ``""`` if that is not known."""
    types: list[str] = []
    for start in range(0, len(jobs), _TRACES_PER_ROUND_TRIP):
        part = jobs[start : start + _TRACES_PER_ROUND_TRIP]
        rows: list[list[bytes | None]] = yield [job_fields(context.keys, job.id, ("stacktrace",)) for job in part]
        for job, (stored,) in zip(part, rows, strict=True):
            traces = json_field({b"stacktrace": stored or b"[]"}, b"stacktrace")
            last = traces[-1] if isinstance(traces, list) and traces else ""
            types.append(error_type(job.reason, last) if isinstance(last, str) else "")
    return types


_SCHEDULES_PER_ROUND_TRIP: Final = 200
_SEARCHED: Final = 1_000
_DIGEST: Final = re.compile(r"[0-9a-f]{32}")
"""What ids of the jobs of repeatable jobs of Bull and old versions of BullMQ have instead of the schedule's id."""
_RUN_FIELDS: Final = ("name", "timestamp", "opts", "processedOn", "finishedOn")


class LastRun(NamedTuple):
    """The last job of a schedule.

    Attributes:
        at_ms: When it finished; when it started, or was due, if it has not finished.
        id: Its id, ``""`` if it is no longer in Redis.
        state: Its state in BullMQ, ``"removed"`` if it is no longer in Redis.
    """

    at_ms: int
    id: str
    state: str


def last_runs(context: QueueContext, schedulers: Sequence[Scheduler]) -> Operation[list[LastRun | None]]:
    """Return the last job of each schedule, ``None`` if there was none, or nothing is known of it.

    Its id follows from the schedule's times, unless it ran late. Then, it is searched among the active jobs and the
    newest 1,000 finished ones. If it was removed, its next job, which it has added, still tells when it started.
    """
    keys, zone = context.keys, zone_of(context.broker.config.timezone)
    runs: list[LastRun | None] = []
    missing: dict[str, tuple[int, int]] = {}  # by id: the schedule's position, and when its last job started
    for start in range(0, len(schedulers), _SCHEDULES_PER_ROUND_TRIP):
        part = schedulers[start : start + _SCHEDULES_PER_ROUND_TRIP]
        ids = [(item.next_job_id, iteration_id(item.id, _previous_ms(item, zone))) for item in part]
        both = [job_id for pair in ids for job_id in pair]
        fields = yield from _read_fields(context, both, _RUN_FIELDS)
        states = yield [get_state(keys, job_id) for job_id in both]
        for index, (item, pair) in enumerate(zip(part, ids, strict=True)):
            upcoming, previous = fields[2 * index : 2 * index + 2]
            # If the schedule is over, its last job is still the next one.
            which = 0 if upcoming.keys() & {b"processedOn", b"finishedOn"} else 1
            if which == 0 or previous:
                job = Match(pair[which], str(states[2 * index + which]), (upcoming, previous)[which])
                runs.append(LastRun(job.ran_ms, job.id, job.state))
                continue
            runs.append(None)
            if item.iterations > 1:
                repeat = (mapping_field(upcoming, b"opts") or {}).get("repeat")
                count = repeat.get("count") if isinstance(repeat, Mapping) else None
                by_last = isinstance(count, int) and count > 1  # and not by who has changed the schedule
                missing[item.id] = start + index, (int_field(upcoming, b"timestamp") or 0) if by_last else 0
    if missing:
        yield from _search_runs(context, missing, runs)
    return runs


def _previous_ms(item: Scheduler, zone: tzinfo) -> int:
    if not (item.pattern or item.every_ms):
        return 0
    try:
        return item.rule.previous_ms(item.next_ms, zone) or 0
    except SCHEDULING_ERRORS:
        return 0  # the rule is malformed


def _search_runs(
    context: QueueContext, missing: dict[str, tuple[int, int]], runs: list[LastRun | None]
) -> Operation[None]:
    for state in ("active", *_FINISHED):
        for match in (yield from _newest_runs(context, state, missing, ("processedOn",))):
            position, _ = missing[match.text("rjk")]
            found = LastRun(match.ran_ms, match.id, state)
            known = runs[position]
            runs[position] = found if known is None else max(known, found)
    for position, started_ms in missing.values():
        if runs[position] is None and started_ms:
            runs[position] = LastRun(started_ms, "", "removed")


def recent_jobs(context: QueueContext, scheduler_id: str, count: int) -> Operation[list[Match]]:
    """Return the newest finished jobs of a schedule among the queue's newest 1,000 of each state."""
    found: list[Match] = []
    for state in _FINISHED:
        found += yield from _newest_runs(context, state, {scheduler_id}, ("failedReason",))
    return sorted(found, key=lambda job: -job.since_ms)[:count]


def _newest_runs(
    context: QueueContext, state: str, scheduler_ids: Collection[str], more: Sequence[str]
) -> Operation[list[Match]]:
    """Return the jobs of these schedules among the newest 1,000 of a state."""

    def may_be_run(job_id: str) -> bool:
        part = job_id.removeprefix("repeat:").rpartition(":")[0]
        return part in scheduler_ids or _DIGEST.fullmatch(part) is not None

    fields = ("rjk", "finishedOn", *more)
    search = JobSearch(context, JobFilter(states=(state,)), more=fields, size=_SEARCHED, only=may_be_run)
    found: list[Match] = []
    while search.scanned < _SEARCHED and (page := (yield from search.next())) is not None:
        found += [job for job in page if job.text("rjk") in scheduler_ids]
    return found
