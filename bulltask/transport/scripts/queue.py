"""Calls that change or read a whole queue, or list queues.

Times are in milliseconds, by the server's clock. Pages of finished jobs are addressed by scores, which do not change;
ranks change whenever a worker moves a job.
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bulltask.errors import BrokerError, QueueActiveError, QueueError, QueueNotPausedError
from bulltask.jobs import codec
from bulltask.jobs.states import REVOKED
from bulltask.lua import loader, wrappers
from bulltask.transport.call import AllNodesCall, Arg, Call, command, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import text, texts

__all__ = [
    "LISTS",
    "SETS",
    "CleanedPage",
    "ClientRow",
    "MetricsReply",
    "PageCursor",
    "add_cleaned_event",
    "clean_page",
    "count_by_score",
    "get_counts",
    "get_counts_per_priority",
    "get_meta",
    "get_metrics",
    "get_ranges",
    "get_rate_limit_ttl",
    "ids_by_score",
    "is_maxed",
    "limit_now",
    "list_clients",
    "list_ids",
    "move_jobs_to_wait",
    "obliterate",
    "page_after",
    "retry_failed",
    "scan_queues",
    "score_at",
    "set_paused",
    "state_size",
    "worker_queues",
]

MAX_MOVED_PER_CALL: Final = 10_000
"""Maximum number of ids that one ``setPaused`` call moves, which keeps Redis busy for a few milliseconds."""

MAX_SCORE: Final = "1.7976931348623157e+308"

_NO_MORE_JOBS: Final = codec.MAX_SAFE_INTEGER

OBLITERATE_ERRORS: Final[Mapping[int, type[QueueError]]] = {-1: QueueNotPausedError, -2: QueueActiveError}

LISTS: Final = ("wait", "active", "paused")
"""States that are lists of ids."""

SETS: Final = ("completed", "failed", "delayed", "prioritized", "waiting-children")
"""States that are sorted sets of ids."""

_SCAN_COUNT = 1_000

_GLOB = re.compile(r"([\\*?\[\]^])")


@dataclass(frozen=True, slots=True)
class MetricsReply:
    """Reply from ``getMetrics``.

    Attributes:
        count: Number of jobs, excluding the current minute.
        previous_ms: When a job was last counted.
        previous_count: The count at the last full minute.
        data: Jobs per minute, newest first.
        points: Number of minutes that are stored.
    """

    count: int
    previous_ms: int
    previous_count: int
    data: tuple[int, ...]
    points: int


@dataclass(frozen=True, slots=True)
class ClientRow:
    """A connection as ``CLIENT LIST`` shows it; ``fields`` has every column by its Redis name."""

    name: str
    address: str
    fields: Mapping[str, str]


@dataclass(frozen=True, slots=True)
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


def set_paused(keys: QueueKeys, *, paused: bool) -> Call[int]:
    """bulltask's ``setPaused``: pause or resume. Returns the number of ids still to move; call it until that is 0."""
    script_keys = (keys.wait, keys.paused, keys.meta, keys.prioritized, keys.events, keys.delayed, keys.marker)
    return script_call(
        loader.bulltask_script("setPaused"), script_keys, ("paused" if paused else "resumed", MAX_MOVED_PER_CALL), int
    )


@dataclass(frozen=True, slots=True)
class CleanedPage:
    """A page of jobs that :func:`clean_page` has checked.

    Attributes:
        removed: The ids of the jobs that were removed.
        checked: The number of jobs that were checked.
        position: Where the next page begins.
    """

    removed: list[str]
    checked: int
    position: str


def clean_page(keys: QueueKeys, state: str, before_ms: int | None, size: int, position: str) -> Call[CleanedPage]:
    """bulltask's ``cleanPage`` with ``cleanJobsInSet``: remove jobs of a state, except schedulers' next iterations.

    Args:
        keys: The queue.
        state: The state, by the name of its key.
        before_ms: Newer jobs stay. ``None`` means none, and is only for jobs that have not finished.
        size: How many jobs are checked.
        position: That of the previous page, ``""`` for the first one.
    """

    def parse_reply(reply: Any) -> CleanedPage:
        return CleanedPage(texts(reply[0]), int(reply[1]), text(reply[2]))

    script_keys = (*keys.temporary[:2], keys.base + state, keys.events, keys.repeat)
    args = (keys.base, "~" if before_ms is None else before_ms, state, size, position)
    return script_call(wrappers.with_guard("cleanJobsInSet", "cleanPage"), script_keys, args, parse_reply)


def add_cleaned_event(keys: QueueKeys, count: int) -> Call[None]:
    """Add the event of ``cleanJobsInSet``."""
    return command("XADD", keys.events, "*", "event", "cleaned", "count", count, parse_reply=_nothing)


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
    """``moveJobsToWait``: move up to ``count`` jobs of ``state`` to the waiting list. Returns True if more may be left.

    Args:
        keys: The queue.
        state: ``failed``, ``completed`` or ``delayed``.
        count: Maximum number of jobs in this call.
        before_ms: Only jobs that finished before this time. ``None`` means all jobs, and is required for delayed jobs,
            whose scores are not times.
    """
    script_keys, args = _move_to_wait_args(keys, state, count, before_ms)
    return script_call(loader.official_script("moveJobsToWait"), script_keys, args, bool)


