"""The configuration of an app: a frozen value, built from the table of settings and validated once."""

from __future__ import annotations

import importlib
import inspect
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Unpack

from bulltask.config.celery_settings import CELERY_SETTINGS, CUSTOM_SCHEDULER, current_name
from bulltask.config.parsers import (
    SECRET_FILES,
    Annotations,
    Autoscale,
    Limits,
    Parse,
    Routes,
    Setting,
    TaskRate,
    autoscale,
    choice,
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
    signing_keys,
    spark_settings,
    task_rate,
    time_zone,
    worker_name,
    worker_pool,
    wrap_secrets,
)
from bulltask.config.urls import Credentials, SecretUrl, credential_provider, secret_url, url
from bulltask.jobs.errors import ConfigError, check_installed, nearest, warn_user
from bulltask.jobs.fields import KEEP_FAILED, TimeLimits
from bulltask.jobs.names import EVERY_QUEUE
from bulltask.jobs.payloads import CLOUDPICKLE, JSON, ZLIB, ZSTD, PayloadSettings, check_compression

__all__ = [
    "BROKER_SETTINGS",
    "CELERY_URL",
    "CHILD_SETTINGS",
    "CONFIG_VARIABLE",
    "ENV_PREFIX",
    "FILE_VARIABLES",
    "LOG_LEVELS",
    "PAYLOAD_SETTINGS",
    "SETTINGS",
    "Config",
    "Setting",
    "Settings",
    "check_payload_options",
    "check_payload_settings",
    "check_same_meaning",
    "check_serializer",
    "compression",
    "constructor_settings",
    "explain",
    "read_config",
    "read_object",
    "read_project_file",
    "resolve",
]


# The settings of payloads: serializers, compression, keys; part of the table in :mod:`bulltask.config.config`.


_PICKLES: Final = ("pickle", "application/x-python-serialize", "application/x-pickle")


def serializer(value: Any, name: str) -> str:
    """Return the name of a serializer.

    Raises:
        ConfigError: There is no such serializer; ``name`` identifies the setting or option in the message.
    """
    if value == "application/json":
        return JSON
    if value not in (JSON, CLOUDPICKLE):
        hint = "; cloudpickle supports everything that pickle does, and is signed" if value in _PICKLES else ""
        raise ConfigError(f"{name} must be json or cloudpickle, not {value!r:.200}{hint}")
    return str(value)


def compression(value: Any, name: str) -> str:
    """Return the name of a compression method; Celery's ``gzip`` is ``zlib``.

    Raises:
        ConfigError: There is no such method; ``name`` identifies the setting or option in the message.
    """
    if value not in (ZLIB, ZSTD, "gzip"):
        raise ConfigError(f"{name} must be zlib or zstd, not {value!r:.200}")
    return ZLIB if value == "gzip" else str(value)


def _accepted(value: Any, name: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(serializer(item, f"an item of {name}") for item in parse_names(value, name)))
    if JSON not in names:
        raise ConfigError(
            f"{name} must be a list that contains json, because Node.js and canvases use it, not {value!r:.200}"
        )
    return names


def check_payload_settings(config: Config) -> None:
    """Check that the settings of payloads are consistent, and that the packages they need are installed.

    Raises:
        ConfigError: A combination is impossible; the message says what to do.
        MissingExtraError: An optional dependency is not installed.
    """
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
    """Check that an app can write and read a serializer's payloads.

    Args:
        name: The serializer; ``None`` if none is set.
        config: The app's settings.
        where: What sets the serializer, for the message.

    Raises:
        ConfigError: It is cloudpickle, and the app has no key, or does not accept it.
    """
    if name == CLOUDPICKLE:
        _check_cloudpickle(config, config.accept_content, where, "accept_content")


def check_payload_options(given_serializer: str | None, given_compression: str | None) -> None:
    """Check the options ``serializer`` and ``compression`` of a task or a call.

    Raises:
        ConfigError: There is no such serializer or compression method.
        MissingExtraError: The compression method is not installed.
    """
    if given_serializer not in (None, JSON, CLOUDPICKLE):
        serializer(given_serializer, "serializer")
    if given_compression is not None:
        check_compression(compression(given_compression, "compression"))


def _check_cloudpickle(config: Config, accepted: tuple[str, ...], where: str, setting: str) -> None:
    if not config.signing_keys:
        raise ConfigError(f"{where}, and pickles must be signed: set payload_signing_keys to a list of keys")
    if CLOUDPICKLE not in accepted:
        raise ConfigError(f"{where}, but {setting} does not contain it: set {setting}=['json', 'cloudpickle']")


