"""Flows, schedulers and deduplication that one client creates and the other continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bulltask.errors import InvalidNameError
from bulltask.jobs.job import Deduplication
from bulltask.jobs.names import JobState
from bulltask.queue import FlowJob
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue, recorded_ids
from tests.interop.node_bridge import NodeError
from tests.mixed_versions.conftest import Clients
from tests.mixed_versions.page import NEWEST_5, PINNED
from tests.support.manual_worker import ManualWorker
from tests.support.streams import Stream
from tests.support.worker import Worker

pytestmark = [pytest.mark.interop, pytest.mark.process]

UUID_LENGTH = 36
CHANGED = "update the table in docs/reference/mixed-versions.md"


def node_of(name: str, data: object = None, *children: dict[str, Any], **opts: object) -> dict[str, Any]:
    """Return a node of a flow for BullMQ's FlowProducer."""
    return {"name": name, "data": data or {}, "queueName": "{mail}", "opts": opts, "children": list(children)}


def test_a_bullmq_flow_runs_in_a_bulltask_worker(mail: InteropQueue, documented: str) -> None:
    leaf = node_of("add", {"x": 1})
    flow = mail.node.call("flow.add", flow=node_of("echo", {"value": "top"}, node_of("add", {"x": 2}, leaf), leaf))
    failing = node_of("fail", {"error": "PermanentError"}, failParentOnFailure=True)
    broken = mail.node.call("flow.add", flow=node_of("echo", {}, failing))
    mail.worker(children=2)
    assert len(flow["children"][0]["id"]) == UUID_LENGTH
    assert mail.node_result(flow["id"]) == "top"
    assert sorted(mail.job_call(flow["id"], "getChildrenValues").values()) == [11, 12]
    with pytest.raises(NodeError, match="failed"):
        mail.node_result(broken["id"])
    assert mail.counts() == {"completed": 4, "failed": 2}
    assert documented == "safe"


def test_a_bulltask_flow_runs_in_a_bullmq_worker(mail: InteropQueue, documented: str) -> None:
    with mail.app.flows() as flows:
        children = [FlowJob("echo", "mail", {"n": n}) for n in range(2)]
        top = flows.add(FlowJob("echo", "mail", {"top": True}, {}, children)).job.id
        failing = FlowJob("fail", "mail", {}, {"attempts": 1, "fail_parent_on_failure": True})
        broken = flows.add(FlowJob("echo", "mail", {}, {}, [failing])).job.id
    mail.node_worker("fail-named")
    assert mail.result(top).get(timeout=60) == {"top": True}
    values = mail.job_call(top, "getChildrenValues").values()
    assert sorted(values, key=str) == [{"n": 0}, {"n": 1}]
    wait_until(lambda: mail.result(broken).state is JobState.FAILED)
    assert mail.counts() == {"completed": 3, "failed": 2}
    assert documented == "safe"


def iterations(file: str) -> int:
    return len(set(recorded_ids(file))) if Path(file).exists() else 0


def test_a_bullmq_job_scheduler_continues_in_a_bulltask_worker(
    mail: InteropQueue, documented: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "runs")
    template = {"name": "record", "data": {"file": file}, "opts": {"attempts": 3}}
    mail.call("upsertJobScheduler", "often", {"every": 200}, template)
    mail.call("upsertJobScheduler", "seconds", {"pattern": "* * * * * *", "limit": 1}, template)
    mail.worker()
    wait_until(lambda: iterations(file) >= 6, 20, "six iterations")
    assert mail.call("getJobScheduler", "often")["iterationCount"] >= 5
    mail.call("removeJobScheduler", "often")
    wait_until(lambda: set(mail.counts()) == {"completed"}, 20, "the last iteration of both")
    assert documented == "safe"


