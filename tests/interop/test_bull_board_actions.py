"""Tests of bull-board's actions on bulltask's jobs, queues and workers."""

from __future__ import annotations

import pytest

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
from tests.support.streams import server_ms
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.interop, pytest.mark.process]

GRACE_MS = 5_000  # the board's "clean" keeps jobs that ended within this time


def assert_rejected(status: int, key: str, method: str, board: Board, *parts: str, **body: object) -> None:
    """Assert that the board rejects an action with this status and error."""
    with pytest.raises(BoardError) as error:
        getattr(board, method)(*parts, **body)
    assert (error.value.status, error.value.key) == (status, key)


def make_older(harness: WorkerHarness, state: str, job_ids: list[str]) -> None:
    """Make jobs old enough for the board's "clean"."""
    then = server_ms(harness.redis) - GRACE_MS - 1_000
    for job_id in job_ids:
        harness.redis.zadd(getattr(harness.keys, state), {job_id: then})
        harness.redis.hset(harness.keys.job(job_id), "finishedOn", then)


# ---- retry ---------------------------------------------------------------------------------------------------------


def test_retry_runs_a_failed_job_again(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    (job,) = add_failed_jobs(harness, 1)
    board.put(QUEUE, job.id, "retry")
    wait_for_end(harness, job.id)
    shown = board.job(QUEUE, job.id)
    assert (shown["status"], shown["returnValue"], shown["attempts"]) == ("completed", 1, 2)
    assert "failedReason" not in shown
    assert len(harness.journal.all(what="start", job=job.id)) == 2


def test_retry_of_a_job_that_fails_again_adds_a_traceback(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    (job,) = add_failed_jobs(harness, 1, good=9)
    board.put(QUEUE, job.id, "retry")
    wait_for_end(harness, job.id, "failed", 2)
    shown = board.job(QUEUE, job.id)
    assert (shown["failedReason"], len(shown["stacktrace"])) == ("attempt 2 failed", 2)


def test_retry_all_runs_every_failed_job_again(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    jobs = add_failed_jobs(harness, 120)  # the board reads a hundred at a time
    assert board.put(QUEUE, "retry", "failed") == {"retried": 120, "skipped": 0}
    harness.events.wait_for(120, 60.0, event="completed")
    assert {entry["jobId"] for entry in harness.events.all(event="completed")} == {job.id for job in jobs}
    assert state_counts(board) == {"completed": 120}


def test_retry_runs_a_completed_job_again(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    job = queue_of(harness).add("greet", {"to": "Ada"})
    wait_for_end(harness, job.id)
    board.put(QUEUE, job.id, "retry")
    wait_for_end(harness, job.id, count=2)
    board.put(QUEUE, "retry", "completed")
    wait_for_end(harness, job.id, count=3)
    assert board.job(QUEUE, job.id)["returnValue"] == "Hello, Ada"


def test_a_waiting_job_cannot_be_retried(board: Board, harness: WorkerHarness) -> None:
    job = queue_of(harness).add("greet", {"to": "Ada"})
    assert_rejected(400, "ERRORS.JOB_NOT_RETRIABLE", "put", board, QUEUE, job.id, "retry")


# ---- delayed jobs --------------------------------------------------------------------------------------------------


def test_promote_runs_a_delayed_job_now(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness, drain_delay=60)  # only the marker can wake it
    queue = queue_of(harness)
    job, later = (queue.add("greet", {"to": to}, delay=3600) for to in ("Ada", "Grace"))
    board.put(QUEUE, job.id, "promote")
    wait_for_end(harness, job.id)
    assert state_counts(board) == {"completed": 1, "delayed": 1}
    board.put(QUEUE, "promote")
    wait_for_end(harness, later.id)


def test_promote_all_runs_every_delayed_job_now(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    queue = queue_of(harness)
    options = [{"delay": 3600}, {"delay": 60}, {"delay": 60, "priority": 3}]
    queue.add_bulk([{"name": "greet", "data": {"to": "Ada"}, "options": each} for each in options])  # type: ignore[typeddict-item]
    board.put(QUEUE, "promote")
    harness.events.wait_for(3, 30.0, event="completed")


def test_a_delayed_job_runs_at_the_time_that_the_board_set(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    job = queue_of(harness).add("greet", {"to": "Ada"}, delay=3600)
    when = server_ms(harness.redis) + 700
    board.patch(QUEUE, job.id, "delay", runAt=when)
    wait_for_end(harness, job.id)
    assert board.job(QUEUE, job.id)["processedOn"] >= when - 50  # the board uses the machine's clock, not the server's


def test_a_priority_that_the_board_set_changes_the_order(board: Board, harness: WorkerHarness) -> None:
    queue = queue_of(harness)
    first, second = (queue.add("greet", {"to": to}, priority=5) for to in ("Ada", "Grace"))
    board.patch(QUEUE, second.id, "priority", priority=1)
    assert board.job(QUEUE, second.id)["priority"] == 1
    start_worker(harness, children=1)
    wait_for_end(harness, first.id)
    assert [entry["jobId"] for entry in harness.events.all(event="active")] == [second.id, first.id]


# ---- data ----------------------------------------------------------------------------------------------------------


def test_data_that_the_board_set_becomes_the_task_arguments(board: Board, harness: WorkerHarness) -> None:
    job = queue_of(harness).add("greet", {"to": "Ada"}, delay=3600)
    board.patch(QUEUE, job.id, "update-data", jobData={"to": "Grace", "subject": "Good day"})
    start_worker(harness)
    board.put(QUEUE, job.id, "promote")
    assert job.wait_until_finished(30) == "Good day, Grace"


def test_a_failed_job_is_corrected_and_retried(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    job = queue_of(harness).add("flaky", {"good": "two"}, attempts=1)
    wait_for_end(harness, job.id, "failed")
    assert "'<' not supported" in board.job(QUEUE, job.id)["failedReason"]
    board.patch(QUEUE, job.id, "update-data", jobData={"good": 2})
    board.put(QUEUE, job.id, "retry")
    wait_for_end(harness, job.id)


def test_a_job_that_the_board_adds_calls_its_task(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    added = board.post(QUEUE, "add", name="greet", data={"to": "Ada"}, options={})["job"]
    later = board.post(QUEUE, "add", name="greet", data=["Grace"], options={"delay": 200, "priority": 7, "attempts": 2})
    assert (later["status"], later["job"]["priority"]) == ("delayed", 7)
    for job, expected in ((added, "Hello, Ada"), (later["job"], "Hello, Grace")):
        wait_for_end(harness, job["id"])
        assert board.job(QUEUE, job["id"])["returnValue"] == expected


def test_a_job_that_the_board_adds_with_wrong_arguments_fails_with_a_reason(
    board: Board, harness: WorkerHarness
) -> None:
    start_worker(harness, incompatible_timeout=0)
    added = board.post(QUEUE, "add", name="greet", data={"two": "Ada"}, options={})["job"]
    wait_for_end(harness, added["id"], "failed")
    assert "greet(to, subject='Hello'): missing" in board.job(QUEUE, added["id"])["failedReason"]


def test_duplicating_a_job_adds_a_separate_job(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    job = harness.app.send_task("greet", kwargs={"to": "Ada"}, priority=2)
    assert job.get(timeout=60) == "Hello, Ada"
    shown = board.job(QUEUE, job.id)
    added = board.post(QUEUE, "add", name=shown["name"], data=shown["data"], options=shown["opts"])["job"]
    wait_for_end(harness, added["id"])
    assert added["id"] != job.id
    assert added["opts"] == shown["opts"]


# ---- pause ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", [(QUEUE,), ()], ids=["this queue", "all queues"])
def test_pause_stops_a_worker_and_resume_wakes_it(board: Board, harness: WorkerHarness, where: tuple[str, ...]) -> None:
    start_worker(harness, children=1, drain_delay=60)
    running = queue_of(harness).add("load", {"progress": 1})
    wait_until_running(harness, running.id)
    board.put(*where, "pause")
    assert queue_of(harness).is_paused()
    jobs = [queue_of(harness).add("greet", {"to": "Ada"}), queue_of(harness).add("greet", {"to": "Grace"}, priority=1)]
    harness.open_gate()
    wait_for_end(harness, running.id)
    assert state_counts(board) == {"completed": 1, "paused": 1, "prioritized": 1}
    assert len(harness.events.all(event="active")) == 1
    board.put(*where, "resume")
    for job in jobs:
        wait_for_end(harness, job.id)
    assert not queue_of(harness).is_paused()


# ---- remove --------------------------------------------------------------------------------------------------------


def test_clean_removes_a_job_unless_it_is_running(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness, children=1)
    queue = queue_of(harness)
    running = queue.add("load", {"progress": 1})
    wait_until_running(harness, running.id)
    waiting, last = (queue.add("greet", {"to": to}) for to in ("Ada", "Grace"))
    board.put(QUEUE, waiting.id, "clean")
    assert_rejected(409, "ERRORS.JOB_IS_ACTIVE", "put", board, QUEUE, running.id, "clean")
    assert_rejected(404, "ERRORS.JOB_NOT_FOUND", "put", board, QUEUE, waiting.id, "clean")
    harness.open_gate()
    wait_for_end(harness, last.id)
    assert not harness.events.all(event="active", jobId=waiting.id)


@pytest.mark.parametrize("state", ["completed", "failed"])
def test_clean_all_removes_jobs_that_ended_more_than_five_seconds_ago(
    board: Board, harness: WorkerHarness, state: str
) -> None:
    start_worker(harness)
    failed = [job.id for job in add_failed_jobs(harness, 3)]
    completed = [queue_of(harness).add("greet", {"to": str(n)}).id for n in range(3)]
    harness.events.wait_for(3, 30.0, event="completed")
    old, new = (completed, failed) if state == "completed" else (failed, completed)
    make_older(harness, state, old[:2])
    board.put(QUEUE, "clean", state)
    assert set(queue_of(harness).get_job_ids()) == {old[2], *new}
    assert not [key for key in harness.redis.scan_iter("*") if any(gone in key for gone in old[:2])]


def test_empty_removes_only_the_waiting_jobs(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness, children=1)
    queue = queue_of(harness)
    running = queue.add("load", {"progress": 1})
    wait_until_running(harness, running.id)
    queue.add_bulk([{"name": "greet", "data": {}, "options": {"priority": n}} for n in (0, 0, 1)])
    queue.add("greet", {}, delay=60)
    board.put(QUEUE, "empty")
    assert state_counts(board) == {"active": 1, "delayed": 1}
    harness.open_gate()
    wait_for_end(harness, running.id)


def test_obliterate_needs_a_paused_queue_without_running_jobs(board: Board, harness: WorkerHarness) -> None:
    start_worker(harness)
    running = queue_of(harness).add("load", {"progress": 1})
    wait_until_running(harness, running.id)
    assert_rejected(400, "ERRORS.QUEUE_NOT_PAUSED", "put", board, QUEUE, "obliterate")
    board.put(QUEUE, "pause")
    queue_of(harness).add("greet", {})
    assert_rejected(409, "ERRORS.QUEUE_HAS_ACTIVE_JOBS", "put", board, QUEUE, "obliterate", force=False)
    harness.open_gate()
    wait_for_end(harness, running.id)
    board.put(QUEUE, "obliterate")
    assert list(harness.redis.scan_iter("bull:{default}:*")) == []
    assert queue_of(harness).add("greet", {"to": "Ada"}).wait_until_finished(30) == "Hello, Ada"


def test_a_worker_continues_after_a_forced_obliterate(board: Board, harness: WorkerHarness) -> None:
    worker = start_worker(harness, children=1)
    running = queue_of(harness).add("load", {"progress": 1})
    wait_until_running(harness, running.id)
    board.put(QUEUE, "pause")
    board.put(QUEUE, "obliterate", force=True)
    harness.open_gate()
    job = queue_of(harness).add("greet", {"to": "Ada"})
    assert job.wait_until_finished(30) == "Hello, Ada"
    assert ids(board.queue(QUEUE)["jobs"]) == [job.id]
    assert worker.stop() == 0


# ---- flows ---------------------------------------------------------------------------------------------------------


def test_a_parent_runs_when_the_board_removes_its_unprocessed_children(board: Board, harness: WorkerHarness) -> None:
    children = [FlowJob("part", "parts", {"n": 3}), FlowJob("part", "parts", {"n": 4}, {"delay": 3600})]
    tree = harness.app.flows().add(FlowJob("total", "default", children=children))
    start_worker(harness)
    first = tree.children[0].job
    wait_until(lambda: queue_of(harness, "parts").get_job_state(first.id) == "completed", 30.0)
    assert state_counts(board, PARTS) == {"completed": 1, "delayed": 1}
    assert board.put(QUEUE, tree.job.id, "remove-unprocessed-children") == {"removed": 1}
    assert state_counts(board, PARTS) == {"completed": 1}
    wait_for_end(harness, tree.job.id)
    assert board.job(QUEUE, tree.job.id)["returnValue"] == 3


# ---- limits --------------------------------------------------------------------------------------------------------


def test_a_concurrency_that_the_board_sets_applies_to_workers(board: Board, harness: WorkerHarness) -> None:
    board.put(QUEUE, "concurrency", concurrency=1)
    assert board.queue(QUEUE)["globalConcurrency"] == queue_of(harness).get_global_concurrency() == 1
    start_worker(harness, children=2)
    first, second = (queue_of(harness).add("load", {"progress": 1}) for _ in range(2))
    wait_until_running(harness, first.id)
    assert state_counts(board) == {"active": 1, "waiting": 1}
    board.put(QUEUE, "concurrency", concurrency=0)  # 0 removes it
    assert board.queue(QUEUE)["globalConcurrency"] is None
    assert queue_of(harness).get_global_concurrency() is None
    harness.open_gate(times=2)
    for job in (first, second):
        wait_for_end(harness, job.id)


def test_a_rate_limit_that_the_board_sets_applies_until_it_is_released(board: Board, harness: WorkerHarness) -> None:
    board.put(QUEUE, "rate-limit", max=1, duration=3_600_000)
    assert board.get(QUEUE, "rate-limit") == {"supported": True, "rateLimit": {"max": 1, "duration": 3_600_000}}
    worker = start_worker(harness)
    first, second = (queue_of(harness).add("greet", {"to": to}) for to in ("Ada", "Grace"))
    wait_for_end(harness, first.id)
    assert 0 < board.queue(QUEUE)["activeRateLimitTtl"] <= 3_600_000
    assert state_counts(board) == {"completed": 1, "waiting": 1}
    board.put(QUEUE, "rate-limit", max=None)
    board.put(QUEUE, "rate-limit", "release")
    assert board.get(QUEUE, "rate-limit")["rateLimit"] is None
    # A rate-limited worker fetches again after 30 s at most, like Node's; a new worker immediately.
    worker.stop()
    start_worker(harness)
    wait_for_end(harness, second.id)


# ---- schedulers ----------------------------------------------------------------------------------------------------


def test_the_board_runs_changes_and_removes_a_job_scheduler(board: Board, harness: WorkerHarness) -> None:
    schedulers = queue_of(harness).schedulers
    schedulers.upsert("nightly", cron="30 3 * * *", name="greet", data={"to": "Ada"}, options={"priority": 3})
    start_worker(harness)
    at = ("job-schedulers", "nightly")
    once = board.put(QUEUE, *at, "run")["job"]
    wait_for_end(harness, once["id"])
    shown = board.job(QUEUE, once["id"])
    assert (shown["returnValue"], shown["priority"]) == ("Hello, Ada", 3)
    (next_run,) = board.queue(QUEUE, "delayed")["jobs"]
    assert_rejected(400, "ERRORS.JOB_BELONGS_TO_JOB_SCHEDULER", "put", board, QUEUE, next_run["id"], "clean")
    board.patch(QUEUE, *at, pattern="0 4 * * *", tz="Europe/Berlin")
    changed = schedulers.get("nightly")
    assert changed is not None
    assert (changed.pattern, changed.tz, changed.name) == ("0 4 * * *", "Europe/Berlin", "greet")
    assert ids(board.queue(QUEUE, "delayed")["jobs"]) == [next_run["id"]]
    board.put(QUEUE, *at, "remove")
    assert schedulers.count() == 0
    assert state_counts(board) == {"completed": 1}


def test_an_interval_that_the_board_changes_applies_after_the_next_run(board: Board, harness: WorkerHarness) -> None:
    queue_of(harness).schedulers.upsert("hourly", every=3600, name="greet", data={"to": "Ada"})
    start_worker(harness)
    harness.events.wait_for(1, 30.0, event="completed")
    (planned,) = ids(board.queue(QUEUE, "delayed")["jobs"])
    board.patch(QUEUE, "job-schedulers", "hourly", every=60_000)
    board.put(QUEUE, "promote")
    wait_for_end(harness, planned)
    scheduler = queue_of(harness).schedulers.get("hourly")
    assert scheduler is not None
    assert scheduler.next_ms == int(planned.rpartition(":")[2]) + 60_000
