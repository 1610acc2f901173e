"""Orders to live workers: ``bulltask control`` and ``inspect``, ``app.control`` and ``app.inspect()``."""

from __future__ import annotations

import asyncio
import functools
import json
import os
import signal
import time
from collections.abc import Callable
from typing import Any
from unittest.mock import ANY

import pytest
import redis
from click.testing import CliRunner, Result

from bulltask import TaskError
from bulltask.cli.main import main
from bulltask.errors import BrokerAuthError
from bulltask.queue import control as orders_of_senders
from bulltask.testing.worker import wait_until
from bulltask.worker.slots import ExitCode
from tests.process.test_worker_metrics import free_port, scrape
from tests.support.command_output import json_of
from tests.support.machine_load import scale_to_load
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import re
from bulltask.worker.orders import OrderCheck
from bulltask.worker.supervisor import NamedConnections

# 500, but the tests give many orders
OrderCheck.interval_ms = NamedConnections.interval_ms = int(os.environ.get("ORDER_CHECK_MS", 20))

@app.task(name="hold_the_gil")
def hold_the_gil():
    record("start")
    re.match(r"(a*)*b", "a" * 28)  # C code that does not release the GIL, for minutes

@app.task(bind=True, name="limited", rate_limit="1/h")
def limited(self):
    record("start", job=self.request.id)

@app.task(bind=True, name="endless")
def endless(self):
    record("start", job=self.request.id)
    while True:
        __import__("time").sleep(0.01)

@app.task(name="talk")
def talk():
    __import__("logging").getLogger("tested").debug("a line of the app")

@app.task(bind=True, name="a_quick")
async def a_quick(self):
    record("start", job=self.request.id)
