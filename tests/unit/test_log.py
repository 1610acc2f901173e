from __future__ import annotations

import contextvars
import io
import itertools
import json
import logging
import os
import re
import threading
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import structlog

from bulltask.errors import ConfigError
from bulltask.events import Bus
from bulltask.jobs.job import RunningJob, StoredOptions
from bulltask.observe import events
from bulltask.observe.bus import Event
from bulltask.observe.counters import MetricsListener, MetricsMemory
from bulltask.observe.events import EVENTS as EVENTS_BY_CLASS
from bulltask.observe.log import LineWriter, LogListener, configure, listener_errors
from bulltask.registry.request import enter_job
from bulltask.worker.slots import ChildLimit

WORKER = "node-1-12345-a1b2c3"
TRACEBACK = 'Traceback (most recent call last):\n  File "mail.py", line 3, in send\nValueError: no such user\n'
EVENTS: list[Event] = [
    events.JobStarted("1", "mail", "mail.send", 1),
    events.JobCompleted("1", "mail", "mail.send", 2500.0, {"sent": True}),
    events.JobFailed("1", "mail", "mail.send", 12.5, "no such user", "permanent", 1, TRACEBACK),
    events.JobRetried("1", "mail", "mail.send", 12.5, "timed out", "transient", 1, 2000),
    events.JobThrottled("1", "mail", "mail.send", 600),
    events.JobReleased("1", "mail", "mail.send", "shutdown"),
    events.JobRescheduled("1", "mail", "mail.send", 2000),
    events.JobWaitsForChildren("1", "mail", "mail.send"),
    events.JobIncompatible("1", "mail", "mail.sned", "task 'mail.sned' is not registered", 5000),
    events.SchedulingFailed("1", "mail", "nightly", "cron pattern 'x' must have 5 fields", 2000),
    events.MalformedJobFailed("1", "mail", "field opts is not valid JSON"),
    events.LockLost("1", "mail", "mail.send"),
    events.JobStalled("1", "mail", 1_700_000_000_123),
    events.JobRecovered("1", "mail", 1, 12.0),
    events.CrashLimitReached("1", "mail", 3, "the child process running this job died (SIGSEGV)"),
    events.CancelRequested("1", 0, "soft_limit"),
    events.JobRevoked("1", "mail"),
    events.HeartbeatSucceeded("mail", 10, 1.5),
    events.HeartbeatFailed("mail", ("1",), "timed out", 1),
    events.RunningJobLostLock("1", "mail"),
    events.StalledCheckSkipped("mail", 1),
    events.ServiceFailed("Recovery", 1, OverflowError("too large")),
    events.ChildStarted(0, 4711),
    events.ChildStopped(0, 4711, 1),
    events.ChildReady(0, 4711),
    events.ChildClosing(0, 4711),
    events.ChildLimitReached(0, 4711, "max_tasks_per_child", 100, 1, None),
    events.EventLoopMisused("1", "mail", "mail.send", "called loop.stop()", "/app/tasks.py:12 in send"),
    events.EventLoopStopped(4711, ("1", "2"), "SystemExit: 1"),
    events.ChildDied(0, 4711, "SIGKILL", 1),
    events.ChildKilled(0, 4711, "hard_limit", 3),
    events.ChildExited(0, 4711, "signal"),
    events.RedisDisconnected("connection refused"),
    events.RedisReconnecting(1),
    events.RedisReconnected(3, 1500.0),
    events.RedisErrorReply("mail", "WRONGTYPE"),
    events.RedisRecovered("mail", 3, 1500.0),
    events.WorkerStarted(WORKER, "shop", ("mail", "sms"), 4, "redis://***@host", (("bulltask", "1.2.3"),)),
    events.WorkerStopping("warm", 2),
    events.WorkerStopped(0, 1500),
    events.WorkerRestarting("python -m bulltask worker"),
    events.WorkerPaused(2),
    events.WorkerResumed(1500.0),
    events.ConcurrencyChanged(3, "signal"),
    events.OrderExecuted("pool_grow", '{"n": 1}', "ada@host", "shop", "it has 3 children"),
    events.OrderRejected("pool_grow", "ada@host", "shop", "the worker is stopping"),
    events.StacksDumped(1, 4711, "Current thread 0x1 (most recent call first):"),
    events.SignalIgnored("SIGUSR2", "it has no effect"),
]
KINDS = {type(event) for event in EVENTS}