def _row(name: str, parse: Callable[[Any, str], Any], default: object, doc: str, field: str = "") -> Setting:
    parser: Parse = parse
    return Setting(name, field or name, parser, default, doc)


PAYLOAD_SETTINGS: Final = (
    _row(
        "task_serializer",
        serializer,
        JSON,
        "Serializer of arguments, for tasks and calls without `serializer`. Use cloudpickle for Python "
        "objects that JSON cannot express.",
    ),
    _row(
        "result_serializer", serializer, JSON, "Serializer of results and exceptions, for tasks without `serializer`."
    ),
    _row(
        "accept_content",
        _accepted,
        (JSON,),
        "Serializers of the arguments that a worker loads. Add cloudpickle to run jobs with pickled "
        "arguments; it needs payload_signing_keys.",
    ),
    _row(
        "result_accept_content",
        optional(_accepted),
        None,
        "Serializers of the results and exceptions that get() and the next step of a canvas load; none: "
        "those in accept_content.",
    ),
    _row(
        "task_compression",
        optional(compression),
        None,
        "Compression of arguments; zstd needs bulltask[zstd]. Set it if arguments are large.",
    ),
    _row(
        "result_compression",
        optional(compression),
        None,
        "Compression of results; zstd needs bulltask[zstd]. Set it if results are large.",
    ),
    _row(
        "compression_threshold",
        integer(0),
        4_096,
        "Minimum size of a payload that is compressed, in bytes.",
    ),
    _row(
        "max_decompressed",
        integer(1),
        100_000_000,
        "Maximum size of a compressed payload after decompression, in bytes. It protects workers from "
        "small payloads that decompress to huge ones.",
    ),
    _row(
        "max_decompressed_tokens",
        integer(1),
        5_000_000,
        "Maximum number of JSON tokens (brackets, strings, commas) in a compressed payload after decompression. Each "
        "may take 80 bytes of a worker's memory.",
    ),
    _row(
        "payload_signing_keys",
        signing_keys,
        None,
        "Keys that sign pickles. The first key signs, and all keys verify, so you can replace a key.",
        "signing_keys",
    ),
    _row(
        "payload_encryption_keys",
        keys_by_queue,
        None,
        "Keys that encrypt arguments and results, by queue; '*': all other queues. The first key of a "
        "queue encrypts, and all of them decrypt.",
        "encryption_keys",
    ),
)


# The settings of the connection to Redis: part of the table in :mod:`bulltask.config.config`.


_S = Setting
BROKER_SETTINGS: Final = (
    _S("broker_url", "broker_url", url, "redis://localhost:6379/0", "URL of the Redis or Valkey server."),
    _S(
        "broker_credential_provider",
        "credentials",
        optional(credential_provider),
        None,
        "Where the Redis password comes from, if it changes while programs run: a file, a function or a "
        "provider, read each time a connection is opened. none: from broker_url.",
    ),
    _S(
        "prefix",
        "prefix",
        key_prefix,
        "bull",
        "Prefix of all Redis keys. Change it to the `prefix` of your Node.js programs, or to separate "
        "several environments in one database.",
    ),
    _S(
        "queue_hash_tag",
        "queue_hash_tag",
        flag,
        True,
        "Whether queue 'emails' is stored as '{emails}', which keeps its keys on one node of a Redis "
        "Cluster. Set it to false if your Node.js programs name their queues without braces.",
    ),
    _S(
        "redis_socket_connect_timeout",
        "connect_timeout_ms",
        duration(1),
        5,
        "Timeout for connecting to Redis. Increase it if connecting takes seconds, for example across regions.",
    ),
    _S(
        "redis_socket_timeout",
        "command_timeout_ms",
        duration(1),
        10,
        "Timeout for a Redis command, until the whole reply has been read. Increase it if you read very "
        "large results over a slow network.",
    ),
    _S(
        "broker_publish_retries",
        "publish_retries",
        integer(0, 100),
        3,
        "How many times a send is retried if Redis is unavailable or the reply is lost. With Sentinel or a "
        "cluster, the default is 100.",
    ),
    _S(
        "broker_publish_timeout",
        "publish_timeout_ms",
        optional(duration(1)),
        10,
        "How long a send may take, including its retries; none: no limit. Reduce it if a web request "
        "must fail fast. With Sentinel or a cluster, the default is 60.",
    ),
    _S(
        "broker_publish_replicas",
        "publish_replicas",
        integer(0, 100),
        0,
        "How many replicas must have received a job before a send returns (Redis' WAIT). Set it if a "
        "failover must not lose jobs.",
    ),
    _S(
        "broker_connection_max_retries",
        "connection_retries",
        max_reconnects,
        None,
        "How many times a worker tries to reconnect to Redis before it exits; none or 0: no limit. Set it if "
        "a process manager should restart the worker.",
    ),
    _S(
        "broker_reconnect_delay",
        "reconnect_delay_ms",
        duration(1),
        0.1,
        "Delay before a worker's first attempt to reconnect. It doubles after each attempt.",
    ),
    _S(
        "broker_reconnect_delay_max",
        "reconnect_delay_max_ms",
        duration(1),
        3,
        "Maximum delay between attempts to reconnect. Increase it if many workers share one Redis server.",
    ),
    _S(
        "max_payload",
        "max_payload",
        integer(1),
        10_000_000,
        "Maximum size of a job's data and options, and of a result, in bytes as stored. Pass large data "
        "by reference, such as a file name, rather than increase it.",
    ),
)


