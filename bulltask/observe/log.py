"""The log of a worker: one line per event, as JSON, or as text on a terminal, with the worker's id on every line.

:func:`configure_logging` sets up structlog and the standard library's ``logging`` for a process, and returns the logger
to which :class:`LogListener` writes the events, as :mod:`bulltask.observe.events` declares them. What follows are the
processors that make a line, and :class:`LineWriter`, which several processes share. Field names are snake_case;
durations and delays are in seconds, times are ISO 8601 in UTC.
"""

from __future__ import annotations

import contextlib
import json as jsonlib
import logging
import os
import re
import reprlib
import secrets
import select
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterable, Mapping
from datetime import UTC, datetime
from typing import Any, Final, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from bulltask.config.config import LOG_LEVELS
from bulltask.config.process import anonymous_file
from bulltask.config.urls import redact_text
from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import ConfigError
from bulltask.jobs.names import UNSEEN
from bulltask.observe.bus import Bus, Event, Listener, OnError
from bulltask.observe.events import EVENTS, JobCompleted, shorten
from bulltask.observe.signals import setup_logging
from bulltask.registry.request import current_job, share_with_structlog

if sys.platform != "win32":
    import fcntl

__all__ = ["NAME_CHARS", "LineWriter", "LogListener", "configure", "configure_logging", "listener_errors", "worker_id"]

NAME_CHARS: Final = 200
RESULT_CHARS: Final = 200


def worker_id(name: str = "") -> str:
    """Return a unique worker id: ``{hostname}-{pid}-{random}``, preceded by ``{name}@`` if ``name`` is set."""
    identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return f"{name}@{identity}" if name else identity


