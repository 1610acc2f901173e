"""The script that writes an outcome, and the outcome's event."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import msgpack
import pytest

from bulltask.config.settings import Settings
from bulltask.errors import (
    BrokerError,
    BulltaskError,
    FailedChildrenError,
    NoPendingChildrenError,
    PendingChildrenError,
)
from bulltask.events import Bus, Event, JobFailed, JobRetried
from bulltask.jobs.fields import KEEP_ALL
from bulltask.jobs.job import RunningJob, StoredOptions
from bulltask.jobs.names import REVOKED
from bulltask.lua.loader import bulltask_script
from bulltask.lua.wrappers import outcome_scripts
from bulltask.transport.call import QueueKeys
from bulltask.transport.scripts.move import pack_finish
from bulltask.worker.finish import Finisher
from bulltask.worker.outcomes import (
    AcquiredJob,
    CompletedOutcome,
    FailedOutcome,
    IncompatibleOutcome,
    Outcome,
    ReleasedOutcome,
    RescheduledByTaskOutcome,
    RescheduledByWorkerOutcome,
    RetriedOutcome,
    WaitingForChildrenOutcome,
)

KEYS = QueueKeys("bull", "{mail}", "mail")
CONFIG = Settings({}, {}).freeze()


@pytest.fixture
def emitted() -> list[Event]:
    return []


@pytest.fixture
def finisher(emitted: list[Event]) -> Finisher:
    bus = Bus()
    bus.subscribe(Event, emitted.append)
    clock: Any = SimpleNamespace(now_ms=lambda: 1_000)
    return Finisher(CONFIG, clock, bus, "worker")


def acquired(**opts: object) -> AcquiredJob:
    fields = {
        "name": "send",
        "data": "{}",
        "opts": json.dumps({"attempts": 3, **opts}),
        "timestamp": "1",
        "ats": "2",
        "atm": "1",
    }
    flat = [text.encode() for pair in fields.items() for text in pair]
    slot: Any = SimpleNamespace(token="token")
    return AcquiredJob(slot, 0, KEYS, RunningJob.from_hash("mail", "7", flat), 0)


@pytest.mark.parametrize(
    ("outcome", "script"),
    [
        (CompletedOutcome(b"1", 1), "moveToFinished"),
        (FailedOutcome("no", "", "permanent"), "moveToFinished"),
        (FailedOutcome(REVOKED, "", REVOKED), "finishRevoked:moveToFinished"),
        (FailedOutcome("no", "", "permanent", malformed=True), "failMalformed:moveToFinished"),
        (RetriedOutcome(0, "no", "", "transient"), "retryJob"),
        (RetriedOutcome(5, "no", "", "transient"), "moveToDelayed"),
        (RescheduledByWorkerOutcome(5, "no"), "moveToDelayed"),
        (IncompatibleOutcome(5, "no", "0:1", is_first=True), "delayIncompatible:moveToDelayed"),
        (RescheduledByTaskOutcome(5, checkpoint="{}"), "moveWithFields:moveToDelayed"),
        (RescheduledByTaskOutcome(100), "moveToDelayed"),
        (ReleasedOutcome(), "moveWithFields:moveJobFromActiveToWait"),
        (ReleasedOutcome(checkpoint="{}"), "moveWithFields:moveJobFromActiveToWait"),
        (WaitingForChildrenOutcome(), "moveToWaitingChildren"),
    ],
)
def test_each_outcome_is_written_by_its_script(finisher: Finisher, outcome: Outcome, script: str) -> None:
    call, fetches = finisher.call(acquired(), outcome, fetch_next=True)
    assert call.script is not None
    assert call.script.name == (script if fetches else f"wakeNext:{script}")
    assert fetches == (script == "moveToFinished")
    alone, fetches = finisher.call(acquired(), outcome, fetch_next=False)
    assert not fetches
    # If the child dies, its supervisor needs the script's source.
    assert {call.known_sha, alone.known_sha} <= outcome_scripts().keys()


def test_a_job_does_not_finish_before_it_was_acquired(finisher: Finisher) -> None:
    job = replace(acquired().job, processed_on_ms=1_004)
    call, _ = finisher.call(replace(acquired(), job=job), CompletedOutcome(b"1", 1), fetch_next=True)
    assert call.argv[1] == 1_004, "the clock of this process says 1,000"


def test_a_busy_child_removes_old_jobs_every_few_milliseconds() -> None:
    now_ms, day = 1_000, {"age": 86_400}

    def keep(queue: str = "mail", **option: int) -> Any:
        stored = StoredOptions({"removeOnComplete": option or day})
        job = replace(acquired().job, queue=queue, opts=stored)
        call, _ = child.call(replace(acquired(), job=job), CompletedOutcome(b"1", 1), fetch_next=True)
        return msgpack.unpackb(call.argv[7])["keepJobs"]

    child = Finisher(CONFIG, cast(Any, SimpleNamespace(now_ms=lambda: now_ms)), Bus(), "worker")
    assert [keep(), keep(), keep("other"), keep("other")] == [day, KEEP_ALL, day, KEEP_ALL]
    assert keep(age=60, count=5) == {"age": 60, "count": 5}
    now_ms += 4
    assert keep() == KEEP_ALL
    now_ms += 1
    assert [keep(), keep()] == [day, KEEP_ALL]


def test_the_guard_recognizes_options_that_keep_all_jobs() -> None:
    packed = pack_finish("token", 30_000, "worker", None, None, tuple(KEEP_ALL.items()), 3)
    escaped = rb"\168keepJobs\129\165count\255"
    assert escaped in bulltask_script("retentionGuard").source
    assert re.sub(rb"\\(\d+)", lambda match: bytes([int(match[1])]), escaped) in packed


@pytest.mark.parametrize(
    "outcome",
    [FailedOutcome("no", "", "permanent", ValueError()), RetriedOutcome(5, "no", "", "transient", ValueError())],
)
def test_an_outcomes_event_counts_the_attempt_that_ended(
    finisher: Finisher, emitted: list[Event], outcome: FailedOutcome | RetriedOutcome
) -> None:
    finisher.emit(acquired(), outcome, 12.5)
    (event,) = emitted
    assert isinstance(event, JobFailed | JobRetried)
    assert (event.attempts_made, event.exception, event.duration_ms) == (2, outcome.exception, 12.5)


@pytest.mark.parametrize(
    ("opts", "delay_ms"),
    [
        ({"attempts": 3, "backoff": {"type": "fixed", "delay": 70}}, 70),
        ({"attempts": 2}, None),
        ({"attempts": 3, "bulltask": {"v": 1, "retries": 1}}, None),
        ({"attempts": 4, "bulltask": {"v": 1, "retries": 1}}, 0),
        ({"attempts": 20, "bulltask": {"v": 1, "retries": 8}}, 0),
        ({"attempts": 20, "bulltask": {"v": 1, "retries": 9}}, 1_000),
        ({"attempts": 1, "bulltask": {"v": 1, "max_explicit_retries": 9}}, None),
        ({"attempts": 3, "backoff": "?"}, None),
    ],
    ids=[
        "retry",
        "last",
        "last after a move",
        "after a move",
        "tenth retry",
        "slow",
        "only requests are retried",
        "no backoff",
    ],
)
def test_a_parent_that_cannot_complete_yet_is_retried_while_it_has_attempts_left(
    finisher: Finisher, opts: dict[str, Any], delay_ms: int | None
) -> None:
    error = PendingChildrenError("pending")
    reason = "Job 7 has pending dependencies. moveToFinished"
    outcome = finisher.failed_writes.fallback(acquired(**opts), CompletedOutcome(b"1", 1), error)
    failed = FailedOutcome(reason, "", "permanent")
    assert outcome == (failed if delay_ms is None else RetriedOutcome(delay_ms, reason, "", "transient"))


@pytest.mark.parametrize(
    ("outcome", "error", "fallback"),
    [
        (
            CompletedOutcome(b"1", 1),
            FailedChildrenError("failed"),
            FailedOutcome(
                "Cannot complete job 7 because it has at least one failed child. moveToFinished", "", "permanent"
            ),
        ),
        (
            CompletedOutcome(b"1", 1),
            BrokerError("ERR no"),
            FailedOutcome("the job's outcome could not be stored: ERR no", "", "permanent", malformed=True),
        ),
        (
            FailedOutcome("no", "trace", "permanent"),
            BrokerError("ERR no"),
            FailedOutcome("no", "trace", "permanent", malformed=True),
        ),
        (FailedOutcome("no", "trace", "permanent", malformed=True), BrokerError("ERR no"), None),
        (FailedOutcome("no", "trace", "permanent"), PendingChildrenError("pending"), None),
        (WaitingForChildrenOutcome(checkpoint="{}"), NoPendingChildrenError("none"), ReleasedOutcome(checkpoint="{}")),
        (
            WaitingForChildrenOutcome(checkpoint="{}"),
            BrokerError("ERR no"),
            FailedOutcome("the job's outcome could not be stored: ERR no", "", "permanent", malformed=True),
        ),
        (WaitingForChildrenOutcome(replaced=True), FailedChildrenError("failed"), ReleasedOutcome()),
    ],
)
def test_an_outcome_that_redis_rejects_is_replaced(
    finisher: Finisher, outcome: Outcome, error: BulltaskError, fallback: Outcome | None
) -> None:
    assert finisher.failed_writes.fallback(acquired(), outcome, error) == fallback


@pytest.mark.parametrize(
    ("outcome", "is_logged"),
    [
        (IncompatibleOutcome(5, "task 'send' is not registered", "0:1", is_first=True), True),
        (IncompatibleOutcome(5, "task 'send' is not registered", "0:1", is_first=False), False),
        (RescheduledByWorkerOutcome(5, "its lock was lost"), False),
    ],
)
def test_the_log_of_a_job_says_once_that_it_waits_for_another_worker(
    finisher: Finisher, outcome: Outcome, is_logged: bool
) -> None:
    call = finisher.after_finish(acquired(), outcome)
    assert (call is not None) is is_logged
    assert call is None or any("task 'send' is not registered" in str(arg) for arg in call.args)
