"""``python -m tools model``: check the model of the worker protocol with Spin."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor

import click

from tests.model.check import CORRECT, WRONG, Scenario, check, missing_programs


def main() -> int:
    if missing := missing_programs():
        click.echo(f"make: no {' and no '.join(missing)} (Debian: apt-get install spin gcc): the model is not checked")
        return 0
    started = time.monotonic()
    with ThreadPoolExecutor(2) as executor:  # each may use half of the memory and one core
        failures = list(executor.map(_report, (*CORRECT, *WRONG))).count(False)
    scenarios = len(CORRECT) + len(WRONG)
    click.echo(f"{scenarios} scenarios, {failures} unexpected results, {time.monotonic() - started:.0f} s")
    return 1 if failures else 0


def _report(scenario: Scenario) -> bool:
    """Check a scenario and print a line; return whether the result is the expected one."""
    started = time.monotonic()
    result = check(scenario)
    if scenario.expected:
        expected = result.violated in scenario.expected
        verdict = f"caught by {result.violated}" if expected else f"NOT CAUGHT ({result.violated or 'all hold'})"
    else:
        expected = not result.violated and result.complete
        verdict = "all hold" if expected else f"VIOLATED: {result.violated}" if result.violated else "INCOMPLETE"
    click.echo(
        f"{scenario.name:30} {scenario.bounds:28} {result.states:>10,} states, depth {result.depth:>7,}, "
        f"{time.monotonic() - started:4.1f} s: {verdict}"
    )
    return expected


if __name__ == "__main__":
    sys.exit(main())
