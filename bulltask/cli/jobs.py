"""``bulltask jobs`` and ``bulltask failures``: find jobs by a filter, change all of them, and group failed jobs.

A change has two steps. The first finds the jobs and writes their ids to a temporary file, so that the number is known
before anything happens, and memory does not grow with it. The second changes exactly these jobs; what has changed in
the meantime is left alone.
"""

from __future__ import annotations

import json
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from datetime import UTC, datetime
from heapq import nsmallest
from itertools import islice
from typing import IO, Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import existing_queue, load_app_or_broker
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
from bulltask.jobs.errors import BulltaskError, ConfigError, JobError
from bulltask.jobs.failure_reasons import error_fingerprint
from bulltask.lake.formatting import pluralize
from bulltask.queue import Job, Queue
from bulltask.queue.fields import ALL_STATES, read_jobs
from bulltask.queue.search import Action, JobFilter, JobSearch, Match, change, change_states, error_types
from bulltask.transport.operation import run_together

__all__ = ["failures", "group_failures", "jobs"]

_SHOWN: Final = 50
_SCANNED: Final = 1_000_000
"""How many jobs of a queue are read by default, if none is changed."""

_PER_ROUND_TRIP: Final = 200
_MAX_REASON: Final = 80
_MAX_GROUPS: Final = 10_000
_TYPES_READ: Final = 100
_MAX_ERRORS: Final = 20


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
@click.option("--oldest", is_flag=True, help="Waiting jobs that were added first, of all queues if there is no QUEUE.")
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

    Which jobs have been waiting longest, in any queue: --oldest.

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
        if queue is None or oldest:
            _list_oldest(app, queue, options)
            return
        found = existing_queue(app, queue)
        if action is None:
            _list(found, options)
        else:
            ctx.exit(_Change(app, found, action, options).run())


def _filter(queue: Queue, action: Action | None, options: dict[str, Any]) -> JobFilter:
    """Return the filter that the options describe, by the server's clock."""
    queue.wait_until_ready()
    now_ms = queue.context.now_ms()
    older, newer = options["older_than"], options["newer_than"]
    try:
        states = options["states"] if action is None else change_states(action, options["states"])
    except ConfigError as exc:
        raise click.UsageError(f"--{exc}") from exc
    return JobFilter(
        states=tuple(states),
        task=options["task"],
        error=options["error"],
        text=options["search"],
        before_ms=None if older is None else int(now_ms - older * 1000),
        after_ms=None if newer is None else int(now_ms - newer * 1000),
        revoked=action is not Action.RETRY or options["error"] is not None,
    )


# ---- listing ---------------------------------------------------------------------------------------------------------


def _list(queue: Queue, options: dict[str, Any]) -> None:
    limit, scan = options["limit"] or _SHOWN, options["scan"] or _SCANNED
    search = JobSearch(queue.context, _filter(queue, None, options))
    total = queue.context.run(search.count())
    found: list[tuple[str, str]] = []
    is_complete = True
    with progress_bar(min(total, scan), "Searching") as progress:
        for page, scanned in _pages(queue, search):
            found += [(match.id, match.state) for match in page]
            progress(scanned)
            if len(found) > limit or search.scanned >= scan:
                is_complete = len(found) <= limit and search.scanned >= total
                break
    found = found[:limit]
    states = dict(found)
    shown = [Job(queue.context, stored) for stored in queue.context.run(read_jobs(queue.context, [*states]))]
    if options["as_json"]:
        document = [_to_json(job, states[job.id]) for job in shown]
        print_json(
            {"queue": queue.name, "jobs": document, "scanned": search.scanned, "total": total, "complete": is_complete}
        )
        return
    if shown:
        now = datetime.now(UTC)
        labels = {job_id: "due" if search.is_due(state) else state for job_id, state in found}
        head = ("id", "task", "state", "since", "attempts", "error")
        echo(as_table(head, [_row(job, labels[job.id], now) for job in shown]))
    more = "" if is_complete else "; there may be more: use a narrower filter, --limit or --scan"
    counted = pluralize(len(shown), "job")
    echo(f"{counted}; scanned {search.scanned:,} of {total:,} in these states{more}", err=True)


