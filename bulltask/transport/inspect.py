"""Reads properties of a server and its queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bulltask.transport.call import Call, command
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.queue import get_counts

__all__ = [
    "STATES",
    "ServerSettings",
    "count_runnable_jobs",
    "count_unfinished_jobs",
    "queue_lengths",
    "read_queue_versions",
    "read_server_settings",
]

_DELAYED_SCORES: Final = 4096
"""Number of scores of delayed jobs for each millisecond, as in BullMQ."""
STATES: Final = ("wait", "active", "completed", "failed", "delayed", "prioritized", "waiting-children", "paused")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Properties of the server that a worker checks; in a cluster, those of the worst node.

    Attributes:
        version: The Redis version that the server is compatible with; the lowest of a cluster's nodes.
        eviction: The server's ``maxmemory_policy``; any policy other than ``noeviction`` may delete jobs silently.
            ``noeviction`` only if all nodes have it.
        max_clients: How many clients may connect (``maxclients``); ``None`` if the server does not say.
        connected: How many clients are connected.
    """

    version: tuple[int, ...]
    eviction: str
    max_clients: int | None
    connected: int


def read_server_settings(client: SyncClient) -> ServerSettings:
    """Read the server's settings from ``INFO``; in a cluster, those of every node that has slots."""
    nodes = client.run_on_all_nodes(command("INFO", parse_reply=_settings))
    eviction = next((node.eviction for node in nodes if node.eviction != "noeviction"), "noeviction")
    known = [node for node in nodes if node.max_clients is not None]
    fullest = min(known or nodes, key=lambda node: (node.max_clients or 0) - node.connected)
    version = min(node.version for node in nodes)
    return ServerSettings(version, eviction, fullest.max_clients, fullest.connected)


def queue_lengths(client: SyncClient, queues: Sequence[QueueKeys]) -> Mapping[str, Mapping[str, int]]:
    """Count each queue's jobs in each state, in one round trip; keyed by the queue's name in the app."""
    counts = client.run_many([get_counts(keys, STATES) for keys in queues])
    return {keys.queue: lengths for keys, lengths in zip(queues, counts, strict=True)}


def count_runnable_jobs(client: SyncClient, queues: Sequence[QueueKeys], now_ms: int) -> int:
    """Count the jobs that a worker of these queues could run now, in one round trip.

    These are the waiting and prioritized jobs, and the delayed jobs that are due (at most 100 of each queue), except
    those of paused queues.

    Args:
        client: Makes the calls.
        queues: The queues.
        now_ms: The server's time.
    """
    calls: list[Call[Any]] = []
    for keys in queues:
        due: Call[Any] = command(
            "ZRANGEBYSCORE", keys.delayed, 0, _DELAYED_SCORES * (now_ms + 1) - 1, "LIMIT", 0, 100, parse_reply=len
        )
        paused: Call[Any] = command("HEXISTS", keys.meta, "paused")
        calls += [paused, command("LLEN", keys.wait), command("ZCARD", keys.prioritized), due]
    counts = client.run_many(calls)
    by_queue = [counts[start : start + 4] for start in range(0, len(counts), 4)]
    return sum(sum(lengths) for paused, *lengths in by_queue if not paused)


def count_unfinished_jobs(client: SyncClient, queues: Sequence[QueueKeys]) -> list[int]:
    """Count each queue's waiting, paused, prioritized and delayed jobs in one round trip; reads only these keys."""
    calls: list[Call[Any]] = []
    for keys in queues:
        calls += [command("LLEN", keys.wait), command("LLEN", keys.paused)]
        calls += [command("ZCARD", keys.prioritized), command("ZCARD", keys.delayed)]
    counts = client.run_many(calls)
    return [sum(counts[start : start + 4]) for start in range(0, len(counts), 4)]


def read_queue_versions(client: SyncClient, queues: Sequence[QueueKeys]) -> list[str]:
    """Read the version of the client that wrote each queue's metadata: ``bullmq:5.62.0``; ``""`` if missing."""
    calls: list[Call[str]] = [command("HGET", keys.meta, "version", parse_reply=_text) for keys in queues]
    return client.run_many(calls)


def _text(reply: Any) -> str:
    return "" if reply is None else reply.decode("utf-8", "replace")


def _settings(reply: Any) -> ServerSettings:
    lines = reply.decode("utf-8", "replace").splitlines()
    info = dict(line.split(":", 1) for line in lines if ":" in line)
    numbers = tuple(int(part) for part in info.get("redis_version", "0").split(".") if part.isdecimal())
    return ServerSettings(
        numbers,
        info.get("maxmemory_policy", "noeviction"),
        int(info["maxclients"]) if info.get("maxclients", "").isdecimal() else None,
        int(connected) if (connected := info.get("connected_clients", "")).isdecimal() else 0,
    )
