"""Schedules with real workers: entries of beat_schedule, missed iterations, concurrent workers."""

from __future__ import annotations

import itertools
import os
import signal
from collections.abc import Callable

import pytest

from bulltask.lua import wrappers
from bulltask.queue.sync.schedulers import JobSchedulers
from bulltask.testing.worker import RedisServer, wait_until
from tests.support.streams import server_ms
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TWO_ENTRIES = """
app.conf.beat_schedule = {
    "often": {"task": "quick", "schedule": 0.5},
    "seconds": {"task": "quick", "schedule": "* * * * * *", "kwargs": {"n": 1}},
}
"""
ONE_ENTRY = 'app.conf.beat_schedule = {"often": {"task": "quick", "schedule": 0.5}}'
NO_ENTRY = "app.conf.beat_schedule = {}"
PERIODIC_TASK = """
@app.on_after_configure.connect
def setup_periodic_tasks(sender, **kwargs):
    sender.add_periodic_task(0.5, defined_below.s("hello"), name="every half second")


@app.task(bind=True)
def defined_below(self, text):
    record("start", job=self.request.id, text=text)
"""


CHECKS_OFTEN = """
from bulltask.transport.scripts import queue as schedule
from bulltask.worker import beat

beat.CHECK_MS, schedule._TOLERANCE_MS = 200, schedule.CHECK_MS - 100
"""


def version(**seconds: float) -> str:
    """Return the source code of an app that checks its schedule often: entries with their intervals."""
    entries = {name: {"task": "quick", "schedule": interval} for name, interval in seconds.items()}
    return f"{CHECKS_OFTEN}\napp.conf.beat_schedule = {entries}"


@pytest.fixture
def schedulers(harness: WorkerHarness) -> JobSchedulers:
    return harness.app.queue("default").schedulers


def iterations(harness: WorkerHarness, scheduler: str) -> list[int]:
    """Return the scheduled times of a scheduler's jobs that have started, in the order of their start."""
    ids = [entry["job"].rpartition(":") for entry in harness.journal.all(what="start")]
    return [int(ms) for name, _, ms in ids if name == f"repeat:{scheduler}"]


def wait_for_iterations(harness: WorkerHarness, scheduler: str, count: int, after_ms: int = 0) -> list[int]:
    """Wait until ``count`` jobs of a scheduler with later scheduled times have started; return these times."""

    def later() -> list[int]:
        return [ms for ms in iterations(harness, scheduler) if ms > after_ms]

    wait_until(lambda: len(later()) >= count, 60, f"{count} iterations of {scheduler}")
    return later()


def assert_regular(times: list[int], every_ms: int) -> None:
    steps = [later - earlier for earlier, later in itertools.pairwise(times)]
    assert all(step > 0 and step % every_ms == 0 for step in steps), times


def kill(worker: Worker) -> None:
    """Kill a supervisor and its children at the same time, as a power failure would."""
    for pid in [worker.pid, *worker.children]:
        os.kill(pid, signal.SIGKILL)
    worker.wait()


def test_entries_run_when_a_worker_starts_and_stop_when_the_code_removes_them(
    harness: WorkerHarness, schedulers: JobSchedulers
) -> None:
    schedulers.upsert("manual", every=3600, name="quick")
    first = harness.worker(TWO_ENTRIES)
    line = first.wait_for_line("Schedule updated")[0]
    assert (line["queue"], line["added"]) == ("default", ["often", "seconds"])
    assert_regular(wait_for_iterations(harness, "often", 4), 500)
    assert_regular(wait_for_iterations(harness, "seconds", 2), 1000)
    assert first.warnings() == []
    first.stop()

    second = harness.worker(ONE_ENTRY)
    assert second.wait_for_line("Schedule updated")[0]["removed"] == ["seconds"]
    wait_for_iterations(harness, "often", 2, after_ms=server_ms(harness.redis))
    assert {scheduler.id for scheduler in schedulers.list()} == {"often", "manual"}
    second.stop()

    harness.worker(NO_ENTRY).wait_for_line("Schedule updated", removed=["often"])
    assert {scheduler.id for scheduler in schedulers.list()} == {"manual"}


