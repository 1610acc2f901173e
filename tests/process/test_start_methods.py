"""Forked children and spawned children."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from bulltask.testing.worker import wait_until
from bulltask.worker.spawned import SpawnSpec
from tests.support.like_macos import LIKE_MACOS
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

THREAD = """
import threading

event = threading.Event()
threading.Thread(target=event.wait, daemon=True).start()
"""


def command_line(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()


def test_children_are_forks_unless_the_app_has_threads(harness: WorkerHarness) -> None:
    plain = harness.worker()
    plain.wait_for_line("Child started", count=2)
    assert not any("spawned" in command_line(pid) for pid in plain.children)
    assert plain.warnings() == []
    assert plain.stop() == 0

    threaded = harness.worker(THREAD)
    job = harness.hold()
    pid = int(harness.wait_for_start(job)["pid"])
    assert "bulltask.worker.spawned" in command_line(pid)
    warnings = [line for line in threaded.warnings() if "threads" in line["event"]]
    assert len(warnings) == 1, "logged once, not for each child"
    harness.open_gate()
    assert job.get(timeout=60) == "gate"
    assert threaded.stop() == 0


def test_numpy_and_pyarrow_work_in_forked_children(harness: WorkerHarness) -> None:
    source = """
    import numpy
    import pyarrow
    from pyarrow import compute

    @app.task(name="sum")
    def sum_up(numbers):
        ones = numpy.ones((300, 300))
        assert (ones @ ones).sum() == 300**3
        return compute.sum(pyarrow.array(range(numbers))).as_py()
    """
    worker = harness.worker(source)
    jobs = [harness.app.send_task("sum", kwargs={"numbers": 1_000_000}) for _ in range(4)]
    assert [job.get(timeout=60) for job in jobs] == [499_999_500_000] * 4
    assert not any("spawned" in command_line(pid) for pid in worker.children)
    assert worker.warnings() == []
    assert worker.stop() == 0


def test_random_numbers_differ_in_each_child(harness: WorkerHarness) -> None:
    source = """
    import random
    import sys
    import types

    import numpy.random

    # PyTorch is too large for the tests; its default generator has the same interface.
    torch = sys.modules["torch.random"] = types.ModuleType("torch.random")
    torch.value = 0
    torch.seed = lambda: setattr(torch, "value", random.SystemRandom().random())

    @app.task
    def draw():
        return [random.random(), float(numpy.random.random()), torch.value]
    """
    worker = harness.worker(source, settings={"worker_max_tasks_per_child": 1})
    jobs = [harness.app.send_task("tested.draw") for _ in range(6)]
    for name, values in zip(
        ("random", "numpy", "torch"), zip(*(job.get(timeout=60) for job in jobs), strict=True), strict=True
    ):
        assert len(set(values)) == len(jobs), name
    assert worker.stop() == 0


def test_children_are_spawned_if_numpy_is_configured_to_use_threads(
    harness: WorkerHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENBLAS_NUM_THREADS", "2")
    worker = harness.worker("import numpy")
    worker.wait_for_line("Child started", count=2)
    assert all("spawned" in command_line(pid) for pid in worker.children)
    assert worker.stop() == 0


@pytest.mark.parametrize("system", ["", LIKE_MACOS], ids=["linux", "macos"])
def test_spawned_children_recover_jobs_share_metrics_and_shut_down(harness: WorkerHarness, system: str) -> None:
    port = free_port()
    settings = {"worker_start_method": "spawn", "lock_duration": 30, "metrics_port": port}
    worker = harness.worker(system, children=2, settings=settings)
    job = harness.hold()
    first = harness.wait_for_start(job)
    os.kill(int(first["pid"]), signal.SIGKILL)
    again = harness.wait_for_start(job, 2)
    assert again["pid"] != first["pid"]
    harness.open_gate()
    assert job.get(timeout=60) == "gate"
    # A spawned child shares the counters through a descriptor; a new child must not reset them.
    wait_until(lambda: completed(port) == 1, 60, "the completed job in the metrics")
    running = harness.hold("late")
    harness.wait_for_start(running)
    worker.send(signal.SIGTERM)
    harness.open_gate("late")
    assert worker.wait() == 0
    assert running.successful()


def test_a_spawned_child_imports_the_app_from_the_path_of_the_supervisor(tmp_path: Path) -> None:
    (tmp_path / "only_in_path.py").write_text("raise SystemExit(42)")
    spec = SpawnSpec(
        app="only_in_path:app",
        overrides={},
        path=[*sys.path, str(tmp_path)],
        queues=["mail"],
        worker_id="worker",
        index=0,
        parent_pid=os.getpid(),
        slots_fd=-1,
        children=1,
        per_child=1,
        metrics_fd=None,
    )
    fd = spec.write()
    try:
        command = [sys.executable, "-m", "bulltask.worker.spawned", str(fd)]
        ended = subprocess.run(command, pass_fds=[fd], capture_output=True, text=True, timeout=60, check=False)
    finally:
        os.close(fd)
    assert ended.returncode == 42, ended.stderr


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def completed(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
        families = list(text_string_to_metric_families(answer.read().decode()))
    samples = (sample for family in families if family.name == "bullmq_jobs_processed" for sample in family.samples)
    return sum(sample.value for sample in samples if sample.labels["status"] == "completed")
