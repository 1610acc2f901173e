"""``bulltask control`` and ``bulltask inspect``: give orders to live workers, and ask them.

Each subcommand sends one order, of :class:`bulltask.worker.orders.Orders`, and prints who has answered and who has not.
Celery's names of orders are accepted, or the error names the command to use.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any, Final, NoReturn

import click

from bulltask.cli.app_loader import load_app_or_broker, own_command
from bulltask.cli.groups import HintGroup
from bulltask.cli.options import ExitCode, duration_option, operator_options
from bulltask.cli.terminal import ago, as_table, echo, in_one_line, print_json
from bulltask.config.config import LOG_LEVELS
from bulltask.config.parsers import parse_names, task_rate
from bulltask.jobs.errors import ConfigError
from bulltask.queue.control import Answers

__all__ = ["control", "inspect"]


_WITH_VALUE: Final = "-d --destination -t --timeout -A --app -b --broker --config --prefix".split()


class OrderGroup(HintGroup):
    """A group that accepts Celery's names of orders, or says what to use instead."""

    def __init__(self, *args: Any, aliases: Mapping[str, str], **attrs: Any) -> None:
        super().__init__(*args, **attrs)
        self._aliases = aliases

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return a command by its name, or by Celery's."""
        return super().get_command(ctx, self._aliases.get(cmd_name, cmd_name))

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Accept the options of an order also in front of its name, as Celery does."""
        end = 0
        while end < len(args) and args[end].startswith("-") and args[end] != "--help":
            end += 2 if args[end] in _WITH_VALUE else 1
        return super().parse_args(ctx, [*args[end : end + 1], *args[:end], *args[end + 1 :]])


def order_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add ``-d`` and ``-t``, and the options of all commands, as the last decorator."""
    destination = click.option(
        "-d",
        "--destination",
        metavar="WORKER",
        multiple=True,
        help="Only workers with this name (-n) or ID, or pattern such as 'web-*'; comma-separated, or repeated "
        "(default: all).",
    )
    timeout = duration_option(
        "-t",
        "--timeout",
        default="2s",
        show_default=False,
        text="How long to wait for answers; then, the order is withdrawn (default: 2s).",
    )
    return destination(timeout(operator_options(function)))


def _word(worker: str, value: Any) -> list[str]:
    return [f"{worker}  {in_one_line(str(value), 1_000)}"]


def give(
    ctx: click.Context,
    name: str,
    options: Mapping[str, Any],
    arguments: Mapping[str, Any] | None = None,
    page: Callable[[str, Any], Sequence[str]] = _word,
) -> NoReturn:
    """Send an order or a question, print the answers with ``page``, and exit."""
    names = [name for text in options["destination"] for name in parse_names(text, "-d")]
    destination = None if not names or "all" in names else names
    with closing(load_app_or_broker(ctx, options)) as app:
        answers = app.control.order(name, arguments, destination=destination, timeout=options["timeout"])
    if options["as_json"]:
        print_json({"order": name, **asdict(answers)})
    else:
        for worker, value in sorted(answers.replies.items()):
            echo("\n".join(page(in_one_line(worker), value)))
        _print_rest(answers, own_command("bulltask workers", ctx, options))
    if not answers.answered:
        ctx.exit(ExitCode.NO_ANSWER)
    if answers.errors:
        ctx.exit(ExitCode.ERROR)
    ctx.exit(ExitCode.PENDING if answers.withdrawn or answers.unanswered or answers.unknown else ExitCode.DONE)


def _print_rest(answers: Answers, workers: str) -> None:
    """Print the errors, and who has not answered; ``workers`` is the command that lists the workers."""
    messages = [
        *((worker, f"error: {in_one_line(error, 1_000)}") for worker, error in sorted(answers.errors.items())),
        *((worker, "no answer: the order was withdrawn, so it will not be executed") for worker in answers.withdrawn),
        *((worker, "no answer: it has taken the order, and may have executed it") for worker in answers.unanswered),
        *((name, f"no live worker has this name: '{workers}' lists them") for name in answers.unknown),
    ]
    for name, message in messages:
        echo(f"{in_one_line(name)}  {message}", err=True)
    missing = len(answers.withdrawn) + len(answers.unanswered)
    if missing:
        echo(f"{answers.answered} of {answers.answered + missing} workers answered.", err=True)
    elif not answers.answered and not answers.unknown:
        echo("No live worker was found: start one with 'bulltask worker -A APP'.", err=True)