# The settings of a worker's child processes: part of the table in :mod:`bulltask.config.config`.


CHILD_SETTINGS: Final = (
    _S(
        "worker_concurrency",
        "concurrency",
        cores,
        "auto",
        "Number of child processes, or of threads with worker_pool=threads; auto: one per CPU core. "
        "Increase it if tasks mostly wait, reduce it if they need much memory.",
    ),
    _S(
        "worker_pool",
        "pool",
        worker_pool,
        "prefork",
        "Where sync tasks run: in child processes (prefork), or in threads of one child process "
        "(threads). Use threads if tasks mostly wait and processes need too much memory.",
    ),
    _S(
        "worker_autoscale",
        "autoscale",
        optional(autoscale),
        None,
        "Maximum and minimum number of child processes, which then follows the load; none: worker_concurrency applies.",
    ),
    _S(
        "worker_autoscale_keepalive",
        "autoscale_keepalive_ms",
        duration(1_000),
        30,
        "How long child processes must be idle before worker_autoscale stops them. Increase it if the "
        "load changes often.",
    ),
    _S(
        "worker_start_method",
        "start_method",
        choice("auto", "fork", "spawn"),
        "auto",
        "How child processes are started, as in multiprocessing; auto: fork where possible. Use spawn if "
        "a library does not work after a fork.",
    ),
    _S(
        "worker_max_tasks_per_child",
        "max_tasks_per_child",
        optional(integer(1)),
        None,
        "How many jobs a child process acquires before it is replaced; none: no limit. Set it if a task "
        "leaks memory or other resources.",
    ),
    _S(
        "worker_max_memory_per_child",
        "max_memory_kib",
        optional(memory),
        None,
        "Resident memory, in KiB or with a unit, above which a child process is replaced once its jobs "
        "have finished; none: no limit. Set it if tasks leak memory.",
    ),
    _S(
        "worker_hard_memory_limit",
        "hard_memory_kib",
        optional(memory),
        None,
        "Resident memory, in KiB or with a unit, above which a child process is killed while it runs a "
        "job; none: no limit. Set it if a single job can exhaust the machine's memory.",
    ),
    _S(
        "worker_prefetch",
        "prefetch",
        integer(0, 1_000),
        32,
        "How many jobs a child process acquires in one round trip while jobs are short. 0: always one, "
        "for jobs that should start as soon as any process is idle (in Celery, 0 means unlimited).",
    ),
    _S(
        "worker_async_concurrency",
        "async_concurrency",
        integer(1, 10_000),
        100,
        "How many async jobs run at the same time in each child process. Reduce it if they overload a "
        "service or need much memory.",
    ),
)


# The table of settings: their names, fields of :class:`bulltask.config.config.Config`, parsers, defaults and help.
#
# Names are Celery's where Celery has one, and BullMQ's in snake_case for locks and stalled jobs. The documentation's
# table (docs/settings_table.py) is generated from this table.


LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


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


# Finds the setting for a name, which may be bulltask's or Celery's.


_CLOSE: Final = 0.75
"""The minimum similarity of a suggestion, 0 to 1. Names of settings are similar, so a lower value would mislead."""

