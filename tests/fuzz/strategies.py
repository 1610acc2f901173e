"""Hypothesis strategies: jobs and keys that no client of BullMQ writes, and replies that Redis never sends."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from hypothesis import strategies as st

from tests.support.malformed_jobs import MalformedJob, malformed_job

__all__ = ["FuzzedJob", "Placement", "damaged_keys", "damages", "fuzzed_jobs", "garbage"]

NAMES: Final = (
    "name data opts timestamp delay priority atm ats stc processedOn finishedOn progress returnvalue failedReason "
    "stacktrace defa parentKey parent rjk nrjid deid pb bulltask:crashes bulltask:checkpoint bulltask:throttled"
).split()
OPTIONS: Final = (
    "attempts backoff delay lifo priority removeOnComplete removeOnFail kl stackTraceLimit de repeat repeatJobKey "
    "prevMillis jobId timestamp parent sizeLimit fpof cpof idof rdof tm omc telemetry bulltask"
).split()
KINDS: Final = ("string", "list", "set", "zset", "hash", "stream")
HUGE: Final = 200_000
DEEP: Final = 10_000


# ---- values ----------------------------------------------------------------------------------------------------------

numbers = st.one_of(
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=True, allow_infinity=True),
    st.sampled_from([0, 1, -1, 2**31, 2**53, 2**63 - 1, 2**63, 10**400, 1e308, -0.0]),
)
texts = st.text(st.characters(codec=None), max_size=20)  # includes lone surrogates
json_values = st.recursive(
    st.none() | st.booleans() | numbers | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)


def encode(value: object) -> bytes:
    """Encode as JSON that may contain NaN, and surrogates as invalid UTF-8."""
    return json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")


def nested(pair: tuple[str, str]) -> bytes:
    return (pair[0] * DEEP + "1" + pair[1] * DEEP).encode()


fields = st.one_of(
    st.binary(max_size=40),
    json_values.map(encode),
    json_values.map(lambda value: json.dumps(value).encode()),  # surrogates as \ud800
    numbers.map(lambda value: str(value).encode()),
    st.sampled_from([("[", "]"), ('{"a":', "}")]).map(nested),
    st.sampled_from(
        [b"x" * HUGE, b"9" * 5_000, b'{"a":1,"a":2}', b'"' + b"\\u0000" * 99 + b'"', b"1e999", b"\xef\xbb\xbf{}"]
    ),
)
options = st.one_of(
    st.dictionaries(st.sampled_from(OPTIONS), json_values, min_size=1, max_size=3).map(encode),
    st.dictionaries(st.sampled_from(OPTIONS), json_values, max_size=2).map(lambda value: json.dumps(value).encode()),
    json_values.map(encode),
    fields,
)
ids = st.one_of(
    st.binary(max_size=30),
    texts.map(lambda value: value.encode("utf-8", "surrogatepass")),
    st.sampled_from([b"0:", b"repeat:", b"a:b:c:", b"{x}", b"*?[", b"\r\n", b"\0", b"x" * 500, b"../", b"-1", b"1.5"]),
)


# ---- jobs ------------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Placement:
    """Where a job's id is, in addition to its state: ``wait`` for a duplicate; and keys that belong to it."""

    more_states: tuple[str, ...] = ()
    lock_ms: int = 0


@dataclass(slots=True)
class FuzzedJob:
    """A malformed job and its placement."""

    job: MalformedJob
    placement: Placement


placements = st.one_of(
    st.just(Placement()),
    st.builds(
        Placement,
        st.lists(st.sampled_from(["wait", "prioritized", "delayed", "active", "completed", "failed"]), max_size=2).map(
            tuple
        ),
        # Another worker's lock, which expires.
        st.sampled_from([0, 0, 0, 1, 500]),
    ),
)


