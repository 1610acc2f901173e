"""The names of queues in bulltask and in BullMQ, with and without a hash tag."""

from __future__ import annotations

import pytest

from bulltask import App
from bulltask.transport.call import known_queues, queue_consumers
from tests.interop.interop_queue import InteropQueue
from tests.interop.node_bridge import NodeBridge

pytestmark = [pytest.mark.interop, pytest.mark.process]


@pytest.mark.parametrize("queue", ["emails", "{emails}", "{a}-b", "e-mails.v2", "ünïcode 😀", "a/b#c"])
@pytest.mark.parametrize("hash_tag", [True, False])
def test_a_queue_name_gets_a_hash_tag_unless_it_has_braces_or_the_setting_is_off(
    mail: InteropQueue, queue: str, hash_tag: bool
) -> None:
    app = App("names", mail.url, queue_hash_tag=hash_tag)
    job = app.send_task("echo", queue=queue)
    name = f"{{{queue}}}" if hash_tag and "{" not in queue else queue
    assert mail.node.call("queue.getJob", queue=name, job=job.id)["name"] == "echo"
    from_node = mail.node.call("queue.add", queue=name, name="echo", data={})
    assert app.result(from_node["id"], queue).state.value == "waiting"
    app.close()


def test_a_name_with_and_without_a_hash_tag_means_two_different_queues(mail: InteropQueue) -> None:
    mail.worker()
    mail.node.call("queue.add", queue="mail", name="echo", data={})
    assert mail.node_result(mail.add("echo", {"value": 1})) == 1
    assert mail.node.call("queue.getJobCounts", queue="mail")["waiting"] == 1


def test_a_worker_warns_about_jobs_in_the_queue_with_or_without_the_hash_tag(any_mail: InteropQueue) -> None:
    other = "mail" if any_mail.name == "{mail}" else "{mail}"
    for opts in ({}, {"delay": 60_000}, {"priority": 1}):
        any_mail.node.call("queue.add", queue=other, name="echo", data={}, opts=opts)
    any_mail.worker().wait_for_line("Worker started")
    [warning] = any_mail.workers[0].warnings()
    assert "hash tag" in warning["event"]
    assert f"queue_hash_tag={other == '{mail}'}" in warning["event"]
    assert (warning["processed"], warning["other"], warning["jobs"]) == (f"bull:{any_mail.name}:", f"bull:{other}:", 3)


def test_a_prefix_must_be_the_same_on_both_sides(mail: InteropQueue) -> None:
    mail.worker(prefix="shop")
    with NodeBridge.to(mail.url, prefix="shop") as node:
        job = node.call("queue.add", queue="{mail}", name="echo", data={"value": 1})
        assert node.call("job.waitUntilFinished", queue="{mail}", job=job["id"]) == 1
        assert len(node.call("queue.getWorkers", queue="{mail}")) == 1
        app = mail.sender(prefix="shop")
        assert app.result(job["id"]).get(timeout=60) == 1
        assert node.call("queue.getJob", queue="{mail}", job=app.send_task("echo").id)["name"] == "echo"
    others = [key for key in mail.redis.keys("*") if not key.startswith("shop:{mail}:")]
    assert {key for key in others if not key.startswith("bulltask:shop:{mail}:worker")} == {
        queue_consumers("shop", "tested"),
        known_queues("shop"),
        "bulltask:shop:{mail}:task-rates",
    }
