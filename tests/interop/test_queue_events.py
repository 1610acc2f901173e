"""Our QueueEvents hears what Node's Queue and Worker do, and Node finds it among the listeners."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bulltask.queue import QueueEvents
from bulltask.queue import events as types
from tests.interop.side_by_side import SideBySide

pytestmark = [pytest.mark.interop, pytest.mark.redis]


@pytest.fixture
def events(either: SideBySide) -> Iterator[QueueEvents]:
    with QueueEvents("mail", broker=lambda: either.app.broker) as made:
        yield made


def until(events: QueueEvents, kind: type[types.QueueEvent]) -> list[types.QueueEvent]:
    """All events up to the first of this class."""
    found: list[types.QueueEvent] = []
    while not found or not isinstance(found[-1], kind):
        event = events.next(10)
        assert event is not None, found
        found.append(event)
    return found


def told(events: list[types.QueueEvent], job_id: str) -> list[str]:
    return [it.event for it in events if isinstance(it, types.JobEvent) and it.job_id == job_id]


def of(events: list[types.QueueEvent], kind: Any) -> Any:
    """The only event of this class."""
    [found] = [event for event in events if isinstance(event, kind)]
    return found


def test_all_events_of_a_node_job_are_received(either: SideBySide, events: QueueEvents) -> None:
    job_id = either.add("echo", {"to": "ä😀", "n": [1, None]}, delay=30, attempts=2)
    either.node_worker("echo")
    heard = until(events, types.Completed)
    assert told(heard, job_id) == ["added", "delayed", "waiting", "active", "completed"]
    at = [event.id for event in heard]
    assert heard == [
        types.Added(at[0], "mail", job_id, "echo"),
        types.Delayed(at[1], "mail", job_id, heard[1].due_ms),  # type: ignore[attr-defined]
        types.Waiting(at[2], "mail", job_id, "delayed"),
        types.Active(at[3], "mail", job_id, "waiting"),
        types.Completed(
            at[4], "mail", job_id, {"to": "ä😀", "n": [1, None]}, '{"to":"ä😀","n":[1,null]}', None, "active"
        ),
    ]
    assert heard[1].due_ms == int(either.redis.hget(either.keys.job(job_id), "timestamp") or 0) + 30  # type: ignore[attr-defined]
    assert isinstance(events.next(10), types.Drained)


def test_the_events_of_a_failing_node_job_are_received(either: SideBySide, events: QueueEvents) -> None:
    job_id = either.add("fail", {}, attempts=2)
    either.node_worker("fail", {"message": 'no "ünicorn"'})
    heard = until(events, types.RetriesExhausted)
    assert told(heard, job_id) == ["added", "waiting", "active", "waiting", "active", "failed", "retries-exhausted"]
    assert of(heard, types.Failed).failed_reason == 'no "ünicorn"'
    assert of(heard, types.RetriesExhausted).attempts_made == 2
    assert [it.prev for it in heard if isinstance(it, types.Waiting)] == [None, "active"]


def test_progress_of_a_node_job_is_received(either: SideBySide, events: QueueEvents) -> None:
    steps = [50, {"sent": 3, "left": []}, "half ½"]
    either.add("report")
    either.node_worker("progress", {"steps": steps})
    heard = until(events, types.Completed)
    assert [it.data for it in heard if isinstance(it, types.Progress)] == steps


def test_events_of_nodes_queue_methods_are_received(either: SideBySide, events: QueueEvents) -> None:
    either.call("pause")
    either.call("resume")
    assert [type(it) for it in until(events, types.Resumed)] == [types.Paused, types.Resumed]
    job_id = either.add("a", {}, jobId="twice")
    either.add("a", {}, jobId="twice")
    assert of(until(events, types.Duplicated), types.Duplicated).job_id == job_id
    first = either.add("a", {}, deduplication={"id": "same"})
    second = either.add("b", {}, deduplication={"id": "same"})
    heard = until(events, types.Deduplicated)
    assert first == second == of(heard, types.Debounced).job_id
    found = of(heard, types.Deduplicated)
    assert (found.job_id, found.deduplication_id) == (first, "same")
    assert found.deduplicated_job_id not in {first, job_id}
    either.job_call("twice", "remove")
    assert of(until(events, types.Removed), types.Removed).prev == "wait"
    either.call("clean", 0, 100, "wait")
    assert of(until(events, types.Cleaned), types.Cleaned).count == 1


def test_events_of_a_node_flow_are_received(either: SideBySide, events: QueueEvents) -> None:
    node = {"name": "echo", "queueName": either.name, "data": {"n": 1}}
    flow = either.node.call("flow.add", flow={**node, "children": [node]})
    either.node_worker("echo")
    heard = until(events, types.Completed)
    heard += until(events, types.Completed)
    assert told(heard, flow["id"]) == ["added", "waiting-children", "waiting", "active", "completed"]
    assert of(heard, types.WaitingChildren).prev is None
    assert [it.prev for it in heard if isinstance(it, types.Waiting)] == [None, "waiting-children"]


def test_a_custom_event_reaches_node(either: SideBySide, events: QueueEvents) -> None:
    either.listen()
    entry_id = events.publish("invoice-paid", {"jobId": "7", "total": 12.5})
    assert either.wait_for_event("invoice-paid") == {"jobId": "7", "total": "12.5"}
    assert isinstance(found := events.next(5), types.Custom)
    assert (found.id, found.name, found.job_id) == (entry_id, "invoice-paid", "7")


def test_node_lists_bulltasks_listener(either: SideBySide, events: QueueEvents) -> None:
    names = [client["rawname"] for client in either.call("getQueueEvents")]
    assert names == [f"{either.keys.client_name()}:qe"]
