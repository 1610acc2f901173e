"""The crash quarantine: how many jobs run together after a crash, and which jobs fail."""

from __future__ import annotations

import pytest

from bulltask.transport.scripts.move import CRASHES
from bulltask.worker.broker_backoff import ALONE, EXTRA_CRASHES, SMALL_GROUP, max_concurrent, should_fail

FIELD = CRASHES.encode()


def fields(crashes: str | None, *more: bytes) -> list[bytes]:
    return [b"name", b"add", b"data", b"{}", *([] if crashes is None else [FIELD, crashes.encode()]), *more]


def test_a_job_without_crashes_has_no_concurrency_limit() -> None:
    assert max_concurrent([], 2) == 0
    assert max_concurrent(fields(None), 2) == 0


def test_a_job_whose_data_looks_like_the_crash_field_is_not_quarantined() -> None:
    assert max_concurrent([b"data", FIELD, b"opts", b"9"], 2) == 0


@pytest.mark.parametrize(
    ("crashes", "limit", "allowed"), [(1, 2, SMALL_GROUP), (2, 2, ALONE), (1, 1, ALONE), (2, 9, ALONE)]
)
def test_a_job_runs_in_a_small_group_after_a_crash_then_alone(crashes: int, limit: int, allowed: int) -> None:
    assert max_concurrent(fields(str(crashes), b"atm", b"1"), limit) == allowed


@pytest.mark.parametrize("crashes", ["many", "", "9" * 5_000])
def test_a_malformed_number_of_crashes_quarantines_the_job(crashes: str) -> None:
    assert max_concurrent(fields(crashes), 2) == ALONE


@pytest.mark.parametrize("crashes", [1, 2, 3, 100])
def test_crashes_together_with_other_jobs_never_fail_a_running_job(crashes: int) -> None:
    assert not should_fail(crashes, 2, concurrent=2, running=True)


def test_a_job_that_ran_alone_fails_after_max_crashes() -> None:
    assert [should_fail(crashes, 2, concurrent=1, running=True) for crashes in (1, 2, 3)] == [False, True, True]
    assert should_fail(1, 1, concurrent=1, running=False)


def test_a_job_that_crashes_children_while_it_is_acquired_fails() -> None:
    limit = 2 + EXTRA_CRASHES
    assert [should_fail(crashes, 2, concurrent=9, running=False) for crashes in (limit - 1, limit)] == [False, True]
