"""``bulltask jobs`` and ``bulltask failures``: find jobs by a filter, change all of them, and group failed jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from datetime import UTC, datetime
from heapq import nsmallest
from itertools import islice
from shlex import quote
from typing import Any, Final, NamedTuple

import click

from bulltask.app import App
from bulltask.cli.app_loader import existing_queue, load_app_or_broker, own_command
from bulltask.cli.job import chosen_queues, known_queues
from bulltask.cli.options import (
    ExitCode,
    confirmation_options,
    duration_option,
    operator_options,
    queues_option,
)
from bulltask.cli.terminal import (
    ago,
    as_table,
    check_can_ask,
    echo,
    in_one_line,
    iso,
    print_json,
    progress_bar,
    time_of,
)
from bulltask.config.urls import redact_secrets
from bulltask.jobs.errors import ConfigError
from bulltask.lake.formatting import age_text, pluralize
from bulltask.queue import BulkChange, FailureGroup, FailureGroups, Job, Queue
from bulltask.queue.fields import ALL_STATES, read_jobs
from bulltask.queue.search import SCANNED, Action, JobFilter, JobSearch, due_times, held_jobs

__all__ = ["failures", "failures_json", "failures_text", "group_failures", "jobs"]

_SHOWN: Final = 50
_MAX_REASON: Final = 78


@click.command("jobs", short_help="List, retry, promote, remove or revoke a queue's jobs by a filter.")
@click.argument("queue", metavar="[QUEUE]", required=False)
@click.option(
    "--state",
    "states",
    multiple=True,
    type=click.Choice(ALL_STATES),
    help="Only jobs in this state; may be repeated (default: all states, or those of the action). 'waiting' are all "
    "that could run now, also prioritized jobs, and delayed ones that are due.",
)
@click.option("--task", metavar="NAME", help="Only jobs of this task.")
@click.option("--error", metavar="TEXT", help="Only jobs whose last attempt failed with a reason that contains TEXT.")
@click.option("--search", metavar="TEXT", help="Only jobs with TEXT in their id, task, data as stored, or error.")
@duration_option("--older-than", text="Only jobs that finished, or were added, longer ago: 90, 10s, 15m, 12h or 7d.")
@duration_option("--newer-than", text="Only jobs that finished, or were added, since then.")
@click.option(
    "--oldest",
    is_flag=True,
    help="Waiting jobs that were added first, of all queues if there is no QUEUE; also throttled ones, and those that "
    "no worker can run.",
)
@click.option("--limit", type=click.IntRange(min=1), metavar="N", help="Maximum number of jobs (default: 50, or all).")
@click.option(
    "--scan",
    type=click.IntRange(min=1),
    metavar="N",
    help="Maximum number of jobs to read from Redis (default: 1,000,000, or all if they are changed).",
)
@click.option("--retry", is_flag=True, help="Move the failed jobs back to waiting; revoked jobs only with --error.")
@click.option("--promote", is_flag=True, help="Move the delayed jobs to waiting.")
@click.option("--remove", is_flag=True, help="Remove the jobs and their child jobs; needs --state.")
@click.option("--revoke", is_flag=True, help="Prevent the jobs from running.")
@click.option("--terminate", is_flag=True, help="With --revoke: cancel running jobs, too.")
@confirmation_options
@operator_options
def jobs(ctx: click.Context, /, *, queue: str | None, oldest: bool, **options: Any) -> None:
    """List the jobs of QUEUE, or change all jobs that match: add --retry, --promote, --remove or --revoke.

    'age' is the time since a job finished, started or was added; its error is in the line below it. 'attempts' 3/3 +1:
    it has made one more than its options allow, because it was retried.

    Which jobs have been waiting longest, in any queue: --oldest; why one of them does: 'bulltask why ID'.

    Before jobs are changed, they are counted, and you are asked. If you interrupt the command, run it again: jobs that
    have already been changed no longer match.

    Exit codes: 0 (done), 1 (an error, or interrupted), 2 (invalid usage), 3 (some jobs could not be changed), 4 (there
    is no such queue).
    """
    actions = [action for action in Action if options[action]]
    if len(actions) > 1:
        raise click.UsageError(f"choose one of --{actions[0]} and --{actions[1]}")
    action = actions[0] if actions else None
    if options["terminate"] and action is not Action.REVOKE:
        raise click.UsageError("--terminate needs --revoke")
    if oldest and action:
        raise click.UsageError(f"--oldest lists jobs: --{action} is not possible with it")
    if queue is None and not oldest:
        raise click.UsageError("pass a QUEUE, or --oldest for the jobs of all queues ('bulltask queues' lists these)")
    if action:
        check_can_ask(f"--{action}", options)
    with closing(load_app_or_broker(ctx, options)) as app:
        if action is not None and queue is not None:
            ctx.exit(_change(existing_queue(app, queue), action, options))
        names = known_queues(app, tell_others=True) if queue is None else []
        queues = [existing_queue(app, queue)] if queue is not None else list(map(app.queue, names))
        _list(queues, queue, options, own_command("bulltask why", ctx, options), oldest=oldest)


# ---- listing ---------------------------------------------------------------------------------------------------------


class _Found(NamedTuple):
    """A job that matches; the oldest one is the smallest."""

    since_ms: int
    queue: int
    id: str
    state: str
    label: str


class _Search:
    """Searches the jobs of queues for a list."""

    def __init__(self, queues: Sequence[Queue], options: dict[str, Any], *, oldest: bool) -> None:
        self.scanned = self.total = 0
        self.is_complete = True
        self.due: dict[_Found, int] = {}  # when delayed jobs are due
        self._queues = queues
        self._options = options
        self._oldest = oldest

    def read(self) -> list[tuple[Job, _Found]]:
        """Return the jobs to list."""
        limit = self._options["limit"] or _SHOWN
        found = nsmallest(limit, self._matches()) if self._oldest else list(islice(self._matches(), limit + 1))
        self.is_complete &= len(found) <= limit
        jobs: dict[tuple[int, str], Job] = {}
        for number in {match.queue for match in found}:
            context = self._queues[number].context
            ids = [match.id for match in found if match.queue == number]
            jobs |= {(number, job.id): Job(context, job) for job in context.run(read_jobs(context, ids))}
            delayed = [match for match in found if match.queue == number and match.state == "delayed"]
            times = context.run(due_times(context, [match.id for match in delayed]))
            self.due |= {match: ms for match, ms in zip(delayed, times, strict=True) if ms is not None}
        rows = [(jobs.get((match.queue, match.id)), match) for match in found[:limit]]
        return [(job, match) for job, match in rows if job is not None]  # without those that were removed meanwhile

    def _matches(self) -> Iterator[_Found]:
        options, scan = self._options, self._options["scan"] or SCANNED
        states = options["states"] or (("waiting",) if self._oldest else ())
        for number, queue in enumerate(self._queues):
            queue.wait_until_ready()
            context = queue.context
            wanted = JobFilter(
                states=tuple(states), task=options["task"], error=options["error"], text=options["search"]
            ).at(context.now_ms(), options["older_than"], options["newer_than"])
            search = JobSearch(context, wanted, more=("timestamp",) if self._oldest else ())
            total, before = context.run(search.count()), 0
            self.total += total
            with progress_bar(f"Searching {in_one_line(queue.name)}") as progress:
                while search.scanned < scan and (page := context.run(search.next())) is not None:
                    self.scanned += search.scanned - before
                    before = search.scanned
                    progress(before, min(total, scan))
                    for match in page:
                        label = "due" if search.is_due(match.state) else match.state
                        yield _Found(match.since_ms, number, match.id, match.state, label)
            self.is_complete &= search.scanned < scan or search.scanned >= total
            if self._oldest and not options["states"]:
                held = context.run(held_jobs(context, wanted, ("timestamp",)))
                self.scanned += len(held)
                self.total += len(held)
                for match, kind in held:
                    yield _Found(match.since_ms, number, match.id, match.state, kind)


def _list(queues: Sequence[Queue], name: str | None, options: dict[str, Any], why: str, *, oldest: bool) -> None:
    search = _Search(queues, options, oldest=oldest)
    rows = search.read()
    counts = {"scanned": search.scanned, "total": search.total, "complete": search.is_complete}
    if options["as_json"]:
        print_json(
            {
                "queue": name,
                "jobs": [_to_json(job, match.state, search.due.get(match)) for job, match in rows],
                **counts,
            }
        )
        return
    if rows:
        now = datetime.now(UTC)
        head = ("queue", "id", "task", "state", "age", "attempts")
        table = [(in_one_line(job.queue), *_row(job, match.label, now)) for job, match in rows]
        first = 0 if oldest else 1  # the queue is known
        notes = [_note(job, search.due.get(match), now) for job, match in rows]
        echo(as_table(head[first:], [row[first:] for row in table], notes))
    counted = pluralize(len(rows), "job")
    if oldest:
        counted = f"the oldest {counted} of {pluralize(len(queues), 'queue')}"
    more = "" if search.is_complete else "; there may be more: use a narrower filter, --limit or --scan"
    echo(f"{counted}; scanned {search.scanned:,} of {search.total:,} in these states{more}", err=True)
    if oldest and rows:
        echo(f"Why the first one waits: {why} {quote(rows[0][0].id)} --queue {quote(rows[0][0].queue)}", err=True)


def _state_name(state: str) -> str:
    return "waiting" if state == "wait" else state


def _row(job: Job, state: str, now: datetime) -> Sequence[str]:
    since_ms = job.finished_ms or (job.processed_ms if state == "active" else None) or job.timestamp_ms
    return (
        in_one_line(job.id),
        in_one_line(job.name),
        _state_name(state),
        _age(since_ms, now),
        _attempts(job.attempts_made, max(1, job.attempts)),
    )


def _age(ms: int, now: datetime) -> str:
    moment = time_of(ms)
    return "-" if moment is None else age_text((now - moment).total_seconds())


def _attempts(made: int, limit: int) -> str:
    """Return ``1/3``; ``3/3 +1`` if a job was retried after its last attempt, or its task has set ``max_retries``."""
    return f"{min(made, limit)}/{limit}{f' +{made - limit}' if made > limit else ''}"


def _note(job: Job, due_ms: int | None, now: datetime) -> str:
    """Return when a delayed job is due, and why the last attempt has failed, for the line below a job."""
    due = time_of(due_ms)
    texts = ["" if due is None else f"due {ago(due, now)}", redact_secrets(job.failed_reason or "")]
    return in_one_line(": ".join(filter(None, texts)), _MAX_REASON)


def _to_json(job: Job, state: str, due_ms: int | None) -> dict[str, Any]:
    return {
        "id": job.id,
        "queue": job.queue,
        "task": job.name,
        "state": _state_name(state),
        "added_at": iso(job.timestamp_ms),
        "due_at": iso(due_ms),
        "started_at": iso(job.processed_ms),
        "finished_at": iso(job.finished_ms),
        "attempts_made": job.attempts_made,
        "attempts": max(1, job.attempts),
        "failed_reason": job.failed_reason and redact_secrets(job.failed_reason),
        "data": job.data if job.data is not None else job.data_text,
    }


# ---- changing --------------------------------------------------------------------------------------------------------

_PAST: Final = {
    Action.RETRY: "retried",
    Action.PROMOTE: "promoted",
    Action.REMOVE: "removed",
    Action.REVOKE: "revoked",
}


def _change(queue: Queue, action: Action, options: dict[str, Any]) -> ExitCode:
    """Find the jobs, ask, change them, and report; return the exit code."""
    names = ("states", "task", "error", "older_than", "newer_than", "limit", "scan", "terminate")
    try:
        change = queue.bulk(action, text=options["search"], **{name: options[name] for name in names})
    except ConfigError as exc:
        raise click.UsageError(f"--{exc}") from exc
    with progress_bar("Searching") as progress:
        matched = change.find(progress)
    if options["dry_run"] or not matched:
        _report_change(queue, change, options)
        return ExitCode.DONE
    if not options["yes"]:
        counted = f"{pluralize(matched, 'job')} of queue {in_one_line(queue.name)}"
        click.confirm(f"{action.capitalize()} {counted}?", abort=True, err=True)
    try:
        with progress_bar(_PAST[action]) as progress:
            change.run(progress)
    except KeyboardInterrupt:
        _report_change(queue, change, options, note="Interrupted. Run the same command again to continue.")
        raise
    _report_change(queue, change, options)
    return ExitCode.PENDING if change.reasons else ExitCode.DONE


def _report_change(queue: Queue, change: BulkChange, options: dict[str, Any], *, note: str = "") -> None:
    errors = [{"id": job_id, "error": str(error)} for job_id, error in change.errors]
    if options["as_json"]:
        counts = {"matched": change.matched, "done": change.done, "failed": change.reasons.total()}
        head = {"queue": queue.name, "action": str(change.action), "dry_run": options["dry_run"]}
        print_json({**head, "scanned": change.scanned, **counts, "errors": errors})
        return
    past, scanned = _PAST[change.action], f"scanned {pluralize(change.scanned, 'job')}"
    if options["dry_run"]:
        echo(f"{pluralize(change.matched, 'job')} would be {past}; {scanned}. Nothing was changed.")
        return
    echo(f"{change.done:,} of {pluralize(change.matched, 'job')} {past}; {scanned}")
    for reason, number in change.reasons.most_common():
        echo(f"{number:,} not {past}: {reason}", err=True)
    for error in errors[:3]:
        echo(f"  {in_one_line(error['error'])}", err=True)
    if note:
        echo(note, err=True)


# ---- failures --------------------------------------------------------------------------------------------------------


@click.command("failures", short_help="Group failed jobs by task and error.")
@queues_option
@duration_option(
    "--since", "--newer-than", text="Only jobs that failed since then: 90, 10s, 15m, 12h or 7d (default: all)."
)
@click.option("--task", metavar="NAME", help="Only jobs of this task.")
@click.option("--error", metavar="TEXT", help="Only jobs that failed with a reason that contains TEXT.")
@click.option("--limit", type=click.IntRange(min=1), default=_SHOWN, metavar="N", help="Groups to show (default: 50).")
@click.option(
    "--scan",
    type=click.IntRange(min=1),
    default=SCANNED,
    metavar="N",
    help="Maximum number of failed jobs to read from each queue (default: 1,000,000).",
)
@operator_options
def failures(ctx: click.Context, /, *, queues: str | None, **options: Any) -> None:
    """Group the failed jobs of queues by task and error, most frequent first.

    'first' and 'last' are the times since the oldest and the newest of the jobs failed; their error is in the line
    below. Quoted text and numbers are replaced by # where errors differ, and secrets by ***. Failed jobs that Redis no
    longer has are not counted: see 'bulltask pipeline report'.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such queue).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        names = chosen_queues(app, queues)
        wanted = {"task": options["task"], "error": options["error"], "newer_than": options["since"]}
        found = group_failures(app, names, scan=options["scan"], **wanted)
    groups, jobs = found.groups, sum(group.count for group in found.groups)
    if options["as_json"]:
        document = [failures_json(group) for group in groups[: options["limit"]]]
        counts = {"groups": len(groups), "jobs": jobs, "scanned": found.scanned, "total": found.total}
        print_json({"failures": document, **counts})
        return
    if groups:
        head = ("count", "queue", "task", "first", "last", "example")
        now, shown = datetime.now(UTC), groups[: options["limit"]]
        notes = [in_one_line(failures_text(group), _MAX_REASON) for group in shown]
        echo(as_table(head, [_group_row(group, now) for group in shown], notes))
    counted = f"{pluralize(jobs, 'failed job')} in {pluralize(len(groups), 'group')}"
    echo(f"{counted}; scanned {found.scanned:,} of {found.total:,}, in {pluralize(len(names), 'queue')}", err=True)


