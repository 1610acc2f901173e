from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from bulltask.events import Bus
from bulltask.observe import events
from bulltask.observe.counters import (
    BUCKETS,
    MAX_TASKS,
    OTHER_TASKS,
    MetricsListener,
    MetricsMemory,
    NotedAttempt,
    failure_counter,
)
from bulltask.observe.metrics import METRICS, MetricsCollector, QueuesCollector, ReadQueues
from bulltask.transport.scripts.queue import QueueFigures
from bulltask.worker.slots import ChildLimit

WORKER = "node-1-12345-a1b2c3"
Sample = tuple[str, tuple[tuple[str, str], ...]]


def attach_listener(memory: MetricsMemory, block: int) -> Bus:
    bus = Bus(on_error=lambda name, event, exc: pytest.fail(f"{name} {event} {exc!r}"))
    MetricsListener(memory.block(block), memory.queues).attach(bus)
    return bus


def no_queues() -> Mapping[str, QueueFigures]:
    return {}


def scrape(memory: MetricsMemory, read_queues: ReadQueues = no_queues) -> dict[Sample, float]:
    registry = CollectorRegistry()
    registry.register(MetricsCollector(memory, WORKER, read_queues))
    families = text_string_to_metric_families(generate_latest(registry).decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def test_the_first_metrics_keep_their_names_types_and_labels() -> None:
    registry = CollectorRegistry()
    readings = {"mail": QueueFigures(wait=1)}
    registry.register(MetricsCollector(MetricsMemory(["mail"], 1, ChildLimit), WORKER, lambda: readings))
    families = list(text_string_to_metric_families(generate_latest(registry).decode()))
    metrics = {
        family.name: (family.type, set(family.samples[0].labels) - {"le"}) for family in families if family.samples
    }
    assert {name: metric for name, metric in metrics.items() if name.startswith("bullmq_")} == {
        "bullmq_jobs_processed": ("counter", {"queue", "status"}),
        "bullmq_jobs_failed": ("counter", {"queue", "reason"}),
        "bullmq_job_duration_seconds": ("histogram", {"queue"}),
        "bullmq_lock_extend_duration_seconds": ("histogram", {"queue"}),
        "bullmq_queue_length": ("gauge", {"queue", "state"}),
        "bullmq_stalled_jobs": ("counter", {"queue"}),
        "bullmq_heartbeat_success": ("counter", {"queue"}),
        "bullmq_heartbeat_failure": ("counter", {"queue"}),
        "bullmq_active_workers": ("gauge", {"queue", "worker_id"}),
        "bullmq_children_replaced": ("counter", {"reason"}),
        "bullmq_redis_connection_status": ("gauge", {"status"}),
        "bullmq_redis_reconnect_attempts": ("counter", set()),
        "bullmq_stalled_checker_skipped": ("counter", {"queue"}),
    }
    # The parser removes "_total" from the names of counter families, but not from those of samples.
    names = {sample.name for family in families if family.type == "counter" for sample in family.samples}
    assert all(name.endswith("_total") for name in names)


def test_declared_metrics_follow_the_conventions() -> None:
    for name, metric in METRICS.items():
        assert name.startswith(("bulltask_", "bullmq_"))
        assert name.endswith("_total") == (metric.type == "counter")
        assert not re.search("_ms|_millis|_kib|_minutes", name)
        assert not {"worker_id", "pid", "job"} & set(metric.labels) or name == "bullmq_active_workers"


def test_every_counter_is_zero_before_the_first_job() -> None:
    samples = scrape(MetricsMemory(["mail", "sms"], 3, ChildLimit))
    for queue in ("mail", "sms"):
        for status in ("completed", "failed", "retried"):
            assert samples["bullmq_jobs_processed_total", (("queue", queue), ("status", status))] == 0
        assert samples["bullmq_job_duration_seconds_count", (("queue", queue),)] == 0
        assert samples["bullmq_stalled_jobs_total", (("queue", queue),)] == 0
        for reason in ("transient_exhausted", "permanent", "unknown"):
            assert samples["bullmq_jobs_failed_total", (("queue", queue), ("reason", reason))] == 0


def test_the_outcomes_of_jobs_are_counted_by_queue() -> None:
    memory = MetricsMemory(["mail", "sms"], 2, ChildLimit)
    block = memory.block(1)
    for _ in range(3):
        block.ended(0, "mail", "t", "completed", 10.0)
    for _ in range(2):
        block.ended(0, "mail", "t", "retried", 10.0)
    block.ended(0, "sms", "t", "permanent", 10.0)
    mail, sms = memory.totals()["mail"], memory.totals()["sms"]
    assert (mail.counts["completed"], mail.counts["retried"], mail.failed) == (3, 2, 0)
    assert (sms.counts["completed"], sms.counts["retried"], sms.failed) == (0, 0, 1)


def test_a_queue_that_is_added_is_counted_by_all_processes() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit, tasks=["t"], slots=1)
    supervisor = memory.block(0)
    assert memory.add_queue("sms")
    memory.block(1).ended(0, "sms", "t", "completed", 10.0)
    memory.block(1).ended(0, "mail", "t", "completed", 10.0)
    supervisor.add("sms", "stalled")
    sms = memory.totals()["sms"]
    assert (sms.counts["completed"], sms.counts["stalled"], memory.queues) == (1, 1, ("mail", "sms"))
    assert {names: totals.completed for names, totals in memory.task_totals().items()} == {
        ("mail", "t"): 1,
        ("sms", "t"): 1,
    }
    added = [f"q{number}" for number in range(200)]
    assert len([name for name in added if memory.add_queue(name)]) == 99, "there is room for a hundred"


