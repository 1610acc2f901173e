"""``bulltask doctor``: what is wrong with the server and its queues, and what mends it."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any, Final

import click

from bulltask.app import App
from bulltask.cli.app_loader import existing_queue, load_app_or_broker
from bulltask.cli.job import command_lines, evidence_text, with_server
from bulltask.cli.options import duration_option, operator_options, queues_option
from bulltask.cli.queues import keys_of, queues_named_by
from bulltask.cli.terminal import echo, in_one_line, in_width, iso, print_json
from bulltask.jobs.errors import BrokerNotReadyError, BrokerUnavailableError, BulltaskError
from bulltask.lake.formatting import pluralize
from bulltask.queue.doctor import SEVERITIES, Diagnosis, Finding, examine
from bulltask.queue.reasons import Explanation

__all__ = ["doctor", "finding_lines", "with_this_server"]

_SHOWN: Final = 3
"""In how many queues the same sickness is shown with its evidence."""
_NAMED: Final = 20
_EXIT: Final = {"broken": 2, "warning": 1, "notice": 0, None: 0}


@click.command("doctor", short_help="Find what is wrong with Redis and all queues.")
@queues_option
@duration_option("--budget", default="10s", text="How long to look, about: first at the queues, then at the keys.")
@click.option("--fix", is_flag=True, help="Mend what needs no decision, after you have seen and confirmed it.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask for confirmation.")
@operator_options
def doctor(ctx: click.Context, /, *, budget: float, fix: bool, yes: bool, as_json: bool, **options: Any) -> None:
    """Find what is wrong with Redis and with all queues, with what proves it and what mends it.

    It finds every reason of 'bulltask why' that is not the normal course, and what is wrong with the server and its
    keys; docs/reference/reasons.md lists the checks. It changes nothing without --fix. What it may not read (the role
    doctor may read all), or had no time to look at, is listed.

    Exit codes: 0 (healthy), 1 (warnings, or an error), 2 (something is broken, or invalid usage), 4 (there is no such
    queue). --fix does not change them.
    """
    if fix and not (yes or sys.stdin.isatty()):
        raise click.UsageError("doctor --fix asks for confirmation: pass --yes")
    with closing(load_app_or_broker(ctx, options)) as app:
        diagnosis = _examine(app, options["queues"], budget)
        findings = [with_this_server(finding, ctx, options, app) for finding in diagnosis.findings]
        if not as_json:
            echo("\n".join(_page(app, diagnosis, findings)))
        done = _mend(findings, yes=yes, as_json=as_json) if fix else []
        if as_json:
            print_json(_to_json(app, diagnosis, findings, done))
    ctx.exit(_EXIT[diagnosis.worst])


def _examine(app: App, names: str | None, budget_s: float) -> Diagnosis:
    broker = app._broker
    try:
        with broker.pool.client() as client:
            client.connect()
            queues, scanned_all = keys_of(app, client, names, queues_named_by(app))
        for keys in queues if names is not None else ():
            existing_queue(app, keys.queue)  # or an error
    except (BrokerUnavailableError, BrokerNotReadyError):
        queues, scanned_all = [], True  # this is what the examination finds
    return examine(
        broker,
        queues,
        lambda name: app.queue(name).context,
        budget_s=budget_s,
        scanned_all=scanned_all,
        chosen=names is not None,
    )


def with_this_server(finding: Finding, ctx: click.Context, options: dict[str, Any], app: App) -> Finding:
    """Return a finding whose command is for the app and server of this command."""
    (reason,) = with_server(Explanation("", None, None, (finding.reason,)), ctx, options, app).reasons
    return replace(finding, reason=reason)


def _page(app: App, diagnosis: Diagnosis, findings: Sequence[Finding]) -> Iterator[str]:
    counts = Counter(finding.severity for finding in findings)
    found = (
        ", ".join(f"{counts[severity]} {severity}" for severity in SEVERITIES if counts[severity]) or "nothing found"
    )
    looked = f"{pluralize(diagnosis.queues, 'queue')}, {pluralize(diagnosis.keys, 'key')}, {diagnosis.seconds:.1f} s"
    yield f"{app._broker.endpoint.safe_url} ({looked}): {found}"
    yield from finding_lines(diagnosis, findings)


def finding_lines(diagnosis: Diagnosis, findings: Sequence[Finding]) -> Iterator[str]:
    """Yield what was found, with its evidence and command, and what was not looked at."""
    for finding, others in _grouped(findings):
        reason = finding.reason
        queue = "" if finding.queue is None else f", queue {in_one_line(finding.queue)}"
        certainty = "" if reason.certainty == "proved" else f" ({reason.certainty})"
        yield f"\n{finding.severity}: {reason.code}{certainty}{queue}"
        yield from in_width(f"{in_one_line(reason.sentence, 1_000).removesuffix('.')}.", "  ")
        yield from in_width(evidence_text(reason), "  ")
        yield from command_lines(reason)
        if others:
            more = " …" if len(others) > _NAMED else ""
            names = ", ".join(str(it.queue) for it in others[:_NAMED])
            yield from in_width(
                in_one_line(f"The same in {pluralize(len(others), 'queue')}: {names}{more}", 1_000), "  "
            )
        if finding.fix is not None:
            yield from in_width(in_one_line(f"--fix would {finding.fix.what}", 1_000), "  ")
    if diagnosis.not_examined:
        yield "\nNot examined:"
        for line in diagnosis.not_examined:
            yield from in_width(f"- {in_one_line(line, 1_000)}", "  ")


def _grouped(findings: Sequence[Finding]) -> Iterator[tuple[Finding, Sequence[Finding]]]:
    """Yield the findings; of one that many queues have, the first ones, and the others with the last of these."""
    groups: dict[tuple[str, str, bool], list[Finding]] = {}
    for finding in findings:
        groups.setdefault((finding.severity, finding.reason.code, finding.queue is None), []).append(finding)
    for group in groups.values():
        for number, finding in enumerate(group[:_SHOWN], 1):
            yield finding, group[number:] if number == _SHOWN else ()


def _mend(findings: Sequence[Finding], *, yes: bool, as_json: bool) -> list[str]:
    fixes = [finding.fix for finding in findings if finding.fix is not None]
    if not fixes:
        echo("\nNothing that --fix can mend.", err=as_json)
        return []
    echo("\nTo mend:\n" + "\n".join(f"  - {in_one_line(fix.what)}" for fix in fixes), err=as_json)
    if not yes:
        click.confirm(f"Do {'this' if len(fixes) == 1 else f'these {len(fixes)}'}?", abort=True, err=as_json)
    done = []
    for fix in fixes:
        try:
            done.append(fix.apply())
        except BulltaskError as exc:
            done.append(f"not done: {fix.what}: {exc}")
        echo(f"  {in_one_line(done[-1])}", err=as_json)
    return done


def _to_json(app: App, diagnosis: Diagnosis, findings: Sequence[Finding], done: Sequence[str]) -> dict[str, Any]:
    return {
        "server": app._broker.endpoint.safe_url,
        "at": iso(app._broker.clock.now_ms()),
        "worst": diagnosis.worst,
        "findings": [finding.to_json() for finding in findings],
        "not_examined": list(diagnosis.not_examined),
        "queues": diagnosis.queues,
        "keys": diagnosis.keys,
        "seconds": round(diagnosis.seconds, 3),
        "fixed": list(done),
    }
