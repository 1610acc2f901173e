"""Script calls for job schedulers, and commands for ``beat_schedule``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.stored_options import BULLTASK_KEY
from bulltask.lua import loader, wrappers
from bulltask.schedules.repeat import Repeat, Scheduler, iteration_id
from bulltask.transport import keys as key_names
from bulltask.transport.call import Call, command, script_call, to_msgpack
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import raise_for, text, texts

__all__ = [
    "CHECK_MS",
    "BeatLabel",
    "Iteration",
    "ScheduleVersion",
    "StoredScheduler",
    "add_beat_queue",
    "add_job_scheduler",
    "beat_queues",
    "claim_check",
    "count_schedulers",
    "get_job_scheduler",
    "has_job_scheduler",
    "has_schedule_workers",
    "leave_schedule",
    "list_schedulers",
    "read_iteration",
    "read_label",
    "read_repeatable",
    "read_scheduler",
    "read_stored_scheduler",
    "register_schedule_version",
    "remove_beat_queue",
    "remove_job_scheduler",
    "remove_repeatable",
    "scan_schedulers",
    "update_job_scheduler",
    "update_repeatable_job_millis",
]

CHECK_MS: Final = 60_000
"""How often one of the workers checks the schedules."""

_TOLERANCE_MS: Final = 5_000
_LIVE_MS: Final = 150_000
"""How long a worker that has not checked its schedule may be alive."""

_SCAN_COUNT: Final = 1_000


@dataclass(frozen=True, slots=True)
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
    """``addJobScheduler``: add or change a scheduler, and add its next iteration.

    Args:
        keys: The queue.
        scheduler_id: The scheduler.
        rule: When its jobs run.
        template: Name and options of its jobs; ``iteration`` contains their data.
        iteration: The first job.
        now_ms: The server's time.

    Returns:
        The id of the job, and its delay in milliseconds; ``""`` and 0 if no iteration was missing. Running the call
        raises ``SchedulerCollisionError`` and ``SchedulerBusyError``.
    """
    script_keys = (*_script_keys(keys), keys.active)
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

    if iteration.missing_ms is not None:
        guarded = wrappers.with_guard("addJobScheduler", "iterationGuard")
        return script_call(guarded, script_keys, (*args, iteration.missing_ms), parse_reply)
    return script_call(loader.official_script("addJobScheduler"), script_keys, args, parse_reply)


def update_job_scheduler(
    keys: QueueKeys, scheduler_id: str, producer_id: str, iteration: Iteration, now_ms: int
) -> Call[str | None]:
    """``updateJobScheduler``: add the job that follows job ``producer_id``. Returns its id.

    Returns ``None`` and does nothing if the scheduler no longer exists or already has that job: safe to retry.
    """
    script_keys = (*_script_keys(keys), keys.job(producer_id), keys.active)
    args = (
        _time_arg(iteration),
        scheduler_id,
        iteration.data,
        to_msgpack(iteration.options),
        now_ms,
        keys.base,
        producer_id,
    )
    return script_call(loader.official_script("updateJobScheduler"), script_keys, args, _id_or_none)


def update_repeatable_job_millis(keys: QueueKeys, next_ms: int, hashed_key: str, key: str) -> Call[str]:
    """``updateRepeatableJobMillis``: record when a repeatable job runs next.

    Returns:
        Whichever of its two possible keys exists; ``""`` if neither does.
    """
    args = (next_ms, hashed_key, key)
    return script_call(loader.official_script("updateRepeatableJobMillis"), (keys.repeat,), args, text)


def remove_repeatable(keys: QueueKeys, old_job_id: str, old_key: str, key: str) -> Call[bool]:
    """``removeRepeatable``: remove a repeatable job, and its next iteration if delayed; False if it does not exist.

    Args:
        keys: The queue.
        old_job_id: The prefix of its iterations' ids, if it has a key in the oldest format; otherwise ``""``.
        old_key: The repeatable job's key in the oldest format, ``""`` for none.
        key: The repeatable job's key.
    """
    script_keys = (keys.repeat, keys.delayed, keys.events)
    args = (old_job_id, old_key, key, keys.base)
    return script_call(loader.official_script("removeRepeatable"), script_keys, args, lambda reply: int(reply) == 0)


def read_repeatable(keys: QueueKeys, key: str) -> Call[dict[str, str]]:
    """Read the hash of a repeatable job or scheduler; empty for a key in the oldest format, which contains it all."""

    def parse_reply(reply: Any) -> dict[str, str]:
        return {text(name): text(value) for name, value in zip(reply[::2], reply[1::2], strict=True)}

    return command("HGETALL", keys.scheduler(key), parse_reply=parse_reply)


def remove_job_scheduler(keys: QueueKeys, scheduler_id: str) -> Call[bool]:
    """``removeJobScheduler``: remove a scheduler, and its next iteration if delayed; False if it does not exist."""
    script_keys = (keys.repeat, keys.delayed, keys.events)
    script = loader.official_script("removeJobScheduler")
    return script_call(script, script_keys, (scheduler_id, keys.base), lambda reply: int(reply) == 0)


def get_job_scheduler(keys: QueueKeys, scheduler_id: str) -> Call[Scheduler | None]:
    """``getJobScheduler``: read a scheduler."""

    def parse_reply(reply: Any) -> Scheduler | None:
        if not reply or reply[0] is None:
            return None
        flat, score = reply
        return Scheduler.from_hash(scheduler_id, flat, int(float(score)))

    return script_call(loader.official_script("getJobScheduler"), (keys.repeat,), (scheduler_id,), parse_reply)


def has_job_scheduler(keys: QueueKeys, key: str) -> Call[bool]:
    """Return whether a key in ``repeat`` is a job scheduler's: only those have ``ic``, the count of iterations."""
    return command("HGET", keys.scheduler(key), "ic", parse_reply=lambda reply: reply is not None)


