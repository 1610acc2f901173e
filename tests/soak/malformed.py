"""Jobs that no client should have stored, written as a client from outside would."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any, Final

import redis

from bulltask.transport.keys import QueueKeys

__all__ = ["MALFORMED", "add_malformed"]

HUGE: Final = 1.79e308
SOUND: Final[Mapping[str, str]] = {"name": "plain", "data": '{"ms":1}', "opts": '{"attempts":3}', "delay": "0"}

MALFORMED: Final[Mapping[str, Mapping[str, str]]] = {
    "attempts 1.79e308": {"opts": json.dumps({"attempts": HUGE})},
    "removeOnFail age 2**64": {"opts": json.dumps({"removeOnFail": {"age": 2**64}}), "name": "broken"},
    "removeOnComplete count 1e300": {"opts": json.dumps({"removeOnComplete": {"count": 1e300}})},
    "keepLogs 1e300": {"opts": json.dumps({"kl": 1e300})},
    "backoff 1e308": {"opts": json.dumps({"attempts": 3, "backoff": {"type": "exponential", "delay": 1e308}})},
    "backoff of an unknown type": {"opts": json.dumps({"attempts": 3, "backoff": {"type": "?"}}), "name": "flaky"},
    "ats that is no integer": {"ats": "often"},
    "ats of fractions": {"ats": "1.5"},
    "atm that is no integer": {"atm": "1e999"},
    "stc that is no integer": {"stc": "never"},
    "a timestamp that is none": {"timestamp": "soon"},
    "repeat.every 0": {"opts": json.dumps({"repeat": {"every": 0, "count": 1}}), "rjk": "soak-zero"},
    "a scheduler that is not there": {"rjk": "soak-gone", "opts": json.dumps({"repeat": {"pattern": "* * * * *"}})},
    "a surrogate in a deduplication id": {"opts": r'{"de":{"id":"\ud800"}}', "deid": "\\ud800"},
    "a surrogate in the name": {"name": r"\ud800"},
    "no name": {"name": ""},
    "data that is no JSON": {"data": "{"},
    "data 2,000 levels deep": {"data": "[" * 2_000 + "]" * 2_000},
    "options that are no JSON": {"opts": "no"},
    "options that are a list": {"opts": "[]"},
    "options with NaN": {"opts": '{"attempts":NaN}'},
    "a parent that is no JSON": {"parent": "{", "parentKey": "bull:{main}:gone"},
    "a stack trace that is no list": {"stacktrace": "none", "name": "broken"},
}
"""What is wrong to the fields of the job."""

BLOCKING: Final = "ats that is no integer"
"""BullMQ's script stops at such a job each time that it is its turn."""


def add_malformed(client: redis.Redis, keys: QueueKeys, rng: random.Random) -> dict[str, str]:
    """Add one job of each kind and 40 that block their queue, in any order; return what is wrong by id."""
    kinds = [*MALFORMED, *[BLOCKING] * 39]
    rng.shuffle(kinds)
    added = {}
    for kind in kinds:
        job_id = f"malformed-{rng.getrandbits(60):x}"
        fields: dict[Any, Any] = {"timestamp": "1700000000000", "priority": "0", **SOUND, **MALFORMED[kind]}
        with client.pipeline() as pipeline:
            pipeline.hset(keys.job(job_id), mapping=fields)
            pipeline.lpush(keys.wait, job_id)
            pipeline.zadd(keys.marker, {"0": 0})
            pipeline.xadd(keys.events, {"event": "added", "jobId": job_id, "name": str(fields["name"])})
            pipeline.execute()
        added[job_id] = kind
    return added
