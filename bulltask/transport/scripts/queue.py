"""Calls on a whole queue: its jobs, pauses, limits and metrics; its job schedulers; and queues of old Bull.

Times are in milliseconds, by the server's clock. Pages of finished jobs are addressed by scores, which do not change;
ranks change whenever a worker moves a job.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import BrokerError, DecodeError, QueueActiveError, QueueError, QueueNotPausedError
from bulltask.jobs.job import BULLTASK_KEY, new_job_id
from bulltask.jobs.names import REVOKED
from bulltask.jobs.schedules import Repeat, Scheduler, iteration_id
from bulltask.lua import loader, wrappers
from bulltask.transport import call as key_names
from bulltask.transport.call import (
    AllNodesCall,
    Arg,
    BullKeys,
    Call,
    QueueKeys,
    by_name,
    command,
    named_keys,
    nothing,
    raise_for,
    script_call,
    text,
    texts,
    to_msgpack,
)
from bulltask.transport.cluster_slots import slot_of_key

__all__ = [
    "CHECK_MS",
    "DELAYED_SCORE",
    "LISTS",
    "RATE_PERIOD_MS",
    "SETS",
    "STATES",
    "BeatLabel",
    "ClientRow",
    "Iteration",
    "JobConversion",
    "Metrics",
    "MoveResult",
    "PageCursor",
    "Pause",
    "QueueFigures",
    "ScoredIds",
    "StoredScheduler",
    "add_beat_queue",
    "add_job_scheduler",
    "beat_queues",
    "claim_check",
    "clean_page",
    "convert_bull_job",
    "count_by_score",
    "get_counts",
    "get_counts_per_priority",
    "get_job_scheduler",
    "get_meta",
    "get_metrics",
    "get_ranges",
    "get_rate_limit_ttl",
    "has_schedule_workers",
    "ids_by_score",
    "ids_with_scores",
    "in_same_slot",
    "is_maxed",
    "key_type",
    "leave_schedule",
    "limit_now",
    "list_clients",
    "list_ids",
    "list_schedulers",
    "move_bull_job",
    "move_jobs_to_wait",
    "obliterate",
    "page_after",
    "page_of",
    "pause_scheduler",
    "queue_exists",
    "queue_figures",
    "queue_of_connection",
    "read_hash",
    "read_iteration",
    "read_label",
    "read_paused_scheduler",
    "read_repeatable",
    "read_run_state",
    "read_scheduler",
    "read_stored_scheduler",
    "register_schedule_version",
    "remove_beat_queue",
    "remove_job_scheduler",
    "remove_repeatable",
    "resume_scheduler",
    "retry_failed",
    "scan_queues",
    "scan_schedulers",
    "score_at",
    "set_paused",
    "size_of",
    "state_size",
    "update_job_scheduler",
    "update_repeatable_job_millis",
    "worker_queues",
]


MAX_MOVED_PER_CALL: Final = 5_000
"""Maximum number of ids that one ``setPaused`` call moves, which keeps Redis busy for about 2 ms."""

DELAYED_SCORE: Final = 4_096
"""A delayed job's score is its time in milliseconds, times this."""

MAX_SCORE: Final = "1.7976931348623157e+308"

_NO_MORE_JOBS: Final = codec.MAX_SAFE_INTEGER

OBLITERATE_ERRORS: Final[Mapping[int, type[QueueError]]] = {-1: QueueNotPausedError, -2: QueueActiveError}

LISTS: Final = ("wait", "active", "paused")
"""States that are lists of ids."""

SETS: Final = ("completed", "failed", "delayed", "prioritized", "waiting-children")
"""States that are sorted sets of ids."""

STATES: Final = ("wait", "active", "completed", "failed", "delayed", "prioritized", "waiting-children", "paused")

_SCAN_COUNT = 1_000

_GLOB = re.compile(r"([\\*?\[\]^])")


@value_class(frozen=True)
class Metrics:
    """Numbers of completed or failed jobs per minute; recorded by workers with ``metrics_max_data_points``.

    Attributes:
        count: Jobs counted so far; BullMQ does not include the current minute.
        previous_ms: When the last job was counted, epoch milliseconds.
        previous_count: The count at the last full minute.
        data: Jobs per minute, newest first.
        points: How many minutes are stored.
    """

    count: int
    previous_ms: int
    previous_count: int
    data: tuple[int, ...]
    points: int


@value_class
class ClientRow:
    """A connection as ``CLIENT LIST`` shows it; ``fields`` has every column by its Redis name."""

    name: str
    address: str
    fields: Mapping[str, str]


@value_class
class PageCursor:
    """The position of an iteration over a list or sorted set.

    Attributes:
        score: The score of the last member read, ``""`` at the beginning (sorted sets).
        distance: The distance of the last page from the end where the iteration started (lists).
        ids: The ids of the last page, last id first (lists); only the last id (sorted sets).
    """

    score: str = ""
    distance: int = 0
    ids: tuple[str, ...] = ()


@value_class
class Pause:
    """Who has paused a queue or a job scheduler with bulltask, and when (server time)."""

    by: str
    at_ms: int

    def to_json(self) -> str:
        """Return the stored form."""
        return codec.encode({"by": self.by, "at_ms": self.at_ms}, what="a pause").decode()

    @classmethod
    def from_json(cls, raw: bytes | None) -> Pause | None:
        """Return the stored pause; ``None`` if there is none."""
        try:
            stored = codec.decode_object(raw or b"", what="a pause")
            return cls(str(stored["by"]), int(stored["at_ms"]))
        except (DecodeError, KeyError, TypeError, ValueError, OverflowError):
            return None


