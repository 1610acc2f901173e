"""Check the output of ``read_and_write.py`` against Redis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis

__all__ = ["check_reads_and_writes"]

QUEUES = {"mail": ("count", 200), "plain": ("plain", 50), "feed": ("fed", 100)}


def check_reads_and_writes(report: Mapping[str, Any], server: redis.Redis) -> None:
    """Compare jobs, events and results with the contents of the server, which was empty before."""
    jobs, events = [], []
    for queue, (name, count) in QUEUES.items():
        prefix = f"bull:{{{queue}}}"
        ids: Any = server.lrange(f"{prefix}:wait", 0, -1)
        assert len(ids) == len(set(ids)) == count
        data = {server.hget(f"{prefix}:{job_id}", "data") for job_id in ids}
        assert data == {f'{{"id":{number}}}' for number in range(count)}
        jobs += [[queue, job_id, name, server.hget(f"{prefix}:{job_id}", "data")] for job_id in ids]
        entries: Any = server.xrange(f"{prefix}:events")
        events += [[queue, entry_id, fields["event"], fields["jobId"]] for entry_id, fields in entries]
    assert report["report"] == [200, 200, 0, [["unfinished", 200]]]
    assert sorted(report["jobs"]) == sorted(jobs)
    assert len(events) >= 2 * len(jobs)
    assert sorted(report["events"]) == sorted(events)
    assert sorted(report["streamed"]) == sorted(events)
