"""``bulltask job list``: jobs of the lake that something is true of, the newest first."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from bulltask.cli.job.options import lake_option, when
from bulltask.cli.job.wording import length, one_line, stamp
from bulltask.cli.pipeline.tables import as_table

if TYPE_CHECKING:
    from bulltask.lake.past import PastJob

__all__ = ["command"]

_WIDE = 80


@click.command("list")
@lake_option(required=True)
@click.option("--queue", help="Only of this queue.")
@click.option("--name", help="Only of this task.")
@click.option(
    "--state", help="completed, failed or removed; or where the pipeline gave it up: waiting, active, delayed."
)
@click.option("--since", type=when, metavar="TIME", help="Done then or later: 2026-11-22, 2026-11-22T14:00 (UTC), 1d.")
@click.option("--until", type=when, metavar="TIME", help="Done before.")
@click.option("--text", help="A part of the reason of the failure, in any case of letters.")
@click.option("--error-key", help="What failures of one kind have in common, as in silver.jobs.")
@click.option("--limit", type=int, default=20, show_default=True, help="Jobs of a page, up to 1,000.")
@click.option("--cursor", help="The next page: what the page before has said.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(*, lake: Path, limit: int, cursor: str | None, as_json: bool, **where: Any) -> None:
    """Find jobs that are done, those that were done last first. All that is asked for must be true of a job.

    The latest knowledge of a job counts: one that failed and was completed by a later retry is completed.
    """
    from bulltask.lake import History  # noqa: PLC0415 - slow
    from bulltask.lake.plain import plain  # noqa: PLC0415 - slow

    page = History(lake).search(limit=limit, cursor=cursor, **where)
    if as_json:
        click.echo(json.dumps(plain(page), indent=2, ensure_ascii=False))
        return
    if not page.jobs:
        click.echo("No job was found.")
        return
    head = ("done (UTC)", "state", "queue", "name", "id", "attempts", "ran", "reason")
    click.echo(as_table(head, [_row(job) for job in page.jobs]))
    if page.cursor:
        click.echo(f"\nThere are more: say it again with --cursor {page.cursor}")


def _row(job: PastJob) -> tuple[str, ...]:
    attempts = "-" if job.attempts is None else str(job.attempts)
    reason = one_line(job.reason or "", _WIDE)
    texts = (stamp(job.seen_at), job.state, one_line(job.queue), one_line(job.name or "-"), one_line(job.id))
    return (*texts, attempts, length(job.run), reason)
