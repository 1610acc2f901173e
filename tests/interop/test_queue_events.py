"""bulltask's QueueEvents receives events of Node's Queue and Worker, and Node lists it as a listener."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bulltask.queue import QueueEvents
from bulltask.queue import events as types
from tests.interop.interop_queue import InteropQueue

pytestmark = [pytest.mark.interop, pytest.mark.redis]


@pytest.fixture
def events(any_mail: InteropQueue) -> Iterator[QueueEvents]:
    with QueueEvents("mail", broker=lambda: any_mail.app._broker) as events:
        yield events


def until(events: QueueEvents, kind: type[types.QueueEvent]) -> list[types.QueueEvent]:
    """Return all events up to the first of this class."""
    received: list[types.QueueEvent] = []
    while not received or not isinstance(received[-1], kind):
        event = events.next(10)
        assert event is not None, received
        received.append(event)
    return received


def event_names(events: list[types.QueueEvent], job_id: str) -> list[str]:
    return [event.event for event in events if isinstance(event, types.JobEvent) and event.job_id == job_id]


def only(events: list[types.QueueEvent], kind: Any) -> Any:
    """Return the only event of this class."""
    [match] = [event for event in events if isinstance(event, kind)]
    return match


def test_all_events_of_a_node_job_are_received(any_mail: InteropQueue, events: QueueEvents) -> None:
    job_id = any_mail.add("echo", {"to": "ä😀", "n": [1, None]}, delay=30, attempts=2)
    any_mail.node_worker("echo")
    received = until(events, types.Completed)
    assert event_names(received, job_id) == ["added", "delayed", "waiting", "active", "completed"]
    at = [event.id for event in received]
    assert received == [
        types.Added(at[0], "mail", job_id, "echo"),
        types.Delayed(at[1], "mail", job_id, received[1].due_ms),  # type: ignore[attr-defined]
        types.Waiting(at[2], "mail", job_id, "delayed"),
        types.Active(at[3], "mail", job_id, "waiting"),
        types.Completed(
            at[4], "mail", job_id, {"to": "ä😀", "n": [1, None]}, '{"to":"ä😀","n":[1,null]}', None, "active"
        ),
    ]
    assert received[1].due_ms == int(any_mail.redis.hget(any_mail.keys.job(job_id), "timestamp") or 0) + 30  # type: ignore[attr-defined]
    assert isinstance(events.next(10), types.Drained)


def test_the_events_of_a_failing_node_job_are_received(any_mail: InteropQueue, events: QueueEvents) -> None:
    job_id = any_mail.add("fail", {}, attempts=2)
    any_mail.node_worker("fail", {"message": 'no "ünicorn"'})
    received = until(events, types.RetriesExhausted)
    assert event_names(received, job_id) == [
        "added",
        "waiting",
        "active",
        "waiting",
        "active",
        "failed",
        "retries-exhausted",
    ]
    assert only(received, types.Failed).failed_reason == 'no "ünicorn"'
    assert only(received, types.RetriesExhausted).attempts_made == 2
    assert [event.prev for event in received if isinstance(event, types.Waiting)] == [None, "active"]


def test_progress_of_a_node_job_is_received(any_mail: InteropQueue, events: QueueEvents) -> None:
    steps = [50, {"sent": 3, "left": []}, "half ½"]
    any_mail.add("report")
    any_mail.node_worker("progress", {"steps": steps})
    received = until(events, types.Completed)
    assert [event.data for event in received if isinstance(event, types.Progress)] == steps


def test_events_of_changes_made_by_a_node_queue_are_received(any_mail: InteropQueue, events: QueueEvents) -> None:
    any_mail.call("pause")
    any_mail.call("resume")
    assert [type(event) for event in until(events, types.Resumed)] == [types.Paused, types.Resumed]
    job_id = any_mail.add("a", {}, jobId="twice")
    any_mail.add("a", {}, jobId="twice")
    assert only(until(events, types.Duplicated), types.Duplicated).job_id == job_id
    first = any_mail.add("a", {}, deduplication={"id": "same"})
    second = any_mail.add("b", {}, deduplication={"id": "same"})
    received = until(events, types.Deduplicated)
    assert first == second == only(received, types.Debounced).job_id
    deduplicated = only(received, types.Deduplicated)
    assert (deduplicated.job_id, deduplicated.deduplication_id) == (first, "same")
    assert deduplicated.deduplicated_job_id not in {first, job_id}
    any_mail.job_call("twice", "remove")
    assert only(until(events, types.Removed), types.Removed).prev == "wait"
    any_mail.call("clean", 0, 100, "wait")
    assert only(until(events, types.Cleaned), types.Cleaned).count == 1


def test_events_of_a_node_flow_are_received(any_mail: InteropQueue, events: QueueEvents) -> None:
    node = {"name": "echo", "queueName": any_mail.name, "data": {"n": 1}}
    flow = any_mail.node.call("flow.add", flow={**node, "children": [node]})
    any_mail.node_worker("echo")
    received = until(events, types.Completed)
    received += until(events, types.Completed)
    assert event_names(received, flow["id"]) == ["added", "waiting-children", "waiting", "active", "completed"]
    assert only(received, types.WaitingChildren).prev is None
    assert [event.prev for event in received if isinstance(event, types.Waiting)] == [None, "waiting-children"]


def test_a_custom_event_reaches_a_node_listener(any_mail: InteropQueue, events: QueueEvents) -> None:
    any_mail.listen()
    entry_id = events.publish("invoice-paid", {"jobId": "7", "total": 12.5})
    assert any_mail.wait_for_event("invoice-paid") == {"jobId": "7", "total": "12.5"}
    assert isinstance(custom := events.next(5), types.Custom)
    assert (custom.id, custom.name, custom.job_id) == (entry_id, "invoice-paid", "7")


def test_node_lists_a_bulltask_listener(any_mail: InteropQueue, events: QueueEvents) -> None:
    names = [client["rawname"] for client in any_mail.call("getQueueEvents")]
    assert names == [f"{any_mail.keys.client_name()}:qe"]
