"""Why a job does not run, or why a queue stands still: all reasons, what proves them in Redis, and what mends them.

:func:`explain_job` and :func:`explain_queue` read one snapshot in three round trips, which is then judged in Python;
:func:`explain_queue` adds what is wrong with the child jobs of a few of its jobs.
Every command takes constant time, or reads a bounded part of a list or set. If the job has moved in the meantime, the
snapshot is read again. Search for a code in quotes to find what proves it: the method of :class:`_View` that adds it.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime
from math import inf, isfinite
from shlex import quote
from typing import Any, Final, Literal, TypeVar

from bulltask.config.urls import redact_secrets
from bulltask.jobs import codec
from bulltask.jobs.clock import moment_of, wall_ms
from bulltask.jobs.codec import field_number, number
from bulltask.jobs.errors import (
    BrokerAuthError,
    BrokerError,
    BrokerNotReadyError,
    BrokerUnavailableError,
    BulltaskError,
    nearest,
)
from bulltask.jobs.fields import CHECKPOINT_FIELD
from bulltask.jobs.job import BULLTASK_KEY, INCOMPATIBLE_FIELD, RELEASES_FIELD
from bulltask.jobs.names import REVOKED, JobState, address_of, bullmq_name, name_in_app
from bulltask.queue.context import QueueContext
from bulltask.transport.call import AllNodesCall, Call, QueueKeys, command, info_by_name, text, texts, texts_by_name
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts.move import CRASHES
from bulltask.transport.scripts.queue import (
    DELAYED_SCORE,
    LISTS,
    SETS,
    ClientRow,
    Pause,
    list_clients,
    queue_of_connection,
)
from bulltask.transport.streams import id_parts
from bulltask.transport.workers import WorkerChild, WorkerJob, WorkerState, pid_of_worker, read_workers

__all__ = ["REASONS", "Certainty", "Explanation", "Reason", "explain_job", "explain_queue", "traces", "unreachable"]


R = TypeVar("R")
Certainty = Literal["proved", "likely", "cannot see"]

REASONS: Final[Mapping[str, str]] = {
    # Redis
    "redis-unreachable": "Redis cannot be reached",
    "redis-loading": "Redis cannot execute commands yet, for example because it is loading its data",
    "redis-full": "Redis has reached `maxmemory`, and rejects writes",
    "redis-read-only": "the server is a replica, or cannot save its data",
    # The job's place
    "unknown-queue": "there is no such queue",
    "unknown-job": "there is no such job",
    "deduplicated": "a deduplication id keeps new jobs out",
    "hash-gone": "the job's hash was deleted or evicted",
    "foreign": "the job's hash is malformed, or another program's",
    "lost": "the job is in no list",
    "bull-queue": "the queue is one of Bull (npm's `bull`), not of BullMQ",
    "wrong-hash-tag": "the jobs, or the workers, are in the queue's other spelling, with or without `{}`",
    # It waits for nothing any more
    "completed": "the job has completed",
    "failed": "the job has failed and will not be retried",
    "revoked": "the job was revoked; if it is running, it is being cancelled",
    # It waits for other jobs
    "child-failed": "a child job has failed; the parent waits forever",
    "child-gone": "a child job was removed; the parent waits forever",
    "waiting-children": "the job waits for its child jobs",
    # A worker has it
    "no-stalled-check": "the job's lock has expired, and no worker looks for stalled jobs",
    "lock-expired": "the job's lock has expired; it runs again after a stalled check",
    "worker-gone": "the job's worker is gone, but its lock has not expired yet",
    "child-stopped": "a child was stopped while it had jobs",
    "prefetched": "a child has acquired the job in advance",
    "batch-filling": "the job's batch is not full yet",
    "running": "a worker is running the job",
    # It waits for a time
    "schedule-late": "a job scheduler's next job is overdue, or missing",
    "unknown-task": "the workers do not have the task",
    "incompatible": "no worker could run the job: its data does not match, or a key or serializer is missing",
    "retry": "an attempt has failed; the next one is due later",
    "schedule": "it is the next job of a scheduler",
    "task-rate-limit": "the task's rate limit",
    "delayed": "the job has a `countdown` or `eta`",
    # Its queue
    "paused": "the queue is paused",
    "paused-apart": "BullMQ 5 and 6 have both paused the queue; some jobs are still in `paused`",
    "no-worker": "no worker is connected",
    "workers-closing": "the workers are shutting down",
    "workers-paused": "the workers are paused, but not the queue",
    "queue-cancelled": "the workers were told to fetch no jobs from the queue",
    "no-permits": "the workers have started as many jobs as `--max-jobs` allows",
    "no-children": "no child of the workers acquires jobs",
    "worker-silent": "a worker's supervisor is stopped, or hangs",
    "queue-rate-limit": "the queue's rate limit",
    "global-concurrency": "the queue's global concurrency",
    "workers-busy": "the workers' slots or children are busy",
    "clocks-apart": "the clock of the sender, or of this machine, differs from Redis'",
    # What will happen to it
    "expired": "the job has expired, and will fail",
    "will-fail": "the job will fail when a worker acquires it",
    "released": "workers that stopped have released the job",
    "quarantined": "the job was in a process that crashed; it runs alone, or with few others",
    # Its turn
    "due": "the job is due; the next worker that asks for a job moves it",
    "prioritized": "jobs with a better priority, or with none, come first",
    "behind": "other jobs come first",
    "not-acquired": "nothing holds the job, but no worker acquires it: children hang or are stopped",
    "marker-lost": "idle workers were not woken up",
    "next": "nothing holds the job",
    "working": "nothing holds the queue",
    "empty": "no job waits",
    # What could not be read
    "cannot-see": "something may not be read",
}
"""All codes, with their meaning. Their order is that of causes: a reason that binds earlier comes first."""

_OF_SOME_JOBS: Final = dict.fromkeys(
    "child-failed child-gone lock-expired worker-gone schedule-late unknown-task incompatible delayed task-rate-limit "
    "waiting-children due working empty".split(),
    1,
) | {"deduplicated": 2}
"""What holds some of a queue's jobs, and after that, what holds none that it has."""

_HARMLESS: Final = frozenset(
    "child-failed child-gone behind prioritized deduplicated due delayed cannot-see schedule clocks-apart "
    "released".split()
)
"""Reasons that hold no job that is ready to run."""

_RANK: Final = {code: rank for rank, code in enumerate(REASONS)}

_SEARCHED: Final = 1_000
"""How many members of a list are searched for a job, from each end."""

_SAMPLE: Final = 100
"""How many active jobs or child jobs are looked at."""

_LINE_READ: Final = 20
"""How many throttled jobs of each task are looked at."""

_OWNERS_READ: Final = 50
"""How many jobs of each state are read whose deduplication ids may keep new jobs out."""

_PARENTS: Final = 3
"""How many jobs that wait for child jobs an explanation of a queue explains."""

_SHOWN: Final = 5
"""How many of them a sentence names."""

_MAX_CLIENTS: Final = 1_000
"""With more connections, ``CLIENT LIST`` would block Redis for more than a few milliseconds."""

_EVENTS: Final = 500
"""How many of the newest events are read: when was the queue paused, or a job dropped, and is one lost?"""
_SAME_PAUSE_MS: Final = 2_000
"""How much earlier than its event the note of a pause may be."""

_READS: Final = 3
"""How often a job that keeps moving is read."""

_MAX_TEXT: Final = 300

_CLOCK_MS: Final = 5_000
"""The smallest difference of two clocks that is a reason."""

_LATE_MS: Final = 5_000
"""How long a scheduled job may be overdue before it is late."""

_LONG_MS: Final = 60_000
"""After this time, a job that alone keeps others from running may be stuck."""

_NEGLECTED_MS: Final = 15_000
"""After this time, workers should have acquired the next job of a queue; they look for jobs by themselves, too."""

_SILENT: Final = 0.6
"""A worker writes its state three times while it is valid; after this part without another one, it is silent."""

