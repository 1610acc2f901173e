"""Operations on all jobs in a queue, split into several calls, so that no call blocks Redis for long."""

from __future__ import annotations

from math import ceil
from typing import Final

from bulltask.clock import Duration, to_ms
from bulltask.errors import ConfigError
from bulltask.jobs.codec import MAX_SAFE_INTEGER
from bulltask.queue.context import QueueContext
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts import queue as scripts

__all__ = ["clean", "move_to_wait", "obliterate", "set_paused"]

_CLEANED_PER_CALL: Final = 10_000
_CLEANABLE: Final = ("completed", "failed", "waiting", "active", "paused", "delayed", "prioritized")
_RETRIABLE: Final = ("failed", "completed")


def set_paused(context: QueueContext, *, paused: bool) -> Operation[None]:
    """Pause or resume a queue, after merging its lists ``wait`` and ``paused`` into one."""
    while (yield from execute(scripts.set_paused(context.keys, paused=paused))):
        pass


def clean(context: QueueContext, grace: Duration, limit: int, state: str) -> Operation[list[str]]:
    """Remove old jobs in one state and return their ids."""
    if state not in {*_CLEANABLE, "wait"}:
        raise ConfigError(f"state must be one of {', '.join(_CLEANABLE)}, not {state!r}")
    if limit < 0:
        raise ConfigError(f"limit must be 0 (no limit) or more, not {limit}")
    name = "wait" if state == "waiting" else state
    grace_ms, removed = to_ms(grace, "grace"), list[str]()
    before_ms = context.now_ms() - grace_ms
    while True:
        size = min(_CLEANED_PER_CALL, limit - len(removed)) if limit else _CLEANED_PER_CALL
        part = yield from execute(scripts.clean_jobs(context.keys, name, before_ms, size))
        removed += part
        if len(part) < size or (limit and len(removed) >= limit):
            return removed


def obliterate(context: QueueContext, count: int, *, force: bool) -> Operation[None]:
    """Pause the queue and remove it, ``count`` jobs per call."""
    yield from set_paused(context, paused=True)
    while (yield from execute(scripts.obliterate(context.keys, count, force=force))):
        pass


def move_to_wait(
    context: QueueContext, state: str, count: int, before_ms: int | None, *, revoked: bool = False
) -> Operation[None]:
    """Move all jobs in one state back to waiting, ``count`` per call; revoked jobs only if ``revoked`` is true."""
    if state not in {*_RETRIABLE, "delayed"}:
        raise ConfigError(f"state must be one of {', '.join(_RETRIABLE)}, not {state!r}")
    if count < 1:
        raise ConfigError(f"count must be 1 or more, not {count}")
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
