"""The dry run of a migration: its plan, and the reasons why the queue cannot be migrated.

:class:`Planner` reads a queue. :class:`JobCheck` decides for each job whether it is migrated, :func:`convert` turns its
hash into BullMQ's layout, and :class:`BullRepeatables` turns repeatable jobs into job schedulers.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC
from typing import Any, Final

from bulltask.jobs import codec
from bulltask.jobs.cron import Cron
from bulltask.jobs.errors import BulltaskError, ConfigError, DecodeError
from bulltask.jobs.job import MAX_PRIORITY
from bulltask.jobs.names import check_job_name, is_queue_key
from bulltask.jobs.schedules import Repeat, iteration_options, key_digest
from bulltask.migrate.inspection import (
    BullJob,
    BullRepeatable,
    JobOrigin,
    MigrationOutcome,
    MigrationPlan,
    QueueInfo,
    QueueLayout,
    SkipReason,
    count_target,
    detect_layout,
    inspect_queue,
    iter_jobs,
)
from bulltask.queue.context import QueueContext
from bulltask.transport.call import BullKeys, Call, QueueKeys, SyncClient, command
from bulltask.transport.operation import run_sync, transaction
from bulltask.transport.scripts.queue import Iteration, JobConversion, add_job_scheduler, get_job_scheduler, get_meta

__all__ = [
    "DEFAULT_NAME",
    "NOTES",
    "STATES",
    "BullRepeatables",
    "Conversion",
    "JobCheck",
    "MigrationOptions",
    "Planner",
    "convert",
]

DEFAULT_NAME: Final = "__default__"
"""The name of jobs that were added to Bull without a name."""

STATES: Final = ("waiting", "delayed", "completed", "failed")
_TARGET_STATES: Final = {
    "wait": "waiting",
    "paused": "waiting",
    "delayed": "delayed",
    "active": "recovered",
    "completed": "completed",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MigrationOptions:
    """Options of a migration.

    Attributes:
        states: Migrate only jobs in these states, some of :data:`STATES`.
        limit: The maximum number of jobs; ``None``: all.
        id_prefix: A prefix for the ids of migrated jobs.
        default_name: The name for jobs that were added to Bull without one.
        recover_active: Move active jobs without a lock, because their workers have died, to the waiting list.
        force: Migrate even if workers seem to be connected.

    Raises:
        ConfigError, InvalidNameError: An option is invalid.
    """

    states: tuple[str, ...] = STATES
    limit: int | None = None
    id_prefix: str = ""
    default_name: str = DEFAULT_NAME
    recover_active: bool = False
    force: bool = False

    def __post_init__(self) -> None:
        if unknown := sorted(set(self.states) - set(STATES)):
            raise ConfigError(f"states must be one or more of {', '.join(STATES)}, not {unknown[0]!r}")
        if self.limit is not None and self.limit < 1:
            raise ConfigError(f"limit must be 1 or more, not {self.limit}")
        if ":" in self.id_prefix:
            raise ConfigError(f"id_prefix {self.id_prefix!r} has a ':', which separates the parts of BullMQ's keys")
        check_job_name(self.default_name)


@dataclass(slots=True)
class _Scan:
    """The result of reading all jobs: those of unknown origin are counted separately, as if they were Bull's.

    ``repeating`` has the next job of each repeatable job, by id.
    """

    origins: Counter[JobOrigin] = field(default_factory=Counter)
    known: MigrationOutcome = field(default_factory=MigrationOutcome)
    unknown: MigrationOutcome = field(default_factory=MigrationOutcome)
    unknown_ids: list[str] = field(default_factory=list)
    repeating: dict[str, BullJob] = field(default_factory=dict)


class Planner:
    """Reads a queue once and plans its migration."""

    def __init__(
        self, client: SyncClient, source: BullKeys, target: QueueContext, options: MigrationOptions, *, in_place: bool
    ) -> None:
        self._client = client
        self._source = source
        self._context = target
        self._options = options
        self._in_place = in_place
        self._target = target.keys

    def plan(self, on_progress: Callable[[int, int], object]) -> MigrationPlan:
        """Read all jobs and return the plan."""
        info = inspect_queue(self._client, self._source)
        scan = self._read(info, on_progress)
        layout = detect_layout(info, scan.origins)
        outcome, repeating = scan.known, scan.repeating
        if self._in_place or layout is QueueLayout.MIXED:
            outcome.skip_all(SkipReason.BULLMQ, scan.unknown_ids)
        else:
            outcome.add(scan.unknown)
        repeatables = self._repeatables(info, layout, repeating)
        target_jobs = 0 if self._in_place else count_target(self._client, self._target)
        target_paused = "paused" in self._client.run(get_meta(self._target))
        pauses = info.paused and not self._in_place and not target_paused and not target_jobs
        return MigrationPlan(
            source=self._source.base[:-1],
            target=self._target.base[:-1],
            in_place=self._in_place,
            layout=layout,
            info=info,
            outcome=outcome,
            repeatables=repeatables,
            blockers=self._blockers(info, layout, outcome),
            warnings=self._warnings(info, outcome, joins=info.paused and bool(target_jobs) and not target_paused),
            pauses=pauses,
        )

    def _read(self, info: QueueInfo, on_progress: Callable[[int, int], object]) -> _Scan:
        """Check every job; count jobs of unknown origin separately."""
        scan, total = _Scan(), sum(info.sizes.values())
        groups = [
            (unknown, outcome, JobCheck(self._options, bull_only=not unknown, outcome=outcome))
            for unknown, outcome in ((False, scan.known), (True, scan.unknown))
        ]
        for _, jobs in iter_jobs(self._client, self._source, info):
            scan.repeating |= {job.id: job for job in jobs if job.repeat and job.origin is not JobOrigin.BULLMQ}
            scan.unknown_ids += [job.id for job in jobs if _has_unknown_origin(job)]
            scan.origins.update(job.origin for job in jobs)
            for unknown, outcome, check in groups:
                group = [job for job in jobs if _has_unknown_origin(job) is unknown]
                self._count([change for job in group if (change := check.change(job))], outcome)
            on_progress(scan.origins.total(), total)
        return scan

    def _count(self, changes: list[tuple[JobConversion, Conversion]], outcome: MigrationOutcome) -> None:
        existing = self._exist_in_target([change.new_id for change, _ in changes])
        for (change, conversion), exists in zip(changes, existing, strict=True):
            if exists:
                outcome.skip(SkipReason.ID_TAKEN, change.id)
            else:
                outcome.moved[change.state] += 1
                outcome.notes.update(conversion.notes)

    def _exist_in_target(self, ids: list[str]) -> list[bool]:
        if self._in_place:
            return [False] * len(ids)
        calls: list[Call[bool]] = [command("EXISTS", self._target.job(job_id), parse_reply=bool) for job_id in ids]
        return self._client.run_many(calls)

    def _repeatables(self, info: QueueInfo, layout: QueueLayout, repeating: dict[str, BullJob]) -> list[BullRepeatable]:
        repeatables = plan_repeatables(
            info.repeats,
            repeating,
            self._context.queue,
            str(self._context.broker.config.timezone),
            selected="delayed" in self._options.states,
        )
        # BullMQ before 5.10 kept repeatable jobs under keys of the same form.
        return [repeatable for repeatable in repeatables if repeatable.job_id or layout is not QueueLayout.MIXED]

    def _blockers(self, info: QueueInfo, layout: QueueLayout, outcome: MigrationOutcome) -> list[str]:
        source = self._source.base[:-1]
        checks = (
            (
                layout is QueueLayout.BULLMQ,
                f"{source} is a BullMQ queue without Bull jobs; it may have been migrated before",
            ),
            (
                info.has_sets and self._in_place,
                "the sets of Bull 1 and 2 cannot be converted in place to BullMQ's sorted sets: move the jobs to "
                "another queue (--to)",
            ),
            (
                self._in_place and SkipReason.RESERVED in outcome.skipped,
                "jobs have ids that are names of BullMQ keys ("
                f"{', '.join(outcome.skipped.get(SkipReason.RESERVED, ()))}): move them to another queue (--to)",
            ),
            (
                bool(info.workers) and not self._options.force,
                f"workers of {source} seem to be connected ({', '.join(info.workers or ())}): stop them first, or "
                "use force (--force) if they are not Bull's",
            ),
        )
        return [text for applies, text in checks if applies]

    def _warnings(self, info: QueueInfo, outcome: MigrationOutcome, *, joins: bool) -> list[str]:
        jobs = outcome.moved
        checks = (
            (info.workers is None, "CLIENT LIST is not permitted: make sure that no Bull worker is connected"),
            (
                joins,
                "Bull's queue is paused, but the target has jobs and is not paused, so the migrated jobs will run",
            ),
            (
                info.types["priority"] == "zset" and info.sizes["wait"] + info.sizes["paused"] > 0,
                "Bull runs jobs without priority last, BullMQ first; the order of jobs with a priority does not change",
            ),
            (
                bool(jobs["recovered"]),
                "active jobs without a lock will run again: make sure that no worker is still running them",
            ),
        )
        return [text for applies, text in checks if applies]


def _has_unknown_origin(job: BullJob) -> bool:
    """Return whether a job exists, but does not show which library added it."""
    return bool(job.fields) and job.origin is JobOrigin.EITHER


class JobCheck:
    """Decides for each job whether it is migrated, and counts skipped jobs; the caller counts migrated jobs.

    With ``bull_only``, jobs are skipped unless they are certainly Bull's, because the queue also has BullMQ's jobs.
    """

    def __init__(self, options: MigrationOptions, *, bull_only: bool, outcome: MigrationOutcome) -> None:
        self._options = options
        self._bull_only = bull_only
        self._outcome = outcome

    def change(self, job: BullJob) -> tuple[JobConversion, Conversion] | None:
        """Return how to migrate a job; ``None`` if it is skipped."""
        reason, detail = self._skip_reason(job), ""
        if reason is None:
            try:
                return self._change(job)
            except DecodeError as exc:
                reason, detail = SkipReason.MALFORMED, str(exc)
        self._outcome.skip(reason, job.id, detail)
        return None

    def _skip_reason(self, job: BullJob) -> SkipReason | None:
        state = _TARGET_STATES[job.key_suffix]
        checks = (
            (not job.fields, SkipReason.NO_HASH),
            (not self._is_from_bull(job), SkipReason.BULLMQ),
            (job.key_suffix == "active" and (job.locked or not self._options.recover_active), SkipReason.ACTIVE),
            (job.locked, SkipReason.LOCKED),
            (state != "recovered" and state not in self._options.states, SkipReason.NOT_SELECTED),
            (is_queue_key(self._options.id_prefix + job.id), SkipReason.RESERVED),
        )
        return next((reason for applies, reason in checks if applies), None)

    def _is_from_bull(self, job: BullJob) -> bool:
        if job.origin is JobOrigin.EITHER:
            return not self._bull_only
        return job.origin is not JobOrigin.BULLMQ  # unreadable jobs of both libraries are reported as malformed

    def _change(self, job: BullJob) -> tuple[JobConversion, Conversion]:
        state = _TARGET_STATES[job.key_suffix]
        conversion = convert(job, state, self._options.default_name)
        debounced = job.fields.get("deid")
        change = JobConversion(
            id=job.id,
            new_id=self._options.id_prefix + job.id,
            source=job.key_suffix,
            state=state,
            read=job.fields,
            fields=conversion.fields,
            dropped=conversion.dropped,
            priority=conversion.priority,
            score=conversion.finished,
            debounce_id=None if debounced is None else debounced.decode("utf-8", "surrogateescape"),
        )
        return change, conversion


_DROPPED: Final = ("attemptsMade", "stalledCounter", "retriedOn", "attempts", "id", "lockAcquired")
_NOT_KEPT: Final = ("timestamp", "repeat", "prevMillis", "debounce")

_dumps = json.JSONEncoder(separators=(",", ":")).encode

NOTES: Final[Mapping[str, str]] = {
    "timeout": "have a timeout, which BullMQ does not support: it stays in their options without effect",
    "exponential": "use exponential backoff: BullMQ waits 1, 2, 4 … times the delay, Bull 1, 3, 7 … times",
    "custom backoff": "use a custom backoff strategy: workers must have it",
    "parsing": "use preventParsingData, which BullMQ does not support: workers get parsed data",
    "priority": f"have a priority outside BullMQ's range: it is limited to 0 to {MAX_PRIORITY:,}",
    "unnamed": "have no name: they get __default__, or the name of default_name (--default-name)",
    "progress": "have progress that is not JSON: it is dropped",
}
"""Notes about migrated jobs, printed after the number of jobs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversion:
    """The changes that turn a Bull job's hash into a BullMQ job's.

    Attributes:
        dropped: The names of removed fields.
        opts: The options as stored.
        finished: When the job finished, in epoch milliseconds as text; ``""`` if it has not.
        notes: The keys of :data:`NOTES` that apply.
    """

    fields: Mapping[str, bytes]
    dropped: tuple[str, ...]
    opts: Mapping[str, Any]
    priority: int
    finished: str
    notes: frozenset[str]


