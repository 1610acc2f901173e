"""``bulltask doctor`` finds nothing in a healthy system: workers of both clients, a schedule, jobs of every kind."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from click.testing import CliRunner

from bulltask.cli.main import main
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue
from tests.support.command_output import json_of

pytestmark = [pytest.mark.interop, pytest.mark.process]


@pytest.fixture
def healthy(mail: InteropQueue) -> Iterator[InteropQueue]:
    """The queue, on a server that stores its data and remembers nothing of other tests."""
    mail.redis.config_set("save", "3600 1")
    mail.redis.slowlog_reset()
    mail.redis.execute_command("ACL", "LOG", "RESET")
    yield mail
    mail.redis.config_set("save", "")


def test_a_healthy_system_of_both_clients_yields_nothing(healthy: InteropQueue) -> None:
    queue = healthy.app.queue("mail")
    queue.schedulers.upsert("yearly", cron="0 0 1 1 *", name="echo")
    healthy.call("upsertJobScheduler", "hourly", {"every": 3_600_000}, {"name": "echo"})
    worker = healthy.worker()
    healthy.node_worker()
    healthy.node.call("events.start", queue=healthy.name)
    worker.wait_for_line("Child started")

    for number in range(4):
        healthy.send("echo", value=number)
        healthy.add("echo", {"value": number})
    healthy.send("fail", options={"max_retries": 0})
    healthy.send("echo", options={"countdown": 600})
    healthy.add("echo", delay=600_000, deduplication={"id": "once"})
    healthy.add("echo", priority=3)
    child = {"name": "echo", "queueName": healthy.name}
    healthy.node.call("flow.add", flow={"name": "echo", "queueName": healthy.name, "children": [child, child]})
    logged = healthy.add("echo")
    healthy.call("addJobLog", logged, "a line")
    is_over = ("wait", "active", "prioritized", "waiting-children")
    wait_until(lambda: not set(is_over) & healthy.counts().keys(), 30, "the jobs")

    found = CliRunner().invoke(main, ["-b", healthy.url, "doctor", "--json"])
    document = json_of(found, "doctor")
    assert (document["findings"], document["not_examined"], found.exit_code) == ([], [], 0)
    assert healthy.counts()["completed"] >= 10
    assert healthy.counts()["delayed"] == 4