_RENAMED_ARGUMENTS: Final = {"broker": "broker_url", "backend": "result_backend"}
_APP_ARGUMENTS: Final = ("changes", "config_source", "namespace", "set_as_current", "task_cls")
_REMOVED_ARGUMENTS: Final = {
    **dict.fromkeys(["amqp", "control", "events", "loader", "log"], "bulltask has no equivalent"),
    "autofinalize": "a task is registered when it is defined",
    "fixups": "the worker sets Django up if DJANGO_SETTINGS_MODULE is set",
    "main": "the first argument is the name: App('shop')",
    "strict_typing": "arguments are always checked when a task is called",
    "tasks": "decorate functions with @app.task",
}
"""Arguments of Celery's constructor that have no meaning in bulltask, with the reason."""


def resolve(name: str, value: object, label: str) -> str | None:
    """Return the setting to which a value applies; if the value has no effect, warn and return ``None``.

    Args:
        name: The name of a setting, bulltask's or Celery's.
        value: Its value.
        label: The name as the user wrote it, such as ``CELERY_TASK_SERIALIZER``.

    Raises:
        ConfigError: The name is unknown, or it is one of Celery's settings that must not be ignored.
    """
    if name in SETTINGS:
        return name
    celery = CELERY_SETTINGS.get(name)
    if celery is None:
        raise ConfigError(explain(name, label))
    if celery.replacement:
        return celery.replacement
    if not celery.is_redundant(value):
        if celery.rejected:
            raise ConfigError(celery.message(label))
        warn_user(celery.message(label))
    return None


def explain(name: str, label: str = "") -> str:
    """Return the message for a name that is not a setting: what to use instead, or the nearest name."""
    label = label or name
    if name in CELERY_SETTINGS:
        return CELERY_SETTINGS[name].message(label)
    known = [*SETTINGS, *CELERY_SETTINGS]
    prefix = label[: -len(name)] if label.lower().endswith(name.lower()) else ""
    if current := current_name(name, known) or current_name(label, known):
        return f"unknown setting {label!r:.200}: it is an old Celery name; use {_as_written(current, prefix)}"
    if name.lower().startswith("redbeat_"):
        return f"unknown setting {label!r:.200}: it belongs to RedBeat, but {CUSTOM_SCHEDULER}"
    match = nearest(name.lower(), known, _CLOSE)
    if match in CELERY_SETTINGS and CELERY_SETTINGS[match].rejected:
        return f"unknown setting {label!r:.200}. {CELERY_SETTINGS[match].message(match)}"
    if not match:
        return f"unknown setting {label!r:.200}"
    return f"unknown setting {label!r:.200}; did you mean {_as_written(match, prefix)!r:.200}?"


def _as_written(name: str, prefix: str) -> str:
    """Return a setting's name as in the user's namespace, such as ``CELERY_``."""
    return prefix + name.upper() if prefix.isupper() else prefix + name


def constructor_settings(broker_url: SecretUrl | None, given: Mapping[str, object]) -> dict[str, object]:
    """Return the settings in the arguments of an app's constructor, which may be Celery's.

    Raises:
        TypeError: An argument of Celery's has no meaning, or the URL is given twice.
    """
    settings: dict[str, object] = {} if broker_url is None else {"broker_url": broker_url}
    changes = given.get("changes") or {}
    for name, value in {**given, **(changes if isinstance(changes, Mapping) else {})}.items():
        if name in _REMOVED_ARGUMENTS and value is not None:
            raise TypeError(f"App has no argument {name!r:.200}, unlike Celery: {_REMOVED_ARGUMENTS[name]}")
        setting = _RENAMED_ARGUMENTS.get(name, name)
        if name in _APP_ARGUMENTS or (name != setting and value is None):
            continue
        if setting in settings:
            raise TypeError(f"App got {setting} twice: as {setting} and as {name}")
        settings[setting] = value
    return settings


def check_same_meaning(found: Mapping[str, tuple[str, Any]]) -> None:
    """Reject values that have a different meaning in Celery.

    Raises:
        ConfigError: ``result_expires`` is 0, which keeps results forever in Celery, but not at all in bulltask.
    """
    for label, (name, value) in found.items():
        if name == "result_expires" and value in (0, timedelta(0)) and value is not None:
            raise ConfigError(
                f"{label} is 0: Celery then keeps results forever, but bulltask removes them immediately; set "
                "None to keep them, or write app.conf.result_expires = 0 to remove them"
            )


# Settings from an object, a module or a TOML file, for ``App.config_from_object``, ``--config`` and pyproject.toml.


PROJECT_FILE: Final = "pyproject.toml"
TABLE: Final = "tool.bulltask"