def set_paused(keys: QueueKeys, *, paused: bool, note: Pause | None = None) -> Call[int]:
    """bulltask's ``setPaused``: pause or resume. Returns the number of ids still to move; call it until that is 0.

    ``note`` is stored beside a queue that was not paused before.
    """
    script_keys = named_keys(keys, "wait paused meta prioritized events delayed marker pause_note")
    args = ("paused" if paused else "resumed", MAX_MOVED_PER_CALL, "" if note is None else note.to_json())
    return script_call(loader.bulltask_script("setPaused"), script_keys, args, int)


@value_class(kw_only=True)
class QueueFigures:
    """The figures of a queue.

    Attributes:
        wait, paused, active, prioritized, delayed, waiting_children, completed, failed: How many jobs have each state.
        due: How many of the delayed jobs are due, but were not moved to ``wait`` yet, which workers do.
        oldest_ms: How long the oldest job that could run has been waiting. ``None`` if there is none, or if it is
            unknown, because those that run next were acquired before.
        scheduler_lag_ms: How long the next job of a job scheduler is overdue.
        added, finished: How many jobs were added, and have completed or failed, in the last ``window_ms``.
        window_ms: A minute; less if there are too many events to count; ``None`` if there are none.
        workers: The ids of its workers that report their state, at most 1,000.
        is_paused: Whether it is paused.
        pause: Who has paused it, if bulltask has.
        concurrency: Its global concurrency.
        max, duration_ms: Its global rate limit.
    """

    wait: int = 0
    paused: int = 0
    active: int = 0
    prioritized: int = 0
    delayed: int = 0
    waiting_children: int = 0
    completed: int = 0
    failed: int = 0
    due: int = 0
    oldest_ms: int | None = None
    scheduler_lag_ms: int = 0
    added: int = 0
    finished: int = 0
    window_ms: int | None = None
    workers: tuple[str, ...] = ()
    is_paused: bool = False
    pause: Pause | None = None
    concurrency: int | None = None
    max: int | None = None
    duration_ms: int | None = None

    @property
    def jobs(self) -> Mapping[str, int]:
        """How many jobs each of BullMQ's states has."""
        return {state: getattr(self, state.replace("-", "_")) for state in STATES}

    @property
    def waiting(self) -> int:
        """How many jobs could run, if a worker had a free slot and nothing held the queue."""
        return self.wait + self.paused + self.prioritized + self.due


_COUNTS: Final = "wait paused active prioritized delayed waiting_children completed failed"
RATE_PERIOD_MS: Final = 60_000


def queue_figures(keys: QueueKeys, now_ms: int, *, rates: bool = True) -> Call[QueueFigures]:
    """bulltask's ``queueOverview``: count a queue's jobs, without writing; ``now_ms`` is the server's time.

    Without ``rates``, it reads no events: jobs that were added or finished, and who has paused the queue, are unknown.
    """

    def parse_reply(reply: Any) -> QueueFigures:
        counts = dict(zip(_COUNTS.split(), map(int, reply), strict=False))
        due, oldest, added, finished, window, note, workers, paused, concurrency, max_jobs, duration, run = reply[8:]
        since_ms, run_ms = _whole(oldest), _whole(run)
        return QueueFigures(
            **counts,
            due=due,
            oldest_ms=None if since_ms is None else max(0, now_ms - since_ms),
            scheduler_lag_ms=0 if run_ms is None else max(0, now_ms - run_ms),
            added=added,
            finished=finished,
            window_ms=_whole(window),
            workers=tuple(texts(workers)),
            is_paused=bool(paused),
            pause=Pause.from_json(note) if paused else None,
            concurrency=_whole(concurrency),
            max=_whole(max_jobs),
            duration_ms=_whole(duration),
        )

    script_keys = named_keys(keys, f"{_COUNTS} meta events workers pause_note repeat")
    args = (keys.base, now_ms, RATE_PERIOD_MS if rates else 0)
    return script_call(loader.bulltask_script("queueOverview"), script_keys, args, parse_reply)


def _whole(value: bytes | int) -> int | None:
    try:
        return int(float(value))
    except (ValueError, OverflowError):  # "" for none, or anything that another client has stored
        return None


@value_class
class CleanedPage:
    """A page of jobs that :func:`clean_page` has ``checked``; the next page begins at ``position``."""

    removed: list[str]
    checked: int
    position: str


def clean_page(keys: QueueKeys, state: str, before_ms: int | None, size: int, position: str) -> Call[CleanedPage]:
    """bulltask's ``cleanPage`` with ``cleanJobsInSet``: remove jobs of a state, except schedulers' next iterations.

    Jobs newer than ``before_ms`` stay; ``None`` is only for jobs that have not finished. ``position`` is that of the
    previous page, ``""`` for the first one.
    """

    def parse_reply(reply: Any) -> CleanedPage:
        return CleanedPage(texts(reply[0]), int(reply[1]), text(reply[2]))

    script_keys = (*keys.temporary[:2], keys.base + state, keys.events, keys.repeat)
    args = (keys.base, "~" if before_ms is None else before_ms, state, size, position)
    return script_call(wrappers.with_guard("cleanJobsInSet", "cleanPage"), script_keys, args, parse_reply)


def obliterate(keys: QueueKeys, count: int, *, force: bool) -> Call[bool]:
    """``obliterate``: remove up to ``count`` jobs from a paused queue. Returns True if more are left."""

    def parse_reply(reply: Any) -> bool:
        if reply in OBLITERATE_ERRORS:
            raise OBLITERATE_ERRORS[reply](keys.name)
        return bool(reply)

    return script_call(
        loader.official_script("obliterate"), (keys.meta, keys.base), (count, "force" if force else ""), parse_reply
    )


