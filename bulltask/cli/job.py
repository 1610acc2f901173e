"""``bulltask job`` and ``bulltask revoke``: look at single jobs and flows, or change jobs.

Both find a job by its id, in one queue or in all (:func:`queue_of_job`). Arrow is imported only for the lake, because
``--help`` and jobs that are in Redis do not need it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from shlex import quote
from typing import TYPE_CHECKING, Any, Final, NoReturn
from urllib.parse import urlsplit

import click

from bulltask.app import App
from bulltask.cli.app_loader import NotFoundError, existing_keys, existing_queue, load_app_or_broker, own_command
from bulltask.cli.groups import HintGroup
from bulltask.cli.options import ExitCode, job_queue_option, lake_option, operator_options, time_or_age
from bulltask.cli.terminal import (
    ago,
    as_table,
    duration_text,
    echo,
    field_lines,
    in_one_line,
    in_width,
    iso,
    print_json,
    safe,
    stamp,
    time_of,
)
from bulltask.config.config import Config
from bulltask.config.parsers import parse_names
from bulltask.config.urls import SecretUrl
from bulltask.jobs.errors import BrokerError, ConfigError, InvalidNameError, JobError
from bulltask.jobs.job import BULLTASK_KEY
from bulltask.jobs.names import JobState, Revocation, address_of, bullmq_name, check_queue_name, name_in_app
from bulltask.jobs.payloads import describe, is_envelope
from bulltask.queue import Job, overview
from bulltask.queue.flows import FlowNode
from bulltask.queue.overview import find_queues
from bulltask.queue.reasons import Explanation, Reason
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.job import job_fields
from bulltask.transport.scripts.move import CRASHES

if TYPE_CHECKING:
    from bulltask.lake.records import JobHistory
    from bulltask.lake.storage import Lake

__all__ = [
    "ambiguous",
    "chosen_queues",
    "command_lines",
    "evidence_text",
    "existing_job",
    "job",
    "job_page",
    "known_queues",
    "queue_of_job",
    "queues_spelled_otherwise",
    "queues_with_job",
    "revoke",
    "with_server",
]


MAX_LOG_LINES: Final = 1_000
"""How many of the newest lines of a job's log are read."""


@click.group(
    "job",
    cls=HintGroup,
    hints={"why": "use 'bulltask why ID'"},
    short_help="Show a job from Redis and from the data lake.",
)
def job() -> None:
    """Show or change single jobs. For all jobs that match a filter, use 'bulltask jobs'.

    'show' also shows jobs that are no longer in Redis, from the data lake that 'bulltask pipeline run' writes. This
    requires the history extra (pip install 'bulltask[history]'). To search the lake, use 'bulltask history search'.
    """


@job.command("show", short_help="Show a job by ID.")
@click.argument("job_id", metavar="ID")
@lake_option(required=False, of_one=True)
@job_queue_option
@click.option("--no-redis", is_flag=True, help="Read the lake only.")
@click.option(
    "--since",
    type=time_or_age,
    metavar="TIME",
    help="The job was added at or after this time (such as 2026-11-22 or 2d): older days of the lake are not read. "
    "Faster if ids are random.",
)
@operator_options
def show(
    ctx: click.Context,
    /,
    *,
    job_id: str,
    lake: Lake | None,
    queue: str | None,
    no_redis: bool,
    since: datetime | None,
    **options: Any,
) -> None:
    """Show a job by ID: its state, data, result, attempts, events, logs and tracebacks.

    Redis is searched first. Without --queue, all queues are searched: those of the app, the lake and connected workers
    first, then the others. The lake adds jobs that Redis no longer has, and the history of each attempt.

    Exit codes: 0 (the job was found), 1 (an error), 4 (it was not found).
    """
    if no_redis and lake is None:
        raise click.UsageError("--no-redis needs --lake")
    app = None if no_redis else load_app_or_broker(ctx, options)
    redis_job = None if app is None else _in_redis(app, job_id, queue, lake)
    if app is not None and redis_job is not None:
        redis_job = _with_commands(redis_job, ctx, options, app)
    history = None if lake is None else _in_lake(lake, job_id, queue, redis_job, since)
    if redis_job is None and history is None:
        raise _missing(job_id, queue, lake, in_redis=not no_redis)
    if options["as_json"]:
        print_json(_to_json(job_id, redis_job, history))
        return
    echo("\n".join(_page(job_id, redis_job, history)))


