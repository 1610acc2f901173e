"""Distribution of tests to pytest-xdist's workers: file by file, the longest first.

One worker runs all tests of a file, so that module fixtures are set up once. All tests that use the Spark session are
one unit: a JVM takes ten CPU seconds to start, minutes to warm up, and a gigabyte of memory. Tests that start their own
JVMs are two units, because a single unit would still be running when all other tests have finished.

pytest-xdist has groups for this (``--dist loadgroup``), but up to 3.8 they have no effect with pytest 9.2: xdist
appends the group to the test's id, where pytest no longer looks for it.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

__all__ = ["Distribution", "sort_longest_first"]

# The first matching prefix counts. Tests with the same unit name belong to one unit.
UNITS = (
    ("tests/spark/local/test_demo.py", "JVMs of examples"),
    ("tests/spark/local/", "Spark's session"),
    ("tests/spark/cluster/", "JVMs of clusters"),
    ("tests/spark/worker/", "JVMs of examples"),
)
# The longest units start first, so that workers do not wait long for the last one.
FIRST = (
    "Spark's session",
    "JVMs of clusters",
    "JVMs of examples",
    "tests/chaos/",
    "tests/fuzz/",
    "tests/process/",
    "tests/interop/",
    "tests/spark/",
    "tests/dashboard/test_browser.py",
    "tests/unit/test_benchmarks.py",
    "tests/unit/test_site.py",
)


class Distribution(LoadScopeScheduling):  # type: ignore[misc]  # xdist has no types
    """A scheduler that hands units of tests to the workers, in the order of the tests."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False  # True would start with the largest units
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def unit(nodeid: str) -> str:
    """Return the unit of a test."""
    path = nodeid.partition("::")[0]
    return next((name for begin, name in UNITS if path.startswith(begin)), path)


def sort_longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the order in which their units start."""
    items.sort(key=lambda item: _position(unit(item.nodeid)))


def _position(name: str) -> int:
    return next((index for index, begin in enumerate(FIRST) if name.startswith(begin)), len(FIRST))
