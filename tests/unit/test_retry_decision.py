"""The retry decision after a failed attempt."""

from __future__ import annotations

import asyncio
import json
import os
import traceback
from dataclasses import replace
from datetime import timedelta
from typing import Any, cast

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bulltask import App, ErrorCategory, PermanentError, Retry, TransientError
from bulltask.errors import InvalidJobError, JobExpiredError
from bulltask.events import Bus
from bulltask.jobs.clock import ServerClock
from bulltask.jobs.fields import REASON_CHARS, TRACE_CHARS, TRACES_CHARS, truncate_traces
from bulltask.jobs.job import RunningJob, StoredOptions
from bulltask.registry.options import TaskOptions
from bulltask.registry.task import AnyTask, Task
from bulltask.transport.call import QueueKeys
from bulltask.worker.attempt import Attempt, AttemptRunner, JobArguments
from bulltask.worker.cancellation import Cancellation, TaskThreads
from bulltask.worker.finish import Finisher
from bulltask.worker.outcomes import AcquiredJob, FailedOutcome, RetriedOutcome, counter_of, decide_retry, trace_of
from bulltask.worker.slots import ChildLimits, Slots
from bulltask.worker.spark_tasks import SparkTaskRunner

BACKOFF = {"type": "exponential", "delay": 1_000, "jitter": 0, "maxDelay": 3_600_000}
BULLTASK_OPTS = {"bulltask": {"v": 1}, "backoff": BACKOFF}
BULLMQ_OPTS = {"backoff": {"type": "exponential", "delay": 1_000}}

app = App("tested")
deep_app = App("deep")
deep_app.task(name="t")(lambda x: None)


class UnknownError(Exception):
    """An error without a known category."""


class BrokenStr(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


def job(opts: dict[str, Any], *, failures: int = 0, attempts: int = 3) -> RunningJob:
    """Return a job in an attempt after ``failures`` failed attempts."""
    opts = {"attempts": attempts, **opts}
    return RunningJob("mail", "id-1", "t", b"{}", StoredOptions(opts), 0, 0, failures, failures + 1, "", "", None)


def task(**options: Any) -> AnyTask[Any, Any]:
    return task_of(lambda: None, **options)


def task_of(function: Any, **options: Any) -> AnyTask[Any, Any]:
    return Task(function, "t", TaskOptions(**options), lambda: app, bind=False)


def decide(
    error: BaseException, opts: dict[str, Any] | None = None, *, failures: int = 0, attempts: int = 3, **options: Any
) -> FailedOutcome | RetriedOutcome:
    failed = job(BULLTASK_OPTS if opts is None else opts, failures=failures, attempts=attempts)
    return decide_retry(error, failed, task(**options), app)


def is_retried(outcome: FailedOutcome | RetriedOutcome) -> bool:
    return isinstance(outcome, RetriedOutcome)


def delay_of(outcome: FailedOutcome | RetriedOutcome) -> int:
    assert isinstance(outcome, RetriedOutcome)
    return outcome.delay_ms


def http_error(status: int, **headers: str) -> httpx.HTTPStatusError:
    response = httpx.Response(status, headers=headers, request=httpx.Request("GET", "http://x"))
    return httpx.HTTPStatusError(f"{status}", request=response.request, response=response)


@pytest.mark.parametrize(
    ("error", "options", "opts", "reason"),
    [
        (ValueError("x"), {"autoretry_for": (ValueError,)}, BULLTASK_OPTS, "transient_exhausted"),
        (UnknownError("x"), {}, BULLMQ_OPTS, "transient_exhausted"),
        (Retry(), {}, BULLTASK_OPTS, "transient_exhausted"),
        (TransientError("x"), {}, BULLTASK_OPTS, "transient_exhausted"),
        (UnknownError("x"), {}, BULLTASK_OPTS, "unknown"),
        (PermanentError("x"), {"autoretry_for": (Exception,)}, BULLTASK_OPTS, "permanent"),
    ],
    ids=repr,
)
def test_the_last_attempt_of_a_retried_error_is_counted_as_exhausted(
    error: Exception, options: dict[str, Any], opts: dict[str, Any], reason: str
) -> None:
    last = decide(error, opts, failures=2, **options)
    assert counter_of(last) == reason
    if reason == "transient_exhausted":
        assert last.category == decide(error, opts, **options).category


def test_an_error_that_is_never_retried_is_counted_by_its_category() -> None:
    assert counter_of(decide(ValueError("x"), BULLMQ_OPTS, attempts=1)) == "permanent"
    assert counter_of(decide(ValueError("x"), autoretry_for=(ValueError,), attempts=1)) == "permanent"


# --- retried errors ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "bulltask", "bullmq"),
    [
        (TransientError("x"), True, True),
        (ConnectionError("x"), True, True),
        (TimeoutError("x"), True, True),
        (http_error(503), True, True),
        (UnknownError("x"), False, True),
        (ValueError("x"), False, True),
        (http_error(404), False, True),
        (SystemExit(1), False, True),
        (asyncio.CancelledError(), True, True),
        (PermanentError("x"), False, False),
        (JobExpiredError(), False, False),
        (InvalidJobError("x"), False, False),
    ],
    ids=repr,
)
def test_error_categories_apply_only_to_jobs_sent_by_bulltask(
    error: BaseException, bulltask: bool, bullmq: bool
) -> None:
    assert is_retried(decide(error)) is bulltask
    assert is_retried(decide(error, BULLMQ_OPTS)) is bullmq


