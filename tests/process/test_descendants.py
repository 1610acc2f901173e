"""What a child has started ends with the child, before its job starts again; ``atexit`` runs when a child exits."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

import pytest

from bulltask import AsyncResult
from tests.support.processes import has_exited, wait_for_exit
from tests.support.worker import Worker
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

COUNT = 9
TASKS = (
    f"COUNT = {COUNT}"
    + """
import multiprocessing
import os
import select
import subprocess
from concurrent.futures import ProcessPoolExecutor

executors = []
processes = multiprocessing.get_context("fork")


def add_pid(pid):
    record("process", started=pid)


def started():
    return [int(entry[b"started"]) for _, entry in journal().xrange("journal") if b"started" in entry]


def sleep_there(seconds):
    add_pid(os.getpid())
    select.select([], [], [], seconds)


def start_all(**more):
    executors.append(ProcessPoolExecutor(2, mp_context=processes))
    executors[-1].submit(sleep_there, 0.1).result()
    executors[-1].submit(sleep_there, 100)
    for daemon in (False, True):
        processes.Process(target=sleep_there, args=[100], daemon=daemon).start()
    sleep = ["sleep", "100"]
    for options in ({}, {"start_new_session": True}, {"start_new_session": True, **more}):
        add_pid(subprocess.Popen(sleep, **options).pid)
    # Orphans while the child is alive: in its group, and in a session of its own.
    for session in (False, True):
        command = ["sh", "-c", "sleep 100 >/dev/null & echo $!"]
        add_pid(int(subprocess.check_output(command, start_new_session=session)))


def is_running(pid):
    return os.path.exists(f"/proc/{pid}") and " Z " not in open(f"/proc/{pid}/stat").read()


def running():
    return list(filter(is_running, started()))


@app.task(bind=True, name="starter", autoretry_for=(Exception,), retry_backoff=False)
def starter(self, crashes=False, env=None):
    record("start", job=self.request.id, running=str(running()))
    if self.request.attempts_started > 1:
        return
    start_all(env=env)
    while len(started()) < COUNT:
        select.select([], [], [], 0.01)
    record("ready", job=self.request.id)
    if crashes:
        os.abort()
    select.select([], [], [], 100)


@app.task(name="asker")
def asker():
    start_all(env={})
    return [os.getpid(), input()]
"""
)

EXIT = """
import atexit
import os
import subprocess
import tempfile
import threading
import weakref
from concurrent.futures import ProcessPoolExecutor

from bulltask.worker import child as inherited

atexit.register(record, "atexit", registered="by the module")
temporary = tempfile.TemporaryDirectory()
executor = ProcessPoolExecutor(2)
threads = []


class Kept:
    pass


@app.task(name="leaver")
def leaver():
    pid = executor.submit(os.getpid).result()
    record("process", started=pid)
    for options in ({}, {"start_new_session": True}):
        record("process", started=subprocess.Popen(["sleep", "100"], **options).pid)
    free = {"start_new_session": True, "env": {**os.environ, "BULLTASK_CHILD": ""}}
    no_output = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    record("free", started=subprocess.Popen(["sleep", "100"], **free, **no_output).pid)
    threads.append(threading.Thread(target=lambda: (threading.main_thread().join(), record("thread ended"))))
    threads[0].start()
    atexit.register(record, "atexit", registered="in the task")
    Kept.one = Kept()
    weakref.finalize(Kept.one, record, "finalized")
    return os.path.isdir(temporary.name)


@app.task(name="hanger")
def hanger():
    inherited.EXIT_TIMEOUT_S = 0.2
    thread = threading.Thread(target=threading.Event().wait)
    thread.start()
