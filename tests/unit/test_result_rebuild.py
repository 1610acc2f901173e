"""Errors of ``get()`` for a failed job: the task's exception if it can be rebuilt safely, else ``TaskError``."""

from __future__ import annotations

import asyncio
import sys
import time
import types
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, cast

import pytest

from bulltask.config.settings import Settings
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
from bulltask.jobs.fields import REASON_CHARS, reason_of
from bulltask.jobs.job import JobRef
from bulltask.jobs.names import JobState, Revocation
from bulltask.jobs.payloads import PayloadCodec
from bulltask.jobs.stored_job import Finished, StoredSnapshot
from bulltask.registry.results import AsyncResult, RemoteTraceback, _rebuild
from bulltask.worker.outcomes import trace_of
from tests.support.machine_load import scale_to_load


class FailedJobReader:
    """A reader of jobs that returns one failed job."""

    def __init__(self, reason: str, *traces: str) -> None:
        self.reason, self.traces = reason, traces

    @property
    def payloads(self) -> PayloadCodec:
        return PayloadCodec(Settings({}, {}).freeze())

    def snapshot(self, ref: JobRef) -> StoredSnapshot:
        return StoredSnapshot(JobState.FAILED, None, self.reason, self.traces, progress=None, attempts_made=1)

    async def asnapshot(self, ref: JobRef) -> StoredSnapshot:
        return self.snapshot(ref)

    def call(self, ref: JobRef) -> None: ...

    def finished_states(self, refs: Sequence[JobRef]) -> list[JobState | None]:
        return [JobState.FAILED for _ in refs]

    def queue_of(self, job_id: str, queues: Sequence[str]) -> str | None:
        return None

    def forget(self, ref: JobRef) -> None: ...

    async def aforget(self, ref: JobRef) -> None: ...

    def save_group(self, queue: str, group_id: str, members: str, keep_ms: int | None) -> None: ...

    def load_group(self, queue: str, group_id: str) -> str | None:
        return None

    def forget_group(self, queue: str, group_id: str) -> None: ...

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        return Finished(False, self.reason)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        return Finished(False, self.reason)

    def revoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        return Revocation.FINISHED

    async def arevoke(self, ref: JobRef, *, terminate: bool) -> Revocation:
        return Revocation.FINISHED


def error_of_get(reason: str, *traces: str) -> BaseException:
    """Return the exception that ``get()`` raises for this stored failure."""
    with pytest.raises(Exception) as caught:  # noqa: PT011 - any exception
        AsyncResult[Any]("id-1", "mail", FailedJobReader(reason, *traces)).get()
    return caught.value


def failure_of(error: BaseException, *, notes: list[str] | None = None) -> tuple[str, str]:
    """Return reason and traceback as a worker stores them after a task raised ``error``."""
    for note in notes or ():
        error.add_note(note)
    with pytest.raises(type(error)) as caught:
        raise error
    return str(caught.value) or type(error).__name__, trace_of(caught.value)


def rebuild(error: BaseException, **options: Any) -> BaseException:
    return error_of_get(*failure_of(error, **options))


class PlainError(Exception):
    """An exception class without methods."""


class NeedsArguments(Exception):
    def __init__(self, code: int, text: str) -> None:
        self.code = code
        super().__init__(f"{code}: {text}")


class ShowsAttributes(Exception):
    def __init__(self, status: int) -> None:
        self.status = status

    def __str__(self) -> str:
        return f"status {self.status}"


class AddsPrefix(Exception):
    def __str__(self) -> str:
        return f"oh no: {self.args[0]}"


class Order:
    class DoesNotExist(Exception): ...

    nothing: Any = None


calls: list[str] = []


class RecordsCalls(Exception):
    """An exception that records calls of its constructor."""

    def __new__(cls, *args: object) -> RecordsCalls:
        calls.append("new")
        return super().__new__(cls, *args)

    def __init__(self, *args: object) -> None:
        calls.append("init")
        super().__init__(*args)


# --- rebuilt exceptions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("notes", [[], ["a note"]])
@pytest.mark.parametrize("size", [20_000, 20_000_000])
def test_an_exception_with_a_shortened_message_is_rebuilt(size: int, notes: list[str]) -> None:
    error = PlainError("begin" + size * "x" + "end")
    for note in notes:
        error.add_note(note)
    reason, trace = reason_of(error), trace_of(error)
    assert (len(reason), len(trace) < 51_000) == (REASON_CHARS, True)
    rebuilt = error_of_get(reason, trace)
    assert (type(rebuilt), str(rebuilt)) == (PlainError, reason)
    assert (reason[:5], reason[-3:]) == ("begin", "end")


