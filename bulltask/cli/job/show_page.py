"""The output of ``bulltask job show``."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from bulltask.cli.terminal import ago, as_table, duration_text, in_one_line, safe, stamp
from bulltask.jobs.fields import BULLTASK_KEY
from bulltask.jobs.payloads import describe, is_envelope

if TYPE_CHECKING:
    from bulltask.cli.job_lookup import FoundJob
    from bulltask.lake.records import JobHistory

__all__ = ["page"]

_NAME_WIDTH: Final = 11
_REASON_WIDTH: Final = 100


def page(job_id: str, redis_job: FoundJob | None, history: JobHistory | None) -> Iterator[str]:
    """Yield the lines about a job.

    Args:
        job_id: Its id.
        redis_job: The job in Redis; ``None`` only if there is a history.
        history: The job in the lake.
    """
    name, state, moment = _head(redis_job, history)
    queue = redis_job.job.queue if redis_job else history.queue if history else ""
    yield f"{in_one_line(name or '(name unknown)')} {in_one_line(job_id)}, queue {in_one_line(queue)}"
    when = "" if moment is None else f", {ago(moment, datetime.now(UTC))}"
    sources = [source for source, has in (("Redis", redis_job), ("the lake", history)) if has]
    yield f"{state}{when} (from {' and '.join(sources)})"
    yield ""
    yield from _field_lines(_redis_fields(redis_job) if redis_job else [])
    if history:
        yield from _field_lines(_lake_fields(history, all_fields=redis_job is None))
    for title, lines in _sections(redis_job, history):
        if lines:
            yield from ("", title, *(f"  {line}" for line in lines))


def _head(redis_job: FoundJob | None, history: JobHistory | None) -> tuple[str | None, str, datetime | None]:
    """Return the job's name, its state, and the time when it entered that state."""
    if redis_job:
        return redis_job.job.name, redis_job.state, redis_job.finished_at or redis_job.started_at or redis_job.added_at
    assert history is not None
    if (job := history.job) is not None:
        return job.name, job.state, job.seen_at
    snapshot = history.snapshot
    name = next((event.name for event in history.events if event.name), snapshot.name if snapshot else None)
    if history.events:
        return name, f"not finished; its last event is {history.events[-1].event!r}", history.events[-1].at
    if snapshot:
        return name, f"{snapshot.state} in a snapshot", snapshot.at
    return name, "unknown", None


def _redis_fields(redis_job: FoundJob) -> list[tuple[str, object]]:
    job = redis_job.job
    return [
        ("added", f"{stamp(redis_job.added_at)}{_sender(job.opts)}"),
        ("started", redis_job.started_at and f"{stamp(redis_job.started_at)} by {job.processed_by or 'a worker'}"),
        ("finished", redis_job.finished_at and stamp(redis_job.finished_at)),
        ("delay", job.delay_ms and duration_text(job.delay_ms / 1000)),
        ("priority", job.priority),
        ("attempts", f"{job.attempts_made} of {max(1, job.attempts)} made, {job.attempts_started} started"),
        ("stalls", job.stalled_count),
        ("reason", job.failed_reason),
        ("data", job.data_text if job.data is None else _json(job.data)),
        ("options", _json(dict(job.opts))),
        ("result", None if job.returnvalue is None else _json(job.returnvalue)),
        ("progress", job.progress and _json(job.progress)),
        ("parent", job.parent_key),
        ("scheduler", job.scheduler_id),
    ]


def _sender(opts: Mapping[str, Any]) -> str:
    """Return which app has sent the job, and from which host; ``""`` if none has."""
    own = opts.get(BULLTASK_KEY)
    sender = own.get("sender") if isinstance(own, dict) else None
    return f" by {sender}" if isinstance(sender, str) else ""


def _lake_fields(history: JobHistory, *, all_fields: bool) -> list[tuple[str, object]]:
    """Return the fields that the lake adds to Redis' fields; all fields if Redis does not have the job."""
    job, snapshot = history.job, history.snapshot
    rows: list[tuple[str, object]] = []
    if all_fields and job is not None:
        rows += [
            ("added", stamp(job.created_at)),
            ("started", stamp(job.started_at)),
            ("finished", job.finished_at and stamp(job.finished_at)),
            ("attempts", job.attempt_count),
            ("stalls", job.stalls),
            ("reason", job.failed_reason),
            ("parent", job.parent_key),
        ]
    if all_fields and snapshot is not None:
        result = None if snapshot.return_value is None else snapshot.return_value_text
        rows += [("data", snapshot.data_text), ("options", snapshot.opts_text), ("result", result)]
    if job is not None:
        wait, run, total = duration_text(job.wait_time), duration_text(job.run_time), duration_text(job.total)
        rows.append(("total", f"waited {wait}, ran {run}, took {total}"))
    return rows


def _sections(redis_job: FoundJob | None, history: JobHistory | None) -> Iterator[tuple[str, Sequence[str]]]:
    if history:
        yield "Attempts", _attempts(history)
        yield "Earlier jobs with this id", [f"{stamp(job.seen_at)}  {job.state}" for job in history.incarnations[1:]]
        yield "Events", [_event(event.at, event.event, event.prev, event.failed_reason) for event in history.events]
    snapshot = history.snapshot if history else None
    traces = redis_job.job.stacktrace if redis_job else snapshot.stacktrace if snapshot else ()
    for number, trace in enumerate(traces, 1):
        yield f"Traceback {number} of {len(traces)}", safe(trace).rstrip().splitlines()
    if redis_job:
        shown, total = len(redis_job.logs), redis_job.log_lines
        more = "" if shown == total else f" (the last {shown} of {total})"
        yield f"Logs{more}", [line for text in redis_job.logs for line in safe(text).splitlines()]


def _attempts(history: JobHistory) -> list[str]:
    if not history.attempts:
        return []
    rows = [
        (
            str(attempt.attempt),
            stamp(attempt.started_at),
            duration_text(attempt.wait_time),
            duration_text(attempt.run_time),
            attempt.outcome,
            in_one_line(attempt.worker or "-"),
            in_one_line(attempt.failed_reason or "", _REASON_WIDTH),
        )
        for attempt in history.attempts
    ]
    return as_table(("", "started (UTC)", "waited", "ran", "outcome", "worker", "reason"), rows).splitlines()


def _event(at: datetime, event: str, prev: str | None, reason: str | None) -> str:
    before = f" (was {in_one_line(prev)})" if prev else ""
    return f"{stamp(at)}  {in_one_line(event)}{before}{': ' + in_one_line(reason, _REASON_WIDTH) if reason else ''}"


def _field_lines(rows: list[tuple[str, object]]) -> Iterator[str]:
    """Yield a line for each field that has a value; further lines of a value are aligned below the first."""
    for name, value in rows:
        if value in (None, 0, "", "-"):
            continue
        first, *rest = safe(str(value)).splitlines() or [""]
        yield f"{name:<{_NAME_WIDTH}}{first}"
        yield from (" " * _NAME_WIDTH + line for line in rest)


def _json(value: Any) -> str:
    return describe(value) if is_envelope(value) else json.dumps(value, ensure_ascii=False)
