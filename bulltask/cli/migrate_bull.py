"""``bulltask migrate-bull``: convert a Bull queue to BullMQ; a dry run without ``--yes``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app
from bulltask.cli.options import app_options
from bulltask.cli.terminal import echo, in_one_line
from bulltask.config.urls import SecretUrl
from bulltask.jobs.errors import ConfigError, InvalidNameError, MigrationError
from bulltask.jobs.names import check_queue_name
from bulltask.migrate import BullMigration, MigrationPlan, MigrationReport
from bulltask.migrate.inspection import JOB_KEYS, MigrationOutcome, QueueLayout, SkipReason
from bulltask.migrate.plan import DEFAULT_NAME, NOTES, STATES
from bulltask.queue.sync.queue import Queue

__all__ = ["migrate_bull"]

EXIT_REJECTED: Final = 3
EXIT_SKIPPED: Final = 4
_MAX_LISTED: Final = 5
_MAX_CHARS: Final = 2_000


@click.command("migrate-bull", short_help="Convert a Bull queue to BullMQ.")
@click.argument("queue")
@app_options
@click.option("--to", "target", help="Target queue (default: QUEUE).")
@click.option("--bull-prefix", help="Bull's key prefix (default: the app's prefix).")
@click.option("--yes", is_flag=True, help="Migrate the jobs; without this option, nothing is changed.")
@click.option(
    "--states", default=",".join(STATES), show_default=True, help="Only jobs in these states, comma-separated."
)
@click.option("--limit", type=click.IntRange(1), help="Maximum number of jobs (default: all).")
@click.option("--id-prefix", default="", help="Prefix for job ids, if the target queue has jobs with the same ids.")
@click.option("--default-name", default=DEFAULT_NAME, show_default=True, help="Task name for jobs without a name.")
@click.option(
    "--recover-active", is_flag=True, help="Move active jobs back to the waiting list if their worker has died."
)
@click.option("--force", is_flag=True, help="Migrate even if workers seem to be connected.")
@click.pass_context
def migrate_bull(
    ctx: click.Context,
    /,
    *,
    queue: str,
    app: str | None,
    broker: SecretUrl | None,
    target: str | None,
    bull_prefix: str | None,
    yes: bool,
    states: str,
    **options: Any,
) -> None:
    """Convert the jobs of the Bull queue QUEUE to BullMQ's layout; a dry run without --yes.

    The command prints a report. Each job moves in one atomic step, so you can stop the migration at any time and run it
    again.

    Exit codes: 0 (migrated, or a dry run), 1 (an error: run the command again), 3 (the queue cannot be migrated, and
    nothing was changed), 4 (some jobs were skipped).
    """
    check_queue_name(queue)
    target_queue = _queue(ctx, app, broker, target or queue)
    options["states"] = tuple(state.strip() for state in states.split(",") if state.strip())
    try:
        migration = BullMigration(target_queue, queue, source_prefix=bull_prefix, **options)
    except (ConfigError, InvalidNameError) as exc:
        raise click.UsageError(str(exc)) from exc
    try:
        plan = migration.plan(_progress("read"))
    except MigrationError as exc:
        echo(f"Cannot migrate: {exc}.", err=True)
        ctx.exit(EXIT_REJECTED)
    _show_plan(plan, queue, options["limit"])
    if plan.blockers:
        echo("Nothing was changed.")
        ctx.exit(EXIT_REJECTED)
    if plan.layout is QueueLayout.EMPTY:
        return
    if not yes:
        echo("Dry run: nothing was changed. Run the command again with --yes to migrate these jobs.")
        return
    report = migration.run(plan, _progress("migrated"))
    _show_report(report, plan)
    ctx.exit(0 if report.complete else EXIT_SKIPPED)


def _queue(ctx: click.Context, app: str | None, broker: SecretUrl | None, name: str) -> Queue:
    given: dict[str, Any] = ctx.obj or {}
    if not (app or given.get("app")) and (url := broker or given.get("broker")):
        return App("migrate-bull", url).queue(name)
    return load_app(ctx, app, broker)[1].queue(name)


def _progress(verb: str) -> Callable[[int, int], None]:
    """Return a callback that prints a line after every tenth of the jobs, but at most every thousand jobs."""
    shown = 0

    def show(done: int, total: int) -> None:
        nonlocal shown
        step = max(1_000, total // 10)
        if done // step > shown:
            shown = done // step
            echo(f"{verb} {done:,} of {total:,} jobs", err=True)

    return show


def _show_plan(plan: MigrationPlan, queue: str, limit: int | None) -> None:
    echo(f"Bull queue    {plan.source}")
    echo(f"BullMQ queue  {plan.target}{' (the same keys: in place)' if plan.in_place else ''}")
    echo(f"Detected      {plan.layout.value}{', paused' if plan.info.paused else ''}")
    if plan.layout is QueueLayout.EMPTY:
        echo(f"Nothing to migrate: {plan.source} has no jobs. Is {queue!r} the queue's name in Bull?")
        return
    echo("\n" + "\n".join(f"  {suffix:<10}{plan.info.sizes[suffix]:>12,}" for suffix in JOB_KEYS) + "\n")
    _show_moves(plan.outcome, "would be converted:" if plan.in_place else "would become")
    if limit and limit < plan.outcome.total_moved:
        echo(f"  but at most {limit:,} of them (--limit)")
    for repeatable in plan.repeatables:
        outcome = repeatable.problem or f"-> job scheduler {repeatable.scheduler_id!r}"
        echo(f"  repeatable {repeatable.key!r} {outcome}")
        if repeatable.manual:
            echo(f"    to create it manually: {repeatable.manual}")
    if plan.pauses:
        echo("  The target will be paused, because Bull's queue is: resume it when you are ready.")
    _show_skipped(plan.outcome, in_place=plan.in_place)
    for warning in plan.warnings:
        echo(f"Note: {in_one_line(warning, _MAX_CHARS)}.")
    for blocker in plan.blockers:
        echo(f"Cannot migrate: {in_one_line(blocker, _MAX_CHARS)}.", err=True)


def _show_moves(outcome: MigrationOutcome, verb: str) -> None:
    for state, count in sorted(outcome.moved.items()):
        name = "waiting (were active)" if state == "recovered" else state
        echo(f"  {count:,} {verb} {name}")
    for note, count in sorted(outcome.notes.items()):
        echo(f"  {count:,} of them {NOTES[note]}")


def _show_skipped(outcome: MigrationOutcome, *, in_place: bool) -> None:
    for reason, ids in outcome.skipped.items():
        if in_place and reason is SkipReason.BULLMQ:
            continue  # not Bull's jobs
        shown = ", ".join(map(in_one_line, ids[:_MAX_LISTED])) + (", …" if len(ids) > _MAX_LISTED else "")
        echo(f"  {len(ids):,} skipped: {reason.value} ({shown})")
    for detail in outcome.details:
        echo(f"    {in_one_line(detail, _MAX_CHARS)}")


def _show_report(report: MigrationReport, plan: MigrationPlan) -> None:
    outcome, before, after = report.outcome, sum(report.before.values()), sum(report.after.values())
    echo(f"Migrated {outcome.total_moved:,} jobs, created {len(report.schedulers)} job schedulers")
    _show_moves(outcome, "were converted:" if plan.in_place else "became")
    _show_skipped(outcome, in_place=plan.in_place)
    for repeatable in report.repeatables_skipped:
        echo(f"  repeatable {repeatable.key!r} skipped: {repeatable.problem}")
        if repeatable.manual:
            echo(f"    to create it manually: {repeatable.manual}")
    if not plan.in_place:
        echo(f"  {plan.source}: {before:,} jobs before, {after:,} after")
    echo(f"  {plan.target}: {report.target_before:,} jobs before, {report.target_after:,} after")
    if not plan.in_place and before - after != outcome.total_moved:
        echo("  The numbers differ because another program changed the queue at the same time.")
