"""The types of all settings, for type checkers and editors; by tools/generate_setting_types.py."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import tzinfo
from typing import Any, TypedDict

from bulltask.config.urls import SecretUrl
from bulltask.jobs.clock import Duration

__all__ = ["AppOptions", "SettingOptions", "SettingTypes"]


class SettingTypes:
    """The settings of bulltask, then those that only Celery has."""

    broker_url: str | SecretUrl
    broker_credential_provider: object
    prefix: str
    queue_hash_tag: bool
    redis_socket_connect_timeout: Duration
    redis_socket_timeout: Duration
    broker_publish_retries: int
    broker_publish_timeout: Duration | None
    broker_publish_replicas: int
    broker_connection_max_retries: int | None
    broker_reconnect_delay: Duration
    broker_reconnect_delay_max: Duration
    max_payload: int
    task_serializer: str
    result_serializer: str
    accept_content: Iterable[str]
    result_accept_content: Iterable[str] | None
    task_compression: str | None
    result_compression: str | None
    compression_threshold: int
    max_decompressed: int
    max_decompressed_tokens: int
    payload_signing_keys: Any
    payload_encryption_keys: Any
    max_events: int
    max_logs: int | None
    task_default_queue: str
    task_canvas_queue: str | None
    task_allow_error_cb_on_chord_header: bool
    task_queues: Any
    task_annotations: Any
    task_routes: Any
    task_max_retries: int
    task_max_explicit_retries: int | None
    task_retry_backoff: Duration
    task_retry_backoff_max: Duration
    backoff_strategies: str | Iterable[str]
    task_retry_jitter: bool | float
    task_soft_time_limit: Duration | None
    task_time_limit: Duration | None
    task_default_rate_limit: str | float | None
    task_typed: bool | None
    convert_untyped: bool
    task_always_eager: bool
    task_eager_propagates: bool
    incompatible_timeout: Duration | None
    imports: str | Iterable[str]
    include: str | Iterable[str]
    result_expires: Duration | None
    result_failure_expires: Duration | None
    worker_concurrency: int | str
    worker_pool: str
    worker_autoscale: str | Sequence[int] | None
    worker_autoscale_keepalive: Duration
    worker_start_method: str
    worker_max_tasks_per_child: int | None
    worker_max_memory_per_child: int | str | None
    worker_hard_memory_limit: int | str | None
    worker_prefetch: int
    worker_async_concurrency: int
    lock_duration: Duration
    lock_renew_time: Duration | None
    stalled_interval: Duration
    max_stalled_count: int
    skip_stalled_check: bool
    worker_outbox_relay: bool
    max_crashes: int
    max_releases: int | None
    max_started_attempts: int | None
    drain_delay: Duration
    run_retry_delay: Duration
    worker_disable_rate_limits: bool
    worker_paused: bool
    shutdown_timeout: Duration
    shutdown_notice: Duration
    worker_name: str | None
    limiter: Any
    remove_on_complete: Any
    remove_on_fail: Any
    metrics_max_data_points: int | None
    metrics_port: int | None
    metrics_host: str
    metrics_buckets: str | Iterable[float]
    loglevel: str
    log_format: str
    worker_redirect_stdouts: bool
    worker_redirect_stdouts_level: str
    timezone: str | tzinfo | None
    spark_master: str | None
    spark_conf: str | Mapping[str, Any] | None
    beat_schedule: Mapping[str, Any] | None
    arangodb_backend_settings: Any
    azureblockblob_base_path: Any
    azureblockblob_connection_timeout: Any
    azureblockblob_container_name: Any
    azureblockblob_read_timeout: Any
    azureblockblob_retry_increment_base: Any
    azureblockblob_retry_initial_backoff_sec: Any
    azureblockblob_retry_max_attempts: Any
    beat_cron_starting_deadline: Any
    beat_enable_remote_control: Any
    beat_max_loop_interval: Any
    beat_remote_control_max_tick_age: Any
    beat_schedule_filename: Any
    beat_scheduler: Any
    beat_sync_every: Any
    broker_channel_error_retry: Any
    broker_connection_retry: Any
    broker_connection_retry_on_startup: Any
    broker_connection_timeout: Any
    broker_failover_strategy: Any
    broker_heartbeat: Any
    broker_heartbeat_checkrate: Any
    broker_host: Any
    broker_login_method: Any
    broker_native_delayed_delivery_queue_type: Any
    broker_password: Any
    broker_pool_acquire_timeout: Any
    broker_pool_limit: Any
    broker_port: Any
    broker_read_url: Any
    broker_transport: Any
    broker_transport_options: Any
    broker_use_ssl: Any
    broker_user: Any
    broker_vhost: Any
    broker_write_url: Any
    cache_backend: Any
    cache_backend_options: Any
    cassandra_auth_kwargs: Any
    cassandra_auth_provider: Any
    cassandra_bundle_path: Any
    cassandra_entry_ttl: Any
    cassandra_keyspace: Any
    cassandra_options: Any
    cassandra_port: Any
    cassandra_read_consistency: Any
    cassandra_servers: Any
    cassandra_table: Any
    cassandra_write_consistency: Any
    control_exchange: Any
    control_queue_durable: Any
    control_queue_exclusive: Any
    control_queue_expires: Any
    control_queue_ttl: Any
    cosmosdbsql_collection_name: Any
    cosmosdbsql_consistency_level: Any
    cosmosdbsql_database_name: Any
    cosmosdbsql_max_retry_attempts: Any
    cosmosdbsql_max_retry_wait_time: Any
    couchbase_backend_settings: Any
    database_create_tables_at_setup: Any
    database_engine_callback: Any
    database_engine_options: Any
    database_short_lived_sessions: Any
    database_table_names: Any
    database_table_schemas: Any
    database_url: Any
    elasticsearch_max_retries: Any
    elasticsearch_retry_on_timeout: Any
    elasticsearch_save_meta_as_text: Any
    elasticsearch_timeout: Any
    enable_utc: Any
    event_exchange: Any
    event_queue_durable: Any
    event_queue_exclusive: Any
    event_queue_expires: Any
    event_queue_prefix: Any
    event_queue_ttl: Any
    event_serializer: Any
    gcs_base_path: Any
    gcs_bucket: Any
    gcs_project: Any
    gcs_ttl: Any
    mongodb_backend_settings: Any
    redis_backend_use_ssl: Any
    redis_db: Any
    redis_host: Any
    redis_max_connections: Any
    redis_password: Any
    redis_port: Any
    redis_retry_on_timeout: Any
    redis_socket_keepalive: Any
    redis_username: Any
    result_backend: Any
    result_backend_always_retry: Any
    result_backend_base_sleep_between_retries_ms: Any
    result_backend_max_retries: Any
    result_backend_max_sleep_between_retries_ms: Any
    result_backend_transport_options: Any
    result_cache_max: Any
    result_chord_expires: Any
    result_chord_join_timeout: Any
    result_chord_retry_interval: Any
    result_exchange: Any
    result_exchange_type: Any
    result_extended: Any
    result_persistent: Any
    s3_access_key_id: Any
    s3_base_path: Any
    s3_bucket: Any
    s3_endpoint_url: Any
    s3_region: Any
    s3_secret_access_key: Any
    security_cert_store: Any
    security_certificate: Any
    security_digest: Any
    security_key: Any
    security_key_password: Any
    task_acks_late: Any
    task_acks_on_failure: Any
    task_acks_on_failure_or_timeout: Any
    task_acks_on_timeout: Any
    task_create_missing_queue_exchange_type: Any
    task_create_missing_queue_type: Any
    task_create_missing_queues: Any
    task_default_delivery_mode: Any
    task_default_exchange: Any
    task_default_exchange_type: Any
    task_default_priority: Any
    task_default_queue_type: Any
    task_default_routing_key: Any
    task_ignore_result: Any
    task_inherit_parent_priority: Any
    task_protocol: Any
    task_publish_retry: Any
    task_publish_retry_policy: Any
    task_queue_max_priority: Any
    task_reject_on_worker_lost: Any
    task_remote_tracebacks: Any
    task_repr_maxlevels: Any
    task_retry_on_worker_lost: Any
    task_send_sent_event: Any
    task_store_eager_result: Any
    task_store_errors_even_if_ignored: Any
    task_track_started: Any
    worker_agent: Any
    worker_autoscaler: Any
    worker_cancel_long_running_tasks_on_connection_loss: Any
    worker_consumer: Any
    worker_deduplicate_successful_tasks: Any
    worker_detect_quorum_queues: Any
    worker_direct: Any
    worker_disable_prefetch: Any
    worker_enable_prefetch_count_reduction: Any
    worker_enable_remote_control: Any
    worker_enable_soft_shutdown_on_idle: Any
    worker_eta_task_limit: Any
    worker_hijack_root_logger: Any
    worker_log_color: Any
    worker_log_datefmt: Any
    worker_log_format: Any
    worker_lost_wait: Any
    worker_pool_putlocks: Any
    worker_pool_restarts: Any
    worker_pool_start_method: Any
    worker_prefetch_multiplier: Any
    worker_proc_alive_timeout: Any
    worker_send_task_events: Any
    worker_soft_shutdown_timeout: Any
    worker_state_db: Any
    worker_task_log_datefmt: Any
    worker_task_log_format: Any
    worker_timer: Any
    worker_timer_precision: Any


class AppSettings(TypedDict, total=False):
    """Settings as arguments of ``App``."""

    broker_credential_provider: object
    prefix: str
    queue_hash_tag: bool
    redis_socket_connect_timeout: Duration
    redis_socket_timeout: Duration
    broker_publish_retries: int
    broker_publish_timeout: Duration | None
    broker_publish_replicas: int
    broker_connection_max_retries: int | None
    broker_reconnect_delay: Duration
    broker_reconnect_delay_max: Duration
    max_payload: int
    task_serializer: str
    result_serializer: str
    accept_content: Iterable[str]
    result_accept_content: Iterable[str] | None
    task_compression: str | None
    result_compression: str | None
    compression_threshold: int
    max_decompressed: int
    max_decompressed_tokens: int
    payload_signing_keys: Any
    payload_encryption_keys: Any
    max_events: int
    max_logs: int | None
    task_default_queue: str
    task_canvas_queue: str | None
    task_allow_error_cb_on_chord_header: bool
    task_queues: Any
    task_annotations: Any
    task_routes: Any
    task_max_retries: int
    task_max_explicit_retries: int | None
    task_retry_backoff: Duration
    task_retry_backoff_max: Duration
    backoff_strategies: str | Iterable[str]
    task_retry_jitter: bool | float
    task_soft_time_limit: Duration | None
    task_time_limit: Duration | None
    task_default_rate_limit: str | float | None
    task_typed: bool | None
    convert_untyped: bool
    task_always_eager: bool
    task_eager_propagates: bool
    incompatible_timeout: Duration | None
    imports: str | Iterable[str]
    include: str | Iterable[str]
    result_expires: Duration | None
    result_failure_expires: Duration | None
    worker_concurrency: int | str
    worker_pool: str
    worker_autoscale: str | Sequence[int] | None
    worker_autoscale_keepalive: Duration
    worker_start_method: str
    worker_max_tasks_per_child: int | None
    worker_max_memory_per_child: int | str | None
    worker_hard_memory_limit: int | str | None
    worker_prefetch: int
    worker_async_concurrency: int
    lock_duration: Duration
    lock_renew_time: Duration | None
    stalled_interval: Duration
    max_stalled_count: int
    skip_stalled_check: bool
    worker_outbox_relay: bool
    max_crashes: int
    max_releases: int | None
    max_started_attempts: int | None
    drain_delay: Duration
    run_retry_delay: Duration
    worker_disable_rate_limits: bool
    worker_paused: bool
    shutdown_timeout: Duration
    shutdown_notice: Duration
    worker_name: str | None
    limiter: Any
    remove_on_complete: Any
    remove_on_fail: Any
    metrics_max_data_points: int | None
    metrics_port: int | None
    metrics_host: str
    metrics_buckets: str | Iterable[float]
    loglevel: str
    log_format: str
    worker_redirect_stdouts: bool
    worker_redirect_stdouts_level: str
    timezone: str | tzinfo | None
    spark_master: str | None
    spark_conf: str | Mapping[str, Any] | None
    beat_schedule: Mapping[str, Any] | None
    arangodb_backend_settings: Any
    azureblockblob_base_path: Any
    azureblockblob_connection_timeout: Any
    azureblockblob_container_name: Any
    azureblockblob_read_timeout: Any
    azureblockblob_retry_increment_base: Any
    azureblockblob_retry_initial_backoff_sec: Any
    azureblockblob_retry_max_attempts: Any
    beat_cron_starting_deadline: Any
    beat_enable_remote_control: Any
    beat_max_loop_interval: Any
    beat_remote_control_max_tick_age: Any
    beat_schedule_filename: Any
    beat_scheduler: Any
    beat_sync_every: Any
    broker_channel_error_retry: Any
    broker_connection_retry: Any
    broker_connection_retry_on_startup: Any
    broker_connection_timeout: Any
    broker_failover_strategy: Any
    broker_heartbeat: Any
    broker_heartbeat_checkrate: Any
    broker_host: Any
    broker_login_method: Any
    broker_native_delayed_delivery_queue_type: Any
    broker_password: Any
    broker_pool_acquire_timeout: Any
    broker_pool_limit: Any
    broker_port: Any
    broker_read_url: Any
    broker_transport: Any
    broker_transport_options: Any
    broker_use_ssl: Any
    broker_user: Any
    broker_vhost: Any
    broker_write_url: Any
    cache_backend: Any
    cache_backend_options: Any
    cassandra_auth_kwargs: Any
    cassandra_auth_provider: Any
    cassandra_bundle_path: Any
    cassandra_entry_ttl: Any
    cassandra_keyspace: Any
    cassandra_options: Any
    cassandra_port: Any
    cassandra_read_consistency: Any
    cassandra_servers: Any
    cassandra_table: Any
    cassandra_write_consistency: Any
    control_exchange: Any
    control_queue_durable: Any
    control_queue_exclusive: Any
    control_queue_expires: Any
    control_queue_ttl: Any
    cosmosdbsql_collection_name: Any
    cosmosdbsql_consistency_level: Any
    cosmosdbsql_database_name: Any
    cosmosdbsql_max_retry_attempts: Any
    cosmosdbsql_max_retry_wait_time: Any
    couchbase_backend_settings: Any
    database_create_tables_at_setup: Any
    database_engine_callback: Any
    database_engine_options: Any
    database_short_lived_sessions: Any
    database_table_names: Any
    database_table_schemas: Any
    database_url: Any
    elasticsearch_max_retries: Any
    elasticsearch_retry_on_timeout: Any
    elasticsearch_save_meta_as_text: Any
    elasticsearch_timeout: Any
    enable_utc: Any
    event_exchange: Any
    event_queue_durable: Any
    event_queue_exclusive: Any
    event_queue_expires: Any
    event_queue_prefix: Any
    event_queue_ttl: Any
    event_serializer: Any
    gcs_base_path: Any
    gcs_bucket: Any
    gcs_project: Any
    gcs_ttl: Any
    mongodb_backend_settings: Any
    redis_backend_use_ssl: Any
    redis_db: Any
    redis_host: Any
    redis_max_connections: Any
    redis_password: Any
    redis_port: Any
    redis_retry_on_timeout: Any
    redis_socket_keepalive: Any
    redis_username: Any
    result_backend: Any
    result_backend_always_retry: Any
    result_backend_base_sleep_between_retries_ms: Any
    result_backend_max_retries: Any
    result_backend_max_sleep_between_retries_ms: Any
    result_backend_transport_options: Any
    result_cache_max: Any
    result_chord_expires: Any
    result_chord_join_timeout: Any
    result_chord_retry_interval: Any
    result_exchange: Any
    result_exchange_type: Any
    result_extended: Any
    result_persistent: Any
    s3_access_key_id: Any
    s3_base_path: Any
    s3_bucket: Any
    s3_endpoint_url: Any
    s3_region: Any
    s3_secret_access_key: Any
    security_cert_store: Any
    security_certificate: Any
    security_digest: Any
    security_key: Any
    security_key_password: Any
    task_acks_late: Any
    task_acks_on_failure: Any
    task_acks_on_failure_or_timeout: Any
    task_acks_on_timeout: Any
    task_create_missing_queue_exchange_type: Any
    task_create_missing_queue_type: Any
    task_create_missing_queues: Any
    task_default_delivery_mode: Any
    task_default_exchange: Any
    task_default_exchange_type: Any
    task_default_priority: Any
    task_default_queue_type: Any
    task_default_routing_key: Any
    task_ignore_result: Any
    task_inherit_parent_priority: Any
    task_protocol: Any
    task_publish_retry: Any
    task_publish_retry_policy: Any
    task_queue_max_priority: Any
    task_reject_on_worker_lost: Any
    task_remote_tracebacks: Any
    task_repr_maxlevels: Any
    task_retry_on_worker_lost: Any
    task_send_sent_event: Any
    task_store_eager_result: Any
    task_store_errors_even_if_ignored: Any
    task_track_started: Any
    worker_agent: Any
    worker_autoscaler: Any
    worker_cancel_long_running_tasks_on_connection_loss: Any
    worker_consumer: Any
    worker_deduplicate_successful_tasks: Any
    worker_detect_quorum_queues: Any
    worker_direct: Any
    worker_disable_prefetch: Any
    worker_enable_prefetch_count_reduction: Any
    worker_enable_remote_control: Any
    worker_enable_soft_shutdown_on_idle: Any
    worker_eta_task_limit: Any
    worker_hijack_root_logger: Any
    worker_log_color: Any
    worker_log_datefmt: Any
    worker_log_format: Any
    worker_lost_wait: Any
    worker_pool_putlocks: Any
    worker_pool_restarts: Any
    worker_pool_start_method: Any
    worker_prefetch_multiplier: Any
    worker_proc_alive_timeout: Any
    worker_send_task_events: Any
    worker_soft_shutdown_timeout: Any
    worker_state_db: Any
    worker_task_log_datefmt: Any
    worker_task_log_format: Any
    worker_timer: Any
    worker_timer_precision: Any


class AppOptions(AppSettings, total=False):
    """The keyword arguments of ``App``."""

    backend: Any
    broker: str | SecretUrl | None
    changes: Mapping[str, Any] | None
    config_source: object
    namespace: str | None
    set_as_current: bool
    task_cls: Any


class SettingOptions(AppSettings, total=False):
    """Settings as keyword arguments."""

    broker_url: str | SecretUrl