def read_object(source: object, namespace: str | None = None) -> dict[str, tuple[str, Any]]:
    """Return the settings in an object: for each name as the user wrote it, the setting's name and its value.

    Args:
        source: A mapping, a module, a class, any object with attributes, or the name of one: ``pkg.module``,
            ``pkg.module:attribute``.
        namespace: Take only names that begin with this and ``_``, in the same case: ``CELERY`` takes
            ``CELERY_BROKER_URL``. Without it, all lower-case names are taken.

    Raises:
        ConfigError: The object does not exist, or a name is an old Celery name.
        ImportError: A module does not exist.
    """
    given = _load(source) if isinstance(source, str) else source
    if namespace:
        prefix = namespace if namespace.endswith("_") else f"{namespace}_"
        if prefix == "CELERY_":
            _reject_old_names(_names(given))
        names = (name for name in _names(given) if name.startswith(prefix))
        return {name: _setting(name.removeprefix(prefix).lower(), _value(given, name)) for name in names}
    settings = {}
    for name in _names(given):
        value = _value(given, name)
        if name.islower() and (isinstance(given, Mapping) or not _is_definition(value)):
            settings[name] = _setting(name, value)
        elif name.isupper() and (current := current_name(name, {*SETTINGS, *CELERY_SETTINGS})):
            raise ConfigError(
                f"{name} is either an old setting name or a name with a namespace prefix: use {current}, or "
                "config_from_object(…, namespace='CELERY') for names such as CELERY_BROKER_URL"
            )
    return settings