def _add(
    group: click.Group,
    name: str,
    order: str,
    short_help: str,
    text: str = "",
    page: Callable[[str, Any], Sequence[str]] = _word,
) -> None:
    """Add a command without arguments."""

    @group.command(name, short_help=short_help, help=text or short_help)
    @order_options
    def command(ctx: click.Context, /, **options: Any) -> None:
        give(ctx, order, options, page=page)


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
_OTHER_ORDERS: Final = {
    "election": "workers need no leader",
    "heartbeat": "workers write their state every few seconds: 'bulltask workers' shows it",
    **dict.fromkeys(("disable_events", "enable_events"), "events are always on"),
    **dict.fromkeys(("revoke", "revoke_by_stamped_headers", "terminate"), _REVOKE),
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
def shutdown(ctx: click.Context, /, *, cold: bool, **options: Any) -> None:
    """Stop workers, as TERM does: running jobs have shutdown_timeout to finish."""
    give(ctx, "shutdown", options, {"cold": cold})


_add(
    control,
    "pause",
    "pause",
    "Let workers acquire no jobs.",
    "Let workers acquire no jobs until 'resume', as TSTP does. Running jobs continue, and queues are not paused.",
)
_add(
    control,
    "resume",
    "resume",
    "Let paused workers acquire jobs again.",
    "Let workers that were paused acquire jobs again, as CONT does.",
)
_add(
    control,
    "replace-children",
    "pool_restart",
    "Replace the children.",
    "Replace all children: others start now, and the old ones exit when their jobs have ended.\n\nThe code is not "
    "loaded again: for that, send HUP to the worker.",
)

_COUNT: Final = click.argument("n", type=click.IntRange(1), default=1)


@control.command("grow", short_help="Add children.")
@_COUNT
@order_options
def grow(ctx: click.Context, /, *, n: int, **options: Any) -> None:
    """Add N children (default: 1) to each worker, up to twice the number at the start plus two."""
    give(ctx, "pool_grow", options, {"n": n})


@control.command("shrink", short_help="Remove children.")
@_COUNT
@order_options
def shrink(ctx: click.Context, /, *, n: int, **options: Any) -> None:
    """Remove N children (default: 1) of each worker when their jobs have ended; one remains."""
    give(ctx, "pool_shrink", options, {"n": n})


@control.command("autoscale", short_help="Change the limits of the number of children.")
@click.argument("maximum", metavar="MAX", type=click.IntRange(1))
@click.argument("minimum", metavar="[MIN]", type=click.IntRange(1), required=False)
@order_options
def autoscale(ctx: click.Context, /, *, maximum: int, minimum: int | None, **options: Any) -> None:
    """Change the limits of the number of children, of workers that were started with --autoscale."""
    give(ctx, "autoscale", options, {"maximum": maximum, "minimum": minimum})


@control.command("consume", short_help="Fetch jobs from a queue, too, or again.")
@click.argument("queue")
@order_options
def consume(ctx: click.Context, /, *, queue: str, **options: Any) -> None:
    """Fetch jobs from QUEUE, too, or again after 'cancel'.

    For another queue, a worker replaces its children; running jobs continue. Workers that have cancelled the queue
    receive the order, or, if there are none, all.
    """
    give(ctx, "add_consumer", options, {"queue": queue})


@control.command("cancel", short_help="Fetch no more jobs from a queue.")
@click.argument("queue")
@order_options
def cancel(ctx: click.Context, /, *, queue: str, **options: Any) -> None:
    """Fetch no more jobs from QUEUE, which other workers may still consume; running jobs continue.

    A worker's only queue cannot be cancelled: pause the worker.
    """
    give(ctx, "cancel_consumer", options, {"queue": queue})


@control.command("rate-limit", short_help="Change the rate limit of a task.")
@click.argument("task")
@click.argument("rate", metavar="RATE")
@order_options
def rate_limit(ctx: click.Context, /, *, task: str, rate: str, **options: Any) -> None:
    """Change the rate limit of TASK, such as 10/s, 100/m or 5/30s; 0 means none.

    The worker that acquires a job applies its limit, so give the order to all workers.
    """
    wanted = 0 if rate == "0" else rate
    try:
        task_rate(wanted, "RATE")
    except ConfigError as exc:
        raise click.UsageError(str(exc)) from exc
    give(ctx, "rate_limit", options, {"task_name": task, "rate_limit": wanted})


@control.command("time-limit", short_help="Change the time limits of a task.")
@click.argument("task")
@click.argument("soft", type=click.FloatRange(0.001), required=False)
@click.argument("hard", type=click.FloatRange(0.001), required=False)
@click.option("--soft", "soft_option", type=click.FloatRange(0.001), help="Soft limit in seconds.")
@click.option("--hard", "hard_option", type=click.FloatRange(0.001), help="Hard limit in seconds.")
@order_options
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
    give(ctx, "time_limit", options, {"task_name": task, **limits})


@control.command("log-level", short_help="Change the log level.")
@click.argument("level", type=click.Choice(list(LOG_LEVELS), case_sensitive=False))
@order_options
def log_level(ctx: click.Context, /, *, level: str, **options: Any) -> None:
    """Change the log LEVEL of workers and their children."""
    give(ctx, "log_level", options, {"level": level})


_CELERY_QUESTIONS: Final = {"active_queues": "queues", "registered_tasks": "registered"}
_STACKS: Final = "kill -USR1 logs what a worker is doing; use memray for its memory"
_OTHER_QUESTIONS: Final = {
    "clock": "workers need no logical clock",
    **dict.fromkeys(("memdump", "memsample", "objgraph"), _STACKS),
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


def _names(worker: str, value: Any) -> list[str]:
    return [worker, *(f"  {in_one_line(str(name))}" for name in value)]


def _jobs(worker: str, value: Any) -> list[str]:
    now = datetime.now(UTC)
    rows = [
        (
            *(str(job.get(name) or "-") for name in ("id", "name", "queue")),
            ago(datetime.fromtimestamp(job["time_start"], UTC), now),
            str(job.get("worker_pid")),
        )
        for job in value
    ]
    table = as_table(("id", "task", "queue", "since", "pid"), rows) if rows else "none"
    return [worker, *(f"  {line}" for line in table.splitlines())]


def _fields(worker: str, value: Any) -> list[str]:
    rows = [(str(name), item if isinstance(item, str) else json.dumps(item)) for name, item in value.items()]
    width = max((len(name) for name, _ in rows), default=0)
    return [worker, *(f"  {in_one_line(name):<{width}}  {in_one_line(text, 1_000)}" for name, text in rows)]


def _queues(worker: str, value: Any) -> list[str]:
    return [worker, *(f"  {in_one_line(queue['name'])}  {in_one_line(queue['key'])}" for queue in value)]


_add(inspect, "ping", "ping", "Ask which workers are alive.")
_add(inspect, "registered", "registered", "Print the tasks of each worker.", page=_names)
_add(inspect, "stats", "stats", "Print figures of each worker and its processes.", page=_fields)
_add(inspect, "queues", "active_queues", "Print from which queues each worker fetches jobs.", page=_queues)
_add(inspect, "active", "active", "Print the jobs that each worker is running, and since when.", page=_jobs)
_add(inspect, "reserved", "reserved", "Print the jobs that each worker has prefetched.", page=_jobs)


@inspect.command("conf", short_help="Print the settings of each worker.")
@click.option("--with-defaults", is_flag=True, help="Also print the settings that were not set.")
@order_options
def conf(ctx: click.Context, /, *, with_defaults: bool, **options: Any) -> None:
    """Print the settings that were set for each worker; secrets are ***."""
    give(ctx, "conf", options, {"with_defaults": with_defaults}, _fields)
