"""A cluster node and a Sentinel."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import redis

from bulltask.embedded.binary import find_binary
from bulltask.embedded.launch import pick_port
from bulltask.queue import AsyncFlowProducer, FlowProducer, Queue
from bulltask.testing.server import RedisServer
from bulltask.testing.wait import wait_until
from bulltask.transport.broker import Broker

__all__ = ["CLUSTER_NODE", "allow_cluster", "assign_all_slots", "sentinel"]

T = TypeVar("T", Queue, FlowProducer, AsyncFlowProducer)

CLUSTER_NODE = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
"""Arguments that start a server as a cluster node."""


def assign_all_slots(server: RedisServer) -> None:
    """Make the node the whole cluster, so that it executes every command."""
    with redis.Redis.from_url(server.url) as plain:
        plain.execute_command("CLUSTER ADDSLOTSRANGE", 0, 16383)
        wait_until(lambda: plain.execute_command("CLUSTER INFO")["cluster_state"] == "ok", what="the cluster")


def allow_cluster(producer: T) -> T:
    """Let a queue or flow producer connect to the cluster node that has its keys, which is otherwise rejected."""
    context = producer.context if isinstance(producer, Queue) else producer._context
    config, url = context.broker.config, context.broker.endpoint.url
    context.broker.close()
    broker = Broker(config, url, clustered=True)
    context._broker = lambda: broker
    return producer


@contextmanager
def sentinel(directory: Path) -> Iterator[str]:
    """Run a Sentinel that monitors no server; yield its URL."""
    port, file = pick_port(), directory / "sentinel.conf"
    file.write_text(f"port {port}\nbind 127.0.0.1\ndir {directory}\n")
    process = subprocess.Popen([find_binary("valkey").path, file, "--sentinel"], stdout=subprocess.DEVNULL)
    try:
        with redis.Redis(port=port) as plain:
            wait_until(lambda: _answers(plain), what="the Sentinel")
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait()


def _answers(plain: Any) -> bool:
    try:
        return bool(plain.ping())
    except redis.ConnectionError:
        return False
