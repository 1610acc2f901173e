"""Signals about a worker's own lifecycle, and setup_logging."""

from __future__ import annotations

import os
import signal
import socket
import urllib.request

import pytest

from bulltask.testing.worker import wait_until
from tests.support.processes import has_exited
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

METHODS = pytest.mark.parametrize("method", ["fork", "spawn"])
LIFE = """
from bulltask import signals

known = []

@signals.worker_init.connect
def init(sender, **_):
    known.append("init")
    record("worker_init", host=sender.hostname, app=sender.app.name)

@signals.worker_ready.connect
def ready(sender, **_):
    known.append("ready")
    record("worker_ready", host=sender.hostname)
    app.send_task("quick", job_id="sent by worker_ready")

@signals.worker_shutting_down.connect
def shutting_down(sender, sig, how, exitcode, **_):
    known.append("shutting down")
    record("worker_shutting_down", host=sender, sig=sig, how=how, exitcode=exitcode)

@signals.worker_shutdown.connect
def shutdown(sender, **_):
    record("worker_shutdown", known=",".join(known))
"""
BLOCKS = """
import sys

from bulltask import signals

@signals.worker_init.connect
def fails(**_):
    raise LookupError("no database")

@signals.worker_ready.connect
def exits(**_):
    sys.exit(3)

@signals.worker_ready.connect
def blocks(**_):
    record("worker_ready")
    wait_at("never")
"""
REFUSES = """
import sys

from bulltask import signals

@signals.worker_init.connect
def refuses(**_):
    sys.exit(7)
"""
OWN_LOGGING = """
import logging
import sys

from bulltask import get_task_logger, signals

@signals.setup_logging.connect
def configure(loglevel, logfile, format, colorize, **_):
    handler = logging.StreamHandler(sys.stdout)
    handler.setFormatter(logging.Formatter("OWN %(name)s %(levelname)s [%(job_id)s %(task_name)s] %(message)s"))
    logging.basicConfig(level=loglevel, handlers=[handler])

@app.task(name="logs")
def logs():
    get_task_logger(__name__).info("100% of the rows")
    raise ValueError("no such row")
"""
BROKEN_LOGGING = """
from bulltask import signals

@signals.setup_logging.connect
def configure(**_):
    raise LookupError("no such file")
"""


@METHODS
def test_signals_of_a_worker_are_sent_once_outside_of_its_supervisor(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(LIFE, children=2, settings={"worker_start_method": method})
    (init,) = harness.journal.wait_for(what="worker_init")
    (ready,) = harness.journal.wait_for(what="worker_ready")
    harness.journal.wait_for(what="start", job="sent by worker_ready")
    (child, *_) = (int(entry["pid"]) for entry in harness.journal.all(what="start"))
    os.kill(child, signal.SIGKILL)
    worker.wait_for_line("Child started", 3)
    assert worker.stop() == 0
    (shutting_down,) = harness.journal.wait_for(what="worker_shutting_down")
    (shutdown,) = harness.journal.wait_for(what="worker_shutdown")
    assert (int(init["pid"]), init["app"]) == (worker.pid, "tested")
    assert ready["pid"] == shutting_down["pid"] == shutdown["pid"]
    assert int(ready["pid"]) not in {worker.pid, child}
    assert init["host"] == ready["host"] == shutting_down["host"] == worker.logged("Worker started")[0]["worker_id"]
    assert [shutting_down[name] for name in ("sig", "how", "exitcode")] == ["SIGTERM", "Warm", "0"]
    assert shutdown["known"] == "init,ready,shutting down"
    assert len(harness.journal.all(what="worker_ready")) == 1


def test_a_blocked_receiver_of_worker_ready_delays_only_the_shutdown_by_5_s(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(BLOCKS, children=1)
    harness.journal.wait_for(what="worker_ready")
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert worker.stop() == 0
    assert [(line["on"], line["hook"]) for line in worker.logged("Hook failed")] == [
        ("worker_init", "tested.fails"),
        ("worker_ready", "tested.exits"),
    ]
    assert len(worker.logged("Hook process killed")) == 1


@METHODS
def test_processes_beside_the_children_that_are_killed_are_replaced(harness: WorkerHarness, method: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = int(listener.getsockname()[1])
    worker = harness.worker(LIFE, children=1, settings={"worker_start_method": method, "metrics_port": port})
    harness.journal.wait_for(what="start", job="sent by worker_ready")
    children = {line["pid"] for line in worker.wait_for_line("Child started")}
    helpers = set(worker.children) - children
    assert len(helpers) == 2
    for pid in helpers:
        os.kill(pid, signal.SIGKILL)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert b"bullmq_jobs_processed_total" in answer.read()
    lines = [*worker.wait_for_line("Metrics exporter died"), *worker.wait_for_line("Hook process died")]
    assert {line["pid"] for line in lines} == helpers
    assert {line["code"] for line in lines} == {-signal.SIGKILL}
    wait_until(lambda: len(worker.children) == 3, 60, "two new processes, and no zombie")
    assert all(has_exited(pid) for pid in helpers)
    assert worker.stop() == 0
    (shutdown,) = harness.journal.wait_for(what="worker_shutdown")
    assert int(shutdown["pid"]) not in helpers
    assert len(harness.journal.all(what="worker_shutting_down")) == 1
    assert len(harness.journal.all(what="worker_ready")) == 1


def test_a_worker_without_receivers_has_no_hook_process_and_worker_init_can_prevent_the_start(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(children=1)
    harness.app.send_task("quick").get(timeout=60)
    assert len(worker.children) == 1
    assert harness.worker(REFUSES, children=1).wait() == 7


@METHODS
def test_setup_logging_lets_the_app_format_all_lines(harness: WorkerHarness, method: str) -> None:
    worker = harness.worker(OWN_LOGGING, children=1, settings={"worker_start_method": method})
    job = harness.app.send_task("logs", max_retries=0)
    with pytest.raises(ValueError, match="no such row"):
        job.get(timeout=60)
    assert worker.stop() == 0
    assert f"OWN tested INFO [{job.id} logs] 100% of the rows" in worker.text
    (failed,) = (line for line in worker.text if "Job failed" in line)
    assert failed.startswith(
        f"OWN bulltask.worker ERROR [{job.id} ] Job failed job_id={job.id} queue=default task=logs"
    )
    assert 'raise ValueError("no such row")' in worker.log
    assert next(line for line in worker.text if "Worker stopped" in line).startswith("OWN bulltask.worker INFO [ ]")
    assert worker.lines == [], "nothing is logged in bulltask's own format"


def test_a_receiver_of_setup_logging_that_raises_leaves_the_configuration_to_bulltask(harness: WorkerHarness) -> None:
    worker = harness.worker(BROKEN_LOGGING, children=1)
    assert harness.app.send_task("quick").get(timeout=60) is None
    assert worker.stop() == 0
    assert worker.logged("Worker stopped")