_THROTTLED: Final = "bulltask:throttled"
_COUNTS: Final = (*LISTS, "prioritized", "delayed", "due", "children")
_FIELDS: Final = (
    *"name opts timestamp delay priority atm ats stc processedOn finishedOn pb failedReason defa deid rjk".split(),
    *(CRASHES, _THROTTLED, INCOMPATIBLE_FIELD, RELEASES_FIELD),
)
_NO_LIMIT: Final = "none"
"""The stored rate limit of a task that has none any more."""
_NOT_REGISTERED: Final = "is not registered in app"
_LOCKS: Final = {"expired": " (lock expired)", "worker gone": " (its worker is gone)"}
_OWNERS: Final = {
    "unfinished": "",
    "finished": ", which has finished",
    "gone": ", whose hash is gone: senders other than bulltask add no job with this id any more",
}
"""What is said of the job that a deduplication id belongs to."""
_OUTAGE: Final = (BrokerUnavailableError, BrokerNotReadyError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """One reason why a job or a queue does not move.

    Attributes:
        code: Its name, one of :data:`REASONS`.
        sentence: The reason in one sentence.
        certainty: ``"proved"``, ``"likely"``, or ``"cannot see"``: something that decides may not be read.
        evidence: What was read in Redis.
        command: The command that mends it: of a shell, of ``redis-cli``, or Python; ``None`` if waiting suffices.
        expected_s: Seconds until it ends by itself, ``None`` if that is not known.
        expected_at: The same as a time (UTC).
    """

    code: str
    sentence: str
    certainty: Certainty = "proved"
    evidence: Mapping[str, Any]
    command: str | None = None
    expected_s: float | None = None
    expected_at: datetime | None = None

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values; ``expected_at`` in ISO 8601."""
        return {**asdict(self), "expected_at": self.expected_at and self.expected_at.isoformat()}


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a job does not run, or why a queue stands still.

    Attributes:
        queue: The queue's name in the app.
        job_id: The job; ``None`` if the queue is explained.
        state: The job's state, one of :class:`bulltask.JobState`; ``None`` for a queue, or if it could not be read.
        reasons: All reasons that hold, the one that binds first comes first. There is always at least one.
    """

    queue: str
    job_id: str | None
    state: str | None
    reasons: tuple[Reason, ...]

    @property
    def codes(self) -> tuple[str, ...]:
        """The codes of the reasons."""
        return tuple(reason.code for reason in self.reasons)

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON values."""
        reasons = [reason.to_json() for reason in self.reasons]
        return {"queue": self.queue, "job_id": self.job_id, "state": self.state, "reasons": reasons}

    def __str__(self) -> str:
        return "\n".join(reason.sentence for reason in self.reasons)


def explain_job(context: QueueContext, job_id: str) -> Operation[Explanation]:
    """Read why a job does not run; an unknown job has the state ``unknown``."""
    view, reads = _View(context, job_id), 1
    while not (yield from view.read()) and reads < _READS:
        view, reads = _View(context, job_id), reads + 1
    return view.explanation()


def explain_queue(context: QueueContext) -> Operation[Explanation]:
    """Read why a queue's jobs do not run."""
    view = _View(context, None)
    yield from view.read()
    for job_id in (*view.parents, *view.suspects):  # each takes three round trips more
        view.add_of_job(job_id, (yield from explain_job(context, job_id)))
    return view.explanation()


def traces(keys: QueueKeys, job_id: str) -> list[Call[bool]]:
    """Return calls, of which one is true if a queue has a trace of a job without a hash, or of a deduplication id."""
    found: list[Call[bool]] = [
        command("EXISTS", keys.deduplication(job_id), parse_reply=bool),
        _read_events(keys, lambda events: _when_dropped(events, job_id) is not None),
    ]
    places: list[tuple[str | int, ...]] = [("ZSCORE", f"{keys.base}{state}", job_id) for state in SETS]
    places += [("LPOS", f"{keys.base}{name}", job_id, "RANK", -1, "MAXLEN", _SEARCHED) for name in LISTS]
    return found + [command(*words, parse_reply=lambda reply: reply is not None) for words in places]


_Event = tuple[int, Mapping[str, str]]
"""When it was written, and its fields."""


def _read_events(keys: QueueKeys, parse: Callable[[Sequence[_Event]], R]) -> Call[R]:
    """Read the newest events of a queue, the newest first."""

    def parse_reply(reply: Any) -> R:
        return parse([(id_parts(text(entry_id))[0], texts_by_name(words)) for entry_id, words in reply])

    return command("XREVRANGE", keys.events, "+", "-", "COUNT", _EVENTS, parse_reply=parse_reply)


def _when_dropped(events: Sequence[_Event], job_id: str | None) -> tuple[int, str, str] | None:
    """When was the job dropped, because of which deduplication id, and for which job?"""
    for at_ms, fields in events:
        if fields.get("event") == "deduplicated" and fields.get("deduplicatedJobId") == job_id:
            return at_ms, fields.get("deduplicationId", ""), fields.get("jobId", "")
    return None


def unreachable(queue: str, job_id: str | None, exc: BrokerError) -> Explanation:
    """Return the explanation for an error that prevents reading; re-raise any other error."""
    if isinstance(exc, BrokerNotReadyError):
        code, command_line = "redis-loading", "redis-cli INFO persistence"
    elif isinstance(exc, BrokerUnavailableError):
        code, command_line = "redis-unreachable", "redis-cli PING"
    else:
        raise exc
    reason = Reason(code=code, sentence=str(exc), evidence={"error": type(exc).__name__}, command=command_line)
    return Explanation(queue, job_id, None, (reason,))


@dataclass(slots=True)
class _Replies:
    """Replies by the names of their calls; what Redis has refused is ``None``, with the error in ``refused``."""

    refused: dict[str, BulltaskError] = field(default_factory=dict)
    found: dict[str, Any] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Any:
        return self.found.get(name)

    def sees(self, *names: str) -> bool:
        """Whether the calls were made, and Redis refused none of them."""
        return all(name in self.found and name not in self.refused for name in names)

    def count(self, *names: str) -> int:
        """Return the sum of sizes."""
        return sum(int(self.found.get(name) or 0) for name in names)

    def read(self, calls: Mapping[str, Call[Any]]) -> Operation[None]:
        """Make calls in one round trip; if Redis refuses one of them, each by itself."""
        if not calls:
            return
        try:
            replies: list[Any] = yield list(calls.values())
        except _OUTAGE:
            raise
        except BulltaskError:
            replies = []
            for call in calls.values():
                replies.append((yield from _tolerant(execute(call))))
        for name, reply in zip(calls, replies, strict=True):
            self.add(name, reply)

    def add(self, name: str, reply: Any) -> None:
        """Store a reply, or the error of a call that Redis has refused."""
        self.found[name] = None if isinstance(reply, BulltaskError) else reply
        self.refused.pop(name, None)
        if isinstance(reply, BulltaskError):
            self.refused[name] = reply


def _tolerant(operation: Operation[R]) -> Operation[R | BulltaskError]:
    """Run an operation; return its error if Redis refuses one of its calls."""
    try:
        return (yield from operation)
    except _OUTAGE:
        raise
    except BulltaskError as exc:
        return exc


@dataclass(frozen=True, slots=True)
class _Fleet:
    """The workers of a queue, as far as they can be seen.

    Attributes:
        states: The states of those that store one, by their ids.
        unknown: Ids, or names, of connected workers without a state, such as those of Node.js.
        silent: Ids of bulltask's workers whose supervisor no longer writes its state.
        sees_all: Whether both the connections and the states could be read.
        killed: Ids of those with children that have stored a state a moment ago, but no longer have any connection.
    """

    states: Mapping[str, WorkerState]
    unknown: Sequence[str]
    silent: Sequence[str]
    sees_all: bool
    killed: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        stored: Mapping[str, WorkerState | None] | None,
        rows: Sequence[ClientRow] | None,
        keys: QueueKeys,
        now: int,
    ) -> _Fleet:
        """Combine the stored states with all connections; ``None`` for what could not be read."""
        own = _workers_of(rows or (), keys)
        connected = {row.name.removeprefix(keys.client_name()).removeprefix(":w:") for row in own}
        # A worker with many queues has connections only for some of them.
        anywhere = {row.name.rpartition(":w:")[2] for row in rows or ()}
        states, silent, killed = dict[str, WorkerState](), list[str](), list[str]()
        for worker_id, state in (stored or {}).items():
            if state is not None and now - state.at_ms <= _SILENT * state.ttl_ms:
                if rows is not None and worker_id not in anywhere and any(it.state == "run" for it in state.children):
                    killed.append(worker_id)
                else:
                    states[worker_id] = state
            elif rows is None or worker_id in connected:  # otherwise, it was killed
                silent.append(worker_id)
        others = connected - set(stored or ())
        if stored is not None:
            silent += sorted(other for other in others if pid_of_worker(other))
        unknown = sorted(others - set(silent))
        return cls(states, unknown, silent, stored is not None and rows is not None, killed)

    def has(self, worker: str) -> bool:
        """Whether a worker may be alive."""
        return not self.sees_all or worker in {*self.states, *self.unknown, *self.silent}

    def find(self, job_id: str, queue: str) -> tuple[WorkerState, WorkerChild, WorkerJob] | None:
        """Return the worker and the child that have a job."""
        jobs = ((state, child, job) for state in self.states.values() for child in state.children for job in child.jobs)
        return next((found for found in jobs if (found[2].id, found[2].queue) == (job_id, queue)), None)