def list_schedulers(keys: QueueKeys, start: int, end: int, *, asc: bool) -> Call[list[tuple[str, int]]]:
    """List the ids of schedulers with the time of their next iteration, ordered by that time."""
    return command("ZRANGE" if asc else "ZREVRANGE", keys.repeat, start, end, "WITHSCORES", parse_reply=_rows)


def _rows(reply: Any) -> list[tuple[str, int]]:
    # RESP2: member, score, member, score …
    return [(text(member), int(float(score))) for member, score in zip(reply[::2], reply[1::2], strict=True)]


def scan_schedulers(keys: QueueKeys, cursor: str) -> Call[tuple[str, list[tuple[str, int]]]]:
    """Read some of all schedulers, in no order, with the time of their next iteration.

    Unlike with ranges, no scheduler is missed because its next iteration was added between two calls.

    Returns:
        The cursor of the next call (``0`` at the end), and the rows; a scheduler may come twice.
    """

    def parse_reply(reply: Any) -> tuple[str, list[tuple[str, int]]]:
        return text(reply[0]), _rows(reply[1])

    return command("ZSCAN", keys.repeat, cursor, "COUNT", _SCAN_COUNT, parse_reply=parse_reply)


def read_scheduler(keys: QueueKeys, scheduler_id: str, next_ms: int) -> Call[Scheduler]:
    """Read the hash of a scheduler that :func:`list_schedulers` returned."""

    def parse_reply(reply: Any) -> Scheduler:
        return Scheduler.from_hash(scheduler_id, reply, next_ms)

    return command("HGETALL", keys.scheduler(scheduler_id), parse_reply=parse_reply)


@dataclass(frozen=True, slots=True)
class StoredScheduler:
    """A scheduler with its data as it is stored.

    Attributes:
        scheduler: The scheduler.
        data: JSON.
    """

    scheduler: Scheduler
    data: bytes


