"""Job schedulers: what ``JobSchedulers``, ``beat_schedule`` and workers do with them; and BullMQ's repeatable jobs.

The worker that acquires one of a scheduler's jobs adds the next one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from datetime import UTC, datetime, tzinfo
from typing import TYPE_CHECKING, Any, Final

from bulltask.jobs import codec
from bulltask.jobs.clock import Duration, to_epoch_ms, to_ms, value_class
from bulltask.jobs.codec import Json
from bulltask.jobs.errors import BulltaskError, ConfigError, DecodeError, JobError
from bulltask.jobs.job import NewJob, RunningJob, new_job_id
from bulltask.jobs.names import check_scheduler_id, may_be_old_repeat_key
from bulltask.jobs.schedules import Repeat, Rule, Scheduler, iteration_id, iteration_options, key_digest
from bulltask.jobs.stored_job import StoredJob
from bulltask.transport.call import Call, QueueKeys, command
from bulltask.transport.operation import Operation, execute
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts import queue as scripts
from bulltask.transport.scripts.add import RepeatedJob, add_repeated_job, write_queue_meta
from bulltask.transport.scripts.queue import (
    Iteration,
    StoredScheduler,
    add_job_scheduler,
    get_job_scheduler,
    list_schedulers,
    read_iteration,
    read_paused_scheduler,
    read_repeatable,
    read_run_state,
    read_scheduler,
    read_stored_scheduler,
    remove_job_scheduler,
    remove_repeatable,
    scan_schedulers,
    update_job_scheduler,
    update_repeatable_job_millis,
)

if TYPE_CHECKING:
    from bulltask.queue.context import AddOptions, QueueContext

__all__ = [
    "SCHEDULING_ERRORS",
    "Repeatable",
    "SchedulersBase",
    "add_next_iteration",
    "all_rows",
    "find_scheduler",
    "list_all_schedulers",
    "list_paused",
    "list_repeatables",
    "listing_order",
    "pause_scheduler",
    "pause_text",
    "put",
    "remove",
    "remove_by_key",
    "remove_scheduler",
    "repeatable_key",
    "restore_iterations",
    "resume_scheduler",
    "rule_text",
    "run_now",
    "scheduling_retry_delay_ms",
]


_PER_ROUND_TRIP: Final = 1_000
_UNSUPPORTED_OPTIONS: Final = {
    "job_id": "the scheduler chooses the ids of its jobs",
    "delay": "the scheduler decides when its jobs run",
    "timestamp": "the scheduler decides when its jobs run",
    "deduplication": "a scheduler has only one next iteration at a time",
    "parent": "a scheduler's jobs have no parent",
}


def put(
    keys: QueueKeys, scheduler_id: str, rule: Repeat, job: NewJob, bulltask_options: Mapping[str, object], now_ms: int
) -> Operation[str | None]:
    """Create or update a scheduler and return its next job's id, ``None`` if its rule allows no further iteration.

    A paused one stays paused: the result is ``"paused"``. A pattern needs a time zone. ``job`` is the template: name,
    data and options of its jobs; ``bulltask_options`` are further options for it that only bulltask reads.
    """
    rule = _from_first_time(rule, now_ms)
    first_ms = _first_ms(rule, now_ms)
    if first_ms is None or (rule.end_ms is not None and first_ms > rule.end_ms):
        return None
    if rule.every_ms is not None:
        first_ms = None  # the script computes the time from an existing scheduler
    template = job.options.to_template(**bulltask_options)
    options = iteration_options(template, {**rule.to_wire(), "count": 1}, scheduler_id, first_ms, now_ms)
    call = add_job_scheduler(
        keys, scheduler_id, rule, (job.name, template), Iteration(first_ms, job.data, options), now_ms
    )
    job_id, _ = yield from execute(call)
    return job_id


def run_now(keys: QueueKeys, scheduler_id: str, now_ms: int) -> Operation[StoredJob | None]:
    """Add a job with a scheduler's name, data and options, beside its iterations; ``None`` without the scheduler."""
    stored = yield from execute(read_stored_scheduler(keys, scheduler_id, 0))
    stored = stored or (yield from execute(read_paused_scheduler(keys, scheduler_id)))
    if stored is None:
        return None
    scheduler, job_id = stored.scheduler, new_job_id()
    job = RepeatedJob(None, job_id, scheduler.name, stored.data, scheduler.opts)
    yield from execute(add_repeated_job(keys, job, now_ms))
    fields = {"name": job.name, "opts": codec.encode(dict(job.options)).decode(), "timestamp": str(now_ms)}
    fields["priority"] = str(job.options.get("priority", 0))
    flat = [part.encode() for pair in fields.items() for part in pair]
    return StoredJob.from_hash(keys.queue, job_id, [*flat, b"data", stored.data])


