"""bull-board shows bulltask's queues: jobs in every state, tracebacks, progress, logs, flows, schedulers, workers."""

from __future__ import annotations

from typing import Any

import pytest

from bulltask import group
from bulltask.queue import FlowJob
from bulltask.testing.worker import wait_until
from tests.interop.board import Board, BoardError
from tests.interop.board_tasks import (
    PARTS,
    QUEUE,
    add_failed_jobs,
    ids,
    queue_of,
    start_worker,
    state_counts,
    wait_for_end,
    wait_until_running,
)
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.interop, pytest.mark.process]

STATES = ("active", "waiting", "prioritized", "delayed", "waiting-children", "completed", "failed")


def fill(harness: WorkerHarness) -> None:
    """Add jobs in every state, so that no worker has an idle child left."""
    queue = queue_of(harness)
    start_worker(harness, children=1)
    for to in ("Ada", "Grace"):
        queue.add("greet", {"to": to}).wait_until_finished(30)
    add_failed_jobs(harness, 3)
    wait_until_running(harness, harness.hold().id)
    queue.add_bulk([{"name": "greet", "data": {"to": str(n)}} for n in range(12)])
    queue.add_bulk([{"name": "greet", "data": {}, "options": {"priority": priority}} for priority in (9, 1, 5)])
    queue.add_bulk([{"name": "greet", "data": {}, "options": {"delay": delay}} for delay in (3600, 60)])
    harness.app.flows().add(FlowJob("total", "default", children=[FlowJob("part", "parts", {"n": 1}, {"delay": 60})]))


def test_the_board_counts_and_lists_jobs_in_every_state(board: Board, harness: WorkerHarness) -> None:
    fill(harness)
    queue = queue_of(harness)
    counts = board.queue(QUEUE)["counts"]
    assert counts == queue.get_job_counts()
    assert [counts[state] for state in STATES] == [1, 12, 3, 2, 1, 2, 3]
    for state in STATES:
        listed = ids(board.queue(QUEUE, state, per_page=20)["jobs"])
        assert listed == queue.get_job_ids([state]), state
    assert set(ids(board.queue(QUEUE, "latest", per_page=20)["jobs"])) == set(queue.get_job_ids())
    board.put(QUEUE, "pause")
    shown = board.queue(QUEUE, "paused", per_page=20)
    assert shown["isPaused"]
    assert shown["counts"] == queue.get_job_counts()
    assert (shown["counts"]["paused"], shown["counts"]["waiting"]) == (12, 0)
    assert ids(shown["jobs"]) == queue.get_job_ids(["paused"])


def test_each_job_is_on_exactly_one_page_of_the_board(board: Board, harness: WorkerHarness) -> None:
    queue = queue_of(harness)
    queue.add_bulk([{"name": "greet", "data": {"n": n}} for n in range(25)])
    pages = [board.queue(QUEUE, "waiting", page=page) for page in (1, 2, 3)]
    assert [len(page["jobs"]) for page in pages] == [10, 10, 5]
    assert {page["pagination"]["pageCount"] for page in pages} == {3}
    assert [job["id"] for page in pages for job in page["jobs"]] == queue.get_job_ids(["waiting"])


def test_the_board_shows_the_arguments_and_result_of_a_completed_job(board: Board, harness: WorkerHarness) -> None:
    worker = start_worker(harness)
    sent = harness.app.send_task("load", kwargs={"progress": 100, "gate": "open"}, priority=4)
    harness.open_gate("open")
    assert sent.get(timeout=60) == 100
    shown = board.job(QUEUE, sent.id)
    assert shown["name"] == "load"
    assert shown["data"] == {"progress": 100, "gate": "open"}
    assert (shown["returnValue"], shown["progress"], shown["priority"]) == (100, 100, 4)
    assert (shown["status"], shown["isFailed"], shown["attempts"]) == ("completed", False, 1)
    assert shown["processedBy"] == worker.wait_for_line("Worker started")[0]["worker_id"]
    assert shown["timestamp"] <= shown["processedOn"] <= shown["finishedOn"]
    assert board.get(QUEUE, sent.id, "logs") == ["the first line", "the second <b>line</b>"]
    assert "stalledCounter" not in shown
    assert "attemptsStarted" not in shown  # the board shows it only if it differs from the attempts


