"""Job schedulers of Node and bulltask run in the workers of both."""

from __future__ import annotations

import itertools
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from bulltask.jobs.schedules import Rule
from bulltask.queue.sync.schedulers import JobSchedulers
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue, recorded_ids
from tests.support.machine_load import scale_to_load
from tests.support.streams import server_ms

pytestmark = [pytest.mark.interop, pytest.mark.process]


def schedule(
    sides: InteropQueue, scheduler: str, repeat: dict[str, Any], name: str, data: object = None
) -> dict[str, Any]:
    """Call Node's ``upsertJobScheduler``; return the job of the first iteration."""
    template = {"name": name, "data": {} if data is None else data, "opts": {"attempts": 3, "removeOnComplete": 100}}
    job: dict[str, Any] = sides.call("upsertJobScheduler", scheduler, repeat, template)
    return job


def moments(file: str, scheduler: str) -> list[int]:
    """Return when the iterations that ran were due, from their ids."""
    if not Path(file).exists():
        return []
    ids = [job.rpartition(":") for job in recorded_ids(file)]
    return [int(ms) for name, _, ms in ids if name == f"repeat:{scheduler}"]


def assert_regular(due: list[int], every_ms: int) -> None:
    """Assert that no iteration ran twice, and that they ran in order; a busy machine may skip one."""
    steps = {later - earlier for earlier, later in itertools.pairwise(due)}
    assert all(step > 0 and step % every_ms == 0 for step in steps), due


@pytest.mark.parametrize("task", ["record", "arecord"])
def test_bulltask_workers_run_a_job_scheduler_that_node_has_created(
    any_mail: InteropQueue, tmp_path: Path, task: str
) -> None:
    file = str(tmp_path / "runs")
    schedule(any_mail, "often", {"every": 300}, task, {"file": file})
    any_mail.worker(children=2)
    wait_until(lambda: len(moments(file, "often")) >= 6, 60, "six iterations")
    due = moments(file, "often")[:6]
    assert_regular(due, 300)
    known = any_mail.call("getJobScheduler", "often")
    assert known["iterationCount"] >= 6
    assert known["template"]["data"] == {"file": file}