def list_all_schedulers(keys: QueueKeys, start: int, end: int, *, asc: bool) -> Operation[list[Scheduler]]:
    """Read schedulers in the order of their next jobs, a thousand per round trip."""
    if start >= 0 and 0 <= end < start + _PER_ROUND_TRIP:
        rows = yield from execute(list_schedulers(keys, start, end, asc=asc))
    else:
        rows = yield from all_rows(keys)
        first, stop, _ = slice(start, None if end == -1 else end + 1).indices(len(rows))
        rows = (rows if asc else rows[::-1])[first:stop]
    schedulers: list[Scheduler] = []
    for first in range(0, len(rows), _PER_ROUND_TRIP):
        schedulers += yield [read_scheduler(keys, *row) for row in rows[first : first + _PER_ROUND_TRIP]]
    return schedulers


def all_rows(keys: QueueKeys, *, paused: bool = False) -> Operation[list[tuple[str, int]]]:
    """Read the ids of all schedulers, ordered by the times of their next iterations, about a thousand per call."""
    rows, cursor = dict[str, int](), ""
    while cursor != "0":
        cursor, page = yield from execute(scan_schedulers(keys, cursor or "0", paused=paused))
        rows.update(page)
    # Redis, too, orders those with the same time by their bytes.
    return sorted(rows.items(), key=lambda row: (row[1], row[0].encode("utf-8", "surrogateescape")))


# BullMQ has no paused schedulers. bulltask moves a paused one to keys of its own, so that no client adds jobs for it
# (``pauseScheduler.lua``). If a client that does not know of this adds the scheduler again, it is no longer paused.


def find_scheduler(keys: QueueKeys, scheduler_id: str) -> Operation[Scheduler | None]:
    """Read a scheduler, paused or not."""
    # The third call finds one that was resumed between the first and the second.
    found = yield [get_job_scheduler(keys, scheduler_id, paused=paused) for paused in (False, True, False)]
    return next((scheduler for scheduler in found if scheduler is not None), None)


def remove_scheduler(keys: QueueKeys, scheduler_id: str) -> Operation[bool]:
    """Remove a scheduler, paused or not, and its next iteration if delayed; false if it does not exist."""
    return any((yield [remove_job_scheduler(keys, scheduler_id, paused=paused) for paused in (False, True, False)]))


def list_paused(keys: QueueKeys) -> Operation[list[Scheduler]]:
    """Read the paused schedulers, a thousand per round trip."""
    rows, found = (yield from all_rows(keys, paused=True)), list[Scheduler]()
    for first in range(0, len(rows), _PER_ROUND_TRIP):
        page = rows[first : first + _PER_ROUND_TRIP]
        read = yield [read_scheduler(keys, *row, paused=True) for row in page]
        again = yield [command("ZSCORE", keys.repeat, scheduler_id) for scheduler_id, _ in page]
        found += [
            scheduler
            for scheduler, score in zip(read, again, strict=True)
            if scheduler.paused_ms is not None and score is None
        ]
    return found


def listing_order(scheduler: Scheduler) -> tuple[bool, int]:
    """Return the key that sorts schedulers for people: the next one first, the paused ones last."""
    return scheduler.paused_ms is not None, scheduler.next_ms


def rule_text(scheduler: Scheduler, show_ms: Callable[[int], str]) -> str:
    """Return the interval or pattern of a scheduler; ``show_ms`` returns a duration as text."""
    if scheduler.every_ms is not None:
        return f"every {show_ms(scheduler.every_ms)}"
    return f"{scheduler.pattern or '?'}{f' ({scheduler.tz})' if scheduler.tz else ''}"


def pause_text(scheduler: Scheduler, show: Callable[[int], str]) -> str:
    """Say since when and by whom a scheduler is paused; ``""`` if it is not. ``show`` returns a time as text.

    If it returns Markup, so does this.
    """
    if scheduler.paused_ms is None:
        return ""
    # Added, not formatted: Markup then escapes the name, which anybody may have chosen.
    return "paused since " + show(scheduler.paused_ms) + f" by {scheduler.paused_by}"


