"""Questions about a server and its queues, which a worker asks before it starts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from bulltask.transport.call import Call, command
from bulltask.transport.client import Client
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.queue import get_counts

__all__ = ["STATES", "ServerSettings", "described_by", "jobs_under", "queue_lengths", "read_server_settings"]

STATES: Final = ("wait", "active", "completed", "failed", "delayed", "prioritized", "waiting-children", "paused")


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """What a worker needs to know of the server.

    Attributes:
        version: The Redis version that the server is compatible with.
        eviction: Its ``maxmemory_policy``; any other than ``noeviction`` may drop jobs silently.
        persistent: An append-only file or snapshots are on, as far as the server says.
    """

    version: tuple[int, ...]
    eviction: str


def read_server_settings(client: Client) -> ServerSettings:
    """Read the server's settings from ``INFO``."""
    info = client.run(command("INFO", parse_reply=_info))
    numbers = tuple(int(part) for part in info.get("redis_version", "0").split(".") if part.isdecimal())
    return ServerSettings(
        version=numbers,
        eviction=info.get("maxmemory_policy", "noeviction"),
    )


def queue_lengths(client: Client, queues: Sequence[QueueKeys]) -> Mapping[str, Mapping[str, int]]:
    """Count the jobs of each queue in each state in one round trip, by the queue's name in the app."""
    counts = client.run_many([get_counts(keys, STATES) for keys in queues])
    return {keys.queue: found for keys, found in zip(queues, counts, strict=True)}


def jobs_under(client: Client, keys: QueueKeys) -> int:
    """Count the unfinished jobs under exactly these keys."""
    calls: list[Call[Any]] = [
        command("LLEN", keys.wait),
        command("LLEN", keys.paused),
        command("ZCARD", keys.prioritized),
        command("ZCARD", keys.delayed),
    ]
    return sum(client.run_many(calls))


def described_by(client: Client, keys: QueueKeys) -> str:
    """Return which client has described the queue, such as ``bullmq:5.62.0``; ``""`` if none has."""
    return client.run(command("HGET", keys.meta, "version", parse_reply=_text))


def _text(reply: Any) -> str:
    return "" if reply is None else reply.decode("utf-8", "replace")


def _info(reply: Any) -> dict[str, str]:
    lines = reply.decode("utf-8", "replace").splitlines()
    return dict(line.split(":", 1) for line in lines if ":" in line)
