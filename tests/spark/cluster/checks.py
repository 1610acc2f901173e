"""Check the output of ``three_ways.py`` against Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

__all__ = ["check_three_ways"]

QUEUES = {"mail": ("count", 200), "plain": ("plain", 50), "feed": ("fed", 100)}


def check_three_ways(told: Mapping[str, Any], server: redis.Redis) -> None:
    """Compare jobs, events and results with a server that had nothing else."""
    jobs, events = [], []
    for queue, (name, count) in QUEUES.items():
        prefix = f"bull:{{{queue}}}"
        ids: Any = server.lrange(f"{prefix}:wait", 0, -1)
        assert len(ids) == len(set(ids)) == count
        data = {server.hget(f"{prefix}:{one}", "data") for one in ids}
        assert data == {f'{{"id":{number}}}' for number in range(count)}
        jobs += [[queue, one, name, server.hget(f"{prefix}:{one}", "data")] for one in ids]
        entries: Any = server.xrange(f"{prefix}:events")
        events += [[queue, at, fields["event"], fields["jobId"]] for at, fields in entries]
    assert told["report"] == [200, 200, 0, [["unfinished", 200]]]
    assert sorted(told["jobs"]) == sorted(jobs)
    assert len(events) >= 2 * len(jobs)
    assert sorted(told["events"]) == sorted(events)
    assert sorted(told["streamed"]) == sorted(events)