@pytest.mark.parametrize("opts", [BULLTASK_OPTS, BULLMQ_OPTS])
@pytest.mark.parametrize(
    ("error", "options", "expected"),
    [
        (ValueError("x"), {"autoretry_for": (ValueError,)}, True),
        (UnicodeError("x"), {"autoretry_for": (ValueError,)}, True),
        (ValueError("x"), {"autoretry_for": (Exception,)}, True),
        (PermanentError("x"), {"autoretry_for": (Exception,)}, False),
        (TransientError("x"), {"dont_autoretry_for": (TransientError,)}, False),
        (ConnectionResetError("x"), {"dont_autoretry_for": (OSError,)}, False),
        (ValueError("x"), {"autoretry_for": (ValueError,), "dont_autoretry_for": (ValueError,)}, False),
        (UnicodeError("x"), {"autoretry_for": (ValueError,), "dont_autoretry_for": (UnicodeError,)}, False),
    ],
    ids=repr,
)
def test_a_task_may_add_and_exclude_errors_that_are_retried(
    opts: dict[str, Any], error: Exception, options: dict[str, Any], expected: bool
) -> None:
    assert is_retried(decide(error, opts, **options)) is expected


def test_the_apps_category_rules_apply() -> None:
    other = App("other")
    other.categorizer.register(UnknownError, ErrorCategory.TRANSIENT)
    assert is_retried(decide_retry(UnknownError("x"), job(BULLTASK_OPTS), task(), other))
    assert not is_retried(decide_retry(UnknownError("x"), job(BULLTASK_OPTS), task(), app))


@pytest.mark.parametrize(
    ("attempts", "failures", "expected"),
    [(3, 0, True), (3, 1, True), (3, 2, False), (3, 9, False), (1, 0, False), (0, 0, False)],
)
@pytest.mark.parametrize("opts", [BULLTASK_OPTS, BULLMQ_OPTS])
def test_the_attempts_are_read_from_the_job(opts: dict[str, Any], attempts: int, failures: int, expected: bool) -> None:
    assert is_retried(decide(TransientError("x"), opts, attempts=attempts, failures=failures)) is expected


def test_a_job_of_an_unknown_task_gets_a_retry_decision() -> None:
    assert not is_retried(decide_retry(InvalidJobError("x"), job(BULLMQ_OPTS), None, app))
    assert is_retried(decide_retry(TransientError("x"), job(BULLMQ_OPTS), None, app))