def read_config(name: str) -> dict[str, tuple[str, Any]]:
    """Return the settings of ``--config``: from a TOML file (``*.toml``), or from a module.

    Raises:
        ConfigError: The file or module cannot be read.
    """
    if name.endswith(".toml"):
        return _read_toml(Path(name), required=True)
    try:
        return read_object(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not (name == exc.name or name.startswith((f"{exc.name}.", f"{exc.name}:"))):
            raise  # the module exists; something that it imports does not
        raise ConfigError(f"cannot import {name!r:.200} (a file's name must end in .toml): {exc}") from exc


def read_project_file() -> tuple[str, dict[str, tuple[str, Any]]]:
    """Return the path and the settings of the nearest ``pyproject.toml``, in the current directory or above it."""
    try:
        directory = Path.cwd()
    except FileNotFoundError:  # the directory was removed
        return "", {}
    for parent in (directory, *directory.parents):
        if (path := parent / PROJECT_FILE).is_file():
            return str(path), _read_toml(path, required=False)
    return "", {}


def _read_toml(path: Path, *, required: bool) -> dict[str, tuple[str, Any]]:
    """Return the table ``[tool.bulltask]``; a required file may have its settings at the top instead."""
    import tomllib  # noqa: PLC0415 - only for a program whose directory has such a file

    try:
        text = path.read_text(encoding="utf-8")
        if not required and TABLE not in text:
            return {}  # avoids parsing a file without settings for bulltask
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read the settings in {path}: {exc}") from exc
    tool = content.get("tool", {})
    table = tool.get("bulltask") if isinstance(tool, dict) else None
    if table is None:
        table = content if required and path.name != PROJECT_FILE else {}
    if not isinstance(table, dict):
        raise ConfigError(f"[{TABLE}] in {path} must be a table, not {table!r:.200}")
    return {name: _setting(name, value) for name, value in table.items()}


def _load(name: str) -> object:
    module_name, _, attribute = name.partition(":")
    value: object = importlib.import_module(module_name)
    for part in filter(None, attribute.split(".")):
        if not hasattr(value, part):
            raise ConfigError(f"{name!r:.200} refers to {attribute!r:.200}, which module {module_name} does not have")
        value = getattr(value, part)
    return value


def _setting(name: str, value: Any) -> tuple[str, Any]:
    """Return a name and its value; a secret is wrapped here, before an error can show it."""
    return name, wrap_secrets({name: value})[name]


def _reject_old_names(names: Iterable[str]) -> None:
    """Reject ``CELERYD_CONCURRENCY``, which the namespace ``CELERY`` would silently leave out."""
    for name in names:
        old = name.startswith(("CELERYD_", "CELERYBEAT_"))
        if old and (current := current_name(name, {*SETTINGS, *CELERY_SETTINGS})):
            raise ConfigError(f"{name} is an old Celery name: use CELERY_{current.upper()}")


def _names(source: object) -> Iterable[str]:
    names: Iterable[object] = source if isinstance(source, Mapping) else dir(source)
    return [name for name in names if isinstance(name, str) and not name.startswith("_")]


def _value(source: object, name: str) -> Any:
    return source[name] if isinstance(source, Mapping) else getattr(source, name)


def _is_definition(value: object) -> bool:
    """Return whether a value is an import, a function or a class, and therefore not a setting."""
    return isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isroutine(value)


# The configuration of an app: a frozen value, built from the table of settings and validated once.
#
# Precedence, highest first:
#
# 1. the command line;
# 2. the environment (``BULLTASK_`` and the name in capitals);
# 3. the ``--config`` file;
# 4. ``app.conf`` and the arguments of ``App``;
# 5. ``[tool.bulltask]`` in pyproject.toml;
# 6. the defaults (:mod:`bulltask.config.config`).
#
# Durations are seconds or ``timedelta`` for the user, and integer milliseconds internally (``_ms``). An unknown name
# raises an error that suggests a similar one. For one of Celery's names, the error says what to use instead.


if TYPE_CHECKING:
    from bulltask.config.setting_types import SettingOptions, SettingTypes
else:
    SettingTypes = object


ENV_PREFIX: Final = "BULLTASK_"

CONFIG_VARIABLE: Final = "BULLTASK_CONFIG"
"""Environment variable with the ``--config`` file or module."""

CELERY_URL: Final = "CELERY_BROKER_URL"
"""Celery's environment variable, used if no other source sets ``broker_url``."""

FILE_VARIABLES: Final = {name: f"{ENV_PREFIX}{name.upper()}_FILE" for name in SECRET_FILES}
"""Environment variables with the path of a file that contains a secret setting, such as a Docker or Kubernetes
secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PayloadSettings):
    """The parsed, immutable settings of an app and its workers; :meth:`Settings.freeze` returns them."""

    sender: str = ""
    """The app and the host, which sent jobs name; not a setting."""
    broker_url: SecretUrl
    credentials: Credentials | None
    connect_timeout_ms: int
    command_timeout_ms: int
    publish_retries: int
    publish_timeout_ms: int | None
    publish_replicas: int
    connection_retries: int | None
    reconnect_delay_ms: int
    reconnect_delay_max_ms: int
    max_events: int
    max_logs: int | None
    default_queue: str
    canvas_queue: str | None
    errbacks_in_chord_headers: bool
    queues: tuple[str, ...]
    routes: Routes | None
    annotations: Annotations | None
    max_retries: int
    max_explicit_retries: int | None
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    backoff_strategies: tuple[str, ...]
    retry_jitter: float
    soft_time_limit_ms: int | None
    time_limit_ms: int | None
    default_rate: TaskRate | None
    typed: bool | None
    always_eager: bool
    eager_propagates: bool
    incompatible_timeout_ms: int | None
    imports: tuple[str, ...]
    include: tuple[str, ...]
    result_expires_ms: int | None
    failure_expires_ms: int | None
    start_method: str
    concurrency: int
    pool: str
    autoscale: Autoscale | None
    autoscale_keepalive_ms: int
    max_tasks_per_child: int | None
    max_memory_kib: int | None
    hard_memory_kib: int | None
    prefetch: int
    async_concurrency: int
    lock_ms: int
    lock_renew_ms: int | None
    stalled_interval_ms: int
    max_stalled_count: int
    skip_stalled_check: bool
    outbox_relay: bool
    max_crashes: int
    max_releases: int | None
    max_started_attempts: int | None
    drain_delay_ms: int
    run_retry_delay_ms: int
    disable_rate_limits: bool
    paused: bool
    shutdown_timeout_ms: int
    shutdown_notice_ms: int
    worker_name: str
    limits: Limits | None
    metrics_max_data_points: int | None
    keep_completed: Mapping[str, int] | None
    keep_failed: Mapping[str, int] | None
    metrics_port: int | None
    metrics_host: str
    log_level: str
    redirect_stdouts: bool
    redirect_stdouts_level: str
    timezone: str
    spark_master: str | None
    spark_conf: Mapping[str, str] | None = field(repr=False)  # may contain passwords and object-store keys
    beat_schedule: Mapping[str, Any] | None

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


_EAGER: Final = ("task_always_eager", "task_eager_propagates")
_SWITCHES: Final = (*_EAGER, "task_allow_error_cb_on_chord_header")
"""Settings that can be changed at any time, because they apply only to the process that sends."""


class Settings(SettingTypes):
    """The mutable settings of an app, by their public names: ``app.conf.lock_duration = 60``.

    Every assignment is validated immediately. The settings are frozen when the app first uses them, for example to send
    a job, or when a worker starts. A later change would apply to only some processes, because children are forks. Only
    eager mode can be switched on and off at any time, as tests do, and ``task_allow_error_cb_on_chord_header``.

    Raises:
        ConfigError: A setting of the app, the environment, pyproject.toml or the ``--config`` file is invalid.
    """

    _project: dict[str, object]
    _values: dict[str, object]
    _file: dict[str, object]
    _overrides: dict[str, object]
    _celery_url: SecretUrl | None
    _frozen: Config | None
    _when_switched: Callable[[], None]
    _used: set[str]
    _app: str
    _when_frozen: list[Callable[[Config], None]]

    def __init__(self, given: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        for layer in ("_project", "_values", "_file", "_overrides"):
            object.__setattr__(self, layer, {})
        object.__setattr__(self, "_frozen", None)
        object.__setattr__(self, "_app", "")
        object.__setattr__(self, "_when_frozen", [])
        object.__setattr__(self, "_when_switched", lambda: None)
        object.__setattr__(self, "_used", set())
        object.__setattr__(self, "_celery_url", secret_url(environ.get(CELERY_URL) or None))
        given, config, variables = wrap_secrets(given), environ.get(CONFIG_VARIABLE), _environment(environ)
        del environ  # it contains the URL with its password, and an error can show local variables
        path, found = read_project_file()
        self._read(self._project, found, path)
        for name, value in given.items():
            setattr(self, name, value)
        if config:
            self._read(self._file, read_config(config), config)
        for name, value in variables.items():
            self.override(name, value)

    def update(self, *mappings: Mapping[str, object], **settings: Unpack[SettingOptions]) -> None:
        """Set several settings, from mappings or keywords.

        Raises:
            ConfigError: A name is unknown, a value is invalid or has another meaning in Celery, or the settings are
                frozen.
        """
        updates = wrap_secrets({**dict(pair for part in mappings for pair in part.items()), **settings})
        del mappings, settings  # they may contain passwords, and an error can show local variables
        check_same_meaning({name: (name, value) for name, value in updates.items()})
        for name, value in updates.items():
            setattr(self, name, value)

    def read_object(self, source: object, namespace: str | None = None) -> None:
        """Set the settings in an object, see :meth:`bulltask.app.App.config_from_object`."""
        found = read_object(source, namespace)
        check_same_meaning(found)
        self._read(self._values, found, source if isinstance(source, str) else "")

    def override(self, name: str, value: object) -> None:
        """Set ``name`` with precedence over assignments: for the environment and the command line."""
        value = wrap_secrets({name: value})[name]
        self._set(self._overrides, name, value)

    def overrides(self) -> dict[str, object]:
        """Return the settings from the environment and the command line."""
        return dict(self._overrides)

    @property
    def is_url_from_celery(self) -> bool:
        """Whether ``broker_url`` comes from Celery's environment variable ``CELERY_BROKER_URL``."""
        return self._celery_url is not None and "broker_url" not in self._given()

    def overridden(self, settings: Mapping[str, object]) -> Settings:
        """Return a copy that is not frozen, in which ``settings`` take precedence over all others; for tests."""
        copied = object.__new__(Settings)
        vars(copied).update({**vars(self), "_overrides": self.overrides(), "_frozen": None, "_used": set()})
        for name, value in settings.items():
            copied.override(name, value)
        return copied

    def freeze(self) -> Config:
        """Return the configuration; after this call, settings can no longer be changed."""
        if self._frozen is None:
            config = self._build()
            for call in self._when_frozen:
                call(config)
            object.__setattr__(self, "_frozen", config)
        assert self._frozen is not None
        return self._frozen

    def freeze_one(self, name: str) -> Any:
        """Return a parsed setting, and freeze it; the other settings can still be changed.

        This is for settings that are needed before the app sends anything, for example by a signature that a module
        creates when it is imported.
        """
        self._used.add(name)
        return SETTINGS[name].parse(getattr(self, name), name)

    def name_app(self, name: str) -> None:
        """Set the name of the app, which its jobs contain."""
        object.__setattr__(self, "_app", name)

    def when_frozen(self, call: Callable[[Config], None]) -> None:
        """Register a function to call just before the settings are frozen; if it raises, they are not frozen."""
        self._when_frozen.append(call)

    def when_switched(self, call: Callable[[], None]) -> None:
        """Set the function to call when eager mode is switched on or off after the settings were frozen."""
        object.__setattr__(self, "_when_switched", call)

    def _build(self) -> Config:
        given = self._given()
        if self.is_url_from_celery:
            url(self._celery_url, CELERY_URL)
            given["broker_url"] = self._celery_url
        merged = {row.name: row.default for row in SETTINGS.values()} | _failover_defaults(given) | given
        parsed = {row.field: row.parse(merged[row.name], row.name) for row in SETTINGS.values()}
        config = Config(**parsed, sender=self._app and f"{self._app}@{socket.gethostname()}")
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
            raise ConfigError(
                "worker_autoscale scales the number of child processes, so it needs worker_pool='prefork'"
            )
        if config.hard_memory_kib and config.hard_memory_kib < (config.max_memory_kib or 0):
            raise ConfigError("worker_hard_memory_limit must not be less than worker_max_memory_per_child")
        _check_broker(config)
        config.time_limits.check("the settings", "task_")
        check_payload_settings(config)
        return config

    def _given(self) -> dict[str, object]:
        return {**self._project, **self._values, **self._file, **self._overrides}

    def _read(self, layer: dict[str, object], found: Mapping[str, tuple[str, object]], source: str) -> None:
        """Add the settings of a source to a layer; errors contain the source and the setting's name in it."""
        for label, (name, value) in found.items():
            try:
                self._set(layer, name, value, label)
            except ConfigError as exc:
                raise ConfigError(f"{source}: {exc}" if source else str(exc)) from None

    def _set(self, layer: dict[str, object], name: str, value: object, label: str | None = None) -> None:
        value = wrap_secrets({name: value})[name]
        if (setting := resolve(name, value, label or name)) is None:
            return
        if self._frozen is not None and setting not in _SWITCHES:
            raise ConfigError(
                f"cannot set {name}, because the app has already been used: set it before the app sends a job, uses a "
                "queue or starts a worker"
            )
        if setting in self._used:
            raise ConfigError(f"cannot set {name}: a task has already used it; set it before the first call")
        parsed = SETTINGS[setting].parse(value, label or name)
        layer[setting] = value
        if self._frozen is not None:
            object.__setattr__(self, "_frozen", replace(self._frozen, **{SETTINGS[setting].field: parsed}))
            if setting in _EAGER:
                self._when_switched()

    if not TYPE_CHECKING:  # type checkers know the settings' types, and would accept any name

        def __setattr__(self, name: str, value: object) -> None:
            value = wrap_secrets({name: value})[name]
            self._set(self._values, name, value)

        def __getattr__(self, name: str) -> Any:
            if name not in SETTINGS:
                raise AttributeError(explain(name))
            if name == "broker_url" and self.is_url_from_celery:
                return self._celery_url
            return self._given().get(name, SETTINGS[name].default)

    def __getitem__(self, name: str) -> Any:
        if name not in SETTINGS:
            raise KeyError(explain(name))
        return getattr(self, name)

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in SETTINGS

    def __iter__(self) -> Iterator[str]:
        return iter(SETTINGS)

    def __repr__(self) -> str:
        changed = self._given()
        if changed.get("spark_conf"):
            changed["spark_conf"] = "…"  # may contain passwords and object-store keys
        return f"<Settings {changed}>"

    def __dir__(self) -> list[str]:
        return ["update", *SETTINGS]  # for completion in a shell


def _check_broker(config: Config) -> None:
    if config.credentials and config.broker_url.has_password:
        raise ConfigError(
            f"broker_url {config.broker_url} contains a password, but broker_credential_provider is set: remove "
            "one of them"
        )


def _failover_defaults(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for a URL of several servers: a send is retried until a failover has ended."""
    address = given.get("broker_url")
    if not isinstance(address, SecretUrl) or address.kind == "single":
        return {}
    return {"broker_publish_retries": 100, "broker_publish_timeout": 60}


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in the environment; secrets may come from files.

    Raises:
        ConfigError: A file cannot be read.
    """
    names = {ENV_PREFIX + name.upper(): name for name in SETTINGS}
    settings = wrap_secrets({names[variable]: text for variable, text in environ.items() if variable in names})
    for name, variable in FILE_VARIABLES.items():
        if name not in settings and (path := environ.get(variable)):
            try:
                settings |= wrap_secrets({name: Path(path).read_text().strip()})
            except (OSError, UnicodeDecodeError) as exc:
                raise ConfigError(f"cannot read the file in {variable}: {exc}") from exc
    return settings


assert {row.field for row in SETTINGS.values()} | {"sender"} == {field.name for field in fields(Config)}
