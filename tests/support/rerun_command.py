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
"""This test run's settings, read before tests change the environment."""


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Append the command to a failed test's report."""
    report = yield
    if report.failed:
        report.sections.append(("To rerun it", rerun_command(item.nodeid, item.user_properties, RUN_SETTINGS)))
    return report


def rerun_command(nodeid: str, properties: Iterable[tuple[str, object]], run_settings: Mapping[str, str]) -> str:
    """Return the shell command that reruns a test from the repository's root.

    Args:
        nodeid: The test's id.
        properties: The properties that the test recorded; ``seed`` is the seed of the fixture ``rng``.
        run_settings: The run's settings.
    """
    settings = dict(run_settings)
    if (seed := dict(properties).get("seed")) is not None:
        settings[SEED] = str(seed)
    words = [f"{name}={shlex.quote(value)}" for name, value in settings.items()]
    return " ".join([*words, ".venv/bin/python -m pytest", shlex.quote(nodeid)])