def test_bulltask_workers_run_a_cron_pattern_set_by_node_every_second(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    schedule(mail, "seconds", {"pattern": "* * * * * *", "tz": "Europe/Berlin"}, "record", {"file": file})
    mail.worker(children=2)
    wait_until(lambda: len(moments(file, "seconds")) >= 5, 60, "five iterations")
    due = moments(file, "seconds")[:5]
    assert_regular(due, 1000)
    assert due[0] % 1000 == 0


@pytest.mark.parametrize("scheduler", ["tenant:7:report:daily:eu", "a::::b:", "record::::100"])
def test_the_id_of_a_job_scheduler_of_node_may_look_like_a_legacy_key(
    mail: InteropQueue, tmp_path: Path, scheduler: str
) -> None:
    file = str(tmp_path / "runs")
    mail.worker()
    schedule(mail, scheduler, {"every": 100, "limit": 4}, "record", {"file": file})
    wait_until(lambda: mail.counts() == {"completed": 4}, 60, "four iterations and nothing that follows")
    assert len(moments(file, scheduler)) == 4


def test_a_limit_set_by_node_ends_a_schedule_after_its_last_iteration(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.worker()
    schedule(mail, "thrice", {"every": 100, "limit": 3}, "record", {"file": file})
    wait_until(lambda: mail.counts() == {"completed": 3}, 60, "three iterations and nothing that follows")
    assert len(moments(file, "thrice")) == 3


def test_an_end_date_set_by_node_ends_a_schedule(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.worker()
    mail.send("echo").get(timeout=60)
    end = server_ms(mail.redis) + 2_500
    schedule(mail, "short", {"pattern": "* * * * * *", "endDate": end}, "record", {"file": file})
    wait_until(lambda: set(mail.counts()) == {"completed"}, 60, "the last iteration")
    due = moments(file, "short")
    assert 1 <= len(due) <= 3
    assert due[-1] <= end < due[-1] + 1000


def test_iterations_that_fail_or_are_retried_do_not_end_a_schedule(mail: InteropQueue) -> None:
    schedule(mail, "failing", {"every": 200}, "fail", {"error": "PermanentError"})
    mail.worker()
    wait_until(lambda: mail.counts().get("failed", 0) >= 4, 60, "four failures")
    assert mail.call("getJobScheduler", "failing")["iterationCount"] >= 4


def test_a_bulltask_worker_runs_a_repeatable_job_that_node_has_added(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.worker()
    mail.add("record", {"file": file}, repeat={"every": 250, "limit": 4})
    wait_until(lambda: mail.counts() == {"completed": 4}, 60, "four iterations")
    assert len(recorded_ids(file)) == 4


@pytest.mark.parametrize("upsert_in", ["node", "bulltask"])
def test_a_schedule_is_paused_and_resumed_while_node_runs_its_jobs(
    mail: InteropQueue, tmp_path: Path, upsert_in: str
) -> None:
    file = str(tmp_path / "runs")
    with mail.app.queue("mail") as queue:
        if upsert_in == "node":
            schedule(mail, "often", {"every": 100}, "record", {"file": file})
        else:
            queue.schedulers.upsert("often", name="record", every=0.1, data={"file": file})
        mail.node_worker("record", {"file": file})
        wait_until(lambda: len(moments(file, "often")) >= 2, 60, "two iterations")
        assert queue.schedulers.pause("often") is not None
        assert mail.call("getJobScheduler", "often") is None
        wait_until(lambda: set(mail.counts()) == {"completed"}, 60, "the last iteration before the pause")
        before = moments(file, "often")
        resumed = queue.schedulers.resume("often")
        assert resumed is not None
        known = mail.call("getJobScheduler", "often")
        assert known["template"]["data"] == {"file": file}
        wait_until(lambda: len(moments(file, "often")) >= len(before) + 3, 60, "three iterations after the pause")
        assert_regular(moments(file, "often"), 100)
        queue.schedulers.pause("often")
        schedule(mail, "often", {"every": 3_600_000}, "record", {"file": file})
        assert [item.paused_ms for item in queue.schedulers.list()] == [None]
        assert queue.schedulers.list_paused() == []


# --- repeatable jobs of BullMQ before 5.10 ----------------------------------------------------------------------------


def add_legacy_repeatable(sides: InteropQueue, key: str, name: str, data: object, repeat: dict[str, Any]) -> str:
    """Add a repeatable job with a legacy key: Node keeps using such a key if it exists."""
    sides.redis.zadd(sides.keys.repeat, {key: 1})
    return sides.add(name, data, repeat=repeat, attempts=2)


def test_legacy_repeatable_jobs_continue_to_their_limit(mail: InteropQueue, tmp_path: Path) -> None:
    file = str(tmp_path / "runs")
    mail.worker()
    add_legacy_repeatable(mail, "record::::250", "record", {"file": file}, {"every": 250, "limit": 4})
    assert mail.redis.zrange(mail.keys.repeat, 0, -1) == ["record::::250"]
    wait_until(lambda: mail.counts() == {"completed": 4}, 60, "four runs")
    assert len(set(recorded_ids(file))) == 4


def test_a_removed_legacy_repeatable_job_ends(mail: InteropQueue) -> None:
    mail.worker()
    job = add_legacy_repeatable(mail, "echo::::1000000000000", "echo", {}, {"every": 10**12})
    mail.redis.delete(mail.keys.repeat)
    mail.job_call(job, "promote")
    wait_until(lambda: mail.counts() == {"completed": 1}, 60, "the last run")


@pytest.mark.parametrize(
    ("key", "data", "repeat"),
    [
        ("echo::::1000000000000", {}, {"every": 10**12}),
        ("echo::::1000000000000", {"id": 7}, {"every": 10**12, "limit": 9}),
        ("echo:::UTC:0 0 1 1 *", {"id": "x"}, {"pattern": "0 0 1 1 *", "tz": "UTC"}),
        ("echo::4000000000000::0 0 1 1 *", [], {"pattern": "0 0 1 1 *", "endDate": 4 * 10**12}),
    ],
)
def test_both_workers_add_the_same_next_job_of_a_repeatable_job(
    mail: InteropQueue, key: str, data: object, repeat: dict[str, Any]
) -> None:
    next_jobs = []
    for side in ("Node", "bulltask"):
        mail.redis.flushdb()
        job = add_legacy_repeatable(mail, key, "echo", data, repeat)
        worker = mail.worker(incompatible_timeout=0) if side == "bulltask" else None
        handle = mail.node_worker() if side == "Node" else ""
        mail.job_call(job, "promote")
        # The job may fail because its data matches no argument; only the next job matters.
        wait_until(lambda: has_next_job(mail.counts()), 60, "the next job")
        next_jobs.append((next_repeat(mail), mail.redis.zrange(mail.keys.repeat, 0, -1, withscores=True)))
        if worker is not None:
            worker.stop()
        else:
            mail.node.call("worker.close", worker=handle)
    assert next_jobs[0] == next_jobs[1]


def has_next_job(counts: dict[str, int]) -> bool:
    """Return whether one job has ended and the next one is delayed."""
    return counts in ({"completed": 1, "delayed": 1}, {"failed": 1, "delayed": 1})


def next_repeat(sides: InteropQueue) -> list[tuple[str, dict[str, Any]]]:
    """Return the delayed jobs with their hashes, without times."""
    jobs = []
    for job in sorted(sides.redis.zrange(sides.keys.delayed, 0, -1)):
        fields = sides.redis.hgetall(sides.keys.job(job))
        options = json.loads(fields.pop("opts"))
        for name in ("timestamp", "delay"):
            fields.pop(name)
            options.pop(name)
        jobs.append((job, {**fields, "opts": options}))
    return jobs


def test_both_workers_add_the_same_next_job_of_a_scheduler(mail: InteropQueue) -> None:
    """Each worker acquires the first iteration of a scheduler; the next jobs are equal except for their times."""
    repeats: dict[str, dict[str, Any]] = {
        "interval": {"every": 3_600_000},
        "limited": {"every": 3_600_000, "limit": 5},
        "pattern": {
            "pattern": "0 3 * * *",
            "tz": "America/New_York",
            "immediately": True,
            "endDate": 4_000_000_000_000,
        },
    }
    options = {"attempts": 3, "backoff": {"type": "exponential", "delay": 500}, "priority": 0, "removeOnComplete": True}
    options |= {"keepLogs": 5, "stackTraceLimit": 2, "lifo": True, "sizeLimit": 1000}
    for scheduler, repeat in repeats.items():
        mail.call("upsertJobScheduler", f"bulltask-{scheduler}", repeat, {"name": "echo", "data": {}, "opts": options})
    worker = mail.worker()
    wait_until(lambda: mail.counts() == {"delayed": 3}, 60, "bulltask's next iterations")
    from_bulltask = {scheduler: following(mail, f"bulltask-{scheduler}") for scheduler in repeats}
    for scheduler in repeats:
        mail.call("removeJobScheduler", f"bulltask-{scheduler}")
    worker.stop()
    for scheduler, repeat in repeats.items():
        mail.call("upsertJobScheduler", f"node-{scheduler}", repeat, {"name": "echo", "data": {}, "opts": options})
    mail.node_worker()
    wait_until(lambda: mail.counts() == {"delayed": 3}, 60, "Node's next iterations")
    from_node = {scheduler: following(mail, f"node-{scheduler}") for scheduler in repeats}
    assert from_bulltask == from_node


def following(sides: InteropQueue, scheduler: str) -> dict[str, Any]:
    """Return the hashes of a scheduler's next job and of the scheduler, without times or names."""
    at = int(sides.redis.zscore(sides.keys.repeat, scheduler))
    job = sides.redis.hgetall(sides.keys.job(f"repeat:{scheduler}:{at}"))
    options = json.loads(job.pop("opts"))
    assert options.pop("jobId") == f"repeat:{scheduler}:{at}"
    assert options.pop("repeatJobKey") == job.pop("rjk") == scheduler
    assert options.pop("prevMillis", at) == at
    # Node reads its clock twice.
    assert abs(int(job.pop("timestamp")) - options.pop("timestamp")) < scale_to_load(1000)
    assert int(job.pop("delay")) == int(options.pop("delay"))
    known = sides.redis.hgetall(f"{sides.keys.repeat}:{scheduler}")
    known.pop("offset", None)
    return {"job": job, "options": options, "scheduler": known}


# --- bulltask ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def schedulers(mail: InteropQueue) -> JobSchedulers:
    """bulltask's schedulers of the queue ``mail``."""
    return mail.app.queue("mail").schedulers


def test_a_node_worker_runs_job_schedulers_of_bulltask(
    mail: InteropQueue, schedulers: JobSchedulers, tmp_path: Path
) -> None:
    file = str(tmp_path / "runs")
    mail.node_worker("record", {"file": file})
    schedulers.upsert("often", every=0.3, name="record", data={"file": file})
    schedulers.upsert("seconds", cron="* * * * * *", tz="America/New_York", name="record", data={"file": file})
    wait_until(lambda: len(moments(file, "often")) >= 5, 60, "five of the interval")
    wait_until(lambda: len(moments(file, "seconds")) >= 4, 60, "four of the pattern")
    assert_regular(moments(file, "often"), 300)
    assert_regular(moments(file, "seconds"), 1000)
    scheduler = schedulers.get("often")
    assert scheduler is not None
    assert scheduler.iterations >= 5


@pytest.mark.parametrize("maker", ["bulltask", "Node"])
def test_node_and_bulltask_workers_share_a_schedule_and_run_each_iteration_once(
    mail: InteropQueue, schedulers: JobSchedulers, tmp_path: Path, maker: str
) -> None:
    file = str(tmp_path / "runs")
    mail.node_worker("record", {"file": file}, concurrency=2)
    mail.worker(children=2)
    if maker == "bulltask":
        schedulers.upsert("often", every=0.1, name="record", data={"file": file})
        schedulers.upsert("seconds", cron="* * * * * *", name="record", data={"file": file})
    else:
        schedule(mail, "often", {"every": 100}, "record", {"file": file})
        schedule(mail, "seconds", {"pattern": "* * * * * *", "tz": "UTC"}, "record", {"file": file})
    wait_until(lambda: len(set(workers(file))) >= 2 and len(recorded_ids(file)) >= 40, 60, "forty runs on both sides")
    for scheduler, every_ms in (("often", 100), ("seconds", 1000)):
        assert_regular(moments(file, scheduler), every_ms)
    assert len(mail.redis.zrange(mail.keys.delayed, 0, -1)) <= 2, "no jobs have accumulated"


def workers(file: str) -> list[str]:
    """Return the processes that ran jobs."""
    return [line.split()[1] for line in Path(file).read_text().splitlines()] if Path(file).exists() else []


def test_node_reads_job_schedulers_that_bulltask_has_created(mail: InteropQueue, schedulers: JobSchedulers) -> None:
    scheduler = schedulers.upsert(
        "nightly", cron="0 3 * * *", tz="Europe/Berlin", limit=9, name="clean", data={"days": 7}, options={"lifo": True}
    )
    assert scheduler is not None
    seen = mail.call("getJobScheduler", "nightly")
    template = seen.pop("template")
    assert seen == {
        "key": "nightly",
        "name": "clean",
        "next": scheduler.next_ms,
        "iterationCount": 1,
        "offset": 0,
        "limit": 9,
        "tz": "Europe/Berlin",
        "pattern": "0 3 * * *",
    }
    assert template["data"] == {"days": 7}
    assert (template["opts"]["lifo"], template["opts"]["attempts"]) == (True, 3)
    assert mail.call("getJobSchedulers") == [{**seen, "template": template}]
    assert mail.call("removeJobScheduler", "nightly") is True
    assert schedulers.get("nightly") is None


def test_bulltask_and_node_store_a_job_scheduler_in_the_same_form(
    mail: InteropQueue, schedulers: JobSchedulers
) -> None:
    """The same upserts of both clients create equal schedulers and jobs, except times, ids and the key ``bulltask``."""
    start, end = 4_000_000_000_000, 4_100_000_000_000
    rules: dict[str, tuple[dict[str, Any], Rule]] = {
        "interval": ({"every": 60_000, "startDate": start}, {"every": 60, "start": moment(start)}),
        "limited": ({"every": 60_000, "limit": 5, "endDate": end}, {"every": 60, "limit": 5, "end": moment(end)}),
        "pattern": (
            {"pattern": "*/5 * * * *", "tz": "Asia/Tokyo", "startDate": start, "endDate": end},
            {"cron": "*/5 * * * *", "tz": "Asia/Tokyo", "start": moment(start), "end": moment(end)},
        ),
        "now": (
            {"pattern": "0 0 1 1 *", "tz": "UTC", "immediately": True},
            {"cron": "0 0 1 1 *", "tz": "UTC", "immediately": True},
        ),
    }
    options: dict[str, Any] = {"attempts": 3, "backoff": {"type": "fixed", "delay": 500}, "removeOnComplete": True}
    for name, (node_rule, bulltask_rule) in rules.items():
        template = {"name": "echo", "data": {"a": [1, "ü"]}, "opts": {**options, "removeOnFail": 5, "priority": 2}}
        mail.call("upsertJobScheduler", f"node-{name}", node_rule, template)
        schedulers.upsert(
            f"bulltask-{name}",
            name="echo",
            data={"a": [1, "ü"]},
            options={
                "attempts": 3,
                "backoff": {"type": "fixed", "delay": 0.5},
                "remove_on_complete": True,
                "remove_on_fail": 5,
                "priority": 2,
            },
            **bulltask_rule,
        )
        assert stored(mail, f"bulltask-{name}") == stored(mail, f"node-{name}"), name


def moment(ms: int) -> datetime:
    return datetime.fromtimestamp(ms / 1000, UTC)


def stored(sides: InteropQueue, scheduler: str) -> dict[str, Any]:
    """Return :func:`following` with a decoded template, without the fields that only bulltask writes."""
    state = following(sides, scheduler)
    template = json.loads(state["scheduler"].pop("opts"))
    for options in (template, state["options"]):
        options.pop("bulltask", None)
        options["backoff"].pop("maxDelay", None)
    return {**state, "template": template}
