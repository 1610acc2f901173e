"""``bulltask why``: why a job does not run, or why a queue stands still."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from bulltask.app import App
from bulltask.cli.app_loader import load_app_or_broker
from bulltask.cli.job import ambiguous, queues_with_job
from bulltask.cli.options import ExitCode, json_option, redis_options
from bulltask.cli.terminal import echo, in_one_line, print_json
from bulltask.queue.reasons import Explanation, Reason

__all__ = ["why"]


@click.command("why", short_help="Say why a job does not run, or why a queue stands still.")
@click.argument("job_id", metavar="[ID]", required=False)
@redis_options
@click.option("-Q", "-q", "--queue", help="The job's queue; without an ID, the queue to explain.")
@json_option
@click.pass_context
def why(ctx: click.Context, /, *, job_id: str | None, queue: str | None, as_json: bool, **options: Any) -> None:
    """Say why the job ID does not run, or why the jobs of a queue do not, with what proves it and what mends it.

    All reasons that hold are printed. The one that binds first comes first.

    Without --queue, all queues are searched for the job: those of the app and of connected workers first, then the
    others.

    Exit codes: 0 (explained), 1 (Redis cannot be reached, or another error), 4 (the job was not found).
    """
    if job_id is None and queue is None:
        raise click.UsageError("pass a job's ID, a queue (-Q), or both")
    app = load_app_or_broker(ctx, options)
    try:
        explanation = app.queue(queue or _queue_of(app, str(job_id))).explain(job_id)
    finally:
        app.close()
    if as_json:
        print_json(explanation.to_json())
    else:
        echo("\n".join(_page(explanation)))
    codes = explanation.codes
    if "unknown-job" in codes:
        ctx.exit(ExitCode.NOT_FOUND)
    if explanation.job_id is not None and explanation.state is None:
        ctx.exit(ExitCode.ERROR)


def _queue_of(app: App, job_id: str) -> str:
    """Return the queue that has the job; the app's default queue if none has."""
    names = queues_with_job(app, job_id)
    if len(names) > 1:
        raise ambiguous(job_id, names)
    return names[0] if names else app._config.default_queue


def _page(explanation: Explanation) -> Iterator[str]:
    queue = f"queue {in_one_line(explanation.queue)}"
    if explanation.job_id is None:
        yield f"Queue {in_one_line(explanation.queue)}"
    else:
        yield f"Job {in_one_line(explanation.job_id)}, {queue}: {explanation.state or 'state unknown'}"
    for reason in explanation.reasons:
        yield ""
        yield from reason_lines(reason)


def reason_lines(reason: Reason) -> Iterator[str]:
    """Yield the lines about a reason: the sentence, the evidence, and the command."""
    certainty = "" if reason.certainty == "proved" else f" ({reason.certainty})"
    yield f"{in_one_line(reason.sentence, 1_000)}."
    evidence = ", ".join(f"{name}={_short(value)}" for name, value in reason.evidence.items() if value is not None)
    yield f"  {reason.code}{certainty}: {evidence}"
    if reason.command is not None:
        yield f"  $ {in_one_line(reason.command, 1_000)}" if _is_shell(reason.command) else f"  >>> {reason.command}"


def _is_shell(command: str) -> bool:
    return command.startswith(("bulltask ", "redis-cli "))


def _short(value: Any) -> str:
    if isinstance(value, list) and value and isinstance(value[0], dict):
        return f"{len(value)} jobs"
    if isinstance(value, dict):
        return f"{len(value)} jobs"
    if isinstance(value, list):
        return " ".join(in_one_line(str(item), 80) for item in value[:5]) + (" …" if len(value) > 5 else "")
    return in_one_line(str(value), 120)