def configure_logging(*, level: str, worker_id: str, log_format: str = "auto") -> FilteringBoundLogger:
    """Configure logging as :func:`configure` does, unless ``setup_logging`` has a receiver; return bulltask's logger.

    If it has, bulltask configures nothing, and its own lines are records of the logger ``bulltask.worker``, which the
    app's configuration formats. If every receiver raises, bulltask configures logging after all.
    """
    as_json = None if log_format == "auto" else log_format == "json"
    if not setup_logging.has_listeners():
        return configure(level=level, worker_id=worker_id, json=as_json)
    number, colorize = _level_number(level), sys.stderr.isatty()
    responses = setup_logging.send(None, loglevel=number, logfile=None, format=None, colorize=colorize)
    if all(isinstance(response, Exception) for _, response in responses):
        return configure(level=level, worker_id=worker_id, json=as_json)
    add_attributes_to_handlers()
    share_with_structlog()

    def add_worker_id(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
        fields["worker_id"] = worker_id
        return fields

    processors: list[Processor] = [redact_fields, add_worker_id, _as_record]
    wrapper = structlog.make_filtering_bound_logger(number)
    logger = structlog.wrap_logger(logging.getLogger(_LOGGER), processors=processors, wrapper_class=wrapper)
    return cast("FilteringBoundLogger", logger.bind())


def configure(
    *,
    level: str,
    worker_id: str | None,
    json: bool | None = None,
    stream: TextIO | None = None,
    hijack_root: bool | None = None,
) -> FilteringBoundLogger:
    """Set up logging for this process and the children that it forks; call it once, before the first fork.

    This also sets structlog's global configuration, unless the app has already done so, so that
    ``structlog.get_logger()`` in a task writes the same lines. The returned logger, for bulltask's lines, does not
    depend on that configuration.

    Args:
        level: ``debug``, ``info``, ``warning``, ``error`` or ``critical``; case does not matter.
        worker_id: Added to every line; ``None`` outside a worker.
        json: True for JSON lines, False for text; by default JSON unless ``stream`` is a terminal. Colors are used only
            on a terminal, and not if ``NO_COLOR`` is set.
        stream: Where lines are written, by default ``sys.stderr``.
        hijack_root: Whether to write the records of the standard library's ``logging``. True: write them, and replace
            the app's handlers. False: do not. ``None`` (default): write them if the root logger has no handler.
    """
    number = _level_number(level)
    out = stream if stream is not None else sys.stderr
    terminal = out.isatty()
    as_json = not terminal if json is None else json
    context = _context(worker_id)
    renderer = _renderer(as_json, colors=terminal and "NO_COLOR" not in os.environ)
    writer = LineWriter(out, lambda count: _dropped_line(count, context, renderer))
    stack = structlog.processors.StackInfoRenderer()
    processors: list[Processor] = [structlog.contextvars.merge_contextvars, add_job_fields, *context, stack, *renderer]
    wrapper = structlog.make_filtering_bound_logger(number)
    if not structlog.is_configured() or isinstance(structlog.get_config()["logger_factory"], _Factory):
        structlog.configure(
            processors=processors,
            wrapper_class=wrapper,
            logger_factory=_Factory(writer),
            cache_logger_on_first_use=False,  # the app may still configure structlog itself
        )
    else:
        share_with_structlog()
    add_attributes_to_handlers()
    if hijack_root or (hijack_root is None and all(isinstance(h, _Bridge) for h in logging.getLogger().handlers)):
        _bridge(number, context, renderer, writer)
    sink = _Sink(writer, as_json=as_json, worker_id=worker_id)
    logger = structlog.wrap_logger(sink, processors=processors, wrapper_class=wrapper)
    return cast("FilteringBoundLogger", logger.bind())


def _level_number(level: str) -> int:
    if level.lower() not in LOG_LEVELS:
        raise ConfigError(f"invalid log level {level!r}: use one of {', '.join(LOG_LEVELS)}")
    return logging.getLevelNamesMapping()[level.upper()]


_REPR = reprlib.Repr()  # reads only the first elements, because a result may be large
_REPR.maxstring = _REPR.maxother = _REPR.maxlong = RESULT_CHARS
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _REPR.maxfrozenset = 50


class LogListener:
    """Writes the log lines of one process; ``encrypts`` says of which queues no results are logged."""

    def __init__(self, log: FilteringBoundLogger, encrypts: Callable[[str], bool] | None = None) -> None:
        self._log = log
        self._encrypts = encrypts

    def attach(self, bus: Bus) -> None:
        """Subscribe to the events that the logger's level includes, and to no others.

        Therefore, at level ``warning``, `JobCompleted` has no listener, and a child does not even create that event.
        """
        bus.subscribe_first(self._listener)

    def set_level(self, level: str, bus: Bus) -> None:
        """Change the level of this process: of its events on this bus, of bulltask's logger, and of the app's loggers.

        The levels of the standard library's loggers change only if bulltask writes their records.
        """
        number = _level_number(level)
        wrapper = structlog.make_filtering_bound_logger(number)
        # All parts of a process have the same logger, so its class changes.
        self._log.__class__ = wrapper
        if structlog.is_configured() and isinstance(structlog.get_config()["logger_factory"], _Factory):
            structlog.configure(wrapper_class=wrapper)
        root = logging.getLogger()
        if root.handlers and all(isinstance(handler, _Bridge) for handler in root.handlers):
            root.setLevel(number)
        self.attach(bus)

    def _listener(self, kind: type[Event]) -> Listener | None:
        """Return the function that writes the lines of one class of events, with all that is known in advance."""
        declared = EVENTS.get(kind)
        if declared is None or not self._log.is_enabled_for(declared.level):
            return None
        has_result = kind is JobCompleted
        write, write_info = self._writer(declared.level), self._writer(logging.INFO)
        read, hint, encrypts = declared.fields, declared.hint, self._encrypts
        when, info_if = declared.when, declared.info_if

        def write_line(event: Any) -> None:
            if when is not None and not when(event):
                return
            fields = read(event)
            if has_result:
                is_encrypted = encrypts is not None and encrypts(event.queue)
                result = "***" if is_encrypted else _REPR.repr(event.result)
                fields["result"] = result if len(result) <= RESULT_CHARS else shorten(result, RESULT_CHARS)
            if what_to_do := hint if isinstance(hint, str) else hint(event):
                fields["hint"] = what_to_do
            (write if info_if is None or not info_if(event) else write_info)(declared.text, **fields)

        return write_line

    def _writer(self, level: int) -> Callable[..., None]:
        """Return the function that writes a line with this level, given its text and fields."""
        name, sink = logging.getLevelName(level).lower(), getattr(self._log, "_logger", None)
        writer: Callable[..., None] = getattr(self._log, name)
        # Below the logger's level, its own method drops the line; the sink's would write it.
        if isinstance(sink, _Sink) and sink.as_json and self._log.is_enabled_for(level):
            return sink.event_writer(name)
        return writer


def listener_errors(log: FilteringBoundLogger) -> OnError:
    """Return a function for ``Bus(on_error=…)`` that logs the exceptions that listeners raise."""

    def report(listener: str, event: Event, exc: Exception) -> None:
        log.error(
            "Listener failed",
            listener=listener,
            on=type(event).__name__,
            exc_info=exc,
            hint="Further failures of this listener for this event are not logged",
        )

    return report


class _Bridge(logging.Handler):
    """Writes a record of the standard library in the same format."""

    def __init__(self, formatter: logging.Formatter, writer: LineWriter) -> None:
        super().__init__()
        self.setFormatter(formatter)
        self._writer = writer

    def emit(self, record: logging.LogRecord) -> None:
        try:
            line = self.format(record)
        except Exception as exc:  # noqa: BLE001 - as in logging itself, an invalid log call must not fail a task
            record = logging.makeLogRecord(record.__dict__)
            record.msg = f"A log call could not be formatted: {record.msg!r} ({type(exc).__name__}: {exc})"
            record.args = record.exc_info = None
            line = self.format(record)
        self._writer.write(line)


def _bridge(level: int, context: list[Processor], renderer: list[Processor], writer: LineWriter) -> None:
    formatter = structlog.stdlib.ProcessorFormatter(
        foreign_pre_chain=[
            structlog.contextvars.merge_contextvars,
            structlog.stdlib.add_logger_name,
            structlog.stdlib.ExtraAdder(),
            drop_job_attributes,
            add_job_fields,
            _trim,
            *context,
        ],
        processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *renderer],
    )
    root = logging.getLogger()
    root.handlers[:] = [_Bridge(formatter, writer)]
    root.setLevel(level)
    logging.captureWarnings(capture=True)