def test_a_long_reason_from_node_is_parsed_quickly() -> None:
    reason = "\n".join(200_000 * ["a line (of *many*)"])
    started = time.monotonic()
    rebuilt = error_of_get(reason, f"Traceback (most recent call last):\nError: {reason}\nat worker.js:1:1")
    assert type(rebuilt) is TaskError
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
        AddsPrefix("x"),
        PermanentError("never"),
        TransientError("later", retry_after=5),
        JobExpiredError(),
    ],
    ids=repr,
)
def test_an_exception_is_rebuilt_with_its_class_and_message(error: Exception) -> None:
    rebuilt = rebuild(error)
    assert type(rebuilt) is type(error)
    assert str(error) in str(rebuilt)
    assert isinstance(rebuilt.__cause__, RemoteTraceback)
    assert "test_result_rebuild.py" in str(rebuilt.__cause__)


def test_a_rebuilt_exception_has_the_same_message() -> None:
    for error in (ValueError("x"), KeyError("x"), OSError("x"), PlainError("a\nb")):
        assert str(rebuild(error)) == str(error)
    assert rebuild(KeyError("x")).args == ("x",)


def test_an_exception_without_a_message_is_rebuilt_without_arguments() -> None:
    rebuilt = rebuild(PlainError())
    assert (type(rebuilt), rebuilt.args, str(rebuilt)) == (PlainError, (), "")


def test_an_exception_with_notes_is_rebuilt() -> None:
    rebuilt = rebuild(PlainError("boom"), notes=["in row 5", "KeyError: not this"])
    assert (type(rebuilt), str(rebuilt)) == (PlainError, "boom")
    assert "in row 5" in str(rebuilt.__cause__)


def test_a_chain_of_exceptions_is_rebuilt_as_its_last_exception() -> None:
    def chained() -> None:
        try:
            _ = dict[str, str]()["first"]
        except KeyError as first:
            raise PlainError("second") from first

    with pytest.raises(PlainError) as caught:
        chained()
    reason, trace = str(caught.value), trace_of(caught.value)
    rebuilt = error_of_get(reason, trace)
    assert (type(rebuilt), str(rebuilt)) == (PlainError, "second")
    assert "KeyError: 'first'" in str(rebuilt.__cause__)


def test_an_exception_with_a_cause_that_was_never_raised_is_rebuilt() -> None:
    error = PlainError("second")
    error.__cause__ = KeyError("first")
    assert type(rebuild(error)) is PlainError


def test_a_class_that_needs_arguments_is_rebuilt_without_calling_init() -> None:
    rebuilt = rebuild(NeedsArguments(404, "not found"))
    assert (type(rebuilt), str(rebuilt)) == (NeedsArguments, "404: not found")
    assert not hasattr(rebuilt, "code")


def test_rebuilding_runs_no_code_of_the_class_except_str() -> None:
    failure = failure_of(RecordsCalls("boom"))
    calls.clear()
    rebuilt = error_of_get(*failure)
    assert (type(rebuilt), str(rebuilt)) == (RecordsCalls, "boom")
    assert calls == []


def test_a_rebuilt_transient_error_can_be_raised_by_another_task() -> None:
    rebuilt = rebuild(TransientError("later", retry_after=timedelta(seconds=5)))
    assert isinstance(rebuilt, TransientError)
    assert rebuilt.retry_after is None


async def test_awaiting_a_result_raises_the_rebuilt_exception() -> None:
    result = AsyncResult[Any]("id-1", "mail", FailedJobReader(*failure_of(PlainError("boom"))))
    with pytest.raises(PlainError, match="boom"):
        await result
    with pytest.raises(PlainError, match="boom"):
        await result.aget(timeout=1)


def test_info_returns_the_exception_of_a_failed_job() -> None:
    result = AsyncResult[Any]("id-1", "mail", FailedJobReader(*failure_of(PlainError("boom"))))
    assert type(result.info) is PlainError
    assert (result.failed(), result.ready(), result.successful()) == (True, True, False)
    assert result.traceback is not None
    assert result.traceback.endswith("PlainError: boom\n")


# --- TaskError instead ------------------------------------------------------------------------------------------------


def task_error(reason: str, *traces: str) -> TaskError:
    rebuilt = error_of_get(reason, *traces)
    assert type(rebuilt) is TaskError
    assert (rebuilt.reason, rebuilt.job_id) == (reason, "id-1")
    assert str(rebuilt).startswith(f"job id-1: {reason}")
    return rebuilt


