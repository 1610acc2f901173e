"""Probes that do not lie: ``/livez``, ``/readyz`` and ``bulltask health``, whatever is wrong with the worker."""

from __future__ import annotations

import os
import platform
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.embedded.server import pick_port
from bulltask.testing.worker import wait_until
from bulltask.worker import health
from tests.support.command_output import json_of
from tests.support.processes import parent_of
from tests.support.worker import fixed_prefetch_count
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]

PATIENCE_MS = 1_000
QUICK_RETRY = {"broker_reconnect_delay_max": 0.1}
IMPATIENT = f"""
from bulltask.worker import health
health.LIVE_MS = {PATIENCE_MS}
"""


def probe(port: int, path: str) -> tuple[int, str]:
    """Return the status and the body of a probe."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except urllib.error.URLError:
        return 0, ""  # not started yet


def wait_for_probe(port: int, path: str, status: int, text: str = "") -> None:
    """Wait until a probe has this status, and a body with this text."""

    def answers() -> bool:
        found, body = probe(port, path)
        return found == status and text in body

    wait_until(answers, 60, f"{status} {text!r} from {path}")


def check(*arguments: str) -> Result:
    """Run ``bulltask health``."""
    return CliRunner().invoke(main, ["health", *arguments])


def children_of(pid: int) -> list[int]:
    """Return the children of a process, also those that are not the worker's."""
    pids = [int(entry.name) for entry in os.scandir("/proc") if entry.name.isdigit()]
    return [child for child in pids if parent_of(child) == pid]


def name_of(pid: int) -> str:
    """Return the name of a process; ``zombie`` if nobody has reaped it."""
    with suppress(OSError):
        name, _, rest = Path(f"/proc/{pid}/stat").read_text().partition("(")[2].rpartition(")")
        return "zombie" if rest.split()[0] == "Z" else name
    return ""


# ---- the worker -----------------------------------------------------------------------------------------------------


def test_metrics_and_probes_answer_while_redis_is_down_at_the_start_and_later(harness: WorkerHarness) -> None:
    proxy, port = harness.proxy(), pick_port()
    proxy.refuse()
    settings = {"metrics_port": port, "worker_name": "early", **QUICK_RETRY}
    worker = harness.worker(via=proxy, children=1, settings=settings)
    worker.wait_for_line("Redis disconnected")

    assert probe(port, "/livez") == (200, "ok\n")
    wait_for_probe(port, "/readyz", 503, "Redis does not serve it, for ")
    assert "it is starting" in probe(port, "/readyz")[1]
    assert probe(port, "/metrics")[0] == 200
    assert check("live", "--pid", str(worker.pid)).exit_code == 0
    shown = check("ready", "--worker", "early")
    assert (shown.exit_code, "not ready: Redis does not serve it" in shown.output) == (1, True), shown.output

    [killed] = [pid for pid in children_of(worker.pid) if name_of(pid) == "bulltask-metric"]
    os.kill(killed, signal.SIGKILL)
    assert worker.wait_for_line("Metrics exporter died")[0]["pid"] == killed
    assert probe(port, "/livez") == (200, "ok\n")
    assert not Path(f"/proc/{killed}").exists(), "it was reaped"

    proxy.accept()
    wait_for_probe(port, "/readyz", 200, "ok")
    assert check("--worker", "early").output == f"{worker.logged('Worker started')[0]['worker_id']}  ready\n"

    proxy.refuse()
    proxy.reset()
    wait_for_probe(port, "/readyz", 503, "Redis does not serve it")
    assert probe(port, "/livez")[0] == 200
    proxy.accept()
    wait_for_probe(port, "/readyz", 200)