def pause_scheduler(context: QueueContext, scheduler_id: str, by: str) -> Operation[Scheduler | None]:
    """Pause a scheduler and return it; ``None`` if it does not exist."""
    reply = yield from execute(scripts.pause_scheduler(context.keys, scheduler_id, context.new_pause(by)))
    if reply < 0:
        raise ConfigError(
            f"{scheduler_id!r:.200} of queue {context.queue!r} is a repeatable job of BullMQ before 5.16, which cannot "
            "be paused; remove it with queue.repeatables, and add a job scheduler"
        )
    return (yield from find_scheduler(context.keys, scheduler_id)) if reply else None


def resume_scheduler(keys: QueueKeys, scheduler_id: str, now_ms: int, zone: tzinfo) -> Operation[Scheduler | None]:
    """Resume a scheduler and return it, also if it was not paused; ``None`` if it does not exist.

    Its next iteration is the next one of its times, also if some were missed. ``zone`` is for a pattern without a time
    zone.
    """
    while (stored := (yield from execute(read_paused_scheduler(keys, scheduler_id)))) is not None:
        state = yield from execute(read_run_state(keys, stored.scheduler.next_job_id))
        iteration = None if state == "waiting" else _iteration_after_pause(stored, state, now_ms, zone)
        if (yield from execute(scripts.resume_scheduler(keys, stored, state, iteration, now_ms))):
            break
    return (yield from find_scheduler(keys, scheduler_id))


def _iteration_after_pause(stored: StoredScheduler, state: str, now_ms: int, zone: tzinfo) -> Iteration | None:
    """Return the iteration that a paused scheduler continues with, ``None`` if it is over."""
    old = stored.scheduler
    rule = replace(old.rule, count=old.iterations - stored.removed)  # the removed one has not run
    after_ms = max(now_ms, old.next_ms) if state else now_ms
    if rule.is_over(after_ms):
        return None
    next_ms = None if rule.pattern is None else rule.next_ms(after_ms, zone)
    if next_ms is None and rule.pattern is not None:
        return None
    wire = {**rule.to_wire(), "count": rule.count + 1}
    return Iteration(next_ms, stored.data, iteration_options(old.opts, wire, old.id, next_ms, now_ms))


def _first_ms(rule: Repeat, now_ms: int) -> int | None:
    if rule.pattern is None:
        return max(now_ms, rule.start_ms or 0)
    return now_ms if rule.immediately else rule.next_ms(now_ms, UTC)


