"""``Config``: the settings of an app and its workers. Each setting is declared here, once, as a field.

A declaration names the setting, and has its parser, its default, its help text, and its option of ``bulltask worker``,
if any. The rest follows: the attribute of ``app.conf`` and the environment variable (:mod:`bulltask.config.settings`),
the options of the command line, the types for editors (``make sync`` writes ``setting_types.py``), and the tables in
the documentation (docs/settings_table.py writes them).

Names are Celery's where Celery has one (:mod:`bulltask.config.celery_settings` has those without a setting here), and
BullMQ's in snake_case for locks and stalled jobs. Durations are seconds or ``timedelta`` for the user, and integer
milliseconds here (``_ms``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import field, fields
from typing import Any, Final, NamedTuple

from bulltask.config.parsers import (
    JOB_BUCKETS,
    Annotations,
    Autoscale,
    Limits,
    Parse,
    Routes,
    TaskRate,
    accepted_serializers,
    autoscale,
    buckets,
    choice,
    compression,
    cores,
    duration,
    entries,
    flag,
    integer,
    jitter_fraction,
    key_prefix,
    keys_by_queue,
    max_reconnects,
    memory,
    optional,
    parse_annotations,
    parse_names,
    plain_text,
    queue_name,
    queue_names,
    rate_limits,
    retention,
    routes,
    serializer,
    signing_keys,
    spark_settings,
    task_rate,
    time_zone,
    worker_name,
    worker_pool,
)
from bulltask.config.urls import Credentials, SecretUrl, credential_provider, url
from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import ConfigError, check_installed
from bulltask.jobs.fields import KEEP_FAILED, TimeLimits
from bulltask.jobs.names import EVERY_QUEUE
from bulltask.jobs.payloads import CLOUDPICKLE, JSON, PayloadSettings, SecretKey, check_compression

__all__ = [
    "LOG_FORMATS",
    "LOG_LEVELS",
    "SETTINGS",
    "Config",
    "Flag",
    "Setting",
    "check_config",
    "check_payload_options",
    "check_serializer",
]

LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")
LOG_FORMATS: Final = ("auto", "text", "json")


class Flag(NamedTuple):
    """An option of ``bulltask worker`` that sets a setting.

    Attributes:
        names: Its names, such as ``"-c --concurrency"``.
        help: Its help text.
        type: The type of its value; ``bool`` for an option without a value, a tuple for one of these words.
        metavar: The value in the help text, by default that of the type.
    """

    names: str
    help: str
    type: type[int | float | bool] | tuple[str, ...] | None = None
    metavar: str | None = None


@value_class
class Setting:
    """A declared setting; ``field`` of :class:`Config` has its parsed value.

    Attributes:
        default: The default, as a user would write it.
        doc: The help text in the documentation.
        celery_name: Celery's name for it, if that is another one.
        is_secret: Whether its value is not shown.
    """

    name: str
    field: str
    parse: Parse
    default: object
    doc: str
    flag: Flag | None
    celery_name: str
    is_secret: bool


def setting(  # noqa: PLR0913 - all that a setting has
    name: str,
    parse: Parse,
    default: object,
    doc: str,
    flag: Flag | None = None,
    *,
    celery_name: str = "",
    is_secret: bool = False,
) -> Any:
    """Declare a setting; the attributes of :class:`Setting` describe the arguments."""
    declared = {"name": name, "parse": parse, "default": default, "doc": doc, "flag": flag}
    return field(repr=not is_secret, metadata={**declared, "celery_name": celery_name, "is_secret": is_secret})


@value_class(kw_only=True)
class Config(PayloadSettings):
    """The parsed, immutable settings of an app and its workers, from ``Settings.freeze``."""

    sender: str = ""
    """The app and the host, which sent jobs name; not a setting."""

    # ---- the connection to Redis -------------------------------------------------------------------------------------

    broker_url: SecretUrl = setting("broker_url", url, "redis://localhost:6379/0", "URL of the Redis or Valkey server.")
    credentials: Credentials | None = setting(
        "broker_credential_provider",
        optional(credential_provider),
        None,
        "Where the Redis password comes from, if it changes: a file, a function or a provider, read for "
        "each connection. none: broker_url.",
    )
    prefix: str = setting(
        "prefix",
        key_prefix,
        "bull",
        "Prefix of all Redis keys. Change it to that of your Node.js programs, or to separate "
        "environments in one database.",
    )
    queue_hash_tag: bool = setting(
        "queue_hash_tag",
        flag,
        True,
        "Whether queue 'emails' is stored as '{emails}', for a Redis Cluster. Set it to false if your "
        "Node.js programs name queues without braces.",
    )
    connect_timeout_ms: int = setting(
        "redis_socket_connect_timeout",
        duration(1),
        5,
        "Timeout for connecting to Redis. Increase it if connecting takes seconds, for example across regions.",
        celery_name="broker_connection_timeout",
    )
    command_timeout_ms: int = setting(
        "redis_socket_timeout",
        duration(1),
        10,
        "Timeout for a Redis command, until its whole reply has been read. Increase it for very large results.",
    )
    publish_retries: int = setting(
        "broker_publish_retries",
        integer(0, 100),
        3,
        "How many times a send is retried if Redis is unavailable or the reply is lost. With Sentinel or "
        "a cluster, the default is 100.",
    )
    publish_timeout_ms: int | None = setting(
        "broker_publish_timeout",
        optional(duration(1)),
        10,
        "How long a send may take, with its retries; none: no limit. Reduce it in web requests. With "
        "Sentinel or a cluster, the default is 60.",
    )
    publish_replicas: int = setting(
        "broker_publish_replicas",
        integer(0, 100),
        0,
        "How many replicas must have a job before a send returns. Set it if a failover must not lose jobs.",
    )
    connection_retries: int | None = setting(
        "broker_connection_max_retries",
        max_reconnects,
        None,
        "How many times a worker tries to reconnect before it exits; none or 0: no limit.",
    )
    reconnect_delay_ms: int = setting(
        "broker_reconnect_delay",
        duration(1),
        0.1,
        "Delay before a worker's first attempt to reconnect. It doubles after each attempt.",
    )
    reconnect_delay_max_ms: int = setting(
        "broker_reconnect_delay_max",
        duration(1),
        3,
        "Maximum delay between attempts to reconnect.",
    )
    max_payload: int = setting(
        "max_payload",
        integer(1),
        10_000_000,
        "Maximum size of a job's data and options, and of a result, in bytes. Rather than increase it, "
        "pass a file name.",
    )

    # ---- payloads ----------------------------------------------------------------------------------------------------

    task_serializer: str = setting(
        "task_serializer",
        serializer,
        JSON,
        "Serializer of arguments, for tasks and calls without `serializer`.",
    )
    result_serializer: str = setting(
        "result_serializer", serializer, JSON, "Serializer of results and exceptions, for tasks without `serializer`."
    )
    accept_content: tuple[str, ...] = setting(
        "accept_content",
        accepted_serializers,
        (JSON,),
        "Serializers of the arguments that a worker loads. cloudpickle needs payload_signing_keys.",
    )
    result_accept_content: tuple[str, ...] | None = setting(
        "result_accept_content",
        optional(accepted_serializers),
        None,
        "Serializers of the results and exceptions that get() and the next step of a canvas load; none: those in "
        "accept_content.",
    )
    task_compression: str | None = setting(
        "task_compression",
        optional(compression),
        None,
        "Compression of arguments; zstd needs bulltask[zstd]. Set it if arguments are large.",
    )
    result_compression: str | None = setting(
        "result_compression",
        optional(compression),
        None,
        "Compression of results; zstd needs bulltask[zstd]. Set it if results are large.",
    )
    compression_threshold: int = setting(
        "compression_threshold", integer(0), 4_096, "Minimum size of a payload that is compressed, in bytes."
    )
    max_decompressed: int = setting(
        "max_decompressed",
        integer(1),
        100_000_000,
        "Maximum size of a compressed payload after decompression, in bytes.",
    )
    max_decompressed_tokens: int = setting(
        "max_decompressed_tokens",
        integer(1),
        5_000_000,
        "Maximum number of JSON tokens in a compressed payload after decompression. Each may take 80 bytes of memory.",
    )
    signing_keys: tuple[SecretKey, ...] = setting(
        "payload_signing_keys",
        signing_keys,
        None,
        "Keys that sign pickles. The first key signs, and all keys verify, so you can replace a key.",
    )
    encryption_keys: Mapping[str, tuple[SecretKey, ...]] = setting(
        "payload_encryption_keys",
        keys_by_queue,
        None,
        "Keys that encrypt arguments and results, by queue ('*': all others). A queue's first key "
        "encrypts, and all decrypt.",
    )

    # ---- queues and tasks --------------------------------------------------------------------------------------------

    max_events: int = setting(
        "max_events",
        integer(100),
        10_000,
        "How many events a queue's event stream keeps, approximately. Increase it if readers may be "
        "disconnected for longer.",
    )
    max_logs: int | None = setting(
        "max_logs",
        optional(integer(1)),
        1_000,
        "How many lines of a job's log are kept, the newest ones; none: all. The option `keep_logs` overrides it.",
    )
    default_queue: str = setting(
        "task_default_queue", queue_name, "default", "Queue for tasks without a `queue` option."
    )
    canvas_queue: str | None = setting(
        "task_canvas_queue",
        optional(queue_name),
        None,
        "Queue for the fan-out jobs of a canvas, which only bulltask can run; none: that of the following "
        "job. Set it if Node.js workers process that.",
    )
    errbacks_in_chord_headers: bool = setting(
        "task_allow_error_cb_on_chord_header",
        flag,
        False,
        "Call the error callback of a chord for each member of its header that fails, too.",
    )
    queues: tuple[str, ...] = setting(
        "task_queues",
        queue_names,
        (),
        "Queues that a worker without -Q processes; none: the default queue and those of the app's tasks and routes.",
    )
    annotations: Annotations | None = setting(
        "task_annotations",
        parse_annotations,
        None,
        "Options of tasks by name ('*': all tasks), to change tasks without changing their code.",
    )
    routes: Routes | None = setting(
        "task_routes",
        routes,
        None,
        "Which queue a task without a `queue` option uses, by name, pattern or function, as in Celery.",
    )
    max_retries: int = setting(
        "task_max_retries",
        integer(0, 1_000),
        2,
        "How many times a failed job is retried after its first attempt. 0: not at all, except after a crash.",
    )
    max_explicit_retries: int | None = setting(
        "task_max_explicit_retries",
        optional(integer(0, 1_000)),
        None,
        "How many times self.retry() and autoretry_for retry, if neither task nor call sets max_retries; "
        "none: task_max_retries, or 3 if that is 0.",
    )
    retry_backoff_ms: int = setting(
        "task_retry_backoff",
        duration(),
        1,
        "Delay before the first retry; it doubles with each further retry.",
    )
    retry_backoff_max_ms: int = setting("task_retry_backoff_max", duration(1), 3_600, "Maximum delay before a retry.")
    backoff_strategies: tuple[str, ...] = setting(
        "backoff_strategies",
        parse_names,
        (),
        "Custom backoff strategies of your Node.js workers, for jobs that Python sends to them.",
    )
    retry_jitter: float = setting(
        "task_retry_jitter",
        jitter_fraction,
        True,
        "Fraction by which the delay before a retry varies randomly; true: 0.2.",
    )
    soft_time_limit_ms: int | None = setting(
        "task_soft_time_limit",
        optional(duration(1)),
        None,
        "Time after which SoftTimeLimitExceeded is raised in a task; none: no limit.",
        Flag(
            "--soft-time-limit",
            "Raise SoftTimeLimitExceeded in a task after this many seconds (default: no limit).",
            float,
        ),
    )
    time_limit_ms: int | None = setting(
        "task_time_limit",
        optional(duration(1)),
        None,
        "Time after which an attempt is stopped, if necessary by killing its process; none: no limit. Set "
        "it if a task can hang.",
        Flag(
            "--time-limit",
            "End a task after this many seconds, if necessary by killing its process (default: no limit).",
            float,
        ),
    )
    default_rate: TaskRate | None = setting(
        "task_default_rate_limit",
        optional(task_rate),
        None,
        "`rate_limit` of the tasks that do not set one, such as 100/m for each task; none: no limit.",
    )
    typed: bool | None = setting(
        "task_typed",
        optional(flag),
        None,
        "Which type hints are enforced. true: all; false: none; none (the default): those of types that "
        "JSON lacks, such as datetime.",
    )
    convert_untyped: bool = setting(
        "convert_untyped",
        flag,
        False,
        "Write datetime, UUID, Decimal, bytes and sets without a type hint as strings and arrays, instead "
        "of raising EncodeError. They are not converted back.",
    )
    always_eager: bool = setting(
        "task_always_eager", flag, False, "Run jobs in the process that sends them, without Redis. For tests."
    )
    eager_propagates: bool = setting(
        "task_eager_propagates",
        flag,
        False,
        "Raise a failed job's exception in eager mode, instead of storing it in the result.",
    )
    incompatible_timeout_ms: int | None = setting(
        "incompatible_timeout",
        optional(duration()),
        86_400,
        "How long a job waits for a worker that can run it (task, key, serializer, arguments); then it "
        "fails. 0: at once; none: no limit.",
    )
    imports: tuple[str, ...] = setting(
        "imports",
        parse_names,
        (),
        "Celery's name for `include`; these modules are imported first.",
    )
    include: tuple[str, ...] = setting(
        "include",
        parse_names,
        (),
        "Modules that the worker imports, so that their tasks are registered.",
    )

    # ---- results -----------------------------------------------------------------------------------------------------

    result_expires_ms: int | None = setting(
        "result_expires",
        optional(duration()),
        86_400,
        "How long completed jobs and their results are kept, for jobs that this app sends; none: forever.",
    )
    failure_expires_ms: int | None = setting(
        "result_failure_expires",
        optional(duration()),
        None,
        "How long failed jobs are kept, for jobs that this app sends; none: as remove_on_fail says.",
    )

    # ---- a worker's child processes ----------------------------------------------------------------------------------

    concurrency: int = setting(
        "worker_concurrency",
        cores,
        "auto",
        "Number of child processes, or of threads with worker_pool=threads; auto: one per CPU core.",
        Flag("-c --concurrency", "Number of child processes, or threads; auto: one per CPU core (default: auto)."),
    )
    pool: str = setting(
        "worker_pool",
        worker_pool,
        "prefork",
        "Where sync tasks run: in child processes (prefork), or in threads of one child process (threads).",
        Flag(
            "-P --pool",
            "Run sync tasks in child processes, or in threads of one child process (default: prefork).",
            metavar="prefork|threads",
        ),
    )
    autoscale: Autoscale | None = setting(
        "worker_autoscale",
        optional(autoscale),
        None,
        "Maximum and minimum number of child processes, which then follows the load; none: worker_concurrency.",
        Flag(
            "--autoscale",
            "Scale the number of child processes with the load, instead of -c: 10,3 means 3 to 10 (default: off).",
            metavar="MAX,MIN",
        ),
    )
    autoscale_keepalive_ms: int = setting(
        "worker_autoscale_keepalive",
        duration(1_000),
        30,
        "How long child processes must be idle before worker_autoscale stops them.",
    )
    start_method: str = setting(
        "worker_start_method",
        choice("auto", "fork", "spawn"),
        "auto",
        "How child processes are started; auto: fork where possible. Use spawn if a library does not work "
        "after a fork.",
        Flag(
            "--start-method",
            "How child processes are started, as in multiprocessing; auto: fork where possible (default: auto).",
            ("auto", "fork", "spawn"),
        ),
        celery_name="worker_pool_start_method",
    )
    max_tasks_per_child: int | None = setting(
        "worker_max_tasks_per_child",
        optional(integer(1)),
        None,
        "How many jobs a child process acquires before it is replaced; none: no limit.",
        Flag(
            "--max-tasks-per-child",
            "Replace a child process after it has acquired N jobs (default: unlimited).",
            int,
            metavar="N",
        ),
    )
    max_memory_kib: int | None = setting(
        "worker_max_memory_per_child",
        optional(memory),
        None,
        "Resident memory above which a child process is replaced once its jobs have finished; none: no "
        "limit. Set it if tasks leak memory.",
        Flag(
            "--max-memory-per-child",
            "Replace a child process whose resident memory exceeds SIZE, once its jobs have finished. SIZE is in KiB "
            "or has a unit: 512M, 2G (default: unlimited).",
            metavar="SIZE",
        ),
    )
    hard_memory_kib: int | None = setting(
        "worker_hard_memory_limit",
        optional(memory),
        None,
        "Resident memory above which a child process is killed while it runs a job; none: no limit.",
        Flag(
            "--hard-memory-limit",
            "Kill a child process whose resident memory exceeds SIZE while it is running a job; its jobs run again, "
            "and this counts as a crash (default: unlimited).",
            metavar="SIZE",
        ),
    )
    prefetch: int = setting(
        "worker_prefetch",
        integer(0, 1_000),
        32,
        "How many short jobs a child process acquires in one round trip. 0: always one (in Celery, 0 means unlimited).",
    )
    async_concurrency: int = setting(
        "worker_async_concurrency",
        integer(1, 10_000),
        100,
        "How many async jobs run at the same time in each child process. Reduce it if they overload a service.",
        Flag("--async-concurrency", "Async jobs that may run concurrently in each child process (default: 100).", int),
    )

    # ---- locks, stalled jobs and crashes -----------------------------------------------------------------------------

    lock_ms: int = setting(
        "lock_duration",
        duration(1_000),
        30,
        "Time after which a running job's lock expires if its worker does not renew it. Increase it to "
        "survive longer Redis outages.",
        Flag(
            "--lock-duration",
            "Seconds after which a job's lock expires if this worker does not renew it (default: 30).",
            float,
        ),
    )
    lock_renew_ms: int | None = setting(
        "lock_renew_time",
        optional(duration(100)),
        None,
        "Twice the interval between renewals of locks, as in BullMQ; none: half of lock_duration.",
    )
    stalled_interval_ms: int = setting(
        "stalled_interval",
        duration(1_000),
        30,
        "Interval between checks for stalled jobs. With a shorter one, the jobs of a dead worker run again sooner.",
        Flag("--stalled-interval", "Seconds between checks for stalled jobs (default: 30).", float),
    )
    max_stalled_count: int = setting(
        "max_stalled_count",
        integer(0, 1_000),
        1,
        "How many times a job may stall and run again; the next stall fails it. Increase it on spot instances.",
        Flag(
            "--max-stalled-count",
            "How many times a job may stall and run again; the next stall fails it (default: 1).",
            int,
        ),
    )
    skip_stalled_check: bool = setting(
        "skip_stalled_check",
        flag,
        False,
        "Do not check for stalled jobs. At least one worker of each queue must check.",
        Flag("--skip-stalled-check", "Do not check for stalled jobs; another worker of each queue must.", bool),
    )
    outbox_relay: bool = setting(
        "worker_outbox_relay",
        flag,
        True,
        "Whether the worker sends the rows of the app's outboxes. Set it to false if `bulltask outbox relay` does.",
    )
    max_crashes: int = setting(
        "max_crashes",
        integer(1, 1_000),
        2,
        "A job fails after it has crashed this many child processes, provided it was the only one in the last.",
        Flag(
            "--max-crashes",
            "Fail a job that has crashed this many child processes, provided it was the only job running in the last "
            "one (default: 2).",
            int,
        ),
    )
    max_releases: int | None = setting(
        "max_releases",
        optional(integer(1, 1_000_000)),
        1_000,
        "How many times in a row a task may release its job without progress; then the job fails. none: no limit.",
    )
    max_started_attempts: int | None = setting(
        "max_started_attempts",
        optional(integer(1, 1_000_000)),
        None,
        "How many times a job may start, also after a crash, stall or release; none: no limit.",
        Flag(
            "--max-started-attempts",
            "Maximum number of times a job may start, including attempts that do not use up a retry (after a crash, "
            "stall or release; default: unlimited).",
            int,
        ),
    )

    # ---- a worker ----------------------------------------------------------------------------------------------------

    drain_delay_ms: int = setting(
        "drain_delay",
        duration(100),
        5,
        "How long one call to Redis waits for a job. A new job ends the wait immediately.",
    )
    run_retry_delay_ms: int = setting(
        "run_retry_delay",
        duration(1),
        3,
        "Maximum delay before a worker tries again after Redis has returned an error.",
    )
    disable_rate_limits: bool = setting(
        "worker_disable_rate_limits",
        flag,
        False,
        "Ignore the rate limits of tasks in this worker; the limiter of a queue still applies.",
    )
    paused: bool = setting(
        "worker_paused",
        flag,
        False,
        "Start the worker paused; the signal CONT resumes it.",
        Flag("--paused", "Start paused; 'kill -CONT PID' resumes.", bool),
    )
    shutdown_timeout_ms: int = setting(
        "shutdown_timeout",
        duration(),
        30,
        "How long a warm shutdown waits for running jobs before it releases them. Set it to more than "
        "your longest job takes.",
        Flag(
            "--shutdown-timeout",
            "How many seconds a warm shutdown waits for running jobs before it releases them (default: 30).",
            float,
        ),
    )
    shutdown_notice_ms: int = setting(
        "shutdown_notice",
        duration(),
        5,
        "How long before the end of shutdown_timeout tasks are interrupted, so that they can clean up; 0: never.",
        Flag(
            "--shutdown-notice",
            "Interrupt tasks this many seconds before the end of that time, so that they can clean up (default: 5).",
            float,
        ),
    )
    worker_name: str = setting(
        "worker_name",
        worker_name,
        "",
        "First part of the worker id, NAME@HOST-PID-RANDOM; none: HOST-PID-RANDOM.",
        Flag("-n --hostname", "Set the worker's name; its id is NAME@HOST-PID-RANDOM.", metavar="NAME"),
    )

    # ---- queues ------------------------------------------------------------------------------------------------------

    limits: Limits | None = setting(
        "limiter",
        optional(rate_limits),
        None,
        "How many of a queue's jobs may start within a period, across all workers with this setting; none: no limit.",
        Flag(
            "--limiter",
            "Maximum rate at which a queue's jobs start: 100/m, or by queue: mail=100/m,reports=1/10s,5/s; the last "
            "rate, without a name, applies to all other queues (default: no limit).",
        ),
    )
    keep_completed: Mapping[str, int] | None = setting(
        "remove_on_complete",
        optional(retention),
        None,
        "Retention of completed jobs that were sent without this option, mainly by Node.js; none: all are kept.",
        Flag(
            "--remove-on-complete",
            "Retention of completed jobs that were sent without this option: true (remove), false (keep), a count, or "
            "age=3600,count=100 (default: false).",
        ),
    )
    keep_failed: Mapping[str, int] | None = setting(
        "remove_on_fail",
        optional(retention),
        KEEP_FAILED,
        "Retention of failed jobs that were sent without this option or `result_failure_expires`: by "
        "default, the newest 100,000 of a queue, for a week.",
        Flag("--remove-on-fail", "The same for failed jobs (default: the newest 100,000 of a queue, for a week)."),
    )

    # ---- metrics and logs --------------------------------------------------------------------------------------------

    metrics_max_data_points: int | None = setting(
        "metrics_max_data_points",
        optional(integer(1, 1_000_000)),
        None,
        "How many minutes of BullMQ's metrics are kept in Redis, for dashboards; none: no metrics.",
        Flag(
            "--metrics-max-data-points",
            "How many minutes of BullMQ's metrics are kept in Redis (default: no metrics).",
            int,
        ),
    )
    metrics_port: int | None = setting(
        "metrics_port",
        optional(integer(0, 65_535)),
        None,
        "Port for Prometheus metrics; none: no metrics.",
        Flag("--metrics-port", "Port for Prometheus metrics (default: no metrics).", int),
    )
    metrics_host: str = setting(
        "metrics_host",
        plain_text,
        "127.0.0.1",
        "Address that the metrics port listens on. Set it to 0.0.0.0 if Prometheus runs elsewhere.",
        Flag("--metrics-host", "Address to bind the metrics port to (default: 127.0.0.1)."),
    )
    metrics_buckets: tuple[float, ...] = setting(
        "metrics_buckets",
        buckets,
        ",".join(f"{bound:g}" for bound in JOB_BUCKETS),
        "Upper bounds of the histograms of wait and run times, in seconds.",
    )
    log_level: str = setting(
        "loglevel",
        choice(*LOG_LEVELS),
        "info",
        "Minimum level of log lines.",
        Flag("-l --loglevel", "Minimum level of log lines (default: info).", LOG_LEVELS),
    )
    log_format: str = setting(
        "log_format",
        choice(*LOG_FORMATS),
        "auto",
        "Format of log lines: text for people, or one JSON object per line; auto: text on a terminal, otherwise JSON.",
        Flag("--log-format", "Format of log lines (default: text on a terminal, otherwise JSON).", LOG_FORMATS),
    )
    redirect_stdouts: bool = setting(
        "worker_redirect_stdouts",
        flag,
        False,
        "Log what tasks print, with the job's id, instead of writing it to stdout or stderr.",
    )
    redirect_stdouts_level: str = setting(
        "worker_redirect_stdouts_level", choice(*LOG_LEVELS), "warning", "The level of these lines."
    )

    # ---- schedules and Spark -----------------------------------------------------------------------------------------

    timezone: str = setting("timezone", time_zone, "UTC", "Time zone of schedules without a `tz` option.")
    spark_master: str | None = setting(
        "spark_master",
        optional(plain_text),
        None,
        "URL of the Spark master, such as local[4], for tasks with spark=True; none: Spark's default.",
    )
    spark_conf: Mapping[str, str] | None = setting(
        "spark_conf",
        optional(spark_settings),
        None,
        "Spark settings for the session of tasks with spark=True.",
        is_secret=True,  # may contain passwords and object-store keys
    )
    beat_schedule: Mapping[str, Any] | None = setting(
        "beat_schedule",
        entries,
        None,
        "Schedules, which workers store in Redis when they start; none: those in Redis are not changed.",
    )

    @property
    def children(self) -> int:
        """The number of child processes with which a worker starts."""
        if self.pool == "threads":
            return 1
        return self.concurrency if self.autoscale is None else self.autoscale.minimum

    @property
    def threads(self) -> int:
        """The number of threads in which a child runs sync tasks; 0 if they run on its main thread."""
        return self.concurrency if self.pool == "threads" else 0

    @property
    def renew_ms(self) -> int:
        """Twice the interval at which locks are renewed; by default, half of ``lock_duration``."""
        return self.lock_renew_ms if self.lock_renew_ms is not None else self.lock_ms // 2

    @property
    def time_limits(self) -> TimeLimits:
        """Time limits of tasks and calls that set none."""
        return TimeLimits(self.soft_time_limit_ms, self.time_limit_ms)

    def limiter(self, queue: str) -> Mapping[str, int] | None:
        """Return BullMQ's ``limiter`` for a queue by its name in the app; ``None`` if it has none."""
        limits = self.limits
        return None if limits is None else limits.get(queue, limits.get(EVERY_QUEUE))