def with_server(explanation: Explanation, ctx: click.Context, options: Mapping[str, Any], app: App) -> Explanation:
    """Return an explanation whose commands are for the app and server of this command."""
    url = app._broker.endpoint.url

    def completed(line: str) -> str:
        program, _, rest = line.partition(" ")
        if program == "redis-cli":
            return " ".join(["redis-cli", *_redis_cli(url), rest])
        return line if "bulltask " not in line or program.startswith("app.") else own_command(line, ctx, options)

    commands = [reason.command and completed(reason.command) for reason in explanation.reasons]
    reasons = zip(explanation.reasons, commands, strict=True)
    return replace(explanation, reasons=tuple(replace(reason, command=line) for reason, line in reasons))


def _redis_cli(url: SecretUrl) -> Iterator[str]:
    """Yield the options with which redis-cli connects to a server; it asks for the password."""
    if url.kind == "sentinel":
        return  # redis-cli does not know which server is the primary
    if url.scheme == "unix":
        yield f"-s {quote(urlsplit(str(url)).path)}"
    else:
        host, port = url.hosts[0]
        yield f"-h {quote(host)} -p {port}"
    if url.database:
        yield f"-n {url.database}"
    if url.kind == "cluster":
        yield "-c"
    if url.scheme.startswith("rediss"):
        yield "--tls"
    if url.has_password:
        yield f"--user {quote(url.user)} --askpass" if url.user else "--askpass"


def _in_redis(app: App, job_id: str, queue: str | None, lake: Lake | None) -> _FoundJob | None:
    try:
        known: list[str] = []
        if lake is not None and queue is None:
            from bulltask.lake import History  # noqa: PLC0415 - slow, and needs an extra

            names = filter(lake.has_queue, History(lake).queues())
            known = [name.removeprefix(lake.queue_prefix) for name in names]
        job_id, queue = _address(app, job_id, queue)
        name = queue_of_job(app, job_id, queue, known)
        return None if name is None else _read(app, name, job_id)
    except BrokerError as exc:
        if lake is None:
            raise
        echo(f"Redis is not available; showing the lake only: {exc}", err=True)
        return None
    except NotFoundError:  # another queue has a job with this id
        if lake is None:
            raise
        return None
    finally:
        app.close()


def _read(app: App, queue: str, job_id: str) -> _FoundJob | None:
    found = app.queue(queue).get_job(job_id)
    if found is None:
        return None
    logs = found.get_logs(0, MAX_LOG_LINES - 1, asc=False)
    (crashes,) = app._broker.pool.run(job_fields(app._broker.keys(found.queue), found.id, [CRASHES]))
    counted = int(crashes) if crashes is not None and crashes.isdigit() else 0
    children = {kind: number for kind, number in found.get_dependencies_count().items() if number}
    parent = _parent(app, found)
    return _FoundJob(found, found.explain(), tuple(reversed(logs.lines)), logs.count, counted, children, parent)


def _with_commands(found: _FoundJob, ctx: click.Context, options: Mapping[str, Any], app: App) -> _FoundJob:
    """Return a job whose commands are for the app and server of this command."""
    explanation = with_server(found.explanation, ctx, options, app)
    return replace(found, explanation=explanation, tree=own_command("bulltask job tree", ctx, options))


def job_page(
    ctx: click.Context, options: Mapping[str, Any], app: App, queue: str, job_id: str
) -> tuple[str | None, list[str]]:
    """Return the state of a job in Redis, ``None`` if it is not there, and the lines of ``bulltask job show``."""
    if (found := _read(app, queue, job_id)) is None:
        return None, [str(_missing(job_id, queue))]
    return found.state, list(_page(job_id, _with_commands(found, ctx, options, app), None))


def _in_lake(
    lake: Lake, job_id: str, queue: str | None, redis_job: _FoundJob | None, since: datetime | None
) -> JobHistory | None:
    from bulltask.lake import History  # noqa: PLC0415 - slow

    history = History(lake)
    if redis_job is None:
        return history.job(job_id, queue, since)
    try:
        return history.job(job_id, redis_job.job.queue, since)
    except ConfigError:  # Redis has the queue, but the lake has no data for it yet
        return None