def is_pytest_handler(handler: logging.Handler) -> bool:
    return type(handler).__module__.startswith("_pytest.")


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    level = root.level
    structlog.reset_defaults()
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()
    logging.captureWarnings(capture=False)
    root.handlers[:] = filter(is_pytest_handler, root.handlers)
    root.setLevel(level)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Log:
    """The output of one log configuration."""

    def __init__(self, stream: io.StringIO | None = None, *, level: str = "debug", **options: Any) -> None:
        self.stream = stream or io.StringIO()
        root = logging.getLogger()
        # configure() would treat pytest's handlers as the app's.
        root.handlers[:] = itertools.filterfalse(is_pytest_handler, root.handlers)
        self.logger = configure(level=level, worker_id=WORKER, stream=self.stream, **options)
        self.bus = Bus()
        LogListener(self.logger).attach(self.bus)

    def texts(self) -> list[str]:
        return self.stream.getvalue().splitlines()

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(text) for text in self.texts()]

    def emit(self, event: Event) -> dict[str, Any]:
        """Emit the event and return the fields of its line, without those that all lines have."""
        self.bus.emit(event)
        (line,) = self.lines()
        assert line.pop("worker_id") == WORKER
        assert line.pop("timestamp").endswith("Z")
        return line


@pytest.mark.parametrize("event", EVENTS, ids=[type(event).__name__ for event in EVENTS])
def test_every_event_can_be_logged_and_counted_as_it_is_declared(event: Event) -> None:
    log = Log()
    bus = Bus(on_error=lambda name, _, exc: pytest.fail(f"{name}: {exc!r}"))
    LogListener(log.logger).attach(bus)
    MetricsListener(MetricsMemory(["mail"], 1, ChildLimit).block(0), ["mail"]).attach(bus)
    bus.emit(event)
    (line,) = log.lines()
    assert line["event"] == EVENTS_BY_CLASS[type(event)].text


@pytest.mark.parametrize("event", EVENTS, ids=[type(event).__name__ for event in EVENTS])
def test_the_line_of_an_event_equals_the_one_that_structlogs_chain_writes(event: Event) -> None:
    fast, chain = Log(), Log()
    chain.logger._logger.as_json = False  # type: ignore[attr-defined]
    LogListener(chain.logger).attach(bus := Bus())
    fast.bus.emit(event)
    bus.emit(event)
    (text,), (expected,) = fast.texts(), chain.texts()
    time = re.compile(r'(?<="timestamp": ")[^"]+')
    assert time.sub("", text) == time.sub("", expected)


def test_at_level_warning_a_worker_that_stops_without_an_error_is_not_logged() -> None:
    log = Log(level="warning")
    log.bus.emit(events.WorkerStopped(0, 1500))
    assert log.texts() == []
    assert log.emit(events.WorkerStopped(1, 1500))["level"] == "error"


# ---- lines about jobs and connections ----


def test_a_started_job_is_logged_with_its_attempt() -> None:
    assert Log().emit(EVENTS[0]) == {
        "level": "info",
        "event": "Job started",
        "job_id": "1",
        "queue": "mail",
        "task": "mail.send",
        "attempt": 1,
    }


def test_a_completed_job_is_logged_with_its_duration_and_result() -> None:
    line = Log().emit(events.JobCompleted("1", "mail", "mail.send", 2500.0, {"sent": True}))
    assert (line["level"], line["event"]) == ("info", "Job completed")
    assert (line["duration"], line["result"]) == (2.5, "{'sent': True}")


def test_a_failed_job_is_logged_with_error_category_attempts_and_traceback() -> None:
    line = Log().emit(events.JobFailed("1", "mail", "mail.send", 12.5, "no such user", "permanent", 1, TRACEBACK))
    assert (line["level"], line["event"]) == ("error", "Job failed")
    assert (line["error"], line["category"], line["attempts_made"]) == ("no such user", "permanent", 1)
    assert line["traceback"] == TRACEBACK


