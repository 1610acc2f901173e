"""One form of the API, blocking or asyncio, on a queue of its own, with comparable results and states."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Final, cast

import redis

from bulltask.queue import (
    AsyncFlowProducer,
    AsyncQueue,
    AsyncQueueEvents,
    FlowJob,
    FlowProducer,
    Job,
    Queue,
    QueueEvents,
)
from bulltask.queue.flow_plan import FlowNode
from bulltask.queue.job_fields import JobFields
from bulltask.result import AsyncResult
from tests.interop.differential.state import State, dump
from tests.support.sync_facade import SyncFacade

__all__ = ["HOUR_MS", "START_MS", "ApiForm", "AwaitedResult", "Signal"]

START_MS: Final = 1_700_000_000_000
"""The time of both sides; it stands still."""
HOUR_MS: Final = 3_600_000


class ApiForm:
    """One form of queue, flows, schedulers, events and results.

    Args:
        url: the server.
        runner: of the event loop that drives the async form; ``None``: the sync one.
    """

    def __init__(self, url: str, runner: asyncio.Runner | None) -> None:
        self.name = "q-sync" if runner is None else "q-async"
        self._runner, self._opened = runner, list[Any]()
        settings: Any = {"queue_hash_tag": False, "lock_duration": 300, "stalled_interval": 100}
        options: Any = {"attempts": 2, "backoff": None, "remove_on_complete": False}
        kind: Any = Queue if runner is None else AsyncQueue
        self.queue = cast("Queue", self._plain(kind(self.name, url, default_job_options=options, **settings)))
        self.broker = self.queue.context.broker
        self.now_ms = START_MS
        setattr(self.broker.clock, "now_ms", lambda: self.now_ms)  # noqa: B010 - every user of the clock has this one
        flows: Any = FlowProducer if runner is None else AsyncFlowProducer
        self.flows = cast("FlowProducer", self._plain(flows(broker=lambda: self.broker)))
        self.redis: redis.Redis = redis.Redis.from_url(url, decode_responses=True)
        self.base = f"{self.queue.qualified_name}:"

    def _plain(self, made: Any) -> Any:
        return made if self._runner is None else SyncFacade(made, self._runner)

    # ---- what scenarios begin with -------------------------------------------------------------------------------

    def add(self, **options: Any) -> Job:
        """Add a job ``a`` with the data ``{"n": 1}``."""
        return self.queue.add("a", {"n": 1}, **options)

    def take(self) -> Job:
        """Acquire the next job."""
        job = self.queue.get_next_job("t")
        assert job is not None
        return job

    def completed(self, value: Any = 1, **options: Any) -> Job:
        """A job that has completed."""
        made = self.add(**options)
        self.take().move_to_completed(value)
        return made

    def failed(self, **options: Any) -> Job:
        """A job that has failed."""
        made = self.add(attempts=1, **options)
        self.take().move_to_failed("no")
        return made

    def family(self, **options: Any) -> FlowNode[Job]:
        """A parent that waits for a child; the options are the child's."""
        leaf = FlowJob("leaf", self.name, {}, cast(Any, options))
        return self.flows.add(FlowJob("parent", self.name, {}, {}, [leaf]))

    def parent(self, **options: Any) -> Job:
        """The parent of a :meth:`family`, with the methods of this form."""
        found = self.queue.get_job(self.family(**options).job.id)
        assert found is not None
        return found

    def child(self) -> Job:
        """The child of a :meth:`family`."""
        found = self.queue.get_job(self.family().children[0].job.id)
        assert found is not None
        return found

    def repeatable(self, key: str = "old") -> None:
        """A repeatable job, as Node's older interface has stored it."""
        self.redis.zadd(f"{self.base}repeat", {key: START_MS + HOUR_MS})
        self.redis.hset(f"{self.base}repeat:{key}", mapping={"name": "tick", "every": HOUR_MS})

    def events(self) -> QueueEvents:
        """A listener from the beginning of the stream on."""
        kind: Any = QueueEvents if self._runner is None else AsyncQueueEvents
        self._opened.append(self._plain(kind(self.name, start="0", broker=lambda: self.broker)))
        return cast("QueueEvents", self._opened[-1])

    def closing(self, events: QueueEvents) -> Callable[[object], object]:
        """A callback that closes a listener."""
        target = events if self._runner is None else cast(Any, events).target
        return lambda _event: target.close()

    def signal(self) -> Signal:
        """Set by a callback, waited for by the scenario."""
        return Signal(self._runner)

    def result(self, job: Job) -> Any:
        """The handle of a job's result."""
        return job.result() if self._runner is None else AwaitedResult(job.result(), self._runner)

    def worker(self, name: str) -> None:
        """A connection of a worker."""
        self._opened.append(self.broker.client(self.queue.context.keys.client_name(name)))
        self._opened[-1].connect()

    def key(self, name: str) -> str:
        """A key of the queue."""
        return self.base + name

    # ---- what is compared ----------------------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """Of all jobs, in the order in which they were added."""
        added = cast("list[tuple[str, dict[str, str]]]", self.redis.xrange(self.key("events")))
        return list(dict.fromkeys(event["jobId"] for _, event in added if event["event"] == "added"))

    def comparable(self, value: Any, ids: Sequence[str]) -> Any:
        """A result without what differs between the forms: ids, names, classes."""
        if isinstance(value, SyncFacade):
            value = value.target
        if isinstance(value, JobFields):
            value = value.id
        if isinstance(value, Enum):
            value = value.value
        if is_dataclass(value):
            value = {part.name: getattr(value, part.name) for part in fields(value)}
        if value is None or isinstance(value, bool | int | float):
            return value
        if isinstance(value, str):
            return self._text(value, ids)
        if isinstance(value, Mapping):
            return {self.comparable(name, ids): self.comparable(item, ids) for name, item in value.items()}
        return [self.comparable(item, ids) for item in value]

    def _text(self, text: str, ids: Sequence[str]) -> str:
        for place, job_id in enumerate(ids, 1):
            text = text.replace(job_id, f"#{place}")
        return text.replace(self.base, "Q:").replace(self.name, "Q")

    def state(self, ids: Sequence[str]) -> State:
        """Everything in Redis."""
        return dump(self.redis, self.base, ids)

    def close(self) -> None:
        """Close all connections."""
        for opened in self._opened:
            opened.close()
        self.queue.close()
        self.redis.close()


class Signal:
    """An event of threads, or of the loop, as plain calls."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self._runner, self._event = runner, threading.Event() if runner is None else asyncio.Event()

    def set(self, *_: object) -> None:
        """To be called by a callback."""
        self._event.set()

    def wait(self) -> bool:
        """True when it was set within half a minute."""
        if isinstance(self._event, threading.Event):
            return self._event.wait(30)
        assert self._runner is not None
        return bool(self._runner.run(asyncio.wait_for(self._event.wait(), 30)))


class AwaitedResult:
    """The awaitable half of an ``AsyncResult``, as plain calls under the names of the other half."""

    def __init__(self, result: AsyncResult[Any], runner: asyncio.Runner) -> None:
        self._result, self._runner = result, runner

    def get(self, timeout: float | None = None) -> Any:
        """``aget``."""
        return self._runner.run(self._result.aget(timeout))

    def snapshot(self) -> Any:
        """``asnapshot``."""
        return self._runner.run(self._result.asnapshot())

    def revoke(self, *, terminate: bool = False) -> Any:
        """``arevoke``."""
        return self._runner.run(self._result.arevoke(terminate=terminate))
