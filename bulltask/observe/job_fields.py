"""Adds the current job to log lines: as fields, or as attributes for the handlers of an app."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from structlog.typing import EventDict, WrappedLogger

from bulltask.registry.current_job import current_job

__all__ = ["JobAttributes", "add_attributes_to_handlers", "add_job_fields", "drop_job_attributes"]

_ADDED = "bulltask_attributes"


def add_job_fields(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Add ``job_id`` and ``task`` (a processor of structlog)."""
    if (job := current_job()) is not None:
        fields.setdefault("job_id", job.id)
        fields.setdefault("task", job.name)
    return fields


def drop_job_attributes(_: WrappedLogger, __: str, fields: EventDict) -> EventDict:
    """Drop what :class:`JobAttributes` has added for another handler, because the line already has these fields."""
    for name in (*fields.pop(_ADDED, ()),):
        del fields[name]
    return fields


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
    for handler in _handlers():
        if not any(isinstance(existing, JobAttributes) for existing in handler.filters):
            handler.addFilter(JobAttributes())


def _handlers() -> Iterator[logging.Handler]:
    root = logging.getLogger()
    for logger in (root, *root.manager.loggerDict.values()):
        if isinstance(logger, logging.Logger):
            yield from logger.handlers
