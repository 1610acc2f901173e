"""The state that a worker writes to Redis: what it is, how soon it is there, and when it is gone."""

from __future__ import annotations

import asyncio
import base64
import re
import signal
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from bulltask import App
from bulltask.cli.main import main
from bulltask.cli.options import ExitCode
from bulltask.queue import AsyncQueue, Queue, overview
from bulltask.testing.worker import wait_until
from bulltask.transport.operation import run_sync
from bulltask.transport.workers import WorkerState, read_workers, registered_queues
from tests.support.command_output import json_of
from tests.support.machine_load import scale_to_load
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

SHORT_TTL = """
from bulltask.worker import fleet

fleet._WRITE_MS, fleet._STATE_TTL_MS = 200, 1_000
"""


def states(harness: WorkerHarness, queue: str = "default") -> dict[str, WorkerState | None]:
    """Return the states of a queue's workers, by id."""
    broker = harness.app._broker
    with broker.pool.client() as client:
        client.connect()
        return run_sync(client, read_workers([harness.keys_of(queue)], broker.clock.now_ms()))[0]


def state_of(harness: WorkerHarness, worker: Worker, queue: str = "default") -> WorkerState | None:
    """Return the state of a worker, ``None`` if there is none."""
    found = [state for state in states(harness, queue).values() if state is not None and state.pid == worker.pid]
    return found[0] if found else None


def wait_for(
    harness: WorkerHarness, worker: Worker, expected: Callable[[WorkerState], object], within_s: float = 1
) -> WorkerState:
    """Wait until a worker's state is as expected, and check that this took no longer than ``within_s``."""
    started, last = time.monotonic(), None

    def ready() -> bool:
        nonlocal last
        last = state_of(harness, worker)
        return last is not None and bool(expected(last))

    wait_until(ready, 60.0, "the state")
    assert time.monotonic() - started <= scale_to_load(within_s)
    assert last is not None
    return last


def test_a_state_has_the_workers_children_with_their_jobs_and_changes_within_a_second(harness: WorkerHarness) -> None:
    settings = {"worker_name": "mail", "limiter": "100/m"}
    worker = harness.worker(RATED, settings=settings, options=["-Q", "default,other", "--max-jobs", "9"])
    worker.wait_for_line("Child started", count=2)
    state = wait_for(harness, worker, lambda state: [child.state for child in state.children] == ["run", "run"])
    assert state.id.startswith("mail@")
    assert (state.app, state.queues, state.home, state.state) == ("tested", ("default", "other"), "{default}", "run")
    assert [child.pid for child in state.children] == worker.children
    assert all((child.rss_kib or 0) > 1_000 for child in state.children)
    assert (state.concurrency, state.slots, state.busy, state.permits) == (2, 2, 0, 9)
    assert {"hold", "quick", "rated"} <= set(state.tasks)
    assert state.rate_limits == {"rated": "5/30s"}
    assert state.limiter == {queue: {"max": 100, "duration_ms": 60_000} for queue in ("default", "other")}

    job = harness.hold()
    started_ms = int(time.time() * 1000)
    pid = int(harness.wait_for_start(job)["pid"])
    state = wait_for(harness, worker, lambda state: state.busy, within_s=2.5)
    (child,) = (child for child in state.children if child.jobs)
    assert child.pid == pid
    assert [(item.id, item.queue, item.state) for item in child.jobs] == [(job.id, "default", "active")]
    assert abs(child.jobs[0].since_ms - started_ms) < scale_to_load(2_000)
    assert state.permits == 8

    worker.send(signal.SIGTSTP)
    wait_for(harness, worker, lambda state: state.state == "paused")
    worker.send(signal.SIGCONT)
    wait_for(harness, worker, lambda state: state.state == "run")
    worker.send(signal.SIGTTIN)
    wait_for(harness, worker, lambda state: state.concurrency == 3)
    worker.send(signal.SIGTERM)
    wait_for(harness, worker, lambda state: state.state == "closing")
    harness.open_gate()
    assert worker.wait() == 0
    assert states(harness) == states(harness, "other") == {}


RATED = """
@app.task(name="rated", rate_limit="5/30s")
def rated():
    pass
"""


def test_the_state_of_a_killed_worker_expires(harness: WorkerHarness) -> None:
    worker = harness.worker(SHORT_TTL, options=["-Q", "default,other"])
    wait_for(harness, worker, lambda state: state.children, within_s=10)
    wait_until(lambda: states(harness, "other"), 60.0, "the short state")
    worker.send(signal.SIGKILL)
    worker.wait()
    started = time.monotonic()
    wait_until(lambda: not states(harness) and not states(harness, "other"), 60.0, "the end of the state")
    assert time.monotonic() - started <= scale_to_load(1.5)


