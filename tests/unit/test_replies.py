"""Parsing the scripts' replies."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask.errors import (
    BrokerError,
    FailedChildrenError,
    JobError,
    JobNotFoundError,
    JobStateError,
    LockMismatchError,
    LockMissingError,
    ParentConflictError,
    ParentNotFoundError,
    PendingChildrenError,
    SchedulerBusyError,
    SchedulerCollisionError,
    SchedulerJobError,
)
from bulltask.transport.call import NO_JOB, Fetched, FetchedJob, NoJob, parse_fetched, raise_for, text


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (-1, JobNotFoundError),
        (-2, LockMissingError),
        (-3, JobStateError),
        (-4, PendingChildrenError),
        (-5, ParentNotFoundError),
        (-6, LockMismatchError),
        (-7, ParentConflictError),
        (-8, SchedulerJobError),
        (-9, FailedChildrenError),
        (-10, SchedulerCollisionError),
        (-11, SchedulerBusyError),
    ],
)
def test_each_negative_code_raises_an_error_that_names_the_job(code: int, error: type[JobError]) -> None:
    with pytest.raises(error, match=r"^job 7 in queue \{mail\}: ") as raised:
        raise_for(code, "7", "{mail}")
    assert (raised.value.job_id, raised.value.queue) == ("7", "{mail}")


def test_an_unknown_code_raises_a_broker_error() -> None:
    with pytest.raises(BrokerError, match="a script returned the unknown code -77 for job 7 in queue q"):
        raise_for(-77, "7", "q")


@pytest.mark.parametrize("reply", [0, 1, 5, b"-1", "7", None, [], [-1]])
def test_any_other_reply_raises_no_error(reply: Any) -> None:
    raise_for(reply, "7", "q")


@pytest.mark.parametrize(
    ("reply", "fetched"),
    [
        ([[b"name", b"t"], b"7", 0, 0], FetchedJob("7", [b"name", b"t"])),
        ([[b"name", b"t"], 7, 0, 0], FetchedJob("7", [b"name", b"t"])),
        ([0, 0, 0, 0], NO_JOB),
        ([0, 0, 250, 0], NoJob(limited_ms=250)),
        ([0, 0, -2, 0], NoJob(limited_ms=0)),
        ([0, 0, 0, b"1795216652158.5"], NoJob(due_ms=1_795_216_652_158)),
        ([0, 0, 0, 1_795_216_652_158], NoJob(due_ms=1_795_216_652_158)),
        (0, NO_JOB),
        (None, NO_JOB),
    ],
)
def test_the_reply_of_a_fetch_is_parsed(reply: Any, fetched: Fetched) -> None:
    assert parse_fetched(reply) == fetched


@pytest.mark.parametrize(
    "reply",
    [
        [],
        [[b"name"], b"7", 0, 0],
        [[b"name", [b"t"]], b"7", 0, 0],
        [[b"name", b"t"], [b"7"], 0, 0],
        [b"name", b"7", 0, 0],
        [0, 0, [b"7"], 0],
    ],
)
def test_a_reply_to_another_call_is_not_read_as_a_job(reply: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_fetched(reply)


@pytest.mark.parametrize(
    ("raw", "expected"), [(b"7", "7"), (7, "7"), ("7", "7"), (b"\xff", "\udcff"), ("é".encode(), "é")]
)
def test_an_id_of_any_bytes_is_decoded_as_text(raw: Any, expected: str) -> None:
    assert text(raw) == expected
