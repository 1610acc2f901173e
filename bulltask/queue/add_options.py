"""The options of ``Queue.add``, and the job that is built from them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, TypedDict

import uuid_utils

from bulltask.clock import Duration, to_epoch_ms, to_ms
from bulltask.config.config import Config
from bulltask.errors import ConfigError
from bulltask.jobs import codec
from bulltask.jobs.backoff import Backoff
from bulltask.jobs.job import JobOptions, NewJob
from bulltask.jobs.names import check_job_id, check_job_name
from bulltask.jobs.options import (
    BackoffLike,
    Deduplication,
    ParentLike,
    check_priority,
    check_size,
    link_to_parent,
    stored_options,
)
from bulltask.jobs.retention import KeepJobs
from bulltask.jobs.time_limits import TimeLimits
from bulltask.payloads.payload_codec import PayloadCodec

__all__ = ["AddOptions", "BulkJob", "build_job", "check_bulk_jobs", "check_options", "check_positive"]


class AddOptions(TypedDict, total=False):
    """Options of a job: BullMQ's, and a few of bulltask's.

    Durations are seconds or ``timedelta``. ``None`` is the same as leaving an option out, except for ``backoff``, where
    it means to retry immediately.

    Attributes:
        attempts: Maximum number of attempts (default: the app's ``task_max_retries`` + 1, which is 3; in Node, one
            attempt).
        backoff: Delay between attempts: seconds, or ``{"type": "exponential", "delay": 1, "jitter": 0.2, "max_delay":
            3600}``. ``type`` may be the name of a custom strategy that the workers define. Default: the app's setting.
        delay: Time before the job may run.
        priority: 0 for none (runs before all jobs with a priority), otherwise 1 (first) to 2,097,151 (last).
        lifo: Put the job at the front of the waiting list.
        timestamp: When the job was created: a ``datetime``, or seconds since the epoch.
        job_id: The job's id (default: a new UUIDv7). If a job with this id exists, nothing is added.
        remove_on_complete, remove_on_fail: Retention of the finished job: ``True`` removes it, ``False`` keeps it, a
            number keeps the newest jobs, ``{"age": seconds, "count": n}`` keeps jobs up to that age and at most ``n``.
            Default: the app's ``result_expires`` (a day) and ``result_failure_expires`` (forever).
        keep_logs: Maximum number of lines in its log; 0: no limit (default: the setting ``max_logs``, 1,000).
        stack_trace_limit: How many tracebacks of failed attempts are kept.
        size_limit: Maximum size of its data as JSON, in bytes; checked before the job is sent.
        deduplication: An id, or :class:`bulltask.jobs.options.Deduplication`.
        parent: The job that waits for this job.
        fail_parent_on_failure, continue_parent_on_failure, ignore_dependency_on_failure,
            remove_dependency_on_failure: How this job's failure affects its parent; at most one of them.
        telemetry_metadata, omit_context: Context that bullmq-otel passes from producer to worker.
        expires: Duration, or a ``datetime``, after which a bulltask worker fails the job instead of running it.
        headers: JSON object for ``self.request.headers`` in bulltask tasks.
        soft_time_limit, time_limit: Time limits of an attempt in a bulltask worker.
    """

    attempts: int
    backoff: BackoffLike | None
    delay: Duration
    priority: int
    lifo: bool
    timestamp: datetime | float
    job_id: str | None
    remove_on_complete: KeepJobs
    remove_on_fail: KeepJobs
    keep_logs: int
    stack_trace_limit: int
    size_limit: int
    deduplication: Deduplication | Mapping[str, Any] | str
    parent: ParentLike | None
    fail_parent_on_failure: bool
    continue_parent_on_failure: bool
    ignore_dependency_on_failure: bool
    remove_dependency_on_failure: bool
    telemetry_metadata: str
    omit_context: bool
    expires: Duration | datetime
    headers: Mapping[str, Any]
    soft_time_limit: Duration
    time_limit: Duration


class _Named(TypedDict):
    name: str


class BulkJob(_Named, total=False):
    """A job of ``add_bulk``: name, data and options."""

    data: Any
    options: AddOptions


def check_bulk_jobs(jobs: Iterable[BulkJob]) -> list[BulkJob]:
    """Return the jobs of ``add_bulk`` in a list.

    Raises:
        TypeError: A job has no name, or an unknown key, such as BullMQ's ``opts``, whose value would be lost.
    """
    checked, known = list(jobs), BulkJob.__annotations__
    for job in checked:
        if unknown := sorted(set(job) - set(known)):
            raise TypeError(f"unknown key {unknown[0]!r:.200} of a job in add_bulk; use {', '.join(known)}")
        if "name" not in job:
            raise TypeError("a job in add_bulk has no 'name'")
    return checked


def check_options(options: Mapping[str, Any]) -> None:
    """Check that all options are known.

    Raises:
        TypeError: An option is unknown; the message lists the known options.
    """
    known = AddOptions.__annotations__
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(f"unknown option {unknown[0]!r:.200}; use {', '.join(sorted(known))}")


def build_job(queue: str, name: str, data: Any, options: Mapping[str, Any], config: Config) -> NewJob:
    """Check a job's name, data and options and return the job as it will be sent, without sending it.

    Args:
        queue: The queue's name in the app.
        name: The job's name; a bulltask worker runs the task with that name.
        data: Plain JSON.
        options: See :class:`AddOptions`.
        config: Supplies the defaults.

    Raises:
        TypeError: An option is unknown.
        EncodeError, PayloadTooLargeError, InvalidNameError, ConfigError: Data, name or an option is invalid.
    """
    check_options(options)
    stored = stored_options(options, config.backoff_strategies)
    parent = link_to_parent(options.get("parent"), stored, prefix=config.prefix, hash_tag=config.queue_hash_tag)
    encoded = PayloadCodec(config).dump_job_data(data, queue, name, f"the data of job {name}")
    job_options = _job_options(name, options, stored, config)
    check_size(encoded, job_options, config.max_payload, f"the data of job {name}")
    job_id, timestamp_ms = options.get("job_id"), stored.get("timestamp")
    return NewJob(
        queue=queue,
        id=str(uuid_utils.uuid7()) if job_id is None else check_job_id(job_id),
        name=check_job_name(name),
        data=encoded,
        options=job_options,
        parent=parent,
        timestamp_ms=timestamp_ms if isinstance(timestamp_ms, int) else None,
        has_custom_id=job_id is not None,
    )


def check_positive(value: int, name: str) -> int:
    """Return ``value`` if it is a positive integer.

    Raises:
        ConfigError: It is not an integer of 1 or more.
    """
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value!r:.200}")
    return value


def _job_options(name: str, options: Mapping[str, Any], stored: Mapping[str, object], config: Config) -> JobOptions:
    delay, headers, expires = options.get("delay"), options.get("headers"), options.get("expires")
    at = isinstance(expires, datetime)
    limits = TimeLimits.of(options.get("soft_time_limit"), options.get("time_limit"))
    limits.check(f"job {name}")
    return JobOptions(
        attempts=_attempts(options.get("attempts"), config),
        backoff=None if "backoff" in options else _default_backoff(config),
        delay_ms=0 if delay is None else to_ms(delay, "delay"),
        priority=check_priority(options.get("priority")),
        lifo=_flag(options.get("lifo"), "lifo"),
        keep_completed_ms=config.result_expires_ms,
        keep_failed_ms=config.failure_expires_ms,
        expires_in_ms=None if expires is None or at else to_ms(expires, "expires"),
        expires_ms=to_epoch_ms(expires, "expires") if isinstance(expires, datetime) else None,
        time_limits=limits,
        sender=config.sender,
        headers="" if not headers else codec.encode(headers, what=f"headers of job {name}").decode(),
        more=stored,
    )


def _attempts(value: object, config: Config) -> int:
    if value is None:
        return config.max_retries + 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ConfigError(f"attempts must be an integer of 0 or more, not {value!r:.200}")
    return value


def _default_backoff(config: Config) -> Backoff:
    return Backoff("exponential", config.retry_backoff_ms, config.retry_jitter, config.retry_backoff_max_ms)


def _flag(value: object, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r:.200}")
    return bool(value)