"""


def kill_child(worker: Worker, pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def stop(worker: Worker, pid: int) -> None:
    worker.stop()


def kill_supervisor(worker: Worker, pid: int) -> None:
    worker.process.kill()
    worker.wait()


def do_nothing(worker: Worker, pid: int) -> None:
    pass


@pytest.mark.parametrize(
    ("end", "options", "settings"),
    [
        pytest.param(kill_child, {}, {}, id="killed"),
        pytest.param(kill_child, {}, {"worker_start_method": "spawn"}, id="killed, spawned"),
        pytest.param(do_nothing, {}, {}, id="crash"),
        pytest.param(do_nothing, {"time_limit": 2.0}, {}, id="hard limit"),
        pytest.param(stop, {}, {"shutdown_timeout": 0.1}, id="stopped"),
        pytest.param(kill_supervisor, {}, {"lock_duration": 1}, id="dead supervisor"),
    ],
)
def test_what_a_child_has_started_ends_before_its_job_starts_again(
    harness: WorkerHarness, end: Callable[[Worker, int], None], options: dict[str, Any], settings: dict[str, object]
) -> None:
    settings = {"stalled_interval": 1, "max_stalled_count": 5, **settings}
    worker = harness.worker(TASKS, settings=settings)
    # Only the supervisor can find a program that has both its own session and its own environment.
    kwargs: dict[str, Any] = {
        "crashes": end is do_nothing and not options,
        "env": None if end is kill_supervisor else {},
    }
    job: AsyncResult[None] = harness.app.send_task("starter", kwargs=kwargs, **options)
    harness.journal.wait_for(what="ready", job=job.id)
    pid = int(harness.wait_for_start(job)["pid"])
    end(worker, pid)
    if end in {stop, kill_supervisor}:
        worker = harness.worker(TASKS, settings=settings)
    assert harness.wait_for_start(job, 2)["running"] == "[]", worker.log
    assert worker.stop() == 0


def test_what_a_child_has_started_ends_with_a_killed_supervisor_where_there_is_no_shell(harness: WorkerHarness) -> None:
    without_shell = "from bulltask.worker import helpers\nhelpers._SHELL = '/there is no shell'\n"
    worker = harness.worker(without_shell + TASKS)
    job = harness.app.send_task("starter", kwargs={"crashes": False, "env": None})
    harness.journal.wait_for(what="ready", job=job.id)
    kill_supervisor(worker, 0)
    for pid in started(harness):
        wait_for_exit(pid)


def started(harness: WorkerHarness) -> list[int]:
    """Return the pids of what the tasks have started."""
    return [int(entry["started"]) for entry in harness.journal.all(what="process")]


def test_a_task_can_read_from_the_terminal_and_what_its_child_has_started_ends(harness: WorkerHarness) -> None:
    master, slave = os.openpty()
    try:
        worker = harness.worker(TASKS, prefix=["setsid", "--ctty"], stdin=slave)
        job = harness.app.send_task("asker")
        harness.journal.wait_for(COUNT, what="process")
        os.write(master, b"yes\n")
        pid, answer = job.get(timeout=60)
        assert answer == "yes"
        os.kill(pid, signal.SIGKILL)
        for pid in started(harness):
            wait_for_exit(pid)
        os.write(master, b"\x03")  # Ctrl-C
        assert worker.wait() == 0
    finally:
        os.close(master)
        os.close(slave)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_that_exits_calls_its_own_exit_functions_and_leaves_no_process(
    harness: WorkerHarness, method: str
) -> None:
    settings = {"worker_max_tasks_per_child": 1, "worker_start_method": method}
    worker = harness.worker(EXIT, children=1, settings=settings)
    for count in (1, 2):
        assert harness.app.send_task("leaver").get(timeout=60) is True, "the directory of the supervisor exists"
        worker.wait_for_line("Child exited", count=count)
        assert all(map(has_exited, started(harness)))
    assert worker.stop() == 0
    assert worker.warnings() == []
    for entry in harness.journal.all(what="free"):
        assert not has_exited(int(entry["started"]))
        os.kill(int(entry["started"]), signal.SIGKILL)
    by_what = {
        what: [int(entry["pid"]) for entry in harness.journal.all(what=what)] for what in ("thread ended", "finalized")
    }
    assert len(by_what["thread ended"]) == 2
    assert by_what["finalized"] == by_what["thread ended"]
    in_task = [int(entry["pid"]) for entry in harness.journal.all(what="atexit", registered="in the task")]
    assert in_task == by_what["thread ended"]
    by_module = [int(entry["pid"]) for entry in harness.journal.all(what="atexit", registered="by the module")]
    assert by_module.count(worker.pid) == 1
    assert (set(in_task) & set(by_module) == set()) is (method == "fork")


def test_each_child_has_its_own_processes_in_the_executor_of_a_module(harness: WorkerHarness) -> None:
    source = """
    import multiprocessing
    import os
    from concurrent.futures import ProcessPoolExecutor

    executor = ProcessPoolExecutor(1, multiprocessing.get_context("fork"))


    @app.task(name="ask")
    def ask(gate):
        wait_at(gate)
        return [os.getpid(), *executor.map(parent, range(5))]


    def parent(_):
        return os.getppid()
    """
    worker = harness.worker(source, children=2)
    harness.wait_until_idle(2)
    jobs = [harness.app.send_task("ask", kwargs={"gate": gate}) for gate in "ab"]
    for _ in range(2):
        harness.open_gate("a")
        harness.open_gate("b")
    child_pids = [job.get(timeout=60) for job in jobs]
    assert {len(set(pids)) for pids in child_pids} == {1}, "only processes of the same child have replied"
    os.kill(child_pids[0][0], signal.SIGKILL)  # its process holds a lock of the pool's pipe
    job = harness.app.send_task("ask", kwargs={"gate": "a"})
    assert len(set(job.get(timeout=60))) == 1
    assert worker.stop() == 0


def test_a_child_whose_exit_functions_hang_is_killed_after_a_while(harness: WorkerHarness) -> None:
    worker = harness.worker(EXIT, children=1, settings={"max_crashes": 1})
    assert harness.app.send_task("hanger").get(timeout=60) is None
    worker.stop()
    assert worker.logged("Child killed", reason="exit_timeout", jobs=0)
    assert [line["event"] for line in worker.warnings()] == ["Child killed"]
