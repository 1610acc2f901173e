"""A worker stops: what it waits for, what it gives back, and how it is told."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter

import pytest

from bulltask import AsyncResult
from bulltask.lua import wrappers
from tests.support.pace import at_this_pace
from tests.support.stage import Stage
from tests.support.worker import Worker

pytestmark = pytest.mark.process

SHORT = """
@app.task(bind=True, name="short")
def short(self, number):
    tell("start", job=self.request.id)
    return sum(range(number))
"""
GRACE_S = 0.5


def stop_twice(worker: Worker) -> None:
    worker.send(signal.SIGTERM)
    worker.wait_for_line("Worker stopping", how="warm")
    worker.send(signal.SIGTERM)


def quit_at_once(worker: Worker) -> None:
    worker.send(signal.SIGQUIT)


def assert_waits_unharmed(stage: Stage, job: AsyncResult[str]) -> None:
    """The job was given back: it is the next one, nothing was counted, and another worker runs it to its end."""
    assert stage.redis.lrange(stage.keys.wait, 0, -1) == [job.id]
    assert stage.redis.llen(stage.keys.active) == 0
    assert not stage.redis.exists(stage.keys.lock(job.id))
    assert stage.field(job, "atm") in {None, "0"}, "no attempt was made"
    assert stage.field(job, "stc") is None, "it has not stalled"
    assert not stage.redis.exists(stage.keys.crashes(job.id)), "no child has crashed"
    stage.worker(children=1)
    stage.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"
    assert stage.field(job, "atm") == "1"
    assert stage.starts(job) == 2


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_term_waits_for_running_jobs_and_takes_no_more(stage: Stage, start_method: str) -> None:
    worker = stage.worker(children=2, settings={"worker_start_method": start_method})
    running = [stage.hold(), stage.hold()]
    for job in running:
        stage.started(job)
    waiting = stage.app.send_task("quick")
    worker.send(signal.SIGTERM)
    assert worker.wait_for_line("Worker stopping")[0] | {"how": "warm", "running": 2} == worker.lines[-1]
    stage.open_gate("gate", 2)

    assert worker.wait() == 0
    assert [job.get(timeout=60) for job in running] == ["gate", "gate"]
    assert [stage.starts(job) for job in running] == [1, 1]
    assert stage.redis.lrange(stage.keys.wait, 0, -1) == [waiting.id]
    assert stage.starts(waiting) == 0


def test_at_the_deadline_of_a_stop_the_rest_goes_back_to_wait_and_nothing_is_counted(stage: Stage) -> None:
    worker = stage.worker(children=1, settings={"shutdown_timeout": GRACE_S, "max_crashes": 1})
    job = stage.hold()
    stage.started(job)
    stopped = time.monotonic()
    assert worker.stop() == 0
    took_s = time.monotonic() - stopped
    stage.note(exit_after_s=round(took_s, 3), grace_s=GRACE_S)
    assert GRACE_S <= took_s <= GRACE_S + at_this_pace(2)  # the job itself would never have ended
    assert worker.logged("Job released", job_id=job.id)
    assert_waits_unharmed(stage, job)


def test_a_prioritized_job_that_is_given_back_is_taken_by_an_idle_worker_at_once(stage: Stage) -> None:
    stopping = stage.worker(children=1, settings={"drain_delay": 30})
    job = stage.hold(priority=5)
    stage.started(job)
    stage.worker(children=1, settings={"drain_delay": 30})
    stage.wait_until_idle(1)
    stage.redis.script_flush()  # scripts that are sent again come after what was sent behind them
    stopping.send(signal.SIGQUIT)
    assert stopping.wait() == 0
    back = stage.events.wait_for(event="waiting", jobId=job.id, prev="active")[0]
    taken_ms = stage.became("active", job, 2).ms - back.ms
    stage.note(taken_after_ms=taken_ms)
    assert taken_ms <= at_this_pace(1000)
    stage.open_gate("gate", 2)
    assert job.get(timeout=60) == "gate"


@pytest.mark.parametrize("stop", [stop_twice, quit_at_once])
def test_a_second_term_and_quit_end_the_worker_at_once_and_give_its_job_back(stage: Stage, stop) -> None:
    worker = stage.worker(children=1, settings={"shutdown_timeout": 30, "max_crashes": 1})
    job = stage.hold()
    stage.started(job)
    stop(worker)
    stopped = time.monotonic()
    assert worker.wait() == 0
    stage.note(exit_after_s=round(time.monotonic() - stopped, 3))
    assert time.monotonic() - stopped <= at_this_pace(1)
    assert_waits_unharmed(stage, job)


def test_ctrl_c_in_a_terminal_is_a_warm_stop_and_children_do_not_mind_it(stage: Stage) -> None:
    worker = stage.worker(children=2, new_group=True)
    job = stage.hold()
    stage.started(job)
    os.killpg(worker.pid, signal.SIGINT)
    worker.wait_for_line("Worker stopping", how="warm")
    stage.open_gate()
    assert worker.wait() == 0
    assert job.get(timeout=60) == "gate"
    assert stage.starts(job) == 1
    assert worker.complaints() == []


def test_term_to_every_process_of_the_worker_is_a_warm_stop(stage: Stage) -> None:
    # systemd's default (KillMode=control-group) and `kill -- -PGID` reach the children as well.
    worker = stage.worker(children=2, new_group=True)
    job = stage.hold()
    stage.started(job)
    os.killpg(worker.pid, signal.SIGTERM)
    worker.wait_for_line("Worker stopping", how="warm")
    stage.open_gate()
    assert worker.wait() == 0
    assert job.get(timeout=60) == "gate"
    assert stage.starts(job) == 1
    assert worker.complaints() == []


def test_an_idle_worker_stops_at_once(stage: Stage) -> None:
    worker = stage.worker(children=4, settings={"drain_delay": 30})
    stage.wait_until_idle(4)
    stopped = time.monotonic()
    assert worker.stop() == 0
    stage.note(exit_after_s=round(time.monotonic() - stopped, 3))
    assert time.monotonic() - stopped <= at_this_pace(1)
    assert worker.complaints() == []


@pytest.mark.parametrize("start_method", ["fork", "spawn"])
def test_a_worker_told_to_stop_while_its_children_start_stops_at_once(stage: Stage, start_method: str) -> None:
    for _ in range(5):
        worker = stage.worker(children=4, settings={"shutdown_timeout": 30, "worker_start_method": start_method})
        worker.wait_for_line("Worker started")
        stopped = time.monotonic()
        assert worker.stop() == 0
        assert time.monotonic() - stopped <= at_this_pace(2)
        assert worker.complaints() == []


def test_a_stop_gives_back_the_job_that_came_with_a_lost_reply(stage: Stage) -> None:
    proxy = stage.proxy()
    patient = {"lock_duration": 30, "broker_reconnect_delay": 5, "broker_reconnect_delay_max": 5}
    worker = stage.worker(via=proxy, children=1, settings=patient)
    stage.app.send_task("quick").get(timeout=60)  # the server knows the scripts now
    first = stage.hold()
    stage.started(first)
    following = stage.app.send_task("quick")
    proxy.drop_replies(1, match=wrappers.guarded("moveToFinished", "promotionGuard").sha)
    stage.open_gate()
    proxy.wait_for(lambda way: way.dropped == 1)
    assert stage.redis.lrange(stage.keys.active, 0, -1) == [following.id], "taken together with settling the first"

    assert worker.stop() == 0
    assert stage.redis.llen(stage.keys.active) == 0
    assert stage.redis.lrange(stage.keys.wait, 0, -1) == [following.id]
    assert first.get(timeout=60) == "gate"
    assert (stage.starts(first), stage.starts(following)) == (1, 0)


def _short(number: int) -> int:
    raise NotImplementedError("the workers know what it does")


@pytest.mark.timeout(180)
def test_thirty_stops_at_random_moments_under_load_strand_no_job_and_run_none_twice(
    stage: Stage, dice: random.Random
) -> None:
    calls: list[AsyncResult[int]] = []
    exits, stranded = Counter[int](), 0
    short = stage.app.task(name="short")(_short)
    for _ in range(15):
        missing = 3000 - stage.redis.llen(stage.keys.wait)
        calls += stage.app.send_many([short.s(dice.randrange(20_000)) for _ in range(missing)])
        pair = [stage.worker(SHORT, children=2, settings={"lock_duration": 30}) for _ in range(2)]
        for worker in pair:
            worker.wait_for_line("Worker started")
        seen = len(stage.journal.all(what="start"))
        stage.journal.wait_for(seen + dice.randrange(120), what="start")
        exits.update(worker.stop() for worker in pair)
        stranded += stage.redis.llen(stage.keys.active)
    assert stranded == 0
    stage.worker(SHORT, children=2)
    for call in calls:
        call.get(timeout=60)

    starts = Counter(entry["job"] for entry in stage.journal.all(what="start"))
    stage.note(jobs=len(calls), stops=exits.total(), stranded=stranded)
    assert exits == {0: 30}
    assert starts == dict.fromkeys([call.id for call in calls], 1)
