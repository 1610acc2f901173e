"""Children that die, and their jobs."""

from __future__ import annotations

import os
import re
import signal

import pytest
from click.testing import CliRunner, Result

from bulltask.cli.main import main
from bulltask.worker.child_pool import OutOfMemoryKills
from bulltask.worker.slots import ExitCode
from tests.support.command_output import json_of
from tests.support.machine_load import scale_to_load
from tests.support.streams import server_ms
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.quick]

KILLERS = """
import ctypes, os, signal

@app.task(bind=True, name="kill")
def kill(self, number):
    record("start", job=self.request.id)
    if number == signal.SIGSEGV:
        ctypes.string_at(0)
    os.kill(os.getpid(), number)

@app.task(bind=True, name="leave")
def leave(self, code):
    record("start", job=self.request.id)
    os._exit(code)
"""

NO_RECOVERY = """
from bulltask.worker.recovery import Recovery

Recovery.recover = lambda *_: None
"""


@pytest.mark.parametrize("start_method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_the_job_of_a_killed_child_runs_again_within_a_second(harness: WorkerHarness, start_method: str) -> None:
    worker = harness.worker(children=3, settings={"lock_duration": 30, "worker_start_method": start_method})
    harness.wait_until_idle(3)
    interrupted, other = harness.hold("a"), harness.hold("b")
    first, untouched = harness.wait_for_start(interrupted), harness.wait_for_start(other)
    assert first["pid"] != untouched["pid"]
    lock = harness.redis.get(harness.keys.lock(other.id))

    killed_ms = server_ms(harness.redis)
    os.kill(int(first["pid"]), signal.SIGKILL)
    took_ms = harness.wait_for_event("active", interrupted, 2).ms - killed_ms
    harness.report(active_again_ms=took_ms)

    assert took_ms <= scale_to_load(1000)
    assert harness.wait_for_start(interrupted, 2)["pid"] not in {first["pid"], untouched["pid"]}
    assert harness.redis.get(harness.keys.lock(other.id)) == lock
    worker.wait_for_line("Child started", count=4)
    assert len(worker.children) == 3
    harness.open_gate("a")
    harness.open_gate("b")
    assert interrupted.get(timeout=60) == "a"
    assert other.get(timeout=60) == "b"
    assert (harness.start_count(interrupted), harness.start_count(other)) == (2, 1)
    assert harness.field(interrupted, "atm") == "1", "a crash is not counted as an attempt"
    assert harness.events.all(event="stalled") == []
    assert worker.stop() == 0


def test_the_log_names_the_jobs_of_a_killed_child_and_the_jobs_know_of_it(harness: WorkerHarness) -> None:
    worker = harness.worker(children=1, settings={"lock_duration": 30, "max_crashes": 2})
    job = harness.hold("a")
    pid = 0
    for number in (1, 2):
        pid = int(harness.wait_for_start(job, number)["pid"])
        os.kill(pid, signal.SIGKILL)
        died = worker.wait_for_line("Child died", pid=pid)[0]
        assert (died["exit_reason"], died["job_ids"]) == ("SIGKILL", [job.id])
        assert ("OOM" in died["hint"]) is not OutOfMemoryKills().are_counted
        if number == 1:
            harness.wait_for_start(job, 2)
    harness.wait_for_event("failed", job)

    def bulltask(*args: str) -> Result:
        return CliRunner().invoke(main, ["-b", harness.url, *args])

    shown = bulltask("job", "show", job.id).stdout
    assert re.search(r"^crashes +2 \(", shown, re.MULTILINE), shown
    assert json_of(bulltask("job", "show", job.id, "--json"), "job show")["redis"]["crashes"] == 2
    lines = bulltask("job", "logs", job.id).stdout.splitlines()
    assert re.fullmatch(r"20\d\d-.* UTC: child process \d+ died \(SIGKILL\) while it had this job", lines[0])
    assert lines[1].endswith(f"child process {pid} died (SIGKILL) while it had this job (crash 2)")
    [group] = json_of(bulltask("failures", "--error", "SIGKILL", "--json"), "failures")["failures"]
    assert group["example"]["id"] == job.id


def test_twenty_killed_children_lose_no_job_and_release_each_within_a_second(
    harness: WorkerHarness,
) -> None:
    worker = harness.worker(children=4, settings={"lock_duration": 30, "max_crashes": 100})
    interrupted, other = harness.hold("a"), harness.hold("b")
    harness.wait_for_start(other)
    waits_ms = []
    for number in range(1, 21):
        start = harness.wait_for_start(interrupted, number)
        killed_ms = server_ms(harness.redis)
        os.kill(int(start["pid"]), signal.SIGKILL)
        waiting = harness.events.wait_for(number, event="waiting", jobId=interrupted.id, prev="active")[-1]
        waits_ms.append(waiting.ms - killed_ms)
    harness.report(back_in_wait_ms=sorted(waits_ms))

    harness.open_gate("a", 2)  # a task that was killed at the gate may have consumed one
    harness.open_gate("b")
    assert interrupted.get(timeout=60) == "a"
    assert other.get(timeout=60) == "b"
    assert max(waits_ms) <= scale_to_load(1000)
    assert (harness.start_count(interrupted), harness.start_count(other)) == (21, 1)
    assert len(worker.wait_for_line("Child died", count=20)) == 20
    worker.wait_for_line("Child started", count=24)
    assert worker.stop() == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_job_that_kills_its_children_fails_with_a_reason_that_names_the_signal(
    harness: WorkerHarness, number: signal.Signals
) -> None:
    worker = harness.worker(KILLERS, settings={"max_crashes": 2})
    poison = harness.app.send_task("kill", kwargs={"number": int(number)})
    good = harness.app.send_task("quick")
    harness.wait_for_event("failed", poison)

    assert harness.start_count(poison) == 2
    reason = poison.snapshot().failed_reason
    assert number.name in reason
    assert "max_crashes" in reason
    assert good.get(timeout=60) is None
    assert harness.start_count(good) == 1
    assert worker.wait_for_line("Crash limit reached")[0]["crashes"] == 2
    worker.wait_for_line("Child started", count=4)
    assert worker.stop() == 0


def test_a_job_that_exits_its_child_fails_with_a_reason_that_names_the_exit_code(harness: WorkerHarness) -> None:
    harness.worker(KILLERS, children=1, settings={"max_crashes": 1})
    poison = harness.app.send_task("leave", kwargs={"code": 7})
    assert "exit code 7" in harness.wait_for_event("failed", poison)["failedReason"]
    assert harness.start_count(poison) == 1


def test_a_worker_whose_children_cannot_start_exits_with_boot_failed(harness: WorkerHarness) -> None:
    worker = harness.worker(
        """
        import os

        os.register_at_fork(after_in_child=lambda: os._exit(9))
        """
    )
    assert worker.wait() == ExitCode.BOOT_FAILED
    assert worker.wait_for_line("Child died", count=5)[0]["exit_reason"] == "exit code 9"


def test_without_recovery_the_job_of_a_killed_child_does_not_run_again(harness: WorkerHarness) -> None:
    worker = harness.worker(NO_RECOVERY, children=3, settings={"lock_duration": 30})
    interrupted = harness.hold()
    os.kill(int(harness.wait_for_start(interrupted)["pid"]), signal.SIGKILL)
    worker.wait_for_line("Child died")
    harness.app.send_task("quick", countdown=1.5).get(timeout=60)
    assert harness.start_count(interrupted) == 1, "otherwise, the tests with recovery could not fail"
    assert harness.redis.lrange(harness.keys.active, 0, -1) == [interrupted.id]
