"""``bulltask worker``: run a worker."""

from __future__ import annotations

import sys
from typing import Any, Final

import click

from bulltask.cli.app_loader import load_app, reporting_import_errors
from bulltask.cli.options import app_options
from bulltask.config.config import LOG_LEVELS
from bulltask.config.parsers import parse_names
from bulltask.config.urls import SecretUrl
from bulltask.jobs.names import check_queue_name

__all__ = ["SETTINGS", "worker"]

SETTINGS: Final = {
    "concurrency": "worker_concurrency",
    "pool": "worker_pool",
    "async_concurrency": "worker_async_concurrency",
    "autoscale": "worker_autoscale",
    "max_tasks_per_child": "worker_max_tasks_per_child",
    "max_memory_per_child": "worker_max_memory_per_child",
    "hard_memory_limit": "worker_hard_memory_limit",
    "hostname": "worker_name",
    "start_method": "worker_start_method",
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
    "shutdown_notice": "shutdown_notice",
    "soft_time_limit": "task_soft_time_limit",
    "time_limit": "task_time_limit",
    "limiter": "limiter",
    "remove_on_complete": "remove_on_complete",
    "remove_on_fail": "remove_on_fail",
    "metrics_max_data_points": "metrics_max_data_points",
}
"""The setting of each flag. A flag that is not given does not change its setting."""