def test_a_worker_whose_supervisor_was_stopped_is_silent_and_not_one_of_nodes(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview, "SILENT_S", 0)
    worker = harness.worker(SHORT_TTL, children=1, options=["-Q", "default,other"])
    found = wait_for(harness, worker, lambda state: [child.state for child in state.children] == ["run"], within_s=10)
    wait_until(lambda: all(harness.app.queue(name).get_workers() for name in ("default", "other")), 60.0, "connections")
    worker.send(signal.SIGSTOP)
    wait_until(lambda: not states(harness), 60.0, "the end of the state")
    silent = "its supervisor has not written its state: it was stopped, hangs, or is not permitted to"
    for check in ("live", "ready"):
        health = CliRunner().invoke(main, ["health", check, "--redis", "-b", harness.url, "--pid", str(worker.pid)])
        what = "alive" if check == "live" else check
        assert (health.output, health.exit_code) == (f"{found.id}  not {what}: {silent}\n", 1)
    command = ["workers", "-b", harness.url]
    assert CliRunner().invoke(main, command).output == f"{found.id}  unknown: {silent}\n"
    document = json_of(CliRunner().invoke(main, [*command, "--json"]), "workers")
    assert [(shown["id"], shown["state"], {*shown["queues"]}) for shown in document["workers"]] == [
        (found.id, "unknown", {"default", "other"})
    ]
    assert document["others"] == []
    worker.send(signal.SIGCONT)
    assert worker.stop() == 0


@pytest.mark.one_server
def test_workers_of_another_database_do_not_count(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1)
    wait_for(harness, worker, lambda state: [child.state for child in state.children] == ["run"], within_s=10)
    harness.wait_until_idle(1)
    url = urlsplit(harness.url)._replace(path="/3").geturl()
    other_database = ["-b", url]
    assert CliRunner().invoke(main, ["workers", *other_database]).exit_code == ExitCode.NO_ANSWER
    assert CliRunner().invoke(main, ["health", "--redis", *other_database]).exit_code == ExitCode.NO_ANSWER
    with Queue("default", url) as queue:
        queue.add("send")
        assert queue.get_workers() == []
        assert [reason.code for reason in queue.explain().reasons] == ["no-worker"]
        queues = json_of(CliRunner().invoke(main, ["queues", "--json", *other_database]), "queues")["queues"]
        assert [(found["queue"], found["workers"]) for found in queues] == [("default", 0)]
        with pytest.raises(TimeoutError, match="no worker is connected to this queue"):
            App("other", broker_url=url).send_task("quick").get(timeout=1)
        queue.obliterate(force=True)


@pytest.mark.every_topology
def test_other_queues_lead_to_the_whole_state_and_a_missing_one_is_unknown(harness: WorkerHarness) -> None:
    worker = harness.worker(options=["-Q", "default,other"])
    whole = wait_for(harness, worker, lambda state: len(state.children) == 2, within_s=10)
    wait_until(lambda: states(harness, "other"), 60.0, "the short state")
    assert state_of(harness, worker, "other") == state_of(harness, worker)
    short = str(harness.redis.get(harness.keys_of("other").worker(whole.id)))
    assert WorkerState.from_json(short.encode()).is_short
    assert len(short) < 400
    worker.send(signal.SIGSTOP)  # it cannot write the state again
    harness.redis.delete(harness.keys.worker(whole.id))
    assert states(harness) == {whole.id: None}
    worker.send(signal.SIGCONT)
    assert worker.stop() == 0


def test_a_worker_registers_its_queues(harness: WorkerHarness) -> None:
    harness.worker(options=["-Q", "default,other"])
    with harness.app._broker.pool.client() as client:
        wait_until(
            lambda: {"{default}", "{other}"} <= set(run_sync(client, registered_queues("bull"))), 60.0, "the registry"
        )


def test_the_workers_command_shows_what_each_child_runs_and_workers_that_do_not_report(harness: WorkerHarness) -> None:
    command = ["workers", "-b", harness.url]
    assert CliRunner().invoke(main, command).exit_code == ExitCode.NO_ANSWER
    job = harness.hold()
    worker = harness.worker(options=["-Q", "default,other"])
    wait_for(harness, worker, lambda state: any(child.jobs for child in state.children), within_s=10)
    name = f"bull:{base64.b64encode(b'videos').decode()}"
    harness.redis.client_setname(f"{name}:w:node-1")

    shown = CliRunner().invoke(main, command)
    assert shown.exit_code == 0, shown.output
    assert re.search(
        rf"^  2 children, 1 of 2 slots busy$.*\b{worker.children[0]} +\d+ MiB", shown.output, re.MULTILINE | re.DOTALL
    )
    assert re.search(rf"  hold {job.id} in default, \d+\.\d+ s$", shown.output, re.MULTILINE)
    assert re.search(r"^node-1 +videos +127", shown.output, re.MULTILINE)

    document = json_of(CliRunner().invoke(main, [*command, "--json"]), "workers")
    (found,) = document["workers"]
    assert (found["pid"], found["state"], found["queues"]) == (worker.pid, "run", ["default", "other"])
    assert {child["pid"] for child in found["children"]} == set(worker.children)
    assert [item["task"] for child in found["children"] for item in child["jobs"]] == ["hold"]
    assert [other["name"] for other in document["others"]] == ["node-1"]
    other_queue = json_of(CliRunner().invoke(main, [*command, "-Q", "other", "--json"]), "workers")
    assert [found["pid"] for found in other_queue["workers"]] == [worker.pid]
    assert other_queue["others"] == []

    assert set(harness.app.queue("other").get_worker_states()) == {found["id"]}
    assert set(asyncio.run(states_of_an_async_queue(harness))) == {found["id"]}
    harness.open_gate()


async def states_of_an_async_queue(harness: WorkerHarness) -> dict[str, WorkerState | None]:
    """Return what the asyncio form of the method returns."""
    async with AsyncQueue("default", harness.url) as queue:
        return await queue.get_worker_states()
