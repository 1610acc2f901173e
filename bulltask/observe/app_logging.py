"""Configures logging for a worker's process, or lets the app do it: ``setup_logging``."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import sys
from collections.abc import Mapping
from typing import Any, Final, cast

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor, WrappedLogger

from bulltask.observe import log
from bulltask.observe.job_fields import add_attributes_to_handlers
from bulltask.registry.current_job import share_with_structlog
from bulltask.signals.catalog import setup_logging

__all__ = ["configure_logging", "worker_id"]

_LOGGER: Final = "bulltask.worker"
_RESERVED: Final = frozenset({*logging.makeLogRecord({}).__dict__, "message", "asctime"})
_BELOW: Final = ("traceback",)
"""Fields that are too long for the line; they follow it."""


def worker_id(name: str = "") -> str:
    """Return a unique worker id: ``{hostname}-{pid}-{random}``, preceded by ``{name}@`` if ``name`` is set."""
    identity = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(3)}"
    return f"{name}@{identity}" if name else identity


def configure_logging(*, level: str, worker_id: str) -> FilteringBoundLogger:
    """Configure logging as :func:`bulltask.observe.log.configure` does, unless ``setup_logging`` has a receiver.

    If it has, bulltask configures nothing, and its own lines are records of the logger ``bulltask.worker``, which the
    app's configuration formats. If every receiver raises, bulltask configures logging after all.

    Args:
        level: As for ``configure``.
        worker_id: Added to every line of bulltask.

    Returns:
        The logger for bulltask's lines.

    Raises:
        ConfigError: The level does not exist.
    """
    if not setup_logging.has_listeners():
        return log.configure(level=level, worker_id=worker_id)
    number, colorize = log.level_number(level), sys.stderr.isatty()
    responses = setup_logging.send(None, loglevel=number, logfile=None, format=None, colorize=colorize)
    if all(isinstance(response, Exception) for _, response in responses):
        return log.configure(level=level, worker_id=worker_id)
    add_attributes_to_handlers()
    share_with_structlog()

    def add_worker_id(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
        fields["worker_id"] = worker_id
        return fields

    processors: list[Processor] = [log.redact_fields, add_worker_id, _as_record]
    wrapper = structlog.make_filtering_bound_logger(number)
    logger = structlog.wrap_logger(logging.getLogger(_LOGGER), processors=processors, wrapper_class=wrapper)
    return cast("FilteringBoundLogger", logger.bind())


def _as_record(_: WrappedLogger, __: str, fields: EventDict) -> Mapping[str, Any]:
    """Return the arguments of a log call: the fields are part of the message, and attributes of the record."""
    event, exc_info = fields.pop("event"), fields.pop("exc_info", None)
    words = [str(event), *(f"{name}={value}" for name, value in fields.items() if name not in _BELOW)]
    below = [str(fields[name]).rstrip() for name in _BELOW if fields.get(name)]
    extra = {f"bulltask_{name}" if name in _RESERVED else name: value for name, value in fields.items()}
    return {"msg": "\n".join([" ".join(words), *below]), "extra": extra, "exc_info": exc_info}