def move_jobs_to_wait(keys: QueueKeys, state: str, count: int, before_ms: int | None) -> Call[bool]:
    """``moveJobsToWait``: move failed, completed or delayed jobs to the waiting list; True if more may be left.

    They finished before ``before_ms``. ``None`` means all jobs, and is required for delayed jobs, whose scores are no
    times.
    """
    script_keys, args = _move_to_wait_args(keys, state, count, before_ms)
    return script_call(loader.official_script("moveJobsToWait"), script_keys, args, bool)


def retry_failed(keys: QueueKeys, count: int, before_ms: int, after: str) -> Call[tuple[bool, str]]:
    """bulltask's ``retryFailed``: :func:`move_jobs_to_wait` for failed jobs, except for revoked ones.

    The result is whether more jobs may be left, and the position where the next call continues: ``after``, ``""`` at
    first.
    """

    def parse_reply(reply: Any) -> tuple[bool, str]:
        return bool(reply[0]), text(reply[1])

    script_keys, args = _move_to_wait_args(keys, "failed", count, before_ms)
    return script_call(wrappers.retry_failed(), (keys.temporary[0], *script_keys), (REVOKED, after, *args), parse_reply)


def _move_to_wait_args(
    keys: QueueKeys, state: str, count: int, before_ms: int | None
) -> tuple[tuple[str, ...], tuple[Arg, ...]]:
    script_keys = (keys.base, keys.events, keys.base + state, *named_keys(keys, "wait paused meta active marker"))
    return script_keys, (count, MAX_SCORE if before_ms is None else before_ms, state)


def get_counts_per_priority(keys: QueueKeys, priorities: Sequence[int]) -> Call[dict[int, int]]:
    """``getCountsPerPriority``: count the waiting jobs with each priority; 0 means without a priority."""

    def parse_reply(reply: Any) -> dict[int, int]:
        return {priority: int(count) for priority, count in zip(priorities, reply, strict=True)}

    script_keys = (keys.wait, keys.paused, keys.meta, keys.prioritized)
    return script_call(loader.official_script("getCountsPerPriority"), script_keys, tuple(priorities), parse_reply)


def get_ranges(keys: QueueKeys, states: Sequence[str], start: int, end: int, *, asc: bool) -> Call[list[list[str]]]:
    """``getRanges``: read the ids from ``start`` to ``end`` in each state."""

    def parse_reply(reply: Any) -> list[list[str]]:
        # For lists the script returns the right range in the wrong order.
        pairs = zip(states, reply, strict=True)
        return [texts(reversed(ids) if asc and state in LISTS else ids) for state, ids in pairs]

    return script_call(loader.official_script("getRanges"), (keys.base,), (start, end, int(asc), *states), parse_reply)


def page_after(
    keys: QueueKeys, state: str, cursor: PageCursor, size: int, *, asc: bool
) -> Call[tuple[list[str], PageCursor]]:
    """bulltask's ``pageAfter``: read the next ids in a state (none at the end), and the cursor after them."""
    is_list = state in LISTS

    def parse_reply(reply: Any) -> tuple[list[str], PageCursor]:
        words = list(reply or ())
        if not is_list:
            ids = texts(words[::2])
            return ids, PageCursor(score=text(words[-1]), ids=(ids[-1],)) if ids else cursor
        ids = texts(words[1:])
        return ids, PageCursor(distance=int(words[0]) + len(ids), ids=tuple(reversed(ids))) if ids else cursor

    position: Arg = cursor.distance if is_list else cursor.score
    args = (size, int(asc), position, *cursor.ids)
    return script_call(loader.bulltask_script("pageAfter"), (keys.base + state,), args, parse_reply)


def get_metrics(keys: QueueKeys, kind: str, start: int, end: int) -> Call[Metrics]:
    """``getMetrics``: read how many jobs finished as ``kind`` (``completed`` or ``failed``), by minute."""

    def parse_reply(reply: Any) -> Metrics:
        meta, data, points = reply
        count, previous_ms, previous_count = (int(float(value or 0)) for value in meta)
        return Metrics(count, previous_ms, previous_count, tuple(int(float(point or 0)) for point in data), int(points))

    key = keys.metrics_completed if kind == "completed" else keys.metrics_failed
    return script_call(loader.official_script("getMetrics"), (key, f"{key}:data"), (start, end), parse_reply)


def get_rate_limit_ttl(keys: QueueKeys, max_jobs: int) -> Call[int]:
    """``getRateLimitTtl``: read how long the queue is rate-limited, in milliseconds; 0 or less if it is not."""
    return script_call(loader.official_script("getRateLimitTtl"), (keys.limiter, keys.meta), (max_jobs,), int)


def limit_now(keys: QueueKeys, duration_ms: int) -> Call[None]:
    """Rate-limit the queue for ``duration_ms``, as Node's ``rateLimit`` does."""
    return command("SET", keys.limiter, _NO_MORE_JOBS, "PX", duration_ms, parse_reply=nothing)


def is_maxed(keys: QueueKeys) -> Call[bool]:
    """``isMaxed``: return True if as many jobs are active as the queue's global concurrency allows."""
    return script_call(loader.official_script("isMaxed"), (keys.meta, keys.active), (), bool)


def get_meta(keys: QueueKeys) -> Call[dict[str, str]]:
    """Read the queue's ``meta`` hash."""

    def parse_reply(reply: Any) -> dict[str, str]:
        words = [codec.decode_text(word) for word in reply]
        return dict(zip(words[::2], words[1::2], strict=True))

    return command("HGETALL", keys.meta, parse_reply=parse_reply)


