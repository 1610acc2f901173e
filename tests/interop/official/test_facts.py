"""Tests of facts in docs/reference/official-python.md that no other test covers."""

from __future__ import annotations

import inspect
import re
from typing import Any

import pytest

from bulltask import App, TaskError
from bulltask.errors import BrokerUnavailableError
from bulltask.queue import Queue
from bulltask.testing.worker import wait_until
from tests.interop.interop_queue import InteropQueue
from tests.interop.official.versions import FIXED_IN_3, SAME_IN_3
from tests.interop.test_queue_coverage import CLASSES, declared
from tests.support.flaky_proxy import FlakyProxy
from tests.support.programs import ROOT

pytestmark = [pytest.mark.interop, pytest.mark.process]

PAGE = ROOT / "docs/reference/official-python.md"
HERE = ROOT / "tests/interop/official"


# ---- the page --------------------------------------------------------------------------------------------------------


def test_every_documented_row_names_an_existing_test() -> None:
    text = PAGE.read_text()
    files = "".join(path.read_text() for path in HERE.glob("test_*.py"))
    rows = [line for line in text.splitlines() if line.startswith("| ") and "`test_" in line]
    assert len(rows) > 35
    for name in re.findall(r"`(test_\w+)`", text):
        assert f"def {name}(" in files, name
    for title, mark in (("Sending", "SAME_IN_3"), ("Running jobs", "SAME_IN_3"), ("Fixed in 3.4.4", "FIXED_IN_3")):
        section = text.partition(f"## {title}\n")[2].partition("\n## ")[0]
        names = re.findall(r"\| `(test_\w+)`", section)
        assert len(names) > 3
        assert [name for name in names if f"@{mark}\ndef {name}(" not in files] == []
    for name in re.findall(r"\| the same \| `(test_\w+)`", text):
        assert f"@SAME_IN_3\ndef {name}(" in files
    tables = re.findall(r"^\|.*Test \|\n\|[-|]+\|\n((?:\|.*\n)+)", text, re.MULTILINE)
    assert [row for table in tables for row in table.splitlines() if "`test_" not in row] == []


@SAME_IN_3
def test_the_documented_counts_of_methods_match_the_packages(mail: InteropQueue, node_client: None) -> None:
    names = mail.node.call("names")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (\d+) \| (\d+) \|", PAGE.read_text(), re.MULTILINE)
    column = {"2.16.2": 2, "3.4.4": 3}[names["version"][0]]
    stated = {row[0]: (int(row[1]), int(row[column])) for row in rows}
    counted = {}
    for name in ("Queue", "Job", "FlowProducer"):
        members = {member for file, declaring in CLASSES[name] for member in declared(file, declaring)}
        counted[name] = (len(members), len(members & set(names[name])))
    assert stated == counted


# ---- missing methods -------------------------------------------------------------------------------------------------


@SAME_IN_3
def test_both_versions_lack_the_documented_methods(mail: InteropQueue) -> None:
    present = mail.node.call("names")
    missing = {
        "Queue": "getWorkers getMetrics getDependencies getPrioritizedCount removeDeduplicationKey",
        "Job": "waitUntilFinished changeDelay moveToWait getDependencies removeUnprocessedChildren clearLogs",
        "FlowProducer": "getFlow",
    }
    for owner, names in missing.items():
        assert set(names.split()) & set(present[owner]) == set(), owner


@SAME_IN_3
def test_only_version_3_has_the_methods_documented_as_added(mail: InteropQueue) -> None:
    present = mail.node.call("names")
    added = {
        "bullmq": "QueueEvents JobScheduler AbortSignal",
        "Queue": "drain getJob rateLimit setGlobalConcurrency setGlobalRateLimit upsertJobScheduler",
        "Job": "moveToDelayed",
    }
    for owner, names in added.items():
        expected = set(names.split()) if present["version"] == ["3.4.4"] else set()
        assert set(names.split()) & set(present[owner]) == expected, owner


@SAME_IN_3
def test_the_official_client_is_asyncio_only_and_has_no_type_hints(mail: InteropQueue) -> None:
    present = mail.node.call("names")
    assert {"add", "addBulk", "getJobs", "close"} <= set(present["awaited"])
    assert "py.typed" not in present["files"]
    assert not inspect.iscoroutinefunction(Queue.add)
    assert (ROOT / "bulltask/py.typed").exists()