def test_the_board_shows_the_reason_and_tracebacks_of_a_failed_job(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    job = queue_of(harness).add("flaky", {"good": 9}, attempts=3, backoff=None)
    wait_for_end(harness, job.id, "failed")
    shown = board.job(QUEUE, job.id)
    assert (shown["status"], shown["isFailed"], shown["attempts"]) == ("failed", True, 3)
    assert shown["failedReason"] == "attempt 3 failed"
    assert [trace.splitlines()[-1] for trace in shown["stacktrace"]] == [
        f"ConnectionError: attempt {number} failed" for number in (3, 2, 1)
    ]
    assert all(trace.startswith("Traceback (most recent call last):\n") for trace in shown["stacktrace"])
    assert all("tested.py" in trace and ", in flaky\n" in trace for trace in shown["stacktrace"])
    assert not any("bulltask/worker" in trace for trace in shown["stacktrace"])


def test_the_board_shows_the_tracebacks_of_a_job_that_a_retry_completed(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    job = queue_of(harness).add("flaky", {"good": 2}, attempts=3, backoff=None)
    assert job.wait_until_finished(30) == 1
    shown = board.job(QUEUE, job.id)
    assert (shown["status"], shown["attempts"], shown["returnValue"]) == ("completed", 2, 1)
    assert [trace.splitlines()[-1] for trace in shown["stacktrace"]] == ["ConnectionError: attempt 1 failed"]


@pytest.mark.parametrize("progress", [42, {"done": 3, "of": 10}, "parsing"], ids=["number", "object", "text"])
def test_the_board_shows_the_progress_and_log_of_a_running_job(
    board: Board, harness: WorkerHarness, progress: Any
) -> None:
    start_worker(harness)
    job = queue_of(harness).add("load", {"progress": progress})
    wait_until_running(harness, job.id)
    (shown,) = board.queue(QUEUE, "active")["jobs"]
    assert (shown["id"], shown["progress"], shown["returnValue"]) == (job.id, progress, None)
    assert "finishedOn" not in shown
    assert board.get(QUEUE, job.id, "logs") == ["the first line", "the second <b>line</b>"]
    harness.open_gate()
    wait_for_end(harness, job.id)
    assert board.job(QUEUE, job.id)["returnValue"] == progress


def test_the_board_shows_the_same_flow_for_each_of_its_jobs(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    queue = harness.app.queue("parts")
    children = [
        FlowJob("part", "parts", {"n": 1}),
        FlowJob("slow_part", "parts", {"n": 2}),
        FlowJob("lookup", "parts", {"key": "x"}, {"ignore_dependency_on_failure": True}),
    ]
    tree = harness.app.flows().add(FlowJob("total", "default", children=children))
    done, slow, lost = [child.job.id for child in tree.children]
    wait_until_running(harness, slow)
    wait_until(lambda: (queue.get_job_state(done), queue.get_job_state(lost)) == ("completed", "failed"), 30.0)
    for job, of in ((tree.job.id, QUEUE), (slow, PARTS)):
        flow = board.get(of, job, "flow")
        assert (flow["nodeId"], flow["isFlowNode"]) == (job, True)
        root = flow["flowRoot"]
        assert (root["id"], root["queueName"], root["state"]) == (tree.job.id, QUEUE, "waiting-children")
        assert root["dependencies"] == {"processed": 1, "unprocessed": 1, "ignored": 1, "failed": 0}
        assert root["ignoredChildFailureReasons"] == {f"bull:{{parts}}:{lost}": "'x'"}
        assert {child["id"]: (child["queueName"], child["name"], child["state"]) for child in root["children"]} == {
            done: (PARTS, "part", "completed"),
            slow: (PARTS, "slow_part", "active"),
            lost: (PARTS, "lookup", "failed"),
        }
    assert state_counts(board) == {"waiting-children": 1}
    harness.open_gate()
    wait_for_end(harness, tree.job.id)
    assert board.job(QUEUE, tree.job.id)["returnValue"] == 3


def test_the_board_shows_a_canvas_up_to_a_fan_out_job_or_from_a_step_after_it(
    board: Board, harness: WorkerHarness
) -> None:
    sign = harness.app.signature
    slow = sign("slow_part", kwargs={"n": 1}, queue="parts")
    header = group(sign("greet"), sign("greet"))
    result = (slow | header | sign("collect")).delay()
    start_worker(harness)
    first, members = result.parent.parent, result.parent
    wait_until_running(harness, first.id)

    def shown(job_id: str, queue: str = QUEUE) -> tuple[str, Any]:
        return _names(board.get(queue, job_id, "flow")["flowRoot"])

    before: Any = ("bulltask.fan_out", [("slow_part", [])])
    assert shown(first.id, PARTS) == before
    assert [shown(job_id) for job_id in (result.id, members[0].id, members[1].id)] == [
        ("collect", [("greet", [before]), ("greet", [before])])
    ] * 3
    harness.open_gate()
    assert result.get(timeout=60) == ["Hello, 1", "Hello, 1"]
    assert shown(first.id, PARTS) == before
    assert shown(result.id) == ("collect", [("greet", [before]), ("greet", [before])])


def _names(node: dict[str, Any]) -> tuple[str, Any]:
    """Return the names of the jobs of a tree."""
    return node["name"], [_names(child) for child in node.get("children", ())]


def test_the_board_lists_job_schedulers_with_their_runs(board: Board, harness: WorkerHarness) -> None:
    schedulers = queue_of(harness).schedulers
    nightly = schedulers.upsert("nightly", cron="30 3 * * *", tz="Europe/Berlin", name="greet", data={"to": "Ada"})
    schedulers.upsert("hourly", every=3600, name="greet", data={"to": "Grace"})  # first run immediately
    start_worker(harness)
    run = harness.events.wait_for(1, 30.0, event="completed")[0]
    listed = {shown["id"]: shown for shown in board.read("job-schedulers", queueName=QUEUE)["schedulers"]}
    assert board.queue(QUEUE)["jobSchedulerCount"] == len(listed) == 2
    first, second = listed["nightly"], listed["hourly"]
    assert nightly is not None
    assert (first["pattern"], first["tz"], first["next"]) == ("30 3 * * *", "Europe/Berlin", nightly.next_ms)
    assert (first["name"], first["template"]["data"]) == ("greet", {"to": "Ada"})
    assert first["nextRunJobId"] == f"repeat:nightly:{nightly.next_ms}"
    assert "lastRun" not in first
    assert (second["every"], second["queueName"], second["iterationCount"]) == (3_600_000, QUEUE, 2)
    assert second["lastRunJobId"] == run["jobId"]
    assert second["next"] == int(run["jobId"].rpartition(":")[2]) + 3_600_000
    assert abs(second["lastRun"] - run.ms) < 60_000


def test_the_board_shows_workers_and_the_server(board: Board, harness: WorkerHarness) -> None:
    queue = board.queue(QUEUE)
    assert (queue["hasWorkers"], queue["type"]) == (False, "bullmq")
    workers = [start_worker(harness) for _ in range(2)]
    names = {worker.wait_for_line("Worker started")[0]["worker_id"] for worker in workers}
    wait_until(lambda: len(board.get(QUEUE, "workers")["workers"]) == 2, 60, "both workers on the board")
    shown = board.get(QUEUE, "workers")["workers"]
    assert {worker["name"] for worker in shown} == names
    assert all(worker["addr"].startswith("127.0.0.1:") for worker in shown)
    assert board.queue(QUEUE)["hasWorkers"]
    assert not board.queue("default")["hasWorkers"]
    stats = board.read("redis/stats")
    assert stats["version"]
    assert stats["memory"]["used"] > 0
    assert stats["clients"]["connected"] > 0


def test_the_board_shows_the_metrics_that_workers_write(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness, metrics_max_data_points=60)
    for to in ("Ada", "Grace"):
        queue_of(harness).add("greet", {"to": to}).wait_until_finished(30)
    add_failed_jobs(harness, 1)
    shown = board.get(QUEUE, "metrics")
    assert [shown[state]["meta"]["count"] for state in ("completed", "failed")] == [2, 1]


def test_the_board_shows_a_queue_without_a_hash_tag_as_a_separate_queue(board: Board, harness: WorkerHarness) -> None:
    plain = harness.sender(queue_hash_tag=False)
    job = plain.queue("default").add("greet", {"to": "Ada"})
    assert ids(board.queue("default", "waiting")["jobs"]) == [job.id]
    assert state_counts(board) == {}


def test_a_read_only_board_shows_everything_and_changes_nothing(board: Board, harness: WorkerHarness) -> None:
    read_only = "{look}"
    job = queue_of(harness, "look").add("greet", {"to": "Ada"}, delay=60)
    shown = board.queue(read_only, "delayed")
    assert (ids(shown["jobs"]), shown["readOnlyMode"]) == ([job.id], True)
    assert board.job(read_only, job.id)["data"] == {"to": "Ada"}
    for parts in (("pause",), ("empty",), (job.id, "promote"), (job.id, "clean"), ("clean", "delayed")):
        with pytest.raises(BoardError) as caught:
            board.put(read_only, *parts)
        assert (caught.value.status, caught.value.key) == (405, "ERRORS.QUEUE_READ_ONLY")
    assert state_counts(board, read_only) == {"delayed": 1}


def test_the_board_serves_its_html_pages(board: Board) -> None:
    for path in ("/", "/queue/%7Bdefault%7D", "/job-schedulers"):
        assert "<title>Bull Dashboard</title>" in board.page(path)
