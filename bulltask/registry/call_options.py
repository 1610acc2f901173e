"""Options of calls: the keywords of ``apply_async`` and ``send_task``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from datetime import datetime
from typing import Any, Final

from bulltask.clock import Duration
from bulltask.errors import ConfigError
from bulltask.jobs.options import STORED, BackoffLike, Deduplication, ParentLike
from bulltask.jobs.retention import KeepJobs
from bulltask.payloads.envelope import Compression, Serializer
from bulltask.registry.celery_options import hint_for_unknown_call_option, translate_call_options
from bulltask.registry.stamping import headers_with_stamps
from bulltask.value_class import value_class

__all__ = ["CallOptions"]


@value_class(kw_only=True)
class CallOptions:
    """Options of a call (``apply_async``, ``send_task``), which override the task's.

    Attributes:
        countdown: Seconds or ``timedelta`` before the job may run.
        eta: ``datetime`` before which the job may not run; a naive ``datetime`` is UTC.
        expires: Seconds, ``timedelta`` or ``datetime`` after which a worker fails the job instead of running it.
        priority, queue, max_retries: As in :class:`bulltask.registry.task_options.TaskOptions`.
        job_id: The job's id; default: a new UUIDv7. If a job with this id exists, no job is added.
        headers: JSON value for ``self.request.headers`` in the worker.
        lifo: Run the job before those that are already waiting.
        ignore_result: As in :class:`TaskOptions`; ``None``: the task's option.
        remove_on_complete … time_limit: As in :class:`TaskOptions`.
        backoff: Delay between attempts: seconds, or ``{"type": "exponential", "delay": 1, "jitter": 0.2, "max_delay":
            3600}``; overrides the task's ``retry_backoff`` unless that is a function.
        timestamp: The job's creation time: a ``datetime``, or seconds since the epoch.
        deduplication: An id, or :class:`bulltask.jobs.options.Deduplication`. If this job is a duplicate, the call
            returns the existing job's handle.
        parent: The parent job; in a task, ``parent=self.request``.
        serializer, compression: How the arguments are serialized and compressed; for results, these are options of the
            task.
        telemetry_metadata, omit_context: Context that bullmq-otel passes from producer to worker.
    """

    countdown: Duration | None = None
    eta: datetime | None = None
    expires: Duration | datetime | None = None
    priority: int | None = None
    queue: str | None = None
    job_id: str | None = None
    headers: Mapping[str, Any] | None = None
    max_retries: int | None = None
    lifo: bool = False
    ignore_result: bool | None = None
    remove_on_complete: KeepJobs | None = None
    remove_on_fail: KeepJobs | None = None
    keep_logs: int | None = None
    stack_trace_limit: int | None = None
    size_limit: int | None = None
    fail_parent_on_failure: bool | None = None
    continue_parent_on_failure: bool | None = None
    ignore_dependency_on_failure: bool | None = None
    remove_dependency_on_failure: bool | None = None
    soft_time_limit: Duration | None = None
    time_limit: Duration | None = None
    backoff: BackoffLike | None = None
    timestamp: datetime | float | None = None
    deduplication: Deduplication | Mapping[str, Any] | str | None = None
    parent: ParentLike | None = None
    telemetry_metadata: str | None = None
    omit_context: bool | None = None
    serializer: Serializer | None = None
    compression: Compression | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CallOptions:
        """Build the options from keywords.

        Raises:
            TypeError: A name is unknown; the message lists the known names.
            ConfigError: A flag is neither true nor false.
        """
        known = {field.name for field in fields(cls)}
        if not given.keys() <= known:
            given = headers_with_stamps(translate_call_options(given))
        if unknown := sorted(set(given) - known):
            raise TypeError(f"unknown option {unknown[0]!r:.200}{hint_for_unknown_call_option(unknown[0], known)}")
        for name in ("lifo", "ignore_result"):
            if name in given and not isinstance(given[name], bool | None):
                raise ConfigError(f"{name} must be True or False, not {given[name]!r:.200}")
        return cls(**given)

    @property
    def stored(self) -> dict[str, Any]:
        """The options that have a name in BullMQ, if they are set."""
        return {name: value for name in _STORED if (value := getattr(self, name)) is not None}


_STORED: Final = tuple(field.name for field in fields(CallOptions) if field.name in STORED)
