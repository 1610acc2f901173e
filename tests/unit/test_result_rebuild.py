"""What ``get()`` raises for a job that failed: the task's own exception where that is safe and true, else TaskError."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, cast

import pytest

from bulltask.errors import (
    BrokerUnavailableError,
    DecodeError,
    JobExpiredError,
    JobNotFoundError,
    PermanentError,
    ResultTimeoutError,
    TaskCancelled,
    TaskError,
    TaskRevokedError,
    TransientError,
)
from bulltask.jobs.failures import REASON_CHARS, reason_of
from bulltask.jobs.job import JobRef
from bulltask.jobs.states import JobState, Revocation
from bulltask.jobs.stored_job import Finished, JobSnapshot
from bulltask.result import AsyncResult, RemoteTraceback
from bulltask.worker.child.retry_decision import trace_of
from tests.support.machine_load import scale_to_load


class Failing:
    """A reader of jobs that finds one failed job."""

    def __init__(self, reason: str, *traces: str) -> None:
        self.reason, self.traces = reason, traces

    def snapshot(self, ref: JobRef) -> JobSnapshot:
        return JobSnapshot(state=JobState.FAILED, failed_reason=self.reason, stacktrace=self.traces)

    async def asnapshot(self, ref: JobRef) -> JobSnapshot:
        return self.snapshot(ref)

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        return Finished(False, self.reason)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        return Finished(False, self.reason)

    def revoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        return Revocation.FINISHED

    async def arevoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        return Revocation.FINISHED


def raised(reason: str, *traces: str) -> BaseException:
    """What ``get()`` raises for this stored failure."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - whatever it is
        AsyncResult[Any]("id-1", "mail", Failing(reason, *traces)).get()
    return caught.value


def failure_of(error: BaseException, *, notes: list[str] | None = None) -> tuple[str, str]:
    """Reason and traceback as a worker stores them after a task raised ``error``."""
    for note in notes or ():
        error.add_note(note)
    with pytest.raises(type(error)) as caught:
        raise error
    return str(caught.value) or type(error).__name__, trace_of(caught.value)


def again(error: BaseException, **more: Any) -> BaseException:
    return raised(*failure_of(error, **more))


class PlainError(Exception):
    """As most errors of users."""


class NeedsArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"{code}: {text}")


class ShowsAttributes(Exception):
    def __init__(self, status: int) -> None:
        self.status = status

    def __str__(self) -> str:
        return f"status {self.status}"


class AddsWords(Exception):
    def __str__(self) -> str:
        return f"oh no: {self.args[0]}"


calls: list[str] = []


class Telltale(Exception):
    """Tells when its code runs."""

    def __new__(cls, *args: object) -> Telltale:
        calls.append("new")
        return super().__new__(cls, *args)

    def __init__(self, *args: object) -> None:
        calls.append("init")
        super().__init__(*args)


# --- the same exception -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notes", [[], ["a note"]])
@pytest.mark.parametrize("size", [20_000, 20_000_000])
def test_an_exception_with_a_shortened_message_is_rebuilt_with_it(size: int, notes: list[str]) -> None:
    error = PlainError("begin" + size * "x" + "end")
    for note in notes:
        error.add_note(note)
    reason, trace = reason_of(error), trace_of(error)
    assert (len(reason), len(trace) < 51_000) == (REASON_CHARS, True)
    found = raised(reason, trace)
    assert (type(found), str(found)) == (PlainError, reason)
    assert (reason[:5], reason[-3:]) == ("begin", "end")


def test_a_reason_of_any_length_from_node_is_read_at_once() -> None:
    reason = "\n".join(200_000 * ["a line (of *many*)"])
    started = time.monotonic()
    found = raised(reason, f"Traceback (most recent call last):\nError: {reason}\nat worker.js:1:1")
    assert type(found) is TaskError
    assert time.monotonic() - started < scale_to_load(1)