def _declared() -> Iterator[Setting]:
    by_name = {item.name: item for item in fields(Config)}
    for name in Config.__annotations__:  # fields() begins with those of PayloadSettings
        if metadata := by_name[name].metadata:
            yield Setting(field=name, **metadata)


SETTINGS: Final[Mapping[str, Setting]] = {declared.name: declared for declared in _declared()}
"""The settings by name, in the order of their declarations."""


def check_config(config: Config) -> None:
    """Check that the settings fit together, and that the packages they need are installed.

    Raises:
        ConfigError: A combination is impossible; the message says what to do.
    """
    if config.renew_ms >= config.lock_ms:
        raise ConfigError(
            f"lock_renew_time ({config.renew_ms} ms) must be shorter than lock_duration ({config.lock_ms} ms), "
            "otherwise running jobs lose their locks"
        )
    if config.reconnect_delay_max_ms < config.reconnect_delay_ms:
        raise ConfigError("broker_reconnect_delay_max must not be shorter than broker_reconnect_delay")
    if config.retry_backoff_max_ms < config.retry_backoff_ms:
        raise ConfigError("task_retry_backoff_max must not be shorter than task_retry_backoff")
    if config.autoscale and config.pool == "threads":
        raise ConfigError("worker_autoscale scales the number of child processes, so it needs worker_pool='prefork'")
    if config.hard_memory_kib and config.hard_memory_kib < (config.max_memory_kib or 0):
        raise ConfigError("worker_hard_memory_limit must not be less than worker_max_memory_per_child")
    if config.credentials and config.broker_url.has_password:
        raise ConfigError(
            f"broker_url {config.broker_url} contains a password, but broker_credential_provider is set: remove "
            "one of them"
        )
    config.time_limits.check("the settings", "task_")
    _check_payloads(config)


