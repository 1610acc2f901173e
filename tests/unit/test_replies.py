"""A script's negative reply becomes an exception that names the job and the queue."""

from __future__ import annotations

import pytest

from bulltask import errors
from bulltask.errors import BrokerError, JobError
from bulltask.transport.replies import raise_for

CODES = {
    -1: errors.JobNotFound,
    -2: errors.LockMissing,
    -3: errors.JobNotInState,
    -4: errors.PendingChildren,
    -5: errors.ParentNotFound,
    -6: errors.LockMismatch,
    -7: errors.ParentConflict,
    -8: errors.SchedulerJob,
    -9: errors.FailedChildren,
    -10: errors.SchedulerCollision,
    -11: errors.SchedulerBusy,
}


@pytest.mark.parametrize(("code", "kind"), CODES.items())
def test_each_code_is_an_exception_of_its_own(code: int, kind: type[JobError]) -> None:
    with pytest.raises(kind, match=r"job order-7 in queue \{mail\}: \S") as raised:
        raise_for(code, "order-7", "{mail}")
    assert (raised.value.job_id, raised.value.queue) == ("order-7", "{mail}")
    assert type(raised.value) is kind


def test_a_code_that_is_not_known_is_said() -> None:
    with pytest.raises(BrokerError, match="answered -12 for job order-7"):
        raise_for(-12, "order-7", "{mail}")


@pytest.mark.parametrize("reply", [0, 1, b"-1", None, []])
def test_any_other_reply_is_fine(reply: object) -> None:
    raise_for(reply, "order-7", "{mail}")