def _from_first_time(rule: Repeat, now_ms: int) -> Repeat:
    """Return the rule with its start at the next multiple of the interval plus the offset, if it has an offset."""
    if rule.every_ms is None or rule.offset_ms is None:
        return rule
    begin_ms = max(now_ms, rule.start_ms or 0) - rule.offset_ms
    return replace(rule, start_ms=-(-begin_ms // rule.every_ms) * rule.every_ms + rule.offset_ms)


class SchedulersBase:
    """Base class of ``JobSchedulers`` and ``AsyncJobSchedulers``."""

    def __init__(self, context: QueueContext) -> None:
        self._context = context

    def _upsert(
        self, scheduler_id: str, rule: Rule, name: str | None, data: Json, options: AddOptions | None
    ) -> Operation[Scheduler | None]:
        checked = self._rule(rule)
        job = self._template(check_scheduler_id(scheduler_id), name, data, options)
        return self._put(self._context.keys, scheduler_id, checked, job)

    def _put(self, keys: QueueKeys, scheduler_id: str, rule: Repeat, job: NewJob) -> Operation[Scheduler | None]:
        now_ms = self._context.now_ms()
        if rule.end_ms is not None and rule.end_ms < now_ms:
            raise ConfigError(f"end of scheduler {scheduler_id!r:.200} is in the past")
        yield write_queue_meta(keys, PROTOCOL_VERSION, self._context.broker.config.max_events)
        if (yield from put(keys, scheduler_id, rule, job, {}, now_ms)) is None:
            return None
        return (yield from find_scheduler(keys, scheduler_id))

    def _rule(self, options: Rule) -> Repeat:
        rule = Repeat.of(**options)
        if rule.pattern is None or rule.tz is not None:
            return rule
        # Always store the zone, because a worker without this app's settings would use its machine's time zone.
        return replace(rule, tz=self._context.broker.config.timezone)

    def _template(self, scheduler_id: str, name: str | None, data: Json, options: AddOptions | None) -> NewJob:
        # backoff=None is a value: such a job is retried immediately.
        given = {key: value for key, value in (options or {}).items() if value is not None or key == "backoff"}
        for option, reason in _UNSUPPORTED_OPTIONS.items():
            if option in given:
                raise ConfigError(
                    f"the jobs of scheduler {scheduler_id!r:.200} cannot have the option {option}: {reason}"
                )
        return self._context.build(name or scheduler_id, {} if data is None else data, given)


# Repeatable jobs, BullMQ's predecessor of job schedulers (5.16); Node's ``queue.add(…, {repeat})`` creates them.
#
# The key of a repeatable job consists of its options (name, id, end, time zone, rule). The worker that acquires an
# iteration adds the next one.
#
# bulltask cannot create repeatable jobs, but its workers run existing ones, and users can list and remove them.


_PARTS: Final = 5  # of a key in the oldest format


@value_class(frozen=True)
class Repeatable:
    """A repeatable job as it is stored.

    Attributes:
        key: Identifies it; used to remove it.
        name: Name of its jobs.
        next_ms: When it runs next, epoch milliseconds.
        pattern: Its cron pattern; ``None`` for an interval.
        every_ms: Its interval.
        tz: The pattern's time zone.
        end_ms: No job runs after this time.
        id: The job id that it was created with; only keys in the oldest format contain it.
    """

    key: str
    name: str
    next_ms: int
    pattern: str | None = None
    every_ms: int | None = None
    tz: str | None = None
    end_ms: int | None = None
    id: str | None = None


def list_repeatables(keys: QueueKeys) -> Operation[list[Repeatable]]:
    """Read all repeatable jobs, in the order in which they run next."""
    rows = yield from all_rows(keys)
    hashes: list[dict[str, str]] = (yield [read_repeatable(keys, key) for key, _ in rows]) if rows else []
    # Only job schedulers have "ic", the count of their iterations.
    return [_repeatable(key, ms, stored) for (key, ms), stored in zip(rows, hashes, strict=True) if "ic" not in stored]


def _repeatable(key: str, next_ms: int, stored: Mapping[str, str]) -> Repeatable:
    job_id = None
    if not stored and key.count(":") >= _PARTS - 1:
        name, job_id, end, tz, rule = key.split(":", _PARTS - 1)
        stored = {"name": name, "endDate": end, "tz": tz, ("every" if rule.isdecimal() else "pattern"): rule}
    end, every = stored.get("endDate", ""), stored.get("every", "")
    return Repeatable(
        key=key,
        name=stored.get("name", ""),
        next_ms=next_ms,
        pattern=stored.get("pattern") or None,
        every_ms=int(every) if every.isdecimal() else None,
        tz=stored.get("tz") or None,
        end_ms=int(end) if end.isdecimal() else None,
        id=job_id or None,
    )


def repeatable_key(
    name: str, every: Duration | None, cron: str | None, tz: str | None, end: datetime | None, job_id: str | None
) -> str:
    """Return the oldest format's key; raises ``ConfigError`` if neither or both of ``every`` and ``cron`` are given."""
    if (every is None) == (cron is None):
        raise ConfigError("a repeatable job needs either every= or cron=")
    end_ms = None if end is None else to_epoch_ms(end, "end")
    return _old_key(name, job_id, end_ms, tz, cron if every is None else to_ms(every, "every"))


def remove(keys: QueueKeys, name: str, key: str, job_id: str | None) -> Operation[bool]:
    """Remove the repeatable job with a :func:`repeatable_key`; return false if it does not exist."""
    return (yield from execute(remove_repeatable(keys, _old_id(name, job_id or "", key), key, key_digest(key))))


def remove_by_key(keys: QueueKeys, key: str) -> Operation[bool]:
    """Remove the repeatable job with this key; return false if it does not exist."""
    if not _has_oldest_format(key):
        return (yield from execute(remove_repeatable(keys, "", "", key)))
    name, job_id, *_ = key.split(":")
    return (yield from execute(remove_repeatable(keys, _old_id(name, job_id, key), key, key)))


def _old_id(name: str, job_id: str, key: str) -> str:
    """Return the prefix of the job ids for a key in the oldest format; only their time is missing."""
    return f"repeat:{_checksum(name, job_id, key)}:"


def _has_oldest_format(key: str) -> bool:
    return key.count(":") >= 2  # the same check as in Node


@value_class(frozen=True)
class NextRepeat:
    """The next iteration of a repeatable job, without its key, which is read from Redis.

    It may have two keys: in BullMQ's current format, and in the oldest one. ``rule`` is its ``opts.repeat``.
    """

    next_ms: int
    hashed_key: str
    key: str
    rule: Mapping[str, Any]


def add_next_repeat(keys: QueueKeys, job: RunningJob, now_ms: int, zone: tzinfo) -> Operation[None]:
    """Add the iteration after ``job``, unless it was the last one or the job was removed; safe to retry."""
    following = next_repeat(job, now_ms, zone)
    if following is None:
        return
    key = yield from execute(update_repeatable_job_millis(keys, following.next_ms, following.hashed_key, following.key))
    if key:
        yield from execute(add_repeated_job(keys, _job(job, following, key, now_ms), now_ms))


def next_repeat(job: RunningJob, now_ms: int, zone: tzinfo) -> NextRepeat | None:
    """Return the iteration after ``job``, ``None`` if there is none; raises ``DecodeError`` for a malformed rule."""
    stored = job.opts.get("repeat")
    if not isinstance(stored, Mapping):
        raise DecodeError("it has no rule (opts.repeat)")
    rule = {name: value for name, value in stored.items() if name not in {"cron", "immediately"}}
    if "pattern" not in rule and "cron" in stored:
        rule["pattern"] = stored["cron"]
    repeat = Repeat.from_wire(rule)
    if repeat.is_over(now_ms):
        return None
    previous = job.opts.get("prevMillis")
    after_ms = max(now_ms, previous if isinstance(previous, int) else 0)
    if repeat.every_ms is None:
        next_ms = repeat.next_ms(after_ms, zone)
    else:
        next_ms = after_ms // repeat.every_ms * repeat.every_ms + repeat.every_ms
    if next_ms is None:
        return None
    key = _key(job.name, rule, repeat)
    rule["count"] = repeat.count + 1
    return NextRepeat(next_ms, str(rule.get("key") or key_digest(key)), key, rule)


def _job(job: RunningJob, following: NextRepeat, key: str, now_ms: int) -> RepeatedJob:
    part = _checksum(job.name, _data_id(job), key) if _has_oldest_format(key) else key
    job_id = iteration_id(part, following.next_ms)
    options = {name: value for name, value in job.opts.items() if name != "repeatJobKey"}
    options |= {
        "repeat": following.rule,
        "jobId": job_id,
        "delay": max(0, following.next_ms - now_ms),
        "timestamp": now_ms,
        "prevMillis": following.next_ms,
    }
    return RepeatedJob(key, job_id, job.name, job.data, options)


def _key(name: str, rule: Mapping[str, Any], repeat: Repeat) -> str:
    suffix = repeat.every_ms if repeat.pattern is None else repeat.pattern
    return _old_key(name, rule.get("jobId"), repeat.end_ms, rule.get("tz"), suffix)


def _old_key(name: str, job_id: object, end_ms: int | None, tz: object, rule: object) -> str:
    """Return a key in the oldest format."""
    return f"{name}:{job_id or ''}:{'' if end_ms is None else end_ms}:{tz or ''}:{rule}"


def _data_id(job: RunningJob) -> object:
    """Return the id in the job's data, from which BullMQ computes the key."""
    data = codec.decode(job.data, what=f"data of job {job.id}")
    return data.get("id") if isinstance(data, dict) else None


def _checksum(name: str, job_id: object, key: str) -> str:
    """Return the part of a job id that identifies a key in the oldest format."""
    return key_digest(f"{name}{job_id or ''}{key_digest(key)}")


SCHEDULING_ERRORS: Final = (BulltaskError, ValueError, OverflowError)
"""Errors of :func:`add_next_iteration`; the last two are for a time that a clock or msgpack cannot represent."""

_PAUSE_UNIT_MS: Final = 1_000
_MAX_PAUSE_MS: Final = 300_000
_MAX_OVERDUE: Final = 50
"""How many of the overdue iterations that are stored are examined in a call; most of them are waiting or active."""


def scheduling_retry_delay_ms(attempts_started: int) -> int:
    """Return how long a job is delayed if its next iteration could not be added: 2 s, 4 s … 5 min, as in Node.

    If the job ran instead, its scheduler would add no further jobs.
    """
    return min(_PAUSE_UNIT_MS << min(max(0, attempts_started), 10), _MAX_PAUSE_MS)


def add_next_iteration(keys: QueueKeys, job: RunningJob, now_ms: int, zone: tzinfo) -> Operation[None]:
    """Add the iteration after ``job``, unless that was the last one or its scheduler was removed; safe to retry.

    The job was added by a job scheduler, or is a repeatable job of BullMQ before 5.10. ``zone`` is for a pattern
    without a time zone.
    """
    key = job.scheduler_id
    is_scheduler = bool(key)
    if may_be_old_repeat_key(key):  # only job schedulers have "ic", the count of their iterations
        is_scheduler = (yield from execute(command("HGET", keys.scheduler(key), "ic"))) is not None
    if not is_scheduler:
        yield from add_next_repeat(keys, job, now_ms, zone)
        return
    iteration = next_iteration(job, now_ms, zone)
    if iteration is not None:
        yield from execute(update_job_scheduler(keys, key, job.id, iteration, now_ms))


def next_iteration(job: RunningJob, now_ms: int, zone: tzinfo) -> Iteration | None:
    """Return the iteration after ``job``, ``None`` if that was the last one; an error if its rule is malformed."""
    stored = job.opts.get("repeat")
    repeat = Repeat.from_wire(stored)
    if repeat.is_over(now_ms):
        return None
    next_ms = None
    if repeat.pattern is not None:
        previous = job.opts.get("prevMillis")
        # Without max(), a clock that is behind the one that scheduled this job would give the same time again.
        next_ms = repeat.next_ms(max(now_ms, previous if isinstance(previous, int) else 0), zone)
        if next_ms is None:
            return None
    rule = {**job.opts["repeat"], "count": repeat.count + 1}
    return Iteration(next_ms, job.data, iteration_options(job.opts, rule, job.scheduler_id, next_ms, now_ms))


def restore_iterations(keys: QueueKeys, cursor: str, now_ms: int, zone: tzinfo) -> Operation[tuple[str, list[str]]]:
    """Add the next iterations that are missing, so that their schedules continue; check about a thousand schedulers.

    ``cursor`` is ``0``, or what the last call returned. The result is the cursor of the next call, ``0`` at the end,
    and the ids of the schedulers whose iteration was missing.
    """
    cursor, rows = yield from execute(scan_schedulers(keys, cursor))
    states: list[str] = (yield [call for row in rows for call in read_iteration(keys, *row)]) if rows else []
    suspects, overdue = dict[tuple[str, int], str](), list[tuple[str, int]]()
    for row, state, delayed in zip(rows, states[::2], states[1::2], strict=True):
        if state != "stored":
            suspects[row] = state
        elif not delayed:
            overdue.append(row)
    suspects |= dict.fromkeys(sorted(overdue, key=lambda row: -row[1])[:_MAX_OVERDUE], "stored")
    if not suspects:
        return cursor, []
    stored: list[StoredScheduler | None] = yield [read_stored_scheduler(keys, *row) for row in suspects]
    calls = [
        call
        for scheduler, state in zip(stored, suspects.values(), strict=True)
        if scheduler is not None and (call := _restoring_call(keys, scheduler, state, now_ms, zone)) is not None
    ]
    restored = (yield calls) if calls else []
    return cursor, [scheduler_id for scheduler_id in restored if scheduler_id]


def _restoring_call(
    keys: QueueKeys, stored: StoredScheduler, state: str, now_ms: int, zone: tzinfo
) -> Call[str] | None:
    """Return the call that adds a missing iteration, and returns the scheduler's id or ``""``; or ``None``."""
    old, finished = stored.scheduler, state == "finished"
    rule = old.rule
    after_ms = max(now_ms, old.next_ms) if finished else now_ms
    try:
        if (rule.pattern is None) == (rule.every_ms is None) or rule.is_over(now_ms):
            return None
        next_ms = None if rule.pattern is None else rule.next_ms(after_ms, zone)
    except SCHEDULING_ERRORS:
        return None
    if next_ms is None and (rule.every_ms is None or (rule.end_ms is not None and after_ms > rule.end_ms)):
        return None
    count = old.iterations + finished
    options = iteration_options(old.opts, {**rule.to_wire(), "count": count}, old.id, next_ms, now_ms)
    iteration = Iteration(next_ms, stored.data, options, missing_ms=old.next_ms)
    call = add_job_scheduler(keys, old.id, rule, (old.name, old.opts), iteration, now_ms)

    def parse_reply(reply: Any) -> str:
        try:
            return old.id if call.parse_reply(reply)[0] else ""
        except JobError:
            return ""  # the next times are taken by jobs that have run; the schedule can be restored later

    return Call(call.args, parse_reply, call.script)