class _View:
    """What was read about a queue, and perhaps a job in it; its methods judge it."""

    def __init__(self, context: QueueContext, job_id: str | None) -> None:
        self._keys = keys = context.keys
        self._queue = context.queue
        self._id = job_id
        self._config = context.broker.config
        self._url = context.broker.endpoint.safe_url
        self._database = context.broker.endpoint.url.database
        self._now_ms = context.now_ms()
        self._replies = _Replies()
        self._reasons: list[Reason] = []
        self._twin = QueueKeys(keys.prefix, _other_spelling(keys.name))
        self._fields: dict[str, str] = {}
        self._opts: Mapping[str, Any] = {}
        self._children: list[str] = []
        self._holders: list[str] = []
        self._state: JobState | None = None
        self._fleet = _Fleet({}, (), (), sees_all=False)

    # ---- reading -------------------------------------------------------------------------------------------------

    def read(self) -> Operation[bool]:
        """Read everything; return False if the job has moved meanwhile."""
        replies = self._replies
        yield from replies.read({**self._queue_calls(), **self._place_calls(), **self._job_calls()})
        self._state = self._find_state()
        before = self._place()
        self._read_fields()
        yield from replies.read(self._detail_calls())
        self._children = [*(replies["pending"] or ()), *(replies["unsuccessful"] or ())][:_SAMPLE]
        self._holders = replies["holders"] or []
        yield from self._read_fleet()
        yield from replies.read({**self._member_calls(), **self._place_calls()})
        return before == self._place()

    def _read_fleet(self) -> Operation[None]:
        replies = self._replies
        replies.add("workers", (yield from _tolerant(read_workers([self._keys], self._now_ms))))
        stored = replies["workers"][0] if replies.sees("workers") else None
        rows = replies["clients"] if replies.sees("clients") else None
        self._fleet = _Fleet.of(stored, rows, self._keys, self._now_ms)

    def _queue_calls(self) -> dict[str, Call[Any]]:
        keys, twin = self._keys, self._twin
        return {
            **(self._sample_calls() if self._id is None else {}),
            "meta": command("HMGET", keys.meta, "paused", "concurrency", "max", "duration", "version"),
            "wait": command("LLEN", keys.wait),
            "paused": command("LLEN", keys.paused),
            "active": command("LLEN", keys.active),
            "prioritized": command("ZCARD", keys.prioritized),
            "delayed": command("ZCARD", keys.delayed),
            "children": command("ZCARD", keys.waiting_children),
            "parents": command("ZRANGE", keys.waiting_children, 0, _PARENTS - 1, parse_reply=texts),
            "marker": command("ZCARD", keys.marker),
            "due": command("ZCOUNT", keys.delayed, "-inf", f"({(self._now_ms + 1) * DELAYED_SCORE}"),
            "first delayed": command("ZRANGE", keys.delayed, 0, 0, "WITHSCORES", parse_reply=_first),
            "first scheduler": command("ZRANGE", keys.repeat, 0, 0, "WITHSCORES", parse_reply=_first),
            "incompatible": command("ZRANGE", keys.incompatible, 0, _SAMPLE - 1, parse_reply=texts),
            "all incompatible": command("ZCARD", keys.incompatible),
            "head": command("LRANGE", keys.wait, -1, -1, parse_reply=texts),
            "rates": command("HGETALL", keys.task_rates, parse_reply=texts_by_name),
            "limiter": command("GET", keys.limiter),
            "limiter ttl": command("PTTL", keys.limiter),
            "check ttl": command("PTTL", keys.stalled_check),
            "used": command("EXISTS", keys.meta),
            "id": command("EXISTS", f"{keys.base}id"),
            "twin": command("EXISTS", twin.meta),
            "twin id": command("EXISTS", f"{twin.base}id"),
            "twin wait": command("LLEN", twin.wait),
            "info": AllNodesCall(command("INFO", parse_reply=info_by_name), _merged),
        }

    def _sample_calls(self) -> dict[str, Call[Any]]:
        """Return the calls that read some jobs of each state, whose deduplication ids may keep new ones out."""
        base, last, calls = self._keys.base, _OWNERS_READ - 1, dict[str, Call[Any]]()
        for state in ("active", "wait"):
            calls[f"some {state}"] = command("LRANGE", base + state, -last - 1, -1, parse_reply=texts)
        for state in ("prioritized", "delayed"):
            calls[f"some {state}"] = command("ZRANGE", base + state, 0, last, parse_reply=texts)
        for state in ("completed", "failed"):  # an id may outlive its job: the newest ones
            calls[f"some {state}"] = command("ZRANGE", base + state, 0, last, "REV", parse_reply=texts)
        return calls

    def _sampled(self) -> list[str]:
        states = ("active", "wait", "prioritized", "delayed", "completed", "failed")
        return [job_id for state in states for job_id in self._replies[f"some {state}"] or ()]

    def _place_calls(self) -> dict[str, Call[Any]]:
        """Return the calls that show in which state the job is."""
        if self._id is None:
            return {}
        keys, job_id = self._keys, self._id
        calls: dict[str, Call[Any]] = {
            f"score {state}": command("ZSCORE", f"{keys.base}{state}", job_id) for state in SETS
        }
        for name in LISTS:
            searched = ("MAXLEN", _SEARCHED)
            calls[f"from right {name}"] = command("LPOS", f"{keys.base}{name}", job_id, "RANK", -1, *searched)
            calls[f"from left {name}"] = command("LPOS", f"{keys.base}{name}", job_id, *searched)
        calls["lock"] = command("PTTL", keys.lock(job_id))
        calls["fields"] = command("HMGET", keys.job(job_id), *_FIELDS)
        return calls

    def _job_calls(self) -> dict[str, Call[Any]]:
        if self._id is None:
            return {}
        keys, job_id = self._keys, self._id
        return {
            "exists": command("EXISTS", keys.job(job_id)),
            "rank": command("ZRANK", keys.prioritized, job_id),
            "revoked": command("ZSCORE", keys.revoked, job_id),
            "stalled": command("SISMEMBER", keys.stalled, job_id),
            "dependencies": command("SCARD", keys.dependencies(job_id)),
            "pending": command("SSCAN", keys.dependencies(job_id), 0, "COUNT", _SAMPLE, parse_reply=_scanned),
            "unsuccessful": command("ZRANGE", keys.unsuccessful(job_id), 0, _SHOWN - 1, parse_reply=texts),
            "dedup owner": command("GET", keys.deduplication(job_id)),
            "dedup ttl": command("PTTL", keys.deduplication(job_id)),
            "checkpoint": command("HEXISTS", keys.job(job_id), CHECKPOINT_FIELD),
            "twin job": command("EXISTS", self._twin.job(job_id)),
        }

    def _detail_calls(self) -> dict[str, Call[Any]]:
        """Return the calls that depend on what was read first."""
        keys, calls = self._keys, dict[str, Call[Any]]()
        if _whole(self._info.get("connected_clients")) <= _MAX_CLIENTS:
            calls["clients"] = list_clients(keys.client_name(), f"{keys.prefix}:", database=self._database)
        if self._is_paused():
            calls["pause note"] = command("GET", keys.pause_note, parse_reply=Pause.from_json)
        if self._is_paused() or self._id is None or self._state is JobState.UNKNOWN:
            calls["events"] = _read_events(keys, lambda events: events)
        looked_at = _SAMPLE if self._is_maxed() or self._id is None else _SHOWN
        calls["holders"] = command("LRANGE", keys.active, -looked_at, -1, parse_reply=texts)
        return {**calls, **(self._group_calls() if self._id is None else self._line_calls(self._id))}

    def _group_calls(self) -> dict[str, Call[Any]]:
        """Return the calls about groups of the queue's jobs."""
        keys, calls = self._keys, dict[str, Call[Any]]()
        for job_id in self._replies["incompatible"] or ():
            fields = (INCOMPATIBLE_FIELD, "failedReason", "name")
            calls[f"incompatible {job_id}"] = command("HMGET", keys.job(job_id), *fields)
        for job_id in self._sampled():
            calls[f"dedup {job_id}"] = command("HGET", keys.job(job_id), "deid", parse_reply=codec.decode_text)
        if first := self._replies["first delayed"]:
            calls["first timestamp"] = command("HGET", keys.job(first[0]), "timestamp")
        for job_id in self._replies["head"] or ():
            calls["head times"] = command("HMGET", keys.job(job_id), "timestamp", "ats", "delay")
        for task in list(self._replies["rates"] or ())[:_SAMPLE]:
            calls[f"line {task}"] = command("ZCARD", keys.throttled(task))
            calls[f"first of {task}"] = command("ZRANGE", keys.throttled(task), 0, _LINE_READ - 1, parse_reply=texts)
        scheduler = self._replies["first scheduler"]
        if scheduler is not None:
            key = keys.job(f"repeat:{scheduler[0]}:{scheduler[1]:.0f}")
            calls["iteration"] = command("EXISTS", key)
        return calls

    def _line_calls(self, job_id: str) -> dict[str, Call[Any]]:
        """Return the calls about the job's place, and about deduplication."""
        keys, calls = self._keys, dict[str, Call[Any]]()
        if task := self._fields.get("name"):
            calls["place in line"] = command("ZRANK", keys.throttled(task), job_id)
            calls["line"] = command("ZCARD", keys.throttled(task))
        if dedup := self._fields.get("deid"):
            calls["own dedup"] = command("GET", keys.deduplication(dedup))
            calls["own dedup ttl"] = command("PTTL", keys.deduplication(dedup))
        if owner := self._replies["dedup owner"]:
            calls["owner exists"] = command("EXISTS", keys.job(text(owner)))
            calls["owner finished"] = command("HEXISTS", keys.job(text(owner)), "finishedOn")
        return calls

    def _member_calls(self) -> dict[str, Call[Any]]:
        """Return the calls about child jobs, and about the active jobs."""
        calls: dict[str, Call[Any]] = {}
        for key in self._children:
            prefix, queue, job_id = address_of(key, self._keys.prefix)
            keys = QueueKeys(prefix, queue)
            calls[f"child {key}"] = command("HMGET", key, "name", "failedReason")
            calls[f"child lock {key}"] = command("EXISTS", keys.lock(job_id))
            for state in SETS:
                calls[f"child {state} {key}"] = command("ZSCORE", f"{keys.base}{state}", job_id)
        for task in list(self._replies["rates"] or ())[:_SAMPLE]:
            for job_id in self._replies[f"first of {task}"] or ():
                calls[f"start of {job_id}"] = command("ZSCORE", self._keys.delayed, job_id)
        if self._id is None:
            for dedup in filter(None, (self._replies[f"dedup {job_id}"] for job_id in self._sampled())):
                calls[f"owner of {dedup}"] = command(
                    "GET", self._keys.deduplication(dedup), parse_reply=codec.decode_text
                )
        for job_id in self._holders:
            calls[f"holder {job_id}"] = command("HMGET", self._keys.job(job_id), "name", "pb", "processedOn")
            calls[f"holder lock {job_id}"] = command("PTTL", self._keys.lock(job_id))
        return calls

    def _read_fields(self) -> None:
        values = self._replies["fields"] or [None] * len(_FIELDS)
        found = zip(_FIELDS, values, strict=True)
        self._fields = {name: codec.decode_text(value) for name, value in found if value is not None}
        try:
            opts = codec.decode(self._fields.get("opts"))
        except BulltaskError:
            opts = None
        self._opts = opts if isinstance(opts, dict) else {}

    def _find_state(self) -> JobState | None:
        """Return the job's state; ``UNKNOWN`` if there is no such job, ``None`` if it is in no list."""
        replies = self._replies
        if self._id is None:
            return None
        for state in SETS:
            if replies[f"score {state}"] is not None:
                return JobState(state)
        if replies["lock"] not in {None, -2} or self._position("active") is not None:
            return JobState.ACTIVE
        if self._position("wait") is not None or self._position("paused") is not None:
            return JobState.WAITING
        if not replies["exists"]:
            return JobState.UNKNOWN
        is_beyond = any(replies.count(name) > 2 * _SEARCHED for name in LISTS)
        return JobState.WAITING if is_beyond else None

    def _position(self, name: str) -> int | None:
        """Return the job's position in a list; ``None`` if it was not found there."""
        from_right: int | None = self._replies[f"from right {name}"]
        return self._replies[f"from left {name}"] if from_right is None else from_right

    def _place(self) -> tuple[object, ...]:
        """Return what differs if the job has moved."""
        fields = dict(zip(_FIELDS, self._replies["fields"] or (), strict=False))
        attempts = (fields.get("ats"), fields.get("atm"), self._replies["score delayed"])
        return (self._find_state(), *attempts, self._replies["lock"] == -2)

    # ---- judging -------------------------------------------------------------------------------------------------

    def explanation(self) -> Explanation:
        """Judge what was read."""
        self._judge_redis()
        if self._id is None:
            self._judge_queue(waits=True, is_ready=self._ready() > 0)
            self._judge_contents()
            state = None
        else:
            self._judge_job(self._id)
            state = JobState.UNKNOWN if self._state is None and not self._replies.refused else self._state
        self._judge_refusals()
        reasons = sorted(self._reasons, key=lambda it: (self._group(it), _RANK[it.code]))
        return Explanation(self._queue, self._id, None if state is None else str(state), tuple(reasons))

    def _group(self, reason: Reason) -> int:
        """Return what comes before the order of causes."""
        if self._id is None:  # what holds all jobs comes before what holds some of them
            return _OF_SOME_JOBS.get(reason.code, 0)
        if reason.code == "clocks-apart" and any(it.code == "delayed" for it in self._reasons):
            return -1 if reason.certainty == "proved" else 0  # it causes the delay
        return int(reason.code == "deduplicated" and self._state is not JobState.UNKNOWN)  # it holds only others

    def _add(
        self,
        code: str,
        sentence: str,
        evidence: Mapping[str, Any],
        command_line: str | None = None,
        certainty: Certainty = "proved",
        *,
        in_ms: float | None = None,
    ) -> None:
        seconds = at = None
        if in_ms is not None and isfinite(in_ms):  # the score of a job may be any number
            seconds, at = max(0.0, in_ms) / 1000, moment_of(self._now_ms + max(0.0, in_ms))
        told: dict[str, Any] = {"code": code, "sentence": sentence, "evidence": evidence, "command": command_line}
        self._reasons.append(Reason(**told, certainty=certainty, expected_s=seconds, expected_at=at))

    @property
    def parents(self) -> Sequence[str]:
        """Some jobs of the queue that wait for child jobs."""
        return self._replies["parents"] or ()

    @property
    def suspects(self) -> Sequence[str]:
        """Some jobs that may be lost: according to the newest events they wait, but no job of the queue waits."""
        newest: dict[str, str] = {}  # event of each job
        for _, fields in () if self._ready() else self._events:
            newest.setdefault(fields.get("jobId", ""), fields.get("event", ""))
        waiting = [job_id for job_id, event in newest.items() if event in {"added", "waiting"}]
        return waiting[:_PARENTS]

    def add_of_job(self, job_id: str, explanation: Explanation) -> None:
        """Add that one of the queue's jobs is lost, or what is wrong with its child jobs."""
        self._reasons += [
            replace(reason, sentence=f"Job {job_id}: {reason.sentence}")
            for reason in explanation.reasons
            if reason.code in {"child-failed", "child-gone", "lost"}
        ]

    def _judge_redis(self) -> None:
        info = self._info
        used, limit = _whole(info.get("used_memory")), _whole(info.get("maxmemory"))
        policy = info.get("maxmemory_policy", "")
        if limit and used >= limit and policy == "noeviction":
            self._add(
                "redis-full",
                f"Redis at {self._url} is full: it uses {used:,} of {limit:,} bytes (maxmemory) and rejects writes, so "
                "jobs are neither added nor acquired: free memory, such as of old finished jobs, or raise maxmemory",
                {"used_memory": used, "maxmemory": limit, "maxmemory_policy": policy},
                "redis-cli INFO memory",
            )
        if info.get("role") == "slave":
            self._add(
                "redis-read-only",
                f"Redis at {self._url} is a replica of {info.get('master_host')}:{info.get('master_port')}, which "
                "rejects writes: connect to the primary",
                {"role": "slave", "master_host": info.get("master_host", "")},
                "redis-cli INFO replication",
            )
        elif info.get("rdb_last_bgsave_status") == "err":
            self._add(
                "redis-read-only",
                f"Redis at {self._url} could not save its data, and then rejects writes unless "
                "stop-writes-on-bgsave-error is off: look at its log, and at the free space of its disk",
                {"rdb_last_bgsave_status": "err"},
                "redis-cli BGSAVE",
                "likely",
            )

    def _judge_refusals(self) -> None:
        if refused := self._replies.refused:
            self._add(
                "cannot-see",
                f"Not permitted: {len(refused)} of the reads were refused, so other reasons may hold. The first error: "
                f"{next(iter(refused.values()))}",
                {"refused": sorted(refused)},
                "bulltask acl reader",
                "cannot see",
            )

    # ---- the queue -----------------------------------------------------------------------------------------------

    @property
    def _info(self) -> Mapping[str, str]:
        """What the server says about itself, as far as it may be read."""
        return self._replies["info"] or {}

    @property
    def _meta(self) -> Sequence[bytes | None]:
        """The fields paused, concurrency, max, duration and version of the queue's hash."""
        return self._replies["meta"] or [None] * 5

    @property
    def _events(self) -> Sequence[_Event]:
        """The queue's newest events, as far as they were read."""
        return self._replies["events"] or ()

    @property
    def _states(self) -> Collection[WorkerState]:
        """The states of the queue's workers."""
        return self._fleet.states.values()

    def _is_paused(self) -> bool:
        return self._meta[0] is not None

    def _is_maxed(self) -> bool:
        return self._meta[1] is not None and self._replies.count("active") >= _whole(self._meta[1])

    def _ready(self) -> int:
        """Return how many jobs could run now, which includes delayed ones that are due."""
        return self._replies.count("wait", "paused", "prioritized", "due")

    def _judge_queue(self, *, waits: bool, is_ready: bool = False) -> None:
        """Judge what holds all jobs of the queue.

        Args:
            waits: Whether they may wait for a worker to ask, now or later.
            is_ready: Whether they could run now.
        """
        if self._is_bull:
            self._add_bull(self._keys.name)
        self._judge_pause()
        self._judge_clocks()
        self._judge_workers(is_ready=is_ready)
        if waits:
            self._judge_rate_limit()
            self._judge_concurrency()

    def _judge_pause(self) -> None:
        replies, queue = self._replies, self._queue
        wait, paused = replies.count("wait"), replies.count("paused")
        evidence: dict[str, Any] = {"meta.version": codec.decode_text(self._meta[4])}
        resume = f"bulltask queue resume {quote(queue)}"
        if self._is_paused():
            note: Pause | None = replies["pause note"]
            since_ms = _paused_ms(self._events)
            if note is not None and since_ms is not None and since_ms > note.at_ms + _SAME_PAUSE_MS:
                note = None  # another client has resumed the queue, and paused it again
            since_ms, by = (since_ms, "") if note is None else (note.at_ms, f" by {note.by}")
            since = f" since {_at(since_ms)}" if since_ms else ""
            sentence = f"Queue {queue} is paused{since}{by}: no worker acquires its jobs until it is resumed"
            told = {"meta.paused": codec.decode_text(self._meta[0]), "since": _iso(since_ms), "by": note and note.by}
            self._add("paused", sentence, evidence | told, resume)
        if paused and (wait or not self._is_paused()):
            self._add(
                "paused-apart",
                f"{_jobs_are(paused, f' of queue {queue}')} in the list of a pause by BullMQ 5, where no worker looks"
                f"{f', and {wait:,} in `wait`' if wait else ''}: do not pause or resume the queue with BullMQ 5, which "
                "overwrites one list with the other. A resume by bulltask or BullMQ 6 merges them",
                {**evidence, "wait": wait, "paused": paused},
                resume,
            )

    def _judge_workers(self, *, is_ready: bool) -> None:
        fleet = self._fleet
        if fleet.silent:
            self._add(
                "worker-silent",
                f"The supervisor of {_listed(fleet.silent)} has not written its state for some time: it is stopped, "
                "hangs, or is not permitted to; jobs may run, but their locks are not renewed",
                {"workers": list(fleet.silent)},
                "redis-cli CLIENT LIST",
                "likely",
            )
        if fleet.states and not fleet.unknown:
            self._judge_fleet(is_ready=is_ready)
        elif fleet.states or fleet.unknown or fleet.silent:
            return
        elif self._replies.sees("clients"):
            self._judge_absence(self._replies["clients"])
        elif "clients" not in self._replies.found:
            self._add(
                "no-worker",
                f"No worker of queue {self._queue} stores its state, and Redis has more than {_MAX_CLIENTS:,} "
                "connections, so those of Node.js were not counted",
                {"connected_clients": self._info.get("connected_clients")},
                "redis-cli CLIENT LIST",
                "cannot see",
            )

    @property
    def _is_bull(self) -> bool:
        """Whether the queue looks like one of Bull: BullMQ creates the hash ``meta`` with the first job."""
        return self._replies.sees("used", "id") and not self._replies["used"] and bool(self._replies["id"])

    def _add_bull(self, name: str) -> None:
        self._add(
            "bull-queue",
            f"Queue {name} is one of Bull (npm's bull), which is not BullMQ: its jobs need a worker of Bull, or "
            "must be converted. Start no worker of BullMQ on it",
            {"queue": name, "meta": "missing"},
            f"bulltask migrate-bull {quote(name)}",
            "likely",
        )

    def _judge_absence(self, rows: Sequence[ClientRow]) -> None:
        if self._is_bull:
            return
        if others := _workers_of(rows, self._twin):
            has_tag = str(self._keys.name.startswith("{")).lower()
            start = f"BULLTASK_QUEUE_HASH_TAG={has_tag} {self._start_worker()}"
            what = f"The workers are connected to the queue {self._twin.name}, which is another queue than "
            self._add_wrong_hash_tag(f"{what}{self._keys.name}", start, {"workers of the other": len(others)})
            return
        names = sorted({queue_of_connection(row.name, self._keys.prefix)[0] for row in rows} - {""})
        only = f", only to {_listed([self._name_in_app(name) for name in names])}" if names else ""
        if killed := self._fleet.killed:
            only += f"; {_listed(killed)} was until a moment ago, and was killed, or reconnects"
        self._add(
            "no-worker",
            f"No worker of queue {self._queue} is connected to {self._url}{only}",
            {"workers": 0, "queues with connections": names[:_SAMPLE], "killed": list(killed)},
            self._start_worker(),
            "likely" if killed else "proved",
        )

    def _name_in_app(self, bullmq_queue: str) -> str:
        return name_in_app(bullmq_queue, hash_tag=self._config.queue_hash_tag)

    def _job(self, verb: str, job_id: str, *options: str) -> str:
        """Return a command for a job of this queue; other queues may have a job with the same id."""
        return " ".join(["bulltask job", verb, quote(job_id), "--queue", quote(self._queue), *options])

    def _start_worker(self) -> str:
        return f"bulltask worker -A APP -Q {quote(self._queue)}"

    def _judge_fleet(self, *, is_ready: bool) -> None:
        """Name what keeps all workers of the queue from acquiring the job; several may have different causes."""
        causes = {worker: self._causes(state, is_ready=is_ready) for worker, state in self._fleet.states.items()}
        if not all(causes.values()):
            return
        self._judge_stopped([(state, child) for state in self._states for child in state.children])
        total = len(causes)
        queue, only = quote(self._queue), f" -d {quote(next(iter(causes)))}" if total == 1 else ""
        for code, what, command_line in (
            ("workers-closing", "shutting down", self._start_worker()),
            ("workers-paused", "paused, though the queue is not", f"bulltask control resume{only}"),
            ("queue-cancelled", "told to fetch no jobs from it", f"bulltask control consume {queue}{only}"),
            ("no-permits", "at the number of jobs that --max-jobs allows", self._start_worker()),
            ("no-children", "without a child process that acquires jobs", self._start_worker()),
        ):
            if found := [worker for worker, names in causes.items() if code in names]:
                who = f"{len(found)} of {counted(total, 'worker')} of queue {self._queue}"
                sentence = f"{who} {'is' if len(found) == 1 else 'are'} {what}: {_listed(found)}"
                self._add(code, sentence, self._shown_states(found), command_line)
        if busy := [worker for worker, names in causes.items() if "workers-busy" in names]:
            self._judge_busy(busy)
        unknown = [worker for worker, names in causes.items() if "unknown-task" in names]
        if unknown and not any(reason.code == "unknown-task" for reason in self._reasons):
            task, tasks = self._fields["name"], sorted(self._fleet.states[unknown[0]].tasks)
            some = "No worker" if len(unknown) == total else f"Only {total - len(unknown)} of {total} workers"
            self._add(
                "unknown-task",
                f"{some} of queue {self._queue} has the task {task}{self._similar(task)}; the worker {unknown[0]} has "
                f"{_listed(tasks)}",
                {"task": task, "workers": unknown, "tasks": tasks[:_SAMPLE]},
                "bulltask inspect registered",
            )

    def _causes(self, state: WorkerState, *, is_ready: bool) -> list[str]:
        """Return why a worker acquires no job, or not this one; empty if it may."""
        task = self._fields.get("name", "")
        may_lack = task and not (state.is_short or state.tasks_left_out or task.startswith("bulltask."))
        children = [child for child in state.children if child.state == "run"]
        is_busy = 0 < state.slots <= state.busy or (
            bool(children)
            and all(not child.free and any(job.state == "active" for job in child.jobs) for child in children)
        )
        holds = {
            "workers-closing": state.state == "closing",
            "workers-paused": state.state == "paused",
            "queue-cancelled": self._queue in state.cancelled,
            "no-permits": state.permits == 0,
            "no-children": not (state.is_short or children),
            "workers-busy": is_ready and bool(children) and is_busy,
            "unknown-task": may_lack and task not in state.tasks,
        }
        return [code for code, it_does in holds.items() if it_does]

    def _similar(self, task: str) -> str:
        """Return which task of the workers may be meant."""
        match = nearest(task, {name for state in self._states for name in state.tasks} - {task})
        return f" (did you mean {match}?)" if match else ""

    def _shown_states(self, workers: Sequence[str]) -> dict[str, Any]:
        names, states = "id host pid state permits".split(), map(self._fleet.states.get, workers[:_SAMPLE])
        return {"workers": [{name: getattr(state, name) for name in names} for state in states]}

    def _judge_stopped(self, children: Sequence[tuple[WorkerState, WorkerChild]]) -> None:
        stopped = [(state, child) for state, child in children if child.state == "stopped"]
        if stopped:
            pids = [str(child.pid) for state, child in stopped[:_SHOWN] if state.host == stopped[0][0].host]
            names = _listed([f"child {child.pid} of worker {state.id}" for state, child in stopped])
            self._add(
                "child-stopped",
                f"Stopped by a signal: {names}; jobs there keep their locks, and continue after the signal CONT",
                {"children": [{"worker": state.id, "pid": child.pid} for state, child in stopped[:_SAMPLE]]},
                f"kill -CONT {' '.join(pids)}",
            )

    def _judge_busy(self, workers: Sequence[str]) -> None:
        states = [self._fleet.states[worker] for worker in workers]
        children = [(state, child) for state in states for child in state.children]
        jobs = [(job, child.pid, state.id) for state, child in children for job in child.jobs]
        jobs.sort(key=lambda found: found[0].since_ms)
        names = ", ".join(
            f"{job.id} of queue {job.queue} for {_seconds(self._now_ms - job.since_ms)}" for job, _, _ in jobs[:_SHOWN]
        )
        slots, taken = sum(state.slots for state in states), sum(state.busy for state in states)
        shown = [
            {"id": job.id, "queue": job.queue, "since": _iso(job.since_ms), "worker": worker, "pid": pid}
            for job, pid, worker in jobs[:_SAMPLE]
        ]
        # A sync job keeps its child from using its other slots.
        running = sum(child.state == "run" for _, child in children)
        number, noun, nouns = (slots, "slot", "slots") if taken >= slots else (running, "child", "children")
        every = f"its only {noun}" if number == 1 else f"all {number:,} {nouns}"
        self._add(
            "workers-busy",
            f"{counted(len(states), 'worker')} of queue {self._queue} {'has' if len(states) == 1 else 'have'} "
            f"{every} busy: {names or 'short jobs'}{' …' if len(jobs) > _SHOWN else ''}",
            {"slots": slots, "busy": taken, "jobs": shown},
            "bulltask control grow" if len(states) > 1 else f"bulltask control grow -d {quote(states[0].id)}",
            "proved" if taken >= slots else "likely",
        )

    def _add_wrong_hash_tag(self, what: str, command_line: str = "", evidence: Mapping[str, Any] | None = None) -> None:
        if self._replies["twin"] == 0 and self._replies["twin id"]:
            self._add_bull(self._twin.name)
            return
        sentence = f"{what}: queue_hash_tag must be the same wherever jobs are sent and run"
        why = f"bulltask why -Q {quote(self._queue)} {self._other_option()}"
        found = {"waiting": self._replies.count("twin wait")} if evidence is None else evidence
        names = {"queue": self._keys.name, "other": self._twin.name}
        self._add("wrong-hash-tag", sentence, {**names, **found}, command_line or why)

    def _other_option(self) -> str:
        return "--queue-hash-tag" if self._twin.name.startswith("{") else "--no-queue-hash-tag"

    def _judge_rate_limit(self) -> None:
        replies = self._replies
        count, ttl_ms = _whole(replies["limiter"]), replies["limiter ttl"]
        if not count or ttl_ms is None or ttl_ms <= 0:
            return
        limit = _whole(self._meta[2]) if self._meta[2] is not None else self._limit_of_workers()
        if limit is not None and count < limit:
            return
        evidence = {"acquired": min(count, codec.MAX_SAFE_INTEGER), "max": limit, "ttl_ms": ttl_ms}
        certainty: Certainty = "proved"
        if limit is not None:
            what = f"Queue {self._queue} has used up its rate limit of {counted(limit, 'job')}; it is free"
        elif count >= codec.MAX_SAFE_INTEGER:
            what = f"rate_limit() has stopped queue {self._queue}; it is free"
        else:
            certainty = "cannot see"
            what = f"Workers have acquired {counted(count, 'job')} of queue {self._queue} in the current period of "
            what += "their limiter, whose maximum is not in Redis; it ends"
        end = f"app.queue({self._queue!r}).remove_rate_limit_key()"
        if self._meta[2] is not None and count < codec.MAX_SAFE_INTEGER:
            end = f"bulltask queue limit {quote(self._queue)} RATE"
        self._add("queue-rate-limit", f"{what} in {_seconds(ttl_ms)}", evidence, end, certainty, in_ms=ttl_ms)

    def _limit_of_workers(self) -> int | None:
        """Return the maximum of the workers' ``limiter``, infinity if none has one; ``None`` if it cannot be seen."""
        if self._fleet.unknown or not self._states or any(state.is_short for state in self._states):
            return None
        limits = [_number_in(state.limiter, self._queue, "max") for state in self._states]
        return max(codec.MAX_SAFE_INTEGER if limit is None else limit for limit in limits)

    def _judge_concurrency(self) -> None:
        if not self._is_maxed():
            return
        concurrency, active, holders = _whole(self._meta[1]), self._replies.count("active"), self._active_jobs()
        dead = sum(holder["lock"] in _LOCKS for holder in holders)
        times = [_LOCKS.get(it["lock"]) or self._active_for(it["id"]) for it in holders]
        names = _listed([f"job {it['id']}{time}" for it, time in zip(holders, times, strict=True)]) if holders else ""
        until = "a worker starts" if self._nobody_checks() else "a stalled check"
        held = f"; {dead} of them without a worker, until {until}" if dead else ""
        self._add(
            "global-concurrency",
            f"Queue {self._queue} may have {counted(concurrency, 'active job')} (its global concurrency), and has "
            f"{active}: {names}{held}",
            {"concurrency": concurrency, "active": active, "holders": holders},
            self._end_holder(holders[0]) if holders else None,
            in_ms=self._recovery_ms() if dead else None,
        )

    def _end_holder(self, holder: Mapping[str, Any]) -> str:
        """Return the command for the job that has been active longest: to cancel it, if it has a worker."""
        if holder["lock"] == "held" and self._now_ms - self._holder(holder["id"])[2] >= _LONG_MS:
            return self._job("revoke", holder["id"], "--terminate")
        return self._job("show", holder["id"])

    def _active_for(self, job_id: str) -> str:
        started_ms = self._holder(job_id)[2]
        return f" for {_seconds(self._now_ms - started_ms)}" if started_ms else ""

    def _active_jobs(self) -> list[dict[str, Any]]:
        """Return the queue's active jobs, oldest first, as evidence."""
        jobs = []
        for job_id in reversed(self._holders):
            ttl_ms, (name, worker, started) = self._replies[f"holder lock {job_id}"], self._holder(job_id)
            lock = "cannot see" if ttl_ms is None else "expired" if ttl_ms == -2 else "held"
            lock = "worker gone" if lock == "held" and self._is_gone(worker) else lock
            jobs.append({"id": job_id, "name": name, "worker": worker, "since": _iso(started or None), "lock": lock})
        return jobs

    def _holder(self, job_id: str) -> tuple[str, str, int]:
        """Return an active job's name, its worker, and since when it has been active."""
        name, worker, started = self._replies[f"holder {job_id}"] or (None, None, None)
        return codec.decode_text(name), codec.decode_text(worker), _whole(started)

    def _is_gone(self, worker: str) -> bool:
        """Whether a worker of bulltask is neither connected nor has a state."""
        return pid_of_worker(worker) != 0 and not self._fleet.has(worker)

    def _recovery_ms(self, *, marked: bool = False, after_ms: float | None = None) -> float | None:
        """Return how long it takes at most until a job without a lock is found; ``None`` if nobody looks for it.

        A check is made when the previous one is an interval old, and a worker's next turn has come. It recovers the
        jobs that the last check has ``marked``. ``after_ms`` is the time until the job's lock expires, if it has one.
        """
        if self._nobody_checks():
            return None
        intervals = [it.stalled_interval_ms for it in self._states if it.stalled_interval_ms]
        checks_ms = min(intervals, default=self._config.stalled_interval_ms) * (1 if marked else 2)
        return checks_ms + (max(0, self._replies["check ttl"] or 0) if after_ms is None else after_ms)

    def _add_recovery(
        self, code: str, lost: str, evidence: Mapping[str, Any], in_ms: float | None, certainty: Certainty = "proved"
    ) -> None:
        """Add that a job without a worker runs again, in ``in_ms``, or when a worker has started."""
        check = "a worker of the queue has started and found it"
        check = check if in_ms is None else f"a stalled check, in {_seconds(in_ms)} or less"
        start = self._start_worker() if in_ms is None else None
        self._add(code, f"{lost} again after {check}", evidence, start, certainty, in_ms=in_ms)

    def _judge_contents(self) -> None:
        """Judge what only an explanation of the queue names: its groups of jobs."""
        replies = self._replies
        if not any(self._meta) and not replies.count("wait", "delayed", "prioritized", "active"):
            self._judge_unused()
        else:
            self._judge_twin()
        self._judge_dead()
        self._judge_incompatible()
        self._judge_deduplication_ids()
        for task in list(replies["rates"] or ())[:_SAMPLE]:
            # Jobs that were removed or promoted leave the line when the next job of the task starts.
            starts_at = [replies[f"start of {job_id}"] for job_id in replies[f"first of {task}"] or ()]
            if waiting := replies.count(f"line {task}") - starts_at.count(None):
                rate, score = self._rate_of(task), next((score for score in starts_at if score is not None), None)
                in_ms = None if score is None else max(0.0, float(score) / DELAYED_SCORE - self._now_ms)
                starts = "" if in_ms is None else f"; the next one starts in {_seconds(in_ms)}"
                is_over = self._interval(task) == _NO_LIMIT
                does = " was removed, but has delayed" if is_over else f"{rate} throttles"
                sentence = f"The rate limit of task {task}{does} {counted(waiting, 'job')}{starts}"
                mend = self._promote_throttled(task) if is_over else _change_rate(task)
                self._add("task-rate-limit", sentence, {"task": task, "throttled": waiting}, mend, in_ms=in_ms)
        scheduler = replies["first scheduler"]
        if scheduler is not None and (late_ms := self._now_ms - scheduler[1]) > _LATE_MS:
            missing = "" if replies["iteration"] else ", and this job is missing"
            self._add(
                "schedule-late",
                f"The next job of the job scheduler {scheduler[0]} was due {_seconds(late_ms)} ago{missing}",
                {"scheduler": scheduler[0], "due": _iso(scheduler[1]), "job exists": bool(replies["iteration"])},
                self._start_worker() if self._has_no_workers() else f"bulltask schedule show {quote(scheduler[0])}",
            )
        self._judge_due()
        if replies.sees(*_COUNTS):  # what was refused is not nothing
            self._judge_rest()

    def _judge_incompatible(self) -> None:
        sample: Sequence[str] = self._replies["incompatible"] or ()
        more = max(0, self._replies.count("all incompatible") - len(sample))
        groups: dict[str, list[tuple[str, str]]] = {}
        for job_id in sample:
            noted, failed_reason, task = self._replies[f"incompatible {job_id}"] or [None] * 3
            if noted is None:
                continue  # it was removed; the next entry removes this one
            reason, code = _reason_text(codec.decode_text(failed_reason)), "incompatible"
            if _NOT_REGISTERED in reason:
                code, reason = "unknown-task", f"{reason}{self._similar(codec.decode_text(task))}"
            groups.setdefault(code, []).append((job_id, reason))
        for code, jobs in groups.items():
            job_id, reason = jobs[0]
            number = len(jobs) + (more if len(groups) == 1 else 0)
            at_least = "At least " if more and len(groups) > 1 else ""
            wait = (
                "waits for a worker that can run it: job"
                if number == 1
                else "wait for a worker that can run them, such as"
            )
            sentence = f"{at_least}{counted(number, 'job')} {wait} {job_id}: {reason}"
            evidence = {"job": job_id, "failedReason": reason, "jobs": number}
            self._add(code, sentence, evidence, self._job("show", job_id))

    def _judge_deduplication_ids(self) -> None:
        """Name the deduplication ids of some jobs that keep new ones out."""
        sample = self._sampled()
        ids = [(self._replies[f"dedup {job_id}"], job_id) for job_id in sample]
        held = [(dedup, job_id) for dedup, job_id in ids if dedup and self._replies[f"owner of {dedup}"] == job_id]
        if not held:
            return
        dedup, job_id = held[0]
        is_cut = len(sample) < self._replies.count("active", "wait", "prioritized", "delayed")
        number = f"{'At least ' if is_cut else ''}{counted(len(held), 'deduplication id')}"
        keep = "keeps new jobs" if len(held) == 1 else "keep new jobs"
        self._add(
            "deduplicated",
            f"{number} {keep} out, such as {dedup}, which belongs to job {job_id}",
            {"deduplication_ids": len(held), "deduplication_id": dedup, "owner": job_id, "jobs read": len(sample)},
            self._job("show", job_id),
        )

    def _judge_rest(self) -> None:
        """Judge a queue by how many jobs it has."""
        replies = self._replies
        active, waiting = replies.count("active"), self._ready()
        if not waiting:
            self._judge_idle()
        elif not self._holds() and not self._judge_neglect(*(replies["head times"] or (None, None, None))):
            sentence = f"Nothing holds queue {self._queue}: {counted(active, 'job')} active, {waiting} waiting"
            self._add("working", sentence, {"active": active, "waiting": waiting})

    def _judge_due(self) -> None:
        """Judge the delayed jobs that a worker has not moved yet."""
        first, due = self._replies["first delayed"], self._replies.count("due")
        if first is not None and due:
            due_ms = first[1] / DELAYED_SCORE
            self._add(
                "due",
                f"{counted(due, 'delayed job')} of queue {self._queue} {'is' if due == 1 else 'are'} due, the first "
                f"for {_seconds(self._now_ms - due_ms)}: a worker moves {'it' if due == 1 else 'them'} when it next "
                "asks for a job",
                {"due": due, "first": first[0], "since": _iso(due_ms)},
                in_ms=0,
            )

    def _judge_twin(self) -> None:
        """Judge jobs that wait under the queue's other spelling without workers, while this one is in use."""
        waiting = self._replies.count("twin wait")
        if waiting and self._replies.sees("clients") and not _workers_of(self._replies["clients"], self._twin):
            jobs = f"has {counted(waiting, 'waiting job')} and no workers"
            what = f"The queue {self._twin.name}, which is another queue than {self._keys.name}, {jobs}"
            self._add_wrong_hash_tag(what)

    def _judge_unused(self) -> None:
        replies = self._replies
        if self._is_bull:
            return
        if replies["twin"] or replies["twin id"]:
            jobs = f"with {counted(replies.count('twin wait'), 'waiting job')}"
            self._add_wrong_hash_tag(f"Redis has no queue {self._keys.name}, but a queue {self._twin.name}, {jobs}")
        elif self._has_no_workers() and replies.sees("meta"):
            self._add(
                "unknown-queue",
                f"Redis at {self._url} has no queue {self._keys.name}: nobody has sent a job to it, or it was removed",
                {"key": self._keys.meta},
                "bulltask queues",
            )

    def _judge_idle(self) -> None:
        replies = self._replies
        first = replies["first delayed"]
        if first is not None:
            due_ms = first[1] / DELAYED_SCORE
            left_ms = due_ms - self._now_ms
            self._add(
                "delayed",
                f"{_jobs_are(replies.count('delayed'))} delayed in queue {self._queue}, and none waits; the first is "
                f"due in {_seconds(left_ms)}",
                {"delayed": replies.count("delayed"), "first": first[0], "due": _iso(due_ms)},
                in_ms=left_ms,
            )
        if children := replies.count("children"):
            such_as = f", such as {_listed(self.parents)}" if self.parents else ""
            sentence = f"{_jobs_are(children)} waiting for child jobs in queue {self._queue}{such_as}"
            self._add("waiting-children", sentence, {"waiting-children": children, "jobs": list(self.parents)})
        if not (first or children):
            sentence = f"Queue {self._queue} has no jobs that wait; {_jobs_are(replies.count('active'))} active"
            self._add("empty", sentence, {"waiting": 0, "delayed": 0, "active": replies.count("active")})

    def _judge_dead(self) -> None:
        """Judge the active jobs that no worker runs any more."""
        holders = self._active_jobs()
        for lock, code, what in (
            ("expired", "lock-expired", "without a lock, whose worker is gone or could not renew it"),
            ("worker gone", "worker-gone", "whose worker is gone, with a lock that has not expired yet"),
        ):
            if dead := [holder["id"] for holder in holders if holder["lock"] == lock]:
                sentence = f"Queue {self._queue} has {counted(len(dead), 'active job')} {what}: {_listed(dead)}"
                evidence = {"jobs": dead, "of": self._replies.count("active")}
                self._add(code, sentence, evidence, in_ms=self._recovery_ms())

    def _holds(self) -> bool:
        """Whether a reason that holds jobs was found."""
        return any(reason.code not in _HARMLESS for reason in self._reasons)

    # ---- the job -------------------------------------------------------------------------------------------------

    def _judge_job(self, job_id: str) -> None:
        if self._state is JobState.UNKNOWN:
            self._judge_unknown(job_id)
            return
        self._judge_hash(job_id)
        match self._state:
            case None:
                return
            case JobState.COMPLETED | JobState.FAILED:
                self._judge_own_deduplication(job_id)
                self._judge_finished(job_id)
                return
            case JobState.ACTIVE:
                self._judge_active(job_id)
            case JobState.WAITING_CHILDREN:
                self._judge_children(job_id)
                self._judge_queue(waits=False)
            case state:
                if state is JobState.DELAYED:
                    self._judge_delay(job_id)
                score = float(self._replies["score delayed"] or 0)
                self._judge_queue(waits=True, is_ready=score < (self._now_ms + 1) * DELAYED_SCORE)
                self._judge_future()
        self._judge_own_deduplication(job_id)
        if self._state in {JobState.WAITING, JobState.PRIORITIZED}:
            self._judge_turn()

    def _judge_hash(self, job_id: str) -> None:
        replies, key = self._replies, self._keys.job(job_id)
        error = replies.refused.get("fields")
        if isinstance(error, BrokerAuthError):
            return
        if error is not None or (replies["exists"] and "name" not in self._fields):
            what = replies.refused.pop("fields", "it has no field 'name'")
            sentence = f"The key {key} is not the hash of a job of BullMQ: {what}"
            self._add("foreign", sentence, {"key": key}, f"redis-cli TYPE {quote(key)}")
        elif not replies["exists"]:
            policy = self._info.get("maxmemory_policy", "unknown")
            self._add(
                "hash-gone",
                f"The job's id is in the queue, as {self._state}, but its hash does not exist: it was deleted, or "
                f"Redis evicted it (maxmemory-policy is {policy})",
                {"key": key, "state": str(self._state), "maxmemory_policy": policy},
                "redis-cli CONFIG SET maxmemory-policy noeviction",
            )
        if self._state is None and not replies.refused:
            version = codec.decode_text(self._meta[4])
            self._add(
                "lost",
                "The job's hash exists, but the job is in no state: a client of another version, or a resume by BullMQ "
                f"5 after a pause by BullMQ 6, has lost it (meta.version is {version or 'missing'})",
                {"key": key, "meta.version": version},
                f"redis-cli LPUSH {quote(self._keys.wait)} {quote(job_id)}",
            )

    def _judge_unknown(self, job_id: str) -> None:
        replies = self._replies
        if (owner := replies["dedup owner"]) is not None:
            its = "finished" if replies["owner finished"] else "unfinished" if replies["owner exists"] else "gone"
            self._judge_owner(job_id, text(owner), replies["dedup ttl"], its)
        elif (dropped := _when_dropped(self._events, job_id)) is not None:
            at_ms, dedup, owner = dropped
            self._add(
                "deduplicated",
                f"Job {job_id} was dropped at {_at(at_ms)}: job {owner} has its deduplication id {dedup}",
                {"deduplication_id": dedup, "owner": owner, "at": _iso(at_ms)},
                f"bulltask why {quote(owner)} --queue {quote(self._queue)}",
            )
        if replies["twin job"]:
            what = f"The job is in the queue {self._twin.name}, not in {self._keys.name}"
            why = f"bulltask why {quote(job_id)} --queue {quote(self._queue)} {self._other_option()}"
            self._add_wrong_hash_tag(what, why, {})
        if not self._reasons:
            evicted, policy = _whole(self._info.get("evicted_keys")), self._info.get("maxmemory_policy", "")
            or_evicted = f"; or Redis has evicted it ({evicted:,} keys so far, {policy})" if evicted else ""
            self._add(
                "unknown-job",
                f"Queue {self._queue} at {self._url} has no job {job_id}: it was removed, or never added{or_evicted}",
                {"key": self._keys.job(job_id), "evicted_keys": evicted},
                self._job("show", job_id, "--lake DIRECTORY"),
            )

    def _judge_owner(self, dedup_id: str, owner: str, ttl_ms: int, its_state: str) -> None:
        forever = ttl_ms is not None and ttl_ms < 0
        end = "it has finished" if its_state == "unfinished" else "the id is removed"
        until = end if forever else _at(self._now_ms + ttl_ms)
        self._add(
            "deduplicated",
            f"The deduplication id {dedup_id} belongs to job {owner}{_OWNERS[its_state]}; new jobs with it are not "
            f"added until {until}",
            {"deduplication_id": dedup_id, "owner": owner, "owner exists": its_state != "gone", "ttl_ms": ttl_ms},
            f"app.queue({self._queue!r}).remove_deduplication_key({dedup_id!r})",
            in_ms=None if forever else ttl_ms,
        )

    def _judge_own_deduplication(self, job_id: str) -> None:
        dedup, owner = self._fields.get("deid"), self._replies["own dedup"]
        if dedup and owner is not None and text(owner) == job_id:
            state = "finished" if "finishedOn" in self._fields else "unfinished"
            self._judge_owner(dedup, job_id, self._replies["own dedup ttl"], state)

    def _judge_finished(self, job_id: str) -> None:
        finished_ms, (made, attempts, reason) = _whole(self._fields.get("finishedOn")), self._attempts()
        evidence: dict[str, Any] = {"finished": _iso(finished_ms or None)}
        when = f" at {_at(finished_ms)}" if finished_ms else ""
        if self._state is JobState.COMPLETED:
            self._add("completed", f"The job completed{when}", evidence, self._job("show", job_id))
            return
        evidence["failedReason"] = reason
        if reason == REVOKED:
            code = "revoked"
            sentence = f"The job was revoked{when}: it has failed, and stays in Redis until it is removed"
        else:
            code, evidence["attempts_made"] = "failed", made
            after = f"after {made} of {attempts} attempts"
            if made > attempts:
                after = f"after {made} attempts (its options allow {attempts})"
            sentence = f"The job failed{when}, {after}, and will not be retried: {reason}"
        self._add(code, sentence, evidence, self._job("retry", job_id))

    def _judge_active(self, job_id: str) -> None:
        replies = self._replies
        worker, started_ms = self._fields.get("pb", ""), _whole(self._fields.get("processedOn"))
        evidence = {"worker": worker, "since": _iso(started_ms or None), "lock_ttl_ms": replies["lock"]}
        on = f" on worker {worker}" if worker else ""
        who = f"worker {worker}, which was" if worker else "the worker that was"
        since = f" since {_at(started_ms)} ({_seconds(self._now_ms - started_ms)})" if started_ms else ""
        if replies["revoked"] is not None:
            asked_ms = _whole(replies["revoked"])
            sentence = f"The job was revoked at {_at(asked_ms)}, and its worker was told to cancel it"
            self._add("revoked", sentence, {"requested": _iso(asked_ms)})
        if replies["lock"] != -2:
            self._judge_locked(job_id, evidence, f"{on}{since}")
            return
        marked = bool(replies["stalled"])
        lost = f"The job's lock has expired: {who} running it{since}, is gone, or could not renew it"
        evidence |= {"marked": marked, "stalled_count": _whole(self._fields.get("stc"))}
        checks = self._fleet.unknown or any(it.stalled_interval_ms is not None for it in self._states)
        if self._states and not checks:
            sentence = f"{lost}. No worker of the queue looks for stalled jobs (skip_stalled_check): it stays active"
            self._add("no-stalled-check", sentence, evidence, f"app.queue({self._queue!r}).check_stalled()")
        else:
            self._add_recovery("lock-expired", f"{lost}. It runs", evidence, self._recovery_ms(marked=marked))
        self._judge_queue(waits=False)
        self._judge_future()

    def _has_no_workers(self) -> bool:
        fleet = self._fleet
        return fleet.sees_all and not (fleet.states or fleet.unknown or fleet.silent)

    def _nobody_checks(self) -> bool:
        """Whether no worker looks for jobs without a lock now: there is none, or its supervisor is stopped."""
        return self._fleet.sees_all and not (self._fleet.states or self._fleet.unknown)

    def _judge_locked(self, job_id: str, evidence: dict[str, Any], on_since: str) -> None:
        """Judge an active job whose lock has not expired."""
        logs = self._job("logs", job_id)
        worker, lock_ms = self._fields.get("pb", ""), max(0, self._replies["lock"] or 0)
        found = self._fleet.find(job_id, self._queue)
        if found is None:
            if not self._is_gone(worker):
                self._add("running", f"The job is running{on_since}", evidence, logs)
                return
            lost = f"The job was running{on_since}, but the worker is gone. Its lock expires in {_seconds(lock_ms)}, "
            lost += "and the job runs"
            self._add_recovery("worker-gone", lost, evidence, self._recovery_ms(after_ms=lock_ms), "likely")
            self._judge_queue(waits=False)
            return
        state, child, job = found
        self._judge_stopped([(state, child)])
        evidence |= {"host": state.host, "pid": child.pid, "slot": job.state}
        task = self._fields.get("name", "")
        size = _number_in(state.batches, task, "size") or 0
        in_ms = job.since_ms + (_number_in(state.batches, task, "wait_ms") or 0) - self._now_ms
        if job.state == "prefetched":
            others = [it.id for it in child.jobs if it.state == "active"]
            ahead = f"Child {child.pid} of worker {state.id} has acquired the job in advance"
            self._add("prefetched", f"{ahead}; it runs {_listed(others)}", evidence)
        elif in_ms > 0 and len(child.jobs) < size:
            filled = f"{len(child.jobs)} of {size} jobs"
            sentence = f"The job waits for others of its batch, for {_seconds(in_ms)} or less; it has {filled}"
            self._add("batch-filling", sentence, evidence, None, "likely", in_ms=in_ms)
        else:
            checkpoint = ", with its checkpoint" if self._replies["checkpoint"] else ""
            ends = f"; its worker is shutting down, and releases it if it does not end in time{checkpoint}"
            closing = ends if state.state == "closing" else ""
            self._add("running", f"The job is running in child {child.pid}{on_since}{closing}", evidence, logs)

    def _judge_children(self, job_id: str) -> None:
        total = self._replies.count("dependencies")
        states = {key: self._child_state(key) for key in self._children}
        failed = [key for key, state in states.items() if state == "failed"]
        gone = [key for key, state in states.items() if state == "removed"]
        for key in failed[:_SHOWN]:
            reason = _reason_text(codec.decode_text((self._replies[f"child {key}"] or (None, None))[1]))
            _, queue, child_id = address_of(key, self._keys.prefix)
            self._add(
                "child-failed",
                f"The child job {child_id} in queue {queue} has failed, and the job waits for it forever: {reason}",
                {"child": key, "failedReason": reason},
                self._of_child("job retry", key),
            )
        if gone:
            self._add(
                "child-gone",
                f"{counted(len(gone), 'child job')} the job waits for "
                f"{'was' if len(gone) == 1 else 'were'} removed, such as {gone[0]}: it would wait forever",
                {"children": gone},
                f"app.queue({self._queue!r}).get_job({job_id!r}).remove_unprocessed_children()",
            )
        if others := {key: state for key, state in states.items() if key not in {*failed, *gone}}:
            names = ", ".join(f"{key} ({state})" for key, state in list(others.items())[:_SHOWN])
            more = f" and {total - _SHOWN} more" if total > _SHOWN else ""
            sentence = f"The job waits for {counted(total, 'child job')}: {names}{more}"
            told = {"pending": total, "children": others}
            self._add("waiting-children", sentence, told, self._of_child("why", next(iter(others))))
        elif not states:
            self._add("waiting-children", "The job waits for child jobs", {"pending": total}, None, "likely")

    def _of_child(self, words: str, key: str) -> str:
        """Return a command for a child job."""
        _, queue, child_id = address_of(key, self._keys.prefix)
        return f"bulltask {words} {quote(child_id)} --queue {quote(self._name_in_app(queue))}"

    def _child_state(self, key: str) -> str:
        replies = self._replies
        if not replies.sees(f"child {key}"):
            return "cannot see"
        if replies[f"child {key}"][0] is None:
            return "removed"
        for state in SETS:
            if replies[f"child {state} {key}"] is not None:
                return state
        return "active" if replies[f"child lock {key}"] else "waiting"

    def _judge_delay(self, job_id: str) -> None:
        due_ms = float(self._replies["score delayed"]) / DELAYED_SCORE
        left_ms = due_ms - self._now_ms
        made, attempts, reason = self._attempts()
        evidence: dict[str, Any] = {"due": _iso(due_ms)}
        when = f"at {_at(due_ms)}, in {_seconds(left_ms)}" if left_ms > 0 else f"since {_at(due_ms)}"
        command_line = self._job("promote", job_id)
        if left_ms <= 0:
            sentence = f"The job has been due for {_seconds(-left_ms)}: a worker moves it when it next asks for a job"
            self._add("due", sentence, evidence, in_ms=0)
        if self._fields.get(INCOMPATIBLE_FIELD, "").startswith(f"{made}:"):
            since_ms = _whole(self._fields[INCOMPATIBLE_FIELD].partition(":")[2])
            evidence |= {"failedReason": reason, "since": _iso(since_ms), "logs": self._keys.logs(job_id)}
            sentence = f"No worker could run the job since {_at(since_ms)}: {reason}. It is tried again {when}"
            code = "unknown-task" if _NOT_REGISTERED in reason else "incompatible"
            sentence += self._similar(self._fields.get("name", "")) if code == "unknown-task" else ""
            look = "bulltask inspect registered" if code == "unknown-task" else self._job("show", job_id)
            command_line = self._start_worker() if self._has_no_workers() else look
        elif _THROTTLED in self._fields:
            task, rank, line = self._fields.get("name", ""), self._replies["place in line"], self._replies.count("line")
            interval = self._interval(task) or None
            evidence = {**evidence, "task": task, "rank": rank, "line": line, "seconds_per_job": interval}
            place = "throttled" if rank is None else f"number {rank + 1} of {line} in its line"
            code, command_line, limit = "task-rate-limit", _change_rate(task), f"{task}{self._rate_of(task)}"
            sentence = f"The rate limit of task {limit} delays the job: it is {place}, and starts {when}"
            if interval == _NO_LIMIT:
                sentence = f"The rate limit of task {task} was removed, but has delayed the job, which starts {when}"
                command_line = self._promote_throttled(task)
        elif left_ms <= 0:
            return
        elif scheduler := self._fields.get("rjk"):
            code, evidence["scheduler"] = "schedule", scheduler
            sentence = f"It is the next job of the job scheduler {scheduler}, due {when}"
        elif reason and made:
            evidence |= {"failedReason": reason, "attempts_made": made, "attempts": attempts}
            of = f" of {attempts}" if made <= attempts else ""
            code, sentence = "retry", f"Attempt {made}{of} failed: {reason}. The next one is due {when}"
        else:
            code, sentence = "delayed", f"The job has a countdown or eta: it is due {when}"
        self._add(code, sentence, evidence, command_line, in_ms=left_ms)

    def _attempts(self) -> tuple[int, int, str]:
        """Return how many attempts the job has made, its maximum, and why the last one failed."""
        reason = _reason_text(self._fields.get("failedReason", ""))
        return _whole(self._fields.get("atm")), max(1, _whole(self._opts.get("attempts"))), reason

    def _rate_of(self, task: str) -> str:
        """Return the rate limit of a task in parentheses, ``""`` if it is unknown."""
        interval = self._interval(task)
        rate = next((it.rate_limits[task] for it in self._fleet.states.values() if task in it.rate_limits), "")
        return f" ({rate})" if rate else f" (one job per {interval} s)" if interval not in {"", _NO_LIMIT} else ""

    def _interval(self, task: str) -> str:
        """Return the stored rate limit of a task: the time for one job in seconds, or ``none``."""
        return str((self._replies["rates"] or {}).get(task, "")).partition(" ")[0]

    def _promote_throttled(self, task: str) -> str:
        return f"bulltask jobs {quote(self._queue)} --task {quote(task)} --state delayed --promote"

    def _judge_clocks(self) -> None:
        added_ms, what = _whole(self._fields.get("timestamp")), "The job's timestamp"
        if first := self._id is None and self._replies["first delayed"]:
            added_ms, what = _whole(self._replies["first timestamp"]), f"The timestamp of job {first[0]}"
        ahead_ms = added_ms - self._now_ms if added_ms else None
        machine_ms = wall_ms() - self._now_ms
        evidence = {"timestamp_ahead_ms": ahead_ms, "machine_ahead_ms": machine_ms}
        if ahead_ms is not None and ahead_ms > _CLOCK_MS:
            sentence = (
                f"{what} is {_seconds(ahead_ms)} ahead of Redis' clock: the clock of its sender is wrong, "
                "and BullMQ counts a delay from it"
            )
            self._add("clocks-apart", sentence, evidence, "redis-cli TIME")
        elif abs(machine_ms) > _CLOCK_MS:
            sentence = (
                f"This machine's clock is {_seconds(abs(machine_ms))} {'ahead of' if machine_ms > 0 else 'behind'} "
                "Redis' clock, by which workers run jobs; senders in Node.js use their machine's"
            )
            self._add("clocks-apart", sentence, evidence, "redis-cli TIME", "likely")

    def _judge_future(self) -> None:
        """Judge what will happen to the job when a worker acquires it."""
        own = self._opts.get(BULLTASK_KEY)
        expires_ms = number(own.get("expires")) if isinstance(own, dict) else None
        if expires_ms is not None and expires_ms <= self._now_ms:
            sentence = f"The job expired at {_at(expires_ms)}: the worker that acquires it will fail it"
            self._add("expired", sentence, {"expires": _iso(expires_ms)})
        if deferred := _reason_text(self._fields.get("defa", "")):
            sentence = f"The job will fail as soon as a worker acquires it: {deferred}"
            self._add("will-fail", sentence, {"defa": deferred})
        if releases := _whole(self._fields.get(RELEASES_FIELD)):
            where = "continues from its checkpoint" if self._replies["checkpoint"] else "starts from the beginning"
            sentence = f"Workers that stopped have released the job {counted(releases, 'time')}; it {where}"
            self._add("released", sentence, {RELEASES_FIELD: releases, "checkpoint": bool(self._replies["checkpoint"])})
        if crashes := _whole(self._fields.get(CRASHES)):
            alone = crashes >= min(2, self._config.max_crashes)
            group = "alone in its process, so it waits for an empty child" if alone else "with at most 9 other jobs"
            sentence = f"The job has been in {counted(crashes, 'process')} that crashed: it runs {group}"
            self._add("quarantined", sentence, {CRASHES: crashes, "max_crashes": self._config.max_crashes})

    def _judge_turn(self) -> None:
        """Judge the job's place among those that are ready to run."""
        replies, waiting = self._replies, self._replies.count("wait")
        if self._state is JobState.PRIORITIZED:
            rank = int(replies["rank"] or 0)
            if before := rank + waiting:
                sentence = (
                    f"{counted(before, 'job')} come first: {waiting} without a priority, and {rank} with a better "
                    "priority, or the same and added earlier"
                )
                evidence = {"priority": _whole(self._fields.get("priority")), "wait": waiting, "rank": rank}
                self._add("prioritized", sentence, evidence)
        else:
            before, is_exact = self._before()
            if before:
                count = counted(before, "job") if is_exact else f"More than {before:,} jobs"
                sentence = f"{count} of queue {self._queue} {'comes' if before == 1 else 'come'} first"
                self._add("behind", sentence, {"before": before, "exact": is_exact})
        if not self._holds() and replies.sees(*_COUNTS):
            self._judge_start()

    def _judge_start(self) -> None:
        """Judge why a job that nothing holds has not started yet."""
        replies, codes = self._replies, {reason.code for reason in self._reasons}
        fields = [self._fields.get(name) for name in ("timestamp", "ats", "delay")]
        if codes.isdisjoint({"behind", "prioritized"}) and self._judge_neglect(*fields):
            return
        if replies["marker"] == 0 and not replies.count("active"):
            in_ms = self._config.drain_delay_ms
            sentence = f"Workers are idle and were not woken up; they look for jobs by themselves in {_seconds(in_ms)}"
            self._add("marker-lost", sentence, {"marker": 0, "active": 0}, None, "likely", in_ms=in_ms)
        elif not codes:
            active = replies.count("active")
            sentence = f"Nothing holds the job: it runs next in queue {self._queue}"
            if active:
                sentence += f"; {_jobs_are(active)} active: {self._running()}"
            if active and self._fleet.unknown:
                sentence += "; its workers of Node.js do not report whether they are busy"
            self._add("next", sentence, {"active": active, "before": 0})

    def _running(self) -> str:
        """Name the jobs that have been active longest, and for how long."""
        return ", ".join(f"{job_id}{self._active_for(job_id)}" for job_id in self._holders[: -_SHOWN - 1 : -1])

    def _judge_neglect(self, timestamp: object, starts: object, delay: object) -> bool:
        """Judge whether idle workers leave the next job alone, which has these fields."""
        waited_ms = self._now_ms - _whole(timestamp) - _whole(delay)
        if self._replies.count("active") or _whole(starts) or not _whole(timestamp) or waited_ms < _NEGLECTED_MS:
            return False
        self._add(
            "not-acquired",
            f"Nothing holds queue {self._queue}, and no job is active, but the next job has been waiting for "
            f"{_seconds(waited_ms)}: the children of its workers hang or are stopped, or cannot reach Redis",
            {"waited_ms": waited_ms, "active": 0, "workers": [*self._fleet.states, *self._fleet.unknown]},
            "bulltask control replace-children",
            "likely",
        )
        return True

    def _before(self) -> tuple[int, bool]:
        """Return how many jobs come before the job, and whether that is all of them."""
        for name in ("wait", "paused"):
            if (position := self._position(name)) is not None:
                return max(0, self._replies.count(name) - 1 - position), True
        return _SEARCHED, False


