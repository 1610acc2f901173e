"""Malformed jobs, which no client of BullMQ writes: every field with every kind of wrong value, in every state."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

from bulltask.transport.call import QueueKeys

__all__ = ["MalformedJob", "malformed_job", "store"]

Text = str | bytes

_FIELDS: Final = (
    "name data opts timestamp delay priority atm ats stc processedOn finishedOn progress returnvalue failedReason "
    "stacktrace defa parentKey parent rjk nrjid deid pb bulltask:crashes"
).split()
_OPTIONS: Final = (
    "attempts backoff delay lifo priority removeOnComplete removeOnFail kl stackTraceLimit de repeat repeatJobKey "
    "prevMillis jobId timestamp parent sizeLimit fpof bulltask"
).split()
_BULLTASK_OPTIONS: Final = "v expires ttl softTimeLimit timeLimit headers".split()
_RULE: Final = "every pattern tz startDate endDate limit count offset utc immediately jobId key".split()
_NUMBERS: Final = ("nan", "-nan", "inf", "-inf", "1e308", "1e400", "-1", "1.5", "01", "0x10", " 1", "1 ", "٣", "-0")
_LARGE: Final = (2**31, 2**53, 2**63 - 1, 2**63, -(2**63), 2**64, 10**30, 10**400)
_DEEP: Final = (20, 600, 1_200, 100_000)
_SIDE_KEYS: Final = ("lock", "dependencies", "unsuccessful", "processed", "failed", "logs")
_KINDS: Final = ("string", "list", "set", "zset", "stream")
STATES: Final = ("wait", "wait", "wait", "wait", "prioritized", "delayed", "active")


@dataclass(slots=True)
class MalformedJob:
    """A malformed job.

    Attributes:
        id: The id, which need not be UTF-8.
        state: ``wait``, ``prioritized``, ``delayed`` (and due), or ``active`` (its worker is gone).
        defects: Descriptions of what is wrong.
        fields: The fields of the job's hash.
        key_type: The type of the job's key, usually ``hash``.
        side_keys: The types of its other keys that have a wrong type, by key suffix.
    """

    id: bytes
    state: str
    defects: list[str] = field(default_factory=list)
    fields: dict[str, Text] = field(default_factory=dict)
    key_type: str = "hash"
    side_keys: dict[str, str] = field(default_factory=dict)

    def add_defect(self, what: str, value: object) -> None:
        """Record a defect."""
        text = value.decode("utf-8", "backslashreplace") if isinstance(value, bytes) else str(value)
        self.defects.append(f"{what}={text if len(text) < 60 else f'{text[:20]}…({len(text)})'}")


def malformed_job(rng: random.Random, number: int, task: str, now_ms: int) -> MalformedJob:
    """Return a random malformed job for ``task``; the task name itself may be the defect."""
    job = MalformedJob(_id(rng, number), rng.choice(STATES))
    options: dict[str, Any] = {"attempts": rng.choice([0, 1, 3])}
    job.fields = {"name": task, "data": "{}", "timestamp": str(now_ms), "delay": "0", "priority": "0"}
    for _ in range(rng.choice([1, 1, 1, 2, 3])):
        _BREAKERS[rng.choice(tuple(_BREAKERS))](rng, job, options)
    job.fields.setdefault("opts", json.dumps(options))
    if job.fields["opts"] == _MISSING:
        del job.fields["opts"]
    return job


def store(redis: Any, keys: QueueKeys, job: MalformedJob, now_ms: int) -> None:
    """Write a job to Redis and add it to the key of its state."""
    key = keys.base.encode() + job.id
    if job.key_type == "hash":
        if job.fields:
            redis.hset(key, mapping=job.fields)
    else:
        _MAKE[job.key_type](redis, key)
    for end, kind in job.side_keys.items():
        side_key = keys.base.encode() + end[1:].encode() if end.startswith("/") else key + b":" + end.encode()
        _MAKE[kind](redis, side_key)
    if job.state == "prioritized":
        redis.zadd(keys.prioritized, {job.id: 2**32})
    elif job.state == "delayed":
        redis.zadd(keys.delayed, {job.id: now_ms * 4096})
    else:
        redis.lpush(keys.base + job.state, job.id)


# ---- defects ---------------------------------------------------------------------------------------------------------

_MISSING: Final = "\0missing"


def _id(rng: random.Random, number: int) -> bytes:
    kinds = [b"bad-%d", b"bad-%d", b"bad-%d", b"b\xc3\xa4d-%d", b"b\xff\xfe-%d", b"a:b:c:d:%d", b"%d-" + b"x" * 300]
    return rng.choice(kinds) % number


def _text(rng: random.Random) -> Text:
    """Return a random value for a field."""
    return rng.choice(
        [
            lambda: rng.choice(_NUMBERS),
            lambda: str(rng.choice(_LARGE)),
            lambda: rng.choice(["", "text", "null", "true", "[]", "{}", "{", '"text"', "5", "NaN", '{"a":NaN}']),
            lambda: rng.choice([b"\xff\xfe\x00", b'{"a":"\xff"}', b"\xed\xa0\x80", b"\x00"]),
            lambda: rng.choice([r'"\ud800"', r'{"\ud800":"\udfff"}', '[{"id":null}]', '{"id":5,"queueKey":[]}']),
            lambda: "[" * (depth := rng.choice(_DEEP)) + "]" * depth,
            lambda: '{"a":' * (depth := rng.choice(_DEEP)) + "1" + "}" * depth,
            lambda: rng.choice(["x" * 200_000, "9" * 5_000]),
            lambda: json.dumps(_json(rng)),
        ]
    )()


def _json(rng: random.Random) -> Any:
    """Return a random value for an option."""
    return rng.choice(
        [
            lambda: rng.choice([None, True, False, "", "text", "5", "\ud800", [], {}, [None], -1, 0, 1.5, -0.0]),
            lambda: rng.choice(_LARGE),
            lambda: rng.choice([1e308, -1e308, 1e-300]),
            lambda: {rng.choice(["age", "count", "limit", "type", "delay", "jitter", "id"]): _json(rng)},
            lambda: {"type": rng.choice(["fixed", "exponential", "custom", 5, ""]), "delay": _json(rng)},
            lambda: {name: _json(rng) for name in rng.sample(_RULE, 3)},
            lambda: _nested(rng.choice(_DEEP[:3])),
        ]
    )()


def _nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(min(depth, 900)):
        value = [value]
    return value


def _break_field(rng: random.Random, job: MalformedJob, _: dict[str, Any]) -> None:
    name = rng.choice(_FIELDS)
    if rng.random() < 0.2:
        job.fields.pop(name, None)
        if name == "opts":
            job.fields[name] = _MISSING
        job.add_defect(name, "missing")
    else:
        job.fields[name] = value = _text(rng)
        job.add_defect(name, value)


def _break_option(rng: random.Random, job: MalformedJob, options: dict[str, Any]) -> None:
    name = rng.choice(_OPTIONS)
    options[name] = value = _json(rng)
    job.add_defect(f"opts.{name}", json.dumps(value))


def _break_bulltask_option(rng: random.Random, job: MalformedJob, options: dict[str, Any]) -> None:
    bulltask = options["bulltask"] = {"v": 1, rng.choice(_BULLTASK_OPTIONS): _json(rng)}
    job.add_defect("opts.bulltask", json.dumps(bulltask))


def _break_rule(rng: random.Random, job: MalformedJob, options: dict[str, Any]) -> None:
    rule = options["repeat"] = {name: _json(rng) for name in rng.sample(_RULE, rng.randint(1, 3))}
    if rng.random() < 0.5:
        job.fields["rjk"] = "series"
    job.add_defect("opts.repeat", json.dumps(rule))


def _break_parent(rng: random.Random, job: MalformedJob, _: dict[str, Any]) -> None:
    parent = {"id": rng.choice(["none", "", 5, None]), "queueKey": rng.choice(["bull:{none}", "", 5, None, "x" * 99])}
    parent[rng.choice(["fpof", "cpof", "idof", "rdof", "more"])] = _json(rng)
    job.fields["parent"] = json.dumps(parent)
    if rng.random() < 0.7:
        job.fields["parentKey"] = rng.choice(["bull:{none}:none", "", "none", ":", "bull:{none}:"])
    job.add_defect("parent", job.fields["parent"])


def _break_key(rng: random.Random, job: MalformedJob, _: dict[str, Any]) -> None:
    job.key_type = rng.choice([*_KINDS, "none"])
    job.add_defect("key", job.key_type)


def _break_side_key(rng: random.Random, job: MalformedJob, _: dict[str, Any]) -> None:
    end = rng.choice(_SIDE_KEYS)
    # A lock that is a string without an expiry looks like a running job's lock, so it gets another type.
    kind = rng.choice(_KINDS[1:] if end == "lock" else _KINDS)
    job.side_keys[end] = kind
    job.add_defect(f":{end}", kind)


def _break_deduplication(rng: random.Random, job: MalformedJob, options: dict[str, Any]) -> None:
    name = f"dd-{rng.getrandbits(32)}"
    job.fields["deid"], options["de"] = name, {"id": name}
    job.side_keys[f"/de:{name}"] = kind = rng.choice(_KINDS[1:])
    job.add_defect("de:", kind)


_Breaker = Callable[[random.Random, MalformedJob, dict[str, Any]], None]
_BREAKERS: Final[dict[str, _Breaker]] = {
    "field": _break_field,
    "field again": _break_field,
    "option": _break_option,
    "option again": _break_option,
    "bulltask option": _break_bulltask_option,
    "rule": _break_rule,
    "parent": _break_parent,
    "key": _break_key,
    "side key": _break_side_key,
    "deduplication": _break_deduplication,
}

_MAKE: Final[dict[str, Callable[[Any, bytes], Any]]] = {
    "none": lambda redis, key: redis.delete(key),
    "string": lambda redis, key: redis.set(key, "text"),
    "list": lambda redis, key: redis.lpush(key, "text"),
    "set": lambda redis, key: redis.sadd(key, "text"),
    "zset": lambda redis, key: redis.zadd(key, {"text": 1}),
    "stream": lambda redis, key: redis.xadd(key, {"text": "1"}),
}