def test_a_bulltask_job_scheduler_continues_in_a_bullmq_worker(
    mail: InteropQueue, documented: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "runs")
    with mail.app.queue("mail") as queue:
        queue.schedulers.upsert("often", name="record", every=0.2)
        queue.schedulers.upsert("seconds", name="record", cron="* * * * * *", limit=1)
        mail.node_worker("record", {"file": file})
        wait_until(lambda: iterations(file) >= 6, 20, "six iterations")
        found = queue.schedulers.get("often")
        assert found is not None
        assert queue.schedulers.remove("often")
    wait_until(lambda: set(mail.counts()) == {"completed"}, 20, "the last iteration of both")
    assert documented == "safe"


def test_both_clients_can_upsert_the_same_job_scheduler(mail: InteropQueue, documented: str) -> None:
    """The last call takes effect, and there is one next iteration."""
    template = {"name": "bullmq", "data": {}, "opts": {}}
    with mail.app.queue("mail") as queue:
        for every in (60, 120, 180):
            mail.call("upsertJobScheduler", "s", {"every": every * 1000}, template)
            found = queue.schedulers.get("s")
            assert found is not None
            assert (found.name, found.every_ms) == ("bullmq", every * 1000)
            queue.schedulers.upsert("s", name="bulltask", every=every)
            assert mail.call("getJobScheduler", "s")["name"] == "bulltask"
        assert [job.name for job in queue.get_jobs(["waiting", "delayed"])] == ["bulltask"]
        mail.call("removeJobScheduler", "s")
        assert queue.schedulers.count() == 0
    assert documented == "safe"


def test_repeatable_jobs_of_an_older_bullmq_continue(
    mail: InteropQueue, documented: str, clients: Clients, tmp_path: Path
) -> None:
    """BullMQ 6 has removed the job option ``repeat``: its workers continue such jobs, but without their data."""
    file = str(tmp_path / "runs")
    opts = {"repeat": {"every": 200}}
    clients[PINNED].call("queue.add", queue=mail.name, name="record", data={"file": file}, opts=opts)
    worker = mail.node_worker("record", {"file": file})
    wait_until(lambda: iterations(file) >= 3, 20, "three iterations in BullMQ's worker")
    mail.node.call("worker.close", worker=worker)
    [following] = mail.redis.zrange(mail.keys.delayed, 0, -1)
    data = mail.redis.hget(mail.keys.job(following), "data")
    assert {f'{{"file":"{file}"}}': "safe", "{}": "unsafe"}[data] == documented, CHANGED
    if documented == "safe":
        before = iterations(file)
        mail.worker()
        wait_until(lambda: iterations(file) >= before + 3, 20, "three iterations in bulltask's worker")


def test_deduplication_applies_across_both_clients(mail: InteropQueue, documented: str) -> None:
    manual_worker = ManualWorker(mail.app._broker, mail.keys)

    def add_with_bulltask(**deduplication: Any) -> str:
        with mail.app.queue("mail") as queue:
            return queue.add("a", deduplication=deduplication).id

    def add_with_bullmq(**deduplication: Any) -> str:
        return mail.add("a", deduplication=deduplication)

    for first, second in ((add_with_bulltask, add_with_bullmq), (add_with_bullmq, add_with_bulltask)):
        owner = first(id="simple")
        assert second(id="simple") == owner
        assert manual_worker.complete() == owner
        again = second(id="simple")
        assert again != owner
        assert first(id="simple") == again
        assert manual_worker.complete() == again
    owner = add_with_bulltask(id="throttled", ttl=60)
    assert manual_worker.complete() == owner
    assert add_with_bullmq(id="throttled", ttl=60_000) == owner
    owner = add_with_bullmq(id="slow", ttl=60_000)
    assert manual_worker.complete() == owner
    assert add_with_bulltask(id="slow", ttl=60) == owner
    manual_worker.close()
    assert documented == "safe"


KEEP = {"id": "d", "keepLastIfActive": True}
STORED_OPTIONS: list[dict[str, Any]] = [{}, {"priority": 7}, {"lifo": True}, {"delay": 60_000}, {"jobId": "chosen"}]
"""Options of jobs that are stored until the active job ends."""
DIES = """
@app.task(name="die")
def die():
    os.kill(os.getpid(), 9)
"""


