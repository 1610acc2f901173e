"""``bulltask workers``: which workers there are, and what each of their children runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.options import ExitCode, operator_options, queues_option
from bulltask.cli.queues import keys_of
from bulltask.cli.terminal import as_table, duration_text, echo, in_one_line, iso, print_json
from bulltask.jobs import codec
from bulltask.jobs.names import name_in_app
from bulltask.queue.overview import SILENT, ConnectedWorker, Fleet, read_fleet
from bulltask.transport.call import Call, SyncClient, command
from bulltask.transport.workers import WorkerChild, WorkerJob, WorkerState

__all__ = ["OTHERS_UNKNOWN", "task_names", "worker_pages", "workers", "workers_json"]

OTHERS_UNKNOWN: Final = "Workers that do not report their state are unknown: CLIENT LIST is not permitted."
_SHOWN_JOBS: Final = 5
_Names = Mapping[tuple[str, str], str]


@click.command("workers", short_help="List the workers, and what they run.")
@queues_option
@operator_options
def workers(ctx: click.Context, /, *, queues: str | None, **options: Any) -> None:
    """List the workers with their queues, children, memory and running jobs.

    Workers write their state to Redis every few seconds, and when it changes. Those of Node.js do
    not: they are listed by their connections.

    Exit codes: 0 (there are workers), 1 (an error), 69 (there are none).
    """
    with closing(load_app_or_broker(ctx, options)) as app, app._broker.pool.client() as client:
        client.connect()
        keys = keys_of(app, client, queues, scan=False)[0]  # queues with workers are registered, or connected
        now_ms = app._broker.clock.now_ms()
        fleet = read_fleet(client, keys, now_ms)
        tasks = task_names(client, app, fleet)
    if options["as_json"]:
        print_json(workers_json(app, fleet, tasks, now_ms))
    else:
        if pages := list(worker_pages(app, fleet, tasks, now_ms)):
            echo("\n\n".join(pages))
        if fleet.others is None:
            echo(OTHERS_UNKNOWN, err=True)
    if not fleet.states and not fleet.others:
        echo("No workers: start one with 'bulltask worker -A APP'.", err=True)
        ctx.exit(ExitCode.NO_ANSWER)


def task_names(client: SyncClient, app: App, fleet: Fleet) -> _Names:
    """Return the tasks of the running jobs, by queue and id."""
    jobs = {
        (job.queue, job.id)
        for state in fleet.states.values()
        if state is not None
        for child in state.children
        for job in child.jobs
        if job.id
    }
    calls: list[Call[bytes | None]] = [
        command("HGET", app._broker.keys(queue).job(job_id), "name") for queue, job_id in jobs
    ]
    names = client.run_many(calls) if calls else []
    return {job: codec.decode_text(name) for job, name in zip(jobs, names, strict=True) if name is not None}


def worker_pages(app: App, fleet: Fleet, tasks: _Names, now_ms: int) -> Iterator[str]:
    """Yield the lines about each worker, and about all workers that do not report their state."""
    for worker_id, state in sorted(fleet.states.items()):
        if state is None or state.is_short:
            why = f"unknown: {SILENT}" if state is None else "unknown: its state is in a queue that cannot be read"
            yield f"{in_one_line(worker_id)}  {why}"
        else:
            yield "\n".join(_worker(state, tasks, now_ms))
    others = fleet.others or ()
    if others:
        hash_tag = app._config.queue_hash_tag
        rows = [
            (
                worker.name or "(no name)",
                name_in_app(worker.queue, hash_tag=hash_tag),
                worker.address,
                duration_text(worker.age_s),
            )
            for worker in sorted(others, key=lambda worker: (worker.queue, worker.name, worker.address))
        ]
        table = as_table(("name", "queue", "address", "connected for"), rows)
        yield f"Workers that do not report their state (Node.js):\n{table}"


def _worker(state: WorkerState, tasks: _Names, now_ms: int) -> Iterator[str]:
    up = duration_text((now_ms - state.started_ms) / 1000)
    permits = "" if state.permits is None else f", may start {state.permits} more jobs"
    yield f"{in_one_line(state.id)}  {state.state}{permits}"
    queues = ", ".join(f"{name} (cancelled)" if name in state.cancelled else name for name in state.queues)
    yield f"  {in_one_line(f'app {state.app}, queues {queues}')}"
    process = f"bulltask {state.version}, Python {state.python}, pid {state.pid} on {state.host}, up {up}"
    yield f"  {in_one_line(process)}"
    missing = "" if len(state.children) == state.concurrency else f" of {state.concurrency}"
    children = "child" if len(state.children) == state.concurrency == 1 else "children"
    yield f"  {len(state.children)}{missing} {children}, {state.busy} of {state.slots} slots busy"
    rows = [(str(child.pid), _memory(child.rss_kib), child.state) for child in state.children]
    if rows:
        notes = ["\n  ".join(_jobs(child, tasks, now_ms)) for child in state.children]
        yield from (f"    {line}" for line in as_table(("pid", "memory", "state"), rows, notes).splitlines())
    if state.jobs_left_out:
        yield f"    {state.jobs_left_out} further jobs"


def _jobs(child: WorkerChild, tasks: _Names, now_ms: int) -> list[str]:
    shown = [_job(job, tasks, now_ms) for job in child.jobs[:_SHOWN_JOBS]]
    more = len(child.jobs) - len(shown)
    return [*shown, *([f"{more} more"] if more else [])]


def _job(job: WorkerJob, tasks: _Names, now_ms: int) -> str:
    state = "" if job.state == "active" else f", {job.state}"
    name = tasks.get((job.queue, job.id), "?")
    age = duration_text(max(0, now_ms - job.since_ms) / 1000)
    return in_one_line(f"{name} {job.id or '(id unknown)'} in {job.queue}{state}, {age}")


def _memory(rss_kib: int | None) -> str:
    return "unknown" if rss_kib is None else f"{rss_kib / 1024:.0f} MiB"


def workers_json(app: App, fleet: Fleet, tasks: _Names, now_ms: int) -> dict[str, Any]:
    """Return the workers as a JSON document has them."""
    hash_tag = app._config.queue_hash_tag
    return {
        "at": iso(now_ms),
        "workers": [
            _worker_json(
                worker_id, state, [name_in_app(name, hash_tag=hash_tag) for name in fleet.queues_of[worker_id]], tasks
            )
            for worker_id, state in sorted(fleet.states.items())
        ],
        "others": None if fleet.others is None else [_other_json(worker, hash_tag) for worker in fleet.others],
    }


def _worker_json(worker_id: str, state: WorkerState | None, queues: Sequence[str], tasks: _Names) -> dict[str, Any]:
    if state is None or state.is_short:
        return {"id": worker_id, "state": "unknown", "queues": list(queues)}
    stored = state.to_dict()
    return {
        **{name: stored[name] for name in "id state queues cancelled host pid app version python".split()},
        "started_at": iso(state.started_ms),
        "seen_at": iso(state.at_ms),
        **{name: stored[name] for name in "concurrency slots busy permits".split()},
        "children": [
            {
                "pid": child.pid,
                "rss_bytes": None if child.rss_kib is None else child.rss_kib * 1024,
                "state": child.state,
                "jobs": [
                    {
                        "id": job.id or None,
                        "queue": job.queue,
                        "task": tasks.get((job.queue, job.id)),
                        "state": job.state,
                        "since": iso(job.since_ms),
                    }
                    for job in child.jobs
                ],
            }
            for child in state.children
        ],
        **{name: stored[name] for name in "jobs_left_out tasks tasks_left_out rate_limits".split()},
        "limiter": {
            queue: {"max": limit.get("max"), "duration": limit.get("duration_ms", 0) / 1000}
            for queue, limit in state.limiter.items()
        },
        "lock_duration": state.lock_ms / 1000,
        "stalled_interval": None if state.stalled_interval_ms is None else state.stalled_interval_ms / 1000,
        "broker": state.broker,
    }


def _other_json(worker: ConnectedWorker, hash_tag: bool) -> dict[str, Any]:
    queue = name_in_app(worker.queue, hash_tag=hash_tag)
    return {"name": worker.name or None, "queue": queue, "address": worker.address, "connected_for": worker.age_s}