def convert(job: BullJob, state: str, default_name: str = DEFAULT_NAME) -> Conversion:
    """Return the changes to a Bull job's hash for its new state: one of :data:`STATES`, or ``recovered``.

    ``DecodeError``: the job's data or options are not JSON, so no worker can read it.
    """
    notes: set[str] = set()
    codec.decode(job.fields.get("data"), what="its data")
    priority = _priority(job, notes)
    opts = _options(job, priority, notes)
    fields = _fields(job, state, default_name, notes)
    finished = fields.get("finishedOn", job.fields.get("finishedOn", b"")).decode("utf-8", "replace")
    fields["priority"] = str(priority).encode()
    fields["opts"] = _dumps(opts).encode()
    dropped = [name for name in _DROPPED if name in job.fields]
    dropped += [name for name in _empty_fields(job, state, notes) if name not in fields]
    return Conversion(
        fields=fields, dropped=tuple(dropped), opts=opts, priority=priority, finished=finished, notes=frozenset(notes)
    )


def _options(job: BullJob, priority: int, notes: set[str]) -> dict[str, Any]:
    given = {name: value for name, value in job.opts.items() if value is not None}
    opts = {name: value for name, value in given.items() if name not in _NOT_KEPT}
    # Bull 1 and 2 store the attempts in the hash; the default is one.
    opts["attempts"] = max(1, _whole(given.get("attempts"), job.number("attempts") or 1))
    for name in ("delay", "stackTraceLimit"):  # 0 means unset in Bull; BullMQ would keep no traces
        if not opts.get(name):
            opts.pop(name, None)
    if "priority" in opts:
        opts["priority"] = priority
    if "backoff" in opts:
        _backoff(opts, notes)
    if isinstance(debounce := given.get("debounce"), dict) and debounce.get("id"):
        opts["de"] = {name: debounce[name] for name in ("id", "ttl") if debounce.get(name)}
    if opts.get("timeout"):
        notes.add("timeout")
    if opts.get("preventParsingData"):
        notes.add("parsing")
    return opts


