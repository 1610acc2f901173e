"""The table of settings: their names, fields of :class:`bulltask.config.config.Config`, parsers, defaults and help.

Names are Celery's where Celery has one, and BullMQ's in snake_case for locks and stalled jobs. The documentation's
table (docs/settings_table.py) is generated from this table.
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
    jitter_fraction,
    optional,
    parse_names,
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
    """A row of the table: the public name, the field of :class:`Config`, its parser, the default, the help text."""

    name: str
    field: str
    parse: Parse
    default: object
    doc: str


_S = Setting
SETTINGS: Final[Mapping[str, Setting]] = {
    row.name: row
    for row in (
        _S("broker_url", "broker_url", url, "redis://localhost:6379/0", "URL of the Redis or Valkey server"),
        _S("prefix", "prefix", plain_text, "bull", "prefix of all Redis keys"),
        _S(
            "queue_hash_tag",
            "queue_hash_tag",
            flag,
            True,
            "store queue 'emails' as BullMQ's '{emails}' (for Redis Cluster)",
        ),
        _S("redis_socket_connect_timeout", "connect_timeout_ms", duration(1), 5, "timeout for connecting"),
        _S(
            "redis_socket_timeout",
            "command_timeout_ms",
            duration(1),
            10,
            "timeout for a command and its whole reply",
        ),
        _S("broker_publish_retries", "publish_retries", integer(0, 100), 3, "retries of a send whose reply was lost"),
        _S(
            "broker_publish_timeout",
            "publish_timeout_ms",
            optional(duration(1)),
            10,
            "timeout for a send including its retries",
        ),
        _S(
            "broker_connection_max_retries",
            "connection_retries",
            optional(integer(1)),
            None,
            "reconnect attempts before the worker gives up; none: unlimited",
        ),
        _S("broker_reconnect_delay", "reconnect_delay_ms", duration(1), 0.1, "first delay before reconnecting"),
        _S("broker_reconnect_delay_max", "reconnect_delay_max_ms", duration(1), 3, "maximum delay before reconnecting"),
        _S(
            "max_payload",
            "max_payload",
            integer(1),
            10_000_000,
            "maximum bytes of a job's data and options as JSON, and of a result",
        ),
        _S(
            "max_events",
            "max_events",
            integer(100),
            10_000,
            "event stream retention: events per queue, unless the queue sets it",
        ),
        _S(
            "max_logs",
            "max_logs",
            optional(integer(1)),
            1_000,
            "maximum lines in a job's log, unless the job sets it; none: unlimited",
        ),
        _S("task_default_queue", "default_queue", queue_name, "default", "queue of tasks that do not set one"),
        _S("task_max_retries", "max_retries", integer(0, 1_000), 2, "maximum retries of a job (attempts - 1)"),
        _S("task_retry_backoff", "retry_backoff_ms", duration(), 1, "first delay of the exponential backoff"),
        _S("task_retry_backoff_max", "retry_backoff_max_ms", duration(1), 3_600, "maximum delay between attempts"),
        _S(
            "backoff_strategies",
            "backoff_strategies",
            parse_names,
            (),
            "names of custom backoff strategies of Node workers, which jobs may use besides fixed and exponential",
        ),
        _S(
            "task_retry_jitter",
            "retry_jitter",
            jitter_fraction,
            True,
            "random variation of delays, as a fraction; true is 0.2",
        ),
        _S(
            "task_soft_time_limit",
            "soft_time_limit_ms",
            optional(duration(1)),
            None,
            "soft time limit of tasks; none: no limit",
        ),
        _S(
            "task_time_limit",
            "time_limit_ms",
            optional(duration(1)),
            None,
            "hard time limit of tasks; none: no limit",
        ),
        _S(
            "task_unknown",
            "unknown_task",
            choice("requeue", "fail"),
            "requeue",
            "requeue: reschedule a job whose task is not registered; fail: fail it",
        ),
        _S("include", "include", parse_names, (), "modules that the worker imports to register their tasks"),
        _S(
            "result_expires",
            "result_expires_ms",
            optional(duration()),
            86_400,
            "retention stored in the jobs that this app sends, if they complete; none: forever",
        ),
        _S(
            "result_failure_expires",
            "failure_expires_ms",
            optional(duration()),
            None,
            "retention stored in the jobs that this app sends, if they fail; none: forever",
        ),
        _S("worker_concurrency", "concurrency", cores, "auto", "number of child processes; auto: one per core"),
        _S("worker_start_method", "start_method", choice("auto", "fork", "spawn"), "auto", "start method of children"),
        _S(
            "worker_async_concurrency",
            "async_concurrency",
            integer(1, 10_000),
            100,
            "maximum concurrent async jobs per child",
        ),
        _S("lock_duration", "lock_ms", duration(1_000), 30, "duration of a job's lock; its worker renews it"),
        _S(
            "lock_renew_time",
            "lock_renew_ms",
            optional(duration(100)),
            None,
            "locks are renewed at half this interval; none: half of lock_duration",
        ),
        _S("stalled_interval", "stalled_interval_ms", duration(1_000), 30, "interval of the check for stalled jobs"),
        _S(
            "max_stalled_count",
            "max_stalled_count",
            integer(0, 1_000),
            1,
            "a job fails if it stalls more often than this",
        ),
        _S("skip_stalled_check", "skip_stalled_check", flag, False, "do not check for stalled jobs"),
        _S(
            "max_crashes",
            "max_crashes",
            integer(1, 1_000),
            2,
            "a job fails after this many crashes of the process running it",
        ),
        _S(
            "max_started_attempts",
            "max_started_attempts",
            optional(integer(1, 1_000_000)),
            None,
            "maximum number of starts of a job, for any reason; none: unlimited",
        ),
        _S("drain_delay", "drain_delay_ms", duration(100), 5, "maximum blocking wait on an empty queue"),
        _S("run_retry_delay", "run_retry_delay_ms", duration(1), 3, "maximum retry delay after Redis returns an error"),
        _S("worker_paused", "paused", flag, False, "start paused, until the worker receives CONT"),
        _S(
            "shutdown_timeout",
            "shutdown_timeout_ms",
            duration(),
            30,
            "time that running jobs have to finish at a warm shutdown",
        ),
        _S("worker_name", "worker_name", worker_name, "", "name of the worker; none: host-pid-random6"),
        _S("limiter", "limits", optional(rate_limits), None, "rate limit of job starts, per queue; none: no limit"),
        _S(
            "remove_on_complete",
            "keep_completed",
            optional(retention),
            None,
            "this worker's retention of completed jobs sent without one, e.g. by Node.js; none: all are kept",
        ),
        _S(
            "remove_on_fail",
            "keep_failed",
            optional(retention),
            None,
            "this worker's retention of failed jobs sent without one, e.g. by Node.js; none: all are kept",
        ),
        _S(
            "metrics_max_data_points",
            "metrics_max_data_points",
            optional(integer(1, 1_000_000)),
            None,
            "minutes of BullMQ's metrics to keep in Redis; none: off",
        ),
        _S(
            "metrics_port", "metrics_port", optional(integer(0, 65_535)), None, "port for Prometheus metrics; none: off"
        ),
        _S("metrics_host", "metrics_host", plain_text, "127.0.0.1", "address to bind the metrics port to"),
        _S("loglevel", "log_level", choice(*LOG_LEVELS), "info", "minimum log level"),
        _S("timezone", "timezone", time_zone, "UTC", "time zone of schedules that do not set one"),
        _S("spark_master", "spark_master", optional(plain_text), None, "Spark's master; none: Spark's default"),
        _S("spark_conf", "spark_conf", optional(spark_settings), None, "Spark settings for tasks with spark=True"),
        _S("beat_schedule", "beat_schedule", entries, None, "job schedules; none: those in Redis are not changed"),
    )
}
