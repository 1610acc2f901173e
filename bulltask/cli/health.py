"""``bulltask health``: whether a worker is alive, or ready, as an exit code."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import click

from bulltask.cli.options import ExitCode, operator_options
from bulltask.cli.terminal import echo, in_one_line, print_json
from bulltask.worker.health import find_workers, no_child_runs

__all__ = ["health"]

_Found = tuple[str, int, list[str]]
"""A worker's id, its supervisor's pid, and what is wrong."""


@click.command("health", short_help="Check whether workers are healthy.")
@click.argument("check", type=click.Choice(["live", "ready"]), default="ready")
@click.option("-w", "--worker", help="Only the worker with this ID, or this name (-n).")
@click.option("--pid", type=int, help="Only the worker whose supervisor has this process id.")
@click.option("--redis", "by_redis", is_flag=True, help="Ask Redis (-A or -b) about workers on any machine instead.")
@operator_options
def health(
    ctx: click.Context,
    /,
    *,
    check: str,
    worker: str | None,
    pid: int | None,
    by_redis: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Check the workers of this machine or container: exit code 0 if all are healthy, 1 if not, 69 if there is none.

    live: the supervisor makes progress, whatever Redis and the tasks do. ready: the worker can take jobs now.
    Without --redis, no app is loaded, and Redis is not asked: the command reads the workers' shared memory.

    With --redis, a worker that has written no state for 15 s is not alive; when it is no longer connected, either, it
    does not exist.
    """
    if not by_redis and sys.platform != "linux":
        raise click.ClickException("this needs Linux: ask /livez or /readyz of the worker's metrics port instead")
    is_live = check == "live"
    found = [
        (worker_id, its_pid, problems)
        for worker_id, its_pid, problems in (_in_redis(ctx, options, is_live) if by_redis else _here(is_live))
        if pid in {None, its_pid} and worker in {None, worker_id, worker_id.rpartition("@")[0] or None}
    ]
    code = ExitCode.ERROR if any(problems for _, _, problems in found) else ExitCode.DONE
    if not found:
        where = "" if by_redis else " of this user on this machine"
        echo(f"no worker{where}" + (" with this name or pid" if worker or pid else ""), err=True)
        code = ExitCode.NO_ANSWER
    if as_json:
        workers = [
            {"id": worker_id, "pid": its_pid, "ok": not problems, "problems": problems}
            for worker_id, its_pid, problems in found
        ]
        print_json({"check": check, "ok": code == ExitCode.DONE, "workers": workers})
    else:
        what = "alive" if is_live else "ready"
        for worker_id, _, problems in found:
            echo(f"{in_one_line(worker_id)}  {f'not {what}: ' if problems else what}{'; '.join(problems)}")
    ctx.exit(code)


def _here(is_live: bool) -> Iterator[_Found]:
    for page in find_workers():
        yield page.worker_id, page.pid, page.not_alive() if is_live else page.not_ready()


def _in_redis(ctx: click.Context, options: dict[str, Any], is_live: bool) -> Iterator[_Found]:
    from bulltask.cli.app_loader import load_app_or_broker  # noqa: PLC0415
    from bulltask.cli.queues import keys_of  # noqa: PLC0415
    from bulltask.queue.overview import SILENT, read_fleet  # noqa: PLC0415
    from bulltask.transport.workers import pid_of_worker  # noqa: PLC0415

    with closing(load_app_or_broker(ctx, options)) as app, app._broker.pool.client() as client:
        client.connect()
        fleet = read_fleet(client, keys_of(app, client, None, scan=False)[0], app._broker.clock.now_ms())
    for worker_id, state in sorted(fleet.states.items()):
        if state is None:
            yield worker_id, pid_of_worker(worker_id), [SILENT]
        elif state.is_short and not is_live:
            yield worker_id, state.pid, ["its state is in a queue that cannot be read"]
        else:
            problem = ""
            if state.state != "run":
                problem = "it is paused" if state.state == "paused" else "it is stopping"
            elif all(child.state != "run" for child in state.children):
                stopped = (child.pid for child in state.children if child.state == "stopped")
                problem = no_child_runs(state.concurrency, next(stopped, 0))
            yield worker_id, state.pid, [problem] if problem and not is_live else []