def _other_spelling(name: str) -> str:
    """Return a queue's name with the hash tag if it has none, and without it if it has one."""
    return name[1:-1] if name.startswith("{") and name.endswith("}") else bullmq_name(name, hash_tag=True)


def _workers_of(rows: Sequence[ClientRow], keys: QueueKeys) -> list[ClientRow]:
    own = keys.client_name()
    return [row for row in rows if row.name == own or row.name.startswith(f"{own}:w:")]


def _first(reply: Any) -> tuple[str, float] | None:
    return (text(reply[0]), float(reply[1])) if reply else None


def _scanned(reply: Any) -> list[str]:
    return texts(reply[1])


def _paused_ms(events: Sequence[_Event]) -> int | None:
    """Return when the first ``paused`` event after the last ``resumed`` event was written."""
    since_ms = None
    for at_ms, fields in events:
        if fields.get("event") == "resumed":
            break
        if fields.get("event") == "paused":
            since_ms = at_ms
    return since_ms


def _merged(parts: Sequence[dict[str, str]]) -> dict[str, str]:
    """Return what one of a cluster's nodes has reported: the one with the least free memory."""
    return max(parts, key=lambda info: _whole(info.get("used_memory")) / (_whole(info.get("maxmemory")) or inf))


def _reason_text(reason: str) -> str:
    """Return why a job has failed, shortened, and with secrets hidden."""
    return redact_secrets(reason)[:_MAX_TEXT]


