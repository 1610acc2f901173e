"""``bulltask worker``: run a worker."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import click

from bulltask.cli.app_loader import load_app, reporting_import_errors
from bulltask.cli.options import app_options
from bulltask.config.config import SETTINGS
from bulltask.config.parsers import parse_names
from bulltask.config.urls import SecretUrl
from bulltask.jobs.names import check_queue_name

__all__ = ["worker"]

F = TypeVar("F", bound=Callable[..., Any])


def setting_options(function: F) -> F:
    """Add the options that settings declare. One that is not given does not change its setting."""
    for declared in reversed([*SETTINGS.values()]):
        if declared.flag is None:
            continue
        kind = declared.flag.type
        function = click.option(
            *declared.flag.names.split(),
            declared.name,
            type=click.Choice(kind, case_sensitive=False) if isinstance(kind, tuple) else kind,
            is_flag=kind is bool,
            default=None,
            metavar=declared.flag.metavar,
            help=declared.flag.help,
        )(function)
    return function


@click.command("worker", short_help="Run a worker.")
@app_options
@click.option(
    "-Q",
    "--queues",
    help="Queues to process, comma-separated (default: task_queues, or those of the app's tasks and routes).",
)
@click.option("-X", "--exclude-queues", help="Queues not to process, comma-separated.")
@click.option("-I", "--include", help="Modules with tasks to import, comma-separated, in addition to the app's.")
@click.option("--burst", is_flag=True, help="Stop when no job in the queues can run now.")
@click.option(
    "--max-jobs",
    type=click.IntRange(min=1),
    metavar="N",
    help="Stop after N jobs have been started and have finished.",
)
@setting_options
@click.pass_context
def worker(
    ctx: click.Context,
    /,
    *,
    app: str | None,
    broker: SecretUrl | None,
    queues: str | None,
    exclude_queues: str | None,
    include: str | None,
    burst: bool,
    max_jobs: int | None,
    **settings: Any,
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
    gc.disable()  # a collection during these imports would free nothing, and take a tenth of the time
    from bulltask.worker.child_pool import limit_native_threads  # noqa: PLC0415
    from bulltask.worker.run import StopConditions, default_queues, run_worker  # noqa: PLC0415 - imported late, so that --help is fast
    from bulltask.worker.supervisor import ProcessSpec  # noqa: PLC0415

    gc.freeze()  # nor would later ones free anything of these modules: the one before the first fork takes 2 ms, not 20
    gc.enable()
    process_spec = ProcessSpec()  # before the app is imported
    limit_native_threads()
    app_spec, loaded_app = load_app(ctx, app, broker)
    for name, value in settings.items():
        if value is not None:
            loaded_app.conf.override(name, value)
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
    until = StopConditions(burst=burst, max_jobs=max_jobs)
    ctx.exit(run_worker(loaded_app, processed, app_spec=app_spec or None, process_spec=process_spec, until=until))


def _queues(text: str | None, flag: str) -> tuple[str, ...]:
    return tuple(map(check_queue_name, parse_names(text or "", flag)))