def retry_failed(keys: QueueKeys, count: int, before_ms: int, after: str) -> Call[tuple[bool, str]]:
    """bulltask's ``retryFailed``: :func:`move_jobs_to_wait` for failed jobs, except for revoked ones.

    Args:
        keys: The queue.
        count: Number of jobs to check in this call.
        before_ms: Only jobs that finished before this time.
        after: The position that the previous call returned, ``""`` for the first call.

    Returns:
        Whether more jobs may be left, and the position where the next call continues.
    """

    def parse_reply(reply: Any) -> tuple[bool, str]:
        return bool(reply[0]), text(reply[1])

    script_keys, args = _move_to_wait_args(keys, "failed", count, before_ms)
    return script_call(wrappers.retry_failed(), (keys.temporary[0], *script_keys), (REVOKED, after, *args), parse_reply)


def _move_to_wait_args(
    keys: QueueKeys, state: str, count: int, before_ms: int | None
) -> tuple[tuple[str, ...], tuple[Arg, ...]]:
    script_keys = (
        keys.base,
        keys.events,
        keys.base + state,
        keys.wait,
        keys.paused,
        keys.meta,
        keys.active,
        keys.marker,
    )
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
        return [
            list(texts(reversed(ids) if asc and state in LISTS else ids))
            for state, ids in zip(states, reply, strict=True)
        ]

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


def get_metrics(keys: QueueKeys, kind: str, start: int, end: int) -> Call[MetricsReply]:
    """``getMetrics``: read how many jobs finished as ``kind`` (``completed`` or ``failed``), by minute."""

    def parse_reply(reply: Any) -> MetricsReply:
        meta, data, points = reply
        count, previous_ms, previous_count = (int(float(value or 0)) for value in meta)
        return MetricsReply(
            count, previous_ms, previous_count, tuple(int(float(point or 0)) for point in data), int(points)
        )

    key = keys.metrics_completed if kind == "completed" else keys.metrics_failed
    return script_call(loader.official_script("getMetrics"), (key, f"{key}:data"), (start, end), parse_reply)


def get_rate_limit_ttl(keys: QueueKeys, max_jobs: int) -> Call[int]:
    """``getRateLimitTtl``: read how long the queue is rate-limited, in milliseconds; 0 or less if it is not."""
    return script_call(loader.official_script("getRateLimitTtl"), (keys.limiter, keys.meta), (max_jobs,), int)


def limit_now(keys: QueueKeys, duration_ms: int) -> Call[None]:
    """Rate-limit the queue for ``duration_ms``, as Node's ``rateLimit`` does."""
    return command("SET", keys.limiter, _NO_MORE_JOBS, "PX", duration_ms, parse_reply=_nothing)


def is_maxed(keys: QueueKeys) -> Call[bool]:
    """``isMaxed``: return True if as many jobs are active as the queue's global concurrency allows."""
    return script_call(loader.official_script("isMaxed"), (keys.meta, keys.active), (), bool)


def get_meta(keys: QueueKeys) -> Call[dict[str, str]]:
    """Read the queue's ``meta`` hash."""

    def parse_reply(reply: Any) -> dict[str, str]:
        words = [codec.decode_text(word) for word in reply]
        return dict(zip(words[::2], words[1::2], strict=True))

    return command("HGETALL", keys.meta, parse_reply=parse_reply)


def list_clients(wanted: str, prefix: str = "") -> Call[list[ClientRow]]:
    """List the connections whose name is ``wanted``, or starts with ``prefix`` unless that is empty."""

    def parse_reply(reply: Any) -> list[ClientRow]:
        if not isinstance(reply, bytes):
            raise BrokerError(f"unexpected reply to CLIENT LIST: {reply!r}")
        rows = []
        for line in codec.decode_text(reply).splitlines():
            fields = dict(part.partition("=")[::2] for part in line.split(" "))
            name = fields.get("name", "")
            if name == wanted or (prefix and name.startswith(prefix)):
                rows.append(ClientRow(name, fields.get("addr", ""), fields))
        return rows

    call = command("CLIENT", "LIST", parse_reply=parse_reply)
    return AllNodesCall(call, lambda parts: [row for rows in parts for row in rows])


def _nothing(_: Any) -> None:
    return None


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


def list_ids(keys: QueueKeys, state: str) -> Call[list[str]]:
    """List all ids in a state that is a list."""
    return command("LRANGE", keys.base + state, 0, -1, parse_reply=texts)


def scan_queues(prefix: str, cursor: str) -> Call[tuple[str, list[str]]]:
    """Scan for the queues under a prefix, by their names in BullMQ. Returns the next cursor (``0`` at the end) and
    names.

    Every queue that was ever used has a ``meta`` hash. The same name may come twice.
    """
    start, end = f"{prefix}:", ":meta"
    pattern = _GLOB.sub(r"\\\1", start) + "*" + end

    def parse_reply(reply: Any) -> tuple[str, list[str]]:
        found = (text(key)[len(start) : -len(end)] for key in reply[1])
        return text(reply[0]), [name for name in found if name and ":" not in name]

    return command("SCAN", cursor, "MATCH", pattern, "COUNT", _SCAN_COUNT, parse_reply=parse_reply)


def worker_queues(prefix: str) -> Call[set[str]]:
    """List the queues that connected workers process, by BullMQ's names, which are in the connections' names."""
    start = f"{prefix}:"

    def parse_reply(reply: Any) -> set[str]:
        words = (word for line in text(reply).splitlines() for word in line.split(" "))
        names = (word.removeprefix("name=") for word in words if word.startswith("name="))
        queues = {_decode_queue(name.removeprefix(start).partition(":")[0]) for name in names if name.startswith(start)}
        return queues - {""}

    return AllNodesCall(command("CLIENT", "LIST", parse_reply=parse_reply), lambda parts: set().union(*parts))


def _decode_queue(name: str) -> str:
    """Return a queue's name from a connection's name; ``""`` if it is another client's."""
    try:
        return base64.b64decode(name, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        return ""
