"""Find jobs by a filter, and change many of them: what ``bulltask jobs`` and ``bulltask failures`` do.

Redis has no index of jobs, so a search reads a queue's jobs page by page, and of each job only the fields that the
filter needs. No call blocks Redis for long: a page of ids is one call, and each job is read by another.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.codec import int_field, json_field, mapping_field
from bulltask.jobs.errors import ConfigError, JobStateError, LockMismatchError
from bulltask.jobs.failure_reasons import plain_reason
from bulltask.jobs.fields import error_type
from bulltask.jobs.names import REVOKED, Revocation
from bulltask.queue.context import QueueContext
from bulltask.queue.fields import STATES_IN_ORDER, JobPages, states_of
from bulltask.transport.call import Call, command
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.job import job_fields, promote, remove_job, reprocess_job
from bulltask.transport.scripts.queue import (
    DELAYED_SCORE,
    LISTS,
    SETS,
    PageCursor,
    count_by_score,
    state_size,
)

__all__ = ["Action", "JobFilter", "JobSearch", "Match", "change", "change_states", "error_types"]

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
        text: Part of its id, name, data as stored, or failure reason; case is ignored.
        before_ms: It finished before this time; if it has not finished, it was created before it.
        after_ms: It finished, or was created, at this time or later.
        revoked: Whether revoked jobs match.
    """

    states: tuple[str, ...] = ()
    task: str | None = None
    error: str | None = None
    text: str | None = None
    before_ms: int | None = None
    after_ms: int | None = None
    revoked: bool = True

    def fields(self) -> tuple[str, ...]:
        """Return the names of the fields that :meth:`matches` reads."""
        has_text = self.text is not None
        has_time = self.before_ms is not None or self.after_ms is not None
        needed = {
            "name": self.task is not None or has_text,
            "timestamp": has_time,
            "finishedOn": has_time,
            "failedReason": self.error is not None or has_text or not self.revoked,
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
        if self.error is not None and self.error.casefold() not in match.reason.casefold():
            return False
        texts = () if self.text is None else (match.id, match.name, match.reason, match.text("data"))
        return self.text is None or self.text.casefold() in "\0".join(texts).casefold()


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


class JobSearch:
    """A search through a queue's jobs; each :meth:`next` reads a page.

    Args:
        context: The queue.
        wanted: Which jobs.
        asc: Begin with the job that finished first; otherwise, finished jobs begin with the newest.
        newest_first: Begin with the newest of the waiting jobs. BullMQ searches a list from there to remove a job, so
            removing a job takes time only for the newer ones that stay.
        more: Further fields to read of each job.

    Attributes:
        scanned: How many jobs were read.
    """

    def __init__(
        self,
        context: QueueContext,
        wanted: JobFilter,
        *,
        asc: bool = False,
        newest_first: bool = False,
        more: Sequence[str] = (),
    ) -> None:
        self.scanned = 0
        self._context = context
        self._wanted = wanted
        self._asc = asc
        self._newest_first = newest_first
        self._fields = tuple(dict.fromkeys((*wanted.fields(), *more)))
        self._size = _DATA_PAGE_SIZE if "data" in self._fields else _PAGE_SIZE
        names = {"wait" if state == "waiting" else state for state in states_of(wanted.states)}
        self._only_due = "waiting" in wanted.states and "delayed" not in names
        if "waiting" in wanted.states:
            names |= {"prioritized", "delayed"}
        self._states = deque(state for state in STATES_IN_ORDER if state in names)
        self._pages: JobPages | None = None

    def count(self) -> Operation[int]:
        """Count the jobs in the filter's states, which is the most that the search reads."""
        keys, due = self._context.keys, f"({self._due_score()}"
        sizes: list[int] = yield [
            count_by_score(keys, state, "-inf", due) if self.is_due(state) else state_size(keys, state)
            for state in self._states
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
                matches = yield from self._read(state, ids)
                self.scanned += len(ids)
                if self._is_past(state, matches):
                    self._next_state()
                return [match for match in matches if self._wanted.matches(match)]
            self._next_state()
        return None

    def _next_state(self) -> None:
        self._states.popleft()
        self._pages = None

    def _begin(self, state: str) -> JobPages:
        """Begin at the first job that may match: finished jobs are sorted by the time when they finished."""
        if self.is_due(state):
            due = PageCursor(score=str(self._due_score()), ids=("",))
            return JobPages(self._context, [state], self._size, asc=False, start=due)
        asc = self._asc if state in _FINISHED else not (self._newest_first and state in LISTS)
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
        if not self._fields:
            return [Match(job_id, state, {}) for job_id in ids]
        names = [name.encode() for name in self._fields]
        rows = yield [job_fields(self._context.keys, job_id, self._fields) for job_id in ids]
        found = [
            (job_id, {name: value for name, value in zip(names, row, strict=True) if value is not None})
            for job_id, row in zip(ids, rows, strict=True)
        ]
        return [Match(job_id, state, fields) for job_id, fields in found if fields]


def error_types(context: QueueContext, jobs: Sequence[Match]) -> Operation[list[str]]:
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


def change_states(action: Action, states: Sequence[str]) -> tuple[str, ...]:
    """Return the states of the jobs to change; raises ``ConfigError`` if the action is not possible in one of them."""
    possible, default = _STATES_OF[action]
    if not (states or default):
        raise ConfigError(f"{action} needs a state: {', '.join(possible)}")
    if wrong := [state for state in states if state not in possible]:
        raise ConfigError(f"{action} is not possible for {wrong[0]} jobs, only for: {', '.join(possible)}")
    return tuple(states) or default


def change(
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
    Revocation.RUNNING: "The job is running; use --terminate to cancel it.",
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
