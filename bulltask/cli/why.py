"""``bulltask why``: why a job does not run, or why a queue stands still."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from difflib import get_close_matches
from functools import partial
from shlex import quote
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.job import (
    ambiguous,
    command_lines,
    evidence_text,
    known_queues,
    queue_of_job,
    queues_spelled_otherwise,
    queues_with_job,
    with_server,
)
from bulltask.cli.options import ExitCode, operator_options, queue_option
from bulltask.cli.terminal import echo, in_one_line, in_width, print_json
from bulltask.jobs.names import name_in_app
from bulltask.queue.overview import MAX_PAGES
from bulltask.queue.reasons import Explanation, Reason, traces
from bulltask.transport.broker import scan_up_to
from bulltask.transport.scripts.queue import scan_queues

__all__ = ["why", "why_page"]

_MAX_QUEUES: Final = 1_000
"""In how many queues traces of a job without a hash are searched for."""


@click.command("why", short_help="Say why a job does not run, or why a queue stands still.")
@click.argument("job_id", metavar="[ID]", required=False)
@queue_option("The job's queue; without an ID, the queue to explain.")
@operator_options
def why(ctx: click.Context, /, *, job_id: str | None, queue: str | None, as_json: bool, **options: Any) -> None:
    """Say why the job ID does not run, or why the jobs of a queue do not, with what proves it and what mends it.

    All reasons that hold are printed. The one that binds first comes first.

    Without --queue, all queues are searched for the job: those of the app and of connected workers first, then the
    others.

    Exit codes: 0 (explained), 1 (Redis cannot be reached, or another error), 4 (the job or the queue was not found).
    """
    if job_id is None and queue is None:
        raise click.UsageError("pass a job's ID, a queue (-Q), or both")
    with closing(load_app_or_broker(ctx, options)) as app:
        explanation = _explain(app, job_id, queue)
        similar = get_close_matches(str(queue), known_queues(app), 1) if "unknown-queue" in explanation.codes else []
    explanation = with_server(explanation, ctx, options, app)
    is_unknown = not {"unknown-job", "unknown-queue"}.isdisjoint(explanation.codes)
    if as_json:
        print_json(explanation.to_json())
    elif is_unknown and queue is None:
        echo(f"{explanation}", err=True)
    else:
        echo("\n".join(why_page(explanation)))
        if similar:
            echo(f"Did you mean queue {similar[0]}?", err=True)
    if is_unknown:
        ctx.exit(ExitCode.NOT_FOUND)
    is_unread = not {"redis-unreachable", "redis-loading"}.isdisjoint(explanation.codes)
    if is_unread or (explanation.job_id is not None and explanation.state is None):
        ctx.exit(ExitCode.ERROR)


def _explain(app: App, job_id: str | None, queue: str | None) -> Explanation:
    explanation = app.queue(queue or _queue_of(app, str(job_id))).explain(job_id)
    if job_id is None or "unknown-job" not in explanation.codes:
        return explanation
    if queue is not None:
        queue_of_job(app, job_id, queue)  # raises an error if another queue has the job
        return explanation
    searched = f"No queue at {app._broker.endpoint.safe_url} has a job {job_id}"
    show = f"bulltask job show {quote(job_id)} --lake DIRECTORY"

    def of_all_queues(reason: Reason) -> Reason:
        if reason.code != "unknown-job":
            return reason
        evidence = {name: value for name, value in reason.evidence.items() if name != "key"}
        sentence = f"{searched}: {reason.sentence.rpartition(': ')[2]}"
        return replace(reason, sentence=sentence, evidence=evidence, command=show)

    return replace(explanation, queue="", reasons=tuple(map(of_all_queues, explanation.reasons)))


def _queue_of(app: App, job_id: str) -> str:
    """Return the queue that has the job, or a trace of it; the app's default queue if none has."""
    names, in_redis = queues_with_job(app, job_id)
    if not names and (others := queues_spelled_otherwise(app, job_id, in_redis)):
        return name_in_app(others[0], hash_tag=True)
    if not names:  # its hash may be gone, or the id is a deduplication id
        known = [(queue, app._broker.keys(queue)) for queue in known_queues(app)[:_MAX_QUEUES]]
        with app._broker.pool.client() as client:
            names = [queue for queue, keys in known if True in client.try_many(traces(keys, job_id))]
            if not names:  # a queue of Bull has no key by which queues are found
                scan = partial(scan_queues, app._config.prefix, suffix=job_id)
                names = sorted({name_in_app(name, hash_tag=True) for name in scan_up_to(client, scan, MAX_PAGES)[0]})
    if len(names) > 1:
        raise ambiguous(app, job_id, names)
    return names[0] if names else app._config.default_queue


def why_page(explanation: Explanation) -> Iterator[str]:
    """Yield the lines of an explanation."""
    queue = f"queue {in_one_line(explanation.queue)}"
    if explanation.job_id is None:
        yield f"Queue {in_one_line(explanation.queue)}"
    else:
        yield f"Job {in_one_line(explanation.job_id)}, {queue}: {explanation.state or 'state unknown'}"
    for reason in explanation.reasons:
        yield ""
        certainty = "" if reason.certainty == "proved" else f" ({reason.certainty})"
        yield from in_width(f"{in_one_line(reason.sentence, 1_000).removesuffix('.')}.")
        yield from in_width(f"{reason.code}{certainty}: {evidence_text(reason)}", "  ")
        yield from command_lines(reason)
