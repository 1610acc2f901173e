"""Malformed jobs that hypothesis makes: each ends with a reason or waits, no process dies, and valid jobs complete.

One worker runs all examples. ``make test`` makes 200 examples and ``python -m tools fuzz`` 10,000
(``BULLTASK_FUZZ_EXAMPLES``). ``--hypothesis-seed`` reruns a failure.
"""

from __future__ import annotations

import re
import sys
import time
from collections import Counter
from contextlib import suppress
from typing import Any, Final

import pytest
import redis

from bulltask.testing.worker import wait_until
from bulltask.transport.call import QueueKeys
from tests.fuzz.running import SETTINGS, TASKS, Processes, make_examples
from tests.fuzz.strategies import FuzzedJob, fuzzed_jobs
from tests.interop.node_bridge import NodeBridge, NodeError
from tests.support.malformed_jobs import MalformedJob, store
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.process, pytest.mark.interop, pytest.mark.timeout(1_800)]

AT_ONCE: Final = 400
STATES: Final = ("wait", "prioritized", "delayed", "active")
MARKER: Final = b"0:"
"""The beginning of BullMQ 3's markers, which workers remove."""
SETS: Final = ("completed", "failed", "waiting-children", "delayed")


class FuzzedQueue:
    """Adds fuzzed jobs to a queue in batches, and checks that each of them has ended, or waits.

    Args:
        url: The server.
        keys: The queue.

    Attributes:
        ended: The number of jobs by what became of them.
        reasons: The number of jobs by the reason of their failure, without numbers and ids.
        problems: What must not happen.
    """

    def __init__(self, url: str, keys: QueueKeys) -> None:
        self.redis: Any = redis.Redis.from_url(url)
        self._keys = keys
        self.redis.hset(keys.meta, "opts.maxLenEvents", 10_000_000)
        self._count, self._last_event = 0, b"-"
        self._jobs: dict[bytes, FuzzedJob] = {}
        self.ended: Counter[str] = Counter()
        self.reasons: Counter[str] = Counter()
        self.problems: list[str] = []

    def add(self, example: FuzzedJob) -> None:
        """Add a job, and a valid one behind it; wait for both if there are many."""
        now_ms = int(time.time() * 1_000) - 1_000
        job, self._count = example.job, self._count + 1
        valid = MalformedJob(b"good-%d" % self._count, STATES[self._count % 4])
        valid.fields = {"name": ("work", "awork")[self._count % 2], "data": "{}", "opts": "{}", "timestamp": "1"}
        job.id += b"#%d" % self._count
        self._place(example, now_ms)
        store(self.redis, self._keys, valid, now_ms)
        self._jobs[job.id] = example
        self._jobs[valid.id] = FuzzedJob(valid, type(example.placement)())
        if self._count % AT_ONCE == 0:
            self.settle()

    def settle(self) -> None:
        """Wait until all jobs have ended or wait for something, and record what became of them."""
        self.redis.zadd(self._keys.marker, {"0": 0})
        try:
            wait_until(lambda: not self._unfinished(), 60, "the outcomes of all jobs")
            left = set[bytes]()  # not read again: a job that is delayed again and again may be running now
        except TimeoutError:
            left = self._unfinished()
        ends, sets = self._ends(), {name: set(self.redis.zrange(self._key(name), 0, -1)) for name in SETS}
        for job_id, example in self._jobs.items():
            state = next((name for name in SETS if job_id in sets[name]), ends.get(job_id, ("", ""))[0])
            event, reason = ends.get(job_id, ("", ""))
            if not state and job_id not in left and not job_id.startswith(MARKER) and (state := self._later(job_id)):
                sets[state].add(job_id)
            what = state or ("left" if job_id in left else "nowhere")
            self.ended[what] += 1
            self._check(example, what, event, reason)
        self._forget(sets)

    def close(self) -> None:
        """Close the connection."""
        self.redis.close()

    def _check(self, example: FuzzedJob, what: str, event: str, reason: str) -> None:
        job = example.job
        name = f"{job.id[:40]!r} in {(job.state, *example.placement.more_states)}: {job.defects}"
        if job.id.startswith(b"good-"):
            if what != "completed":
                self.problems.append(f"a valid job is {what}: {name}, {reason}")
        elif what in {"left", "nowhere"} and not job.id.startswith(MARKER):
            self.problems.append(f"{what}: {name}")
        elif event == "failed":
            self.reasons[re.sub(r"\S*#\d+\S*|\d+|'.*'|\".*\"|b'.*", "…", reason)[:110]] += 1
            if "defa" not in job.fields and (len(reason.split()) < 3 or "Traceback" in reason):
                self.problems.append(f"no reason that explains the failure, {reason!r}: {name}")

    def _place(self, example: FuzzedJob, now_ms: int) -> None:
        job, keys = example.job, self._keys
        key = keys.base.encode() + job.id
        if example.placement.lock_ms and "lock" not in job.side_keys:
            self.redis.set(key + b":lock", "another-worker", px=example.placement.lock_ms)
        for end in job.side_keys:
            if end.startswith("/"):  # a key of the queue, which an earlier job may have had
                self.redis.delete(keys.base + end[1:])
        store(self.redis, keys, job, now_ms)
        for state in example.placement.more_states:
            if state in {"wait", "active"}:
                self.redis.lpush(self._key(state), job.id)
            else:
                score = {"delayed": now_ms * 4096, "prioritized": 2**32}.get(state, now_ms)
                self.redis.zadd(self._key(state), {job.id: score})

    def _later(self, job_id: bytes) -> str:
        """Return the state of a job that was running: one whose scheduler is malformed is delayed again and again."""
        with suppress(TimeoutError):
            return wait_until(
                lambda: next((name for name in SETS if self.redis.zscore(self._key(name), job_id) is not None), ""),
                what="the end of an attempt",
            )
        return ""

    def _key(self, name: str) -> str:
        return self._keys.base + name

    def _unfinished(self) -> set[bytes]:
        pipe, keys = self.redis.pipeline(), self._keys
        pipe.lrange(keys.wait, 0, -1).lrange(keys.active, 0, -1).zrange(keys.prioritized, 0, -1)
        pipe.zrangebyscore(keys.delayed, 0, int(time.time() * 1_000) * 4096)
        return {job for found in pipe.execute() for job in found}

    def _ends(self) -> dict[bytes, tuple[str, str]]:
        """Return the last event and the reason of the failure of each job that has ended since the last call."""
        ends: dict[bytes, tuple[str, str]] = {}
        entries: Any = self.redis.xrange(self._keys.events, self._last_event, "+")
        for entry_id, fields in entries:
            self._last_event = b"(" + entry_id
            if (event := fields[b"event"].decode()) in {"completed", "failed"}:
                ends[fields[b"jobId"]] = event, fields.get(b"failedReason", b"").decode("utf-8", "replace")
        return ends

    def _forget(self, sets: dict[str, set[bytes]]) -> None:
        """Delete the jobs, so that the server's memory does not grow with their number."""
        for job_id in self._jobs:
            self.redis.delete(self._keys.base.encode() + job_id)
        for name in ("completed", "failed", "waiting-children"):
            self.redis.delete(self._key(name))
        if sets["delayed"]:
            self.redis.zrem(self._keys.delayed, *sets["delayed"])
        self._jobs.clear()


def test_every_malformed_job_ends_with_a_reason_or_waits(
    harness: WorkerHarness, node: NodeBridge, examples: int
) -> None:
    worker = harness.worker(TASKS, children=2, settings=SETTINGS)
    processes = Processes(worker, 2)
    at: dict[str, Any] = {"queue": harness.keys.name}
    node.call("events.start", **at)
    queue = FuzzedQueue(harness.url, harness.keys)
    make_examples(examples * 8 // 10, fuzzed_jobs("work", lambda: int(time.time() * 1_000)), queue.add)
    queue.settle()
    with suppress(NodeError):  # it cannot read some of the jobs
        node.call("queue.call", method="getJobs", args=[["completed", "failed", "delayed"]], **at)
    harness.report(ended=dict(queue.ended), reasons=len(queue.reasons))
    for reason, count in queue.reasons.most_common():
        sys.stdout.write(f"  {count:6} {reason}\n")
    assert queue.problems == []
    processes.check()
    job = node.call("queue.add", name="work", data={}, opts={}, **at)
    node.wait_event("completed", lambda args: args["jobId"] == job["id"])
    assert worker.stop() == 0
    queue.close()