def list_clients(wanted: str, prefix: str = "", *, database: int | None = None) -> Call[list[ClientRow]]:
    """List the connections whose name is ``wanted``, or starts with ``prefix`` unless that is empty.

    With ``database``, only those to this database: workers of the same queue name in another one never see its jobs.
    """

    def parse_reply(reply: Any) -> list[ClientRow]:
        if not isinstance(reply, bytes):
            raise BrokerError(f"unexpected reply to CLIENT LIST: {reply!r}")
        rows = []
        for line in codec.decode_text(reply).splitlines():
            fields = dict(part.partition("=")[::2] for part in line.split(" "))
            name = fields.get("name", "")
            if database is not None and fields.get("db", str(database)) != str(database):
                continue
            if name == wanted or (prefix and name.startswith(prefix)):
                rows.append(ClientRow(name, fields.get("addr", ""), fields))
        return rows

    call = command("CLIENT", "LIST", parse_reply=parse_reply)
    return AllNodesCall(call, lambda parts: [row for rows in parts for row in rows])


def get_counts(keys: QueueKeys, states: Sequence[str]) -> Call[dict[str, int]]:
    """``getCounts``: count the jobs in each of ``states`` (``wait``, ``active``, ``completed`` …)."""

    def parse_reply(reply: Any) -> dict[str, int]:
        return {state: int(count) for state, count in zip(states, reply, strict=True)}

    return script_call(loader.official_script("getCounts"), (keys.base,), tuple(states), parse_reply)


def state_size(keys: QueueKeys, state: str) -> Call[int]:
    """Count the jobs in a state without writing. (BullMQ's script removes BullMQ 4's markers from ``wait``.)"""
    return command("LLEN" if state in LISTS else "ZCARD", keys.base + state)


def count_by_score(keys: QueueKeys, state: str, low: str, high: str) -> Call[int]:
    """Count the jobs in a sorted state with a score from ``low`` to ``high``, in Redis' notation for bounds."""
    return command("ZCOUNT", keys.base + state, low, high)


def score_at(keys: QueueKeys, state: str, rank: int) -> Call[str | None]:
    """Read the score at a rank of a sorted state, as Redis writes it; ``None`` if it has fewer jobs."""

    def parse_reply(reply: Any) -> str | None:
        return text(reply[1]) if reply else None

    return command("ZRANGE", keys.base + state, rank, rank, "WITHSCORES", parse_reply=parse_reply)


def ids_by_score(keys: QueueKeys, state: str, low: str, high: str) -> Call[list[str]]:
    """List the ids in a sorted state whose score is from ``low`` to ``high``."""
    return command("ZRANGEBYSCORE", keys.base + state, low, high, parse_reply=texts)


def ids_with_scores(keys: QueueKeys, state: str, ids: Sequence[str], low: str, high: str) -> Call[list[str]]:
    """Find those of some ids that are in a sorted state, with a score like for `ids_by_score`; ``high`` is excluded."""
    minimum, limit = float(low), float(high.removeprefix("("))

    def found(scores: Sequence[bytes | None]) -> list[str]:
        pairs = zip(ids, scores, strict=True)
        return [job_id for job_id, score in pairs if score is not None and minimum <= float(score) < limit]

    return command("ZMSCORE", keys.base + state, *ids, parse_reply=found)


def list_ids(keys: QueueKeys, state: str) -> Call[list[str]]:
    """List all ids in a state that is a list."""
    return command("LRANGE", keys.base + state, 0, -1, parse_reply=texts)


