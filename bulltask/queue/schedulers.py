"""Operations on job schedulers, for ``JobSchedulers``, ``AsyncJobSchedulers`` and a worker's beat schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from datetime import UTC
from typing import Final

import uuid_utils

from bulltask.errors import ConfigError
from bulltask.jobs import codec
from bulltask.jobs.codec import Json
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import check_scheduler_id
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.add_options import AddOptions
from bulltask.queue.context import QueueContext
from bulltask.schedules.repeat import Repeat, Rule, Scheduler, iteration_options
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute
from bulltask.transport.produce import PROTOCOL_VERSION
from bulltask.transport.scripts.add import RepeatedJob, add_repeated_job, write_queue_meta
from bulltask.transport.scripts.schedule import (
    Iteration,
    add_job_scheduler,
    get_job_scheduler,
    list_schedulers,
    read_scheduler,
    read_stored_scheduler,
    scan_schedulers,
)

__all__ = ["SchedulersBase", "all_rows", "list_all", "put", "run_now"]

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

    Args:
        keys: The queue.
        scheduler_id: The scheduler.
        rule: When its jobs run; a pattern needs a time zone.
        job: The template: name, data and options of its jobs.
        bulltask_options: Further options for the template that only bulltask reads.
        now_ms: The server's time.
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
    if stored is None:
        return None
    scheduler, job_id = stored.scheduler, str(uuid_utils.uuid7())
    job = RepeatedJob(None, job_id, scheduler.name, stored.data, scheduler.opts)
    yield from execute(add_repeated_job(keys, job, now_ms))
    fields = {"name": job.name, "opts": codec.encode(dict(job.options)).decode(), "timestamp": str(now_ms)}
    fields["priority"] = str(job.options.get("priority", 0))
    flat = [part.encode() for pair in fields.items() for part in pair]
    return StoredJob.from_hash(keys.queue, job_id, [*flat, b"data", stored.data])


def list_all(keys: QueueKeys, start: int, end: int, *, asc: bool) -> Operation[list[Scheduler]]:
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


def all_rows(keys: QueueKeys) -> Operation[list[tuple[str, int]]]:
    """Read the ids of all schedulers, ordered by the times of their next iterations, about a thousand per call."""
    rows, cursor = dict[str, int](), ""
    while cursor != "0":
        cursor, page = yield from execute(scan_schedulers(keys, cursor or "0"))
        rows.update(page)
    # Redis, too, orders those with the same time by their bytes.
    return sorted(rows.items(), key=lambda row: (row[1], row[0].encode("utf-8", "surrogateescape")))


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
    """Base class of ``JobSchedulers`` and ``AsyncJobSchedulers``.

    Args:
        context: The queue's context.
    """

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
        return (yield from execute(get_job_scheduler(keys, scheduler_id)))

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