def _list_oldest(app: App, name: str | None, options: dict[str, Any]) -> None:
    """List the jobs that were added first, in the order in which they were."""
    queues = [existing_queue(app, name)] if name else [app.queue(known) for known in known_queues(app)]
    limit, scan = options["limit"] or _SHOWN, options["scan"] or _SCANNED
    wanted = {**options, "states": options["states"] or ("waiting",)}
    scanned = total = 0

    def added() -> Iterator[tuple[int, int, str, str, str]]:
        """Yield when each job that matches was added, its queue's number, its id, state and the state's label."""
        nonlocal scanned, total
        for number, queue in enumerate(queues):
            search = JobSearch(queue.context, _filter(queue, None, wanted), more=("timestamp",))
            total += queue.context.run(search.count())
            for page, of_page in _pages(queue, search):
                scanned += of_page
                for match in page:
                    label = "due" if search.is_due(match.state) else match.state
                    yield match.since_ms, number, match.id, match.state, label
                if search.scanned >= scan:
                    break

    rows = _read(queues, nsmallest(limit, added()))
    if options["as_json"]:
        document = [_to_json(job, state) for job, state, _ in rows]
        is_complete = scanned >= total
        print_json({"queue": name, "jobs": document, "scanned": scanned, "total": total, "complete": is_complete})
        return
    if rows:
        now = datetime.now(UTC)
        head = ("queue", "id", "task", "state", "since", "attempts", "error")
        echo(as_table(head, [(in_one_line(job.queue), *_row(job, label, now)) for job, _, label in rows]))
    counted = f"the oldest {pluralize(len(rows), 'job')} of {pluralize(len(queues), 'queue')}"
    echo(f"{counted}; scanned {scanned:,} of {total:,} in these states", err=True)


def _read(queues: Sequence[Queue], found: Sequence[tuple[int, int, str, str, str]]) -> list[tuple[Job, str, str]]:
    """Return the jobs that still exist, in their order, with their states and these states' labels."""
    shown: dict[tuple[int, str], Job] = {}
    for number in {number for _, number, *_ in found}:
        context = queues[number].context
        ids = [job_id for _, its_queue, job_id, *_ in found if its_queue == number]
        shown |= {(number, job.id): Job(context, job) for job in context.run(read_jobs(context, ids))}
    rows = [(shown.get((number, job_id)), state, label) for _, number, job_id, state, label in found]
    return [(job, state, label) for job, state, label in rows if job is not None]


def _pages(queue: Queue, search: JobSearch) -> Iterator[tuple[list[Any], int]]:
    """Yield the jobs of each page that match, and how many jobs were read for it."""
    before = 0
    while (page := queue.context.run(search.next())) is not None:
        yield page, search.scanned - before
        before = search.scanned


def _state_name(state: str) -> str:
    return "waiting" if state == "wait" else state


def _ago(ms: int, now: datetime) -> str:
    moment = time_of(ms)
    return "-" if moment is None else ago(moment, now)


def _row(job: Job, state: str, now: datetime) -> Sequence[str]:
    since_ms = job.finished_ms or (job.processed_ms if state == "active" else None) or job.timestamp_ms
    return (
        in_one_line(job.id),
        in_one_line(job.name),
        _state_name(state),
        _ago(since_ms, now),
        f"{job.attempts_made}/{max(1, job.attempts)}",
        in_one_line(redact_secrets(job.failed_reason or ""), _MAX_REASON),
    )


