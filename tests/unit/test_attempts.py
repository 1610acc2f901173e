"""One attempt at a job: the checks before the task runs, and the outcome after it returned or raised."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from bulltask import App
from bulltask.errors import InvalidJobError, incompatible
from bulltask.jobs.job import RunningJob
from bulltask.jobs.names import REVOKED
from bulltask.worker import attempt as module
from bulltask.worker.attempt import Attempt, AttemptRunner
from bulltask.worker.cancellation import TaskExecution, TaskThreads
from bulltask.worker.outcomes import CompletedOutcome, FailedOutcome, IncompatibleOutcome, Outcome, RetriedOutcome
from bulltask.worker.slots import CancelReason, Deadlines, Slot

NOW_MS = 1_700_000_000_000
MONO_MS = 5_000


class FakeSlot:
    """A slot with or without a cancel request from the supervisor."""

    token = "7:1"
    cancel_reason = CancelReason.NONE

    def acknowledge(self) -> None:
        pass


class Cancellation:
    """A cancellation that records its arguments."""

    runs_async = False

    def __init__(self) -> None:
        self.deadlines: list[Deadlines] = []
        self.execution: TaskExecution | None = None

    def set_deadlines(self, _: Slot, deadlines: Deadlines) -> None:
        self.deadlines.append(deadlines)

    def raise_if_cancelled(self) -> None:
        if self.execution is not None:
            self.execution.take(self.execution.requested)


@pytest.fixture
def app(monkeypatch: pytest.MonkeyPatch) -> Iterator[App]:
    monkeypatch.setattr(App, "_now_ms", lambda _: NOW_MS)
    monkeypatch.setattr(module, "mono_ms", lambda: MONO_MS)
    app = App("tested")

    @app.task(name="double")
    def double(number: int) -> int:
        return 2 * number

    yield app
    app.close()


@pytest.fixture
def cancellation() -> Cancellation:
    return Cancellation()


def attempts(app: App, cancellation: Cancellation, stored: str = "") -> AttemptRunner:
    nothing: Any = None
    client: Any = SimpleNamespace(send=lambda _command: stored)
    child_limits: Any = SimpleNamespace(limits_memory=False)
    return AttemptRunner(app, lambda _: client, nothing, cast("Any", cancellation), child_limits, TaskThreads(0))


def job(name: str = "double", data: Any = None, *, started: int = 1, **opts: Any) -> RunningJob:
    fields = {
        "name": name,
        "data": json.dumps({"number": 4} if data is None else data),
        "opts": json.dumps({"attempts": 3, **opts}),
        "timestamp": str(NOW_MS),
        "ats": str(started),
    }
    flat = [text.encode() for pair in fields.items() for text in pair]
    return RunningJob.from_hash("mail", "7", flat)


def begin(app: App, cancellation: Cancellation, acquired: RunningJob, stored: str = "") -> Attempt | Outcome:
    return attempts(app, cancellation, stored).begin(acquired)


def run(
    app: App, cancellation: Cancellation, acquired: RunningJob, reason: CancelReason = CancelReason.NONE
) -> Outcome:
    runner = attempts(app, cancellation)
    attempt = runner.begin(acquired)
    assert isinstance(attempt, Attempt)
    slot: Any = FakeSlot()
    slot.cancel_reason = reason
    return runner.call(attempt, slot)


def test_a_task_runs_with_the_arguments_of_its_job(app: App, cancellation: Cancellation) -> None:
    outcome = run(app, cancellation, job())
    assert isinstance(outcome, CompletedOutcome)
    assert (outcome.value, outcome.result) == (b"8", 8)
    assert cancellation.deadlines == []


@pytest.mark.parametrize(("late_ms", "runs"), [(-1, True), (0, True), (1, False)])
def test_a_job_expires_one_millisecond_after_its_expiry_time(
    app: App, cancellation: Cancellation, late_ms: int, runs: bool
) -> None:
    started_attempt = begin(app, cancellation, job(bulltask={"expires": NOW_MS - late_ms}))
    assert isinstance(started_attempt, Attempt) == runs
    if isinstance(started_attempt, FailedOutcome):
        assert started_attempt.reason.startswith("the job expired 0.001 s before")


def test_an_unexpected_error_while_decoding_fails_only_that_job(
    app: App, cancellation: Cancellation, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decode(*_: object, **__: object) -> None:
        raise ZeroDivisionError("unexpected")

    acquired = job()
    monkeypatch.setattr("bulltask.jobs.codec.decode", decode)
    started_attempt = begin(app, cancellation, acquired)
    assert isinstance(started_attempt, FailedOutcome)
    assert started_attempt.reason == "ZeroDivisionError: unexpected"


@pytest.mark.parametrize(("started", "runs"), [(2, True), (3, False)])
def test_a_job_that_was_started_too_many_times_fails(
    app: App, cancellation: Cancellation, started: int, runs: bool
) -> None:
    app.conf.max_started_attempts = 2
    assert isinstance(begin(app, cancellation, job(started=started)), Attempt) == runs


DAY_MS = 86_400_000


@pytest.mark.parametrize(
    ("stored", "delay_ms", "since_ms"),
    [
        ("", 1_000, NOW_MS),
        (f"0:{NOW_MS - 1_000}", 2_000, NOW_MS - 1_000),
        (f"0:{NOW_MS - 31_000}", 32_000, NOW_MS - 31_000),
        (f"0:{NOW_MS - DAY_MS + 1}", 60_000, NOW_MS - DAY_MS + 1),
        (f"0:{NOW_MS + 5_000}", 1_000, NOW_MS + 5_000),  # the server's clock was set back
        (f"1:{NOW_MS - 31_000}", 1_000, NOW_MS),  # before an attempt in a worker that could run the job
        ("0:soon", 1_000, NOW_MS),
    ],
)
@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("triple", {"number": 4}, "task 'triple' is not registered in app 'tested'"),
        ("double", {}, "missing a required argument: 'number'"),
        ("double", {"number": 4, "more": 1}, "got an unexpected keyword argument 'more'"),
    ],
)
def test_an_incompatible_job_waits_longer_each_time(
    app: App,
    cancellation: Cancellation,
    *,
    name: str,
    data: Any,
    reason: str,
    stored: str,
    delay_ms: int,
    since_ms: int,
) -> None:
    outcome = begin(app, cancellation, job(name, data), stored)
    assert isinstance(outcome, IncompatibleOutcome)
    assert (outcome.delay_ms, outcome.since) == (delay_ms, f"0:{since_ms}")
    assert outcome.is_first == (since_ms == NOW_MS)
    assert outcome.reason.endswith(reason)


@pytest.mark.parametrize(
    ("timeout", "waited_ms", "fails"),
    [(0, 0, True), (10, 9_999, False), (10, 10_000, True), (None, 10 * DAY_MS, False)],
)
def test_an_incompatible_job_fails_after_the_timeout(
    app: App, cancellation: Cancellation, timeout: int | None, waited_ms: int, fails: bool
) -> None:
    app.conf.incompatible_timeout = timeout
    outcome = begin(app, cancellation, job("triple"), f"0:{NOW_MS - waited_ms}")
    assert isinstance(outcome, FailedOutcome if fails else IncompatibleOutcome)
    assert outcome.reason.startswith("task 'triple' is not registered in app 'tested'")


def test_an_exception_of_the_task_is_not_taken_for_an_incompatible_job(app: App, cancellation: Cancellation) -> None:
    @app.task(name="reads")
    def reads() -> None:
        raise incompatible(InvalidJobError("this job runs in no worker"))

    assert isinstance(run(app, cancellation, job("reads", {})), FailedOutcome)


@pytest.mark.parametrize(
    ("limits", "deadlines"),
    [
        ({"softTimeLimit": 2_000}, (MONO_MS + 2_000, 0, 0)),
        ({"timeLimit": 3_000}, (0, MONO_MS + 3_000, 3_000)),
        ({"softTimeLimit": 2_000, "timeLimit": 3_000}, (MONO_MS + 2_000, MONO_MS + 3_000, 3_000)),
    ],
)
def test_an_attempt_sets_the_deadlines_of_its_time_limits(
    app: App, cancellation: Cancellation, limits: dict[str, int], deadlines: tuple[int, int, int]
) -> None:
    run(app, cancellation, job(bulltask=limits))
    (stored,) = cancellation.deadlines
    assert (stored.soft_at_ms, stored.hard_at_ms, stored.hard_ms) == deadlines
    assert not stored.is_async


def test_a_revoked_attempt_fails_even_if_the_task_returned(app: App, cancellation: Cancellation) -> None:
    outcome = run(app, cancellation, job(), CancelReason.REVOKED)
    assert isinstance(outcome, FailedOutcome)
    assert outcome.category == REVOKED


def test_the_repr_of_an_outcome_does_not_show_the_exception() -> None:
    assert "secret" not in repr(FailedOutcome("no", "", "permanent", ValueError("secret")))


# Python 3.12 warns about a fork in a process with threads (xdist's). The forked process only exits.
@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_process_forked_by_a_backoff_function_exits_before_it_has_an_outcome(
    app: App, cancellation: Cancellation
) -> None:
    pid, forked = os.getpid(), list[int]()

    def backoff(_retries: int, _exc: BaseException) -> int:
        forked.append(os.fork())
        return 0

    @app.task(name="fail", max_retries=1, autoretry_for=(ValueError,), retry_backoff=backoff)
    def fail() -> None:
        raise ValueError

    outcome = run(app, cancellation, job("fail", []))
    if os.getpid() != pid:
        os._exit(99)
    assert isinstance(outcome, RetriedOutcome)
    assert [os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1]) for copy in forked] == [0]