@click.command("worker", short_help="Run a worker.")
@app_options
@click.option(
    "-Q",
    "--queues",
    help="Queues to process, comma-separated (default: task_queues, or those of the app's tasks and routes).",
)
@click.option("-X", "--exclude-queues", help="Queues not to process, comma-separated.")
@click.option(
    "-c", "--concurrency", help="Number of child processes, or threads; auto: one per CPU core (default: auto)."
)
@click.option(
    "-P",
    "--pool",
    metavar="prefork|threads",
    help="Run sync tasks in child processes, or in threads of one child process (default: prefork).",
)
@click.option(
    "--autoscale",
    metavar="MAX,MIN",
    help="Scale the number of child processes with the load, instead of -c: 10,3 means 3 to 10 (default: off).",
)
@click.option(
    "--async-concurrency", type=int, help="Async jobs that may run concurrently in each child process (default: 100)."
)
@click.option(
    "--max-tasks-per-child",
    type=int,
    metavar="N",
    help="Replace a child process after it has acquired N jobs (default: unlimited).",
)
@click.option(
    "--max-memory-per-child",
    metavar="SIZE",
    help="Replace a child process whose resident memory exceeds SIZE, once its jobs have finished. SIZE is in KiB or "
    "has a unit: 512M, 2G (default: unlimited).",
)
@click.option(
    "--hard-memory-limit",
    metavar="SIZE",
    help="Kill a child process whose resident memory exceeds SIZE while it is running a job; its jobs run again, and "
    "this counts as a crash (default: unlimited).",
)
@click.option(
    "--start-method",
    type=click.Choice(["auto", "fork", "spawn"]),
    help="How child processes are started, as in multiprocessing; auto: fork where possible (default: auto).",
)
@click.option("-n", "--hostname", metavar="NAME", help="Set the worker's name; its id is NAME@HOST-PID-RANDOM.")
@click.option(
    "-l",
    "--loglevel",
    type=click.Choice(LOG_LEVELS, case_sensitive=False),
    help="Minimum level of log lines (default: info).",
)
@click.option("-I", "--include", help="Modules with tasks to import, comma-separated, in addition to the app's.")
@click.option("--metrics-port", type=int, help="Port for Prometheus metrics (default: no metrics).")
@click.option("--metrics-host", help="Address to bind the metrics port to (default: 127.0.0.1).")
@click.option(
    "--lock-duration",
    type=float,
    help="Seconds after which a job's lock expires if this worker does not renew it (default: 30).",
)
@click.option("--stalled-interval", type=float, help="Seconds between checks for stalled jobs (default: 30).")
@click.option(
    "--max-stalled-count",
    type=int,
    help="How many times a job may stall and run again; the next stall fails it (default: 1).",
)
@click.option(
    "--skip-stalled-check",
    is_flag=True,
    default=None,
    help="Do not check for stalled jobs; another worker of each queue must.",
)
@click.option(
    "--max-crashes",
    type=int,
    help="Fail a job that has crashed this many child processes, provided it was the only job running in the last one"
    " (default: 2).",
)
@click.option(
    "--max-started-attempts",
    type=int,
    help="Maximum number of times a job may start, including attempts that do not use up a retry (after a crash, stall"
    " or release; default: unlimited).",
)
@click.option("--burst", is_flag=True, help="Stop when no job in the queues can run now.")
@click.option(
    "--max-jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after N jobs have been started and have finished.",
)
@click.option("--paused", is_flag=True, default=None, help="Start paused; 'kill -CONT PID' resumes.")
@click.option(
    "--shutdown-timeout",
    type=float,
    help="How many seconds a warm shutdown waits for running jobs before it releases them (default: 30).",
)
@click.option(
    "--shutdown-notice",
    type=float,
    help="Interrupt tasks this many seconds before the end of that time, so that they can clean up (default: 5).",
)
@click.option(
    "--soft-time-limit",
    type=float,
    help="Raise SoftTimeLimitExceeded in a task after this many seconds (default: no limit).",
)
@click.option(
    "--time-limit",
    type=float,
    help="End a task after this many seconds, if necessary by killing its process (default: no limit).",
)
@click.option(
    "--limiter",
    help="Maximum rate at which a queue's jobs start: 100/m, or by queue: mail=100/m,reports=1/10s,5/s; the last "
    "rate, without a name, applies to all other queues (default: no limit).",
)
@click.option(
    "--remove-on-complete",
    help="Retention of completed jobs that were sent without this option: true (remove), false (keep), a count, or "
    "age=3600,count=100 (default: false).",
)
@click.option("--remove-on-fail", help="The same for failed jobs (default: false).")
@click.option(
    "--metrics-max-data-points",
    type=int,
    help="How many minutes of BullMQ's metrics are kept in Redis (default: no metrics).",
)
@click.pass_context
def worker(
    ctx: click.Context,
    /,
    app: str | None,
    broker: SecretUrl | None,
    queues: str | None,
    exclude_queues: str | None,
    include: str | None,
    **flags: Any,
) -> None:
    """Run a worker: a supervisor and its child processes.

    TERM and Ctrl-C stop the worker after its running jobs have finished (warm shutdown). QUIT kills its child
    processes and releases their jobs (cold shutdown).
    """
    if sys.platform == "win32":
        raise click.ClickException(
            "a worker does not run on Windows, because it forks: run it in WSL 2 or in a Linux container; programs on "
            "Windows can send to it"
        )
    from bulltask.worker.child_pool import limit_native_threads  # noqa: PLC0415
    from bulltask.worker.run import StopConditions, default_queues, run_worker  # noqa: PLC0415 - imported late, so that --help is fast
    from bulltask.worker.supervisor import ProcessSpec  # noqa: PLC0415

    process_spec = ProcessSpec()  # before the app is imported
    limit_native_threads()
    app_spec, loaded_app = load_app(ctx, app, broker)
    for flag, setting in SETTINGS.items():
        if flags.get(flag) is not None:
            loaded_app.conf.override(setting, flags[flag])
    if include:
        loaded_app.conf.override(
            "include", [*parse_names(loaded_app.conf.include, "include"), *parse_names(include, "-I")]
        )
    with reporting_import_errors("the modules with tasks (-I, include, imports, autodiscover_tasks)"):
        loaded_app._load_tasks()
    excluded = _queues(exclude_queues, "-X")
    processed = [name for name in (_queues(queues, "-Q") or default_queues(loaded_app)) if name not in excluded]
    if not processed:
        raise click.UsageError("no queue to process: -X excludes all of them")
    until = StopConditions(burst=flags["burst"], max_jobs=flags["max_jobs"])
    ctx.exit(run_worker(loaded_app, processed, app_spec=app_spec or None, process_spec=process_spec, until=until))


def _queues(text: str | None, flag: str) -> tuple[str, ...]:
    return tuple(map(check_queue_name, parse_names(text or "", flag)))
