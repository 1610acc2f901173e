"""Which of pytest-xdist's workers runs what: file by file, and what takes longest begins first.

A file is run by one worker, so that what its module has made once is not made by each of them. All that uses the
session of Spark is one unit: a JVM takes ten CPU seconds to start, minutes to become quick, and a gigabyte. What
starts JVMs of its own is two units, as one would still run when everything else has ended.

pytest-xdist has groups for that (``--dist loadgroup``), but up to 3.8 they do not count with pytest 9.2: they are
written behind a test's id, where pytest does not look any more.
"""

from __future__ import annotations

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

__all__ = ["Distribution", "sort_longest_first"]

# The first that fits. What has one name is one unit.
UNITS = (
    ("tests/spark/local/test_demo.py", "JVMs of examples"),
    ("tests/spark/local/test_example_killed.py", "JVMs of examples"),
    ("tests/spark/local/test_pipeline_killed.py", "JVMs of clusters"),  # six drivers, and a session to compare with
    ("tests/spark/local/", "Spark's session"),
    ("tests/spark/cluster/", "JVMs of clusters"),
    ("tests/spark/worker/", "JVMs of examples"),
)
# The longest, so that a run ends with short ones: at its end some workers wait for the last.
FIRST = (
    "Spark's session",
    "JVMs of clusters",
    "JVMs of examples",
    "tests/process/",
    "tests/interop/",
    "tests/spark/",
    "tests/unit/test_benchmarks.py",
)


class Distribution(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Responsible for handing units to the workers, in the order of the tests, whenever one is nearly done."""

    def __init__(self, config: pytest.Config, log: Producer | None = None) -> None:
        config.option.loadscopereorder = False  # would begin with the units of most tests
        super().__init__(config, log)

    def _split_scope(self, nodeid: str) -> str:
        return unit(nodeid)


def unit(nodeid: str) -> str:
    """The unit of a test."""
    path = nodeid.partition("::")[0]
    return next((name for begin, name in UNITS if path.startswith(begin)), path)


def sort_longest_first(items: list[pytest.Item]) -> None:
    """Sort tests by the order in which their units are to begin."""
    items.sort(key=lambda item: _place(unit(item.nodeid)))


def _place(name: str) -> int:
    return next((place for place, begin in enumerate(FIRST) if name.startswith(begin)), len(FIRST))