def test_an_expected_failure_is_logged_as_information_without_a_traceback() -> None:
    event = events.JobFailed("1", "mail", "mail.send", 12.5, "no such user", "unknown", 1, TRACEBACK, expected=True)
    line = Log().emit(event)
    assert (line["level"], line["event"], line["error"]) == ("info", "Job failed", "no such user")
    assert "traceback" not in line


def test_a_retried_job_is_logged_with_its_delay() -> None:
    line = Log().emit(events.JobRetried("1", "mail", "mail.send", 12.5, "timed out", "transient", 1, 2000))
    assert (line["level"], line["event"]) == ("warning", "Job retried")
    assert (line["attempts_made"], line["delay"], line["error"]) == (1, 2.0, "timed out")


@pytest.mark.parametrize(("epoch_ms", "shown"), [(1_700_000_000_123, "2023-11-14T22:13:20.123Z"), (None, None)])
def test_a_stalled_job_is_logged_with_the_time_its_lock_expired(epoch_ms: int | None, shown: str | None) -> None:
    line = Log().emit(events.JobStalled("1", "mail", epoch_ms))
    assert (line["level"], line["event"], line["lock_expired_at"]) == ("warning", "Job stalled", shown)


def test_a_failed_heartbeat_is_logged_in_one_line_with_at_most_ten_job_ids() -> None:
    job_ids = tuple(map(str, range(200)))
    log = Log()
    line = log.emit(events.HeartbeatFailed("mail", job_ids, "timed out", 1))
    assert (line["level"], line["event"]) == ("warning", "Heartbeat failed")
    assert (line["queue"], line["locks"], line["error"]) == ("mail", 200, "timed out")
    assert line["job_ids"] == list(job_ids[:10])
    log.bus.emit(events.HeartbeatFailed("mail", job_ids, "timed out", 2))
    assert len(log.lines()) == 1


def test_a_lock_that_a_running_job_has_lost_is_logged_with_a_hint() -> None:
    assert Log().emit(events.RunningJobLostLock("1", "mail")) == {
        "level": "warning",
        "event": "Running job lost its lock",
        "job_id": "1",
        "queue": "mail",
        "hint": "Another worker may run the job again; the task is still running here",
    }


def test_a_rescheduled_job_is_logged_with_its_delay() -> None:
    line = Log().emit(events.JobRescheduled("1", "mail", "mail.send", 2000))
    assert (line["event"], line["delay"]) == ("Job rescheduled", 2.0)


def test_a_lost_connection_to_redis_is_logged_as_an_error() -> None:
    line = Log().emit(events.RedisDisconnected("connection refused"))
    assert (line["level"], line["event"], line["error"]) == ("error", "Redis disconnected", "connection refused")


def test_a_reconnect_to_redis_is_logged_as_info() -> None:
    line = Log().emit(events.RedisReconnected(3, 1500.0))
    assert line == {"level": "info", "event": "Redis reconnected", "attempt": 3, "duration": 1.5}


# ---- all lines ----


@pytest.mark.parametrize("as_json", [True, False])
def test_every_event_is_logged_in_one_line_with_the_worker_id(as_json: bool) -> None:
    log = Log(json=as_json)
    for number, event in enumerate(EVENTS):
        log.bus.emit(event)
        started = [text for text in log.texts() if f"{WORKER}" in text]
        assert len(started) == number + 1
    no_kinds = {"Bus", "ChildEvent", "Event", "Listener", "OnError"}
    assert {kind.__name__ for kind in KINDS} == set(events.__all__) - no_kinds


def test_warnings_and_errors_have_a_hint() -> None:
    log = Log()
    for event in EVENTS:
        log.bus.emit(event)
    # The lines of failed and retried jobs have an error instead of a hint.
    without = {line["event"] for line in log.lines() if line["level"] in {"warning", "error"} and "hint" not in line}
    assert without == {"Job failed", "Job retried"}


