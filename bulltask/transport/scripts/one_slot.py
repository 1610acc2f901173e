"""Checks that the queues of a flow are in one slot of a Redis Cluster, before its jobs are sent."""

from __future__ import annotations

from collections.abc import Iterable

from redis.crc import key_slot

from bulltask.errors import ConfigError
from bulltask.jobs.errbacks import read_errbacks
from bulltask.jobs.job import NewJob
from bulltask.transport.keys import QueueKeys

__all__ = ["check_one_slot"]


def check_one_slot(jobs: Iterable[tuple[QueueKeys, NewJob]]) -> None:
    """Check that a cluster can store jobs in one transaction, and later run them as a flow.

    A worker finishes a job and updates its parent, or adds its error callbacks, in one script, whose keys must be in
    one slot, too. If they were not, only that script would fail, after the task has run.

    Args:
        jobs: The jobs of one flow, each with the keys of its queue, which are in one slot.

    Raises:
        ConfigError: The queues of the jobs, of their parents and of their error callbacks are in several slots.
    """
    slots: dict[str, int] = {}
    for keys, job in jobs:
        slots[keys.base[:-1]] = _slot(keys.base)
        if job.parent is not None:
            slots[str(job.parent.data["queueKey"])] = _slot(job.parent.key)
        for errback in read_errbacks(job.options.canvas.get("errbacks", "[]")):
            slots[errback.queue] = _slot(f"{errback.queue}:")
    if len(set(slots.values())) > 1:
        queues = ", ".join(f"{queue} (slot {slot})" for queue, slot in sorted(slots.items()))
        raise ConfigError(
            "in a Redis Cluster, the queues of a flow or canvas, of its parent job and of its error callbacks must be "
            f"in one slot, but these are in several: {queues}. Nothing was sent. Put the queues into one slot: give "
            "them names with the same tag ('mail{shop}', 'news{shop}'; in Node.js: new Queue('mail{shop}')), or set "
            "prefix='{bull}' in every app and Node.js client, which puts all queues on one node"
        )


def _slot(key: str) -> int:
    return int(key_slot(key.encode("utf-8", "surrogateescape")))