def _backoff(opts: dict[str, Any], notes: set[str]) -> None:
    backoff = opts["backoff"]
    if not isinstance(backoff, dict):
        backoff = {"type": "fixed", "delay": _whole(backoff, 0)}
    opts["backoff"] = backoff
    if backoff.get("type") == "exponential":
        notes.add("exponential")
    elif backoff.get("type") != "fixed":
        notes.add("custom backoff")


def _priority(job: BullJob, notes: set[str]) -> int:
    """Return BullMQ's priority, limited to BullMQ's range: Bull accepts any number."""
    given = job.opts.get("priority") or job.number("priority")
    whole = _whole(given, 0)
    priority = min(max(whole, 0), MAX_PRIORITY)
    if priority != given and given:
        notes.add("priority")
    return priority


def _fields(job: BullJob, state: str, default_name: str, notes: set[str]) -> dict[str, bytes]:
    fields: dict[str, bytes] = {}
    if job.fields.get("name", DEFAULT_NAME.encode()) == DEFAULT_NAME.encode():
        fields["name"] = default_name.encode()
        notes.add("unnamed")
    if "data" not in job.fields:
        fields["data"] = b"{}"
    # BullMQ also counts the attempt that succeeds.
    if attempts_made := job.number("attemptsMade") + (state == "completed"):
        fields["atm"] = fields["ats"] = str(attempts_made).encode()
    if stalled := job.number("stalledCounter"):
        fields["stc"] = str(stalled).encode()
    added = job.fields.get("timestamp") or str(_whole(job.opts.get("timestamp"), 0)).encode()
    fields["timestamp"] = added
    fields["delay"] = str(_delay_ms(job, state)).encode()
    if state in {"completed", "failed"}:
        fields.update(_outcome_fields(job, state, added))
    return fields


