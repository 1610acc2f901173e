"""``bulltask control`` and ``bulltask inspect``: give orders to live workers, and ask them.

Each subcommand sends one order, of :class:`bulltask.worker.orders.Orders`, and prints who has answered and who has not.
Celery's names of orders are accepted, or the error names the command to use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

import click

from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.groups import HintGroup
from bulltask.cli.options import ExitCode, json_option, redis_options, seconds
from bulltask.cli.terminal import as_table, echo, in_one_line, print_json, stamp
from bulltask.config.config import LOG_LEVELS
from bulltask.queue.control import Answers

__all__ = ["control", "inspect"]

F = TypeVar("F", bound=Callable[..., Any])


class OrderGroup(HintGroup):
    """A group that accepts Celery's names of orders, or says what to use instead."""

    def __init__(self, *args: Any, aliases: Mapping[str, str], **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self._aliases = aliases

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, or by Celery's."""
        return super().get_command(ctx, self._aliases.get(cmd_name, cmd_name))


def order_options(function: F) -> F:
    """Add ``-d``, ``-t``, ``--json`` and the options of the server."""
    destination = click.option(
        "-d",
        "--destination",
        "destinations",
        multiple=True,
        metavar="WORKER",
        help="Worker ID, ID without the process id, or pattern such as 'web-*'; may be repeated, or separated by "
        "commas.  [default: all workers]",
    )
    timeout = click.option(
        "-t",
        "--timeout",
        type=seconds,
        default="2s",
        show_default=True,
        help="How long to wait for answers. Then the order is withdrawn.",
    )
    return redis_options(destination(timeout(json_option(function))))


def give(ctx: click.Context, name: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    """Send an order, print the answers, and exit."""
    answers = _order(ctx, name, arguments, options)
    if options["as_json"]:
        _print_json(name, answers)
    else:
        for worker, text in sorted(answers.replies.items()):
            echo(f"{in_one_line(worker)}  {in_one_line(str(text), 1_000)}")
        _print_rest(answers)
    ctx.exit(_exit_code(answers))


def _order(ctx: click.Context, name: str, arguments: Mapping[str, Any], options: Mapping[str, Any]) -> Answers:
    names = [name for text in options["destinations"] for name in text.split(",") if name]
    app = load_app_or_broker(ctx, options)
    try:
        destination = None if not names or "all" in names else names
        return app.control.order(name, arguments, destination=destination, timeout=options["timeout"])
    finally:
        app.close()


def _print_json(name: str, answers: Answers) -> None:
    lists = {"withdrawn": answers.withdrawn, "unanswered": answers.unanswered, "unknown": answers.unknown}
    document = {"order": name, "replies": answers.replies, "errors": answers.errors, **lists}
    print_json(document)


def _print_rest(answers: Answers) -> None:
    """Print the errors, and who has not answered."""
    for worker, error in sorted(answers.errors.items()):
        echo(f"{in_one_line(worker)}  error: {in_one_line(error, 1_000)}", err=True)
    for worker in answers.withdrawn:
        echo(f"{in_one_line(worker)}  no answer: the order was withdrawn, so it will not be executed", err=True)
    for worker in answers.unanswered:
        echo(f"{in_one_line(worker)}  no answer: it has taken the order, and may have executed it", err=True)
    for name in answers.unknown:
        echo(f"{in_one_line(name)}  no live worker has this name", err=True)
    missing = len(answers.withdrawn) + len(answers.unanswered)
    if not answers.answered and not missing and not answers.unknown:
        echo("No live worker was found.", err=True)
    elif missing:
        echo(f"{answers.answered} of {answers.answered + missing} workers answered.", err=True)


def _exit_code(answers: Answers) -> int:
    if not answers.answered:
        return ExitCode.NO_ANSWER
    if answers.errors:
        return ExitCode.ERROR
    return ExitCode.PENDING if answers.withdrawn or answers.unanswered or answers.unknown else ExitCode.DONE


_CELERY_ORDERS: Final = {
    "add_consumer": "consume",
    "cancel_consumer": "cancel",
    "pool_grow": "grow",
    "pool_restart": "replace-children",
    "pool_shrink": "shrink",
    "rate_limit": "rate-limit",
    "time_limit": "time-limit",
}
_REVOKE: Final = "use 'bulltask revoke', with --terminate for running jobs"
_EVENTS: Final = "events are always on"
_OTHER_ORDERS: Final = {
    "disable_events": _EVENTS,
    "election": "workers need no leader",
    "enable_events": _EVENTS,
    "heartbeat": "workers write their state every few seconds: 'bulltask workers' shows it",
    "revoke": _REVOKE,
    "revoke_by_stamped_headers": _REVOKE,
    "terminate": _REVOKE,
}


@click.group(
    "control",
    cls=OrderGroup,
    aliases=_CELERY_ORDERS,
    hints=_OTHER_ORDERS,
    short_help="Give orders to live workers.",
)
def control() -> None:
    """Give orders to live workers, all or some (-d): they need no restart, and forget the order when they restart.

    The supervisor of a worker executes an order within a second, also while all its children are busy, and at most
    once. It logs the order and its sender.

    Exit codes: 0 (all workers have executed the order), 1 (an error, or a worker could not execute it), 3 (some workers
    have not answered), 69 (none has).
    """


@control.command("shutdown", short_help="Stop workers.")
@click.option("--cold", is_flag=True, help="Kill the children; their jobs are released and run elsewhere.")
@order_options
@click.pass_context
def shutdown(ctx: click.Context, /, *, cold: bool, **options: Any) -> None:
    """Stop workers, as TERM does: running jobs have shutdown_timeout to finish."""
    give(ctx, "shutdown", {"cold": cold}, options)


@control.command("pause", short_help="Let workers acquire no jobs.")
@order_options
@click.pass_context
def pause(ctx: click.Context, /, **options: Any) -> None:
    """Let workers acquire no jobs until 'resume', as TSTP does. Running jobs continue, and queues are not paused."""
    give(ctx, "pause", {}, options)


@control.command("resume", short_help="Let paused workers acquire jobs again.")
@order_options
@click.pass_context
def resume(ctx: click.Context, /, **options: Any) -> None:
    """Let workers that were paused acquire jobs again, as CONT does."""
    give(ctx, "resume", {}, options)


_COUNT: Final = click.argument("n", type=click.IntRange(1), default=1)


@control.command("grow", short_help="Add children.")
@_COUNT
@order_options
@click.pass_context
def grow(ctx: click.Context, /, *, n: int, **options: Any) -> None:
    """Add N children (default: 1) to each worker, up to twice the number at the start plus two."""
    give(ctx, "pool_grow", {"n": n}, options)


@control.command("shrink", short_help="Remove children.")
@_COUNT
@order_options
@click.pass_context
def shrink(ctx: click.Context, /, *, n: int, **options: Any) -> None:
    """Remove N children (default: 1) of each worker when their jobs have ended; one remains."""
    give(ctx, "pool_shrink", {"n": n}, options)


@control.command("autoscale", short_help="Change the limits of the number of children.")
@click.argument("maximum", metavar="MAX", type=click.IntRange(1))
@click.argument("minimum", metavar="[MIN]", type=click.IntRange(1), required=False)
@order_options
@click.pass_context
def autoscale(ctx: click.Context, /, *, maximum: int, minimum: int | None, **options: Any) -> None:
    """Change the limits of the number of children, of workers that were started with --autoscale."""
    give(ctx, "autoscale", {"maximum": maximum, "minimum": minimum}, options)


@control.command("replace-children", short_help="Replace the children.")
@order_options
@click.pass_context
def replace_children(ctx: click.Context, /, **options: Any) -> None:
    """Replace all children: others start now, and the old ones exit when their jobs have ended.

    The code is not loaded again: for that, send HUP to the worker.
    """
    give(ctx, "pool_restart", {}, options)


@control.command("consume", short_help="Fetch jobs from a queue again.")
@click.argument("queue")
@order_options
@click.pass_context
def consume(ctx: click.Context, /, *, queue: str, **options: Any) -> None:
    """Fetch jobs from QUEUE again, after 'cancel'.

    For a queue with which no worker was started, start another worker: bulltask worker -Q QUEUE.
    """
    give(ctx, "add_consumer", {"queue": queue}, options)


@control.command("cancel", short_help="Fetch no more jobs from a queue.")
@click.argument("queue")
@order_options
@click.pass_context
def cancel(ctx: click.Context, /, *, queue: str, **options: Any) -> None:
    """Fetch no more jobs from QUEUE, which other workers may still consume; running jobs continue.

    A worker's only queue cannot be cancelled: pause the worker.
    """
    give(ctx, "cancel_consumer", {"queue": queue}, options)


@control.command("rate-limit", short_help="Change the rate limit of a task.")
@click.argument("task")
@click.argument("rate", metavar="RATE")
@order_options
@click.pass_context
def rate_limit(ctx: click.Context, /, *, task: str, rate: str, **options: Any) -> None:
    """Change the rate limit of TASK, such as 10/s, 100/m or 5/30s; 0 means none.

    The worker that acquires a job applies its limit, so give the order to all workers.
    """
    give(ctx, "rate_limit", {"task_name": task, "rate_limit": 0 if rate == "0" else rate}, options)


@control.command("time-limit", short_help="Change the time limits of a task.")
@click.argument("task")
@click.argument("soft", type=click.FloatRange(0.001), required=False)
@click.argument("hard", type=click.FloatRange(0.001), required=False)
@click.option("--soft", "soft_option", type=click.FloatRange(0.001), help="Soft limit in seconds.")
@click.option("--hard", "hard_option", type=click.FloatRange(0.001), help="Hard limit in seconds.")
@order_options
@click.pass_context
def time_limit(
    ctx: click.Context,
    /,
    *,
    task: str,
    soft: float | None,
    hard: float | None,
    soft_option: float | None,
    hard_option: float | None,
    **options: Any,
) -> None:
    """Change the SOFT and HARD time limits of TASK in seconds, for attempts that start from now on.

    A limit that is not given is the app's.
    """
    limits = {"soft": soft_option or soft, "hard": hard_option or hard}
    give(ctx, "time_limit", {"task_name": task, **limits}, options)


@control.command("log-level", short_help="Change the log level.")
@click.argument("level", type=click.Choice(list(LOG_LEVELS), case_sensitive=False))
@order_options
@click.pass_context
def log_level(ctx: click.Context, /, *, level: str, **options: Any) -> None:
    """Change the log LEVEL of workers and their children."""
    give(ctx, "log_level", {"level": level}, options)


_CELERY_QUESTIONS: Final = {"active_queues": "queues", "registered_tasks": "registered"}
_STACKS: Final = "kill -USR1 logs what a worker is doing; use memray for its memory"
_OTHER_QUESTIONS: Final = {
    "clock": "workers need no logical clock",
    "memdump": _STACKS,
    "memsample": _STACKS,
    "objgraph": _STACKS,
    "query_task": "use 'bulltask job show'",
    "report": "use 'bulltask report'",
    "revoked": "a revoked job has failed: use 'bulltask job show'",
    "scheduled": "delayed jobs are in Redis, not in workers: use 'bulltask jobs QUEUE --state delayed'",
}


@click.group(
    "inspect",
    cls=OrderGroup,
    aliases=_CELERY_QUESTIONS,
    hints=_OTHER_QUESTIONS,
    short_help="Ask live workers.",
)
def inspect() -> None:
    """Ask live workers, all or some (-d). They answer within a second, also while all their children are busy.

    Exit codes: 0 (all workers have answered), 1 (an error), 3 (some workers have not answered), 69 (none has).
    """


def ask(
    ctx: click.Context,
    name: str,
    options: Mapping[str, Any],
    page: Callable[[str, Any], Sequence[str]],
    arguments: Mapping[str, Any] | None = None,
) -> None:
    """Send a question, print the answers with ``page``, and exit."""
    answers = _order(ctx, name, arguments or {}, options)
    if options["as_json"]:
        _print_json(name, answers)
    else:
        for worker, value in sorted(answers.replies.items()):
            echo("\n".join(page(in_one_line(worker), value)))
        _print_rest(answers)
    ctx.exit(_exit_code(answers))


def _question(name: str, order: str, page: Callable[[str, Any], Sequence[str]], text: str) -> None:
    @inspect.command(name, short_help=text, help=text)
    @order_options
    @click.pass_context
    def question(ctx: click.Context, /, **options: Any) -> None:
        ask(ctx, order, options, page)


def _word(worker: str, value: Any) -> list[str]:
    return [f"{worker}  {in_one_line(str(value))}"]


def _names(worker: str, value: Any) -> list[str]:
    return [worker, *(f"  {in_one_line(str(name))}" for name in value)]


def _jobs(worker: str, value: Any) -> list[str]:
    if not value:
        return [worker, "  none"]
    rows = [
        (
            str(job.get("id") or "-"),
            str(job.get("name") or "-"),
            str(job.get("queue")),
            stamp(datetime.fromtimestamp(job["time_start"], UTC)),
            str(job.get("worker_pid")),
        )
        for job in value
    ]
    return [
        worker,
        *(f"  {line}" for line in as_table(("job", "task", "queue", "since (UTC)", "pid"), rows).split("\n")),
    ]


def _fields(worker: str, value: Any) -> list[str]:
    rows = [(str(name), item if isinstance(item, str) else json.dumps(item)) for name, item in value.items()]
    width = max((len(name) for name, _ in rows), default=0)
    return [worker, *(f"  {in_one_line(name):<{width}}  {in_one_line(text, 1_000)}" for name, text in rows)]


def _queues(worker: str, value: Any) -> list[str]:
    return [worker, *(f"  {in_one_line(queue['name'])}  {in_one_line(queue['key'])}" for queue in value)]


_question("ping", "ping", _word, "Ask which workers are alive.")
_question("registered", "registered", _names, "Print the tasks of each worker.")
_question("stats", "stats", _fields, "Print figures of each worker and its processes.")
_question("queues", "active_queues", _queues, "Print from which queues each worker fetches jobs.")
_question("active", "active", _jobs, "Print the jobs that each worker is running, and since when.")
_question("reserved", "reserved", _jobs, "Print the jobs that each worker has prefetched.")


@inspect.command("conf", short_help="Print the settings of each worker.")
@click.option("--with-defaults", is_flag=True, help="Also print the settings that were not set.")
@order_options
@click.pass_context
def conf(ctx: click.Context, /, *, with_defaults: bool, **options: Any) -> None:
    """Print the settings that were set for each worker; secrets are ***."""
    ask(ctx, "conf", options, _fields, {"with_defaults": with_defaults})
