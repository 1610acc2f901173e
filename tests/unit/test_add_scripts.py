"""Arguments of the add scripts: options that are packed once for many jobs are correct for each job."""

from __future__ import annotations

from typing import Any

import msgpack
import pytest

from bulltask.jobs.backoff import Backoff
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.add import add_job

NOW_MS = 1_700_000_000_000
KEYS = QueueKeys("bull", "{mail}", "mail")
OPTIONS = [
    JobOptions(),
    JobOptions(attempts=1, backoff=None),
    JobOptions(delay_ms=5_000, expires_in_ms=60_000, headers='{"a":1}'),
    JobOptions(priority=3, lifo=True, keep_completed_ms=0, keep_failed_ms=1_000, more={"kl": 5, "de": {"id": "x"}}),
    # A map of more than 15 entries has a different header in MessagePack.
    JobOptions(backoff=Backoff("fixed", 5), priority=1, more={f"option{n}": n for n in range(14)}),
    JobOptions(more={f"option{n}": n for n in range(11)}),
]


def packed_opts(job: NewJob, now_ms: int = NOW_MS) -> Any:
    return msgpack.unpackb(add_job(KEYS, job, now_ms).args[-1])


def new_job(options: JobOptions, **fields: Any) -> NewJob:
    return NewJob("mail", fields.pop("id", "s1"), "send", b"{}", options, **fields)


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("chosen", [False, True])
def test_job_options_packed_once_are_correct_for_every_job_of_a_bulk_add(options: JobOptions, chosen: bool) -> None:
    for job_id in ("s1", "s" * 200, "ä"):
        job = new_job(options, id=job_id, has_custom_id=chosen)
        assert packed_opts(job) == job.opts(NOW_MS)


def test_jobs_with_other_options_or_another_time_are_packed_separately() -> None:
    first, second = JobOptions(delay_ms=10, expires_in_ms=10), JobOptions(delay_ms=20, expires_in_ms=20)
    for options, now_ms in [(first, 1), (second, 1), (first, 1), (first, 2), (second, 2), (second, 1)]:
        job = new_job(options, has_custom_id=True)
        assert packed_opts(job, now_ms) == job.opts(now_ms)
