"""How a child acquires jobs, without a server: what it does when calls fail or take long."""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any

import pytest

from bulltask.config.config import Conf
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.events import Bus
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched
from bulltask.worker.child import fetcher as module
from bulltask.worker.child.fetcher import JobFetcher
from bulltask.worker.slots import Slots
from bulltask.worker.states import SlotState

CONFIG = Conf({"lock_duration": 30}, {}).freeze()
FIELDS = {"name": "send", "data": "{}", "opts": json.dumps({"attempts": 1}), "timestamp": "1", "ats": "1"}
JOB = Fetched("7", [text.encode() for pair in FIELDS.items() for text in pair])
GONE = BrokerUnavailableError("gone")


class Scene:
    """A child's fetcher with one slot; its connection gives the replies that the test chooses."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.now_ms, self.connected = list(replies), 1_000, False
        self.scripts: list[str] = []
        self.pauses: list[float] = []
        self.connections: list[bool] = []
        broker: Any = SimpleNamespace(
            clock=SimpleNamespace(now_ms=lambda: 5_000),
            config=CONFIG,
            client=lambda: self,
            blocking_client=lambda _: self,
            keys=lambda queue: QueueKeys("bull", f"{{{queue}}}", queue),
        )
        self.control = SimpleNamespace(paused=False)
        control: Any = self.control
        wakeup_pipe: Any = SimpleNamespace(wait=self.pause)
        self.fetcher = JobFetcher(broker, ["mail"], Bus(), "worker", wakeup_pipe, control)
        slots = Slots(1, 1)
        (block,) = slots.children
        block.reset()
        (self.slot,) = block.slots()

    def pause(self, ms: float) -> None:
        self.pauses.append(ms)
        if not self.replies:
            self.fetcher.closing = True

    def connect(self) -> None:
        self.connected = True

    def close(self) -> None:
        self.connected = False

    def run(self, call: Call[Any]) -> Any:
        self.connections.append(self.connected)
        self.scripts.append("" if call.script is None else call.script.name)
        reply = self.replies.pop(0)
        if callable(reply):
            reply = reply()
        if isinstance(reply, BaseException):
            raise reply
        return reply


@pytest.fixture
def time(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """The monotonic time of the child, in the test's hands."""
    made = SimpleNamespace(ms=10_000)
    monkeypatch.setattr(module, "mono_ms", lambda: made.ms)
    return made


def test_a_child_connects_before_it_fetches_a_job() -> None:
    scene = Scene(JOB)
    acquired = scene.fetcher.acquire(scene.slot)
    assert acquired is not None
    assert (acquired.job.id, acquired.job.name, acquired.max_concurrent) == ("7", "send", 0)
    assert scene.connections == [True]
    assert scene.slot.read().state is SlotState.ACTIVE


def test_after_a_lost_reply_a_child_waits_and_releases_what_the_call_may_have_acquired() -> None:
    scene = Scene(GONE, [], JOB)
    assert scene.fetcher.acquire(scene.slot) is not None
    assert len(scene.pauses) == 1
    assert scene.scripts == ["moveToActive", "findByToken", "moveToActive"]
    assert scene.connections == [True, True, True]


def test_a_child_that_closes_during_an_outage_acquires_nothing_and_keeps_its_slot_reserved() -> None:
    scene = Scene(GONE)
    assert scene.fetcher.acquire(scene.slot) is None
    assert len(scene.pauses) == 1
    assert scene.slot.read().state is SlotState.RESERVED


@pytest.mark.parametrize(
    ("lasted_ms", "replies", "state"),
    [
        (15_000, [], "acquired"),
        (15_001, [True], "acquired"),
        (15_001, [False], "lost"),
        (15_001, [BrokerError("ERR")], "uncertain"),
    ],
)
def test_a_fetch_that_took_half_of_the_lock_takes_it_again(
    time: SimpleNamespace, lasted_ms: int, replies: list[Any], state: str
) -> None:
    scene = Scene(*replies)
    scene.slot.reserve(time.ms)
    time.ms += lasted_ms
    acquired = scene.fetcher.acquired(0, scene.slot, JOB)
    assert (acquired is not None) == (state == "acquired")
    assert len(scene.scripts) == len(replies)
    scene.fetcher.release(scene.slot)
    assert (scene.slot.read().state is SlotState.RESERVED) == (state == "uncertain")


def test_a_marker_names_its_queue_and_the_time_of_the_next_job() -> None:
    assert module._read_marker([b"bull:{mail}:marker", b"0", b"1700.5"]) == (b"bull:{mail}:marker", 1700.5)
    assert module._read_marker(None) is None
