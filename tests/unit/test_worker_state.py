"""The form of a worker's state as JSON, between versions of bulltask."""

from __future__ import annotations

import json

import pytest

from bulltask.config.parsers import task_rate
from bulltask.errors import DecodeError
from bulltask.transport.workers import WorkerChild, WorkerJob, WorkerState

STATE = WorkerState(
    id="w",
    host="web-1",
    queues=("mail",),
    children=(WorkerChild(pid=7, rss_kib=None, state="run", jobs=(WorkerJob(id="1", queue="mail", since_ms=5),)),),
    tasks=("add",),
    rate_limits={"add": "10/s"},
    limiter={"mail": {"max": 1, "duration_ms": 1_000}},
)


def test_a_state_is_read_as_it_was_written() -> None:
    assert WorkerState.from_json(STATE.to_json().encode()) == STATE


def test_fields_of_another_version_are_ignored_and_missing_ones_have_defaults() -> None:
    stored = {"id": "w", "new": [1], "children": [{"pid": 7, "cpu": 0.5, "jobs": [{"id": "1", "x": 1}]}]}
    state = WorkerState.from_json(json.dumps(stored).encode())
    assert state == WorkerState(id="w", children=(WorkerChild(pid=7, jobs=(WorkerJob(id="1"),)),))
    assert (state.pid, state.started_ms, state.concurrency, state.permits) == (0, 0, 0, None)


@pytest.mark.parametrize(
    "raw", [b"", b"[]", b"{}", b'{"id": 1}', b'{"id": "w", "children": 1}', b'{"id":"w","pid":"7"}']
)
def test_a_malformed_state_is_rejected(raw: bytes) -> None:
    with pytest.raises(DecodeError):
        WorkerState.from_json(raw)


@pytest.mark.parametrize("text", ["10/s", "5/30s", "100/m", "1000/h", "0.5/s"])
def test_a_rate_is_written_as_a_setting_has_it(text: str) -> None:
    rate = task_rate(text, "rate_limit")
    assert task_rate(str(rate), "rate_limit") == rate