class DyingCells:
    """The cells of a process that is killed after a number of writes."""

    def __init__(self, cells: Any, writes: int) -> None:
        self._cells = cells
        self._writes = writes

    def __getitem__(self, at: Any) -> Any:
        return self._cells[at]

    def __setitem__(self, at: int, value: float) -> None:
        if not self._writes:
            raise KeyboardInterrupt
        self._writes -= 1
        self._cells[at] = value


@pytest.mark.parametrize("writes", range(12))
def test_an_attempt_is_noted_or_counted_at_whatever_step_its_child_dies(writes: int) -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit, tasks=["t"], slots=2)
    child = memory.block(1)
    child.ended(1, "mail", "t", "completed", 30.0)
    child._cells = DyingCells(child._cells, writes)  # type: ignore[assignment]
    ending, ended = False, False
    with suppress(KeyboardInterrupt):
        child.ending(1, 7, 2, "mail", "t", "retried", 20.0)
        ending = True
        child.ended(1, "mail", "t", "retried", 20.0)
        ended = True

    notes = memory.block(1).take_notes()
    counted, task = memory.totals()["mail"], memory.task_totals()["mail", "t"]
    retried = counted.counts["retried"]
    if ending:
        assert len(notes) + retried == 1
        assert notes in ([], [NotedAttempt(1, 7, 2, "mail", "t", "retried", 0.02)])
    assert not (ended and notes)
    assert retried == task.retried
    assert counted.durations.buckets[-1] == task.run.buckets[-1] == 1 + retried
    assert counted.durations.seconds == task.run.seconds == pytest.approx(0.03 + 0.02 * retried)
    assert memory.block(1).take_notes() == []


def test_an_attempt_that_lost_its_lock_is_not_counted() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    memory.block(1).ending(0, 1, 1, "mail", "t", "completed", 1.0)
    memory.block(1).not_ended(0)
    assert memory.block(1).take_notes() == []
    assert memory.totals()["mail"].counts["completed"] == 0


def test_wait_and_run_times_are_counted_by_task_and_further_tasks_together() -> None:
    names = [f"task {number}" for number in range(MAX_TASKS + 5)]
    memory = MetricsMemory(["mail", "sms"], 3, ChildLimit, tasks=names, buckets=(1, 60))
    for number in (1, 2):
        for name in (*names, "unknown"):
            memory.block(number).ended(None, "sms", name, "completed", 59_000.0)
            memory.block(number).waited("sms", name, 0.5)
            memory.block(number).used_cpu("sms", name, 0.25)
    totals = memory.task_totals()
    assert len(totals) == MAX_TASKS + 1
    assert totals["sms", OTHER_TASKS].completed == 2 * 6
    one = totals["sms", "task 7"]
    assert (one.run.buckets, one.wait.buckets, one.cpu_s) == ((0, 2, 2), (2, 2, 2), 0.5)


def test_jobs_that_end_without_running_are_counted_but_not_timed() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    bus = attach_listener(memory, 0)
    bus.emit(events.CrashLimitReached("1", "mail", 3, "SIGSEGV"))
    bus.emit(events.JobIncompatible("1", "mail", "t", "no", 5000))
    total = memory.totals()["mail"]
    assert (total.failed, total.counts["retried"], total.durations.buckets[-1]) == (1, 1, 0)


