"""Show the command that reruns a failed test."""

from __future__ import annotations

import os
import shlex
from collections.abc import Generator, Iterable, Mapping

import pytest

from tests.support.processes import SESSION_VARIABLE

__all__ = ["SEED", "pytest_runtest_makereport", "rerun_command"]

SEED = "BULLTASK_TEST_SEED"
RUN_SETTINGS = {
    name: value
    for name, value in sorted(os.environ.items())
    if name.startswith("BULLTASK_") and name != SESSION_VARIABLE
}
"""The settings of this test run, read before tests change the environment."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append the command to the report of a failed test."""
    report = yield
    if report.failed:
        report.sections.append(("To repeat it", rerun_command(item.nodeid, item.user_properties, RUN_SETTINGS)))
    return report


def rerun_command(nodeid: str, properties: Iterable[tuple[str, object]], run_settings: Mapping[str, str]) -> str:
    """Return the shell command that reruns a test from the root of the repository.

    Args:
        nodeid: The id of the test.
        properties: The properties that the test has recorded; ``seed`` is the seed of the fixture ``rng``.
        run_settings: The settings of the run.
    """
    settings = dict(run_settings)
    if (seed := dict(properties).get("seed")) is not None:
        settings[SEED] = str(seed)
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    return " ".join([*words, ".venv/bin/python -m pytest", shlex.quote(nodeid)])
