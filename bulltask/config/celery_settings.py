"""Celery's settings that bulltask does not have: the effect of each, the reason, and what to use instead.

Each setting of Celery 5.7 is either here, or in :data:`bulltask.config.config.SETTINGS` with the same name and
meaning. A setting without effect causes a warning, unless its value matches bulltask's behavior. It is rejected if
ignoring it would run jobs elsewhere, in another order, or with less protection than the user expects.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Final

from bulltask.config.config import SETTINGS
from bulltask.jobs.clock import value_class

__all__ = ["CELERY_SETTINGS", "CUSTOM_SCHEDULER", "current_name"]


@value_class
class CelerySetting:
    """One of Celery's settings that bulltask does not have: why it has no effect, and what to use instead.

    ``replacement`` is the setting of bulltask that takes its value, if any. A rejected one raises an error, not a
    warning.
    """

    name: str
    reason: str
    replacement: str = ""
    rejected: bool = False

    def is_redundant(self, value: object) -> bool:
        """Return whether ``value`` matches bulltask's behavior, so that no warning is needed."""
        accepts = _REDUNDANT.get(self.name)
        return accepts is not None and accepts(value)

    def message(self, label: str) -> str:
        """Return the text of the warning or error; the value is never shown: it may be a password.

        ``label`` is the name as the user wrote it.
        """
        verb = "is not available" if self.rejected else "has no effect"
        return f"Celery's setting {label} {verb} in bulltask: {self.reason}"


_NO_BACKEND = "a job stores its own result in Redis, so there is no result backend"
_RABBITMQ = "it is for RabbitMQ or another AMQP broker, but bulltask uses Redis"
_NO_BEAT = "the workers run the schedule, so there is no beat process"
CUSTOM_SCHEDULER: Final = (
    "the workers run beat_schedule, and do not read schedules elsewhere, such as in a database; move them to "
    "beat_schedule, or to app.queue(…).schedulers, where you can change them at run time"
)
_NO_MAILBOX = "there are no control or event queues; workers and clients communicate through BullMQ's keys"
_ONE_URL = "use broker_url, as in redis://user:password@host:6379/0"
_SIGNATURE = "pickles are signed with HMAC keys, not with certificates; set payload_signing_keys"
_AT_LEAST_ONCE = "a job is acknowledged when its outcome is stored, and runs again if its worker dies"
_RECOVERY = "a job whose child process died is recovered immediately, by its worker"
_LOG_FORMAT = "a worker writes one structured line per event; configure logging or structlog in the app's module"
_NO_PREFETCH = (
    "a worker prefetches jobs only while they are short, and releases those that would wait (worker_prefetch)"
)
_EAGER = "eager mode does not use Redis; to store results, test with bulltask.testing"
_CHORD = "canvas (group, chord, chain) does not use a result backend"
_INTERNAL = "it customizes a component of Celery's worker that bulltask does not have"