def test_failed_jobs_are_counted_by_their_reason() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    bus = attach_listener(memory, 1)
    for category in ("transient", "permanent", "permanent", "unknown", "of another version"):
        memory.block(1).ended(0, "mail", "t", failure_counter(category, exhausted=False), 10.0)
    memory.block(1).ended(0, "mail", "t", failure_counter("unknown", exhausted=True), 10.0)
    bus.emit(events.JobRevoked("1", "mail"))
    bus.emit(events.CrashLimitReached("1", "mail", 3, "SIGSEGV"))
    samples = scrape(memory)
    counted = {dict(labels)["reason"]: value for (name, labels), value in samples.items() if "failed_total" in name}
    assert counted == {
        "transient_exhausted": 2,
        "permanent": 2,
        "unknown": 2,
        "revoked": 1,
        "crashed": 1,
    }
    assert samples["bullmq_jobs_processed_total", (("queue", "mail"), ("status", "failed"))] == 8


def test_durations_of_attempts_are_counted_in_buckets() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    for duration_ms in (0.0, 5.0, 5.1, 700.0, 10_000.0, 10_001.0):
        memory.block(1).ended(0, "mail", "t", "completed", duration_ms)
    samples = scrape(memory)
    buckets = {bound: samples["bullmq_job_duration_seconds_bucket", (("le", bound), ("queue", "mail"))]
               for bound in ("0.005", "0.01", "0.5", "0.75", "10.0", "+Inf")}  # fmt: skip
    assert buckets == {"0.005": 2, "0.01": 3, "0.5": 3, "0.75": 4, "10.0": 5, "+Inf": 6}
    assert samples["bullmq_job_duration_seconds_count", (("queue", "mail"),)] == 6
    assert samples["bullmq_job_duration_seconds_sum", (("queue", "mail"),)] == pytest.approx(20.7111)


def test_the_buckets_include_the_documented_bounds() -> None:
    assert set(BUCKETS) >= {0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10}


def test_heartbeats_and_stalled_checks_are_counted() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    bus = attach_listener(memory, 0)
    bus.emit(events.HeartbeatSucceeded("mail", 10, 1.0))
    bus.emit(events.HeartbeatSucceeded("mail", 5, 12.0))
    bus.emit(events.HeartbeatFailed("mail", ("1",), "timed out", 2))
    bus.emit(events.RunningJobLostLock("2", "mail"))
    bus.emit(events.StalledCheckSkipped("mail", 2))
    bus.emit(events.JobStalled("1", "mail", None))
    bus.emit(events.JobRecovered("2", "mail", 1, 10.0))
    samples, mail = scrape(memory), (("queue", "mail"),)
    assert samples["bullmq_heartbeat_success_total", mail] == 15
    assert samples["bullmq_lock_extend_duration_seconds_count", mail] == 2
    assert samples["bullmq_lock_extend_duration_seconds_sum", mail] == pytest.approx(0.013)
    assert samples["bullmq_lock_extend_duration_seconds_bucket", (("le", "0.005"), *mail)] == 1
    assert samples["bullmq_heartbeat_failure_total", mail] == 2
    assert samples["bullmq_stalled_checker_skipped_total", mail] == 2
    assert samples["bullmq_stalled_jobs_total", mail] == 2


def status_of(samples: dict[Sample, float]) -> tuple[float, float]:
    name = "bullmq_redis_connection_status"
    return samples[name, (("status", "connected"),)], samples[name, (("status", "disconnected"),)]


def test_the_connection_status_is_disconnected_if_any_process_lost_redis() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    bus, other = attach_listener(memory, 0), attach_listener(memory, 1)
    assert status_of(scrape(memory)) == (1, 0)
    bus.emit(events.RedisDisconnected("refused"))
    assert status_of(scrape(memory)) == (0, 1)
    for attempt in (1, 2):
        bus.emit(events.RedisReconnecting(attempt))
    other.emit(events.RedisReconnecting(1))
    bus.emit(events.RedisReconnected(2, 10.0))
    assert status_of(scrape(memory)) == (1, 0)
    bus.emit(events.RedisErrorReply("mail", "WRONGTYPE"))
    assert status_of(scrape(memory)) == (1, 0)
    bus.emit(events.RedisErrorReply("", "OOM"))
    assert status_of(scrape(memory)) == (0, 1)
    bus.emit(events.RedisRecovered("", 3, 10.0))
    samples = scrape(memory)
    assert status_of(samples) == (1, 0)
    assert samples["bullmq_redis_reconnect_attempts_total", ()] == 3