def group_failures(app: App, names: Sequence[str], **wanted: Any) -> FailureGroups:
    """Group the failed jobs of queues; see :meth:`bulltask.queue.Queue.group_failures`."""
    found: list[FailureGroups] = []
    for name in names:
        with progress_bar(in_one_line(name)) as progress:
            found.append(app.queue(name).group_failures(**wanted, progress=progress))
    groups = sorted(
        (group for each in found for group in each.groups), key=lambda group: (-group.count, -group.last_ms)
    )
    return FailureGroups(tuple(groups), sum(each.scanned for each in found), sum(each.total for each in found))


def failures_text(group: FailureGroup) -> str:
    """Return the class of a group's error, and its text: without its variable parts, if they differ."""
    error = in_one_line(group.example_error.partition("\n")[0] if group.is_uniform else group.error)
    return error if not group.type or error.startswith(group.type) else f"{group.type}: {error}"


def failures_json(group: FailureGroup) -> dict[str, Any]:
    """Return a group as a JSON document has it."""
    return {
        "queue": group.queue,
        "task": group.task,
        "type": group.type or None,
        "error": group.error,
        "count": group.count,
        "first": iso(group.first_ms),
        "last": iso(group.last_ms),
        "example": {"id": group.example, "error": group.example_error},
    }


def _group_row(group: FailureGroup, now: datetime) -> Sequence[str]:
    names = map(in_one_line, (group.queue, group.task))
    return (f"{group.count:,}", *names, _age(group.first_ms, now), _age(group.last_ms, now), in_one_line(group.example))
