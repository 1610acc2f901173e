"""Signals to a worker and its children, except the signals that stop it."""

from __future__ import annotations

import os
import pty
import signal
import socket
import urllib.request
from pathlib import Path

import pytest

from bulltask.testing.worker import wait_until
from bulltask.worker.slots import ExitCode
from tests.support.processes import has_exited
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
TASKS = """
import asyncio
import ctypes
import time

async def innermost(event):
    asyncio.get_running_loop().call_soon(record, "waits")  # runs when the task waits
    await event.wait()

async def middle(event):
    await innermost(event)

@app.task(name="wait_deep")
async def wait_deep():
    event = asyncio.Event()
    asyncio.get_running_loop().call_later(2, event.set)
    await middle(event)
    return "waited"

@app.task(name="hold_the_gil")
def hold_the_gil(seconds):
    mutex, until = ctypes.create_string_buffer(64), (ctypes.c_long * 2)(int(time.time()) + seconds, 0)
    libc = ctypes.PyDLL(None)  # unlike CDLL, PyDLL keeps the GIL
    libc.pthread_mutex_lock(mutex)
    record("holds")
    libc.pthread_mutex_timedlock(mutex, until)  # unlike sleep(), not interrupted by signals
    return "held"

@app.task(name="version")
def version():
    return "old"
"""


SENDS_ITSELF = """
@app.task(name="step")
def step(number):
    record("step", number=number)
    if number == 1:
        app.send_task("step", kwargs={"number": 2}, countdown=3)

app.send_task("step", kwargs={"number": 1}, job_id="first")
"""
CHANGES_DIRECTORY = """
os.chdir("/")
record("sees", seen=os.environ.setdefault("SEEN", "no"))
os.environ["SEEN"] = "yes"
"""


def module_of(worker: Worker) -> Path:
    return Path(f"/proc/{worker.pid}/cwd").readlink() / "tested.py"


def change_code(worker: Worker) -> None:
    """Change the task ``version`` in the module, as a deployment does."""
    module = module_of(worker)
    module.write_text(module.read_text().replace('return "old"', 'return "brand new"'))


def version(harness: WorkerHarness) -> object:
    return harness.app.send_task("version").get(timeout=60)


def wait_one_second(harness: WorkerHarness) -> None:
    """Wait until a worker of another queue has run a job that is delayed by a second."""
    harness.app.send_task("quick", queue="other", countdown=1).get(timeout=60)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


# ---- HUP ------------------------------------------------------------------------------------------------------------


