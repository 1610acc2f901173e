"""A job passes through few files and functions (``python -m tools job-path``)."""

from __future__ import annotations

import pytest

from tools import job_path
from tools.job_path import JobPath


@pytest.fixture(scope="module")
def paths(redis_server: object) -> dict[str, JobPath]:
    """The paths of a job."""
    return job_path.measure(redis_server.url, rounds=3)  # type: ignore[attr-defined]


def test_a_job_passes_through_few_files(paths: dict[str, JobPath]) -> None:
    files = set[str]().union(*(path.files for path in paths.values()))
    assert len(files) <= 30, sorted(files)


def test_writing_an_outcome_and_starting_the_next_job_takes_few_functions(paths: dict[str, JobPath]) -> None:
    cycle = paths["cycle"]
    within_limits = len(cycle.files) <= 20 and len(cycle.functions) <= 60 and cycle.changes <= 50
    assert within_limits, f"{cycle}\n{cycle.by_file()}"
