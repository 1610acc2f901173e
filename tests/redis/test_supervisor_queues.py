"""What the supervisor does for several queues, one of which is broken."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bulltask import App
from bulltask.events import Bus, Event, HeartbeatFailed, HeartbeatSucceeded, JobStalled
from bulltask.states import SlotState
from bulltask.transport.client import Client
from bulltask.worker.outage import Outage
from bulltask.worker.slots import SlotView
from bulltask.worker.supervisor.heartbeat import Heartbeat
from bulltask.worker.supervisor.stall_check import StallCheck

pytestmark = pytest.mark.redis

QUEUES = ["broken", "sound"]


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    made = App("tested", broker_url, max_stalled_count=1)
    yield made
    made.close()


@pytest.fixture
def client(app: App) -> Iterator[Client]:
    made = app.broker.client()
    yield made
    made.close()


@pytest.fixture
def heard() -> list[Event]:
    return []


@pytest.fixture
def bus(heard: list[Event]) -> Bus:
    made = Bus()
    made.subscribe(Event, heard.append)
    return made


def test_locks_of_one_queue_are_renewed_although_another_queue_is_broken(
    app: App, client: Client, bus: Bus, heard: list[Event], redis_client: Any
) -> None:
    keys = [app.broker.keys(queue) for queue in QUEUES]
    views = [SlotView(SlotState.ACTIVE, f"token-{index}", index, f"job-{index}", 0) for index in range(2)]
    for index, each in enumerate(keys):
        redis_client.set(each.lock(f"job-{index}"), f"token-{index}", px=5_000)
    redis_client.set(keys[0].stalled, "not a set")
    Heartbeat(keys, lambda: views, client, app.config, bus, Outage(bus, app.config)).tick(0, 0)
    assert redis_client.pttl(keys[1].lock("job-1")) > 20_000
    assert [event.job_id for event in heard if isinstance(event, HeartbeatFailed)] == ["job-0"]
    assert [event.queue for event in heard if isinstance(event, HeartbeatSucceeded)] == ["sound"]


def test_stalled_jobs_of_one_queue_are_found_although_another_queue_is_broken(
    app: App, client: Client, bus: Bus, heard: list[Event], redis_client: Any
) -> None:
    keys = [app.broker.keys(queue) for queue in QUEUES]
    redis_client.set(keys[0].stalled, "not a set")
    job = app.queue("sound").add("lost", {})
    redis_client.lmove(keys[1].wait, keys[1].active)
    redis_client.sadd(keys[1].stalled, job.id)
    StallCheck(keys, client, app.broker.clock, app.config, bus, Outage(bus, app.config)).tick(0, 0)
    assert [event.job_id for event in heard if isinstance(event, JobStalled)] == [job.id]
    assert job.get_state() == "waiting"