@METHODS
def test_hup_waits_for_running_jobs_and_loads_new_code_in_the_same_process(harness: WorkerHarness, method: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    worker = harness.worker(TASKS, children=2, settings={"worker_start_method": method, "metrics_port": port})
    assert version(harness) == "old"
    running = harness.hold()
    harness.wait_for_start(running)
    worker.wait_for_line("Child started", count=2)
    before, fds = worker.children, descriptors(worker.pid)

    change_code(worker)
    worker.send(signal.SIGHUP)
    worker.wait_for_line("Worker stopping", mode="restart", running=1)
    harness.open_gate()
    assert running.get(timeout=60) == "gate"
    assert "-m bulltask worker -A tested:app" in worker.wait_for_line("Worker restarting")[0]["command"]
    worker.wait_for_line("Worker started", count=2)

    assert version(harness) == "brand new"
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        assert b"bullmq_jobs_processed_total" in answer.read()
    assert worker.process.poll() is None, "the process is the same"
    assert all(has_exited(pid) for pid in before)
    assert harness.start_count(running) == 1
    worker.wait_for_line("Child started", count=4)
    wait_until(lambda: descriptors(worker.pid) <= fds, 60, "no more descriptors than before")
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK


def test_each_of_three_restarts_uses_the_original_directory_and_environment(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS + CHANGES_DIRECTORY)
    for count in range(1, 4):
        worker.wait_for_line("Worker started", count=count)
        worker.send(signal.SIGHUP)
    worker.wait_for_line("Worker started", count=4)
    assert version(harness) == "old"
    assert [entry["seen"] for entry in harness.journal.all(what="sees")] == ["no"] * 4
    assert worker.stop() == ExitCode.OK


def test_signals_during_a_restart_do_not_kill_the_worker(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS)
    worker.wait_for_line("Worker started")
    worker.send(signal.SIGHUP)
    worker.wait_for_line("Worker restarting")

    def signal_until_restart() -> bool:
        """Send signals while the old program exits and the new one starts."""
        for number in (signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT, signal.SIGUSR1, signal.SIGHUP):
            worker.send(number)
        return len(worker.logged("Worker restarting")) >= 2

    wait_until(signal_until_restart, 60, "one more restart")
    assert version(harness) == "old"
    assert worker.stop() == ExitCode.OK


def test_term_after_hup_stops_the_worker_without_a_restart(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    running = harness.hold()
    harness.wait_for_start(running)
    worker.send(signal.SIGHUP)
    worker.wait_for_line("Worker stopping", mode="restart")
    worker.send(signal.SIGHUP)
    worker.wait_for_line("Signal ignored", signal="SIGHUP")
    worker.send(signal.SIGTERM)
    harness.open_gate()
    assert worker.wait() == ExitCode.OK
    assert running.get(timeout=60) == "gate"
    assert worker.logged("Worker restarting") == []


def test_a_restart_releases_running_jobs_at_the_shutdown_timeout(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1, settings={"shutdown_timeout": 0.3, "max_crashes": 1})
    running = harness.hold()
    harness.wait_for_start(running)
    worker.send(signal.SIGHUP)
    harness.wait_for_start(running, 2)
    harness.open_gate("gate", 2)
    assert running.get(timeout=60) == "gate"
    assert len(worker.logged("Worker started")) == 2
    assert worker.stop() == ExitCode.OK


def test_a_restart_with_code_that_cannot_be_imported_exits_with_an_error(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(TASKS)
    assert version(harness) == "old"
    module_of(worker).write_text("not valid Python\n")
    worker.send(signal.SIGHUP)
    assert worker.wait() == ExitCode.FAILED


def test_a_worker_that_waits_for_redis_can_be_restarted_and_stopped(harness: WorkerHarness) -> None:
    proxy = harness.proxy()
    proxy.refuse()
    worker = harness.worker(TASKS, via=proxy)
    worker.wait_for_line("Redis disconnected")
    for number in (signal.SIGUSR2, signal.SIGTSTP, signal.SIGCONT, signal.SIGTTIN):
        worker.send(number)
    worker.send(signal.SIGHUP)
    worker.wait_for_line("Worker restarting")
    worker.wait_for_line("Redis disconnected", count=2)
    assert worker.stop() == ExitCode.OK
    assert worker.logged("Worker started") == []


def test_closing_the_terminal_of_a_worker_is_a_warm_shutdown(harness: WorkerHarness) -> None:
    master, slave = pty.openpty()
    worker = harness.worker(TASKS, prefix=["setsid", "--ctty"], stdin=slave)
    os.close(slave)
    running = harness.hold()
    harness.wait_for_start(running)
    os.close(master)
    worker.wait_for_line("Worker stopping", mode="warm")
    harness.open_gate()
    assert worker.wait() == ExitCode.OK
    assert running.get(timeout=60) == "gate"
    assert harness.start_count(running) == 1
    assert worker.logged("Worker restarting") == []
    assert worker.warnings() == []


def test_a_warm_shutdown_works_even_if_the_closed_terminal_rejects_log_lines(
    harness: WorkerHarness,
) -> None:
    to_terminal = ["setsid", "--ctty", "sh", "-c", 'exec "$@" >/dev/tty 2>&1', "sh"]
    master, slave = pty.openpty()
    worker = harness.worker(TASKS, prefix=to_terminal, stdin=slave)
    os.close(slave)
    running = [harness.hold() for _ in range(2)]
    for job in running:
        harness.wait_for_start(job)
    os.close(master)
    harness.open_gate("gate", 2)
    assert worker.wait() == ExitCode.OK
    assert [job.get(timeout=60) for job in running] == ["gate", "gate"]
    assert [harness.start_count(job) for job in running] == [1, 1]


def test_the_only_worker_on_an_embedded_server_keeps_its_jobs_across_a_restart(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    # The server exits with its last user, and between the old and the new program it has none.
    worker = harness.worker(
        TASKS + SENDS_ITSELF,
        settings={"broker_url": "embedded://"},
        environ={"XDG_DATA_HOME": str(tmp_path / "data")},
    )
    harness.journal.wait_for(what="step", number="1")
    worker.send(signal.SIGHUP)
    worker.wait_for_line("Worker started", count=2, timeout=50)
    harness.journal.wait_for(what="step", number="2", timeout=50)
    assert worker.stop() == ExitCode.OK


def test_hangup_with_nohup_affects_neither_the_worker_nor_its_children(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, prefix=["nohup"], new_group=True)
    assert version(harness) == "old"
    worker.wait_for_line("Child started", count=2)
    before = worker.children
    os.killpg(worker.pid, signal.SIGHUP)
    assert version(harness) == "old"
    assert worker.children == before
    assert worker.stop() == ExitCode.OK
    assert worker.logged("Worker stopping", mode="restart") == []


# ---- TSTP and CONT --------------------------------------------------------------------------------------------------


def test_a_paused_worker_finishes_its_jobs_and_acquires_no_more_until_resumed(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=2, settings={"lock_duration": 30})
    harness.worker(options=["-Q", "other"], children=1)
    running = harness.hold()
    busy = int(harness.wait_for_start(running)["pid"])
    harness.wait_until_idle(2)  # the idle child of this worker, and the child of the other worker
    worker.send(signal.SIGTSTP)
    worker.wait_for_line("Worker paused", running=1)
    waiting = [harness.app.send_task("quick") for _ in range(20)]
    harness.open_gate()
    assert running.get(timeout=60) == "gate"
    os.kill(next(pid for pid in worker.children if pid != busy), signal.SIGKILL)
    worker.wait_for_line("Child started", count=3)
    wait_one_second(harness)
    assert harness.redis.llen(harness.keys.wait) == 20
    assert [harness.start_count(job) for job in waiting] == [0] * 20

    worker.send(signal.SIGCONT)
    worker.wait_for_line("Worker resumed")
    for job in waiting:
        job.get(timeout=60)
    pids = {entry["pid"] for job in waiting for entry in harness.journal.all(what="start", job=job.id)}
    harness.report(children_that_resumed=len(pids))
    assert worker.stop() == ExitCode.OK


def test_a_resumed_worker_acquires_a_job_immediately(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2, settings={"drain_delay": 30})
    harness.wait_until_idle(2)
    worker.send(signal.SIGTSTP)
    worker.wait_for_line("Worker paused")
    job = harness.app.send_task("quick")
    worker.send(signal.SIGCONT)
    assert job.get(timeout=20) is None
    assert worker.stop() == ExitCode.OK


def test_async_jobs_continue_while_the_worker_is_paused(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.app.send_task("wait_deep")
    harness.journal.wait_for(what="waits")
    worker.send(signal.SIGTSTP)
    worker.wait_for_line("Worker paused", running=1)
    assert job.get(timeout=60) == "waited"
    assert worker.stop() == ExitCode.OK


def test_a_paused_worker_stops_on_term(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2, settings={"shutdown_timeout": 30})
    worker.wait_for_line("Child started", count=2)
    worker.send(signal.SIGTSTP)
    worker.wait_for_line("Worker paused")
    worker.send(signal.SIGTERM)
    assert worker.wait(20) == ExitCode.OK


def test_ctrl_z_stops_no_process_of_the_worker(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2, new_group=True)
    harness.wait_until_idle(2)
    os.killpg(worker.pid, signal.SIGTSTP)
    worker.wait_for_line("Worker paused")
    states = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in worker.children]
    assert "T" not in states
    os.killpg(worker.pid, signal.SIGCONT)
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert worker.stop() == ExitCode.OK


# ---- TTIN and TTOU --------------------------------------------------------------------------------------------------


@METHODS
def test_ttin_adds_a_child_and_ttou_removes_it_when_its_jobs_have_finished(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(children=1, settings={"worker_start_method": method, "metrics_port": 0, "lock_duration": 1})
    first = harness.hold("a")
    harness.wait_for_start(first)
    second = harness.hold("b")
    worker.send(signal.SIGTTIN)
    worker.wait_for_line("Concurrency changed", children=2)
    added = int(harness.wait_for_start(second)["pid"])
    assert added != int(harness.wait_for_start(first)["pid"])

    worker.send(signal.SIGTTOU)
    worker.wait_for_line("Concurrency changed", children=1)
    worker.send(signal.SIGTTOU)
    worker.wait_for_line("Signal ignored", signal="SIGTTOU")
    third = harness.app.send_task("quick")
    harness.open_gate("b")
    assert second.get(timeout=60) == "b"
    wait_until(lambda: has_exited(added), 60, "the end of the added child")
    assert harness.start_count(third) == 0, "the removed child acquires no more jobs"
    harness.open_gate("a")
    assert first.get(timeout=60) == "a"
    assert third.get(timeout=60) is None
    assert [harness.start_count(job) for job in (first, second, third)] == [1, 1, 1]
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK


def test_ttin_adds_children_up_to_twice_the_concurrency_plus_two(harness: WorkerHarness) -> None:
    worker = harness.worker(children=2)
    worker.wait_for_line("Child started")
    for children in (3, 4, 5, 6):
        worker.send(signal.SIGTTIN)
        worker.wait_for_line("Concurrency changed", children=children)
    worker.send(signal.SIGTTIN)
    worker.wait_for_line("Signal ignored", signal="SIGTTIN")
    jobs = [harness.hold() for _ in range(6)]
    assert len({harness.wait_for_start(job)["pid"] for job in jobs}) == 6
    harness.open_gate("gate", 6)
    for job in jobs:
        job.get(timeout=60)
    assert [line["children"] for line in worker.logged("Concurrency changed")] == [3, 4, 5, 6]
    assert worker.stop() == ExitCode.OK


# ---- USR1 and USR2 --------------------------------------------------------------------------------------------------


@METHODS
def test_usr1_logs_the_stacks_of_threads_and_asyncio_tasks_of_all_processes(
    harness: WorkerHarness, method: str
) -> None:
    worker = harness.worker(TASKS, children=2, settings={"worker_start_method": method})
    sync = harness.hold()
    held_by = int(harness.wait_for_start(sync)["pid"])
    deep = harness.app.send_task("wait_deep")
    awaited_by = int(harness.journal.wait_for(what="waits")[0]["pid"])
    worker.wait_for_line("Child started", count=2)
    worker.send(signal.SIGUSR1)
    worker.wait_for_line("Stacks", count=3)

    stacks = {line["pid"]: line["traceback"] for line in worker.logged("Stacks")}
    assert stacks.keys() == {worker.pid, *worker.children}
    assert "supervisor.py" in stacks[worker.pid]
    assert "in wait_at" in stacks[held_by]
    assert f"Task 'job {deep.id}'" in stacks[awaited_by]
    outermost, innermost = stacks[awaited_by].index("in wait_deep"), stacks[awaited_by].index("in innermost")
    assert outermost < stacks[awaited_by].index("in middle") < innermost
    harness.open_gate()
    assert sync.get(timeout=60) == "gate"
    assert deep.get(timeout=60) == "waited"
    assert worker.logged("Child died") == []
    assert worker.stop() == ExitCode.OK


def test_usr1_logs_the_stack_of_a_child_in_c_code_that_holds_the_gil(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.app.send_task("hold_the_gil", kwargs={"seconds": 4})
    child = int(harness.journal.wait_for(what="holds")[0]["pid"])
    for count in (1, 2):
        worker.send(signal.SIGUSR1)
        text = worker.wait_for_line("Stacks", count=count, pid=child)[-1]["traceback"]
        assert "in hold_the_gil" in text
        assert text.count("most recent call first") == 1, "without the previous output"
    assert not job.ready()
    assert job.get(timeout=60) == "held"
    assert worker.stop() == ExitCode.OK


def test_usr1_to_a_child_logs_its_stacks(harness: WorkerHarness) -> None:
    worker = harness.worker(TASKS, children=1)
    job = harness.hold()
    child = int(harness.wait_for_start(job)["pid"])
    for count in (1, 2):
        os.kill(child, signal.SIGUSR1)
        text = worker.wait_for_line("Stacks", count=count, pid=child, index=0)[-1]["traceback"]
        assert text.count("in hold\n") == 1
    harness.open_gate()
    assert job.get(timeout=60) == "gate"
    assert worker.stop() == ExitCode.OK


def test_usr2_is_ignored_and_logged(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1, new_group=True)
    job = harness.hold()
    harness.wait_for_start(job)
    os.killpg(worker.pid, signal.SIGUSR2)
    worker.wait_for_line("Signal ignored", signal="SIGUSR2")
    harness.open_gate()
    assert job.get(timeout=60) == "gate"
    assert harness.start_count(job) == 1
    assert worker.stop() == ExitCode.OK


# ---- signals to a child ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("number", "method"), [(signal.SIGTERM, "fork"), (signal.SIGHUP, "fork"), (signal.SIGTERM, "spawn")]
)
def test_a_child_that_is_sent_term_or_hup_finishes_its_job_and_is_replaced(
    harness: WorkerHarness, number: signal.Signals, method: str
) -> None:
    worker = harness.worker(children=1, settings={"worker_start_method": method, "max_crashes": 1})
    job = harness.hold()
    child = int(harness.wait_for_start(job)["pid"])
    os.kill(child, number)
    following = harness.app.send_task("quick")
    harness.open_gate()
    assert job.get(timeout=60) == "gate"
    assert following.get(timeout=60) is None
    assert worker.wait_for_line("Child exited", pid=child)[0]["level"] == "info"
    assert [harness.start_count(job), harness.start_count(following)] == [1, 1]
    assert harness.journal.all(what="start", job=following.id)[0]["pid"] != str(child)
    assert worker.warnings() == []
    assert worker.stop() == ExitCode.OK
