"""Shows with each test that fails the command that repeats it."""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Iterable, Mapping

import pytest

from tests.support.processes import SESSION_VARIABLE

__all__ = ["SEED", "pytest_runtest_makereport", "rerun_command"]

SEED = "BULLTASK_TEST_SEED"
GIVEN = {
    name: value
    for name, value in sorted(os.environ.items())
    if name.startswith("BULLTASK_") and name != SESSION_VARIABLE
}
"""What this run was asked for; a test may change its environment."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Add the command to the report, below what the test has printed."""
    report = yield
    if report.failed:
        report.sections.append(("To repeat it", rerun_command(item.nodeid, item.user_properties, GIVEN)))
    return report


def rerun_command(nodeid: str, properties: Iterable[tuple[str, object]], given: Mapping[str, str]) -> str:
    """Return the command, for a shell in the root of the repository.

    Args:
        nodeid: of the test.
        properties: what it has recorded; its ``seed`` is what the fixture ``rng`` began with.
        given: the settings of the run.
    """
    said = dict(given)
    if (seed := dict(properties).get("seed")) is not None:
        said[SEED] = str(seed)
    words = [f"{name}={shlex.quote(value)}" for name, value in said.items()]
    return " ".join([*words, ".venv/bin/python -m pytest", shlex.quote(nodeid)])
