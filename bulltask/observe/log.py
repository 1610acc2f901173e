"""Configures structlog for a worker: one line per event, with the worker's id on every line.

On a terminal, lines are readable text (``key=value``, tracebacks below); otherwise they are JSON objects. Times are in
UTC. The records that tasks log with the standard library's ``logging`` get the same format, unless the app has
configured logging itself.
"""

from __future__ import annotations

import json as jsonlib
import logging
import os
import re
import sys
from collections.abc import Iterable
from typing import Any, TextIO, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from bulltask.config.urls import redact_text
from bulltask.errors import ConfigError
from bulltask.jobs.names import UNSEEN
from bulltask.observe.job_fields import add_attributes_to_handlers, add_job_fields, drop_job_attributes
from bulltask.observe.log_listener import LogListener
from bulltask.observe.log_values import NAME_CHARS, shorten
from bulltask.observe.writer import LineWriter
from bulltask.registry.current_job import share_with_structlog

__all__ = ["LogListener", "configure", "level_number", "redact_fields"]

LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
    "critical": logging.CRITICAL,
}
# Without this, characters in a job's data could manipulate the operator's terminal (ESC), end the line (U+2028) or
# reverse the text after them (U+202E).
_CONTROL = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{UNSEEN}]")
_NAMES = frozenset({"job_id", "queue", "scheduler", "task"})  # Redis sets no limit, and any client may have chosen them


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
    ``structlog.get_logger()`` in a task writes the same lines.

    Args:
        level: ``debug``, ``info``, ``warning``, ``error`` or ``critical``; case does not matter.
        worker_id: Added to every line; ``None`` outside a worker.
        json: True for JSON lines, False for text; by default JSON unless ``stream`` is a terminal. Colors are used
            only on a terminal, and not if ``NO_COLOR`` is set.
        stream: Where lines are written, by default ``sys.stderr``.
        hijack_root: Whether to write the records of the standard library's ``logging``. True: write them, and replace
            the app's handlers. False: do not. ``None`` (default): write them if the root logger has no handler.

    Returns:
        The logger for bulltask's lines; it does not depend on the global configuration.

    Raises:
        ConfigError: The level does not exist.
    """
    number = level_number(level)
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
    logger = structlog.wrap_logger(_Sink(writer), processors=processors, wrapper_class=wrapper)
    return cast("FilteringBoundLogger", logger.bind())


def level_number(level: str) -> int:
    """Return the standard library's number of a level.

    Raises:
        ConfigError: The level does not exist.
    """
    number = LEVELS.get(level.lower())
    if number is None:
        raise ConfigError(f"invalid log level {level!r}: use one of {', '.join(LEVELS)}")
    return number


class _Sink:
    """The last part of structlog's chain, which receives the rendered line."""

    def __init__(self, writer: LineWriter) -> None:
        self.msg = self.log = writer.write
        self.debug = self.info = self.warn = self.warning = writer.write
        self.error = self.exception = self.failure = self.err = self.critical = self.fatal = writer.write


class _Factory:
    """Returns structlog's sink; its class distinguishes bulltask's configuration from the app's."""

    def __init__(self, writer: LineWriter) -> None:
        self._sink = _Sink(writer)

    def __call__(self, *_: object) -> _Sink:
        return self._sink


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


def _context(worker_id: str | None) -> list[Processor]:
    """Return the processors that add the fields of every line."""

    def add_worker_id(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
        if worker_id is not None:
            fields.setdefault("worker_id", worker_id)
        return fields

    return [structlog.processors.add_log_level, structlog.processors.TimeStamper(fmt="iso", utc=True), add_worker_id]


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


def redact_fields(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Replace passwords in URLs, and shorten names and ids (a processor)."""
    for key in _NAMES & fields.keys():
        if isinstance(name := fields[key], str):
            fields[key] = shorten(name, NAME_CHARS)
    if job_ids := fields.get("job_ids"):
        fields["job_ids"] = [shorten(str(job_id), NAME_CHARS) for job_id in job_ids]
    for key, value in fields.items():
        if isinstance(value, str) and "://" in value:
            fields[key] = redact_text(value)
    return fields


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
    line = {**first, **fields}
    try:
        return jsonlib.dumps(line, default=_safe_repr, allow_nan=False)
    except (TypeError, ValueError, RecursionError):  # NaN, a key that is not a string, a circular reference
        return jsonlib.dumps({str(key): _plain(value) for key, value in line.items()})


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, str | int) else _safe_repr(value)


def _safe_repr(value: object) -> str:
    try:
        return repr(value)
    except Exception as exc:  # noqa: BLE001 - user code; a broken repr() must not lose the line
        return f"<{type(value).__name__}: its repr() raised {type(exc).__name__}>"


def _dropped_line(count: int, context: Iterable[Processor], renderer: Iterable[Processor]) -> str:
    fields: Any = {"event": "Log lines dropped", "count": count, "hint": "The reader of this worker's log was blocked"}
    for step in (*context, *renderer):
        fields = step(None, "warning", fields)
    return str(fields)