def test_a_schedule_that_is_paused_while_its_job_runs_stays_paused_when_workers_start(
    harness: WorkerHarness, schedulers: JobSchedulers
) -> None:
    source = """
app.conf.beat_schedule = {
    "held": {"task": "hold", "schedule": 0.1, "kwargs": {"gate": "gate"}},
    "often": {"task": "quick", "schedule": 0.1},
}
"""
    first = harness.worker(source, children=1)
    wait_until(lambda: iterations(harness, "held") != [], 60, "the job that is held")
    assert schedulers.pause("held") is not None
    assert schedulers.pause("often") is not None
    harness.open_gate(times=9)
    queue = harness.app.queue("default")
    wait_until(lambda: sum(queue.get_job_counts("waiting", "active", "delayed").values()) == 0, 60, "the last jobs")
    kill(first)
    second = harness.worker(source.replace("0.1", "0.2"), children=1)
    second.wait_for_line("Schedule updated", changed=["held", "often"])
    assert queue.schedulers.count() == 0
    resumed_ms = server_ms(harness.redis)
    assert schedulers.resume("often") is not None
    assert_regular(wait_for_iterations(harness, "often", 2, after_ms=resumed_ms), 200)
    assert max(iterations(harness, "held")) < resumed_ms


def test_workers_that_start_concurrently_run_every_iteration_once(
    harness: WorkerHarness, schedulers: JobSchedulers
) -> None:
    workers = [harness.worker(TWO_ENTRIES, children=1) for _ in range(4)]
    for worker in workers:
        worker.wait_for_line("Child started")
    often, seconds = wait_for_iterations(harness, "often", 10), wait_for_iterations(harness, "seconds", 5)
    assert_regular(often, 500)
    assert_regular(seconds, 1000)
    assert schedulers.count() == 2
    assert harness.redis.zcard(harness.keys.delayed) <= 2
    assert [worker.warnings() for worker in workers] == [[]] * 4


@pytest.mark.parametrize("rule", ["interval", "pattern"])
def test_missed_iterations_add_one_job(harness: WorkerHarness, schedulers: JobSchedulers, rule: str) -> None:
    if rule == "interval":
        schedulers.upsert("beat", every=0.5, name="quick")
    else:
        schedulers.upsert("beat", cron="* * * * * *", name="quick")
    every_ms = 500 if rule == "interval" else 1000
    workers = [harness.worker(children=2) for _ in range(2)]
    wait_for_iterations(harness, "beat", 3)
    for worker in workers:
        kill(worker)
    gone_ms = server_ms(harness.redis)
    wait_until(lambda: server_ms(harness.redis) > gone_ms + 4 * every_ms, 60, "four iterations without workers")
    seen, back_ms = iterations(harness, "beat"), server_ms(harness.redis)

    harness.worker(children=2, settings={"lock_duration": 1, "stalled_interval": 1})
    after = wait_for_iterations(harness, "beat", len(seen) + 4)[len(seen) :]
    overdue = [ms for ms in after if ms < back_ms - every_ms]
    harness.report(seen=len(seen), missed_ms=back_ms - gone_ms, overdue=len(overdue))
    # One job for all missed iterations, and perhaps the job that was running when its worker died.
    assert 1 <= len(set(overdue)) <= 2
    fresh = [ms for ms in after if ms >= back_ms]
    assert_regular(fresh, every_ms)
    assert harness.redis.zcard(harness.keys.delayed) + harness.redis.llen(harness.keys.wait) <= 1
    assert schedulers.count() == 1


@pytest.mark.every_topology
def test_a_worker_updates_schedules_of_queues_that_it_does_not_consume(
    harness: WorkerHarness,
) -> None:
    report_schedulers = harness.app.queue("reports").schedulers
    entry = '{"a": {"task": "quick", "schedule": 3600, "options": {"queue": "reports"}}}'
    worker = harness.worker(f"app.conf.beat_schedule = {entry}")
    worker.wait_for_line("Schedule updated", queue="reports", added=["a"])
    assert report_schedulers.count() == 1
    worker.stop()
    harness.worker(NO_ENTRY).wait_for_line("Schedule updated", queue="reports", removed=["a"])
    assert report_schedulers.count() == 0
    assert harness.redis.keys("bulltask:beat:*") == []


