"""Hypothesis strategies for random sequences of steps; they shrink toward few, plain steps."""

from __future__ import annotations

import math
from typing import Any, Final

from hypothesis import strategies as st

from tests.interop.differential.pair import HOUR
from tests.interop.differential.state import TTL_UNIT_MS

__all__ = ["LENGTH", "sequences"]

LENGTH: Final = 30

_INDEX = st.integers(0, 7)
_STATES: Final = ["wait", "paused", "delayed", "prioritized", "completed", "failed", "active"]
_DATA: st.SearchStrategy[Any] = st.sampled_from(
    [{}, {"to": "ä😀"}, {"n": 2**53 - 1}, [1, None, {"deep": []}], "text", None]
)
_DELAYS = st.sampled_from([HOUR, 2 * HOUR, 5 * HOUR])
_PRIORITIES = st.sampled_from([1, 2, 7, 2**21 - 1])
_TOKENS = st.sampled_from(["t0", "t1"])


def _step(do: str, **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    return st.fixed_dictionaries({"do": st.just(do), **fields})


_COMMON_OPTIONS: Final[dict[str, list[Any]]] = {
    "attempts": [1, 2, 3],
    "backoff": [HOUR, {"type": "exponential", "delay": HOUR}, {"type": "fixed", "delay": HOUR}],
    "removeOnComplete": [True, False, 1, {"age": 3600}, {"age": 7200, "count": 1}],
    "removeOnFail": [True, False, 1, {"count": 2}],
    "keepLogs": [1, 2],
    "stackTraceLimit": [0, 1],
}


def _common_options(number: int) -> dict[str, Any]:
    """Return the options with a number; each option is missing in half of them."""
    options = {}
    for name, values in _COMMON_OPTIONS.items():
        number, index = divmod(number, 2 * len(values))
        if index >= len(values):
            options[name] = values[index - len(values)]
    return options


# One number, not a choice for each option: drawing takes more time than running the steps.
_COMMON = st.integers(0, math.prod(2 * len(values) for values in _COMMON_OPTIONS.values()) - 1).map(_common_options)


def _options(**fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Return options with all named ones, and sometimes with those that any job may have."""
    if not fields:
        return _COMMON
    return st.builds(lambda named, common: {**named, **common}, st.fixed_dictionaries(fields), _COMMON)


_DEDUPLICATION = st.sampled_from(
    [
        {"id": name, **ttl, **extend, **replace}
        for name in ("d0", "d1")
        for ttl in ({}, {"ttl": TTL_UNIT_MS})
        for extend in ({}, {"extend": True})
        for replace in ({}, {"replace": True})
    ]
)
_OPTIONS = st.one_of(
    _options(),
    _options(delay=_DELAYS),
    _options(priority=_PRIORITIES),
    _options(delay=_DELAYS, priority=_PRIORITIES),
    _options(lifo=st.just(True)),
    _options(jobId=st.sampled_from(["custom-a", "custom-b"])),
    _options(deduplication=_DEDUPLICATION),
    _options(deduplication=_DEDUPLICATION, delay=_DELAYS),
)
_NEW = {"name": st.sampled_from(["a", "b"]), "data": _DATA, "opts": _OPTIONS}
_JOB = {"job": _INDEX}
_HELD = {"held": st.integers(0, 3)}
_NEXT = {"next": st.booleans()}


def _job_step(do: str, states: list[str], **fields: Any) -> st.SearchStrategy[dict[str, Any]]:
    """Return a step for a job in one of the given states, or for any job."""
    return st.one_of(
        _step(do, of=st.sampled_from(states), **_JOB, **fields) if states else st.nothing(), _step(do, **_JOB, **fields)
    )


_ADDING = st.one_of(
    _step("add", **_NEW),
    _step("add", **_NEW),
    _step("add_bulk", jobs=st.lists(st.fixed_dictionaries(_NEW), min_size=1, max_size=3)),
)
_ENDING = st.one_of(
    _step("complete", value=_DATA, **_HELD, **_NEXT),
    _step("fail", message=st.just("no"), unrecoverable=st.booleans(), trace=st.just("a trace"), **_HELD, **_NEXT),
    _step("fail", message=st.just("nö"), trace=st.just("at line 1"), **_HELD, **_NEXT),
    _step("delay", ms=_DELAYS, **_HELD),
    _step("release", **_HELD),
)
_CHANGING = st.one_of(
    _job_step("promote", ["delayed"]),
    _job_step("change_delay", ["delayed"], ms=_DELAYS),
    _job_step(
        "change_priority", ["wait", "prioritized", "paused"], priority=st.sampled_from([0, 1, 5]), lifo=st.booleans()
    ),
    _job_step("update_data", [], data=_DATA),
    _job_step("progress", ["active"], value=_DATA),
    _job_step("log", [], line=st.sampled_from(["one", "zwei ä"])),
    _job_step("clear_logs", [], keep=st.integers(0, 1)),
    _job_step("retry", ["failed"], state=st.just("failed")),
    _job_step("retry", ["completed"], state=st.just("completed")),
    _job_step("remove", _STATES, children=st.booleans()),
)
_QUEUE = st.one_of(
    _step("pause"),
    _step("resume"),
    _step("drain", delayed=st.booleans()),
    _step("clean", grace=st.sampled_from([0, HOUR]), limit=st.sampled_from([0, 1]), state=st.sampled_from(_STATES)),
    _step("retry_jobs", state=st.sampled_from(["failed", "completed"])),
    _step("promote_jobs"),
    _step("rate_limit", ms=st.just(TTL_UNIT_MS)),
    _step("remove_rate_limit"),
    _step("set_concurrency", n=st.sampled_from([1, 2])),
    _step("remove_concurrency"),
    _step("set_rate", max=st.sampled_from([1, 3]), ms=st.just(TTL_UNIT_MS)),
    _step("remove_rate"),
    _step("remove_dedup", id=st.sampled_from(["d0", "d1"])),
)
_LOCKS = st.one_of(
    _step("extend_lock", ms=st.just(2 * TTL_UNIT_MS), **_HELD),
    _step("extend_lock", ms=st.just(2 * TTL_UNIT_MS), token=st.just("foreign"), **_HELD),
    _step("check_stalled"),
)
_TREES: Final[list[dict[str, Any]]] = [
    {"name": "parent", "data": {}, "children": [{"name": "child", "data": {}}]},
    {
        "name": "parent",
        "data": {},
        "opts": {"priority": 1},
        "children": [
            {"name": "child", "data": {}, "opts": {"failParentOnFailure": True}},
            {"name": "child", "data": {}, "opts": {"delay": HOUR, "removeDependencyOnFailure": True}},
        ],
    },
    {
        "name": "root",
        "data": {},
        "children": [
            {
                "name": "middle",
                "data": {},
                "opts": {"failParentOnFailure": True},
                "children": [{"name": "leaf", "data": 1}],
            },
            {"name": "leaf", "data": 2, "opts": {"attempts": 2}},
        ],
    },
]
"""Flows without ignored failures: docs/reference/differences.md describes how their retry differs."""
_FLOWING = st.one_of(
    _step("add_child", name=st.just("child"), data=_DATA, opts=_options(), **_JOB),
    _step("flow", flow=st.sampled_from(_TREES)),
    _step("await_children", **_HELD),
    _job_step("remove_dependency", []),
    _job_step("remove_unprocessed", []),
)


_SCHEDULING = st.one_of(
    # One interval, no pattern: for changed intervals and for patterns in the past, the clients differ as
    # docs/reference/differences.md describes.
    _step(
        "upsert_scheduler",
        id=st.just("s"),
        repeat=st.just({"every": HOUR}),
        template=st.fixed_dictionaries(
            {
                "name": st.just("tick"),
                "data": _DATA,
                "opts": st.sampled_from([{"attempts": 2}, {"attempts": 1, "priority": 2}]),
            }
        ),
    ),
    _step("remove_scheduler", id=st.just("s")),
)
_LAST = st.one_of(_QUEUE, _ENDING, _step("obliterate", force=st.booleans()))
"""The last step may be ``obliterate``: Node's ids restart from 1 after it, so later jobs would be ambiguous."""


Chunk = tuple[dict[str, Any], ...]


def _chunk(*steps: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[Chunk]:
    return st.tuples(*steps)


_TAKE = _step("acquire", token=_TOKENS)
_CHUNKS: Final[list[tuple[int, st.SearchStrategy[Chunk]]]] = [
    (8, _chunk(_ADDING)),
    (4, _chunk(_TAKE)),
    (8, _chunk(_TAKE, _ENDING)),
    (4, _chunk(_ENDING)),
    (8, _chunk(_CHANGING)),
    (2, _chunk(_ADDING, _CHANGING)),
    (3, _chunk(_QUEUE)),
    (1, _chunk(_step("pause"), _ADDING, _step("resume"))),
    (2, _chunk(_step("wait", ms=st.sampled_from([HOUR, 2 * HOUR])), _TAKE)),
    (1, _chunk(_LOCKS)),
    # One lock at a time: the order in which one check recovers several jobs is random.
    (1, _chunk(_step("expire_lock", **_HELD), _step("check_stalled"), _step("check_stalled"))),
    (2, _chunk(_FLOWING)),
    (1, _chunk(_SCHEDULING)),
]
"""Weights and steps."""


# Not one_of: it gives every leaf of a tree of strategies the same weight.
_CHUNK = st.sampled_from([chunk for weight, chunk in _CHUNKS for _ in range(weight)])


@st.composite
def sequences(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Return a sequence of :data:`LENGTH` steps; most steps add or process jobs."""
    steps: list[dict[str, Any]] = []
    while len(steps) < LENGTH - 1:
        steps += draw(draw(_CHUNK))
    steps = [*steps[: LENGTH - 1], draw(_LAST)]
    if any(step["do"] in {"add_child", "flow"} for step in steps):
        # Unlike Node, bulltask keeps a failed child that its parent waits for.
        steps = _without_count(steps)
    return steps


def _without_count(value: Any) -> Any:
    """Return steps whose jobs keep a failed job, or do not, but never a number of them."""
    if isinstance(value, list):
        return [_without_count(item) for item in value]
    if not isinstance(value, dict):
        return value
    return {
        name: isinstance(item, bool) and item if name == "removeOnFail" else _without_count(item)
        for name, item in value.items()
    }
