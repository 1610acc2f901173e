"""Node's Worker runs the jobs that the Spark sink has created from rows."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask import TaskError
from bulltask.jobs.codec import encode
from tests.interop.interop_queue import InteropQueue
from tests.interop.spark_rows import write_rows

pytestmark = [pytest.mark.interop, pytest.mark.redis]

DATA: list[dict[str, Any]] = [{"n": n, "text": "ünï 😀", "none": None, "list": [[], {}]} for n in range(50)]
ROWS = [("add" if data["n"] else "echo", encode(data).decode()) for data in DATA]


def test_a_node_worker_runs_the_jobs_of_rows_and_stores_their_results(any_mail: InteropQueue) -> None:
    any_mail.node_worker("echo", concurrency=5)
    ids = write_rows(any_mail, ROWS)
    assert [any_mail.result(job_id).get(timeout=60) for job_id in ids] == DATA
    assert any_mail.counts() == {"completed": 50}
    seen = any_mail.node_job(ids[1])
    assert (seen["id"], seen["name"], seen["data"], seen["state"]) == (ids[1], "add", DATA[1], "completed")


def test_a_node_worker_applies_the_job_options_of_a_write(mail: InteropQueue) -> None:
    opts = {"attempts": 2, "backoff": 0, "remove_on_fail": False, "priority": 3}
    ids = write_rows(mail, [("fail", '{"n":1}'), ("fail", '{"n":2}')], jobOpts=json.dumps(opts))
    assert mail.counts() == {"prioritized": 2}
    assert [mail.node_job(job_id)["opts"]["jobId"] for job_id in ids] == ids
    mail.node_worker("fail", {"message": "no"})
    for job_id in ids:
        with pytest.raises(TaskError, match="no"):
            mail.result(job_id).get(timeout=60)
        assert mail.node_job(job_id)["attemptsMade"] == 2


def test_rows_whose_jobs_a_node_worker_has_removed_do_not_run_again(mail: InteropQueue) -> None:
    mail.node_worker("echo")
    [job_id] = write_rows(mail, ROWS[:1], jobOpts='{"remove_on_complete":true}')
    mail.stream.wait_for(1, event="completed", jobId=job_id)
    with pytest.raises(AssertionError):
        write_rows(mail, ROWS[:1], jobOpts='{"remove_on_complete":true}')
    assert mail.counts() == {}