def test_a_worker_runs_the_tasks_that_a_receiver_of_on_after_configure_adds(
    harness: WorkerHarness, schedulers: JobSchedulers
) -> None:
    worker = harness.worker(PERIODIC_TASK)
    worker.wait_for_line("Schedule updated", added=["every half second"])
    wait_for_iterations(harness, "every half second", 2)
    assert {start["text"] for start in harness.journal.all(what="start")} == {"hello"}
    assert schedulers.count() == 1


def test_an_error_in_a_receiver_of_on_after_configure_stops_the_worker(harness: WorkerHarness) -> None:
    worker = harness.worker(PERIODIC_TASK.replace("0.5", "undefined"))
    assert worker.wait() != 0
    assert "name 'undefined' is not defined" in worker.log


def test_an_app_without_beat_schedule_keeps_existing_schedules_and_logs_it(
    harness: WorkerHarness, schedulers: JobSchedulers
) -> None:
    worker = harness.worker(ONE_ENTRY)
    worker.wait_for_line("Schedule updated")
    worker.stop()
    unscheduled = harness.worker()
    wait_until(
        lambda: any("beat_schedule is not set" in line["event"] for line in unscheduled.lines), 60, "the warning"
    )
    assert schedulers.count() == 1


def test_a_worker_with_an_invalid_entry_exits_and_names_the_entry(harness: WorkerHarness) -> None:
    worker = harness.worker('app.conf.beat_schedule = {"nightly": {"task": "quick", "schedule": "60 * * * *"}}')
    assert worker.wait() != 0
    assert "beat_schedule['nightly']" in worker.log
    assert "minute '60' is not within 0-59" in worker.log
    assert "Traceback" not in worker.log


def test_a_worker_warns_about_an_entry_with_an_unknown_task(harness: WorkerHarness) -> None:
    worker = harness.worker('app.conf.beat_schedule = {"a": {"task": "qick", "schedule": 3600}}')
    worker.wait_for_line("The task of a beat_schedule entry is not registered in this app", entry="a", task="qick")


def test_a_schedule_is_stored_again_after_an_error_reply(harness: WorkerHarness, schedulers: JobSchedulers) -> None:
    proxy = harness.proxy()
    stores = wrappers.with_guard("addJobScheduler", "pausedGuard")
    proxy.inject_error("READONLY You can't write against a read only replica.", match=stores.sha)
    worker = harness.worker(ONE_ENTRY, via=proxy)
    worker.wait_for_line("Schedule updated", added=["often"])
    assert proxy.injected == 1
    wait_for_iterations(harness, "often", 2)


def test_a_schedule_that_cannot_be_stored_does_not_stop_the_worker(harness: WorkerHarness) -> None:
    harness.redis.set(harness.keys.repeat, "not a sorted set")
    worker = harness.worker(ONE_ENTRY)
    assert "WRONGTYPE" in worker.wait_for_line("Schedule not updated")[0]["error"]
    harness.app.send_task("quick").get(timeout=60)
    assert len(worker.logged("Schedule not updated")) == 1


OLD = version(kept=3600, gone=3600, changed=3600)
NEW = version(kept=3600, added=3600, changed=1800)
SUPERSEDED = "Other workers of this app run a newer beat_schedule: this worker's is not used"