def _trim(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    fields["event"] = str(fields["event"]).rstrip("\n")  # messages from the warnings module end with a newline
    return fields


_ADDED = "bulltask_attributes"


class JobAttributes(logging.Filter):
    """Gives every record the attributes ``job_id``, ``task_id`` (the same) and ``task_name``, ``""`` outside of a job.

    A filter rather than a record factory: with a factory, ``extra={"job_id": …}`` in a log call would raise an error.
    Attributes that a record already has are kept.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        """Add the attributes; no record is dropped."""
        if not hasattr(record, _ADDED):
            job = current_job()
            job_id, task = ("", "") if job is None else (job.id, job.name)
            values = {"job_id": job_id, "task_id": job_id, "task_name": task}
            missing = {name: value for name, value in values.items() if not hasattr(record, name)}
            record.__dict__.update(missing)
            setattr(record, _ADDED, tuple(missing))
        return True


def add_attributes_to_handlers() -> None:
    """Add :class:`JobAttributes` to all handlers that the app has configured so far."""
    root = logging.getLogger()
    for logger in (root, *root.manager.loggerDict.values()):
        for handler in logger.handlers if isinstance(logger, logging.Logger) else ():
            if not any(isinstance(existing, JobAttributes) for existing in handler.filters):
                handler.addFilter(JobAttributes())


def drop_job_attributes(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Drop what :class:`JobAttributes` has added for another handler, because the line already has these fields."""
    for name in (*fields.pop(_ADDED, ()),):
        del fields[name]
    return fields


_LOGGER: Final = "bulltask.worker"
_RESERVED: Final = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime"})
_BELOW: Final = ("traceback",)
"""Fields that are too long for the line; they follow it."""


def _as_record(_: WrappedLogger, __: str, fields: EventDict) -> Mapping[str, Any]:
    """Return the arguments of a log call: the fields are part of the message, and attributes of the record."""
    event, exc_info = fields.pop("event"), fields.pop("exc_info", None)
    words = [str(event), *(f"{name}={value}" for name, value in fields.items() if name not in _BELOW)]
    below = [str(fields[name]).rstrip() for name in _BELOW if fields.get(name)]
    extra = {f"bulltask_{name}" if name in _RESERVED else name: value for name, value in fields.items()}
    return {"msg": "\n".join([" ".join(words), *below]), "extra": extra, "exc_info": exc_info}


class _Sink:
    """The last part of structlog's chain, which receives the rendered line."""

    def __init__(self, writer: LineWriter, *, as_json: bool = False, worker_id: str | None = None) -> None:
        self.as_json = as_json
        self._worker_id = worker_id
        self.msg = self.log = writer.write
        self.debug = self.info = self.warn = self.warning = writer.write
        self.error = self.exception = self.failure = self.err = self.critical = self.fatal = writer.write

    def event_writer(self, level: str) -> Callable[..., None]:
        """Return a function that writes an event's line as JSON.

        It does what structlog's chain does, in about half of the time: a child writes two such lines for each job.
        """
        first = {"timestamp": "", "level": level, "event": ""}
        if self._worker_id is not None:
            first["worker_id"] = self._worker_id
        write_text = self.msg

        def write(text: str, **fields: Any) -> None:
            line: EventDict = {**first, **fields}
            line["event"] = text
            line["timestamp"] = datetime.now(UTC).isoformat().replace("+00:00", "Z")
            structlog.contextvars.merge_contextvars(None, level, line)
            if "job_id" not in line or "task" not in line:
                add_job_fields(None, level, line)
            if "exc_info" in line:
                structlog.processors.format_exc_info(None, level, line)
            write_text(_to_json(redact_fields(None, level, line)))

        return write


class _Factory:
    """Returns structlog's sink; its class distinguishes bulltask's configuration from the app's."""

    def __init__(self, writer: LineWriter) -> None:
        self._sink = _Sink(writer)

    def __call__(self, *_: object) -> _Sink:
        return self._sink


def _context(worker_id: str | None) -> list[Processor]:
    """Return the processors that add the fields of every line."""

    def add_worker_id(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
        if worker_id is not None:
            fields.setdefault("worker_id", worker_id)
        return fields

    return [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True), add_worker_id]


def add_job_fields(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Add ``job_id`` and ``task`` (a processor of structlog)."""
    if (job := current_job()) is not None:
        fields.setdefault("job_id", job.id)
        fields.setdefault("task", job.name)
    return fields


def _renderer(as_json: bool, *, colors: bool) -> list[Processor]:
    """Return the processors that render a line, without its newline."""
    before: list[Processor] = [structlog.processors.format_exc_info, redact_fields]
    if as_json:
        return [*before, _render_json]
    # structlog's default shows local variables in tracebacks; these may contain passwords and personal data.
    plain = structlog.dev.plain_traceback
    return [
        *before,
        _for_terminals,
        structlog.dev.ConsoleRenderer(colors=colors, exception_formatter=plain, sort_keys=False),
    ]


_NAMES = frozenset({"job_id", "queue", "scheduler", "task"})  # Redis sets no limit, and any client may have chosen them


def redact_fields(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Replace passwords in URLs, and shorten names and ids (a processor)."""
    for key in _NAMES & fields.keys():
        if isinstance(name := fields[key], str) and len(name) > NAME_CHARS:
            fields[key] = shorten(name, NAME_CHARS)
    if job_ids := fields.get("job_ids"):
        fields["job_ids"] = [shorten(str(job_id), NAME_CHARS) for job_id in job_ids]
    for key, value in fields.items():
        if isinstance(value, str) and "://" in value:
            fields[key] = redact_text(value)
    return fields


# Without this, characters in a job's data could manipulate the operator's terminal (ESC), end the line (U+2028) or
# reverse the text after them (U+202E).
_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{UNSEEN}]")


def _for_terminals(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    if traceback := fields.pop("traceback", None):
        fields.setdefault("exception", str(traceback).rstrip())
    if "hint" in fields:
        fields["hint"] = fields.pop("hint")  # last, where it is easiest to see
    for key, value in fields.items():
        if isinstance(value, str) and not (value.isascii() and value.isprintable()):
            fields[key] = _CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), value)
    return fields


