"""The official Python Worker runs the jobs that the Spark sink has created from rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask.jobs.codec import encode
from tests.interop.interop_queue import InteropQueue
from tests.interop.official.versions import SAME_IN_3
from tests.interop.spark_rows import write_rows

pytestmark = [pytest.mark.interop, pytest.mark.redis]

DATA: list[dict[str, Any]] = [{"n": n, "text": "ünï 😀", "none": None, "list": [[], {}]} for n in range(50)]


@SAME_IN_3
def test_rows_run_in_the_official_worker_and_return_its_results(mail: InteropQueue) -> None:
    mail.node_worker("echo", concurrency=5)
    ids = write_rows(mail, [("add", encode(data).decode()) for data in DATA])
    assert [mail.result(job_id).get(timeout=60) for job_id in ids] == DATA
    assert mail.counts() == {"completed": 50}
    seen = mail.node_job(ids[1])
    assert (seen["id"], seen["name"], seen["data"], seen["state"]) == (ids[1], "add", DATA[1], "completed")


@SAME_IN_3
def test_the_options_of_a_write_apply_in_the_official_worker(mail: InteropQueue) -> None:
    opts = {"attempts": 2, "backoff": 0, "remove_on_fail": False, "priority": 3}
    [job_id] = write_rows(mail, [("fail", '{"n":1}')], jobOpts=json.dumps(opts))
    assert mail.redis.zcard(mail.keys.prioritized) == 1
    mail.node_worker("fail", {"message": "no"})
    with pytest.raises(Exception, match="no"):
        mail.result(job_id).get(timeout=60)
    assert mail.node_job(job_id)["attemptsMade"] == 2
