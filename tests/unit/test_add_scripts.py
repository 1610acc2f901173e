"""The words of the add scripts: what is packed once for many jobs is what each of them says."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from bulltask.jobs.backoff import Backoff
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.add import add_job

NOW_MS = 1_700_000_000_000
KEYS = QueueKeys("bull", "{mail}", "mail")
KINDS = [
    JobOptions(),
    JobOptions(attempts=1, backoff=None),
    JobOptions(delay_ms=5_000, expires_in_ms=60_000, headers='{"a":1}'),
    JobOptions(priority=3, lifo=True, keep_completed_ms=0, keep_failed_ms=1_000, more={"kl": 5, "de": {"id": "x"}}),
    # With as many entries MessagePack spells the head of a map in another way.
    JobOptions(backoff=Backoff("fixed", 5), priority=1, more={f"option{n}": n for n in range(14)}),
    JobOptions(more={f"option{n}": n for n in range(11)}),
]


def said(job: NewJob, now_ms: int = NOW_MS) -> Any:
    return msgpack.unpackb(add_job(KEYS, job, now_ms).args[-1])


def new(options: JobOptions, **more: Any) -> NewJob:
    return NewJob("mail", more.pop("id", "s1"), "send", b"{}", options, **more)


@pytest.mark.parametrize("options", KINDS)
@pytest.mark.parametrize("chosen", [False, True])
def test_options_that_are_packed_once_are_right_for_each_job(options: JobOptions, chosen: bool) -> None:
    for job_id in ("s1", "s" * 200, "ä"):
        job = new(options, id=job_id, chosen=chosen)
        assert said(job) == job.opts(NOW_MS)


def test_jobs_with_other_options_or_another_time_are_packed_again() -> None:
    one, other = JobOptions(delay_ms=10, expires_in_ms=10), JobOptions(delay_ms=20, expires_in_ms=20)
    for options, now_ms in [(one, 1), (other, 1), (one, 1), (one, 2), (other, 2), (other, 1)]:
        job = new(options, chosen=True)
        assert said(job, now_ms) == job.opts(now_ms)
