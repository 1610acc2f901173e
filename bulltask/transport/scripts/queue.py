"""The scripts that act on a whole queue or read it; packing only (PROTOCOL 3.4).

Every time is the server's, in milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bulltask.errors import BrokerError, QueueActiveError, QueueError, QueueNotPausedError
from bulltask.jobs import codec
from bulltask.jobs.states import REVOKED
from bulltask.lua import loader
from bulltask.transport.call import Arg, Call, command, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for, text, texts

__all__ = [
    "ClientRow",
    "MetricsReply",
    "Place",
    "clean_jobs",
    "client_rows",
    "drain",
    "get_counts_per_priority",
    "get_meta",
    "get_metrics",
    "get_ranges",
    "get_rate_limit_ttl",
    "is_maxed",
    "limit_now",
    "move_jobs_to_wait",
    "obliterate",
    "page_after",
    "remove_job",
    "retry_failed",
    "set_paused",
    "state_size",
]

MOVED_AT_ONCE: Final = 50_000
"""Ids that one call of ``setPaused`` moves from list to list: a few milliseconds of the server."""

EVERY_DELAYED: Final = "1.7976931348623157e+308"
_LISTS: Final = frozenset({"wait", "paused", "active"})
_NO_MORE_JOBS: Final = codec.MAX_SAFE_INTEGER


@dataclass(frozen=True, slots=True)
class MetricsReply:
    """What ``getMetrics`` says.

    Attributes:
        count: jobs counted so far, without those of the running minute.
        previous_ms: when a job was counted last.
        previous_count: the count at the last full minute.
        data: jobs per minute, newest first.
        points: how many minutes are stored.
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
class Place:
    """How far a walk through a list or sorted set has come.

    Attributes:
        score: of the last member seen, ``""`` to begin (sorted sets).
        distance: of the last page from the end where the walk began (lists).
        ids: of the last page, last one first; of a sorted set only the last one.
    """

    score: str = ""
    distance: int = 0
    ids: tuple[str, ...] = ()


def set_paused(keys: QueueKeys, *, paused: bool) -> Call[int]:
    """Own ``setPaused``: pause or resume; the result is how many ids are still to be moved by further calls."""
    places = (keys.wait, keys.paused, keys.meta, keys.prioritized, keys.events, keys.delayed, keys.marker)
    return script_call(loader.own("setPaused"), places, ("paused" if paused else "resumed", MOVED_AT_ONCE), int)


def drain(keys: QueueKeys, *, delayed: bool) -> Call[None]:
    """``drain``: remove the jobs that wait, and the delayed ones if asked."""
    places = (keys.wait, keys.paused, keys.delayed, keys.prioritized, keys.repeat)
    return script_call(loader.official("drain"), places, (keys.base, int(delayed)), _nothing)


def clean_jobs(keys: QueueKeys, state: str, before_ms: int, limit: int) -> Call[list[str]]:
    """``cleanJobsInSet``: remove jobs of ``state`` that are older than ``before_ms``; the result is their ids."""
    args = (keys.base, before_ms, limit, state)
    return script_call(loader.official("cleanJobsInSet"), (keys.base + state, keys.events, keys.repeat), args, texts)


def obliterate(keys: QueueKeys, count: int, *, force: bool) -> Call[bool]:
    """``obliterate``: remove up to ``count`` jobs of a paused queue; true means that more are left."""

    def judge(reply: Any) -> bool:
        if reply in OBLITERATE_ERRORS:
            raise OBLITERATE_ERRORS[reply](keys.name)
        return bool(reply)

    return script_call(loader.official("obliterate"), (keys.meta, keys.base), (count, "force" if force else ""), judge)


OBLITERATE_ERRORS: Final[Mapping[int, type[QueueError]]] = {-1: QueueNotPausedError, -2: QueueActiveError}


def move_jobs_to_wait(keys: QueueKeys, state: str, count: int, before_ms: int | None) -> Call[bool]:
    """``moveJobsToWait``: up to ``count`` jobs of ``state`` wait again; true means that more may be left.

    Args:
        keys: the queue.
        state: ``failed``, ``completed`` or ``delayed``.
        count: how many in this call.
        before_ms: only those that finished before; ``None``: all (also of delayed ones, whose scores are no times).
    """
    places, args = _moved_to_wait(keys, state, count, before_ms)
    return script_call(loader.official("moveJobsToWait"), places, args, bool)


def retry_failed(keys: QueueKeys, count: int, before_ms: int, after: str) -> Call[tuple[bool, str]]:
    """Own ``retryFailed``: as :func:`move_jobs_to_wait` for failed jobs, but those that were revoked are left.

    Args:
        keys: the queue.
        count: how many jobs are looked at in this call.
        before_ms: only those that finished before.
        after: what the call before returned, ``""`` at first.

    Returns:
        Whether more may be there, and where the next call goes on.
    """

    def judge(reply: Any) -> tuple[bool, str]:
        return bool(reply[0]), text(reply[1])

    places, args = _moved_to_wait(keys, "failed", count, before_ms)
    return script_call(loader.retrying(), (keys.retrying, *places), (REVOKED, after, *args), judge)


def _moved_to_wait(
    keys: QueueKeys, state: str, count: int, before_ms: int | None
) -> tuple[tuple[str, ...], tuple[Arg, ...]]:
    places = (
        keys.base,
        keys.events,
        keys.base + state,
        keys.wait,
        keys.paused,
        keys.meta,
        keys.active,
        keys.marker,
    )
    return places, (count, EVERY_DELAYED if before_ms is None else before_ms, state)