def test_the_table_of_log_events_has_each_warning_and_error_with_its_fields() -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "observability.md").read_text()
    table = page.partition("### Log events")[2].partition("###")[0]
    rows = [row[2:].split(" | ", 2) for row in table.splitlines()]
    meanings = {text: row[2] for row in rows if len(row) == 3 for text in row[0].split(", ")}
    log = Log()
    for event in EVENTS:
        log.bus.emit(event)
    elsewhere = {"Stacks", "Supervisor service failed", "Worker stopped", "Order rejected"}
    serious = {declared.text for declared in EVENTS_BY_CLASS.values() if declared.level >= logging.WARNING} - elsewhere
    assert serious - meanings.keys() == set()
    of_each = {"event", "level", "timestamp", "hint", "worker_id", "job_id", "queue", "task"}
    fields = {
        (line["event"], name) for line in log.lines() if line["event"] in serious for name in line.keys() - of_each
    }
    assert {(text, name) for text, name in fields if f"`{name}`" not in meanings[text]} == set()


def test_the_hint_for_a_killed_child_mentions_memory() -> None:
    assert "OOM killer" in Log().emit(events.ChildDied(0, 4711, "SIGKILL", 1))["hint"]
    counted = Log().emit(events.ChildDied(0, 4711, "SIGKILL", 1, ("a",), oom_counted=True))
    assert counted["hint"].startswith("Another process has killed it")
    assert "oom_counted" not in counted


def test_reconnects_are_logged_only_if_the_attempt_number_is_a_power_of_two() -> None:
    log = Log()
    for attempt in range(1, 5000):
        log.bus.emit(events.RedisReconnecting(attempt))
    assert [line["attempt"] for line in log.lines()] == [2**power for power in range(13)]


def test_a_worker_that_stops_with_an_error_is_logged_as_an_error() -> None:
    assert Log().emit(events.WorkerStopped(1, 1500))["level"] == "error"


def test_a_stopped_worker_is_logged_with_its_uptime_in_seconds() -> None:
    line = Log().emit(events.WorkerStopped(0, 90_250))
    assert line == {"level": "info", "event": "Worker stopped", "exit_code": 0, "uptime": 90.25}


def test_a_service_that_fails_is_logged_with_its_traceback() -> None:
    with pytest.raises(LookupError) as raised:
        fail_with(LookupError("no such lock"))
    line = Log().emit(events.ServiceFailed("Heartbeat", 1, raised.value))
    assert (line["level"], line["service"], line["failures"]) == ("error", "Heartbeat", 1)
    assert line["exception"].startswith("Traceback (most recent call last):")
    assert line["exception"].endswith("LookupError: no such lock")
    assert "exc_info" not in line


def test_a_long_result_is_shortened_without_formatting_all_of_the_value() -> None:
    class Rows(list[int]):
        """A list that would be slow to format."""

    assert len(Log().emit(events.JobCompleted("1", "mail", "t", 1.0, "x" * 10_000))["result"]) <= 200
    assert len(Log().emit(events.JobCompleted("1", "mail", "t", 1.0, Rows(range(10**6))))["result"]) <= 200


def test_a_failing_listener_is_logged_once_with_its_traceback() -> None:
    log = Log()
    bus = Bus(on_error=listener_errors(log.logger))
    bus.subscribe(events.ChildStarted, lambda _: fail_with(LookupError("no such pager")))
    for pid in (1, 2):
        bus.emit(events.ChildStarted(0, pid))
    (line,) = log.lines()
    assert (line["event"], line["level"], line["on"]) == ("Listener failed", "error", "ChildStarted")
    assert line["exception"].endswith("LookupError: no such pager")


# ---- levels ----


def test_an_event_bus_wants_no_events_below_the_log_level() -> None:
    wanted = {
        level: {kind for kind in KINDS if Log(level=level).bus.listeners[kind]}
        for level in ("debug", "info", "warning", "error", "critical")
    }
    frequent = {events.JobStarted, events.JobCompleted}
    assert wanted["debug"] == KINDS
    assert wanted["debug"] - wanted["info"] == {
        events.HeartbeatSucceeded,
        events.ChildReady,
        events.ChildClosing,
        events.JobThrottled,
    }
    assert frequent < wanted["info"]
    assert not frequent & wanted["warning"]
    assert events.JobRetried in wanted["warning"] - wanted["error"]
    assert events.JobFailed in wanted["error"]
    assert wanted["critical"] == set()