def _to_json(job: Job, state: str) -> dict[str, Any]:
    return {
        "id": job.id,
        "queue": job.queue,
        "task": job.name,
        "state": _state_name(state),
        "added_at": iso(job.timestamp_ms),
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


class _Change:
    """Changes all jobs that match a filter."""

    def __init__(self, app: App, queue: Queue, action: Action, options: dict[str, Any]) -> None:
        self._app = app
        self._queue = queue
        self._action = action
        self._options = options
        # With a limit, those that the list shows; otherwise, the oldest failed job is the first one that runs again.
        every = options["limit"] is None
        takes_out = every and action in {Action.REMOVE, Action.REVOKE}
        self._search = JobSearch(queue.context, _filter(queue, action, options), asc=every, newest_first=takes_out)
        self._matched = 0
        self._done = 0
        self._reasons: Counter[str] = Counter()
        self._errors: list[dict[str, str]] = []

    def run(self) -> ExitCode:
        """Find the jobs, ask, change them, and report; return the exit code."""
        is_dry = self._options["dry_run"]
        with tempfile.TemporaryFile("w+", encoding="ascii", prefix="bulltask-jobs-") as ids:
            self._find(ids)
            counted = f"{pluralize(self._matched, 'job')} of queue {in_one_line(self._queue.name)}"
            if not (is_dry or self._options["yes"] or not self._matched):
                click.confirm(f"{self._action.capitalize()} {counted}?", abort=True, err=True)
            ids.seek(0)
            try:
                if not is_dry:
                    self._change_all(ids)
            except KeyboardInterrupt:
                self._report(is_dry=False, note="Interrupted. Run the same command again to continue.")
                raise
        self._report(is_dry=is_dry)
        return ExitCode.PENDING if self._reasons else ExitCode.DONE

    def _find(self, ids: IO[str]) -> None:
        """Write the id and state of each job that matches to a file."""
        limit, scan = self._options["limit"], self._options["scan"]
        with progress_bar(self._queue.context.run(self._search.count()), "Searching") as progress:
            for page, scanned in _pages(self._queue, self._search):
                matches = page if limit is None else page[: limit - self._matched]
                ids.writelines(f"{json.dumps((match.id, match.state))}\n" for match in matches)
                self._matched += len(matches)
                progress(scanned)
                if self._matched == limit or (scan is not None and self._search.scanned >= scan):
                    break

    def _change_all(self, ids: IO[str]) -> None:
        context, terminate = self._queue.context, self._options["terminate"]
        with context.broker.pool.client() as client, progress_bar(self._matched, _PAST[self._action]) as progress:
            client.connect()
            while lines := list(islice(ids, _PER_ROUND_TRIP)):
                jobs: list[tuple[str, str]] = [json.loads(line) for line in lines]
                changes = [context.permitted(change(context, self._action, *job, terminate=terminate)) for job in jobs]
                for (job_id, _), error in zip(jobs, run_together(client, changes), strict=True):
                    if error is None:
                        self._done += 1
                    else:
                        self._failed(job_id, error)
                progress(len(jobs))

    def _failed(self, job_id: str, error: BulltaskError) -> None:
        if not isinstance(error, JobError):
            raise error  # the server's, and not the job's
        reason = (type(error).__doc__ or "").strip().splitlines()[0]
        self._reasons[reason] += 1
        if len(self._errors) < _MAX_ERRORS:
            self._errors.append({"id": job_id, "error": str(error)})

    def _report(self, *, is_dry: bool, note: str = "") -> None:
        if self._options["as_json"]:
            counts = {"matched": self._matched, "done": self._done, "failed": self._reasons.total()}
            head = {"queue": self._queue.name, "action": str(self._action), "dry_run": is_dry}
            print_json({**head, "scanned": self._search.scanned, **counts, "errors": self._errors})
            return
        scanned = f"scanned {pluralize(self._search.scanned, 'job')}"
        if is_dry:
            echo(f"{pluralize(self._matched, 'job')} would be {_PAST[self._action]}; {scanned}. Nothing was changed.")
            return
        echo(f"{self._done:,} of {pluralize(self._matched, 'job')} {_PAST[self._action]}; {scanned}")
        for reason, number in self._reasons.most_common():
            echo(f"{number:,} not {_PAST[self._action]}: {reason}", err=True)
        for error in self._errors[:3]:
            echo(f"  {in_one_line(error['error'])}", err=True)
        if note:
            echo(note, err=True)


# ---- failures --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Group:
    """Failed jobs of one task with one class and fingerprint of error; the example is the newest job.

    ``is_uniform`` says whether the errors of all have the same text.
    """

    queue: str
    task: str
    type: str
    error: str
    example: str
    example_error: str
    last_ms: int
    first_ms: int
    count: int = field(default=0)
    is_uniform: bool = field(default=True)

    @property
    def text(self) -> str:
        """The class of the error, and its text: without its variable parts, if they differ."""
        error = in_one_line(self.example_error.partition("\n")[0] if self.is_uniform else self.error)
        return error if not self.type or error.startswith(self.type) else f"{self.type}: {error}"

    def to_json(self) -> dict[str, Any]:
        return {
            "queue": self.queue,
            "task": self.task,
            "type": self.type or None,
            "error": self.error,
            "count": self.count,
            "first": iso(self.first_ms),
            "last": iso(self.last_ms),
            "example": {"id": self.example, "error": self.example_error},
        }


@click.command("failures", short_help="Group failed jobs by task and error.")
@queues_option
@duration_option("--since", text="Only jobs that failed since then: 90, 10s, 15m, 12h or 7d (default: all).")
@click.option("--task", metavar="NAME", help="Only jobs of this task.")
@click.option("--error", metavar="TEXT", help="Only jobs that failed with a reason that contains TEXT.")
@click.option("--limit", type=click.IntRange(min=1), default=_SHOWN, metavar="N", help="Groups to show (default: 50).")
@click.option(
    "--scan",
    type=click.IntRange(min=1),
    default=_SCANNED,
    metavar="N",
    help="Maximum number of failed jobs to read from each queue (default: 1,000,000).",
)
@operator_options
def failures(ctx: click.Context, /, *, queues: str | None, **options: Any) -> None:
    """Group the failed jobs of queues by task and error, most frequent first.

    Quoted text and numbers are replaced by # where errors differ, and secrets by ***. Failed jobs that Redis no longer
    has are not counted: see 'bulltask pipeline report'.

    Exit codes: 0 (done), 1 (an error), 4 (there is no such queue).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        names = chosen_queues(app, queues)
        groups, scanned, total = group_failures(app, names, options)
    found = sum(group.count for group in groups)
    if options["as_json"]:
        document = [group.to_json() for group in groups[: options["limit"]]]
        print_json({"failures": document, "groups": len(groups), "jobs": found, "scanned": scanned, "total": total})
        return
    if groups:
        head = ("count", "queue", "task", "first", "last", "error", "example")
        now = datetime.now(UTC)
        echo(as_table(head, [_group_row(group, now) for group in groups[: options["limit"]]]))
    counted = f"{pluralize(found, 'failed job')} in {pluralize(len(groups), 'group')}"
    echo(f"{counted}; scanned {scanned:,} of {total:,}, in {pluralize(len(names), 'queue')}", err=True)


def group_failures(app: App, names: Sequence[str], options: dict[str, Any]) -> tuple[list[_Group], int, int]:
    """Return the groups, most frequent first, how many jobs were read, and how many there are."""
    groups: dict[tuple[str, str, str, str], _Group] = {}
    kinds: dict[tuple[str, str, str], Counter[str]] = {}
    all_scanned = all_failed = 0
    for name in names:
        queue = app.queue(name)
        queue.wait_until_ready()
        since = options["since"]
        after_ms = None if since is None else int(queue.context.now_ms() - since * 1000)
        wanted = JobFilter(states=("failed",), task=options["task"], error=options["error"], after_ms=after_ms)
        search = JobSearch(queue.context, wanted, more=("name", "failedReason", "finishedOn"))
        total = queue.context.run(search.count())
        with progress_bar(min(total, options["scan"]), in_one_line(name)) as progress:
            for page, scanned in _pages(queue, search):
                reasons = [redact_secrets(match.reason) for match in page]
                for match, reason, kind in zip(page, reasons, _types(queue, page, reasons, kinds), strict=True):
                    _add(groups, name, kind, reason, match)
                progress(scanned)
                if search.scanned >= options["scan"]:
                    break
        all_scanned, all_failed = all_scanned + search.scanned, all_failed + total
    return sorted(groups.values(), key=lambda group: (-group.count, -group.last_ms)), all_scanned, all_failed


def _types(
    queue: Queue, page: Sequence[Match], reasons: Sequence[str], kinds: dict[tuple[str, str, str], Counter[str]]
) -> list[str]:
    """Return the class of each job's error.

    Only tracebacks have it, and they are long. So if the first jobs with a fingerprint have the same class, others with
    this fingerprint have it, too, unless there is no word in it.
    """
    found, unknown = [""] * len(page), []
    for index, (match, reason) in enumerate(zip(page, reasons, strict=True)):
        fingerprint = error_fingerprint(reason) or ""
        key = (queue.name, match.name, fingerprint)
        if key not in kinds and len(kinds) >= _MAX_GROUPS:
            continue
        seen = kinds.setdefault(key, Counter())
        if len(seen) == 1 and seen.total() >= _TYPES_READ and any(map(str.isalpha, fingerprint)):
            found[index] = next(iter(seen))
        else:
            unknown.append((index, seen))
    types = queue.context.run(error_types(queue.context, [page[index] for index, _ in unknown]))
    for (index, seen), kind in zip(unknown, types, strict=True):
        found[index] = kind
        seen[kind] += 1
    return found


def _add(groups: dict[tuple[str, str, str, str], _Group], queue: str, kind: str, reason: str, match: Match) -> None:
    key = (queue, match.name, kind, error_fingerprint(reason) or "")
    if key not in groups and len(groups) >= _MAX_GROUPS:
        key = (queue, "(others)", "", "(others)")
    group = groups.get(key)
    if group is None:
        since_ms = match.since_ms
        group = groups[key] = _Group(*key, match.id, reason, since_ms, since_ms)
    group.count += 1
    group.is_uniform &= reason == group.example_error
    group.first_ms = min(group.first_ms, match.since_ms)
    group.last_ms = max(group.last_ms, match.since_ms)


def _group_row(group: _Group, now: datetime) -> Sequence[str]:
    first, last = (_ago(ms, now) for ms in (group.first_ms, group.last_ms))
    names = map(in_one_line, (group.queue, group.task))
    return (f"{group.count:,}", *names, first, last, in_one_line(group.text, _MAX_REASON), in_one_line(group.example))