def remove_job(keys: QueueKeys, job_id: str, *, children: bool) -> Call[bool]:
    """``removeJob``: remove a job (and its children); false when it, or one of these, is locked."""

    def judge(reply: Any) -> bool:
        raise_for(reply, job_id, keys.name)
        return bool(reply)

    args = (job_id, int(children), keys.base)
    return script_call(loader.official("removeJob"), (keys.job(job_id), keys.repeat), args, judge)


def get_counts_per_priority(keys: QueueKeys, priorities: Sequence[int]) -> Call[dict[int, int]]:
    """``getCountsPerPriority``: how many jobs wait with each priority; 0 are those without one."""

    def judge(reply: Any) -> dict[int, int]:
        return {priority: int(count) for priority, count in zip(priorities, reply, strict=True)}

    places = (keys.wait, keys.paused, keys.meta, keys.prioritized)
    return script_call(loader.official("getCountsPerPriority"), places, tuple(priorities), judge)


def get_ranges(keys: QueueKeys, states: Sequence[str], start: int, end: int, *, asc: bool) -> Call[list[str]]:
    """``getRanges``: ids from ``start`` to ``end`` of each of ``states``, without repetitions."""

    def judge(reply: Any) -> list[str]:
        found: dict[str, None] = {}
        for state, ids in zip(states, reply, strict=True):
            # The script reads lists from the right place but does not turn them round.
            turned = asc and state in _LISTS
            found.update(dict.fromkeys(texts(reversed(ids) if turned else ids)))
        return list(found)

    return script_call(loader.official("getRanges"), (keys.base,), (start, end, int(asc), *states), judge)


def page_after(keys: QueueKeys, state: str, place: Place, size: int, *, asc: bool) -> Call[tuple[list[str], Place]]:
    """Own ``pageAfter``: the next ids of a state, and the place behind them; no ids: this was the end."""
    is_list = state in _LISTS

    def judge(reply: Any) -> tuple[list[str], Place]:
        words = list(reply or ())
        if not is_list:
            ids = texts(words[::2])
            return ids, Place(score=text(words[-1]), ids=(ids[-1],)) if ids else place
        ids = texts(words[1:])
        return ids, Place(distance=int(words[0]) + len(ids), ids=tuple(reversed(ids))) if ids else place

    began: Arg = place.distance if is_list else place.score
    args = (size, int(asc), began, *place.ids)
    return script_call(loader.own("pageAfter"), (keys.base + state,), args, judge)


def state_size(keys: QueueKeys, state: str) -> Call[int]:
    """How many jobs a state has."""
    return command("LLEN" if state in _LISTS else "ZCARD", keys.base + state, judge=int)


def get_metrics(keys: QueueKeys, kind: str, start: int, end: int) -> Call[MetricsReply]:
    """``getMetrics``: how many jobs ended as ``kind`` (``completed`` or ``failed``), minute by minute."""

    def judge(reply: Any) -> MetricsReply:
        facts, data, points = reply
        count, previous_ms, previous_count = (int(float(fact or 0)) for fact in facts)
        return MetricsReply(
            count, previous_ms, previous_count, tuple(int(float(point or 0)) for point in data), int(points)
        )

    key = keys.metrics_completed if kind == "completed" else keys.metrics_failed
    return script_call(loader.official("getMetrics"), (key, f"{key}:data"), (start, end), judge)


def get_rate_limit_ttl(keys: QueueKeys, max_jobs: int) -> Call[int]:
    """``getRateLimitTtl``: how long the queue is rate-limited, in milliseconds; 0 or less: it is not."""
    return script_call(loader.official("getRateLimitTtl"), (keys.limiter, keys.meta), (max_jobs,), int)


def limit_now(keys: QueueKeys, duration_ms: int) -> Call[None]:
    """Rate-limit the queue for ``duration_ms``, as Node's ``rateLimit`` does."""
    return command("SET", keys.limiter, _NO_MORE_JOBS, "PX", duration_ms, judge=_nothing)


def is_maxed(keys: QueueKeys) -> Call[bool]:
    """``isMaxed``: as many jobs are active as the queue's global concurrency allows."""
    return script_call(loader.official("isMaxed"), (keys.meta, keys.active), (), bool)


def get_meta(keys: QueueKeys) -> Call[dict[str, str]]:
    """The queue's ``meta`` hash."""

    def judge(reply: Any) -> dict[str, str]:
        words = [codec.decode_text(word) for word in reply]
        return dict(zip(words[::2], words[1::2], strict=True))

    return command("HGETALL", keys.meta, judge=judge)


def client_rows(wanted: str, prefix: str = "") -> Call[list[ClientRow]]:
    """The connections whose name is ``wanted``, or begins with ``prefix`` if one is given."""

    def judge(reply: Any) -> list[ClientRow]:
        if not isinstance(reply, bytes):
            raise BrokerError(f"CLIENT LIST answered {reply!r}")
        found = []
        for line in codec.decode_text(reply).splitlines():
            fields = dict(part.partition("=")[::2] for part in line.split(" "))
            name = fields.get("name", "")
            if name == wanted or (prefix and name.startswith(prefix)):
                found.append(ClientRow(name, fields.get("addr", ""), fields))
        return found

    return command("CLIENT", "LIST", judge=judge)


def _nothing(_: Any) -> None:
    return None