def test_an_unknown_log_level_is_rejected() -> None:
    with pytest.raises(ConfigError, match="invalid log level 'loud': use one of debug, info"):
        configure(level="loud", worker_id=None)


def test_a_log_level_is_case_insensitive() -> None:
    assert Log(level="WARNING").logger.is_enabled_for(logging.WARNING)


# ---- format ----


def test_a_pipe_gets_json_and_a_terminal_gets_colored_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    pipe, terminal = Log(), Log(Terminal())
    for log in (pipe, terminal):
        log.bus.emit(EVENTS[0])
    assert pipe.lines()[0]["event"] == "Job started"
    assert "\x1b[" in terminal.texts()[0]


def test_text_format_without_a_terminal_has_no_colors() -> None:
    log = Log(json=False)
    log.bus.emit(EVENTS[0])
    assert log.texts()[0].endswith(f"job_id=1 queue=mail task=mail.send attempt=1 worker_id={WORKER}")


def test_the_no_color_variable_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    log = Log(Terminal())
    log.bus.emit(EVENTS[0])
    assert "\x1b" not in log.stream.getvalue()


def test_a_traceback_in_text_format_follows_its_line() -> None:
    log = Log(json=False)
    log.bus.emit(events.JobFailed("1", "mail", "mail.send", 12.5, "no such user", "permanent", 1, TRACEBACK))
    first, *below = log.texts()
    assert "Job failed" in first
    assert "\n".join(below) + "\n" == TRACEBACK


def test_control_characters_in_a_job_do_not_reach_the_terminal() -> None:
    log = Log(json=False)
    log.bus.emit(events.JobRetried("\x1b[2J", "mail", "\x9b2J", 1.0, "bell\x07", "unknown", 1, 0))
    assert not set(log.stream.getvalue()) & {"\x1b", "\x9b", "\x07"}


@pytest.mark.parametrize("as_json", [True, False])
def test_no_field_can_forge_a_line_or_hide_text(as_json: bool) -> None:
    odd = "\u2028b\u202ec\u2066d\u061ce\ufefff"
    for evil in (f"a\nlevel=error event=forged{odd}", odd):
        log = Log(json=as_json)
        log.bus.emit(events.JobRetried(evil, evil, evil, 1.0, evil, "unknown", 1, 0))
        log.logger.info("odd", value=evil, nested=[evil])
        lines = log.stream.getvalue().split("\n")
        assert len(lines) == 3, lines  # the last one is empty
        assert not set(log.stream.getvalue()) & set("\u2028\u202e\u2066\u061c\ufeff")


def fail_with(error: Exception, secret: str = "") -> None:
    raise error


class Broken:
    def __repr__(self) -> str:
        raise RuntimeError


def test_any_logged_value_results_in_valid_json() -> None:
    log = Log()
    endless: list[Any] = []
    endless.append(endless)
    for value in (float("nan"), {(1, 2): 3}, endless, Broken(), object(), b"\xff", "\ud800", "a\nb"):
        log.logger.info("odd", value=value)

    def no_constants(name: str) -> None:
        raise AssertionError(f"{name} is not JSON")

    lines = [json.loads(text, parse_constant=no_constants) for text in log.texts()]
    assert len(lines) == 8
    assert all(line["worker_id"] == WORKER for line in lines)


def test_an_exception_is_logged_as_a_field_without_local_variables() -> None:
    log = Log()
    try:
        fail_with(LookupError("no such user"), secret="hunter" + "2")
    except LookupError:
        log.logger.exception("from bulltask")
    (line,) = log.lines()
    assert line["exception"].endswith("LookupError: no such user")
    assert "hunter2" not in line["exception"]


# ---- standard library loggers and structlog ----