def scan_queues(prefix: str, cursor: str, suffix: str = "meta") -> Call[tuple[str, list[str]]]:
    """Scan for the queues under a prefix; the result is the next cursor (``0`` at the end), and names in BullMQ.

    Every queue that was ever used has a ``meta`` hash, and those of Bull have the hashes of their jobs. The same name
    may come twice.
    """
    start, end = f"{prefix}:", f":{suffix}"
    pattern = "*".join(_GLOB.sub(r"\\\1", part) for part in (start, end))

    def parse_reply(reply: Any) -> tuple[str, list[str]]:
        found = (text(key)[len(start) : -len(end)] for key in reply[1])
        return text(reply[0]), [name for name in found if name and ":" not in name]

    return command("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT, parse_reply=parse_reply)


def queue_exists(keys: QueueKeys) -> Call[bool]:
    """Return True if the queue has a ``meta`` hash, as those that :func:`scan_queues` finds."""
    return command("EXISTS", keys.meta, parse_reply=bool)


def worker_queues(prefix: str) -> Call[set[str]]:
    """List the queues that connected workers process, by BullMQ's names, which are in the connections' names."""

    def parse_reply(reply: Any) -> set[str]:
        words = (word for line in text(reply).splitlines() for word in line.split(" "))
        names = (word.removeprefix("name=") for word in words if word.startswith("name="))
        return {queue_of_connection(name, prefix)[0] for name in names} - {""}

    return AllNodesCall(command("CLIENT", "LIST", parse_reply=parse_reply), lambda parts: set().union(*parts))


def queue_of_connection(name: str, prefix: str) -> tuple[str, str]:
    """Return the queue (its name in BullMQ) of a connection by its name, and what follows in it: ``w:web-1``, ``qe``.

    The queue is ``""`` if the connection is another client's.
    """
    encoded, _, kind = name.removeprefix(f"{prefix}:").partition(":")
    if not name.startswith(f"{prefix}:"):
        return "", ""
    try:
        return base64.b64decode(encoded, validate=True).decode(), kind
    except (binascii.Error, UnicodeDecodeError):
        return "", ""


CHECK_MS: Final = 60_000
"""How often one of the workers checks the schedules."""

_TOLERANCE_MS: Final = 5_000
_LIVE_MS: Final = 150_000
"""How long a worker that has not checked its schedule may be alive."""

_SCHEDULE_SCAN_COUNT: Final = 1_000
_SCHEDULER_KEYS: Final = "repeat delayed wait paused meta prioritized marker id events pc"


@value_class
class Iteration:
    """A scheduler's next iteration.

    Attributes:
        next_ms: When it runs, by the cron pattern; ``None`` if the script computes it from the interval.
        data: JSON.
        options: The options as they are stored.
        missing_ms: If set, the iteration is added only if the scheduler's next one, which has this time, is missing
            (bulltask's ``iterationGuard``).
    """

    next_ms: int | None
    data: bytes
    options: Mapping[str, Any]
    missing_ms: int | None = None


def add_job_scheduler(
    keys: QueueKeys,
    scheduler_id: str,
    rule: Repeat,
    template: tuple[str, Mapping[str, Any]],
    iteration: Iteration,
    now_ms: int,
) -> Call[tuple[str, int]]:
    """``addJobScheduler``: add or change a scheduler, with a template of its jobs, and add an iteration.

    The result is the id of that job, and its delay in milliseconds; ``""`` and 0 if no iteration was missing, and
    ``"paused"`` if the scheduler was changed, but is paused (bulltask's ``pausedGuard``). The parser raises
    ``SchedulerCollisionError`` and ``SchedulerBusyError``.
    """
    script_keys, args, parse_reply = _scheduler_call(keys, scheduler_id, rule, template, iteration, now_ms)
    if iteration.missing_ms is not None:
        guarded = wrappers.with_guard("addJobScheduler", "iterationGuard")
        return script_call(guarded, script_keys, (*args, iteration.missing_ms), parse_reply)
    script_keys = (keys.paused_schedulers, keys.paused_scheduler(scheduler_id), *script_keys)
    guarded = wrappers.with_guard("addJobScheduler", "pausedGuard")
    return script_call(guarded, script_keys, (*args, new_job_id()), parse_reply)


def _scheduler_call(
    keys: QueueKeys,
    scheduler_id: str,
    rule: Repeat,
    template: tuple[str, Mapping[str, Any]],
    iteration: Iteration,
    now_ms: int,
) -> tuple[tuple[str, ...], tuple[Arg, ...], Callable[[Any], tuple[str, int]]]:
    """Return the keys, the arguments and the parser of ``addJobScheduler``."""
    name, options = template
    wire = {"name": name, **rule.to_wire()}
    if rule.offset_ms is not None:
        wire["offset"] = rule.offset_ms
    args = (
        _time_arg(iteration),
        to_msgpack(wire),
        scheduler_id,
        iteration.data,
        to_msgpack(options),
        to_msgpack(iteration.options),
        now_ms,
        keys.base,
        "",
    )

    def parse_reply(reply: Any) -> tuple[str, int]:
        raise_for(reply, iteration_id(scheduler_id, iteration.next_ms or 0), keys.name)
        if reply is None:
            return "", 0
        job_id, delay = reply
        return text(job_id), int(delay)

    return named_keys(keys, f"{_SCHEDULER_KEYS} active"), args, parse_reply


def update_job_scheduler(
    keys: QueueKeys, scheduler_id: str, producer_id: str, iteration: Iteration, now_ms: int
) -> Call[str | None]:
    """``updateJobScheduler``: add the job that follows job ``producer_id``. Returns its id.

    Returns ``None`` and does nothing if the scheduler no longer exists or already has that job: safe to retry.
    """
    script_keys = (*named_keys(keys, _SCHEDULER_KEYS), keys.job(producer_id), keys.active)
    args = (
        _time_arg(iteration),
        scheduler_id,
        iteration.data,
        to_msgpack(iteration.options),
        now_ms,
        keys.base,
        producer_id,
    )
    return script_call(
        loader.official_script("updateJobScheduler"),
        script_keys,
        args,
        lambda reply: None if reply is None else text(reply),
    )


def update_repeatable_job_millis(keys: QueueKeys, next_ms: int, hashed_key: str, key: str) -> Call[str]:
    """``updateRepeatableJobMillis``: record a repeatable job's next run; the result is its key, or ``""``."""
    args = (next_ms, hashed_key, key)
    return script_call(loader.official_script("updateRepeatableJobMillis"), (keys.repeat,), args, text)


def remove_repeatable(keys: QueueKeys, old_job_id: str, old_key: str, key: str) -> Call[bool]:
    """``removeRepeatable``: remove a repeatable job, and its next iteration if delayed; False if it does not exist.

    If it has a key in the oldest format, ``old_key``, its iterations' ids begin with ``old_job_id``; otherwise, both
    are ``""``.
    """
    script_keys = (keys.repeat, keys.delayed, keys.events)
    args = (old_job_id, old_key, key, keys.base)
    return script_call(loader.official_script("removeRepeatable"), script_keys, args, lambda reply: int(reply) == 0)


def read_repeatable(keys: QueueKeys, key: str) -> Call[dict[str, str]]:
    """Read the hash of a repeatable job or scheduler; empty for a key in the oldest format, which contains it all."""

    def parse_reply(reply: Any) -> dict[str, str]:
        return {name: text(value) for name, value in by_name(reply).items()}

    return command("HGETALL", keys.scheduler(key), parse_reply=parse_reply)


def remove_job_scheduler(keys: QueueKeys, scheduler_id: str, *, paused: bool = False) -> Call[bool]:
    """``removeJobScheduler``: remove a scheduler, and its next iteration if delayed; False if it does not exist."""
    script_keys = (_schedulers(keys, paused=paused), keys.delayed, keys.events)
    script = loader.official_script("removeJobScheduler")
    return script_call(script, script_keys, (scheduler_id, keys.base), lambda reply: int(reply) == 0)


def get_job_scheduler(keys: QueueKeys, scheduler_id: str, *, paused: bool = False) -> Call[Scheduler | None]:
    """``getJobScheduler``: read a scheduler."""

    def parse_reply(reply: Any) -> Scheduler | None:
        if not reply or reply[0] is None:
            return None
        flat, score = reply
        return Scheduler.from_hash(scheduler_id, flat, int(float(score)))

    script, script_keys = loader.official_script("getJobScheduler"), (_schedulers(keys, paused=paused),)
    return script_call(script, script_keys, (scheduler_id,), parse_reply)


def _schedulers(keys: QueueKeys, *, paused: bool) -> str:
    """Return the key of the schedulers with their next times; that of a scheduler begins with it."""
    return keys.paused_schedulers if paused else keys.repeat


def list_schedulers(keys: QueueKeys, start: int, end: int, *, asc: bool) -> Call[list[tuple[str, int]]]:
    """List the ids of schedulers with the time of their next iteration, ordered by that time."""
    return command("ZRANGE" if asc else "ZREVRANGE", keys.repeat, start, end, "WITHSCORES", parse_reply=_rows)


def _rows(reply: Any) -> list[tuple[str, int]]:
    # RESP2: member, score, member, score …
    return [(text(member), int(float(score))) for member, score in zip(reply[::2], reply[1::2], strict=True)]


def scan_schedulers(keys: QueueKeys, cursor: str, *, paused: bool = False) -> Call[tuple[str, list[tuple[str, int]]]]:
    """Read some of all schedulers, with the time of their next iteration, and the next cursor (``0`` at the end).

    Unlike with ranges, no scheduler is missed because its next iteration was added between two calls; one may come
    twice.
    """

    def parse_reply(reply: Any) -> tuple[str, list[tuple[str, int]]]:
        return text(reply[0]), _rows(reply[1])

    key = _schedulers(keys, paused=paused)
    return command("ZSCAN", key, cursor, "COUNT", _SCHEDULE_SCAN_COUNT, parse_reply=parse_reply)


def read_scheduler(keys: QueueKeys, scheduler_id: str, next_ms: int, *, paused: bool = False) -> Call[Scheduler]:
    """Read the hash of a scheduler that :func:`list_schedulers` returned."""
    key = keys.paused_scheduler(scheduler_id) if paused else keys.scheduler(scheduler_id)
    return command("HGETALL", key, parse_reply=lambda reply: Scheduler.from_hash(scheduler_id, reply, next_ms))


@value_class
class StoredScheduler:
    """A scheduler with its data (JSON) as it is stored.

    A paused one has a token, which changes with each change; ``removed`` is whether its next job was removed, and has
    not run.
    """

    scheduler: Scheduler
    data: bytes
    token: str = ""
    removed: bool = False


def read_stored_scheduler(keys: QueueKeys, scheduler_id: str, next_ms: int) -> Call[StoredScheduler | None]:
    """Read a scheduler to add its next iteration; ``None`` if it is none, but a repeatable job of older versions."""

    def parse_reply(reply: Any) -> StoredScheduler | None:
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        if b"ic" not in fields:
            return None
        return StoredScheduler(Scheduler.from_hash(scheduler_id, reply, next_ms), fields.get(b"data", b"{}"))

    return command("HGETALL", keys.scheduler(scheduler_id), parse_reply=parse_reply)


def read_paused_scheduler(keys: QueueKeys, scheduler_id: str) -> Call[StoredScheduler | None]:
    """Read a paused scheduler to run or resume it; ``None`` if it is not paused."""

    def parse_reply(reply: Any) -> StoredScheduler | None:
        if not reply or reply[0] is None:
            return None
        flat, score = reply
        fields = dict(zip(flat[::2], flat[1::2], strict=True))
        scheduler = Scheduler.from_hash(scheduler_id, flat, int(float(score)))
        token, removed = text(fields.get(b"token", b"")), fields.get(b"removed") == b"1"
        return StoredScheduler(scheduler, fields.get(b"data", b"{}"), token, removed)

    script = loader.official_script("getJobScheduler")
    return script_call(script, (keys.paused_schedulers,), (scheduler_id,), parse_reply)


def pause_scheduler(keys: QueueKeys, scheduler_id: str, pause: Pause) -> Call[int]:
    """bulltask's ``pauseScheduler``: pause a scheduler, and remove its next iteration if delayed.

    Returns 1 if it is paused, 0 if it does not exist, -1 if it is a repeatable job.
    """
    script_keys = (keys.paused_schedulers, keys.paused_scheduler(scheduler_id), keys.scheduler(scheduler_id))
    args = (pause.by, pause.at_ms, new_job_id(), scheduler_id, keys.base)
    return script_call(wrappers.pause_scheduler(), (*script_keys, keys.repeat, keys.delayed, keys.events), args, int)


def read_run_state(keys: QueueKeys, job_id: str) -> Call[str]:
    """Return ``waiting`` if a job has not started yet, ``started`` if it has, ``""`` if it does not exist."""

    def parse_reply(reply: Any) -> str:
        name, *started = reply
        return "" if name is None else "waiting" if started == [None, None] else "started"

    return command("HMGET", keys.job(job_id), "name", "processedOn", "finishedOn", parse_reply=parse_reply)


def resume_scheduler(
    keys: QueueKeys, stored: StoredScheduler, state: str, iteration: Iteration | None, now_ms: int
) -> Call[bool]:
    """bulltask's ``resumeScheduler``: resume a paused scheduler; add an iteration, unless it is ``None``.

    ``state`` is that of the job that was next when it was paused. Returns False if the scheduler or that job has
    changed since they were read. The parser raises ``SchedulerCollisionError`` and ``SchedulerBusyError``.
    """
    old = stored.scheduler
    added = iteration or Iteration(old.next_ms, stored.data, old.opts)
    add_keys, args, parse_reply = _scheduler_call(keys, old.id, old.rule, (old.name, old.opts), added, now_ms)
    script_keys = (keys.paused_schedulers, keys.paused_scheduler(old.id), keys.scheduler(old.id))
    job_key = keys.job(old.next_job_id)
    return script_call(
        wrappers.resume_scheduler(),
        (*script_keys, job_key, *add_keys),
        (stored.token, state, 0 if iteration is None else 1, *args),
        lambda reply: reply is not None and bool(parse_reply(reply)),
    )


def read_iteration(keys: QueueKeys, scheduler_id: str, next_ms: int) -> list[Call[str]]:
    """Return two calls for an iteration's job: ``stored``, ``finished`` or ``""``, and ``delayed`` or ``""``."""
    job_id = iteration_id(scheduler_id, next_ms)

    def parse_hash(reply: Any) -> str:
        return "finished" if reply[1] is not None else "stored" if reply[0] is not None else ""

    return [
        command("HMGET", keys.job(job_id), "name", "finishedOn", parse_reply=parse_hash),
        command("ZSCORE", keys.delayed, job_id, parse_reply=lambda reply: "" if reply is None else "delayed"),
    ]


def claim_check(keys: QueueKeys, *, continued: bool = False) -> Call[bool]:
    """Return whether the caller must check the schedulers: no other worker has just done so, or it has begun."""
    options = () if continued else ("NX",)
    period_ms = CHECK_MS - _TOLERANCE_MS
    return command("SET", keys.schedulers_checked, 1, *options, "PX", period_ms, parse_reply=bool)


def _time_arg(iteration: Iteration) -> int | str:
    return "" if iteration.next_ms is None else iteration.next_ms


@value_class
class BeatLabel:
    """The app whose ``beat_schedule`` has created a job scheduler, ``""`` for none, and a hash of the entry."""

    owner: str
    digest: str


def read_label(keys: QueueKeys, scheduler_id: str, *, paused: bool = False) -> Call[BeatLabel]:
    """Read which app has created a scheduler."""

    def parse_reply(reply: Any) -> BeatLabel:
        try:
            options = codec.decode(reply)
        except DecodeError:
            options = None
        entry = options.get(BULLTASK_KEY) if isinstance(options, dict) else None
        label = entry if isinstance(entry, dict) else {}
        return BeatLabel(str(label.get("beat", "")), str(label.get("digest", "")))

    key = keys.paused_scheduler(scheduler_id) if paused else keys.scheduler(scheduler_id)
    return command("HGET", key, "opts", parse_reply=parse_reply)


def beat_queues(prefix: str, app: str) -> Call[set[str]]:
    """List the queues in which the app has created schedulers, by their names in the app."""
    return command("SMEMBERS", key_names.beat_queues(prefix, app), parse_reply=lambda reply: set(texts(reply)))


def add_beat_queue(prefix: str, app: str, queue: str) -> Call[int]:
    """Record that the app has schedulers in a queue, to find them when its settings no longer name the queue."""
    return command("SADD", key_names.beat_queues(prefix, app), queue)


def remove_beat_queue(prefix: str, app: str, queue: str) -> Call[int]:
    """Record that the app no longer has schedulers in a queue."""
    return command("SREM", key_names.beat_queues(prefix, app), queue)


@value_class
class ScheduleVersion:
    """The version of its app's schedule that a worker runs.

    Attributes:
        number: A higher number for each version that workers start to run.
        is_due: Whether this worker must check the schedule now.
        in_effect: The version that is in effect.
        workers: Ids of the workers that run the version in effect.
    """

    number: int
    is_due: bool
    in_effect: str
    workers: Sequence[str]


def register_schedule_version(
    prefix: str, app: str, worker: str, version: str, number: int, now_ms: int
) -> Call[ScheduleVersion]:
    """bulltask's ``scheduleVersion``: record that a worker runs a version; ``number`` is its last one, or 0."""

    def parse_reply(reply: Any) -> ScheduleVersion:
        return ScheduleVersion(int(reply[0]), bool(reply[1]), text(reply[2]), sorted(texts(reply[3])))

    script_keys = (key_names.schedule_versions(prefix, app),)
    args = (worker, version, number, now_ms, _LIVE_MS, CHECK_MS - _TOLERANCE_MS)
    return script_call(loader.bulltask_script("scheduleVersion"), script_keys, args, parse_reply)


def leave_schedule(prefix: str, app: str, worker: str) -> Call[int]:
    """Record that a worker has stopped."""
    return command("HDEL", key_names.schedule_versions(prefix, app), f"worker:{worker}")


def has_schedule_workers(prefix: str, app: str, now_ms: int) -> Call[bool]:
    """Return whether a live worker runs an app's schedule."""

    def parse_reply(reply: Any) -> bool:
        fields = by_name(reply).items()
        times = [text(value).partition(" ")[0] for name, value in fields if name.startswith("worker:")]
        return any(time.isdigit() and abs(now_ms - int(time)) <= _LIVE_MS for time in times)

    return command("HGETALL", key_names.schedule_versions(prefix, app), parse_reply=parse_reply)


# Calls that read Bull queues (Bull is BullMQ's predecessor), and bulltask's two scripts that migrate a job.
#
# Bull 3.29 and 4.16 write these keys under prefix:name: (jobs are acquired from the right of a list):
#
#   wait, paused               lists; a job without a priority is added at the left (lifo: at the right), one with a
#                              priority between jobs of higher and lower priority, right of all jobs without one
#   priority                   sorted set: the priorities of waiting jobs, to find that position
#   active                     list: running jobs
#   delayed                    sorted set: epoch ms * 4096 + the lowest 12 bits of the counter (for a retry: of the id)
#   completed, failed          sorted sets: when the job finished (epoch ms); in Bull 1, sets
#   repeat                     sorted set: name:id:end:zone:pattern or name:id:end:interval, by the next time
#   repeat:{md5}:{ms}          hash: the next iteration of a repeatable job, an ordinary job
#   id                         counter: ids of jobs without a custom id
#   meta-paused                string: exists while the queue is paused (and "paused" in the hash meta, for BullMQ)
#   {id}                       hash: name data opts timestamp delay priority; later processedOn attemptsMade stacktrace
#                              failedReason returnvalue finishedOn progress stalledCounter retriedOn, and deid
#   {id}:lock, {id}:logs       string, list
#
# and keys of the stalled check, rate limit, metrics and deduplication. Events are pub/sub messages, not a stream. In
# Bull 1, a job has no name, and its hash has attempts and attemptsMade as soon as it is added.


ScoredIds = list[tuple[str, str]]
"""Ids with their scores (``""`` in lists and sets); the job that runs next comes first."""


class MoveResult(Enum):
    """The result of a script that migrates a job; the values are the script's replies."""

    DONE = 1
    GONE = 0
    NO_HASH = -1
    LOCKED = -2
    CHANGED = -3
    ID_TAKEN = -4


@value_class(kw_only=True)
class JobConversion:
    """How to convert a job.

    Attributes:
        id: Bull's id.
        new_id: The new id; the same as ``id`` unless another one was chosen.
        source: Suffix of the key that contains the job: ``wait``, ``delayed`` …
        state: ``waiting``, ``delayed``, ``completed``, ``failed`` or ``recovered``.
        read: The fields as they were read.
        fields: Fields that are changed or added for BullMQ.
        dropped: Names of fields that BullMQ's hash does not have.
        priority: BullMQ's priority.
        score: When the job finished, for sets without scores.
        rank: Expected position in a list, counted from the job that runs next.
        debounce_id: Bull's ``deid``.
    """

    id: str
    new_id: str
    source: str
    state: str
    read: Mapping[str, bytes]
    fields: Mapping[str, bytes]
    dropped: Sequence[str]
    priority: int
    score: str = ""
    rank: int = 0
    debounce_id: str | None = None


def key_type(key: str) -> Call[str]:
    """Read the type of a key: ``list``, ``zset``, ``set``, ``hash``, ``string``, ``stream``, or ``none``."""
    return command("TYPE", key, parse_reply=text)


def size_of(key: str, kind: str) -> Call[int]:
    """Count the members of a list, sorted set or set."""
    return command({"list": "LLEN", "set": "SCARD"}.get(kind, "ZCARD"), key, parse_reply=int)


def page_of(key: str, kind: str, first: int, size: int) -> Call[ScoredIds]:
    """Read members, counted from the job that runs next; the first page of a set, which has no order, is all of it."""
    if kind == "list":
        return command("LRANGE", key, -(first + size), -(first + 1), parse_reply=_from_right)
    if kind == "set":
        return command("SMEMBERS", key, parse_reply=lambda reply: [] if first else _by_number(reply))
    return command("ZRANGE", key, first, first + size - 1, "WITHSCORES", parse_reply=_scored)


def read_hash(key: str) -> Call[dict[str, bytes]]:
    """Read all fields of a hash."""
    return command("HGETALL", key, parse_reply=by_name)


def move_bull_job(source: BullKeys, target: QueueKeys, change: JobConversion) -> Call[MoveResult]:
    """bulltask's ``moveBullJob``: move a job from Bull's queue to another one, in one step."""
    job, new_job = source.job(change.id), target.job(change.new_id)
    dedup = change.debounce_id
    script_keys = (
        source.base + change.source,
        job,
        source.logs(change.id),
        source.lock(change.id),
        source.priority,
        job if dedup is None else source.deduplication(dedup),
        source.id,
        *named_keys(target, "wait paused prioritized delayed completed failed active pc meta id marker events"),
        new_job,
        target.logs(change.new_id),
        new_job if dedup is None else target.deduplication(dedup),
    )
    args = (change.id, change.new_id, change.state, *_expected_fields(change), change.priority, change.score)
    return script_call(
        loader.bulltask_script("moveBullJob"), script_keys, (*args, change.rank, *_fields(change)), MoveResult
    )


def convert_bull_job(keys: BullKeys, change: JobConversion) -> Call[MoveResult]:
    """bulltask's ``convertBullJob``: convert a job to BullMQ's layout in its queue."""
    script_keys = (
        keys.base + change.source,
        keys.job(change.id),
        keys.lock(change.id),
        *named_keys(keys, "priority prioritized pc active meta marker id wait paused"),
    )
    args = (change.id, change.state, *_expected_fields(change), change.priority, change.rank, *_fields(change))
    return script_call(loader.bulltask_script("convertBullJob"), script_keys, args, MoveResult)


def in_same_slot(source: QueueKeys, target: QueueKeys) -> bool:
    """Return True if all keys of both queues are in one slot of a Redis Cluster."""
    return len({slot_of_key(key) for key in (source.wait, source.meta, target.wait, target.meta)}) == 1


def _expected_fields(change: JobConversion) -> tuple[Arg, Arg]:
    return change.read.get("opts", b""), change.read.get("attemptsMade", b"")


def _fields(change: JobConversion) -> list[Arg]:
    pairs: list[Arg] = [word for pair in change.fields.items() for word in pair]
    return [len(change.dropped), *change.dropped, *pairs]


def _from_right(reply: Any) -> ScoredIds:
    return [(text(member), "") for member in reversed(reply)]


def _scored(reply: Any) -> ScoredIds:
    return [(text(member), text(score)) for member, score in zip(reply[::2], reply[1::2], strict=True)]


def _by_number(reply: Any) -> ScoredIds:
    """Sort numeric ids by number, then the others."""
    ids = sorted(map(text, reply), key=lambda job_id: (not job_id.isdecimal(), len(job_id), job_id))
    return [(job_id, "") for job_id in ids]
