"""``bulltask migrate-bull``: a queue of Bull becomes one of BullMQ; a dry run unless ``--execute`` is said."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.loading import app_options, load_app
from bulltask.config.urls import SecretUrl
from bulltask.errors import ConfigError, InvalidNameError, MigrationRefusedError
from bulltask.jobs.names import check_queue_name
from bulltask.migrate import BullMigration, Plan, Report
from bulltask.migrate.convert import DEFAULT_NAME, NOTES
from bulltask.migrate.judge import STATES
from bulltask.migrate.outcome import Left, Outcome
from bulltask.migrate.recognise import PLACES, Layout
from bulltask.queue.queue import Queue

__all__ = ["command"]

EXIT_REFUSED: Final = 3
EXIT_LEFT: Final = 4
_SHOWN: Final = 5


@click.command("migrate-bull")
@click.argument("queue")
@app_options
@click.option("--to", "target", help="Queue of bulltask where the jobs go; QUEUE if left out.")
@click.option("--bull-prefix", help="Bull's prefix of keys; that of the app (bull) if left out.")
@click.option("--execute", is_flag=True, help="Do it. Without this nothing is changed.")
@click.option("--states", default=",".join(STATES), show_default=True, help="Only jobs in these, comma-separated.")
@click.option("--limit", type=click.IntRange(1), help="At most so many jobs.")
@click.option("--id-prefix", default="", help="Put this before the ids of moved jobs, where the target has such ids.")
@click.option("--default-name", default=DEFAULT_NAME, show_default=True, help="Name of jobs that Bull has without one.")
@click.option("--recover-active", is_flag=True, help="Active jobs whose worker has died wait again.")
@click.option("--force", is_flag=True, help="Also while workers seem to be connected.")
@click.pass_context
def command(
    ctx: click.Context,
    /,
    *,
    queue: str,
    app: str | None,
    broker: SecretUrl | None,
    target: str | None,
    bull_prefix: str | None,
    execute: bool,
    states: str,
    **wishes: Any,
) -> None:
    """Move the jobs of the Bull queue QUEUE into BullMQ's layout.

    Says what is there and what would become of it, and does it with --execute. It may be stopped at any moment and
    started again: each job moves in one step.

    Exit codes: 0 done, or a dry run; 3 refused, nothing was changed; 4 some jobs were left; 1 an error: start it again.
    """
    check_queue_name(queue)
    found = _queue(ctx, app, broker, target or queue)
    wishes["states"] = tuple(state.strip() for state in states.split(",") if state.strip())
    try:
        migration = BullMigration(found, queue, source_prefix=bull_prefix, **wishes)
    except (ConfigError, InvalidNameError) as exc:
        raise click.UsageError(str(exc)) from exc
    try:
        plan = migration.plan(_progress("read"))
    except MigrationRefusedError as exc:
        click.echo(f"Cannot: {exc}.", err=True)
        ctx.exit(EXIT_REFUSED)
    _show_plan(plan, queue, wishes["limit"])
    if plan.refusals:
        click.echo("Refused: nothing was changed.")
        ctx.exit(EXIT_REFUSED)
    if plan.layout is Layout.EMPTY:
        return
    if not execute:
        click.echo("This was a dry run: nothing was changed. To do it, say it again with --execute.")
        return
    report = migration.run(plan, _progress("moved"))
    _show_report(report, plan)
    ctx.exit(0 if report.complete else EXIT_LEFT)


def _queue(ctx: click.Context, app: str | None, broker: SecretUrl | None, name: str) -> Queue:
    given: dict[str, Any] = ctx.obj or {}
    if not (app or given.get("app")) and (url := broker or given.get("broker")):
        return App("migrate-bull", url).queue(name)
    return load_app(ctx, app, broker)[1].queue(name)


def _progress(verb: str) -> Callable[[int, int], None]:
    """A line on standard error at every tenth of the way, or every thousand jobs."""
    shown = 0

    def tell(done: int, total: int) -> None:
        nonlocal shown
        step = max(1_000, total // 10)
        if done // step > shown:
            shown = done // step
            click.echo(f"{verb} {done:,} of {total:,} jobs", err=True)

    return tell


def _show_plan(plan: Plan, queue: str, limit: int | None) -> None:
    click.echo(f"Bull queue    {plan.source}")
    click.echo(f"BullMQ queue  {plan.target}{' (the same keys: in place)' if plan.in_place else ''}")
    click.echo(f"Recognised    {plan.layout.value}{', paused' if plan.facts.paused else ''}")
    if plan.layout is Layout.EMPTY:
        click.echo(f"Nothing to migrate: {plan.source} has no jobs. Is {queue!r} spelled as Bull has it?")
        return
    click.echo("\n" + "\n".join(f"  {place:<10}{plan.facts.sizes[place]:>12,}" for place in PLACES) + "\n")
    _show_moves(plan.outcome, "would be converted:" if plan.in_place else "would become")
    if limit and limit < plan.outcome.total_moved:
        click.echo(f"  but at most {limit:,} of them (--limit)")
    for one in plan.repeatables:
        click.echo(f"  repeatable {one.key!r} " + (one.problem or f"-> job scheduler {one.scheduler_id!r}"))
        if one.by_hand:
            click.echo(f"    by hand: {one.by_hand}")
    if plan.pauses:
        click.echo("  The target will be paused, because Bull's queue is: resume it when you are ready.")
    _show_left(plan.outcome, in_place=plan.in_place)
    for warning in plan.warnings:
        click.echo(f"Note: {warning}.")
    for refusal in plan.refusals:
        click.echo(f"Cannot: {refusal}.", err=True)


def _show_moves(outcome: Outcome, verb: str) -> None:
    for state, count in sorted(outcome.moved.items()):
        name = "waiting (were active)" if state == "recovered" else state
        click.echo(f"  {count:,} {verb} {name}")
    for note, count in sorted(outcome.notes.items()):
        click.echo(f"  {count:,} of them {NOTES[note]}")


def _show_left(outcome: Outcome, *, in_place: bool) -> None:
    for reason, ids in outcome.left.items():
        if in_place and reason is Left.BULLMQ:
            continue  # where they belong
        shown = ", ".join(ids[:_SHOWN]) + (", …" if len(ids) > _SHOWN else "")
        click.echo(f"  {len(ids):,} stay: {reason.value} ({shown})")
    for detail in outcome.details:
        click.echo(f"    {detail}")


def _show_report(report: Report, plan: Plan) -> None:
    outcome, before, after = report.outcome, sum(report.before.values()), sum(report.after.values())
    click.echo(f"Done: {outcome.total_moved:,} jobs, {len(report.schedulers)} job schedulers made")
    _show_moves(outcome, "were converted:" if plan.in_place else "became")
    _show_left(outcome, in_place=plan.in_place)
    for one in report.repeatables_left:
        click.echo(f"  repeatable {one.key!r} stays: {one.problem}")
        if one.by_hand:
            click.echo(f"    by hand: {one.by_hand}")
    if not plan.in_place:
        click.echo(f"  {plan.source}: {before:,} jobs before, {after:,} after")
    click.echo(f"  {plan.target}: {report.target_before:,} jobs before, {report.target_after:,} after")
    if not plan.in_place and before - after != outcome.total_moved:
        click.echo("  These do not add up: something else changed the queue meanwhile.")
