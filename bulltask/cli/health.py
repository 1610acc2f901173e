"""``bulltask health``: whether a worker is alive, or ready, as an exit code."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from bulltask.cli.options import ExitCode, json_option
from bulltask.cli.terminal import echo, print_json
from bulltask.worker.health import find_workers

if TYPE_CHECKING:
    from bulltask.worker.health import HealthPage

__all__ = ["health"]


@click.command("health", short_help="Check whether the workers of this machine or container are healthy.")
@click.argument("check", type=click.Choice(["live", "ready"]), default="ready")
@click.option("-w", "--worker", help="Only the worker with this id, or this --name.")
@click.option("--pid", type=int, help="Only the worker whose supervisor has this process id.")
@json_option
@click.pass_context
def health(ctx: click.Context, /, *, check: str, worker: str | None, pid: int | None, as_json: bool) -> None:
    """Check the workers of this machine or container: exit code 0 if all are healthy, 1 if not, 69 if there is none.

    live: the supervisor makes progress, whatever Redis and the tasks do. ready: the worker can take jobs now.
    Neither loads an app nor connects to Redis: the command reads the worker's shared memory.
    """
    if sys.platform != "linux":
        raise click.ClickException("this needs Linux: ask /livez or /readyz of the worker's metrics port instead")
    pages = [page for page in find_workers() if _is_meant(page, worker, pid)]
    found = {page: page.not_alive() if check == "live" else page.not_ready() for page in pages}
    if not found:
        echo("no worker of this user runs here" + (" with this name or pid" if worker or pid else ""), err=True)
        code = ExitCode.NO_ANSWER
    else:
        code = ExitCode.ERROR if any(found.values()) else ExitCode.DONE
    if as_json:
        workers = [
            {"id": page.worker_id, "pid": page.pid, "ok": not problems, "problems": problems}
            for page, problems in found.items()
        ]
        print_json({"check": check, "ok": code == ExitCode.DONE, "workers": workers})
    else:
        what = "alive" if check == "live" else "ready"
        for page, problems in found.items():
            echo(f"{page.worker_id}: {f'not {what}: ' if problems else what}{'; '.join(problems)}")
    ctx.exit(code)


def _is_meant(page: HealthPage, worker: str | None, pid: int | None) -> bool:
    worker_id = page.worker_id
    return pid in {None, page.pid} and worker in {None, worker_id, worker_id.rpartition("@")[0] or None}