# --- self.retry() -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("opts", [BULLTASK_OPTS, BULLMQ_OPTS])
def test_a_task_may_request_a_retry_for_any_error(opts: dict[str, Any]) -> None:
    assert delay_of(decide(Retry(delay_ms=70), opts)) == 70
    assert delay_of(decide(Retry(delay_ms=0), opts)) == 0
    assert delay_of(decide(Retry(delay_ms=70, exc=PermanentError("x")), opts)) == 70
    assert delay_of(decide(Retry(), opts, failures=1)) == 2_000


def test_a_retry_is_reported_with_its_reason() -> None:
    outcome = decide(Retry(exc=UnknownError("reason")))
    assert isinstance(outcome, RetriedOutcome)
    assert (outcome.reason, outcome.category) == ("reason", "unknown")
    assert "UnknownError: reason" in outcome.trace


def test_a_retry_without_attempts_left_fails_with_its_reason() -> None:
    outcome = decide(Retry(exc=UnknownError("reason")), failures=2)
    assert isinstance(outcome, FailedOutcome)
    assert outcome.reason == "reason"
    outcome = decide(Retry(), failures=2)
    assert isinstance(outcome, FailedOutcome)
    assert outcome.reason == "the task requested a retry, but this was attempt 3 of 3"


@pytest.mark.parametrize(
    ("max_retries", "failures", "expected"),
    [
        (0, 0, False),
        (1, 0, True),
        (1, 1, False),
        (9, 2, True),
        (9, 8, True),
        (9, 9, False),
        (None, 1, True),
        (None, 2, False),
    ],
)
def test_max_retries_of_a_retry_overrides_the_attempts_of_the_job(
    max_retries: int | None, failures: int, expected: bool
) -> None:
    assert is_retried(decide(Retry(max_retries=max_retries), failures=failures, attempts=3)) is expected


# --- delays -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("failures", "delay_ms"), [(0, 1_000), (1, 2_000), (2, 4_000), (20, 3_600_000)])
def test_the_retry_delay_of_a_bulltask_job_doubles_up_to_the_maximum(failures: int, delay_ms: int) -> None:
    assert delay_of(decide(TransientError("x"), failures=failures, attempts=100)) == delay_ms


@pytest.mark.parametrize(
    ("backoff", "failures", "delay_ms"),
    [
        (None, 0, 0),
        (500, 3, 500),
        ({"type": "fixed", "delay": 500}, 3, 500),
        ({"type": "exponential", "delay": 500}, 3, 4_000),
        ({"type": "exponential", "delay": 1_000}, 20, 1_048_576_000),
        ({"type": "of-a-node-worker"}, 1, 2_000),
        ({"type": "of-a-node-worker", "delay": 10}, 1, 20),
    ],
)
def test_the_retry_delay_of_another_clients_job_is_computed_as_in_bullmq(
    backoff: object, failures: int, delay_ms: int
) -> None:
    opts = {} if backoff is None else {"backoff": backoff}
    assert delay_of(decide(TransientError("x"), opts, failures=failures, attempts=100)) == delay_ms


def test_the_delay_is_the_maximum_of_backoff_and_retry_after() -> None:
    assert delay_of(decide(TransientError("x", retry_after=60))) == 60_000
    assert delay_of(decide(TransientError("x", retry_after=timedelta(milliseconds=5)))) == 1_000
    assert delay_of(decide(http_error(429, retry_after="30"))) == 1_000, "the header has a dash"
    assert delay_of(decide(http_error(429, **{"Retry-After": "30"}))) == 30_000
    assert delay_of(decide(http_error(503, **{"Retry-After": "30"}), BULLMQ_OPTS)) == 30_000
    assert delay_of(decide(Retry(exc=TransientError("x", retry_after=60)))) == 60_000
    assert delay_of(decide(Retry(exc=TransientError("x", retry_after=60), delay_ms=5))) == 5