def test_a_worker_whose_supervisor_was_stopped_is_not_alive(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(health, "LIVE_MS", PATIENCE_MS)
    port = pick_port()
    worker = harness.worker(IMPATIENT, children=1, settings={"metrics_port": port})
    wait_for_probe(port, "/readyz", 200)
    worker.send(signal.SIGSTOP)
    wait_for_probe(port, "/livez", 503, "its supervisor has been stopped or has hung for ")
    assert probe(port, "/readyz")[0] == 503
    [page] = [page for page in health.find_workers() if page.pid == worker.pid]
    assert page.not_alive()
    worker.send(signal.SIGCONT)
    wait_for_probe(port, "/livez", 200)
    assert page.not_alive() == []


PROBE = """
import os, sys
from bulltask.worker import health
fds = f"/proc/{sys.argv[1]}/fd"
path, *_ = [path for fd in os.listdir(fds) if os.readlink(path := f"{fds}/{fd}").startswith("/memfd:bulltask-slots")]
pages = [health._page_of(path) for _ in range(40)]  # one of them has the number of this file in the worker's children
print(len(pages), flush=True)
input()
"""


def test_a_probe_survives_the_end_of_a_killed_worker(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1)
    worker.wait_for_line("Child started")
    [guard] = [pid for pid in children_of(worker.pid) if name_of(pid) == "bulltask-guard"]
    command = [sys.executable, "-c", PROBE, str(worker.pid)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as probe:
        assert probe.stdout is not None
        assert probe.stdout.readline() == "40\n"
        worker.send(signal.SIGKILL)
        worker.wait()
        wait_until(lambda: name_of(guard) in {"", "zombie"}, 60, "the end of its guard")
        probe.communicate("\n")
    assert probe.returncode == 0


# ---- children -------------------------------------------------------------------------------------------------------

QUICK_CHECK = """
from bulltask.worker import child_pool, health
__version__ = "4.2"
child_pool._MARGIN_MS = 700
child_pool._NOTE_MS = 0
child_pool.IdleCheck.interval_ms = 150
health.HealthReport.interval_ms = 50
"""
SHORT_TIMEOUTS = {"drain_delay": 0.2, "redis_socket_timeout": 0.1, "redis_socket_connect_timeout": 0.1}
SILENCE_S = 1.2


def test_stopped_children_without_a_job_are_replaced_and_one_that_runs_a_job_is_not(harness: WorkerHarness) -> None:
    port = pick_port()
    worker = harness.worker(QUICK_CHECK, children=2, settings={**SHORT_TIMEOUTS, "metrics_port": port})
    running = harness.hold()
    busy = int(harness.wait_for_start(running)["pid"])
    idle = next(line["pid"] for line in worker.wait_for_line("Child started", count=2) if line["pid"] != busy)
    versions = worker.logged("Worker started")[0]["versions"]
    assert versions == {
        "bulltask": version("bulltask"),
        "python": platform.python_version(),
        "redis": harness.redis.info()["redis_version"],
        "app": "4.2",
    }
    expected = ["bulltask-child", "bulltask-child", "bulltask-guard", "bulltask-metric"]
    wait_until(lambda: sorted(map(name_of, children_of(worker.pid))) == expected, 60, "the names")
    assert name_of(worker.pid) == "bulltask"
    harness.wait_until_idle(1)
    wait_for_probe(port, "/readyz", 200)

    for pid in (idle, busy):
        os.kill(pid, signal.SIGSTOP)
    job = harness.app.send_task("quick")
    assert worker.wait_for_line("Child stopped")[0]["pid"] == busy
    stopped = f"its child {busy} was stopped, and no other child takes jobs: send CONT to the child"
    wait_for_probe(port, "/readyz", 503, stopped)
    assert probe(port, "/livez")[0] == 200
    line = worker.wait_for_line("Child killed", reason="unresponsive")[0]
    assert (line["pid"], line["jobs"]) == (idle, 0)
    wait_for_probe(port, "/readyz", 200)
    job.get(timeout=60)
    assert 'bullmq_children_replaced_total{reason="unresponsive"} 1.0' in probe(port, "/metrics")[1]

    os.kill(busy, signal.SIGCONT)
    harness.open_gate()
    assert running.get(timeout=60) == "gate"
    assert (harness.start_count(running), harness.start_count(job)) == (1, 1)
    assert worker.stop() == 0


STOPS = """
import signal
from contextlib import suppress
from bulltask.worker.prefetch import PrefetchLoop

child_pool._MARGIN_MS, child_pool.IdleCheck.interval_ms = 200, 50

def stop_once(where):
    with suppress(FileExistsError):
        open(where, "x").close()
        os.kill(os.getpid(), signal.SIGSTOP)

@app.lifespan
async def stop_at_the_start():
    stop_once("start")
    yield

run_ready = PrefetchLoop._run_ready

def run_stopping(self):
    if len(self._ready) > 1:
        stop_once("prefetched")
    return run_ready(self)

PrefetchLoop._run_ready = run_stopping
"""


def test_a_child_that_was_stopped_between_its_jobs_loses_them_to_another_whatever_it_was_doing(
    harness: WorkerHarness,
) -> None:
    source = QUICK_CHECK + STOPS + fixed_prefetch_count(16)  # a busy machine might prefetch none
    worker = harness.worker(source, children=2, settings={"shutdown_timeout": 600})

    def wait_for_children(killed: int, children: int) -> list[int]:
        worker.wait_for_line("Child killed", count=killed, reason="unresponsive")
        wait_until(lambda: len(worker.children) == children, 60, "the next child")
        harness.wait_until_idle(children)
        indexes = {line["pid"]: line["index"] for line in worker.logged("Child started")}
        return sorted(worker.children, key=indexes.__getitem__)

    leaving = wait_for_children(1, 2)[-1]  # the first one that was killed had been stopped while it was starting
    os.kill(leaving, signal.SIGSTOP)
    worker.send(signal.SIGTTOU)
    [idle] = wait_for_children(2, 1)
    assert worker.logged("Child killed")[1]["pid"] == leaving

    os.kill(idle, signal.SIGSTOP)
    job = harness.app.send_task("quick")
    harness.wait_for_event("active", job)
    job.get(timeout=60)
    wait_for_children(3, 1)
    jobs = [harness.app.send_task("quick") for _ in range(100)]
    for job in jobs:
        job.get(timeout=60)
    assert {harness.start_count(job) for job in jobs} == {1}
    assert worker.wait_for_line("Child killed", count=4)[3]["jobs"] > 0, "it had prefetched them"

    [idle] = wait_for_children(4, 1)
    os.kill(idle, signal.SIGSTOP)
    worker.send(signal.SIGTERM)
    assert worker.wait() == 0
    assert len(worker.logged("Child killed")) == 5


def test_a_stopped_child_is_named_by_each_command(harness: WorkerHarness) -> None:
    worker = harness.worker(QUICK_CHECK + "child_pool._MARGIN_MS = 60_000", children=1)
    harness.wait_until_idle(1)
    [idle] = worker.children
    os.kill(idle, signal.SIGSTOP)
    ready = ["--pid", str(worker.pid)]
    wait_until(lambda: f"its child {idle} was stopped: " in check(*ready).output, 60, "a worker that is not ready")
    os.kill(idle, signal.SIGCONT)
    wait_until(lambda: check(*ready).exit_code == 0, 60, "a worker that is ready")
    running = harness.hold()
    pid = int(harness.wait_for_start(running)["pid"])
    os.kill(pid, signal.SIGSTOP)
    problem = f"its child {pid} was stopped: send CONT to the child"
    for where in (["--redis", "-b", harness.url], ["--pid", str(worker.pid)]):
        wait_until(lambda where=where: check(*where).output.endswith(f"  not ready: {problem}\n"), 60, problem)  # type: ignore[misc]
        assert check(*where).exit_code == 1
    shown = CliRunner().invoke(main, ["workers", "-b", harness.url]).output
    assert re.search(rf"^ +{pid} +\d+ MiB +stopped\n +hold {running.id} in default", shown, re.MULTILINE), shown
    os.kill(pid, signal.SIGCONT)
    wait_until(lambda: check("--redis", "-b", harness.url).exit_code == 0, 60, "a worker that is ready")
    harness.open_gate()
    assert worker.stop() == 0


@pytest.mark.parametrize(
    ("options", "settings", "started"),
    [(["--max-jobs", "2"], {}, 2), ([], {"limiter": "1/60s"}, 1)],
    ids=["no permits", "limits of the queue"],
)
def test_a_child_that_may_not_take_jobs_is_not_replaced(
    harness: WorkerHarness, options: list[str], settings: dict[str, object], started: int
) -> None:
    harness.app.queue("default").set_global_concurrency(2)
    worker = harness.worker(QUICK_CHECK, children=3, settings={**SHORT_TIMEOUTS, **settings}, options=options)
    for _ in range(4):
        harness.hold()
    worker.wait_for_line("Child started", count=3)
    harness.journal.wait_for(started, what="start")
    threading.Event().wait(1.3 * SILENCE_S)
    assert [worker.logged(event) for event in ("Child killed", "Stacks")] == [[], []]


def test_a_paused_worker_is_alive_but_not_ready_and_its_children_are_not_replaced(harness: WorkerHarness) -> None:
    settings = {**SHORT_TIMEOUTS, "worker_name": "paused-one", "worker_paused": True}
    worker = harness.worker(QUICK_CHECK, children=1, settings=settings)
    worker.wait_for_line("Worker paused")
    paused = time.monotonic()
    wait_until(lambda: "it is paused" in check("-w", "paused-one").output, 60, "a paused worker")
    worker_id = worker.logged("Worker started")[0]["worker_id"]
    shown = json_of(check("live", "-w", worker_id, "--json"), "health")
    assert shown == {
        "check": "live",
        "ok": True,
        "workers": [{"id": worker_id, "pid": worker.pid, "ok": True, "problems": []}],
    }
    by_redis = ["--redis", "-b", harness.url, "-w", "paused-one"]
    wait_until(lambda: "paused-one" in check("live", *by_redis).output, 60, "its state in Redis")
    assert check(*by_redis).output == f"{worker_id}  not ready: it is paused\n"
    assert json_of(check("live", "--json", *by_redis), "health") == shown
    threading.Event().wait(max(0, paused + 1.3 * SILENCE_S - time.monotonic()))

    worker.send(signal.SIGCONT)
    wait_until(lambda: check(*by_redis).output == f"{worker_id}  ready\n", 60, "a worker that is ready")
    wait_until(lambda: check("ready", "--pid", str(worker.pid)).exit_code == 0, 60, "a worker that is ready")
    assert worker.logged("Child killed") == []
    assert worker.stop() == 0
    assert [check("live", *where).exit_code for where in (by_redis, by_redis[-2:])] == [69, 69]


# ---- systemd --------------------------------------------------------------------------------------------------------

TELL = """
import subprocess
from bulltask.worker import health
health._EXTEND_MS = 100

@app.task(name="variables")
def variables():
    own = [name for name in os.environ if name.startswith(("NOTIFY", "WATCHDOG"))]
    return own, subprocess.run(["env"], capture_output=True, text=True).stdout.count("NOTIFY_SOCKET")
"""


class Receiver:
    """A service manager's socket, with an abstract name or a path."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.bind("\0" + address[1:] if address.startswith("@") else address)
        self.socket.settimeout(60)

    def wait_for(self, line: str) -> list[str]:
        """Return the lines of the next message with this line; skip other messages."""
        while line not in (lines := self.socket.recv(4096).decode().splitlines()):
            pass
        return lines


def test_systemd_is_told_what_the_worker_does(harness: WorkerHarness, tmp_path: Path) -> None:
    receiver = Receiver(str(tmp_path / "notify"))
    proxy = harness.proxy()
    proxy.refuse()
    environ = {"NOTIFY_SOCKET": receiver.address, "WATCHDOG_USEC": "200000", "WATCHDOG_PID": ""}
    worker = harness.worker(TELL, via=proxy, children=1, environ=environ, settings=QUICK_RETRY)
    receiver.wait_for("EXTEND_TIMEOUT_USEC=15000000")
    receiver.wait_for("STATUS=Not ready: Redis does not serve it")
    proxy.accept()
    assert receiver.wait_for("READY=1") == ["READY=1", "STATUS=Ready"]
    receiver.wait_for("WATCHDOG=1")
    assert harness.app.send_task("variables").get(timeout=60) == [[], 0]

    worker.send(signal.SIGTSTP)
    receiver.wait_for("STATUS=Not ready: it is paused: send CONT to the supervisor to resume it")
    worker.send(signal.SIGHUP)
    reloading = receiver.wait_for("RELOADING=1")
    assert reloading[1].startswith("MONOTONIC_USEC=")
    assert receiver.wait_for("READY=1") == ["READY=1", "STATUS=Ready"]
    worker.wait_for_line("Worker started", count=2)
    harness.wait_for_start(harness.hold())
    worker.send(signal.SIGTERM)
    assert receiver.wait_for("STOPPING=1")[1] == "STATUS=Stopping (warm): 1 jobs are running"
    receiver.wait_for("EXTEND_TIMEOUT_USEC=15000000")
    receiver.wait_for("WATCHDOG=1")
    harness.open_gate()
    assert worker.wait() == 0
    receiver.socket.close()


def test_a_watchdog_for_another_process_is_not_served() -> None:
    name = f"@bulltask-{os.getpid()}-other"
    receiver, environ = Receiver(name), {"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "1000", "WATCHDOG_PID": "1"}
    manager = health.ServiceManager(environ)
    assert environ == {}
    manager.keep_alive(extend=False)
    manager.notify("READY=1")
    assert receiver.socket.recv(100) == b"READY=1"
    receiver.socket.close()


# ---- processes ------------------------------------------------------------------------------------------------------

ORPHAN = """
import subprocess

@app.task(name="orphan")
def orphan():
    command = "sleep 0.1 >/dev/null 2>&1 & echo $!"
    environ = {**os.environ, "BULLTASK_CHILD": ""}
    return int(subprocess.check_output(["sh", "-c", command], start_new_session=True, env=environ))
"""


def test_as_process_1_a_worker_reaps_what_it_inherits_before_and_after_redis_answers(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    proxy.refuse()
    # As an entry point does: programs that were started earlier become children of the worker.
    entry_point = ["sh", "-c", 'sleep 0.1 & sleep 3600 & exec "$@"', "entry-point"]
    container = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", *entry_point]
    settings = {"worker_name": f"init-{os.getpid()}", **QUICK_RETRY}
    outer = harness.worker(ORPHAN, via=proxy, children=1, prefix=container, settings=settings)
    outer.wait_for_line("Redis disconnected")
    [pid] = [int(child) for child in Path(f"/proc/{outer.pid}/task/{outer.pid}/children").read_text().split()]
    assert Path(f"/proc/{pid}/status").read_text().split("NSpid:")[1].split()[1] == "1"
    wait_until(lambda: [*map(name_of, children_of(pid))] == ["sleep"], 60, "no zombie of the entry point")
    command = [sys.executable, "-m", "bulltask", "health", "live", "--worker", str(settings["worker_name"])]
    assert subprocess.run(command, capture_output=True, check=False, timeout=60).returncode == 0, "found from outside"

    [sleeper] = children_of(pid)
    proxy.accept()
    assert harness.app.send_task("orphan").get(timeout=60)
    os.kill(sleeper, signal.SIGKILL)
    wait_until(lambda: {*map(name_of, children_of(pid))} == {"bulltask-child", "bulltask-guard"}, 60)
    os.kill(pid, signal.SIGTERM)
    assert outer.wait() == 0
