"""The table of settings: each name, the field of :class:`bulltask.config.config.Config`, how it is read, its default.

Names are Celery's where Celery has one and BullMQ's (in snake_case) for locks and stalls. The documentation's table
(docs/settings_table.py) is made from this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from bulltask.config.parsers import (
    Parse,
    choice,
    cores,
    duration,
    entries,
    flag,
    integer,
    jitter_share,
    names_of,
    optional,
    plain_text,
    queue_name,
    retention,
    spark_settings,
    time_zone,
    url,
    worker_name,
)
from bulltask.config.rate_limits import rate_limits

__all__ = ["LOG_LEVELS", "SETTINGS", "Setting"]

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: the public name, the field of :class:`Config`, how it is read, the default, its text."""

    name: str
    field: str
    parse: Parse
    default: object
    doc: str


_S = Setting
SETTINGS: Final[Mapping[str, Setting]] = {
    row.name: row
    for row in (
        _S("broker_url", "broker_url", url, "redis://localhost:6379/0", "where Redis or Valkey is"),
        _S("prefix", "prefix", plain_text, "bull", "first part of every BullMQ key"),
        _S("queue_hash_tag", "queue_hash_tag", flag, True, "queue 'emails' is BullMQ's '{emails}' (cluster-safe)"),
        _S("redis_socket_connect_timeout", "connect_timeout_ms", duration(1), 5, "seconds to connect"),
        _S(
            "redis_socket_timeout",
            "command_timeout_ms",
            duration(1),
            10,
            "seconds a command and its whole reply may take",
        ),
        _S("broker_publish_retries", "publish_retries", integer(0, 100), 3, "resends of a send whose reply was lost"),
        _S(
            "broker_publish_timeout",
            "publish_timeout_ms",
            optional(duration(1)),
            10,
            "seconds a send may take in all, resends included",
        ),
        _S(
            "broker_connection_max_retries",
            "connection_retries",
            optional(integer(1)),
            None,
            "tries to reach a lost Redis before the worker gives up; none: it never does",
        ),
        _S("broker_reconnect_delay", "reconnect_delay_ms", duration(1), 0.1, "first pause before a reconnect"),
        _S("broker_reconnect_delay_max", "reconnect_delay_max_ms", duration(1), 3, "longest pause"),
        _S(
            "max_payload",
            "max_payload",
            integer(1),
            10_000_000,
            "bytes of JSON: of a job's data and options, of a result",
        ),
        _S("max_events", "max_events", integer(100), 10_000, "length of a queue's event stream, where none is set"),
        _S(
            "max_logs",
            "max_logs",
            optional(integer(1)),
            1_000,
            "lines a job's log keeps, where it sets none; none: all",
        ),
        _S("task_default_queue", "default_queue", queue_name, "default", "queue of tasks that name none"),
        _S("task_max_retries", "max_retries", integer(0, 1_000), 2, "retries after the first try (attempts - 1)"),
        _S("task_retry_backoff", "retry_backoff_ms", duration(), 1, "first delay of the exponential backoff"),
        _S("task_retry_backoff_max", "retry_backoff_max_ms", duration(1), 3_600, "longest delay between attempts"),
        _S(
            "backoff_strategies",
            "backoff_strategies",
            names_of,
            (),
            "names of backoff strategies that Node's workers have; a job may name these besides fixed and exponential",
        ),
        _S("task_retry_jitter", "retry_jitter", jitter_share, True, "share by which delays vary; true is 0.2"),
        _S(
            "task_soft_time_limit",
            "soft_time_limit_ms",
            optional(duration(1)),
            None,
            "seconds after which a task that still runs is told; none: never",
        ),
        _S(
            "task_time_limit",
            "time_limit_ms",
            optional(duration(1)),
            None,
            "seconds after which a task that still runs is ended; none: never",
        ),
        _S("task_unknown", "unknown_task", choice("requeue", "fail"), "requeue", "a job whose task nobody here knows"),
        _S("include", "include", names_of, (), "modules that the worker imports for their tasks"),
        _S("result_expires", "result_expires_ms", optional(duration()), 86_400, "completed jobs stay; none: always"),
        _S("result_failure_expires", "failure_expires_ms", optional(duration()), None, "the same for failed jobs"),
        _S("worker_concurrency", "concurrency", cores, "auto", "child processes; auto is one a core"),
        _S("worker_start_method", "start_method", choice("auto", "fork", "spawn"), "auto", "how children are started"),
        _S("worker_async_concurrency", "async_concurrency", integer(1, 10_000), 100, "async jobs at once in a child"),
        _S("lock_duration", "lock_ms", duration(1_000), 30, "a job's lock, renewed while its worker lives"),
        _S(
            "lock_renew_time",
            "lock_renew_ms",
            optional(duration(100)),
            None,
            "locks are renewed twice in this time; none: half of lock_duration",
        ),
        _S("stalled_interval", "stalled_interval_ms", duration(1_000), 30, "time between checks for stalled jobs"),
        _S("max_stalled_count", "max_stalled_count", integer(0, 1_000), 1, "stalls a job survives; one more fails it"),
        _S("skip_stalled_check", "skip_stalled_check", flag, False, "leave the check for stalled jobs to others"),
        _S("max_crashes", "max_crashes", integer(1, 1_000), 2, "dead children after which a job fails"),
        _S(
            "max_started_attempts",
            "max_started_attempts",
            optional(integer(1, 1_000_000)),
            None,
            "times that a job may be taken, for whatever reason; once more fails it; none: any number",
        ),
        _S("drain_delay", "drain_delay_ms", duration(100), 5, "longest wait on an empty queue before looking again"),
        _S("run_retry_delay", "run_retry_delay_ms", duration(1), 3, "longest pause after an error answer of Redis"),
        _S("worker_paused", "paused", flag, False, "start without taking jobs, until a CONT"),
        _S("shutdown_timeout", "shutdown_timeout_ms", duration(), 30, "time for running jobs at a warm stop"),
        _S("worker_name", "worker_name", worker_name, "", "name of the worker; host-pid-random6"),
        _S("limiter", "limits", optional(rate_limits), None, "most jobs that a queue starts in a time; none: no limit"),
        _S(
            "remove_on_complete",
            "keep_completed",
            optional(retention),
            None,
            "which completed jobs stay, of those that do not say it themselves; none: all",
        ),
        _S("remove_on_fail", "keep_failed", optional(retention), None, "the same for jobs that fail"),
        _S(
            "metrics_max_data_points",
            "metrics_max_data_points",
            optional(integer(1, 1_000_000)),
            None,
            "minutes of BullMQ's own metrics, in Redis; none: off",
        ),
        _S("metrics_port", "metrics_port", optional(integer(0, 65_535)), None, "port of /metrics; none: off"),
        _S("metrics_host", "metrics_host", plain_text, "127.0.0.1", "address of /metrics"),
        _S("loglevel", "log_level", choice(*LOG_LEVELS), "info", "least level that is logged"),
        _S("timezone", "timezone", time_zone, "UTC", "time zone of schedules that name none"),
        _S("spark_master", "spark_master", optional(plain_text), None, "where Spark runs; none: Spark's default"),
        _S("spark_conf", "spark_conf", optional(spark_settings), None, "Spark's settings, for tasks with spark=True"),
        _S("beat_schedule", "beat_schedule", entries, None, "what workers schedule; none: left as it is in Redis"),
    )
}