@pytest.mark.parametrize("opts", [BULLTASK_OPTS, BULLMQ_OPTS])
def test_a_backoff_function_gets_the_attempts_and_the_error(opts: dict[str, Any]) -> None:
    calls: list[tuple[int, BaseException]] = []

    def slowly(failures: int, exc: BaseException) -> float | timedelta:
        calls.append((failures, exc))
        return 1.5 if failures == 1 else timedelta(minutes=1)

    error = TransientError("x", retry_after=3_600)
    assert delay_of(decide(error, opts, retry_backoff=slowly)) == 1_500
    assert delay_of(decide(error, opts, retry_backoff=slowly, failures=1)) == 60_000
    assert delay_of(decide(Retry(exc=error), opts, retry_backoff=slowly)) == 1_500
    assert calls == [(1, error), (2, error), (1, error)]


def raises(failures: int, exc: BaseException) -> float:
    raise KeyError("a bug")


def returns_negative_delay(failures: int, exc: BaseException) -> float:
    return -1


@pytest.mark.parametrize(
    ("function", "reason"), [(raises, "KeyError: 'a bug'"), (returns_negative_delay, "ConfigError: the retry_b")]
)
def test_a_failing_backoff_function_fails_the_job_with_both_errors(function: Any, reason: str) -> None:
    outcome = decide(TransientError("the error itself"), retry_backoff=function)
    assert isinstance(outcome, FailedOutcome)
    assert outcome.reason.startswith(f"the error itself (and it cannot be retried: {reason}")
    assert "the error itself" in outcome.trace


def test_a_malformed_backoff_fails_the_job_instead_of_the_child() -> None:
    outcome = decide(TransientError("x"), {"backoff": {"delay": "soon"}})
    assert isinstance(outcome, FailedOutcome)
    assert "and it cannot be retried: DecodeError: backoff" in outcome.reason


# --- reason and traceback ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ValueError("two\nlines"), "two\nlines"),
        (ValueError(), "ValueError"),
        (BrokenStr(), "BrokenStr"),
        (KeyError("x"), "'x'"),
        (SystemExit(3), "3"),
    ],
    ids=lambda value: repr(value) if isinstance(value, str) else type(value).__name__,
)
def test_the_reason_is_the_message_or_the_name_of_the_class(error: BaseException, reason: str) -> None:
    outcome = decide(error)
    assert outcome.reason == reason
    assert type(error).__name__ in outcome.trace


def test_an_error_that_is_retried_is_not_permanent() -> None:
    for outcome in (
        decide(ValueError("x"), autoretry_for=(ValueError,)),
        decide(Retry(exc=ValueError("x"))),
        decide(ValueError("x"), BULLMQ_OPTS),
    ):
        assert isinstance(outcome, RetriedOutcome)
        assert outcome.category == "transient"


def test_the_outcome_contains_the_error_category() -> None:
    assert [decide(error).category for error in (TransientError("x"), ValueError("x"), UnknownError("x"))] == [
        "transient",
        "permanent",
        "unknown",
    ]


def deep(levels: int) -> None:
    if levels == 0:
        raise UnknownError("at the bottom")
    deep(levels - 1)


def catch(function: Any, *args: Any) -> BaseException:
    with pytest.raises(BaseException) as caught:  # noqa: PT011 - any exception
        function(*args)
    return caught.value


def fail_on_report(_: RunningJob) -> Any:
    pytest.fail("nothing is reported")


def test_a_job_with_too_deeply_nested_data_fails_permanently() -> None:
    for levels in (600, 960, 100_000):
        nested = replace(job(BULLMQ_OPTS), data=b'{"x":' + levels * b"[" + levels * b"]" + b"}")
        runner = AttemptRunner(
            deep_app, fail_on_report, cast(Any, None), cast(Any, None), cast(Any, None), TaskThreads(0)
        )
        outcome = runner.begin(nested)
        assert isinstance(outcome, FailedOutcome)
        assert outcome.category == "permanent"
        assert outcome.reason.startswith("data of job id-1 is nested deeper than 500 levels")