@pytest.mark.parametrize("task", ["echo", "aecho"])
def test_keep_last_if_active_works_in_a_bulltask_worker(mail: InteropQueue, documented: str, task: str) -> None:
    """The last job added during a run follows it. BullMQ stores it, and no script of 5.62 would add it."""
    first = mail.add(task, {"value": 1}, deduplication=KEEP)
    with mail.app.queue("mail") as queue:
        job = queue.get_next_job("manual")
        assert job is not None
        for number in (2, 3):
            assert mail.add(task, {"value": number}, deduplication=KEEP) == first
        job.move_to_wait()
    mail.worker()
    mail.node_result(first)
    wait_until(lambda: mail.counts() == {"completed": 2}, 20, "the stored job")
    [other] = set(mail.redis.zrange(mail.keys.completed, 0, -1)) - {first}
    assert mail.node_job(other)["data"] == {"value": 3}
    assert mail.redis.keys(f"{mail.keys.base}d[en]:*") == []
    assert documented == "safe"


@pytest.mark.parametrize("version", [NEWEST_5])
def test_keep_last_if_active_works_for_a_job_that_crashes_its_children(mail: InteropQueue, tmp_path: Path) -> None:
    first = mail.add("die", deduplication=KEEP)
    with mail.app.queue("mail") as queue:
        job = queue.get_next_job("manual")
        assert job is not None
        assert mail.add("quick", deduplication=KEEP) == first
        job.move_to_wait()
    worker = Worker(
        tmp_path / "dying",
        DIES,
        options=["-Q", "mail"],
        settings={"broker_url": mail.url, "worker_concurrency": 1, "max_crashes": 1},
        environ={"JOURNAL_URL": mail.url},
    )
    try:
        wait_until(lambda: mail.counts() == {"failed": 1, "completed": 1}, 40, "the stored job")
        assert mail.node_job(first)["state"] == "failed"
    finally:
        worker.close()


def add_stored_job(mail: InteropQueue, queue: str, job: str, **options: Any) -> None:
    """Pause the queue while a job runs, and add a job with the same deduplication id, which BullMQ stores."""
    mail.node.call("queue.pause", queue=queue)
    opts = {"deduplication": KEEP, **options}
    assert mail.node.call("queue.add", queue=queue, name="a", data={"n": 2}, opts=opts)["id"] == job
    assert mail.redis.exists(f"bull:{queue}:dn:d")


def following_job(mail: InteropQueue, queue: str) -> dict[str, Any]:
    """Return what the end of the first job has added to Redis, without times."""
    read, base = mail.redis, f"bull:{queue}:"
    assert not read.exists(f"{base}dn:d")
    following = read.get(f"{base}de:d")
    job = read.hgetall(base + following)
    created, due = int(job.pop("timestamp")), read.zscore(f"{base}delayed", following)
    job["opts"] = {name: value for name, value in json.loads(job["opts"]).items() if name != "timestamp"}
    event_fields = [fields for _, fields in read.xrange(f"{base}events") if fields.get("jobId") == following]
    return {
        "id": following,
        "job": job,
        "events": [{name: value for name, value in fields.items() if name != "delay"} for fields in event_fields],
        "due after": due and int(due) // 4096 - created,
        "prioritized": read.zrange(f"{base}prioritized", 0, -1, withscores=True),
        "lists": {name: read.lrange(base + name, 0, -1) for name in ("wait", "paused", "active")},
    }


