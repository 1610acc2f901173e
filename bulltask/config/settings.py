"""The table of settings: their names, fields of :class:`bulltask.config.config.Config`, parsers, defaults and help.

Names are Celery's where Celery has one, and BullMQ's in snake_case for locks and stalled jobs. The documentation's
table (docs/settings_table.py) is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bulltask.config.annotations import parse_annotations
from bulltask.config.child_settings import CHILD_SETTINGS
from bulltask.config.credentials import credential_provider
from bulltask.config.parsers import (
    choice,
    duration,
    entries,
    flag,
    integer,
    jitter_fraction,
    max_reconnects,
    optional,
    parse_names,
    plain_text,
    queue_name,
    retention,
    spark_settings,
    time_zone,
    worker_name,
)
from bulltask.config.payload_settings import PAYLOAD_SETTINGS
from bulltask.config.rate_limits import rate_limits, task_rate
from bulltask.config.routes import queue_names, routes
from bulltask.config.server_urls import url
from bulltask.config.setting import Setting

__all__ = ["LOG_LEVELS", "SETTINGS", "Setting"]

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


_S = Setting
SETTINGS: Final[Mapping[str, Setting]] = {
    row.name: row
    for row in (
        _S("broker_url", "broker_url", url, "redis://localhost:6379/0", "URL of the Redis or Valkey server"),
        _S(
            "broker_credential_provider",
            "credentials",
            optional(credential_provider),
            None,
            "where the Redis password (and user) are read from each time a connection is opened, instead of "
            "broker_url: an object with get_credentials(), as in redis-py, a function, or a file that contains the "
            "password; none: broker_url",
        ),
        _S("prefix", "prefix", plain_text, "bull", "prefix of all Redis keys, as in BullMQ"),
        _S(
            "queue_hash_tag",
            "queue_hash_tag",
            flag,
            True,
            "store queue 'emails' in Redis as '{emails}', so that a Redis Cluster keeps its keys on one node",
        ),
        _S("redis_socket_connect_timeout", "connect_timeout_ms", duration(1), 5, "timeout for connecting to Redis"),
        _S(
            "redis_socket_timeout",
            "command_timeout_ms",
            duration(1),
            10,
            "timeout for a Redis command, until its whole reply has been read",
        ),
        _S(
            "broker_publish_retries",
            "publish_retries",
            integer(0, 100),
            3,
            "maximum number of retries of a send, if Redis is unavailable or the reply is lost; with sentinels or a "
            "cluster, the default is 100",
        ),
        _S(
            "broker_publish_timeout",
            "publish_timeout_ms",
            optional(duration(1)),
            10,
            "timeout for a send, including its retries; none: no timeout; with sentinels or a cluster, the default is "
            "60",
        ),
        _S(
            "broker_publish_replicas",
            "publish_replicas",
            integer(0, 100),
            0,
            "how many replicas must have received the jobs before a send returns (Redis' WAIT); 0: none",
        ),
        _S(
            "broker_connection_max_retries",
            "connection_retries",
            max_reconnects,
            None,
            "maximum number of attempts to reconnect to Redis before the worker exits; none or 0: no limit",
        ),
        _S(
            "broker_reconnect_delay",
            "reconnect_delay_ms",
            duration(1),
            0.1,
            "delay before the first attempt to reconnect; it doubles after each attempt",
        ),
        _S(
            "broker_reconnect_delay_max",
            "reconnect_delay_max_ms",
            duration(1),
            3,
            "maximum delay between attempts to reconnect",
        ),
        _S(
            "max_payload",
            "max_payload",
            integer(1),
            10_000_000,
            "maximum size of a job's data and options, and of a result, in bytes as stored",
        ),
        *PAYLOAD_SETTINGS,
        _S(
            "max_events",
            "max_events",
            integer(100),
            10_000,
            "approximate number of events that each queue's event stream keeps",
        ),
        _S(
            "max_logs",
            "max_logs",
            optional(integer(1)),
            1_000,
            "how many lines of a job's log are kept (keep_logs overrides this); none: all",
        ),
        _S("task_default_queue", "default_queue", queue_name, "default", "queue for tasks without a `queue` option"),
        _S(
            "task_canvas_queue",
            "canvas_queue",
            optional(queue_name),
            None,
            "queue for the fan-out jobs of a canvas, which only bulltask workers can run; none: the queue of a job "
            "that follows",
        ),
        _S(
            "task_queues",
            "queues",
            queue_names,
            (),
            "queues of a worker without -Q; none: the default queue and the queues of its tasks",
        ),
        _S("task_annotations", "annotations", parse_annotations, None, "options of tasks by name; '*': all tasks"),
        _S("task_routes", "routes", routes, None, "queues for tasks without a `queue` option, as in Celery"),
        _S(
            "task_max_retries",
            "max_retries",
            integer(0, 1_000),
            2,
            "maximum number of retries of a failed job, after its first attempt",
        ),
        _S(
            "task_max_requested_retries",
            "max_requested_retries",
            optional(integer(0, 1_000)),
            None,
            "how many times a task may request a retry, with self.retry() or autoretry_for, if neither the task nor "
            "the call sets max_retries; none: same as task_max_retries, but 3 (Celery's default) if that is 0",
        ),
        _S(
            "task_retry_backoff",
            "retry_backoff_ms",
            duration(),
            1,
            "delay before the first retry; it doubles with each further retry",
        ),
        _S("task_retry_backoff_max", "retry_backoff_max_ms", duration(1), 3_600, "maximum delay before a retry"),
        _S(
            "backoff_strategies",
            "backoff_strategies",
            parse_names,
            (),
            "names of custom backoff strategies that jobs for Node.js workers may use, besides fixed and exponential",
        ),
        _S(
            "task_retry_jitter",
            "retry_jitter",
            jitter_fraction,
            True,
            "fraction by which the delay before a retry varies randomly; true: 0.2",
        ),
        _S(
            "task_soft_time_limit",
            "soft_time_limit_ms",
            optional(duration(1)),
            None,
            "time after which SoftTimeLimitExceeded is raised in a task; none: no limit",
        ),
        _S(
            "task_time_limit",
            "time_limit_ms",
            optional(duration(1)),
            None,
            "time after which a running task is stopped, by killing its process if necessary; none: no limit",
        ),
        _S(
            "task_default_rate_limit",
            "default_rate",
            optional(task_rate),
            None,
            "`rate_limit` of each task that does not set one: the maximum rate at which its jobs start, such as 100/m; "
            "none: no limit",
        ),
        _S(
            "task_typed",
            "typed",
            optional(flag),
            None,
            "which type hints of tasks are enforced; true: all hints; false: no hints; none (the default): only "
            "those of types that JSON lacks, such as datetime",
        ),
        _S("task_always_eager", "always_eager", flag, False, "run jobs in the process that sends them, without Redis"),
        _S("task_eager_propagates", "eager_propagates", flag, False, "raise a failed job's exception in eager mode"),
        _S(
            "task_unknown",
            "task_unknown",
            choice("reschedule", "fail"),
            "reschedule",
            "what happens to a job whose task is not registered; reschedule: it is delayed, so that another "
            "worker can run it; fail: it fails",
        ),
        _S("imports", "imports", parse_names, (), "modules that the worker imports before those in `include`"),
        _S(
            "include", "include", parse_names, (), "modules that the worker imports, so that their tasks are registered"
        ),
        _S(
            "result_expires",
            "result_expires_ms",
            optional(duration()),
            86_400,
            "how long completed jobs and their results are kept, if this app sent them; none: forever",
        ),
        _S(
            "result_failure_expires",
            "failure_expires_ms",
            optional(duration()),
            None,
            "how long failed jobs are kept, if this app sent them; none: forever",
        ),
        *CHILD_SETTINGS,
        _S(
            "lock_duration",
            "lock_ms",
            duration(1_000),
            30,
            "time after which a running job's lock expires if its worker does not renew it",
        ),
        _S(
            "lock_renew_time",
            "lock_renew_ms",
            optional(duration(100)),
            None,
            "twice the interval at which locks are renewed, as in BullMQ; none: half of lock_duration",
        ),
        _S(
            "stalled_interval",
            "stalled_interval_ms",
            duration(1_000),
            30,
            "interval between checks for stalled jobs, whose lock has expired",
        ),
        _S(
            "max_stalled_count",
            "max_stalled_count",
            integer(0, 1_000),
            1,
            "how many times a job may stall and run again; the next stall fails it",
        ),
        _S("skip_stalled_check", "skip_stalled_check", flag, False, "do not check for stalled jobs"),
        _S(
            "worker_outbox_relay", "outbox_relay", flag, True, "start a relay that sends the rows of the app's outboxes"
        ),
        _S(
            "max_crashes",
            "max_crashes",
            integer(1, 1_000),
            2,
            "a job fails after it has crashed this many child processes, provided it was the only job running in the"
            " last one",
        ),
        _S(
            "max_started_attempts",
            "max_started_attempts",
            optional(integer(1, 1_000_000)),
            None,
            "maximum number of times a job may start, including attempts that do not use up a retry (after a crash,"
            " stall or release); none: unlimited",
        ),
        _S(
            "drain_delay",
            "drain_delay_ms",
            duration(100),
            5,
            "maximum time that one call to Redis waits for a job",
        ),
        _S(
            "run_retry_delay",
            "run_retry_delay_ms",
            duration(1),
            3,
            "maximum delay before a worker tries again after Redis has returned an error",
        ),
        _S(
            "worker_disable_rate_limits",
            "disable_rate_limits",
            flag,
            False,
            "ignore the rate limits of tasks in this worker; the limiter of a queue still applies",
        ),
        _S("worker_paused", "paused", flag, False, "start the worker paused; the signal CONT resumes it"),
        _S(
            "shutdown_timeout",
            "shutdown_timeout_ms",
            duration(),
            30,
            "how long a warm shutdown waits for running jobs; then their processes are killed, and the jobs are "
            "released",
        ),
        _S(
            "worker_name",
            "worker_name",
            worker_name,
            "",
            "the first part of the worker id, which is name@host-pid-random; none: host-pid-random",
        ),
        _S(
            "limiter",
            "limits",
            optional(rate_limits),
            None,
            "maximum rate at which a queue's jobs start, across all workers with this setting; none: no limit",
        ),
        _S(
            "remove_on_complete",
            "keep_completed",
            optional(retention),
            None,
            "retention of completed jobs that were sent without this option, mainly by Node.js; none: all are kept",
        ),
        _S(
            "remove_on_fail",
            "keep_failed",
            optional(retention),
            None,
            "retention of failed jobs that were sent without this option, mainly by Node.js; none: all are kept",
        ),
        _S(
            "metrics_max_data_points",
            "metrics_max_data_points",
            optional(integer(1, 1_000_000)),
            None,
            "number of minutes for which BullMQ's metrics are kept in Redis; none: no metrics",
        ),
        _S(
            "metrics_port",
            "metrics_port",
            optional(integer(0, 65_535)),
            None,
            "port for Prometheus metrics; none: no metrics",
        ),
        _S("metrics_host", "metrics_host", plain_text, "127.0.0.1", "address to bind the metrics port to"),
        _S("loglevel", "log_level", choice(*LOG_LEVELS), "info", "minimum level of log lines"),
        _S("timezone", "timezone", time_zone, "UTC", "time zone for schedules without a `tz` option"),
        _S(
            "spark_master",
            "spark_master",
            optional(plain_text),
            None,
            "URL of the Spark master, such as local[4]; none: Spark's default",
        ),
        _S(
            "spark_conf",
            "spark_conf",
            optional(spark_settings),
            None,
            "Spark settings for the session of tasks with spark=True",
        ),
        _S(
            "beat_schedule",
            "beat_schedule",
            entries,
            None,
            "schedules, which workers store in Redis as job schedulers; none: those in Redis are not changed",
        ),
    )
}