_WITHOUT_EFFECT: Final[Iterable[tuple[str, str]]] = (
    (
        _NO_BACKEND,
        "cache_backend cache_backend_options cassandra_entry_ttl cassandra_keyspace cassandra_port "
        "cassandra_read_consistency cassandra_servers cassandra_bundle_path cassandra_table "
        "cassandra_write_consistency cassandra_auth_provider cassandra_auth_kwargs cassandra_options "
        "s3_access_key_id s3_secret_access_key s3_bucket s3_base_path s3_endpoint_url s3_region "
        "azureblockblob_container_name azureblockblob_retry_initial_backoff_sec azureblockblob_retry_increment_base "
        "azureblockblob_retry_max_attempts azureblockblob_base_path azureblockblob_connection_timeout "
        "azureblockblob_read_timeout gcs_bucket gcs_project gcs_base_path gcs_ttl couchbase_backend_settings "
        "arangodb_backend_settings mongodb_backend_settings cosmosdbsql_database_name cosmosdbsql_collection_name "
        "cosmosdbsql_consistency_level cosmosdbsql_max_retry_attempts cosmosdbsql_max_retry_wait_time "
        "redis_backend_use_ssl redis_db redis_host redis_username redis_password redis_port "
        "result_backend result_cache_max result_exchange result_exchange_type result_persistent "
        "result_backend_transport_options result_backend_max_sleep_between_retries_ms result_backend_max_retries "
        "result_backend_base_sleep_between_retries_ms result_backend_always_retry elasticsearch_retry_on_timeout "
        "elasticsearch_max_retries elasticsearch_timeout elasticsearch_save_meta_as_text database_url "
        "database_engine_options database_engine_callback database_short_lived_sessions database_table_schemas "
        "database_table_names database_create_tables_at_setup",
    ),
    (
        _RABBITMQ,
        "broker_failover_strategy broker_heartbeat broker_heartbeat_checkrate broker_login_method "
        "broker_channel_error_retry broker_native_delayed_delivery_queue_type task_create_missing_queue_type "
        "task_create_missing_queue_exchange_type task_default_delivery_mode task_default_queue_type "
        "task_default_exchange task_default_exchange_type task_default_routing_key task_queue_max_priority "
        "worker_detect_quorum_queues worker_direct",
    ),
    (
        _NO_BEAT,
        "beat_enable_remote_control beat_remote_control_max_tick_age beat_max_loop_interval "
        "beat_schedule_filename beat_sync_every beat_cron_starting_deadline",
    ),
    (
        _NO_MAILBOX,
        "control_queue_ttl control_queue_expires control_queue_exclusive control_queue_durable control_exchange "
        "event_queue_expires event_queue_ttl event_queue_prefix event_queue_exclusive event_queue_durable "
        "event_serializer event_exchange worker_enable_remote_control",
    ),
    (_AT_LEAST_ONCE, "task_acks_late task_retry_on_worker_lost task_reject_on_worker_lost"),
    (
        "a job that fails is stored as failed; only a retry puts it back into the queue",
        "task_acks_on_failure_or_timeout task_acks_on_failure task_acks_on_timeout",
    ),
    (_RECOVERY, "worker_lost_wait"),
    (
        "a job keeps running while Redis is unreachable; its outcome is stored later, if no other worker has the job",
        "worker_cancel_long_running_tasks_on_connection_loss",
    ),
    (
        _LOG_FORMAT,
        "worker_hijack_root_logger worker_log_color worker_log_datefmt worker_log_format worker_task_log_datefmt "
        "worker_task_log_format",
    ),
    (
        _NO_PREFETCH,
        "worker_prefetch_multiplier worker_eta_task_limit worker_enable_prefetch_count_reduction "
        "worker_disable_prefetch",
    ),
    (_CHORD, "result_chord_expires result_chord_retry_interval result_chord_join_timeout"),
    (
        _INTERNAL,
        "worker_agent worker_consumer worker_pool_putlocks worker_pool_restarts worker_proc_alive_timeout worker_timer "
        "worker_timer_precision task_protocol",
    ),
    ("the worker's own autoscaler is used; set worker_autoscale, as in '10,3'", "worker_autoscaler"),
    (_EAGER, "task_store_eager_result"),
    ("times are always stored in UTC; timezone applies to schedules", "enable_utc"),
    ("the worker always reconnects; broker_connection_max_retries sets a limit", "broker_connection_retry"),
    (
        "the worker also waits for Redis when it starts; broker_connection_max_retries sets a limit",
        "broker_connection_retry_on_startup",
    ),
    (
        "a running job's lock is renewed, so there is no visibility_timeout; use redis_socket_timeout for timeouts, "
        "prefix for key prefixes, and broker_url for sentinels: redis+sentinel://host1:26379,host2:26379/master_name, "
        "with ?sentinel_password=… for sentinel_kwargs",
        "broker_transport_options",
    ),
    (
        "connections are opened when they are needed",
        "broker_pool_limit broker_pool_acquire_timeout redis_max_connections",
    ),
    ("connections always use TCP keepalive", "redis_socket_keepalive"),
    ("a send is retried up to broker_publish_retries times", "redis_retry_on_timeout"),
    (
        "use broker_publish_retries (0: no retry), broker_reconnect_delay and broker_publish_timeout",
        "task_publish_retry task_publish_retry_policy",
    ),
    ("BullMQ always stores these events and states", "task_track_started task_send_sent_event worker_send_task_events"),
    ("a job always stores its name and arguments", "result_extended"),
    (
        "use the task option ignore_result; for all tasks, task_annotations={'*': {'ignore_result': True}}",
        "task_ignore_result",
    ),
    ("failed jobs are stored; result_failure_expires sets for how long", "task_store_errors_even_if_ignored"),
    ("a failed job always stores its traceback", "task_remote_tracebacks"),
    ("arguments are not logged", "task_repr_maxlevels"),
    ("a queue needs no declaration: it exists when it has a job", "task_create_missing_queues"),
    ("give the child task a priority when you send it", "task_inherit_parent_priority"),
    ("revoked jobs are recorded in Redis, so a worker needs no file", "worker_state_db"),
    (
        "a completed job is not delivered again, and a job with the id of an existing job is not added",
        "worker_deduplicate_successful_tasks",
    ),
    (
        "a warm shutdown interrupts tasks shutdown_notice before the end of shutdown_timeout, and releases their jobs",
        "worker_soft_shutdown_timeout worker_enable_soft_shutdown_on_idle",
    ),
)