def _outcome_fields(job: BullJob, state: str, added: bytes) -> dict[str, bytes]:
    score = str(int(float(job.score))).encode() if job.score else b""
    fields = {"finishedOn": job.fields.get("finishedOn") or score or job.fields.get("processedOn") or added}
    if state == "completed" and "returnvalue" not in job.fields:
        fields["returnvalue"] = b"null"
    if state == "failed" and not job.fields.get("failedReason"):
        fields["failedReason"] = _reason(job)
    return fields


def _delay_ms(job: BullJob, state: str) -> int:
    """Return the delay; for a job that waits for a retry, Bull stores only the due time, as its score."""
    if state != "delayed" or job.number("delay") > 0:
        return max(0, job.number("delay"))
    return max(0, job.due_ms() - (job.number("processedOn") or job.number("timestamp")))


def _reason(job: BullJob) -> bytes:
    """Return the first line of the last stack trace as the failure reason, because Bull 1 stores no reason."""
    try:
        traces = codec.decode(job.fields.get("stacktrace"))
    except DecodeError:
        traces = None
    last = traces[-1] if isinstance(traces, list) and traces and isinstance(traces[-1], str) else "Unknown reason"
    return last.split("\n")[0].removeprefix("Error: ").encode(errors="replace")


def _empty_fields(job: BullJob, state: str, notes: set[str]) -> list[str]:
    """Return the names of empty fields, which BullMQ does not store."""
    names = []
    if job.fields.get("stacktrace") in {b"null", b"[]", b""}:
        names.append("stacktrace")
    if state != "completed" and job.fields.get("returnvalue") in {b"null", b""}:
        names.append("returnvalue")
    if state != "failed" and job.fields.get("failedReason") == b"":
        names.append("failedReason")
    try:
        codec.decode(job.fields.get("progress"))
    except DecodeError:
        names.append("progress")
        notes.add("progress")
    return names


def _whole(value: object, otherwise: int) -> int:
    """Return a number as an integer. Another program wrote it, possibly as a string."""
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return otherwise
    return int(number) if math.isfinite(number) else otherwise


_OF_ONE_JOB: Final = ("jobId", "delay")


@dataclass(frozen=True, slots=True)
class BullRepeatables:
    """Turns repeatable jobs into job schedulers, each with its next iteration in one transaction.

    ``address`` is the server's, for error messages.
    """

    client: SyncClient
    source: BullKeys
    target: QueueKeys
    address: str

    def convert(self, planned: BullRepeatable, job: BullJob, conversion: Conversion, now_ms: int) -> bool:
        """Create the scheduler and remove the repeatable job. It is safe to call this method again.

        ``False``: no further jobs are due, so that no scheduler was created.
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
    """Return the plan for each repeatable job: Bull's keys, with the time of the next run in epoch milliseconds.

    ``jobs`` are their next jobs by id, ``timezone`` applies to patterns without one, and ``selected`` says whether the
    state ``delayed``, and with it repeatable jobs, is selected.
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
