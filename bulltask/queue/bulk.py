"""Operations on all jobs in a queue, split into several calls, so that no call blocks Redis for long."""

from __future__ import annotations

from math import ceil
from typing import Final

from bulltask.clock import Duration, to_ms
from bulltask.errors import ConfigError
from bulltask.jobs.codec import MAX_SAFE_INTEGER
from bulltask.queue.context import QueueContext
from bulltask.transport.call import command
from bulltask.transport.operation import Operation, execute
from bulltask.transport.scripts import queue as scripts

__all__ = ["clean", "drain", "move_to_wait", "obliterate", "set_paused"]

_PER_CALL: Final = 500
"""Maximum number of jobs that one call checks, moves or removes, which keeps Redis busy for about 10 ms."""

_CLEANABLE: Final = ("completed", "failed", "waiting", "active", "paused", "delayed", "prioritized")
_RETRIABLE: Final = ("failed", "completed")


def set_paused(context: QueueContext, *, paused: bool) -> Operation[None]:
    """Pause or resume a queue, after merging its lists ``wait`` and ``paused`` into one."""
    while (yield from execute(scripts.set_paused(context.keys, paused=paused))):
        pass


def clean(context: QueueContext, grace: Duration, limit: int, state: str) -> Operation[list[str]]:
    """Remove old jobs in one state and return their ids."""
    if state not in {*_CLEANABLE, "wait"}:
        raise ConfigError(f"state must be one of {', '.join(_CLEANABLE)}, not {state!r:.200}")
    if limit < 0:
        raise ConfigError(f"limit must be 0 (no limit) or more, not {limit}")
    name = "wait" if state == "waiting" else state
    removed = yield from _clean(context, name, context.now_ms() - to_ms(grace, "grace"), limit or MAX_SAFE_INTEGER)
    yield from execute(scripts.add_cleaned_event(context.keys, len(removed)))
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
    yield from execute(command("UNLINK", keys.revoked, keys.lock_expiries, keys.marked_stalled))


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
