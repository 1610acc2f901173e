"""Resources of a worker: descriptors, connections, processes."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from bulltask.testing.worker import wait_until
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

SENDS_AT_IMPORT = """
app.send_task("quick")
"""


def descriptors(pid: int) -> dict[str, str]:
    """Return a process's open descriptors and their targets."""
    found = {}
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found[entry.name] = str(entry.readlink())
        except FileNotFoundError:
            continue  # closed since the directory was read
    return found


def sockets(pid: int) -> set[str]:
    return {target for target in descriptors(pid).values() if target.startswith("socket:")}


def listening_sockets() -> set[str]:
    lines = [line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()]
    return {f"socket:[{fields[9]}]" for fields in lines if fields[3] == "0A"}


def zombies_of(pid: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue  # exited since the directory was read
        if state == "Z" and int(parent) == pid:
            found.append(int(stat.parent.name))
    return found


def test_a_supervisor_its_children_and_its_exporter_share_no_connection(harness: WorkerHarness) -> None:
    worker = harness.worker(SENDS_AT_IMPORT, children=3, settings={"metrics_port": 0})
    jobs = [harness.hold() for _ in range(3)]
    for job in jobs:
        harness.wait_for_start(job)
    pids = [worker.pid, *worker.children]
    assert len(pids) == 5
    opened = {pid: sockets(pid) for pid in pids}
    harness.report(sockets=sorted(len(found) for found in opened.values()))
    assert all(opened.values()), "each has its own connections"
    for pid in pids:
        for other in pids:
            # The supervisor keeps the exporter's port, in case the exporter dies.
            assert pid == other or opened[pid] & opened[other] <= listening_sockets()
    harness.open_gate("gate", 3)
    assert worker.stop() == 0


def test_a_stopped_worker_leaves_no_connection(harness: WorkerHarness) -> None:
    before = clients(harness)
    worker = harness.worker(children=4)
    for job in [harness.app.send_task("quick") for _ in range(50)]:
        job.get(timeout=60)
    during = clients(harness)
    assert worker.stop() == 0
    # The sender has connected with the first job.
    wait_until(lambda: clients(harness) <= before + SENDER, 60, "the end of the worker's connections")
    harness.report(before=before, during=during, after=clients(harness))
    assert during >= before + 4


SENDER = 2  # one connection to send, one to wait for results


def clients(harness: WorkerHarness) -> int:
    info = harness.redis.info("clients")
    return int(info["connected_clients"])


def replace_all_children(worker: Worker, started: int) -> int:
    """Kill every child and wait until it is replaced; return the number of started children."""
    children = worker.children
    for child in children:
        os.kill(child, signal.SIGKILL)
    worker.wait_for_line("Child started", count=started + len(children))
    return started + len(children)


def test_fifty_replaced_children_leave_no_descriptor_connection_or_zombie(harness: WorkerHarness) -> None:
    worker = harness.worker(children=10)
    harness.wait_until_idle(10)
    before_fds, before_clients = len(descriptors(worker.pid)), clients(harness)
    started = 10
    while started < 60:
        started = replace_all_children(worker, started)
    harness.wait_until_idle(10)
    grown = len(descriptors(worker.pid)) - before_fds
    harness.report(replaced=started - 10, fds=before_fds, grown=grown, clients=clients(harness) - before_clients)
    assert grown <= 2
    assert clients(harness) - before_clients <= 1
    assert zombies_of(worker.pid) == []
    assert len(worker.children) == 10
    assert worker.stop() == 0


def test_a_hundred_resets_of_all_connections_leave_no_descriptor_behind(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    worker = harness.worker(via=proxy, children=1, settings={"broker_reconnect_delay": 0.01})
    harness.app.send_task("quick").get(timeout=60)
    child = worker.children[0]
    before = {pid: len(descriptors(pid)) for pid in (worker.pid, child)}
    for _ in range(100):
        proxy.reset()
        harness.app.send_task("quick").get(timeout=60)
    grown = {pid: len(descriptors(pid)) - before[pid] for pid in before}
    harness.report(grown=list(grown.values()))
    assert max(grown.values()) <= 2
    assert worker.children == [child]
    assert worker.stop() == 0


def calls(harness: WorkerHarness) -> dict[str, int]:
    stats = {name: stat["calls"] for name, stat in harness.redis.info("commandstats").items()}
    return {**stats, "all": int(harness.redis.info("stats")["total_commands_processed"])}


def wake_ups(pid: int) -> int:
    """Return how often a process has waited so far."""
    return int(Path(f"/proc/{pid}/status").read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0])


@pytest.mark.one_server
def test_an_idle_worker_wakes_up_twice_a_second_and_sends_few_commands(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2)
    harness.wait_until_idle(2)
    before, woken, started = calls(harness), wake_ups(worker.pid), time.monotonic()
    threading.Event().wait(1)  # the time that is measured
    after, woken = calls(harness), wake_ups(worker.pid) - woken
    seconds = time.monotonic() - started
    sent = {name: count - before.get(name, 0) for name, count in after.items() if count != before.get(name, 0)}
    harness.report(wake_ups_per_minute=round(woken * 60 / seconds), **sent)
    assert woken <= 6 * seconds + 4, "the supervisor: each call also waits"
    assert sent["cmdstat_exists"] <= 2 * seconds + 1, "one command looks for orders and for revoked jobs"
    # A child makes 13 calls, those of the script included, after a wait of 5 s. Others: the clock, the state.
    of_children = 14 * (sent.get("cmdstat_bzpopmin", 0) + 1)
    assert sent["all"] - of_children - sent["cmdstat_exists"] <= 8