def intervals(schedulers: JobSchedulers) -> dict[str, int]:
    return {scheduler.id: (scheduler.every_ms or 0) // 1000 for scheduler in schedulers.list()}


def test_the_new_schedule_is_complete_during_and_after_a_deployment_whatever_restarts(
    harness: WorkerHarness, schedulers: JobSchedulers
) -> None:
    old_schedule = {"kept": 3600, "gone": 3600, "changed": 3600}
    new_schedule = {"kept": 3600, "added": 3600, "changed": 1800}
    old = [harness.worker(OLD, children=1) for _ in range(2)]
    wait_until(lambda: intervals(schedulers) == old_schedule, 60, "the old schedule")
    new = harness.worker(NEW, children=1)
    line = new.wait_for_line("Schedule updated", added=["added"])[0]
    assert (line["level"], line["removed"], line["changed"]) == ("warning", ["gone"], ["changed"])
    assert line["app"] == "tested"
    names = old[0].wait_for_line(SUPERSEDED)[0]["workers"]
    assert names == [line["worker_id"]]

    old[0].stop()
    restarted = harness.worker(OLD, children=1)  # an old worker crashed during the deployment
    restarted.wait_for_line(SUPERSEDED)
    restarted.wait_for_line("Child started")
    assert intervals(schedulers) == new_schedule
    new.stop()
    second = harness.worker(NEW, children=1)  # the new one, too, so that only old ones run for a moment
    second.wait_for_line("Child started")
    wait_until(lambda: intervals(schedulers) == new_schedule, 60, "the new schedule")
    old[1].stop()
    restarted.stop()
    assert intervals(schedulers) == new_schedule

    back = harness.worker(OLD, children=1)  # the deployment is rolled back
    back.wait_for_line(SUPERSEDED)
    assert intervals(schedulers) == new_schedule
    second.stop()
    wait_until(lambda: intervals(schedulers) == old_schedule, 60, "the old schedule again")


def test_apps_without_a_name_change_only_their_own_schedules(harness: WorkerHarness, schedulers: JobSchedulers) -> None:
    unnamed = 'app.name = "app"\n'
    first = harness.worker(unnamed + version(a=3600, shared=3600), children=1)
    first.wait_for_line("Schedule updated", added=["a", "shared"])
    first.stop()
    second = harness.worker(unnamed + version(b=3600, shared=3600), children=1)
    assert second.wait_for_line("Schedule updated")[0]["added"] == ["b"]
    assert second.wait_for_line("Schedules were added by an app without a name, and none of its workers runs")[0][
        "schedulers"
    ] == ["a"]
    third = harness.worker(unnamed + version(b=1800, c=3600), children=1)
    third.wait_for_line("Schedule updated", added=["c"])
    foreign = "A job scheduler with this name belongs to another client and was not changed; rename the entry of "
    third.wait_for_line(f"{foreign}beat_schedule, or remove the scheduler", scheduler="b")
    assert intervals(schedulers) == {"a": 3600, "b": 3600, "c": 3600, "shared": 3600}
    second.stop()  # its machine has been replaced, and another one runs a new version of its program
    wait_until(lambda: intervals(schedulers)["b"] == 1800, 60, "the entry of the program that still runs")


def test_a_worker_restores_the_schedule_of_a_server_that_was_emptied(
    harness: WorkerHarness, schedulers: JobSchedulers
) -> None:
    worker = harness.worker(CHECKS_OFTEN + TWO_ENTRIES)
    wait_for_iterations(harness, "often", 2)
    for pattern in (f"{harness.keys.base}*", "bulltask:*"):
        harness.redis.delete(*harness.redis.keys(pattern))
    emptied_ms = server_ms(harness.redis)
    worker.wait_for_line("Schedule updated", count=2)
    wait_for_iterations(harness, "often", 2, after_ms=emptied_ms)
    manual = schedulers.upsert("manual", cron="0 0 1 1 *", name="quick")
    assert manual is not None
    harness.redis.zrem(harness.keys.delayed, manual.next_job_id)
    worker.wait_for_line("Missing jobs of schedules added again", schedulers=["manual"])
    assert harness.redis.zscore(harness.keys.delayed, manual.next_job_id)


def test_a_schedule_is_stored_again_when_redis_restarts_without_its_data(
    harness_on: Callable[[str], WorkerHarness], server_factory: Callable[..., RedisServer]
) -> None:
    server = server_factory(appendonly=False)
    harness = harness_on(server.url)
    worker = harness.worker(ONE_ENTRY)  # its next regular check is a minute away
    worker.wait_for_line("Schedule updated", added=["often"])
    worker.wait_for_line("Child started")
    server.kill()
    server.restart()
    worker.wait_for_line("Schedule updated", count=2, timeout=30, added=["often"])


def test_one_job_of_a_schedule_waits_for_a_worker_that_knows_its_task(
    harness: WorkerHarness, schedulers: JobSchedulers
) -> None:
    schedulers.upsert("early", every=0.1, name="later")
    worker = harness.worker(children=1)
    worker.wait_for_line("Job incompatible", count=2)
    assert [harness.redis.zcard(harness.keys.delayed), harness.redis.llen(harness.keys.wait)] == [1, 0]
    worker.stop()
    harness.worker('@app.task(name="later")\ndef later():\n    record("start", job="-")', children=1)
    harness.journal.wait_for(2, 60, what="start")