# ---- running jobs ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("client", "min_calls", "max_calls"), [("official", 2.0, 2.2), ("bulltask", 1.0, 1.1)])
@SAME_IN_3
def test_workers_call_the_documented_number_of_scripts_per_job(
    mail: InteropQueue, client: str, min_calls: float, max_calls: float
) -> None:
    task: Any = mail.app.tasks["echo"]
    mail.app.send_many([task.s(n) for n in range(500)])
    before = count_scripts(mail)
    if client == "bulltask":
        # With prefetching, there are fewer, but on a busy machine the supervisor also releases prefetched jobs.
        mail.worker(worker_prefetch=0)
    else:
        mail.node_worker("echo")
    wait_until(lambda: mail.redis.zcard(mail.keys.completed) >= 500, 60, "500 jobs")
    assert min_calls <= (count_scripts(mail) - before) / 500 <= max_calls


def count_scripts(mail: InteropQueue) -> int:
    """Return the number of scripts that the server has run."""
    return int(mail.redis.info("commandstats")["cmdstat_evalsha"]["calls"])


@SAME_IN_3
def test_the_official_worker_checks_for_stalled_jobs_after_one_interval(mail: InteropQueue) -> None:
    mail.node_worker("echo", stalledInterval=60_000)
    mail.send("echo").get(timeout=60)
    assert not mail.redis.exists(mail.keys.stalled_check)
    mail.worker(stalled_interval=60)
    wait_until(lambda: mail.redis.exists(mail.keys.stalled_check), 60, "bulltask's check")


@SAME_IN_3
def test_the_official_worker_waits_for_its_drain_delay_after_a_rate_limit(mail: InteropQueue) -> None:
    """After a limit of 0.3 s the official worker waits for drainDelay (5 s by default)."""
    with mail.app.queue("mail") as queue:
        queue.set_global_rate_limit(1, 0.3)
    jobs = [mail.send("echo") for _ in range(3)]
    mail.node_worker("echo", drainDelay=2)
    for job in jobs:
        job.get(timeout=60)
    starts = sorted(mail.node_job(job.id)["processedOn"] for job in jobs)
    assert starts[2] - starts[1] > 1_500, starts
    mail.node.call("reset")

    mail.worker(drain_delay=2).wait_for_line("Child started")
    jobs = [mail.send("echo") for _ in range(3)]
    for job in jobs:
        job.get(timeout=60)
    starts = sorted(mail.node_job(job.id)["processedOn"] for job in jobs)
    assert starts[2] - starts[1] < 1_500, starts


@SAME_IN_3
def test_an_unknown_backoff_leaves_the_job_active_in_the_official_worker(mail: InteropQueue) -> None:
    mail.node_worker("fail")
    job = mail.add("fail", {}, attempts=3, backoff={"type": "mine", "delay": 10})
    assert "Unknown backoff strategy mine" in mail.node.wait_event("worker.error")["message"]
    assert mail.node_job(job)["state"] == "active"
    mail.node.call("reset")
    mail.redis.flushdb()
    mail.worker()
    job = mail.add("fail", {}, attempts=3, backoff={"type": "mine", "delay": 10})
    with pytest.raises(ConnectionError, match="it failed"):
        mail.result(job).get(timeout=60)


@FIXED_IN_3
def test_the_official_worker_does_not_keep_the_last_tracebacks(mail: InteropQueue) -> None:
    mail.node_worker("fail-n", {"n": 3})
    kept = {}
    for limit in (0, 1, 2, 9):
        job = mail.add("echo", {}, attempts=4, stackTraceLimit=limit)
        mail.result(job).get(timeout=60)
        kept[limit] = [trace.split()[-2] for trace in mail.node_job(job)["stacktrace"]]
    assert kept == {0: [], 1: ["1"], 2: ["3"], 9: ["1", "2", "3"]}


@SAME_IN_3
def test_the_official_client_waits_forever_on_a_dead_connection(mail: InteropQueue, flaky: FlakyProxy) -> None:
    at: dict[str, Any] = {"connection": {"host": flaky.host, "port": flaky.port}, "queue": mail.name, "opts": {}}
    mail.node.call("queue.add", name="echo", data={}, **at)
    app = App("sender", f"redis://{flaky.host}:{flaky.port}/0", task_default_queue="mail", redis_socket_timeout=0.5)
    app.send_task("echo")
    flaky.blackhole()
    with pytest.raises(TimeoutError):
        mail.node.call("queue.add", name="echo", data={}, timeout=3, **at)
    with pytest.raises(BrokerUnavailableError):
        app.send_task("echo")
    flaky.pass_all()
    app.close()


@FIXED_IN_3
def test_a_deferred_failure_raises_an_error_in_the_official_worker(mail: InteropQueue) -> None:
    with mail.app.queue("mail") as queue:
        job = queue.add("echo")
    mail.redis.hset(mail.keys.job(job.id), "defa", "stopped")
    mail.node_worker("echo")
    with pytest.raises(TaskError, match="stopped"):
        mail.result(job.id).get(timeout=60)
    assert mail.node.wait_event("worker.error", timeout=6)["message"].startswith("(<bullmq.job.Job"), (
        "a KeyError of the official client"
    )
