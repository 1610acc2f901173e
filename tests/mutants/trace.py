"""A pytest plugin that records which tests reach which lines, including in processes that tests start or fork.

A ``.pth`` file starts coverage in every process. A process takes the name of the test from its environment, or from
the process that forked it. `tests.mutants.record` reads the data files.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

from tests.support.fork_server import fork_server

__all__ = ["RESULTS", "TEST"]

TEST = "MUTANTS_TEST"
RESULTS = "MUTANTS_RESULTS"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Record lines under the name of this test."""
    measured = coverage.Coverage.current()
    if measured is None:
        return (yield)
    _set_test(measured, item.nodeid)
    try:
        return (yield)
    finally:
        _set_test(measured, "")


def _set_test(measured: coverage.Coverage, test: str) -> None:
    os.environ[TEST] = test
    fork_server.close()  # its processes inherit the name of the test at its start
    measured.config.context = test  # a forked child starts with this configuration
    measured.switch_context(test)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Write the outcome and duration of each phase; under pytest-xdist only the controller does."""
    if "PYTEST_XDIST_WORKER" not in os.environ:
        with Path(os.environ[RESULTS]).open("a") as file:
            file.write(json.dumps([report.nodeid, report.when, report.outcome, report.duration]) + "\n")
