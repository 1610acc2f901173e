"""Rows that the Spark sink has made jobs of run in Node's Worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask import TaskError
from bulltask.jobs.codec import encode
from tests.interop.rows_of_spark import write_rows
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.redis]

DATA: list[dict[str, Any]] = [{"n": n, "text": "ünï 😀", "none": None, "list": [[], {}]} for n in range(50)]
ROWS = [("add" if one["n"] else "echo", encode(one).decode()) for one in DATA]


def test_rows_run_in_node_and_return_its_results(either: SideBySide) -> None:
    either.node_worker("echo", concurrency=5)
    ids = write_rows(either, ROWS)
    assert [either.result(one).get(timeout=60) for one in ids] == DATA
    assert either.counts() == {"completed": 50}
    seen = either.seen(ids[1])
    assert (seen["id"], seen["name"], seen["data"], seen["state"]) == (ids[1], "add", DATA[1], "completed")


def test_the_options_of_a_write_apply_in_node(mail: SideBySide) -> None:
    opts = {"attempts": 2, "backoff": 0, "remove_on_fail": False, "priority": 3}
    ids = write_rows(mail, [("fail", '{"n":1}'), ("fail", '{"n":2}')], jobOpts=json.dumps(opts))
    assert mail.counts() == {"prioritized": 2}
    assert [mail.seen(one)["opts"]["jobId"] for one in ids] == ids
    mail.node_worker("fail", {"message": "no"})
    for one in ids:
        with pytest.raises(TaskError, match="no"):
            mail.result(one).get(timeout=60)
        assert mail.seen(one)["attemptsMade"] == 2


def test_rows_that_node_has_run_and_removed_do_not_run_again(mail: SideBySide) -> None:
    mail.node_worker("echo")
    [one] = write_rows(mail, ROWS[:1], jobOpts='{"remove_on_complete":true}')
    mail.stream.wait_for(1, event="completed", jobId=one)
    with pytest.raises(AssertionError):
        write_rows(mail, ROWS[:1], jobOpts='{"remove_on_complete":true}')
    assert mail.counts() == {}
