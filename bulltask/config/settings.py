"""The table of settings: their names, fields of :class:`bulltask.config.config.Config`, parsers, defaults and help.

Names are Celery's where Celery has one, and BullMQ's in snake_case for locks and stalled jobs. The documentation's
table (docs/settings_table.py) is generated from this table.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from bulltask.config.annotations import parse_annotations
from bulltask.config.broker_settings import BROKER_SETTINGS
from bulltask.config.child_settings import CHILD_SETTINGS
from bulltask.config.parsers import (
    choice,
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
    worker_name,
)
from bulltask.config.payload_settings import PAYLOAD_SETTINGS
from bulltask.config.rate_limits import rate_limits, task_rate
from bulltask.config.routes import queue_names, routes
from bulltask.config.setting import Setting
from bulltask.jobs.retention import KEEP_FAILED

__all__ = ["LOG_LEVELS", "SETTINGS", "Setting"]

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


_S = Setting
SETTINGS: Final[Mapping[str, Setting]] = {
    row.name: row
    for row in (
        *BROKER_SETTINGS,
        *PAYLOAD_SETTINGS,
        _S(
            "max_events",
            "max_events",
            integer(100),
            10_000,
            "How many events each queue's event stream keeps, approximately. Increase it if readers of "
            "events, or `bulltask pipeline`, may be disconnected for longer.",
        ),
        _S(
            "max_logs",
            "max_logs",
            optional(integer(1)),
            1_000,
            "How many lines of a job's log are kept, the newest ones; none: all. The option `keep_logs` "
            "overrides this.",
        ),
        _S("task_default_queue", "default_queue", queue_name, "default", "Queue for tasks without a `queue` option."),
        _S(
            "task_canvas_queue",
            "canvas_queue",
            optional(queue_name),
            None,
            "Queue for the fan-out jobs of a canvas; none: the queue of a job that follows. Set it if "
            "Node.js workers process that queue, because only bulltask workers can run these jobs.",
        ),
        _S(
            "task_allow_error_cb_on_chord_header",
            "errbacks_in_chord_headers",
            flag,
            False,
            "Call the error callback of a chord for each member of its header that fails, too.",
        ),
        _S(
            "task_queues",
            "queues",
            queue_names,
            (),
            "Queues that a worker without -Q processes; none: the default queue and the queues of the app's tasks and "
            "routes.",
        ),
        _S(
            "task_annotations",
            "annotations",
            parse_annotations,
            None,
            "Options of tasks by name ('*': all tasks), to change tasks without changing their code.",
        ),
        _S(
            "task_routes",
            "routes",
            routes,
            None,
            "Which queue a task without a `queue` option uses, by name, pattern or function, as in Celery.",
        ),
        _S(
            "task_max_retries",
            "max_retries",
            integer(0, 1_000),
            2,
            "How many times a failed job is retried after its first attempt. Set it to 0 if failed jobs must not "
            "be retried; a job may still run again after a crash.",
        ),
        _S(
            "task_max_explicit_retries",
            "max_explicit_retries",
            optional(integer(0, 1_000)),
            None,
            "How many times self.retry() and autoretry_for retry a job, if neither the task nor the call sets "
            "max_retries; none: task_max_retries, or 3 (Celery's default) if that is 0.",
        ),
        _S(
            "task_retry_backoff",
            "retry_backoff_ms",
            duration(),
            1,
            "Delay before the first retry; it doubles with each further retry. Increase it if the services "
            "that tasks call need longer to recover.",
        ),
        _S("task_retry_backoff_max", "retry_backoff_max_ms", duration(1), 3_600, "Maximum delay before a retry."),
        _S(
            "backoff_strategies",
            "backoff_strategies",
            parse_names,
            (),
            "Names of the custom backoff strategies of your Node.js workers, for jobs that Python sends to them.",
        ),
        _S(
            "task_retry_jitter",
            "retry_jitter",
            jitter_fraction,
            True,
            "Fraction by which the delay before a retry varies randomly, so that jobs that failed together "
            "are not retried together; true: 0.2.",
        ),
        _S(
            "task_soft_time_limit",
            "soft_time_limit_ms",
            optional(duration(1)),
            None,
            "Time after which SoftTimeLimitExceeded is raised in a task, so that it can clean up; none: no limit.",
        ),
        _S(
            "task_time_limit",
            "time_limit_ms",
            optional(duration(1)),
            None,
            "Time after which an attempt is stopped, by killing its process if necessary; none: no limit. "
            "Set it if a task can hang.",
        ),
        _S(
            "task_default_rate_limit",
            "default_rate",
            optional(task_rate),
            None,
            "`rate_limit` of the tasks that do not set one, such as 100/m for each task; none: no limit.",
        ),
        _S(
            "task_typed",
            "typed",
            optional(flag),
            None,
            "Which type hints of tasks are enforced. true: all; false: none; none (the default): only those "
            "of types that JSON lacks, such as datetime.",
        ),
        _S(
            "convert_untyped",
            "convert_untyped",
            flag,
            False,
            "Write datetime, UUID, Decimal, bytes, sets and similar values without a type hint as strings and arrays, "
            "instead of raising EncodeError. They are not converted back.",
        ),
        _S(
            "task_always_eager",
            "always_eager",
            flag,
            False,
            "Run jobs in the process that sends them, without Redis. For tests.",
        ),
        _S(
            "task_eager_propagates",
            "eager_propagates",
            flag,
            False,
            "Raise a failed job's exception in eager mode, instead of storing it in the result.",
        ),
        _S(
            "incompatible_timeout",
            "incompatible_timeout_ms",
            optional(duration()),
            86_400,
            "How long a job waits for another worker if those that acquire it cannot run it, because they do not have "
            "its task, key or serializer, or its arguments do not match; then it fails. 0: at once; none: no limit.",
        ),
        _S(
            "imports",
            "imports",
            parse_names,
            (),
            "Modules that the worker imports before those in `include`. Celery's name, for projects that use it.",
        ),
        _S(
            "include",
            "include",
            parse_names,
            (),
            "Modules that the worker imports, so that their tasks are registered. Set it if the app's module "
            "does not import them.",
        ),
        _S(
            "result_expires",
            "result_expires_ms",
            optional(duration()),
            86_400,
            "How long completed jobs and their results are kept in Redis, for jobs that this app sends; none: forever.",
        ),
        _S(
            "result_failure_expires",
            "failure_expires_ms",
            optional(duration()),
            None,
            "How long failed jobs are kept in Redis, for jobs that this app sends; none: as remove_on_fail says.",
        ),
        *CHILD_SETTINGS,
        _S(
            "lock_duration",
            "lock_ms",
            duration(1_000),
            30,
            "Time after which a running job's lock expires if its worker does not renew it. Increase it to "
            "survive longer Redis outages; with a shorter one, the jobs of a dead worker run again sooner.",
        ),
        _S(
            "lock_renew_time",
            "lock_renew_ms",
            optional(duration(100)),
            None,
            "Twice the interval between renewals of locks, as in BullMQ; none: half of lock_duration. Rarely changed.",
        ),
        _S(
            "stalled_interval",
            "stalled_interval_ms",
            duration(1_000),
            30,
            "Interval between checks for stalled jobs. With a shorter one, the jobs of a dead worker run again sooner. "
            "The shortest interval of a queue's workers applies.",
        ),
        _S(
            "max_stalled_count",
            "max_stalled_count",
            integer(0, 1_000),
            1,
            "How many times a job may stall and run again; the next stall fails it. Increase it if workers are "
            "often killed, for example on spot instances.",
        ),
        _S(
            "skip_stalled_check",
            "skip_stalled_check",
            flag,
            False,
            "Do not check for stalled jobs. At least one worker of each queue must check, or the jobs of "
            "killed workers never run again.",
        ),
        _S(
            "worker_outbox_relay",
            "outbox_relay",
            flag,
            True,
            "Whether the worker sends the rows of the app's outboxes. Set it to false if `bulltask outbox relay` does.",
        ),
        _S(
            "max_crashes",
            "max_crashes",
            integer(1, 1_000),
            2,
            "A job fails after it has crashed this many child processes, provided it was the only job "
            "running in the last one. Increase it if processes are often killed for other reasons.",
        ),
        _S(
            "max_releases",
            "max_releases",
            optional(integer(1, 1_000_000)),
            1_000,
            "How many times in a row a task may release its job without progress, so that it runs again in less "
            "than 0.1 s; then the job fails. Progress is a wait for child jobs, or a checkpoint. none: no limit.",
        ),
        _S(
            "max_started_attempts",
            "max_started_attempts",
            optional(integer(1, 1_000_000)),
            None,
            "How many times a job may start, including attempts that end with a crash, stall or release and do "
            "not use up a retry; none: no limit.",
        ),
        _S(
            "drain_delay",
            "drain_delay_ms",
            duration(100),
            5,
            "How long one call to Redis waits for a job. Rarely changed: a new job ends the wait immediately.",
        ),
        _S(
            "run_retry_delay",
            "run_retry_delay_ms",
            duration(1),
            3,
            "Maximum delay before a worker tries again after Redis has returned an error.",
        ),
        _S(
            "worker_disable_rate_limits",
            "disable_rate_limits",
            flag,
            False,
            "Ignore the rate limits of tasks in this worker; the limiter of a queue still applies.",
        ),
        _S("worker_paused", "paused", flag, False, "Start the worker paused; the signal CONT resumes it."),
        _S(
            "shutdown_timeout",
            "shutdown_timeout_ms",
            duration(),
            30,
            "How long a warm shutdown waits for running jobs; after that, their processes are killed and the "
            "jobs are released. Set it to more than your longest job takes.",
        ),
        _S(
            "shutdown_notice",
            "shutdown_notice_ms",
            duration(),
            5,
            "How long before the end of shutdown_timeout running tasks are interrupted, so that they can clean up: "
            "WorkerShutdown is raised, and async tasks are cancelled. If it is not less than shutdown_timeout, half of "
            "that; 0: never.",
        ),
        _S(
            "worker_name",
            "worker_name",
            worker_name,
            "",
            "First part of the worker id, NAME@HOST-PID-RANDOM; none: HOST-PID-RANDOM. Set it to recognize a "
            "worker in logs and dashboards.",
        ),
        _S(
            "limiter",
            "limits",
            optional(rate_limits),
            None,
            "How many of a queue's jobs may start within a period, across all workers with this setting; "
            "none: no limit.",
        ),
        _S(
            "remove_on_complete",
            "keep_completed",
            optional(retention),
            None,
            "Retention of completed jobs that were sent without this option, mainly by Node.js; none: they are kept.",
        ),
        _S(
            "remove_on_fail",
            "keep_failed",
            optional(retention),
            KEEP_FAILED,
            "Retention of failed jobs that were sent without this option or `result_failure_expires`: by default, the "
            "newest 100,000 of a queue, for a week. false: all failed jobs are kept.",
        ),
        _S(
            "metrics_max_data_points",
            "metrics_max_data_points",
            optional(integer(1, 1_000_000)),
            None,
            "How many minutes of BullMQ's metrics are kept in Redis, for dashboards; none: no metrics.",
        ),
        _S(
            "metrics_port",
            "metrics_port",
            optional(integer(0, 65_535)),
            None,
            "Port for Prometheus metrics; none: no metrics.",
        ),
        _S(
            "metrics_host",
            "metrics_host",
            plain_text,
            "127.0.0.1",
            "Address that the metrics port listens on. Set it to 0.0.0.0 if Prometheus runs on another machine.",
        ),
        _S("loglevel", "log_level", choice(*LOG_LEVELS), "info", "Minimum level of log lines."),
        _S(
            "worker_redirect_stdouts",
            "redirect_stdouts",
            flag,
            False,
            "Log what tasks print, with the job's id, instead of writing it to stdout or stderr.",
        ),
        _S(
            "worker_redirect_stdouts_level",
            "redirect_stdouts_level",
            choice(*LOG_LEVELS),
            "warning",
            "The level of these lines.",
        ),
        _S("timezone", "timezone", time_zone, "UTC", "Time zone of schedules without a `tz` option."),
        _S(
            "spark_master",
            "spark_master",
            optional(plain_text),
            None,
            "URL of the Spark master, such as local[4], for tasks with spark=True; none: Spark's default.",
        ),
        _S(
            "spark_conf",
            "spark_conf",
            optional(spark_settings),
            None,
            "Spark settings for the session of tasks with spark=True.",
        ),
        _S(
            "beat_schedule",
            "beat_schedule",
            entries,
            None,
            "Schedules, which workers store in Redis as job schedulers when they start; none: those in Redis "
            "are not changed.",
        ),
    )
}