def _whole(value: object) -> int:
    """Return a number that was read, 0 if it is missing or malformed."""
    if isinstance(value, bytes | str):
        try:
            return field_number(value)
        except ValueError:
            return 0
    return number(value) or 0


def _number_in(table: Mapping[str, object], key: str, name: str) -> int | None:
    """Return a number in a worker's state, which another version may have written."""
    entry = table.get(key)
    return number(entry.get(name)) if isinstance(entry, Mapping) else None


def _iso(ms: float | None) -> str | None:
    moment = moment_of(ms)
    return None if moment is None else moment.isoformat(timespec="milliseconds")


def _at(ms: float) -> str:
    moment = moment_of(ms)
    return "an unknown time" if moment is None else f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _seconds(ms: float) -> str:
    """Return ``3.2 s``, ``4 min`` or ``2.5 h``."""
    seconds = max(0.0, ms / 1000)
    for unit, size, smaller in (("d", 86_400, 3_600), ("h", 3_600, 60), ("min", 60, 1)):
        if seconds >= 2 * size - 0.05 * smaller:  # not "120 min" beside "2 h"
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.1f} s"


def _listed(names: Sequence[str]) -> str:
    """Return the first of some names, and how many more there are."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN]) or 'none'}{more}"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun: ``1 job``, ``2 jobs``, ``3 processes``."""
    plural = f"{noun}es" if noun.endswith("s") else f"{noun}s"
    return f"{count:,} {noun if count == 1 else plural}"


def _change_rate(task: str) -> str:
    return f"bulltask control rate-limit {quote(task)} RATE"


def _jobs_are(count: int, of: str = "") -> str:
    return f"{counted(count, 'job')}{of} {'is' if count == 1 else 'are'}"