@pytest.mark.parametrize(
    "error",
    [
        ValueError("boom"),
        PlainError("boom"),
        PlainError("two: colons: here"),
        PlainError("first line\nsecond line\n\nlast line"),
        PlainError("ends with a line end\n"),
        PlainError("it quotes\nTraceback (most recent call last):\n  File x\nKeyError: 'y'"),
        PlainError("ünïcödé ✓"),
        KeyError("missing"),
        KeyError(("a", 1)),
        KeyError("it's"),
        FileNotFoundError("no such file"),
        ImportError("x"),
        UnicodeError("x"),
        AddsWords("x"),
        PermanentError("never"),
        TransientError("later", retry_after=5),
        JobExpiredError(),
    ],
    ids=repr,
)
def test_an_exception_is_rebuilt_with_its_class_and_message(error: Exception) -> None:
    found = again(error)
    assert type(found) is type(error)
    assert str(error) in str(found)
    assert isinstance(found.__cause__, RemoteTraceback)
    assert "test_result_rebuild.py" in str(found.__cause__)


def test_the_message_is_exactly_the_same_where_its_class_allows() -> None:
    for error in (ValueError("x"), KeyError("x"), OSError("x"), PlainError("a\nb")):
        assert str(again(error)) == str(error)
    assert again(KeyError("x")).args == ("x",)


def test_an_exception_without_a_message_is_rebuilt_without_one() -> None:
    found = again(PlainError())
    assert (type(found), found.args, str(found)) == (PlainError, (), "")


def test_notes_do_not_hide_the_class() -> None:
    found = again(PlainError("boom"), notes=["in row 5", "KeyError: not this"])
    assert (type(found), str(found)) == (PlainError, "boom")
    assert "in row 5" in str(found.__cause__)


def test_a_chain_is_rebuilt_as_its_last_exception() -> None:
    def chained() -> None:
        try:
            _ = dict[str, str]()["first"]
        except KeyError as first:
            raise PlainError("second") from first

    with pytest.raises(PlainError) as caught:
        chained()
    reason, trace = str(caught.value), trace_of(caught.value)
    found = raised(reason, trace)
    assert (type(found), str(found)) == (PlainError, "second")
    assert "KeyError: 'first'" in str(found.__cause__)


def test_a_cause_that_was_never_raised_does_not_hide_the_class() -> None:
    error = PlainError("second")
    error.__cause__ = KeyError("first")
    assert type(again(error)) is PlainError


def test_a_class_that_needs_arguments_is_rebuilt_without_calling_init() -> None:
    found = again(NeedsArguments(404, "not found"))
    assert (type(found), str(found)) == (NeedsArguments, "404: not found")
    assert not hasattr(found, "code")


def test_rebuilding_runs_no_code_of_the_class_except_str() -> None:
    failure = failure_of(Telltale("boom"))
    calls.clear()
    found = raised(*failure)
    assert (type(found), str(found)) == (Telltale, "boom")
    assert calls == []


def test_a_rebuilt_transient_error_can_be_raised_by_another_task() -> None:
    found = again(TransientError("later", retry_after=timedelta(seconds=5)))
    assert isinstance(found, TransientError)
    assert found.retry_after is None


async def test_awaiting_raises_the_same() -> None:
    result = AsyncResult[Any]("id-1", "mail", Failing(*failure_of(PlainError("boom"))))
    with pytest.raises(PlainError, match="boom"):
        await result
    with pytest.raises(PlainError, match="boom"):
        await result.aget(timeout=1)


def test_info_returns_the_exception_of_a_failed_job() -> None:
    result = AsyncResult[Any]("id-1", "mail", Failing(*failure_of(PlainError("boom"))))
    assert type(result.info) is PlainError
    assert (result.failed(), result.ready(), result.successful()) == (True, True, False)
    assert result.traceback is not None
    assert result.traceback.endswith("PlainError: boom\n")


# --- TaskError instead ------------------------------------------------------------------------------------------------


def task_error(reason: str, *traces: str) -> TaskError:
    found = raised(reason, *traces)
    assert type(found) is TaskError
    assert (found.reason, found.job_id) == (reason, "id-1")
    assert str(found).startswith(f"job id-1: {reason}")
    return found


JS = (
    "Error: boom\n    at Worker.process (/app/worker.js:5:11)\n    at process.processTicksAndRejections (node:internal)"
)


@pytest.mark.parametrize("trace", [JS, JS.replace("Error:", "TypeError:"), JS.replace("Error:", "ValueError:")])
def test_an_error_of_node_is_a_task_error_with_its_stack(trace: str) -> None:
    found = task_error("boom", trace)
    assert "worker.js:5:11" in str(found)
    assert found.remote_traceback == trace