JS = (
    "Error: boom\n    at Worker.process (/app/worker.js:5:11)\n    at process.processTicksAndRejections (node:internal)"
)


@pytest.mark.parametrize("trace", [JS, JS.replace("Error:", "TypeError:"), JS.replace("Error:", "ValueError:")])
def test_a_javascript_error_becomes_a_task_error_with_its_stack(trace: str) -> None:
    rebuilt = task_error("boom", trace)
    assert "worker.js:5:11" in str(rebuilt)
    assert rebuilt.remote_traceback == trace


def test_a_failure_without_a_traceback_becomes_a_task_error() -> None:
    assert str(task_error("job stalled more than allowable limit")) == "job id-1: job stalled more than allowable limit"


def test_a_traceback_from_an_earlier_attempt_is_not_used_to_rebuild_the_exception() -> None:
    _, trace = failure_of(KeyError("x"))
    rebuilt = task_error("the child process running this job died (SIGKILL)", trace)
    assert "KeyError: 'x'" in str(rebuilt)


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
        f"{__name__}.Order",
        f"{__name__}.Order.nothing",
        f"{__name__}.Order.nothing.Error",
        ".".join(["x"] * 1_000_000),
    ],
)
def test_only_a_loaded_exception_class_with_exactly_this_name_is_rebuilt(name: str) -> None:
    before = set(sys.modules)
    task_error("boom", f'Traceback (most recent call last):\n  File "x", line 1, in y\n{name}: boom\n')
    assert set(sys.modules) == before


alias = ValueError
outer = PlainError("an instance, not a class")


def test_an_exception_of_a_nested_class_is_rebuilt() -> None:
    error = rebuild(Order.DoesNotExist("no order"))
    assert type(error) is Order.DoesNotExist
    assert str(error) == "no order"


def test_the_getattr_function_of_a_module_is_not_called() -> None:
    accessed: list[str] = []
    module = types.ModuleType("lazy_module_of_a_test")
    cast(Any, module).__getattr__ = accessed.append
    sys.modules[module.__name__] = module
    try:
        task_error("boom", "Traceback (most recent call last):\nlazy_module_of_a_test.SomeError: boom\n")
    finally:
        del sys.modules[module.__name__]
    assert accessed == []


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
def test_other_exceptions_become_a_task_error_with_the_traceback(
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
def test_an_exception_class_that_get_itself_raises_becomes_a_task_error(error: Exception) -> None:
    task_error(*failure_of(error))


@pytest.mark.parametrize("make", [lambda n: "x" * n, lambda n: "(" * n, lambda n: "\n" * n + "x", lambda n: "a: " * n])
def test_a_huge_message_is_parsed_quickly(make: Callable[[int], str]) -> None:
    reason = make(50_000)
    trace = f"Traceback (most recent call last):\nKeyError: {reason}\nKeyError: {reason}"
    assert isinstance(error_of_get(reason, trace), KeyError | TaskError)


# --- handles ----------------------------------------------------------------------------------------------------------


def test_handles_of_the_same_job_are_equal() -> None:
    first, same, other = (AsyncResult[Any](i, "q", FailedJobReader("")) for i in ("1", "1", "2"))
    assert first == same != other
    assert len({first, same, other}) == 2
    assert first == "1"  # its id, as in Celery
    assert first != "2"
    assert repr(first) == "<AsyncResult 1 of queue q>"


def test_a_revoked_job_raises_task_revoked_error() -> None:
    assert type(error_of_get("revoked")) is TaskRevokedError
    reason, trace = failure_of(TaskCancelled("revoked"))
    assert reason == "revoked"
    rebuilt = error_of_get(reason, trace)
    assert type(rebuilt) is TaskRevokedError
    assert "failure_of" in rebuilt.remote_traceback


@pytest.mark.parametrize("reason", ["{[]: 1}", "(" * 500, "-" * 9_000 + "1", "1" * 9_000, "[" * 90 + "]" * 90])
def test_any_text_is_the_message_of_a_rebuilt_key_error(reason: str) -> None:
    rebuilt = _rebuild(reason, f"Traceback (most recent call last):\nKeyError: {reason}\n")
    assert rebuilt is None or isinstance(rebuilt, KeyError)


def test_an_exception_of_bulltask_is_rebuilt_although_nothing_has_imported_its_public_module(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, "bulltask.errors")
    rebuilt = _rebuild("no such user", trace_of(PermanentError("no such user")))
    assert isinstance(rebuilt, PermanentError)