_REJECTED: Final[Iterable[tuple[str, str]]] = (
    (_ONE_URL, "broker_host broker_port broker_user broker_password broker_vhost broker_read_url broker_write_url"),
    (
        "the scheme of broker_url selects the transport: redis://, rediss:// (TLS), redis+cluster://, "
        "redis+sentinel:// or unix://",
        "broker_transport",
    ),
    (
        "use a broker_url with TLS, as in rediss://host:6379/0?ssl_cert_reqs=required&ssl_ca_certs=/path/ca.pem",
        "broker_use_ssl",
    ),
    (_SIGNATURE, "security_certificate security_cert_store security_key security_key_password security_digest"),
    (CUSTOM_SCHEDULER, "beat_scheduler"),
    (
        "jobs without a priority come first, and 1 is the highest; use the task's `priority` option",
        "task_default_priority",
    ),
)

CELERY_SETTINGS: Final[Mapping[str, CelerySetting]] = {
    **{name: CelerySetting(name, reason) for reason, names in _WITHOUT_EFFECT for name in names.split()},
    **{name: CelerySetting(name, reason, rejected=True) for reason, names in _REJECTED for name in names.split()},
    **{
        row.celery_name: CelerySetting(row.celery_name, f"use {row.name}", replacement=row.name)
        for row in SETTINGS.values()
        if row.celery_name
    },
}
"""Celery's settings by name, without those that bulltask also has."""

_OLD_NAMES: Final[Mapping[str, str]] = {
    "celery_eager_propagates_exceptions": "task_eager_propagates",
    "celery_max_cached_results": "result_cache_max",
    "celery_message_compression": "task_compression",
    "celery_result_db_short_lived_sessions": "database_short_lived_sessions",
    "celery_result_db_tablenames": "database_table_names",
    "celery_result_dburi": "database_url",
    "celery_result_engine_options": "database_engine_options",
    "celery_send_events": "worker_send_task_events",
    "celery_send_task_sent_event": "task_send_sent_event",
    "celery_task_result_expires": "result_expires",
}
"""Names in Celery 3 that differ from the current ones by more than their prefix."""


def current_name(name: str, known: Iterable[str]) -> str:
    """Return the current name for a name of Celery 3, in any case, such as ``CELERYD_CONCURRENCY``; ``""`` for none."""
    lower, names = name.lower(), set(known)
    if lower in _OLD_NAMES:
        return _OLD_NAMES[lower]
    for prefix, families in (
        ("celerybeat_", ("beat_",)),
        ("celeryd_", ("worker_", "")),
        ("celery_", ("", "task_", "result_", "worker_", "beat_")),
        ("", ("",)),
    ):
        if lower.startswith(prefix):
            stem = lower.removeprefix(prefix)
            if found := next((family + stem for family in families if family + stem in names), ""):
                return found
    return ""


def _is(*values: object) -> Callable[[object], bool]:
    return lambda value: value in values


_REDIS_BACKENDS: Final = (
    "",
    *"redis rediss redis+cluster rediss+cluster redis+sentinel rediss+sentinel sentinel rpc unix disabled".split(),
)

_DONE_ANYWAY: Final[Iterable[tuple[Callable[[object], bool], str]]] = (
    (
        lambda _: True,
        "task_track_started result_extended task_send_sent_event worker_send_task_events task_remote_tracebacks",
    ),
    (lambda value: value is None or str(value).partition(":")[0] in _REDIS_BACKENDS, "result_backend"),
    (
        _is(True),
        "task_acks_late task_retry_on_worker_lost task_create_missing_queues task_store_errors_even_if_ignored "
        "task_publish_retry enable_utc broker_connection_retry redis_socket_keepalive redis_retry_on_timeout "
        "worker_enable_remote_control worker_disable_prefetch",
    ),
    (
        _is(True, None),
        "task_reject_on_worker_lost task_acks_on_failure_or_timeout task_acks_on_failure task_acks_on_timeout "
        "broker_connection_retry_on_startup",
    ),
    (
        _is(False),
        "task_store_eager_result task_ignore_result task_inherit_parent_priority worker_hijack_root_logger "
        "worker_direct worker_cancel_long_running_tasks_on_connection_loss",
    ),
    (_is(None, (), [], {}), "task_default_priority broker_read_url broker_write_url broker_transport_options"),
    (_is(None, False, {}), "broker_use_ssl"),
    (_is(None, "redis", "rediss"), "broker_transport"),
    (
        _is(
            None,
            "celery.beat:PersistentScheduler",
            "celery.beat.PersistentScheduler",
            "celery.beat:Scheduler",
            "celery.beat.Scheduler",
        ),
        "beat_scheduler",
    ),
    (_is(2), "task_protocol"),
    (_is(0, 1), "worker_prefetch_multiplier"),
)
_REDUNDANT: Final = {name: accepts for accepts, names in _DONE_ANYWAY for name in names.split()}
"""For each setting that may have a value that matches bulltask's behavior, the test for such values."""