def test_a_failure_without_a_traceback_is_a_task_error() -> None:
    assert str(task_error("job stalled more than allowable limit")) == "job id-1: job stalled more than allowable limit"


def test_a_traceback_of_an_earlier_attempt_is_not_taken_for_the_reason() -> None:
    _, trace = failure_of(KeyError("x"))
    found = task_error("the child running this job died (SIGKILL)", trace)
    assert "KeyError: 'x'" in str(found)


@pytest.mark.parametrize(
    "name",
    [
        "not_loaded_module_xyz.SomeError",
        "xml.dom.pulldom.SomeError",
        "builtins.SystemExit",
        "SystemExit",
        "KeyboardInterrupt",
        "print",
        "os.system",
        "subprocess.Popen",
        "tests.Error",
        "sys",
        "",
        ".",
        "..x",
        "a b c",
        "__import__('os').system",
        f"{__name__}.alias",
        f"{__name__}.outer",
        f"{__name__}.PlainError.__init__",
    ],
)
def test_only_a_loaded_exception_class_of_exactly_this_name_is_rebuilt(name: str) -> None:
    before = set(sys.modules)
    task_error("boom", f'Traceback (most recent call last):\n  File "x", line 1, in y\n{name}: boom\n')
    assert set(sys.modules) == before


alias = ValueError
outer = PlainError("an instance, not a class")


def test_a_modules_getattr_is_not_called() -> None:
    asked: list[str] = []
    module = types.ModuleType("lazy_module_of_a_test")
    cast(Any, module).__getattr__ = asked.append
    sys.modules[module.__name__] = module
    try:
        task_error("boom", "Traceback (most recent call last):\nlazy_module_of_a_test.SomeError: boom\n")
    finally:
        del sys.modules[module.__name__]
    assert asked == []


def make_local() -> Exception:
    class LocalError(Exception): ...

    return LocalError("boom")


@pytest.mark.parametrize(
    "error",
    [
        ShowsAttributes(404),
        UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte"),
        ExceptionGroup("several", [ValueError("one")]),
        make_local(),
        SystemExit(3),
        asyncio.CancelledError(),
    ],
    ids=repr,
)
def test_an_exception_that_cannot_be_rebuilt_is_a_task_error_with_the_traceback(
    error: BaseException,
) -> None:
    reason, trace = failure_of(error)
    assert type(error).__name__ in task_error(reason, trace).remote_traceback


@pytest.mark.parametrize(
    "error",
    [
        BrokerUnavailableError("the task could not reach its Redis"),
        ResultTimeoutError("the task waited for another job"),
        JobNotFoundError("other", "q"),
        DecodeError("x"),
        StopIteration("x"),
        StopAsyncIteration("x"),
    ],
    ids=repr,
)
def test_an_exception_that_get_itself_may_raise_is_a_task_error(error: Exception) -> None:
    task_error(*failure_of(error))


@pytest.mark.parametrize("make", [lambda n: "x" * n, lambda n: "(" * n, lambda n: "\n" * n + "x", lambda n: "a: " * n])
def test_a_huge_message_is_handled_fast(make: Callable[[int], str]) -> None:
    reason = make(50_000)
    trace = f"Traceback (most recent call last):\nKeyError: {reason}\nKeyError: {reason}"
    assert isinstance(raised(reason, trace), KeyError | TaskError)


# --- handles ----------------------------------------------------------------------------------------------------------


def test_handles_of_one_job_are_equal() -> None:
    one, same, other = (AsyncResult[Any](i, "q", Failing("")) for i in ("1", "1", "2"))
    assert one == same != other
    assert len({one, same, other}) == 2
    assert one != "1"
    assert repr(one) == "<AsyncResult 1 of queue q>"


def test_a_job_that_was_revoked_raises_celerys_error_also_when_its_task_was_interrupted() -> None:
    assert type(raised("revoked")) is TaskRevokedError
    reason, trace = failure_of(TaskCancelled("revoked"))
    assert reason == "revoked"
    found = raised(reason, trace)
    assert type(found) is TaskRevokedError
    assert "failure_of" in found.remote_traceback
