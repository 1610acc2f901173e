"""``bulltask call``, ``result`` and ``shell``: use an app without writing a program."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from contextlib import closing, suppress
from importlib.util import find_spec
from typing import Any, Final

import click

import bulltask
from bulltask.app import App
from bulltask.cli.app_loader import import_tasks, load_app_or_broker
from bulltask.cli.job import existing_job
from bulltask.cli.options import (
    ExitCode,
    duration_option,
    job_queue_option,
    json_argument,
    moment,
    operator_options,
    queue_option,
    redis_options,
)
from bulltask.cli.terminal import echo, in_one_line, print_json
from bulltask.jobs.errors import ResultTimeoutError, did_you_mean
from bulltask.jobs.names import JobState
from bulltask.registry.results import AsyncResult

__all__ = ["call", "result", "shell"]


@click.command("call", short_help="Send a job.")
@click.argument("task", metavar="TASK")
@click.option("-a", "--args", "arguments", metavar="JSON", help="Positional arguments: '[1, 2]'.")
@click.option("-k", "--kwargs", metavar="JSON", help="""Keyword arguments: '{"x": 1}'.""")
@queue_option("The queue (default: the task's, or the app's default queue).")
@duration_option("--countdown", text="Time before the job may run: 90, 10s, 15m, 12h or 7d.")
@click.option("--eta", type=moment, metavar="TIME", help="Earliest time to run: 2026-11-22T14:00, in UTC.")
@duration_option("--expires", text="Time after which the job fails instead of starting.")
@click.option("--priority", type=int, help="1 (first) to 2097151 (last); 0 (default) runs before all.")
@click.option("--job-id", help="The job's id; if a job with this id exists, none is added.")
@click.option("--wait", is_flag=True, help="Wait for the job and print its result.")
@duration_option("--timeout", text="With --wait: how long to wait (default: without a limit).")
@operator_options
def call(ctx: click.Context, /, *, task: str, **options: Any) -> None:
    """Send a job for TASK, and print its id; with --wait, its result.

    With -A, the task's options and type hints apply; -b alone sends a job of any name.

    Exit codes: 0 (sent; with --wait: completed), 1 (an error, or the job failed), 2 (invalid usage), 3 (the job has not
    finished after --timeout).
    """
    if options["timeout"] is not None and not options["wait"]:
        raise click.UsageError("--timeout needs --wait")
    arguments = json_argument(options["arguments"], "--args", [])
    kwargs = json_argument(options["kwargs"], "--kwargs", {})
    if not isinstance(arguments, list) or not isinstance(kwargs, dict):
        raise click.UsageError("--args must be a JSON array, and --kwargs a JSON object")
    with closing(_app(ctx, options)) as app:
        if app.tasks and task not in app.tasks:
            echo(f"note: the app has no task {task!r}{did_you_mean(task, app.tasks)}", err=True)
        names = ("queue", "countdown", "eta", "expires", "priority", "job_id")
        given = {name: options[name] for name in names if options[name] is not None}
        try:
            sent = app.send_task(task, arguments, kwargs, **given)
        except TypeError as exc:  # the arguments do not match the task's
            raise click.UsageError(str(exc)) from exc
        if not options["wait"]:
            if options["as_json"]:
                print_json({"id": sent.id, "queue": sent.queue})
            else:
                echo(sent.id)
            return
        ctx.exit(_print_result(sent, options))


@click.command("result", short_help="Print a job's result.")
@click.argument("job_id", metavar="ID")
@job_queue_option
@click.option("--traceback", is_flag=True, help="Print the traceback of a failed job.")
@click.option("--wait", is_flag=True, help="Wait until the job has finished.")
@duration_option("--timeout", text="With --wait: how long to wait (default: without a limit).")
@operator_options
def result(ctx: click.Context, /, *, job_id: str, queue: str | None, **options: Any) -> None:
    """Print the result of the job ID as JSON, or why it failed.

    Exit codes: 0 (completed), 1 (failed, or an error), 2 (invalid usage), 3 (not finished), 4 (there is no such job).
    """
    if options["timeout"] is not None and not options["wait"]:
        raise click.UsageError("--timeout needs --wait")
    with closing(_app(ctx, options)) as app:
        ctx.exit(_print_result(app.result(job_id, existing_job(app, job_id, queue).queue), options))


def _app(ctx: click.Context, options: Mapping[str, Any]) -> App:
    """Load the app, with its tasks if there is ``-A``."""
    app = load_app_or_broker(ctx, options)
    if spec := options["app"] or (ctx.obj or {}).get("app"):
        import_tasks(app, spec)
    return app


def _print_result(handle: AsyncResult[Any], options: Mapping[str, Any]) -> ExitCode:
    """Print a job's outcome, with ``--wait`` when it has finished; return the exit code."""
    if options["wait"]:
        with suppress(ResultTimeoutError):  # the snapshot says in which state the job is
            handle.get(options["timeout"], propagate=False)
    snapshot = handle.snapshot()
    completed, failed = snapshot.state is JobState.COMPLETED, snapshot.state is JobState.FAILED
    trace = "\n".join(snapshot.stacktrace[-1:]) if failed else ""
    if options["as_json"]:
        outcome = {
            "state": str(snapshot.state),
            "result": _plain(snapshot.returnvalue) if completed else None,
            "error": snapshot.failed_reason or None,
            "traceback": trace or None,
        }
        print_json({"id": handle.id, "queue": handle.queue, **outcome})
    elif completed:
        echo(json.dumps(_plain(snapshot.returnvalue), ensure_ascii=False))
    elif failed:
        echo(f"failed: {snapshot.failed_reason}", err=True)
        if options.get("traceback") and trace:
            echo(trace.rstrip(), err=True)
    else:
        echo(f"not finished: {snapshot.state}; 'bulltask why {in_one_line(handle.id)}' says why", err=True)
    return ExitCode.DONE if completed else ExitCode.ERROR if failed else ExitCode.PENDING


