"""Malformed jobs that no client should store, written directly to Redis."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Final

import redis

from bulltask.transport.call import QueueKeys

__all__ = ["MALFORMED", "add_malformed"]

HUGE: Final = 1.79e308
VALID: Final[Mapping[str, str]] = {"name": "plain", "data": '{"ms":1}', "opts": '{"attempts":3}', "delay": "0"}

MALFORMED: Final[Mapping[str, Mapping[str, str]]] = {
    "attempts 1.79e308": {"opts": json.dumps({"attempts": HUGE})},
    "removeOnFail age 2**64": {"opts": json.dumps({"removeOnFail": {"age": 2**64}}), "name": "broken"},
    "removeOnComplete count 1e300": {"opts": json.dumps({"removeOnComplete": {"count": 1e300}})},
    "keepLogs 1e300": {"opts": json.dumps({"kl": 1e300})},
    "backoff 1e308": {"opts": json.dumps({"attempts": 3, "backoff": {"type": "exponential", "delay": 1e308}})},
    "backoff of an unknown type": {"opts": json.dumps({"attempts": 3, "backoff": {"type": "?"}}), "name": "flaky"},
    "ats that is not an integer": {"ats": "often"},
    "ats with a fraction": {"ats": "1.5"},
    "atm that is not an integer": {"atm": "1e999"},
    "stc that is not an integer": {"stc": "never"},
    "a timestamp that is not a number": {"timestamp": "soon"},
    "repeat.every 0": {"opts": json.dumps({"repeat": {"every": 0, "count": 1}}), "rjk": "soak-zero"},
    "a missing scheduler": {"rjk": "soak-gone", "opts": json.dumps({"repeat": {"pattern": "* * * * *"}})},
    "a surrogate in a deduplication id": {"opts": r'{"de":{"id":"\ud800"}}', "deid": "\\ud800"},
    "a surrogate in the name": {"name": r"\ud800"},
    "no name": {"name": ""},
    "data that is not JSON": {"data": "{"},
    "data 2,000 levels deep": {"data": "[" * 2_000 + "]" * 2_000},
    "options that are not JSON": {"opts": "no"},
    "options that are a list": {"opts": "[]"},
    "options with NaN": {"opts": '{"attempts":NaN}'},
    "a parent that is not JSON": {"parent": "{", "parentKey": "bull:{main}:gone"},
    "a stack trace that is not a list": {"stacktrace": "none", "name": "broken"},
}
"""The fields of a malformed job, by its defect."""

BLOCKING: Final = "ats that is not an integer"
"""BullMQ's script fails each time it reaches such a job."""


def add_malformed(client: redis.Redis, keys: QueueKeys, rng: random.Random) -> dict[str, str]:
    """Add one job of each kind and 39 more that block their queue, in random order; return their defects by id."""
    kinds = [*MALFORMED, *[BLOCKING] * 39]
    rng.shuffle(kinds)
    added = {}
    for kind in kinds:
        job_id = f"malformed-{rng.getrandbits(60):x}"
        fields: dict[Any, Any] = {"timestamp": "1700000000000", "priority": "0", **VALID, **MALFORMED[kind]}
        with client.pipeline() as pipeline:
            pipeline.hset(keys.job(job_id), mapping=fields)
            pipeline.lpush(keys.wait, job_id)
            pipeline.zadd(keys.marker, {"0": 0})
            pipeline.xadd(keys.events, {"event": "added", "jobId": job_id, "name": str(fields["name"])})
            pipeline.execute()
        added[job_id] = kind
    return added