def _check_payloads(config: Config) -> None:
    if CLOUDPICKLE in (*config.accept_content, *(config.result_accept_content or ())) and not config.signing_keys:
        raise ConfigError(
            "accept_content contains cloudpickle, so bulltask must be able to verify that a payload comes from a "
            "sender that you trust: set payload_signing_keys to the senders' keys"
        )
    check_serializer(config.task_serializer, config, "task_serializer is cloudpickle")
    if config.result_serializer == CLOUDPICKLE:
        accepted = config.accept_content if config.result_accept_content is None else config.result_accept_content
        _check_cloudpickle(config, accepted, "result_serializer is cloudpickle", "result_accept_content")
    for name in (config.task_compression, config.result_compression):
        check_compression(name)
    if _share_a_key(config):
        raise ConfigError(
            "payload_signing_keys and payload_encryption_keys have a key in common: use different keys, because a "
            "program that can decrypt, such as a Node.js worker, must not be able to sign pickles"
        )
    if any(config.encryption_keys.values()):
        check_installed("cryptography", "encryption", "payload_encryption_keys")


def _share_a_key(config: Config) -> bool:
    """Whether a key both signs and encrypts. The keys are local variables here, where no error is raised."""
    encrypting = {key.secret for keys in config.encryption_keys.values() for key in keys}
    return not encrypting.isdisjoint(key.secret for key in config.signing_keys)


def check_serializer(name: str | None, config: Config, where: str) -> None:
    """Raise ``ConfigError`` if an app cannot write and read a serializer's payloads; ``where`` says what sets it."""
    if name == CLOUDPICKLE:
        _check_cloudpickle(config, config.accept_content, where, "accept_content")


def _check_cloudpickle(config: Config, accepted: tuple[str, ...], where: str, setting: str) -> None:
    if not config.signing_keys:
        raise ConfigError(f"{where}, and pickles must be signed: set payload_signing_keys to a list of keys")
    if CLOUDPICKLE not in accepted:
        raise ConfigError(f"{where}, but {setting} does not contain it: set {setting}=['json', 'cloudpickle']")


def check_payload_options(given_serializer: str | None, given_compression: str | None) -> None:
    """Check the options ``serializer`` and ``compression`` of a task or a call."""
    if given_serializer not in (None, JSON, CLOUDPICKLE):
        serializer(given_serializer, "serializer")
    if given_compression is not None:
        check_compression(compression(given_compression, "compression"))
