"""What changes a whole queue: operations of :class:`bulltask.queue.queue.Queue`, each written once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bulltask.clock import Duration, to_ms
from bulltask.errors import ConfigError
from bulltask.queue.link import Link
from bulltask.transport.call import command
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts import queue as queue_scripts
from bulltask.transport.scripts.job import add_log, remove_job, update_progress

__all__ = [
    "add_job_log",
    "clean",
    "drain",
    "forget_meta",
    "move_to_wait",
    "obliterate",
    "rate_limit",
    "remove",
    "remove_deduplication_key",
    "remove_deprecated_priority_key",
    "remove_rate_limit_key",
    "set_global_concurrency",
    "set_global_rate_limit",
    "set_meta",
    "set_paused",
    "trim_events",
    "update_job_progress",
]

CLEANED_AT_ONCE: Final = 10_000
_CLEANABLE: Final = ("completed", "failed", "wait", "active", "paused", "delayed", "prioritized")
_RETRIABLE: Final = ("failed", "completed")


def set_paused(link: Link, *, paused: bool) -> Operation[None]:
    """Pause or resume; the lists ``wait`` and ``paused`` are merged first, in as many calls as it takes."""
    while (yield from execute(queue_scripts.set_paused(link.keys, paused=paused))):
        pass


def drain(link: Link, *, delayed: bool) -> Operation[None]:
    """Remove the jobs that wait."""
    yield from execute(queue_scripts.drain(link.keys, delayed=delayed))


def clean(link: Link, grace: Duration, limit: int, state: str) -> Operation[list[str]]:
    """Remove old jobs of a state, ten thousand a call; the result is their ids."""
    name = {"waiting": "wait"}.get(state, state)
    if name not in _CLEANABLE:
        raise ConfigError(f"state must be one of {', '.join(_CLEANABLE)}, not {state!r}")
    if limit < 0:
        raise ConfigError(f"limit must be 0 (none) or more, not {limit}")
    grace_ms, removed = to_ms(grace, "grace"), list[str]()
    before_ms = link.now_ms() - grace_ms
    while True:
        size = min(CLEANED_AT_ONCE, limit - len(removed)) if limit else CLEANED_AT_ONCE
        part = yield from execute(queue_scripts.clean_jobs(link.keys, name, before_ms, size))
        removed += part
        if len(part) < size or (limit and len(removed) >= limit):
            return removed


def obliterate(link: Link, count: int, *, force: bool) -> Operation[None]:
    """Pause the queue and remove everything of it, ``count`` jobs a call."""
    yield from set_paused(link, paused=True)
    while (yield from execute(queue_scripts.obliterate(link.keys, count, force=force))):
        pass


def move_to_wait(
    link: Link, state: str, count: int, before_ms: int | None, *, revoked: bool = False
) -> Operation[None]:
    """Let all jobs of a state wait again, ``count`` a call; ``revoked`` failed ones only if asked."""
    if state not in {*_RETRIABLE, "delayed"}:
        raise ConfigError(f"state must be one of {', '.join(_RETRIABLE)}, not {state!r}")
    if count < 1:
        raise ConfigError(f"count must be 1 or more, not {count}")
    if before_ms is None and state != "delayed":
        before_ms = link.now_ms()
    if state == "failed" and not revoked and before_ms is not None:
        more, after = True, ""
        while more:
            more, after = yield from execute(queue_scripts.retry_failed(link.keys, count, before_ms, after))
        return
    while (yield from execute(queue_scripts.move_jobs_to_wait(link.keys, state, count, before_ms))):
        pass


def remove(link: Link, job_id: str, *, children: bool) -> Operation[bool]:
    """Remove a job; false when it is locked."""
    return (yield from execute(remove_job(link.keys, job_id, children=children)))


def rate_limit(link: Link, duration: Duration) -> Operation[None]:
    """Take no job for that long."""
    duration_ms = to_ms(duration, "duration")
    if duration_ms:
        yield from execute(queue_scripts.limit_now(link.keys, duration_ms))


def remove_rate_limit_key(link: Link) -> Operation[bool]:
    """End a rate limit now; false when there was none."""
    return (yield from execute(command("DEL", link.keys.limiter, parse_reply=bool)))


def set_meta(link: Link, values: Mapping[str, str | int]) -> Operation[None]:
    """Store fields of ``meta``."""
    if not values:
        return
    if "paused" in values:
        raise ConfigError("whether a queue is paused is more than a field of meta; use pause() and resume()")
    words = [word for pair in values.items() for word in pair]
    yield from execute(command("HSET", link.keys.meta, *words))


def forget_meta(link: Link, *names: str) -> Operation[bool]:
    """Remove fields of ``meta``; false when none of them was there."""
    return (yield from execute(command("HDEL", link.keys.meta, *names, parse_reply=bool)))


def set_global_concurrency(link: Link, concurrency: int) -> Operation[None]:
    """Limit how many jobs are active at once."""
    yield from set_meta(link, {"concurrency": _positive(concurrency, "concurrency")})


def set_global_rate_limit(link: Link, most: int, duration: Duration) -> Operation[None]:
    """Limit how many jobs are taken in a time."""
    duration_ms = _positive(to_ms(duration, "duration"), "duration")
    yield from set_meta(link, {"max": _positive(most, "max"), "duration": duration_ms})


def trim_events(link: Link, max_length: int) -> Operation[int]:
    """Cut the event stream; the result is how many events were removed."""
    return (yield from execute(command("XTRIM", link.keys.events, "MAXLEN", "~", max_length, parse_reply=int)))


def remove_deduplication_key(link: Link, dedup_id: str) -> Operation[bool]:
    """Free a deduplication id; false when nobody owned it."""
    return (yield from execute(command("DEL", link.keys.deduplication(dedup_id), parse_reply=bool)))


def remove_deprecated_priority_key(link: Link) -> Operation[bool]:
    """Remove the key of BullMQ 3; false when there was none."""
    return (yield from execute(command("DEL", link.keys.deprecated_priority, parse_reply=bool)))


def update_job_progress(link: Link, job_id: str, progress: bytes) -> Operation[None]:
    """Store a job's progress."""
    yield from execute(update_progress(link.keys, job_id, progress))


def add_job_log(link: Link, job_id: str, line: str, keep: int | None) -> Operation[int]:
    """Append a line to a job's log; the result is how many lines it has."""
    return (yield from execute(add_log(link.keys, job_id, line, keep, link.broker.config.max_logs)))


def _positive(value: int, name: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value!r}")
    return value