def test_records_of_standard_library_loggers_have_the_same_format() -> None:
    log = Log(level="info")
    tasks = logging.getLogger("shop.tasks")
    tasks.info("sent %d mails", 3, extra={"order": 17})
    tasks.debug("not shown")
    (line,) = log.lines()
    assert (line["level"], line["event"], line["logger"]) == ("info", "sent 3 mails", "shop.tasks")
    assert (line["order"], line["worker_id"]) == (17, WORKER)


def test_a_malformed_log_call_is_logged_and_does_not_raise() -> None:
    log = Log()
    logging.getLogger("shop.tasks").info("sent %d mails", "three")
    (line,) = log.lines()
    assert "could not be formatted" in line["event"]
    assert line["worker_id"] == WORKER


def test_a_python_warning_is_logged() -> None:
    log = Log()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.captureWarnings(capture=True)
        warnings.warn("this will go away", UserWarning, stacklevel=1)
        logging.captureWarnings(capture=False)
    (line,) = log.lines()
    assert line["logger"] == "py.warnings"
    assert "this will go away" in line["event"]


def test_logging_configured_by_the_app_is_not_changed() -> None:
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(handler)
    log = Log()
    logging.getLogger("shop.tasks").warning("from the app")
    assert logging.getLogger().handlers == [handler]
    assert handler.stream.getvalue() == "from the app\n"
    assert log.texts() == []


def test_hijack_root_replaces_or_keeps_the_handlers_of_the_root_logger() -> None:
    handler = logging.StreamHandler(io.StringIO())
    logging.getLogger().addHandler(handler)
    Log(hijack_root=True).logger.info("from bulltask")
    assert handler not in logging.getLogger().handlers
    logging.getLogger().handlers[:] = []
    Log(hijack_root=False)
    assert logging.getLogger().handlers == []


def test_configuring_twice_does_not_duplicate_lines() -> None:
    Log()
    log = Log()
    logging.getLogger("shop.tasks").warning("once")
    structlog.get_logger().warning("once more")
    assert [line["event"] for line in log.lines()] == ["once", "once more"]


def test_structlog_in_a_task_writes_the_same_format_with_bound_values() -> None:
    log = Log()
    structlog.contextvars.bind_contextvars(job_id="7")
    structlog.get_logger().info("halfway", done=0.5)
    (line,) = log.lines()
    assert (line["job_id"], line["done"], line["worker_id"]) == ("7", 0.5, WORKER)


def test_records_that_pass_a_handler_of_the_app_have_each_field_once_in_bulltasks_line() -> None:
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("%(task_name)s[%(task_id)s] %(message)s"))
    logger = logging.getLogger("shop.tasks")
    logger.addHandler(handler)
    log = Log()
    job = RunningJob("mail", "7", "mail.send", b"{}", StoredOptions(), 0, 0, 0, 1, "", "", None)
    context = contextvars.copy_context()
    context.run(enter_job, job)
    context.run(logger.warning, "in a job", extra={"number": 1})
    context.run(logger.warning, "with its own", extra={"job_id": "mine", "task_id": 5})
    logger.warning("outside")
    logger.removeHandler(handler)
    own = ["job_id", "task", "task_id", "task_name", "number"]
    assert [{name: line[name] for name in own if name in line} for line in log.lines()] == [
        {"job_id": "7", "task": "mail.send", "number": 1},
        {"job_id": "mine", "task": "mail.send", "task_id": 5},
        {},
    ]
    formatted = ["mail.send[7] in a job", "mail.send[5] with its own", "[] outside"]
    assert handler.stream.getvalue().splitlines() == formatted


def test_structlog_configured_by_the_app_is_not_changed() -> None:
    output = io.StringIO()
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(output))
    log = Log()
    structlog.get_logger().info("from the app")
    log.logger.info("from bulltask")
    assert "from the app" in output.getvalue()
    assert [line["event"] for line in log.lines()] == ["from bulltask"]


# ---- secrets ----