def read_stored_scheduler(keys: QueueKeys, scheduler_id: str, next_ms: int) -> Call[StoredScheduler | None]:
    """Read a scheduler to add its next iteration; ``None`` if it is none, but a repeatable job of older versions."""

    def parse_reply(reply: Any) -> StoredScheduler | None:
        fields = dict(zip(reply[::2], reply[1::2], strict=True))
        if b"ic" not in fields:
            return None
        return StoredScheduler(Scheduler.from_hash(scheduler_id, reply, next_ms), fields.get(b"data", b"{}"))

    return command("HGETALL", keys.scheduler(scheduler_id), parse_reply=parse_reply)


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
    """Return whether the caller must check the queue's schedulers, because no other worker has done so recently.

    With ``continued``, the caller is still checking them.
    """
    options = () if continued else ("NX",)
    period_ms = CHECK_MS - _TOLERANCE_MS
    return command("SET", keys.schedulers_checked, 1, *options, "PX", period_ms, parse_reply=bool)


def count_schedulers(keys: QueueKeys) -> Call[int]:
    """Count the queue's schedulers."""
    return command("ZCARD", keys.repeat, parse_reply=int)


def _script_keys(keys: QueueKeys) -> tuple[str, ...]:
    """Return the keys that both scripts begin with."""
    return (
        keys.repeat,
        keys.delayed,
        keys.wait,
        keys.paused,
        keys.meta,
        keys.prioritized,
        keys.marker,
        keys.id,
        keys.events,
        keys.pc,
    )


def _time_arg(iteration: Iteration) -> int | str:
    return "" if iteration.next_ms is None else iteration.next_ms


def _id_or_none(reply: Any) -> str | None:
    return None if reply is None else text(reply)


@dataclass(frozen=True, slots=True)
class BeatLabel:
    """The owner of a job scheduler that a ``beat_schedule`` has created; stored in its template.

    Attributes:
        owner: Name of the app, ``""`` for none.
        digest: A hash of the entry.
    """

    owner: str
    digest: str


def read_label(keys: QueueKeys, scheduler_id: str) -> Call[BeatLabel]:
    """Read which app has created a scheduler."""

    def parse_reply(reply: Any) -> BeatLabel:
        try:
            options = codec.decode(reply)
        except DecodeError:
            options = None
        entry = options.get(BULLTASK_KEY) if isinstance(options, dict) else None
        label = entry if isinstance(entry, dict) else {}
        return BeatLabel(str(label.get("beat", "")), str(label.get("digest", "")))

    return command("HGET", keys.scheduler(scheduler_id), "opts", parse_reply=parse_reply)


def beat_queues(prefix: str, app: str) -> Call[set[str]]:
    """List the queues in which the app has created schedulers, by their names in the app."""
    return command(
        "SMEMBERS", key_names.beat_queues(prefix, app), parse_reply=lambda reply: {text(name) for name in reply}
    )


def add_beat_queue(prefix: str, app: str, queue: str) -> Call[int]:
    """Record that the app has schedulers in a queue, to find them when its settings no longer name the queue."""
    return command("SADD", key_names.beat_queues(prefix, app), queue)


def remove_beat_queue(prefix: str, app: str, queue: str) -> Call[int]:
    """Record that the app no longer has schedulers in a queue."""
    return command("SREM", key_names.beat_queues(prefix, app), queue)


@dataclass(frozen=True, slots=True)
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
    """bulltask's ``scheduleVersion``: record that a worker runs a version of an app's schedule.

    Args:
        prefix, app: The app.
        worker: The worker's id.
        version: The version, a hash.
        number: Its number as this call last returned it, 0 for none.
        now_ms: The server's time.
    """

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
        fields = dict(zip(map(text, reply[::2]), map(text, reply[1::2]), strict=True))
        times = [value.partition(" ")[0] for name, value in fields.items() if name.startswith("worker:")]
        return any(time.isdigit() and abs(now_ms - int(time)) <= _LIVE_MS for time in times)

    return command("HGETALL", key_names.schedule_versions(prefix, app), parse_reply=parse_reply)