def test_the_traceback_begins_with_the_users_code() -> None:
    spark = SparkTaskRunner(app, fail_on_report, lambda *_: True, lambda: None)
    block = Slots(1, 1).children[0]
    cancellation = Cancellation(block, spark.interrupt, lambda: None)
    child_limits = ChildLimits(app._config, block, 0, Bus(), os.getpid())
    runner = AttemptRunner(app, fail_on_report, spark, cancellation, child_limits, TaskThreads(0))
    task = task_of(deep)
    attempt = Attempt(job(BULLTASK_OPTS), task, JobArguments((1,), {}), runner._new_plan(task))
    outcome = runner.call(attempt, block.slots()[0])
    assert isinstance(outcome, FailedOutcome)
    head, first, *_ = outcome.trace.splitlines()
    assert head == "Traceback (most recent call last):"
    assert "test_retry_decision.py" in first
    assert "bulltask/worker" not in outcome.trace


def test_an_error_raised_by_bulltask_has_a_traceback_in_pythons_format() -> None:
    assert trace_of(InvalidJobError("x")) == "Traceback (most recent call last):\nbulltask.errors.InvalidJobError: x\n"


def test_the_traceback_of_an_exception_group_is_formatted_by_python() -> None:
    def gather() -> None:
        raise ExceptionGroup("several", [ValueError("a"), KeyError("b")])

    error = catch(gather)
    trace = trace_of(error)
    assert trace.count("Traceback (most recent call last):") == 1
    assert trace == "".join(traceback.format_exception(error))


def test_a_long_traceback_keeps_its_beginning_and_its_end() -> None:
    error = catch(deep, 5)
    error.args = ("x" * 200_000,)
    trace = trace_of(error)
    assert len(trace) < 60_000
    assert trace.startswith("Traceback (most recent call last):\n")
    assert "\n…\n" in trace
    assert trace.endswith("x\n")


@pytest.mark.parametrize("error", [PermanentError(1_000_000 * "x"), TransientError(1_000_000 * "x")])
def test_the_stored_size_of_a_failure_is_bounded(error: Exception) -> None:
    earlier = json.dumps([400_000 * "a", 40_000 * "b", *(15 * [40_000 * "c"])]).encode()  # written by any client
    failed = replace(job(BULLTASK_OPTS), stacktrace=earlier)
    outcome = decide_retry(error, failed, task(), app)
    assert len(outcome.reason) <= REASON_CHARS
    acquired = AcquiredJob(Slots(1, 1).children[0].slots()[0], 0, QueueKeys("bull", "{mail}", "mail"), failed, 0)
    call, _ = Finisher(app._config, ServerClock(), Bus(), "worker").call(acquired, outcome, fetch_next=False)
    assert len(call.packed()) < TRACES_CHARS + 3 * REASON_CHARS


def test_the_newest_tracebacks_are_kept_and_long_tracebacks_truncated() -> None:
    kept = truncate_traces(["oldest", *(9 * [TRACE_CHARS * "a"]), 1_000_000 * "b", "newest"], None)
    assert [trace[0] for trace in kept] == list("aaaaaaaabn")
    assert all(len(trace) <= TRACE_CHARS for trace in kept)
    assert truncate_traces(["1", "2", "3"], 2) == ["2", "3"]
    assert truncate_traces(["1", "2", "3"], 0) == []


def test_the_traceback_of_a_recursion_is_short() -> None:
    trace = trace_of(catch(deep, 100))
    assert "Previous line repeated" in trace
    assert trace.endswith("UnknownError: at the bottom\n")


errors = st.sampled_from(
    [TransientError("x"), ValueError("x"), UnknownError("x"), PermanentError("x"), Retry(), BrokenStr()]
)
json_values: st.SearchStrategy[Any] = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.just({})
)


@given(
    errors, st.dictionaries(st.sampled_from(["attempts", "backoff", "bulltask"]), json_values), st.integers(0, 10**6)
)
def test_any_error_of_any_job_gets_a_retry_decision(error: BaseException, opts: dict[str, Any], failures: int) -> None:
    failed = RunningJob("q", "1", "t", b"", StoredOptions(opts), 0, 0, failures, failures + 1, "", "", None)
    outcome = decide_retry(error, failed, task(), app)
    assert isinstance(outcome, FailedOutcome) or outcome.delay_ms >= 0