"""


def id_of(worker: Worker) -> str:
    """Return the id of a worker that has written its state."""
    started: str = worker.wait_for_line("Worker started")[0]["worker_id"]
    return started


@pytest.fixture
def start(harness: WorkerHarness) -> Callable[..., Worker]:
    """Return a function that starts a worker with the tasks above, and waits until orders reach it."""

    def start(**more: Any) -> Worker:
        worker = harness.worker(TASKS, **more)
        name = id_of(worker)
        wait_until(lambda: harness.app.inspect(name, timeout=0.1).ping() is not None, 60.0, "an answer")
        return worker

    return start


def run(harness: WorkerHarness, *args: str) -> Result:
    """Run ``bulltask`` for the server of the test."""
    return CliRunner().invoke(main, ["-b", harness.url, *args], catch_exceptions=False)


def test_inspect_shows_what_workers_run_and_know(harness: WorkerHarness, start: Callable[..., Worker]) -> None:
    settings = {"payload_signing_keys": "k1:" + "A" * 43}
    worker = start(options=["-Q", "default,mail"], children=2, settings=settings)
    name, inspect = id_of(worker), harness.app.inspect()
    job = harness.hold()
    pid = int(harness.wait_for_start(job)["pid"])
    assert inspect.ping() == {name: {"ok": "pong"}}
    [running] = (inspect.active() or {})[name]
    assert running | {"time_start": 0} == {
        "id": job.id,
        "name": "hold",
        "args": [],
        "kwargs": {"gate": "gate"},
        "queue": "default",
        "key": "bull:{default}",
        "time_start": 0,
        "worker_pid": pid,
    }
    assert abs(running["time_start"] - time.time()) < 60
    assert (inspect.reserved(), (inspect.registered() or {})[name][-1]) == ({name: []}, "talk")
    assert [queue["name"] for queue in (inspect.active_queues() or {})[name]] == ["default", "mail"]
    stats = (inspect.stats() or {})[name]
    assert (stats["pid"], stats["state"], stats["jobs"]) == (worker.pid, "run", 1)
    assert 0 <= stats["uptime"] < 60
    assert stats["pool"]["max-concurrency"] == 2
    assert sorted(stats["pool"]["processes"]) == worker.children
    conf = (inspect.conf() or {})[name]
    assert (conf["worker_concurrency"], conf["payload_signing_keys"]) == ("2", "***")
    assert "lock_duration" in (inspect.conf(with_defaults=True) or {})[name]
    for question, shown in {
        ("ping",): "pong",
        ("active",): job.id,
        ("reserved",): "none",
        ("registered",): "hold_the_gil",
        ("stats",): "max-concurrency",
        ("conf",): "***",
        ("active_queues",): "bull:{mail}",
    }.items():
        done = run(harness, "inspect", *question)
        assert (done.exit_code, name in done.stdout, shown in done.stdout) == (0, True, True), done.output
        document = json_of(run(harness, "inspect", *question, "--json"), "inspect")
        assert list(document["replies"]) == [name]
    harness.open_gate()
    assert worker.stop() == ExitCode.OK


def test_a_worker_is_addressed_by_its_name(harness: WorkerHarness) -> None:
    name = id_of(harness.worker(TASKS, settings={"worker_name": "batch"}))
    harness.worker(TASKS, settings={"worker_name": "batch-2"})
    wait_until(lambda: len(harness.app.inspect(timeout=0.1).ping() or {}) == 2, 60.0, "two answers")
    assert harness.app.control.pool_grow(1, destination=["batch"], reply=True) == [{name: {"ok": ANY}}]
    assert harness.app.control.ping(destination=[""], timeout=0.1) == []
    asked = run(harness, "inspect", "-d", "batch", "--timeout=1", "ping", "--json")
    assert (asked.exit_code, list(json_of(asked, "inspect")["replies"])) == (0, [name])


def test_workers_are_paused_resumed_and_stopped(harness: WorkerHarness, start: Callable[..., Worker]) -> None:
    worker, other = start(), start()
    for target in (worker, other):
        done = run(harness, "control", "pause", "-d", id_of(target))
        assert (done.exit_code, done.stdout.count("it is paused")) == (0, 1)
    [line] = worker.wait_for_line("Order executed", order="pause")
    assert line["sender"].endswith(f"@{os.uname().nodename}")
    assert line["app"] == "bulltask pause"
    job = harness.app.send_task("quick")
    assert "it was paused already" in run(harness, "control", "pause").stdout
    assert harness.start_count(job) == 0
    assert run(harness, "control", "resume").exit_code == 0
    assert job.get(timeout=60) is None
    harness.wait_for_start(held := harness.hold())
    done = run(harness, "control", "shutdown")
    assert (done.exit_code, done.stdout.count("it is stopping")) == (0, 2)
    again = run(harness, "control", "shutdown", "-d", f"{id_of(worker)},{id_of(other)}")
    assert "it is stopping already" in again.stdout
    cold = harness.app.control.shutdown(cold=True, reply=True)
    assert cold
    assert (worker.wait(), other.wait()) == (ExitCode.OK, ExitCode.OK)
    assert harness.redis.llen(harness.keys.wait) == 1  # the held job was released
    assert held.state == "waiting"


def test_children_are_added_removed_and_replaced(harness: WorkerHarness, start: Callable[..., Worker]) -> None:
    worker, control = start(children=1), harness.app.control
    name, before = id_of(worker), worker.children
    assert control.pool_grow(2, reply=True) == [{name: {"ok": "it has 3 children"}}]
    worker.wait_for_line("Concurrency changed", children=3, reason="control")
    wait_until(lambda: len(worker.children) == 3, 60.0, "three children")
    assert run(harness, "control", "pool_shrink", "2").exit_code == 0
    wait_until(lambda: len(worker.children) == 1, 60.0, "one child")
    refused = run(harness, "control", "shrink")
    assert (refused.exit_code, "it must have 1 to 4 children, and has 1" in refused.stderr) == (1, True)
    harness.wait_for_start(job := harness.hold())
    assert run(harness, "control", "replace-children").stdout.endswith("  1 child is being replaced\n")
    wait_until(lambda: len(worker.children) == 2, 60.0, "a new child beside that with a job")
    harness.open_gate()
    assert job.get(timeout=60) == "gate"
    wait_until(lambda: len(worker.children) == 1, 60.0, "the new child only")
    assert not set(before) & set(worker.children)
    assert worker.warnings() == worker.logged("Order rejected")
    assert "start it with --autoscale" in run(harness, "control", "autoscale", "3").stderr
    assert worker.stop() == ExitCode.OK


def test_the_limits_of_autoscaling_are_changed(harness: WorkerHarness, start: Callable[..., Worker]) -> None:
    worker = start(settings={"worker_autoscale": "2,1", "worker_concurrency": 1})
    done = run(harness, "control", "autoscale", "3", "3")
    assert (done.exit_code, "it has 3 to 3 children" in done.stdout) == (0, True)
    worker.wait_for_line("Concurrency changed", children=3, reason="autoscale")
    assert "use autoscale" in run(harness, "control", "grow").stderr
    assert "at most 6 children" in run(harness, "control", "autoscale", "7").stderr
    assert worker.stop() == ExitCode.OK


def test_a_queue_is_cancelled_and_consumed_again(harness: WorkerHarness, start: Callable[..., Worker]) -> None:
    worker = start(options=["-Q", "default,mail"])
    name = id_of(worker)
    harness.wait_for_start(harness.hold(queue="mail"))  # the next job is fetched when it ends
    done = run(harness, "control", "cancel_consumer", "mail")
    assert (done.exit_code, "it fetches no jobs from mail" in done.stdout) == (0, True)
    mails = [harness.app.send_task("quick", queue="mail") for _ in range(3)]
    harness.open_gate()
    for _ in range(5):
        assert harness.app.send_task("quick").get(timeout=60) is None
    assert [queue["name"] for queue in (harness.app.inspect().active_queues() or {})[name]] == ["default"]
    assert sum(map(harness.start_count, mails)) == 0
    wait_until(lambda: "queues default, mail (cancelled)" in run(harness, "workers").stdout, 60.0, "the worker's state")
    assert json_of(run(harness, "workers", "--json"), "workers")["workers"][0]["cancelled"] == ["mail"]
    refused = run(harness, "control", "cancel", "default")
    assert "its only queue: pause the worker instead" in refused.stderr
    other = start(children=1, settings={"worker_name": "other"})
    consumed = run(harness, "control", "consume", "mail")
    assert (consumed.output, consumed.exit_code) == (f"{name}  it fetches jobs from mail again\n", 0)
    assert "did you mean 'mail'" in run(harness, "control", "cancel", "male").stderr
    refused = run(harness, "control", "cancel", "mail", "-d", id_of(other))
    assert (refused.exit_code, "it does not consume the queue 'mail'" in refused.stderr) == (1, True)
    assert [job.get(timeout=60) for job in mails] == [None] * 3
    assert worker.stop() == ExitCode.OK


def test_a_queue_is_added_while_a_job_runs_and_its_children_are_killed(
    harness: WorkerHarness, start: Callable[..., Worker]
) -> None:
    port = free_port()
    # Spawned children get what forked ones inherit.
    settings = {"metrics_port": port, "worker_start_method": "spawn", "limiter": "50/s"}
    worker, app = start(children=1, settings=settings), harness.app
    name, ask = id_of(worker), app.inspect()
    harness.wait_for_start(held := harness.hold())
    early = app.send_task("quick", queue="late")
    done = run(harness, "control", "add_consumer", "late")
    assert done.output == (
        f"{name}  it consumes late, too: its children are being replaced, and running jobs continue\n"
    )
    assert (early.get(timeout=60), held.state) == (None, "active")
    assert [queue["name"] for queue in (ask.active_queues() or {})[name]] == ["default", "late"]
    assert json_of(run(harness, "workers", "--json"), "workers")["workers"][0]["queues"] == ["default", "late"]
    [state] = app.queue("late").get_worker_states().values()
    assert state
    assert state.limiter == {queue: {"max": 50, "duration_ms": 1000} for queue in ("default", "late")}
    assert app.queue("late").get_workers_count() == 1, "as Node.js sees it"
    # A child dies in the middle of a job of the new queue: the job runs again, and is counted once.
    crashed = harness.hold("late", queue="late")
    os.kill(int(harness.wait_for_start(crashed)["pid"]), signal.SIGKILL)
    harness.wait_for_start(crashed, count=2)
    harness.open_gate("late")
    assert crashed.get(timeout=60) == "late"
    harness.open_gate()
    assert (held.get(timeout=60), harness.start_count(held)) == ("gate", 1)
    figures = scrape(port)
    for labels, jobs in {("late", "quick"): 1, ("late", "hold"): 1, ("default", "hold"): 1}.items():
        assert figures["bulltask_attempts_total", frozenset({*labels, "completed"})] == jobs
    assert worker.stop() == ExitCode.OK


def test_an_added_queue_outlives_a_reload_unless_it_was_cancelled(
    harness: WorkerHarness, start: Callable[..., Worker]
) -> None:
    worker, control = start(children=1, options=["-Q", "default"]), harness.app.control
    for order in (control.add_consumer, control.cancel_consumer):
        order("gone", reply=True)
    control.add_consumer("late", reply=True)
    worker.send(signal.SIGHUP)
    assert worker.wait_for_line("Worker started", count=2)[1]["queues"] == ["default", "late"]
    assert harness.app.send_task("quick", queue="late").get(timeout=60) is None
    assert worker.stop() == ExitCode.OK


def test_what_a_worker_cannot_add_is_refused_and_a_new_name_is_pointed_out(
    harness: WorkerHarness, start: Callable[..., Worker]
) -> None:
    worker, other = start(children=1, options=["-Q", "mail"]), start(children=1)
    name, control = id_of(worker), harness.app.control
    harness.app.control.rate_limit("limited", "5/h", name)

    def add(queue: object, to: str | None = name) -> dict[str, Any]:
        return control.order("add_consumer", {"queue": queue}, destination=to).results()

    assert add("a:b")[name]["error"].startswith("queue name 'a:b' contains a ':'")
    assert add(["x"])[name]["error"] == "queue must be the name of a queue, not ['x']"
    assert add("{mail}")[name]["error"] == "it has this queue under the name 'mail': use that"
    assert add("mial")[name].endswith("no client has used this queue before; did you mean 'mail'?")
    assert add("default")[name].endswith("running jobs continue")
    assert add("default")[name] == "it consumes default already"
    assert harness.app.send_task("limited").get(timeout=60) is None
    harness.app.control.rate_limit("limited", "6/h", name)
    # Without a destination, the order goes to the workers that have cancelled the queue, or else to all.
    assert control.cancel_consumer("mail", reply=True) == [{name: {"ok": "it fetches no jobs from mail"}}]
    wait_until(lambda: "mail (cancelled)" in run(harness, "workers").stdout, 60.0, "the worker's state")
    assert add("mail", None) == {name: "it fetches jobs from mail again"}
    wait_until(lambda: "(cancelled)" not in run(harness, "workers").stdout, 60.0, "the worker's state")
    answers = add("mail", None)
    assert (answers[name], "it consumes mail, too" in answers[id_of(other)]) == ("it consumes mail already", True)
    assert [line["order"] for line in worker.warnings()] == ["add_consumer"] * 3
    assert worker.stop() == other.stop() == ExitCode.OK


def test_limits_of_tasks_and_the_log_level_are_changed(harness: WorkerHarness, start: Callable[..., Worker]) -> None:
    worker = start(children=1, settings={"loglevel": "info"})
    first, second = harness.app.send_task("limited"), harness.app.send_task("limited")
    harness.wait_for_start(first)
    wait_until(lambda: second.state == "delayed", 60.0, "a throttled job")
    assert run(harness, "control", "rate_limit", "limited", "0").exit_code == 0
    assert [harness.app.send_task("limited").get(timeout=60) for _ in range(2)] == [None, None]
    assert run(harness, "control", "rate-limit", "a_quick", "1/h").exit_code == 0
    throttled = [harness.app.send_task("a_quick") for _ in range(3)]
    wait_until(lambda: sum(job.state == "delayed" for job in throttled) == 2, 60.0, "throttled jobs")
    states = harness.app.queue("default").get_worker_states
    wait_until(
        lambda: [state.rate_limits for state in states().values() if state] == [{"a_quick": "1/h"}], 60.0, "state"
    )
    assert sum(map(harness.start_count, throttled)) == 1
    assert run(harness, "control", "rate-limit", "a_quick", "50/s").exit_code == 0
    assert [job.get(timeout=20) for job in (second, *throttled)] == [None] * 4, "jobs that were throttled before"
    assert run(harness, "control", "time_limit", "endless", "0.1").exit_code == 0
    with pytest.raises(TaskError, match=r"soft time limit of 0\.1 s"):
        harness.sender(task_max_retries=0).send_task("endless").get(timeout=60)
    assert run(harness, "control", "log-level", "debug").exit_code == 0
    harness.app.send_task("talk").get(timeout=60)
    worker.wait_for_line("a line of the app")
    assert run(harness, "control", "log-level", "error").exit_code == 0
    lines = len(worker.lines)
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert worker.lines[lines:] == []
    unknown = run(harness, "control", "rate-limit", "limitd", "1/s")
    assert (unknown.exit_code, "did you mean 'limited'?" in unknown.stderr) == (1, True)
    assert "must be" in run(harness, "control", "rate-limit", "limited", "often").stderr
    assert "must be shorter" in run(harness, "control", "time-limit", "limited", "2", "1").stderr
    assert worker.stop() == ExitCode.OK


def test_children_that_start_later_know_what_was_changed(harness: WorkerHarness, start: Callable[..., Worker]) -> None:
    worker = start(children=1, settings={"worker_start_method": "spawn"})
    before = worker.children
    assert run(harness, "control", "time-limit", "endless", "--soft", "0.1").exit_code == 0
    assert run(harness, "control", "log-level", "debug").exit_code == 0
    assert run(harness, "control", "pool_restart").exit_code == 0
    worker.wait_for_line("Child started", count=2)
    wait_until(lambda: not set(before) & set(worker.children), 60.0, "another child")
    with pytest.raises(TaskError, match=r"soft time limit of 0\.1 s"):
        harness.sender(task_max_retries=0).send_task("endless").get(timeout=60)
    harness.app.send_task("talk").get(timeout=60)
    worker.wait_for_line("a line of the app")
    assert worker.stop() == ExitCode.OK


def test_a_worker_answers_within_a_second_while_every_child_holds_the_gil(
    harness: WorkerHarness, start: Callable[..., Worker]
) -> None:
    worker = start(children=2, environ={"ORDER_CHECK_MS": "500"})
    for _ in range(2):
        harness.app.send_task("hold_the_gil")
    harness.journal.wait_for(2, 60.0, what="start")
    slowest = 0.0
    for order in ("active", "pool_grow", "pause"):
        begin = time.monotonic()
        answers = harness.app.control.order(order, timeout=scale_to_load(1.0))
        slowest = max(slowest, time.monotonic() - begin)
        assert (answers.answered, answers.errors) == (1, {})
    harness.report(slowest_answer_s=round(slowest, 3))
    assert slowest < scale_to_load(1.0)
    assert run(harness, "control", "shutdown", "--cold").exit_code == 0
    assert worker.wait() == ExitCode.OK


def test_a_stopped_worker_is_reported_and_does_not_execute_the_order_later(
    harness: WorkerHarness, start: Callable[..., Worker], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped, other = start(), start()
    stopped.send(signal.SIGSTOP)
    done = run(harness, "control", "grow", "-t", "0.8s")
    assert done.exit_code == 3
    assert done.stdout == f"{id_of(other)}  it has 3 children\n"
    assert f"{id_of(stopped)}  no answer: the order was withdrawn, so it will not be executed" in done.stderr
    assert "1 of 2 workers answered." in done.stderr
    alone = run(harness, "inspect", "ping", "-t", "0.2", "-d", id_of(stopped))
    assert alone.exit_code == 69
    assert harness.redis.exists(harness.keys.orders(id_of(stopped))) == 0
    until: Any = harness.redis.zscore(harness.keys.workers, id_of(stopped))
    harness.redis.zrem(harness.keys.workers, id_of(stopped))  # as 15 s after it was stopped
    with monkeypatch.context() as patch:
        patch.setattr(orders_of_senders, "SILENT_S", 0)
        for names, code in (([], 3), (["-d", id_of(stopped)], 69)):
            silent = run(harness, "inspect", "ping", *names)
            assert (silent.exit_code, f"{id_of(stopped)}  no answer: " in silent.stderr) == (code, True)
    harness.redis.zadd(harness.keys.workers, {id_of(stopped): until})
    stopped.send(signal.SIGCONT)
    assert run(harness, "inspect", "ping").exit_code == 0
    assert stopped.logged("Concurrency changed") == []
    assert [worker.stop() for worker in (stopped, other)] == [ExitCode.OK] * 2
    gone = run(harness, "inspect", "ping", "-t", "0.1")
    assert (gone.exit_code, gone.stderr) == (69, "No live worker was found: start one with 'bulltask worker -A APP'.\n")
    named = run(harness, "inspect", "ping", "-t", "0.1", "-d", "web-*")
    assert (named.exit_code, named.stderr) == (
        69,
        f"web-*  no live worker has this name: 'bulltask -b {harness.url} workers' lists them\n",
    )


def test_bad_orders_are_answered_or_ignored_and_do_no_harm(
    harness: WorkerHarness, start: Callable[..., Worker]
) -> None:
    worker = start(children=1)
    name = id_of(worker)
    orders = harness.keys.orders(name)
    late = int(time.time() * 1000) + 60_000
    order: dict[str, Any] = {"id": "1", "order": "pool_grow", "arguments": {"n": 1}, "expires_ms": late}
    for raw in (
        "x" * 20_000,
        "not JSON",
        "[]",
        "[" * 10_000,
        json.dumps({**order, "id": "../x"}),
        json.dumps({**order, "arguments": [1]}),
        json.dumps({**order, "order": None}),
        b"\xff",
    ):
        harness.redis.rpush(orders, raw)
    worker.wait_for_line("Order rejected", count=8)
    for changed in (
        {"order": "dig"},
        {"order": "__init__"},
        {"order": "execute"},
        {"arguments": {"n": 10**9}},
        {"arguments": {"n": "many"}},
        {"arguments": {"self": 1}},
        {"expires_ms": 1},
        {"order": "cancel_consumer", "arguments": {"queue": ["x"]}},
        {"order": "rate_limit", "arguments": {"task_name": {}, "rate_limit": 1}},
        {"order": "rate_limit", "arguments": {"task_name": "quick", "rate_limit": []}},
        {"order": "time_limit", "arguments": {"task_name": "quick", "soft": "x"}},
        {"order": "time_limit", "arguments": {"task_name": "quick"}, "sender": 5},
        {"order": "rate_limit"},
        {"order": "log_level", "arguments": {"level": "loud"}},
    ):
        harness.redis.rpush(
            orders, json.dumps({**order, "id": f"o{len(worker.lines)}{os.urandom(4).hex()}", **changed})
        )
    worker.wait_for_line("Order rejected", count=22)

    def errors() -> list[str]:
        replies = [harness.redis.lrange(key, 0, -1) for key in harness.redis.keys("bulltask:*:reply:*")]
        return [error for [reply] in replies if (error := json.loads(reply).get("error"))]

    wait_until(lambda: len(errors()) == 13, 60.0, "a reply to each order with an id")
    assert all(0 < harness.redis.pttl(key) <= 60_000 for key in harness.redis.keys("bulltask:*:reply:*"))
    for _ in range(2):  # sent twice, executed once
        harness.redis.rpush(orders, json.dumps({**order, "id": "twice"}))
    worker.wait_for_line("Order executed", order="pool_grow", arguments='{"n": 1}')
    assert harness.app.control.ping() == [{name: {"ok": "pong"}}]
    assert worker.logged("Concurrency changed", children=3) == []
    assert worker.logged("Supervisor service failed") == []
    assert worker.stop() == ExitCode.OK


@pytest.mark.parametrize("broker_url", ["cluster"], indirect=True)
def test_orders_can_be_given_on_a_cluster_in_asyncio_and_without_waiting(
    harness: WorkerHarness, start: Callable[..., Worker]
) -> None:
    worker = start(children=1)
    name = id_of(worker)

    async def orders() -> None:
        app = harness.sender()
        assert await app.acontrol.ping() == [{name: {"ok": "pong"}}]
        assert await app.ainspect(f"{name[:5]}*").active() == {name: []}
        assert await app.acontrol.pool_grow() is None
        assert await app.acontrol.discard_all() == 0
        assert "quick" in (await app.ainspect().registered_tasks() or {})[name]
        for answer in (
            await app.acontrol.pool_restart(reply=True),
            await app.acontrol.add_consumer("late", reply=True),
            await app.acontrol.pool_shrink(reply=True),
        ):
            assert answer is not None
            assert "error" not in answer[0][name]
        assert await app.send_task("quick", queue="late").aget(timeout=60) is None
        await app.aclose()

    asyncio.run(orders())
    worker.wait_for_line("Concurrency changed", children=2)
    assert worker.stop() == ExitCode.OK


def _delete_user(url: str, name: str) -> None:
    with redis.Redis.from_url(url) as client:
        client.acl_deluser(name)


@pytest.mark.parametrize("queue", [(), ("--queue", "default")])
def test_users_with_their_roles_suffice_for_orders(
    harness: WorkerHarness, start: Callable[..., Worker], queue: tuple[str, ...], request: pytest.FixtureRequest
) -> None:
    urls = {}
    for role in ("worker", "operator", "reader"):
        name = f"{role}-{os.urandom(4).hex()}"
        line = run(harness, "acl", role, "--user", name, *queue).stdout.split()
        harness.redis.execute_command(*(">secret" if word == ">PASSWORD" else word for word in line))
        request.addfinalizer(functools.partial(_delete_user, harness.url, name))
        urls[role] = harness.url.replace("://", f"://{name}:secret@")
    worker = start(children=1, settings={"broker_url": urls["worker"]})
    harness.wait_for_start(job := harness.hold())
    operator = harness.sender(urls["operator"])
    assert operator.control.pool_grow(reply=True) == [{id_of(worker): {"ok": "it has 2 children"}}]
    [answer] = operator.control.add_consumer("late", reply=True) or []
    assert ("No permissions to access a key" in str(answer)) == bool(queue), answer
    assert [running["name"] for running in (operator.inspect().active() or {})[id_of(worker)]] == ["hold"]
    with pytest.raises(BrokerAuthError, match="rpush"):
        harness.sender(urls["reader"]).control.pool_grow()
    harness.open_gate()
    assert job.get(timeout=60) == "gate"
    assert [line["order"] for line in worker.warnings()] == ["add_consumer"] * bool(queue)
    assert worker.stop() == ExitCode.OK
    assert harness.app.inspect(timeout=0.1).ping() is None
