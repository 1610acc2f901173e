"""A pytest plugin: writes each test's outcome to a file, and stops a test after a time."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

SECONDS = float(os.environ.get("SUITE_TIMEOUT", "240"))


def pytest_configure(config: pytest.Config) -> None:
    """Register the markers of plugins that are not loaded."""
    config.addinivalue_line("markers", "flaky: repeated by pytest-rerunfailures, which is not used")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Replace the time limits of the tests, which are up to five minutes."""
    for item in items:
        item.own_markers = [mark for mark in item.own_markers if mark.name != "timeout"]
        item.add_marker(pytest.mark.timeout(SECONDS))


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write a line for each test: its last phase, or the one that failed."""
    outcome: str = report.outcome
    if hasattr(report, "wasxfail"):
        outcome = "xfailed" if report.skipped else "xpassed"
    if report.when != "call" and outcome == "passed":
        return
    message = "" if outcome == "passed" else report.longreprtext
    with Path(os.environ["SUITE_OUTCOMES"]).open("a") as file:
        file.write(json.dumps({"name": report.nodeid, "outcome": outcome, "message": message}) + "\n")
