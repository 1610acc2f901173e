"""Convert Bull's repeatable jobs to job schedulers, each with its next iteration in one transaction."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC
from typing import Any, Final

from bulltask.errors import BulltaskError, ConfigError, DecodeError
from bulltask.migrate.bull_job import BullJob
from bulltask.migrate.convert import DEFAULT_NAME, Conversion
from bulltask.migrate.outcome import BullRepeatable
from bulltask.schedules.cron import Cron
from bulltask.schedules.repeat import Repeat, iteration_options, key_digest
from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import BullKeys, QueueKeys
from bulltask.transport.operation import run_sync
from bulltask.transport.scripts.schedule import Iteration, add_job_scheduler, get_job_scheduler
from bulltask.transport.transaction import transaction

__all__ = ["BullRepeatables", "plan_repeatables"]

_OF_ONE_JOB: Final = ("jobId", "delay")


@dataclass(frozen=True, slots=True)
class BullRepeatables:
    """Creates job schedulers.

    Args:
        client: A connection to the server.
        source: Bull's queue.
        target: BullMQ's queue, which may have the same keys.
        address: The server's address for error messages.
    """

    client: SyncClient
    source: BullKeys
    target: QueueKeys
    address: str

    def convert(self, planned: BullRepeatable, job: BullJob, conversion: Conversion, now_ms: int) -> bool:
        """Create the scheduler and remove the repeatable job. It is safe to call this method again.

        Returns:
            False if no further jobs are due, so that no scheduler is created.
        """
        calls: list[Call[Any]] = []
        exists = self.client.run(get_job_scheduler(self.target, planned.scheduler_id)) is not None
        if not exists:
            calls += self._scheduler(planned, job, conversion, now_ms)
        creates = exists or bool(calls)
        calls.append(command("ZREM", self.source.repeat, planned.key))
        if planned.key_suffix == "delayed":
            calls.append(command("ZREM", self.source.delayed, job.id))
            calls.append(command("DEL", self.source.job(job.id), self.source.logs(job.id)))
        for result in run_sync(self.client, transaction(calls, self.address)):
            if isinstance(result, BulltaskError):
                raise result
        return creates

    def _scheduler(self, planned: BullRepeatable, job: BullJob, conversion: Conversion, now_ms: int) -> list[Call[Any]]:
        rule, waits = planned.rule, planned.key_suffix == "delayed"
        assert rule is not None
        if rule.every_ms is not None:
            # The script counts from the start time, and Bull's next run is a multiple of the interval.
            begin = planned.next_ms if waits else -(-now_ms // rule.every_ms) * rule.every_ms
            rule, first_ms = replace(rule, start_ms=begin), None
        else:
            first_ms = planned.next_ms if waits else rule.next_ms(now_ms, UTC)
        count = rule.count if waits else rule.count + 1
        over = (rule.limit is not None and count > rule.limit) or (rule.pattern is not None and first_ms is None)
        if over:
            return []
        template = {name: value for name, value in conversion.opts.items() if name not in _OF_ONE_JOB}
        options = iteration_options(
            template, {**rule.to_wire(), "count": count}, planned.scheduler_id, first_ms, now_ms
        )
        name = (conversion.fields.get("name") or job.fields.get("name", b"")).decode("utf-8", "replace")
        data = job.fields.get("data", b"{}")
        iteration = Iteration(first_ms, data, options)
        return [add_job_scheduler(self.target, planned.scheduler_id, rule, (name, template), iteration, now_ms)]


def plan_repeatables(
    repeats: Sequence[tuple[str, int]], jobs: Mapping[str, BullJob], queue: str, timezone: str, *, selected: bool
) -> list[BullRepeatable]:
    """Return the plan for each repeatable job.

    Args:
        repeats: Bull's keys, with the time of the next run in epoch milliseconds.
        jobs: Their next jobs, by id.
        queue: The target queue's name in the app.
        timezone: The time zone for patterns without one.
        selected: Whether the state ``delayed``, and with it repeatable jobs, is selected.
    """
    by_moment = {(str(repeat.get("key")), _moment(job)): job for job in jobs.values() if (repeat := job.repeat)}
    repeatables = []
    for key, next_ms in repeats:
        job = by_moment.get((key, next_ms)) or jobs.get(_job_id(key, next_ms))
        repeatables.append(_plan(key, next_ms, job, queue, timezone, selected=selected))
    return repeatables


def _plan(key: str, next_ms: int, job: BullJob | None, queue: str, timezone: str, *, selected: bool) -> BullRepeatable:
    name, given = [*key.split(":"), ""][:2]
    scheduler_id = f"{given or name}-{key_digest(key)[:8]}"
    problem, rule, suffix = "", None, ""
    try:
        if job is None:
            problem = "its next iteration, which contains the data and options, is missing"
        else:
            suffix = job.key_suffix
            rule = _rule(job.repeat or {}, timezone)
            if suffix == "active":
                problem = "its job is active: run the migration again when it has finished"
            elif not selected:
                problem = "delayed jobs are not selected (--states)"
    except (DecodeError, ConfigError) as exc:
        problem = f"its rule is invalid: {exc}"
    return BullRepeatable(
        key=key,
        scheduler_id=scheduler_id,
        rule=rule,
        job_id="" if job is None else job.id,
        key_suffix=suffix,
        next_ms=next_ms,
        problem=problem,
        manual=_manual_call(key, scheduler_id, job, queue) if problem else "",
    )


def _moment(job: BullJob) -> int:
    """Return the time for which Bull scheduled the job: the last part of its id."""
    moment = job.id.rpartition(":")[2]
    return int(moment) if moment.isdecimal() else 0


def _rule(repeat: Mapping[str, Any], timezone: str) -> Repeat:
    """Return BullMQ's rule: ``cron`` becomes ``pattern``, and a missing time zone becomes ``timezone``."""
    rule = Repeat.from_wire({**repeat, "pattern": repeat.get("cron")})
    if rule.pattern is not None:
        Cron.parse(rule.pattern)
        rule = replace(rule, tz=rule.tz or timezone)
    elif not rule.every_ms or rule.every_ms < 1:
        raise DecodeError(f"an interval of {rule.every_ms} ms")
    return rule


def _manual_call(key: str, scheduler_id: str, job: BullJob | None, queue: str) -> str:
    """Return the call that creates the scheduler, from Bull's key: name:id:end:zone:pattern or name:id:end:ms."""
    name, _, _, *rest = [*key.split(":", 4), "", "", ""][:5]
    zone, pattern = rest if rest[1] else ("", "")
    when = f"cron={pattern!r}" + (f", tz={zone!r}" if zone else "") if pattern else f"every={_seconds(rest[0])}"
    data = "…" if job is None else job.fields.get("data", b"{}").decode("utf-8", "replace")
    shown = "None" if name == DEFAULT_NAME else repr(name)
    return f"app.queue({queue!r}).schedulers.upsert({scheduler_id!r}, {when}, name={shown}, data={data})"


def _seconds(every_ms: str) -> str:
    return json.dumps(int(every_ms) / 1000) if every_ms.isdecimal() else "…"


def _job_id(key: str, next_ms: int) -> str:
    """Return Bull's id for the job that is due at ``next_ms``."""
    name, given = [*key.split(":"), ""][:2]
    return f"repeat:{key_digest(f'{name}{given}:{key_digest(key)}')}:{next_ms}"
