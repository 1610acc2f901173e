"""``rate_limit`` of tasks with several workers, and after crashes."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence

import pytest

from bulltask import AsyncResult
from bulltask.lua import wrappers
from bulltask.testing.worker import wait_until
from tests.support.machine_load import scale_to_load
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

TASKS = """
import os, signal

@app.task(name="limited", bind=True, rate_limit="20/s")
def limited(self):
    record("start", job=self.request.id)


@app.task(name="alimited", bind=True, rate_limit="20/s")
async def alimited(self):
    record("start", job=self.request.id)


@app.task(name="slowly", bind=True, rate_limit="1/s")
def slowly(self, dies=False):
    record("start", job=self.request.id)
    if dies and self.request.attempts_started == 1:
        os.kill(os.getpid(), signal.SIGKILL)
"""


def starts_ms(harness: WorkerHarness, jobs: Sequence[AsyncResult[object]]) -> list[int]:
    """Return the times at which the jobs started, by the server's clock."""
    ids = {job.id for job in jobs}
    return sorted(entry.ms for entry in harness.journal.all(what="start") if entry.fields["job"] in ids)


@pytest.mark.every_topology
def test_all_workers_share_the_limit_of_a_task_and_do_not_delay_other_tasks(harness: WorkerHarness) -> None:
    workers = [harness.worker(TASKS, children=2, settings={"loglevel": "debug"}) for _ in range(2)]
    harness.wait_until_idle(4)
    limited = [harness.app.send_task(task) for _ in range(20) for task in ("limited", "alimited")]
    others = [harness.app.send_task("quick") for _ in range(10)]
    for job in (*others, *limited):
        job.get(timeout=60)
    for task in (limited[::2], limited[1::2]):
        starts = starts_ms(harness, task)
        harness.report(in_all_ms=starts[-1] - starts[0])
        assert len(starts) == 20
        assert starts[-1] - starts[0] > 800  # 950, but the first job records its start late: its process connects first
        assert max(sum(start <= at < start + 400 for at in starts) for start in starts) <= scale_to_load(10)
    assert starts_ms(harness, others)[-1] - starts_ms(harness, limited)[0] < scale_to_load(700)
    throttled = [line for worker in workers for line in worker.logged("Job throttled")]
    assert throttled
    assert {line["level"] for line in throttled} == {"debug"}
    assert [worker.warnings() for worker in workers] == [[], []]


def test_the_job_of_a_child_killed_while_the_job_is_throttled_starts_once(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    worker = harness.worker(TASKS, via=proxy, children=1, settings={"lock_duration": 30, "drain_delay": 30})
    first = harness.app.send_task("slowly")
    first.get(timeout=60)
    harness.wait_until_idle(1)
    (child,) = worker.children
    proxy.drop_replies(1, match=wrappers.with_wakeup(wrappers.with_delay("startOrThrottle")).sha, then="freeze")
    second = harness.app.send_task("slowly")
    proxy.wait_for(lambda proxy: proxy.dropped == 1)
    os.kill(child, signal.SIGKILL)
    second.get(timeout=20)
    first_ms, second_ms = starts_ms(harness, [first, second])
    assert second_ms - first_ms > 900
    assert harness.redis.hget(harness.keys.job(second.id), "ats") == "1"


def test_a_job_that_runs_again_after_a_crash_counts_against_the_limit_again(harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("slowly", (True,))
    job.get(timeout=60)
    first_ms, second_ms = starts_ms(harness, [job])
    assert second_ms - first_ms > 900


def test_a_worker_warns_if_another_one_has_another_limit_for_a_task(harness: WorkerHarness) -> None:
    warning = "Another worker has another rate limit for a task"
    first = harness.worker(TASKS, children=1)
    first.wait_for_line("Child started")
    wait_until(lambda: harness.redis.hlen(harness.keys.task_rates) == 3, 60, "stored limits")
    same = harness.worker(TASKS, children=1)
    (line,) = same.wait_for_line("Child started")
    stored = line["worker_id"]
    wait_until(lambda: stored in str(harness.redis.hget(harness.keys.task_rates, "slowly")), 60, "the same limits")
    other = harness.worker(TASKS.replace('rate_limit="1/s"', 'rate_limit="30/m"'), children=1)
    (line,) = other.wait_for_line(warning)
    assert (line["level"], line["task"], line["queue"], line["other"]) == ("warning", "slowly", "default", "1.01")
    assert line["seconds_per_job"] == "2.02"
    unlimited = harness.worker(TASKS.replace(', rate_limit="20/s"', ""), children=1)
    assert {line["task"] for line in unlimited.wait_for_line(warning, count=2, seconds_per_job="none")} == {
        "limited",
        "alimited",
    }
    assert not same.logged(warning)
    assert not first.logged(warning)