def _render_json(_: WrappedLogger, __: str, fields: EventDict) -> str:
    first = {key: fields.pop(key) for key in ("timestamp", "level", "event", "worker_id") if key in fields}
    return _to_json({**first, **fields})


def _to_json(line: Mapping[str, Any]) -> str:
    try:
        return _encode(line)
    except (TypeError, ValueError, RecursionError):  # NaN, a key that is not a string, a circular reference
        return jsonlib.dumps({str(key): _plain(value) for key, value in line.items()})


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, str | int) else _safe_repr(value)


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as exc:  # noqa: BLE001 - user code; a broken repr() must not lose the line
        return f"<{type(value).__name__}: its repr() raised {type(exc).__name__}>"


_encode: Final = jsonlib.JSONEncoder(default=_safe_repr, allow_nan=False).encode


def _dropped_line(count: int, context: Iterable[Processor], renderer: Iterable[Processor]) -> str:
    fields: Any = {"event": "Log lines dropped", "count": count, "hint": "The reader of this worker's log was blocked"}
    for step in (*context, *renderer):
        fields = step(None, "warning", fields)
    return str(fields)


ATOMIC = 4096  # PIPE_BUF of Linux: a pipe that polls as writable accepts this much without blocking


class LineWriter:
    """Writes log lines that are never mixed with those of other processes, and never block the worker for long.

    A write of more than 4 KiB to a pipe may be mixed with other processes' lines, and in a container every traceback is
    written to a pipe. Therefore, while a writer writes a line, it holds a lock that all forks share: create it before
    the fork. It also removes passwords from URLs.

    A reader that stops (``| less``, a stuck log shipper) would block the supervisor, which would renew no locks, and
    every running job would run twice. Therefore, a line waits for about a second at most; after that, it and the
    following lines are dropped until the reader continues. Then the writer first writes a line with the number of
    dropped lines, from ``dropped_line``.

    It writes to the stream's file descriptor if it has one (without buffering), else with the stream's ``write``.
    """

    timeout_ms = 1000

    def __init__(self, stream: TextIO, dropped_line: Callable[[int], str] = "{} log lines were dropped".format) -> None:
        self._stream = stream
        self._dropped_line = dropped_line
        self._fd = _descriptor(stream)
        # True for a pipe, a socket or a terminal. The kernel writes a line to a file atomically, without blocking.
        self._may_block = self._fd is not None and not stat.S_ISREG(os.fstat(self._fd).st_mode)
        # The kernel releases the lock when its holder dies. Without it, long lines may be mixed.
        self._lock_fd = None
        if self._may_block:
            with contextlib.suppress(OSError):
                self._lock_fd = anonymous_file("bulltask-log-lock")
        self._lock_stuck = False
        if self._fd is not None and self._may_block:
            self._writable = select.poll()
            self._writable.register(self._fd, select.POLLOUT)
        self._enter_process()

    def _enter_process(self) -> None:
        self._pid = os.getpid()
        self._threads = threading.RLock()  # a file lock is per process; reentrant for signal handlers
        self._late = False  # the previous line was dropped: do not wait again
        self._torn = False  # the previous line was only partially written
        self.dropped = 0
        """The number of lines dropped since the last line that was written."""

    def close(self) -> None:
        """Close the lock's file; the stream stays open."""
        if self._lock_fd is not None:
            os.close(self._lock_fd)
            self._lock_fd = None

    def write(self, line: str) -> None:
        """Write ``line`` and a newline, or drop it if that takes longer than about a second. Never raises."""
        text = redact_text(line, json=True) if "://" in line else line
        if self._pid != os.getpid():  # one of the parent's threads may have held the lock
            self._enter_process()
        if not self._threads.acquire(timeout=self.timeout_ms / 1000):
            self.dropped += 1
            return
        try:
            self._write(text)
        except (OSError, ValueError):  # closed, or a full disk; neither must fail a job
            self.dropped += 1
        finally:
            self._threads.release()

    def _write(self, text: str) -> None:
        if self._fd is None:
            self._stream.write(f"{text}\n")
            self._stream.flush()
            return
        lines = [self._dropped_line(self.dropped), text, ""] if self.dropped else [text, ""]
        if self._torn:
            lines.insert(0, "")
        data = "\n".join(lines).encode(errors="backslashreplace")
        sent = self._send(self._fd, data) if self._may_block else os.write(self._fd, data)
        self._late = sent < len(data)
        self._torn = self._late and sent > 0
        self.dropped = self.dropped + 1 if self._late else 0

    def _send(self, fd: int, data: bytes) -> int:
        """Write ``data`` in parts that do not block; return the number of bytes written before the deadline."""
        sent, deadline = 0, mono_s() + self.timeout_ms / 1000
        locked = self._acquire_lock(deadline)
        try:
            while sent < len(data):
                timeout = 0.0 if self._late else max(0.0, deadline - mono_s())
                if not self._writable.poll(timeout * 1000):
                    break
                with contextlib.suppress(BlockingIOError):  # another process that shares the stream has set O_NONBLOCK
                    sent += os.write(fd, data[sent : sent + ATOMIC])
        finally:
            if locked and self._lock_fd is not None:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_UN)
        return sent

    def _acquire_lock(self, deadline: float) -> bool:
        """Wait for the lock until the deadline, because a process that was stopped (SIGSTOP) may hold it.

        A line without the lock may be mixed with others, but a supervisor that waits would lose its jobs' locks.
        """
        if self._lock_fd is None:
            return False
        while True:
            try:
                fcntl.lockf(self._lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except (BlockingIOError, PermissionError):
                if self._lock_stuck or mono_s() >= deadline:
                    self._lock_stuck = True  # the next line does not wait
                    return False
                select.select([], [], [], 0.001)  # file locks have no wait with a timeout
            else:
                self._lock_stuck = False
                return True


def _descriptor(stream: TextIO) -> int | None:
    if sys.platform == "win32":  # without a worker, no processes share the stream
        return None
    try:
        return stream.fileno()
    except (OSError, ValueError, AttributeError):  # io.StringIO, pytest's capture, sys.stderr of a daemon
        return None