@pytest.mark.parametrize("version", [NEWEST_5])
@pytest.mark.parametrize("options", STORED_OPTIONS, ids=str)
def test_keep_last_if_active_adds_the_stored_job_as_bullmq_does(
    mail: InteropQueue, options: dict[str, Any], tmp_path: Path
) -> None:
    def add_first(queue: str) -> str:
        opts = {"deduplication": KEEP}
        job: dict[str, Any] = mail.node.call("queue.add", queue=queue, name="a", data={"n": 1}, opts=opts)
        return str(job["id"])

    in_bullmq = add_first("{bullmq}")
    mail.node.call("worker.start", queue="{bullmq}", processor="hold", args={"gate": str(tmp_path)})
    events = Stream(mail.url, "bull:{bullmq}:events")
    events.wait_for(event="active", jobId=in_bullmq)
    add_stored_job(mail, "{bullmq}", in_bullmq, **options)
    mail.node.call("gate.open", gate=str(tmp_path))
    events.wait_for(event="completed", jobId=in_bullmq)
    events.close()

    in_bulltask = add_first("{bulltask}")
    with mail.app.queue("bulltask") as queue:
        job = queue.get_next_job("manual")
        assert job is not None
        add_stored_job(mail, "{bulltask}", in_bulltask, **options)
        job.move_to_completed(None)
    assert following_job(mail, "{bulltask}") == following_job(mail, "{bullmq}")
    # BullMQ's worker, which waits, has popped the other marker.
    assert mail.redis.zrange("bull:{bulltask}:marker", 0, -1) == ["1"] * ("delay" in options)


def test_keep_last_if_active_works_in_a_bullmq_worker(mail: InteropQueue, documented: str, tmp_path: Path) -> None:
    gate = str(tmp_path)
    mail.node_worker("hold", {"gate": gate})
    first = mail.add("a", {"n": 1}, deduplication=KEEP)
    mail.stream.wait_for(event="active", jobId=first)
    assert mail.add("a", {"n": 2}, deduplication=KEEP) == first
    mail.node.call("gate.open", gate=gate)
    wait_until(lambda: mail.counts() == {"completed": 2}, 20)
    assert documented == "safe"


def test_both_clients_reject_the_same_job_ids(mail: InteropQueue, documented: str) -> None:
    """Both clients reject the same ids, so that each can address the jobs of the other."""
    with mail.app.queue("mail") as queue:
        for job_id in ("1", "0", "0:a", "a:b", "a:b:c:d"):
            with pytest.raises(InvalidNameError):
                queue.add("a", job_id=job_id)
            with pytest.raises(NodeError):
                mail.add("a", jobId=job_id)
        assert queue.add("a", job_id="a:b:c").id == mail.add("a", jobId="a:b:c") == "a:b:c"
    assert documented == "safe"


@pytest.mark.parametrize("version", [NEWEST_5])
@pytest.mark.parametrize("options", [{}, {"priority": 7}, {"delay": 60}, {"job_id": "chosen"}])
def test_keep_last_if_active_is_stored_by_bulltask_as_by_bullmq(mail: InteropQueue, options: dict[str, Any]) -> None:
    """While the owner is active, both clients store the last duplicate in the same form, and emit the same events."""
    stored = []
    for side in ("bullmq", "bulltask"):
        mail.redis.flushdb()
        with mail.app.queue("mail") as queue:
            first = mail.add("a", {"n": 1}, deduplication={**KEEP, "ttl": 60_000}, jobId="first")
            job = queue.get_next_job("manual")
            assert job is not None
            for number in (2, 3):
                if side == "bulltask":
                    dedup = Deduplication("d", keep_last_if_active=True)
                    added = queue.add("a", {"n": number}, deduplication=dedup, **options).id
                else:
                    wire = {**options, "delay": 60_000} if "delay" in options else options
                    names = {"jobId" if name == "job_id" else name: value for name, value in wire.items()}
                    added = mail.add("a", {"n": number}, deduplication=KEEP, **names)
                assert added == first
            deferred = mail.redis.hgetall(f"{mail.keys.base}dn:d")
            opts = json.loads(deferred.pop("opts"))
            kept = {name: opts.get(name) for name in ("de", "priority", "delay", "jobId")}
            if "job_id" not in options:
                assert deferred.pop("jid")
            entries = [fields for _, fields in mail.redis.xrange(mail.keys.events)]
            events = [fields["event"] for fields in entries if fields.get("deduplicationId") == "d"]
            stored.append((deferred, kept, events, mail.redis.ttl(mail.keys.deduplication("d"))))
            job.move_to_completed(None)
            assert not mail.redis.exists(f"{mail.keys.base}dn:d")
    assert stored[0] == stored[1]