def _to_json(job_id: str, redis_job: _FoundJob | None, history: JobHistory | None) -> dict[str, Any]:
    from bulltask.lake.records import to_json  # noqa: PLC0415 - slow

    queue = redis_job.job.queue if redis_job else history and history.queue
    return {"id": job_id, "queue": queue, "redis": redis_job and redis_job.to_json(), "history": to_json(history)}


def _missing(job_id: str, queue: str | None, lake: Lake | None = None, *, in_redis: bool = True) -> NotFoundError:
    searched = [f"Redis ({'queue ' + queue if queue else 'all queues'})"] if in_redis else []
    searched += [] if lake is None else [f"the lake {lake.root}"]
    hint = "; 'bulltask job show ID --lake DIR' finds jobs that Redis no longer has" if lake is None else ""
    return NotFoundError(safe(f"job {job_id!r} not found in {' or '.join(searched)}{hint}"))


_REASON_WIDTH: Final = 100
_MAX_NAMES: Final = 5


def _page(job_id: str, redis_job: _FoundJob | None, history: JobHistory | None) -> Iterator[str]:
    """Yield the lines about a job, from Redis, the lake, or both."""
    name, state, moment = _head(redis_job, history)
    queue = redis_job.job.queue if redis_job else history.queue if history else ""
    yield f"{in_one_line(name or '(name unknown)')} {in_one_line(job_id)}, queue {in_one_line(queue)}"
    when = "" if moment is None else f", {ago(moment, datetime.now(UTC))}"
    sources = [source for source, has in (("Redis", redis_job), ("the lake", history)) if has]
    yield f"{state}{when} (from {' and '.join(sources)})"
    yield ""
    yield from field_lines(_redis_fields(redis_job) if redis_job else [])
    if history:
        yield from field_lines(_lake_fields(history, all_fields=redis_job is None))
    for title, lines in _sections(redis_job, history):
        if lines:
            yield from ("", title, *(f"  {line}" for line in lines))


def _head(redis_job: _FoundJob | None, history: JobHistory | None) -> tuple[str | None, str, datetime | None]:
    """Return the job's name, its state, and the time when it entered that state."""
    if redis_job:
        job = redis_job.job
        return job.name, redis_job.state, time_of(job.finished_ms or job.processed_ms or job.timestamp_ms)
    assert history is not None
    if history.job is not None:
        return history.job.name, history.job.state, history.job.seen_at
    snapshot = history.snapshot
    name = next((event.name for event in history.events if event.name), snapshot.name if snapshot else None)
    if history.events:
        return name, f"not finished; its last event is {history.events[-1].event!r}", history.events[-1].at
    if snapshot:
        return name, f"{snapshot.state} in a snapshot", snapshot.at
    return name, "unknown", None


def _redis_fields(redis_job: _FoundJob) -> list[tuple[str, object]]:
    job = redis_job.job
    started, finished = time_of(job.processed_ms), time_of(job.finished_ms)
    return [
        ("added", f"{stamp(time_of(job.timestamp_ms))}{_sender(job.opts)}"),
        ("started", started and f"{stamp(started)} by {job.processed_by or 'a worker'}"),
        ("finished", finished and stamp(finished)),
        ("delay", job.delay_ms and duration_text(job.delay_ms / 1000)),
        ("priority", job.priority),
        ("attempts", _attempts_text(job)),
        ("stalls", job.stalled_count),
        ("crashes", redis_job.crashes and f"{redis_job.crashes} (child processes that died; its log has when)"),
        ("reason", job.failed_reason),
        ("data", job.data_text if job.data is None else _json(job.data)),
        ("options", _json(dict(job.opts))),
        ("result", None if job.returnvalue is None else _json(job.returnvalue)),
        ("progress", job.progress and _json(job.progress)),
        (
            "parent",
            redis_job.parent
            and "job {1} of queue {0} ({2} {3})".format(*redis_job.parent, redis_job.tree, quote(redis_job.parent[1])),
        ),
        ("children", _children(redis_job)),
        ("scheduler", job.scheduler_id),
    ]


