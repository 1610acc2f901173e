"""The settings of the connection to Redis: part of the table in :mod:`bulltask.config.settings`."""

from __future__ import annotations

from typing import Final

from bulltask.config.credentials import credential_provider
from bulltask.config.parsers import duration, flag, integer, key_prefix, max_reconnects, optional
from bulltask.config.server_urls import url
from bulltask.config.setting import Setting

__all__ = ["BROKER_SETTINGS"]

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
