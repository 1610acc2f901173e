"""A cluster node and a Sentinel."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis

from bulltask.embedded.server import find_binary, pick_port
from bulltask.testing.worker import RedisServer, wait_until

__all__ = ["CLUSTER_NODE", "assign_all_slots", "routed", "sentinel"]

CLUSTER_NODE = ("--cluster-enabled", "yes", "--cluster-require-full-coverage", "no")
"""Arguments that start a server as a cluster node."""


def assign_all_slots(server: RedisServer) -> None:
    """Make the node the whole cluster, so that it executes every command."""
    with redis.Redis.from_url(server.url) as plain:
        plain.execute_command("CLUSTER ADDSLOTS", *range(16_384))
        wait_until(lambda: plain.execute_command("CLUSTER INFO")["cluster_state"] == "ok", what="the cluster")


def routed(url: str) -> str:
    """Return the broker URL of the cluster to which the node at ``url`` belongs."""
    return url.replace("redis://", "redis+cluster://", 1).removesuffix("/0")


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
