"""``bulltask worker``: reads the flags and runs a worker."""

from __future__ import annotations

from typing import Any, Final

import click

from bulltask.cli.loading import app_options, load_app
from bulltask.config.parsers import names_of
from bulltask.config.settings import LOG_LEVELS
from bulltask.config.urls import SecretUrl
from bulltask.jobs.names import check_queue_name

__all__ = ["command"]

SETTINGS: Final = {
    "concurrency": "worker_concurrency",
    "async_concurrency": "worker_async_concurrency",
    "hostname": "worker_name",
    "pool_start_method": "worker_start_method",
    "loglevel": "loglevel",
    "metrics_port": "metrics_port",
    "metrics_host": "metrics_host",
    "lock_duration": "lock_duration",
    "stalled_interval": "stalled_interval",
    "max_stalled_count": "max_stalled_count",
    "skip_stalled_check": "skip_stalled_check",
    "max_crashes": "max_crashes",
    "max_started_attempts": "max_started_attempts",
    "paused": "worker_paused",
    "shutdown_timeout": "shutdown_timeout",
    "soft_time_limit": "task_soft_time_limit",
    "time_limit": "task_time_limit",
    "limiter": "limiter",
    "remove_on_complete": "remove_on_complete",
    "remove_on_fail": "remove_on_fail",
    "metrics_max_data_points": "metrics_max_data_points",
}
"""Flag to setting; a flag that was not given leaves the setting alone."""


@click.command("worker")
@app_options
@click.option("-Q", "--queues", help="Queues to serve, comma-separated; default: those of the app's tasks.")
@click.option("-X", "--exclude-queues", help="Queues to leave out, comma-separated.")
@click.option("-c", "--concurrency", help="Child processes, or 'auto' for one a core.")
@click.option("--async-concurrency", type=int, help="Async jobs at once in each child (100).")
@click.option("--pool-start-method", type=click.Choice(["auto", "fork", "spawn"]), help="How children start (auto).")
@click.option("-n", "--hostname", help="Name of this worker.")
@click.option(
    "-l", "--loglevel", type=click.Choice(LOG_LEVELS, case_sensitive=False), help="Least level that is logged."
)
@click.option("-I", "--include", help="Modules to import for their tasks, comma-separated.")
@click.option("--metrics-port", type=int, help="Serve Prometheus metrics here; off if not given.")
@click.option("--metrics-host", help="Address of the metrics (127.0.0.1).")
@click.option("--lock-duration", type=float, help="Seconds a job's lock lasts unless renewed (30).")
@click.option("--stalled-interval", type=float, help="Seconds between checks for stalled jobs (30).")
@click.option("--max-stalled-count", type=int, help="Stalls that a job survives; one more fails it (1).")
@click.option("--skip-stalled-check", is_flag=True, default=None, help="Leave that check to other workers.")
@click.option("--max-crashes", type=int, help="Dead children after which a job fails (2).")
@click.option("--max-started-attempts", type=int, help="Times that a job may be taken; once more fails it (no limit).")
@click.option("--paused", is_flag=True, default=None, help="Take no jobs until a CONT: kill -CONT PID.")
@click.option("--shutdown-timeout", type=float, help="Seconds running jobs have at a warm stop (30).")
@click.option("--soft-time-limit", type=float, help="Seconds after which a task that still runs is told (never).")
@click.option("--time-limit", type=float, help="Seconds after which it is ended, and its attempt has failed (never).")
@click.option("--limiter", help="Most jobs started in a time: 100/m, or by queue: mail=100/m,reports=1/10s,5/s.")
@click.option("--remove-on-complete", help="Keep of jobs that name none: true, false, a number, age=3600,count=100.")
@click.option("--remove-on-fail", help="The same for jobs that fail.")
@click.option("--metrics-max-data-points", type=int, help="Minutes of BullMQ's metrics to keep; off if not given.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    app: str | None,
    broker: SecretUrl | None,
    queues: str | None,
    exclude_queues: str | None,
    include: str | None,
    **flags: Any,
) -> None:
    """Run a worker: a supervisor and its children. TERM and Ctrl-C stop it when its jobs are done, QUIT at once."""
    from bulltask.worker.run import default_queues, run_worker  # noqa: PLC0415 - so that --help stays quick
    from bulltask.worker.supervisor.launch import start_no_threads  # noqa: PLC0415
    from bulltask.worker.supervisor.origin import Origin  # noqa: PLC0415

    origin = Origin()  # before the app is imported
    start_no_threads()
    spec, found = load_app(ctx, app, broker)
    for flag, setting in SETTINGS.items():
        if flags.get(flag) is not None:
            found.conf.override(setting, flags[flag])
    if include:
        found.conf.override("include", [*names_of(found.conf.include, "include"), *names_of(include, "-I")])
    found.load_tasks()
    left_out = _queues(exclude_queues, "-X")
    served = [name for name in (_queues(queues, "-Q") or default_queues(found)) if name not in left_out]
    if not served:
        raise click.UsageError("no queue is left to serve: -X leaves out all of them")
    ctx.exit(run_worker(found, served, spec=spec, origin=origin))


def _queues(text: str | None, flag: str) -> tuple[str, ...]:
    return tuple(map(check_queue_name, names_of(text or "", flag)))