def _plain(value: Any) -> Any:
    """Return a result that JSON cannot represent, such as a pickled object, as its ``repr``."""
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return repr(value)
    return value


@click.command("shell", short_help="Open a Python shell with the app.")
@redis_options
@click.option(
    "--python", "plain", is_flag=True, help="Use Python's own shell, even if IPython or another is installed."
)
@click.pass_context
def shell(ctx: click.Context, /, *, plain: bool, **options: Any) -> None:
    """Open a Python shell with app, its tasks by their functions' names, and queue (the default queue).

    It is IPython, ptpython or bpython if one of them is installed, and Python's otherwise.
    """
    app = _app(ctx, options)
    names: dict[str, Any] = {name.rpartition(".")[2]: task for name, task in app.tasks.items()}
    names |= {"app": app, "bulltask": bulltask, "queue": app.queue(app._config.default_queue)}
    banner = f"app = {app!r}, queue = {names['queue']!r}, bulltask"
    with closing(app):
        for module, embed in () if plain else _SHELLS:
            if find_spec(module.partition(".")[0]) is not None:
                embed(importlib.import_module(module), names, banner)
                return
        import code  # noqa: PLC0415 - only here
        import readline  # noqa: F401, PLC0415 - edits lines

        code.interact(banner, local=names, exitmsg="")


def _ptpython(module: Any, names: dict[str, Any], banner: str) -> None:
    echo(banner)
    module.embed(names)


_SHELLS: Final[tuple[tuple[str, Callable[[Any, dict[str, Any], str], object]], ...]] = (
    ("IPython", lambda module, names, banner: module.embed(user_ns=names, banner1=banner, colors="neutral")),
    ("ptpython.repl", _ptpython),
    ("bpython", lambda module, names, banner: module.embed(names, banner=banner)),
)