def _attempts_text(job: Job) -> str:
    made, limit, started = job.attempts_made, max(1, job.attempts), job.attempts_started
    if made <= limit:
        return f"{made} of {limit} made, {started} started"
    more = f"{made - limit} more than the {limit} of its options: it was retried, or its task sets max_retries"
    return f"{made} made, {started} started; {more}"


def _children(found: _FoundJob) -> str:
    counts = ", ".join(f"{number} {kind}" for kind, number in found.children.items())
    return counts and f"{counts} ({found.tree} {quote(found.job.id)})"


def _parent(app: App, found: Job) -> tuple[str, str] | None:
    """Return the queue, by its name in the app, and the id of a job's parent."""
    if found.parent_key is None:
        return None
    config = app._config
    _, name, job_id = address_of(found.parent_key, config.prefix)
    return name_in_app(name, hash_tag=config.queue_hash_tag), job_id


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
        values = (("data", snapshot.data), ("options", snapshot.opts), ("result", snapshot.return_value))
        rows += [(name, value if value is None or isinstance(value, str) else _json(value)) for name, value in values]
    if job is not None:
        wait, run, total = duration_text(job.wait_time), duration_text(job.run_time), duration_text(job.total)
        rows.append(("total", f"waited {wait}, ran {run}, took {total}"))
    return rows


def _sections(redis_job: _FoundJob | None, history: JobHistory | None) -> Iterator[tuple[str, Sequence[str]]]:
    if redis_job:
        title = "Why it has not finished" if redis_job.state == "active" else "Why it does not run"
        yield title, [line for reason in redis_job.why for line in _reason(reason)]
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


def _reason(reason: Reason) -> Iterator[str]:
    yield from in_width(in_one_line(reason.sentence, 1_000), margin=2)
    yield from command_lines(reason)


def command_lines(reason: Reason) -> Iterator[str]:
    """Yield the line with the command that mends a reason, if there is one."""
    if reason.command is not None:
        yield f"  {'>>>' if reason.command.startswith('app.') else '$'} {in_one_line(reason.command, 1_000)}"


def evidence_text(reason: Reason) -> str:
    """Return what proves a reason, in one line."""
    shown = {name: value for name, value in reason.evidence.items() if value not in (None, [], {})}
    return ", ".join(f"{name}={_short(value)}" for name, value in shown.items())


def _short(value: Any) -> str:
    if isinstance(value, dict):
        value = list(value)
    if isinstance(value, list):
        names = [str(item.get("id") or item.get("pid", "")) if isinstance(item, dict) else str(item) for item in value]
        more = " …" if len(names) > _MAX_NAMES else ""
        return " ".join(in_one_line(name, 80) for name in names[:_MAX_NAMES]) + more
    return in_one_line(str(value), 120)