def test_replaced_children_are_counted_by_reason() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    bus = Bus()
    MetricsListener(memory.block(0), ["mail"]).attach(bus)
    bus.emit(events.ChildDied(0, 4711, "SIGKILL", 1))
    for reason in ("hard_limit", "revoked", "hard_memory_limit"):
        bus.emit(events.ChildKilled(0, 4712, reason, 1))
    for reason in ("signal", "max_tasks_per_child", "max_memory_per_child", "max_memory_per_child"):
        bus.emit(events.ChildExited(0, 4713, reason))
    samples = scrape(memory)
    name = "bullmq_children_replaced_total"
    assert {labels[0][1]: value for (sample, labels), value in samples.items() if sample == name and value} == {
        "crashed": 1,
        "cancelled": 2,
        "hard_memory_limit": 1,
        "signal": 1,
        "max_tasks_per_child": 1,
        "max_memory_per_child": 2,
    }


@pytest.mark.parametrize("limit", [limit.name.lower() for limit in ChildLimit if limit])
def test_a_child_that_reached_a_limit_is_counted_by_the_name_of_the_limit(limit: str) -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    attach_listener(memory, 0).emit(events.ChildExited(0, 4711, limit))
    assert {reason: count for reason, count in memory.exits().items() if count} == {limit: 1}


def test_a_new_process_does_not_inherit_a_lost_connection() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    attach_listener(memory, 1).emit(events.RedisDisconnected("refused"))
    assert not memory.connected()
    attach_listener(memory, 1)
    assert memory.connected()


def test_queues_are_read_at_each_scrape() -> None:
    states = ("wait", "active", "completed", "failed", "delayed", "prioritized", "waiting-children", "paused")
    jobs = {state: number for number, state in enumerate(states)}
    counts: Any = {state.replace("-", "_"): count for state, count in jobs.items()}
    reading = QueueFigures(
        **counts, oldest_ms=1500, due=2, scheduler_lag_ms=250, is_paused=True, workers=("a", "b", "c")
    )
    samples, mail = scrape(MetricsMemory(["mail"], 1, ChildLimit), lambda: {"mail": reading}), ("queue", "mail")
    for number, state in enumerate(states):
        for name in ("bullmq_queue_length", "bulltask_queue_jobs"):
            assert samples[name, (mail, ("state", state))] == number
    assert samples["bulltask_queue_oldest_waiting_seconds", (mail,)] == 1.5
    assert samples["bulltask_queue_due_delayed_jobs", (mail,)] == 2
    assert samples["bulltask_queue_scheduler_lag_seconds", (mail,)] == 0.25
    assert samples["bulltask_queue_paused", (mail,)] == 1
    assert samples["bulltask_queue_workers", (mail,)] == 3


def test_the_exporter_reads_the_queues_at_most_once_in_a_while_and_shows_no_queue_without_redis() -> None:
    reads: list[int] = []

    def read() -> Mapping[str, QueueFigures]:
        reads.append(1)
        if len(reads) == 2:
            raise ConnectionError("refused")
        return {"mail": QueueFigures(due=7)}

    def values(collector: QueuesCollector) -> dict[str, float]:
        return {sample.name: sample.value for family in collector.collect() for sample in family.samples}

    cached, uncached = (QueuesCollector(read, lambda: 0, seconds) for seconds in (60, 0))
    assert values(cached)["bulltask_queue_due_delayed_jobs"] == values(cached)["bulltask_queue_due_delayed_jobs"] == 7
    assert len(reads) == 1
    missing = values(uncached)
    assert "bulltask_queue_jobs" not in missing
    assert missing["bulltask_exporter_redis_up"] == 0
    assert values(uncached)["bulltask_exporter_redis_up"] == 1


def test_crashes_are_counted_by_cause() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    bus = attach_listener(memory, 0)
    for exit_reason in (
        "SIGKILL",
        events.OUT_OF_MEMORY,
        events.OUT_OF_MEMORY,
        "SIGSEGV",
        "exit code 3",
        "exit code 4",
        "SIGUSR2",
    ):
        bus.emit(events.ChildDied(0, 4711, exit_reason, 1))
    counted = {
        dict(labels)["cause"]: value
        for (name, labels), value in scrape(memory).items()
        if name == "bulltask_child_crashes_total" and value
    }
    assert counted == {"SIGKILL": 1, "out_of_memory": 2, "SIGSEGV": 1, "exit_code": 2, "other": 1}


def test_waits_for_rate_limits_are_counted() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    attach_listener(memory, 1).emit(events.JobThrottled("1", "mail", "t", 100))
    memory.block(1).add("mail", "queue_limited")
    samples = scrape(memory)
    for limit in ("task", "queue"):
        assert samples["bulltask_rate_limit_waits_total", (("limit", limit), ("queue", "mail"))] == 1


