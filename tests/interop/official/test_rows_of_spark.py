"""Rows that the Spark sink has made jobs of run in the official Python Worker."""

from __future__ import annotations

import json
from typing import Any

import pytest

from bulltask.jobs.codec import encode
from tests.interop.official.versions import THE_SAME
from tests.interop.rows_of_spark import write_rows
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.redis]

DATA: list[dict[str, Any]] = [{"n": n, "text": "ünï 😀", "none": None, "list": [[], {}]} for n in range(50)]


@THE_SAME
def test_rows_run_in_the_official_worker_and_return_its_results(mail: SideBySide) -> None:
    mail.node_worker("echo", concurrency=5)
    ids = write_rows(mail, [("add", encode(one).decode()) for one in DATA])
    assert [mail.result(one).get(timeout=60) for one in ids] == DATA
    assert mail.counts() == {"completed": 50}
    seen = mail.seen(ids[1])
    assert (seen["id"], seen["name"], seen["data"], seen["state"]) == (ids[1], "add", DATA[1], "completed")


@THE_SAME
def test_the_options_of_a_write_apply_in_the_official_worker(mail: SideBySide) -> None:
    opts = {"attempts": 2, "backoff": 0, "remove_on_fail": False, "priority": 3}
    [one] = write_rows(mail, [("fail", '{"n":1}')], jobOpts=json.dumps(opts))
    assert mail.redis.zcard(mail.keys.prioritized) == 1
    mail.node_worker("fail", {"message": "no"})
    with pytest.raises(Exception, match="no"):
        mail.result(one).get(timeout=60)
    assert mail.seen(one)["attemptsMade"] == 2