def _attempts(history: JobHistory) -> list[str]:
    if not history.attempts:
        return []
    rows = [
        (
            str(attempt.attempt) if attempt.attempt > 0 else "-",  # a release is no attempt
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


def _json(value: Any) -> str:
    return describe(value) if is_envelope(value) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class _FoundJob:
    """A job in Redis, with why it does not run, and the last lines of its log in order.

    ``log_lines`` is the number of all lines, ``crashes`` how many child processes have died that had the job,
    ``children`` how many child jobs of each kind it has, ``parent`` the queue and id of its parent, and ``tree`` the
    command that shows a flow.
    """

    job: Job
    explanation: Explanation
    logs: tuple[str, ...]
    log_lines: int
    crashes: int
    children: Mapping[str, int]
    parent: tuple[str, str] | None
    tree: str = "bulltask job tree"

    @property
    def state(self) -> str:
        """The job's state."""
        return str(self.explanation.state)

    @property
    def why(self) -> tuple[Reason, ...]:
        """The reasons why it does not run; none if it has finished."""
        return () if self.state in {"completed", "failed"} else self.explanation.reasons

    def to_json(self) -> dict[str, Any]:
        """Return the job as JSON values: times in ISO 8601, durations in seconds."""
        job = self.job
        return {
            "state": self.state,
            "name": job.name,
            "data": job.data if job.data is not None else job.data_text,
            "opts": dict(job.opts),
            "added_at": iso(job.timestamp_ms),
            "started_at": iso(job.processed_ms),
            "finished_at": iso(job.finished_ms),
            "delay": job.delay_ms / 1000,
            "priority": job.priority,
            "attempts": job.attempts,
            "attempts_made": job.attempts_made,
            "attempts_started": job.attempts_started,
            "stalled_count": job.stalled_count,
            "crashes": self.crashes,
            "worker": job.processed_by,
            "progress": job.progress,
            "returnvalue": job.returnvalue,
            "failed_reason": job.failed_reason,
            "stacktrace": list(job.stacktrace),
            "logs": list(self.logs),
            "log_lines": self.log_lines,
            "parent_key": job.parent_key,
            "parent": self.parent and {"queue": self.parent[0], "id": self.parent[1]},
            "children": dict(self.children),
            "deduplication_id": job.deduplication_id,
            "scheduler_id": job.scheduler_id,
            "why": [reason.to_json() for reason in self.why],
        }


def ambiguous(app: App, job_id: str, queues: Iterable[str]) -> click.UsageError:
    """Return the error for a job id that exists in several queues."""
    config = app._config
    with app._broker.pool.client() as client:
        known = find_queues(client, config.prefix, scan=False).names
    untagged = sorted({*known} - {app._broker.keys(name).name for name in _app_names(known, config)})
    found = existing_keys(app, {QueueKeys(config.prefix, name).job(job_id): name for name in untagged})
    others = [f"{name} (--no-queue-hash-tag)" for name in found]
    names = ", ".join(map(in_one_line, [*queues, *others]))  # any client with access to Redis may have chosen them
    return click.UsageError(f"several queues have a job {job_id!r}: {names}; choose one with --queue")


def queues_with_job(app: App, job_id: str, known: Collection[str] = ()) -> tuple[list[str], set[str]]:
    """Return the queues that have a job with this id; if none has, also the names in BullMQ of all queues.

    The known queues are searched first: ``known``, the app's, and those that bulltask has used or that workers process.
    If none of them has the job, the names of further queues are read with ``SCAN``, from up to 400,000 keys on each
    server.
    """
    config = app._config
    named = [config.default_queue, *known, *app.tasks.queues]
    with app._broker.pool.client() as client:
        in_redis = set(find_queues(client, config.prefix, scan=False).names)
        likely = sorted({*named, *_app_names(in_redis, config)} - {""})
        if queues := _with_job(app, job_id, likely):
            return queues, set()
        found = find_queues(client, config.prefix, in_redis)
    if not found.scanned_all:
        echo(
            f"Redis has more than the {overview.MAX_PAGES * 1000:,} keys that were scanned for queue names, so there "
            "may be more queues: choose one with --queue",
            err=True,
        )
    in_redis = set(found.names)
    others = set(_app_names(in_redis, config)) - set(likely)
    return _with_job(app, job_id, sorted(others)), in_redis


def queue_of_job(app: App, job_id: str, queue: str | None = None, known: Collection[str] = ()) -> str | None:
    """Return the queue that has a job: ``queue``, or if that is ``None``, any queue; ``None`` if it has no such job.

    Raises:
        NotFoundError: The queue that has it is not ``queue``, or is stored with a hash tag, and the app's are not, or
            the other way round.
        UsageError: Several queues have a job with this id.
    """
    with_tag = not app._config.queue_hash_tag
    if queue:
        names, others = _with_job(app, job_id, [queue]), {bullmq_name(queue, hash_tag=with_tag)}
    else:
        names, in_redis = queues_with_job(app, job_id, known)
        others = in_redis
    if len(names) > 1:
        raise ambiguous(app, job_id, names)
    if names:
        return names[0]
    if found := queues_spelled_otherwise(app, job_id, others):
        option = "--queue-hash-tag" if with_tag else "--no-queue-hash-tag"
        raise NotFoundError(safe(f"job {job_id!r} is in queue {found[0]!r}: use {option}"))
    if queue and (names := queues_with_job(app, job_id, known)[0]):
        raise NotFoundError(safe(f"job {job_id!r} is not in queue {queue}, but in {', '.join(names)}: use --queue"))
    return None


def queues_spelled_otherwise(app: App, job_id: str, bullmq_names: Collection[str]) -> list[str]:
    """Return those of some queues that have the job, but are not the app's: with a hash tag, or without one."""
    config = app._config
    own = {bullmq_name(name, hash_tag=config.queue_hash_tag) for name in _app_names(bullmq_names, config)}
    others = {*bullmq_names} - own
    return existing_keys(app, {QueueKeys(config.prefix, name).job(job_id): name for name in others})


def chosen_queues(app: App, names: str | None) -> list[str]:
    """Return the queues of ``-Q``, each of which must exist, or all that Redis has."""
    if names is None:
        return known_queues(app)
    return [existing_queue(app, name).name for name in parse_names(names, "-Q")]


def known_queues(app: App, *, tell_others: bool = False) -> list[str]:
    """Return all queues that Redis has, by their names in the app; ``tell_others`` prints which are not the app's."""
    config = app._config
    with app._broker.pool.client() as client:
        found = find_queues(client, config.prefix).names
    names = sorted(_app_names(found, config))
    others = sorted({*found} - {bullmq_name(name, hash_tag=config.queue_hash_tag) for name in names})
    if others and tell_others:
        option = "--no-queue-hash-tag" if config.queue_hash_tag else "--queue-hash-tag"
        echo(f"without {', '.join(map(in_one_line, others))} ({option})", err=True)
    return names


def _with_job(app: App, job_id: str, queues: list[str]) -> list[str]:
    return existing_keys(app, {app._broker.keys(queue).job(job_id): queue for queue in queues})


def _app_names(bullmq_names: Iterable[str], config: Config) -> list[str]:
    """Return the queues' names in the app; queues whose names are invalid in bulltask are left out."""
    named = []
    for name in bullmq_names:
        bare = name_in_app(name, hash_tag=config.queue_hash_tag)
        with suppress(InvalidNameError):  # another client's, with control characters
            if bullmq_name(check_queue_name(bare), hash_tag=config.queue_hash_tag) == name:
                named.append(bare)
    return named


_MESSAGES: Final = {
    Revocation.REVOKED: "revoked: the job has failed and will not run",
    Revocation.RUNNING: "running: the job continues; use --terminate to cancel it",
    Revocation.TERMINATING: "terminating: the job's worker will cancel it",
    Revocation.FINISHED: "finished: the job had already finished",
    Revocation.UNKNOWN: "unknown: the job does not exist",
}
_PARENT_OPTIONS: Final = ("fpof", "idof", "rdof", "cpof")
"""The stored options by which a parent does not wait for a child job that has failed."""
_EXITS: Final = {Revocation.RUNNING: ExitCode.PENDING, Revocation.UNKNOWN: ExitCode.NOT_FOUND}


@job.command("revoke", short_help="Prevent jobs from running, or cancel running jobs.")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@job_queue_option
@click.option("--terminate", is_flag=True, help="Also cancel jobs that are running.")
@operator_options
def revoke(ctx: click.Context, /, *, job_ids: tuple[str, ...], terminate: bool, **options: Any) -> None:
    """Revoke jobs by ID, so that they do not run and are not retried.

    A job that has not started fails immediately, with the reason 'revoked'. A running job continues, unless
    --terminate is given.

    Without --queue, all queues are searched: those of the app and of connected workers first, then the others.

    Exit codes: 0 (each job has finished, or its worker will cancel it), 1 (an error, or a job cannot be revoked), 3 (a
    job is still running), 4 (a job does not exist). If several apply, the smallest one other than 0 is used.
    """

    def revoke_one(app: App, queue: str | None, job_id: str) -> _Outcome:
        outcome = Revocation.UNKNOWN if queue is None else app.queue(queue).revoke(job_id, terminate=terminate)
        message = _MESSAGES[outcome]
        if outcome is Revocation.REVOKED and queue is not None:
            found = app.queue(queue).get_job(job_id)
            if found is not None and (parent := _parent(app, found)) and found.opts.keys().isdisjoint(_PARENT_OPTIONS):
                why = own_command(f"bulltask why {quote(parent[1])} --queue {quote(parent[0])}", ctx, options)
                message += f"; its parent job waits for it forever: {why}"
        return _Outcome(job_id, queue, str(outcome), message, _EXITS.get(outcome, ExitCode.DONE))

    _for_each(ctx, job_ids, options, revoke_one)


@job.command("retry", short_help="Move failed or completed jobs back to waiting.")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@job_queue_option
@click.option("--reset-attempts", is_flag=True, help="Start counting attempts again, as for a new job.")
@operator_options
def retry(ctx: click.Context, /, *, job_ids: tuple[str, ...], reset_attempts: bool, **options: Any) -> None:
    """Move finished jobs back to waiting.

    To retry jobs by state, task or error, use 'bulltask jobs QUEUE --retry'.

    Exit codes: 0 (done), 1 (an error, or a job is not finished), 4 (a job does not exist).
    """

    def retry_one(found: Job) -> None:
        found.retry("completed" if found.get_state() is JobState.COMPLETED else "failed", **resets)

    resets = {"reset_attempts_made": reset_attempts, "reset_attempts_started": reset_attempts}
    _for_each(ctx, job_ids, options, _changing(retry_one, "retried"))


@job.command("promote", short_help="Move delayed jobs to waiting.")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@job_queue_option
@operator_options
def promote(ctx: click.Context, /, *, job_ids: tuple[str, ...], **options: Any) -> None:
    """Move delayed jobs to waiting, so that they can run now.

    Exit codes: 0 (done), 1 (an error, or a job is not delayed), 4 (a job does not exist).
    """
    _for_each(ctx, job_ids, options, _changing(lambda found: found.promote(), "promoted"))


@job.command("remove", short_help="Remove jobs.")
@click.argument("job_ids", metavar="ID...", nargs=-1, required=True)
@job_queue_option
@click.option("--children/--no-children", default=True, help="Also remove their child jobs (default: yes).")
@operator_options
def remove(ctx: click.Context, /, *, job_ids: tuple[str, ...], children: bool, **options: Any) -> None:
    """Remove jobs in any state but active.

    Exit codes: 0 (done), 1 (an error, or a job is active), 4 (a job does not exist).
    """
    _for_each(ctx, job_ids, options, _changing(lambda found: found.remove(children=children), "removed"))


@dataclass(frozen=True, slots=True)
class _Outcome:
    """What happened to a job, in a word and in a sentence."""

    job_id: str
    queue: str | None
    word: str
    message: str
    code: ExitCode = ExitCode.DONE

    def to_json(self) -> dict[str, Any]:
        return {
            "id": self.job_id,
            "queue": self.queue,
            "outcome": self.word,
            "error": self.message if self.code is ExitCode.ERROR else None,
        }


def _changing(change: Callable[[Job], None], word: str) -> Callable[[App, str | None, str], _Outcome]:
    def change_one(app: App, queue: str | None, job_id: str) -> _Outcome:
        found = None if queue is None else app.queue(queue).get_job(job_id)
        if found is None:
            return _Outcome(job_id, queue, "unknown", _MESSAGES[Revocation.UNKNOWN], ExitCode.NOT_FOUND)
        change(found)
        return _Outcome(job_id, queue, word, word)

    return change_one


def _for_each(
    ctx: click.Context,
    job_ids: tuple[str, ...],
    options: Mapping[str, Any],
    change_one: Callable[[App, str | None, str], _Outcome],
) -> NoReturn:
    """Find and change each job, print the outcomes, and exit."""
    outcomes: list[_Outcome] = []
    with closing(load_app_or_broker(ctx, options)) as app:
        for job_id in job_ids:
            queue = queue_of_job(app, job_id, options["queue"])
            try:
                outcome = change_one(app, queue, job_id)
            except JobError as exc:
                outcome = _Outcome(job_id, queue, "rejected", f"rejected: {exc}", ExitCode.ERROR)
            outcomes.append(outcome)
            if not options["as_json"]:
                echo(f"{in_one_line(job_id)}  {outcome.message}", err=outcome.code is ExitCode.ERROR)
    if options["as_json"]:
        print_json({"jobs": [outcome.to_json() for outcome in outcomes]})
    ctx.exit(min({outcome.code for outcome in outcomes} - {ExitCode.DONE}, default=ExitCode.DONE))


@job.command("logs", short_help="Print a job's log.")
@click.argument("job_id", metavar="ID")
@job_queue_option
@click.option("-n", "--lines", type=click.IntRange(min=1), default=MAX_LOG_LINES, help="How many of the newest lines.")
@operator_options
def logs(ctx: click.Context, /, *, job_id: str, lines: int, **options: Any) -> None:
    """Print the newest lines of a job's log.

    Exit codes: 0 (done), 1 (an error), 4 (the job does not exist).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        found = existing_job(app, job_id, options["queue"])
        stored = found.get_logs(0, lines - 1, asc=False)
    texts = list(reversed(stored.lines))
    if options["as_json"]:
        print_json({"id": found.id, "queue": found.queue, "lines": texts, "total": stored.count})
        return
    for text in texts:
        echo(text)
    if len(texts) < stored.count:
        echo(f"the last {len(texts):,} of {stored.count:,} lines", err=True)


def _address(app: App, job_id: str, queue: str | None) -> tuple[str, str | None]:
    """Return the id and the queue in a job's key, such as the ``parent_key`` of another; other ids as they are."""
    config = app._config
    if queue is None and job_id.startswith(f"{config.prefix}:"):
        _, name, its_id = address_of(job_id, config.prefix)
        in_app = name_in_app(name, hash_tag=config.queue_hash_tag)
        if its_id and bullmq_name(in_app, hash_tag=config.queue_hash_tag) == name:
            return its_id, in_app
    return job_id, queue


def existing_job(app: App, job_id: str, queue: str | None) -> Job:
    """Return a job by its id or key, from any queue by default; raises :class:`NotFoundError` if it does not exist."""
    job_id, queue = _address(app, job_id, queue)
    name = queue_of_job(app, job_id, queue)
    found = None if name is None else app.queue(name).get_job(job_id)
    if found is None:
        raise _missing(job_id, queue)
    return found


@job.command("tree", short_help="Show a flow: a job, its child jobs and theirs, with their states.")
@click.argument("job_id", metavar="ID")
@job_queue_option
@click.option("--depth", type=click.IntRange(min=1), default=10, help="Number of levels (default: 10).")
@click.option(
    "--max-children",
    type=click.IntRange(min=1),
    default=20,
    help="How many child jobs of each kind (completed, failed …) are shown for a job (default: 20).",
)
@operator_options
def tree(ctx: click.Context, /, *, job_id: str, depth: int, max_children: int, **options: Any) -> None:
    """Show a flow from the job ID downwards, with the state of each job, and name its parent.

    Exit codes: 0 (done), 1 (an error), 4 (the job does not exist).
    """
    with closing(load_app_or_broker(ctx, options)) as app:
        root = existing_job(app, job_id, options["queue"])
        flow = app.flows().get_flow(root.queue, root.id, depth, max_children)
        if flow is None:
            raise _missing(job_id, root.queue)
        document = _tree(flow)
        parent = _parent(app, root)
        document["parent"] = parent and {"queue": parent[0], "id": parent[1]}
    if options["as_json"]:
        print_json(document)
    else:
        if parent is not None:
            command = own_command(f"bulltask job tree {quote(parent[1])}", ctx, options)
            echo(f"child of job {in_one_line(parent[1])}, queue {in_one_line(parent[0])}: {command}", err=True)
        echo("\n".join(_tree_lines(document)))


def _tree(node: FlowNode[Job]) -> dict[str, Any]:
    found = node.job
    total = sum(found.get_dependencies_count().values())
    return {
        "id": found.id,
        "queue": found.queue,
        "task": found.name,
        "state": str(found.get_state()),
        "failed_reason": found.failed_reason,
        "children": [_tree(child) for child in node.children],
        "children_left_out": max(0, total - len(node.children)),
    }


def _tree_lines(node: dict[str, Any], indent: str = "", branch: str = "") -> Iterator[str]:
    reason = f": {in_one_line(node['failed_reason'], _REASON_WIDTH)}" if node["failed_reason"] else ""
    names = f"{in_one_line(node['task'])} {in_one_line(node['id'])}, queue {in_one_line(node['queue'])}"
    yield f"{indent}{branch}{names}: {node['state']}{reason}"
    below = indent + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
    left_out = node["children_left_out"]
    for number, child in enumerate(node["children"], 1):
        is_last = number == len(node["children"]) and not left_out
        yield from _tree_lines(child, below, "└─ " if is_last else "├─ ")
    if left_out:
        yield f"{below}└─ {left_out:,} more"