def fuzzed_jobs(task: str, now_ms: Callable[[], int]) -> st.SearchStrategy[FuzzedJob]:
    """Return a strategy for jobs: half are made by hypothesis, half by `malformed_job`."""

    @st.composite
    def made(draw: st.DrawFn) -> FuzzedJob:
        if draw(st.booleans()):
            job = malformed_job(draw(st.randoms(use_true_random=False)), 0, task, now_ms())
        else:
            job = MalformedJob(b"", draw(st.sampled_from(["wait", "wait", "wait", "prioritized", "delayed", "active"])))
            job.fields = {"name": task, "data": "{}", "opts": "{}", "timestamp": str(now_ms())}
            changes: dict[str, Any] = draw(st.dictionaries(st.sampled_from(NAMES), fields, max_size=3))
            if draw(st.booleans()):
                changes["opts"] = draw(options)
            for name, value in changes.items():
                job.fields[name] = value
                job.add_defect(name, value)
            for name in draw(st.lists(st.sampled_from(["name", "data", "opts", "timestamp"]), max_size=2)):
                job.fields.pop(name, None)
                job.add_defect(name, "missing")
        job.id = draw(ids)
        return FuzzedJob(job, draw(placements))

    return made()


# ---- keys of a queue -------------------------------------------------------------------------------------------------

KEYS: Final = (
    "wait active paused prioritized delayed waiting-children completed failed stalled stalled-check limiter marker "
    "meta events id pc repeat metrics:completed metrics:failed"
).split()
BULLTASK_KEYS: Final = ("revoked", "lock-expiries", "retrying", "probe", "next-start:work", "throttled:work")


def damaged_keys() -> st.SearchStrategy[dict[str, str]]:
    """Return a strategy for the wrong types of one or two keys of a queue, by the end of the key."""
    names = st.sampled_from([*KEYS, *(f"bulltask:{name}" for name in BULLTASK_KEYS)])
    return st.dictionaries(names, st.sampled_from(KINDS), min_size=1, max_size=2)


# ---- replies ---------------------------------------------------------------------------------------------------------


NOTHING: Final = {b"*0\r\n", b"*-1\r\n", b"$-1\r\n", b"_\r\n", b"$0\r\n\r\n", b"+\r\n", b":0\r\n"}
"""Valid replies to most calls."""


def garbage() -> st.SearchStrategy[bytes]:
    """Return a strategy for replies: valid RESP of a wrong shape, error replies, invalid RESP, and other protocols."""
    line = st.binary(max_size=20).filter(lambda value: b"\r" not in value and b"\n" not in value)
    scalars = st.one_of(
        st.integers(-(2**63), 2**63 - 1).map(lambda number: b":%d\r\n" % number),
        st.binary(max_size=20).map(lambda value: b"$%d\r\n%b\r\n" % (len(value), value)),
        line.map(lambda value: b"+" + value + b"\r\n"),
        line.map(lambda value: b"-ERR " + value + b"\r\n"),
        st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"_\r\n", b"#t\r\n", b",nan\r\n", b"(%d\r\n" % 10**30]),
    )
    values = st.recursive(
        scalars, lambda inner: st.lists(inner, max_size=4).map(lambda all_: b"*%d\r\n" % len(all_) + b"".join(all_))
    )
    invalid = st.sampled_from(
        [
            b"HTTP/1.1 502 Bad Gateway\r\n\r\n",
            b"\x15\x03\x01\x00\x02\x02\x28",  # a TLS alert
            b"$5\r\nab\r\n\r\n\r\n",
            b"*1000000\r\n",
            b"*-5\r\n",
            b"$%d\r\n" % 2**40,
            b"*1\r\n" * 2_000,
            b":one\r\n",
            b"\0" * 50,
        ]
    )
    return (values | invalid | st.binary(min_size=1, max_size=30)).filter(lambda reply: reply not in NOTHING)


def damages() -> st.SearchStrategy[tuple[str, int, int]]:
    """Return a strategy for what happens to a reply after the command has run, with two numbers."""
    kinds = st.sampled_from(["flip", "truncate", "repeat", "swallow", "swap"])
    return st.tuples(kinds, st.integers(0, 10_000), st.integers(1, 255))