@pytest.mark.parametrize("as_json", [True, False])
def test_no_log_line_contains_the_password_of_a_url(as_json: bool) -> None:
    log = Log(json=as_json)
    url = "redis://user:s3cr3t@host:6379/0"
    log.bus.emit(events.RedisDisconnected(f"Error 111 connecting to {url}"))
    log.bus.emit(events.JobFailed("1", "q", "t", 1.0, url, "unknown", 1, f"{TRACEBACK}ValueError: {url}\n"))
    log.bus.emit(events.JobCompleted("1", "q", "t", 1.0, [url]))
    log.bus.emit(events.WorkerStarted(WORKER, "shop", ("q",), 1, url, ()))
    log.logger.info("nested", config={"broker": [url]}, quoted='redis://:"s3cr3t"@host')
    try:
        fail_with(ConnectionError('unix:///sock?password="s3cr3t"'))
    except ConnectionError:
        log.logger.exception(url)
        logging.getLogger("shop").exception("%s", url)
    assert "s3cr3t" not in log.stream.getvalue()
    assert log.stream.getvalue().count("***") >= 9


# ---- LineWriter ----


@pytest.fixture
def pipe() -> Iterator[tuple[int, Any]]:
    reader, writer = os.pipe()
    with os.fdopen(writer, "w") as stream:
        yield reader, stream
    os.close(reader)


def read_all(reader: int) -> bytes:
    os.set_blocking(reader, False)
    parts = []
    try:
        while part := os.read(reader, 1 << 16):
            parts.append(part)
    except BlockingIOError:
        pass
    return b"".join(parts)


def test_a_blocked_reader_delays_the_writer_only_once(pipe: tuple[int, Any]) -> None:
    reader, stream = pipe
    lines = LineWriter(stream, lambda count: f"{count} dropped")
    lines.timeout_ms = 50
    for number in range(1000):
        lines.write(f"{number} {'x' * 1000}")  # ten times the capacity of a pipe
    dropped = lines.dropped
    assert dropped > 900
    before = read_all(reader)
    lines.write("resumed")
    lines.close()
    assert len(before) // 1000 == 1000 - dropped
    assert read_all(reader).decode().splitlines() == [f"{dropped} dropped", "resumed"]


def test_the_line_about_dropped_lines_has_the_common_format(pipe: tuple[int, Any]) -> None:
    reader, stream = pipe
    log = configure(level="info", worker_id=WORKER, stream=stream, hijack_root=False)
    sink: Any = log._logger  # type: ignore[attr-defined]
    writer: LineWriter = sink.msg.__self__
    writer.dropped = 3
    log.info("resumed")
    writer.close()
    dropped, resumed = (json.loads(text) for text in read_all(reader).splitlines())
    assert (dropped["event"], dropped["count"], dropped["level"], dropped["worker_id"]) == (
        "Log lines dropped",
        3,
        "warning",
        WORKER,
    )
    assert resumed["event"] == "resumed"


def test_a_truncated_line_does_not_corrupt_the_next_line(pipe: tuple[int, Any]) -> None:
    reader, stream = pipe
    lines = LineWriter(stream, lambda count: f"{count} dropped")
    lines.timeout_ms = 50
    lines.write("x" * 200_000)
    truncated = read_all(reader)
    lines.write("whole")
    lines.close()
    assert set(truncated) == {ord("x")}
    assert read_all(reader) == b"\n1 dropped\nwhole\n"


def test_a_closed_reader_does_not_fail_the_writer() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream:
        lines = LineWriter(stream)
        lines.write("unread")
        assert lines.dropped == 1
        lines.close()


def test_a_closed_stream_does_not_fail_the_writer() -> None:
    stream = io.StringIO()
    lines = LineWriter(stream)
    stream.close()
    lines.write("unread")
    assert lines.dropped == 1


def test_concurrent_threads_write_complete_lines(tmp_path: Any) -> None:
    with (tmp_path / "worker.log").open("w") as stream:
        lines = LineWriter(stream)
        texts = [letter * 5000 for letter in "abcd"]

        def write(text: str) -> None:
            for _ in range(100):
                lines.write(text)

        threads = [threading.Thread(target=write, args=(text,)) for text in texts]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        lines.close()
    assert sorted((tmp_path / "worker.log").read_text().splitlines()) == sorted(texts * 100)