def test_a_scrape_without_redis_contains_the_counters() -> None:
    def unreachable() -> Mapping[str, QueueFigures]:
        raise ConnectionError("refused")

    memory = MetricsMemory(["mail"], 2, ChildLimit)
    memory.block(1).ended(0, "mail", "t", "completed", 1.0)
    samples = scrape(memory, unreachable)
    assert samples["bullmq_jobs_processed_total", (("queue", "mail"), ("status", "completed"))] == 1
    assert status_of(samples) == (0, 1)
    assert not any(name == "bullmq_queue_length" for name, _ in samples)


def test_concurrent_scrapes_read_queue_lengths_one_at_a_time() -> None:
    active, max_active = 0, 0
    change = threading.Lock()

    def read_queues() -> Mapping[str, QueueFigures]:
        nonlocal active, max_active
        with change:
            active += 1
            max_active = max(max_active, active)
        threading.Event().wait(0.01)
        with change:
            active -= 1
        return {}

    collector = MetricsCollector(MetricsMemory(["mail"], 1, ChildLimit), WORKER, read_queues)
    threads = [threading.Thread(target=collector.collect) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert max_active == 1


def test_threads_of_one_child_lose_no_counts() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    block = memory.block(1)

    def run() -> None:
        for _ in range(5000):
            block.ended(0, "mail", "t", "completed", 1.0)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert memory.totals()["mail"].counts["completed"] == memory.totals()["mail"].durations.buckets[-1] == 20_000


def test_metrics_subscribe_only_to_events_that_have_a_metric() -> None:
    bus = attach_listener(MetricsMemory(["mail"], 2, ChildLimit), 1)
    assert not bus.listeners[events.JobStarted]
    assert not bus.listeners[events.JobCompleted]  # counted without an event
    assert bus.listeners[events.JobIncompatible]


def test_the_metrics_can_be_opened_again_from_a_file_descriptor() -> None:
    fd = os.memfd_create("metrics")
    try:
        first, second = MetricsMemory(["mail"], 2, ChildLimit, fd), MetricsMemory(["mail"], 2, ChildLimit, fd)
        first.block(1).ended(0, "mail", "t", "completed", 1.0)
        assert second.totals()["mail"].counts["completed"] == 1
        with pytest.raises(ValueError, match="must be"):
            MetricsMemory(["mail", "sms"], 2, ChildLimit, fd)
    finally:
        os.close(fd)


def test_an_unknown_block_of_metrics_is_rejected() -> None:
    memory = MetricsMemory(["mail"], 2, ChildLimit)
    for number in (-1, 2):
        with pytest.raises(IndexError, match=f"2 blocks, so there is no block {number}"):
            memory.block(number)


def test_memory_without_blocks_or_with_a_duplicate_queue_is_rejected() -> None:
    with pytest.raises(ValueError, match="each queue once"):
        MetricsMemory(["mail"], 0, ChildLimit)
    with pytest.raises(ValueError, match="each queue once"):
        MetricsMemory(["mail", "mail"], 1, ChildLimit)


def test_a_queue_without_memory_is_rejected_by_name() -> None:
    with pytest.raises(ValueError, match="without these queues: sms"):
        MetricsListener(MetricsMemory(["mail"], 1, ChildLimit).block(0), ["mail", "sms"])


@pytest.mark.slow
@pytest.mark.parametrize("module", ["bulltask.events", "bulltask.observe.log", "bulltask.observe.counters"])
def test_a_worker_without_metrics_does_not_load_prometheus(module: str) -> None:
    code = f"import sys, {module}; sys.exit('prometheus_client' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_no_queue_name_can_forge_a_metric() -> None:
    evil = 'a"} 1\\\nforged_total{x="\u2028\u202e'
    memory = MetricsMemory([evil], 1, ChildLimit)
    memory.block(0).ended(None, evil, "t", "completed", 1.0)
    samples = scrape(memory, lambda: {evil: QueueFigures(wait=3)})
    assert {dict(labels)["queue"] for _, labels in samples if "queue" in dict(labels)} == {evil}
    assert samples["bullmq_queue_length", (("queue", evil), ("state", "wait"))] == 3
    assert not any(name.startswith("forged") for name, _ in samples)


def test_the_documentation_lists_every_metric_with_its_type_and_labels() -> None:
    text = (Path(__file__).parents[2] / "docs/how-to/observability.md").read_text()
    documented = {
        name: (kind, tuple(re.findall(r"\w+", labels)))
        for names, kind, labels in re.findall(
            r"^\| (`bull\w+`(?:, `bull\w+`)*) \| (\w+) \| (.*?) \|", text, re.MULTILINE
        )
        for name in re.findall(r"\w+", names)
    }
    assert documented == {name: (metric.type, metric.labels) for name, metric in METRICS.items()}
