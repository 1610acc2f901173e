"""One interface for the sync and the async API, each on a separate queue, with comparable results and states."""

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
from bulltask.queue.fields import JobFields
from bulltask.queue.flows import FlowNode
from bulltask.result import AsyncResult
from bulltask.transport.call import command
from tests.interop.differential.state import State, dump
from tests.support.server_clients import client_of
from tests.support.sync_facade import SyncFacade

__all__ = ["HOUR_MS", "START_MS", "ApiForm", "AwaitedResult", "Signal"]

START_MS: Final = 1_700_000_000_000
"""The fixed time that both forms see."""
HOUR_MS: Final = 3_600_000


class ApiForm:
    """The sync or the async form of the queue, flows, schedulers, events and results.

    Args:
        url: The URL of the server.
        runner: Runs the async form; ``None`` for the sync form.
    """

    def __init__(self, url: str, runner: asyncio.Runner | None) -> None:
        self.name = "q-sync" if runner is None else "q-async"
        self._runner, self._opened = runner, list[Any]()
        settings: Any = {"lock_duration": 300, "stalled_interval": 100}
        options: Any = {"attempts": 2, "backoff": None, "remove_on_complete": False}
        kind: Any = Queue if runner is None else AsyncQueue
        self.queue = cast("Queue", self._plain(kind(self.name, url, default_job_options=options, **settings)))
        self.broker = self.queue.context.broker
        self.now_ms = START_MS
        setattr(self.broker.clock, "now_ms", lambda: self.now_ms)  # noqa: B010 - all users of the clock share it
        flows: Any = FlowProducer if runner is None else AsyncFlowProducer
        self.flows = cast("FlowProducer", self._plain(flows(broker=lambda: self.broker)))
        self.redis: redis.Redis = client_of(url, decode_responses=True)
        self.base = f"{self.queue.qualified_name}:"

    def _plain(self, target: Any) -> Any:
        return target if self._runner is None else SyncFacade(target, self._runner)

    # ---- the first steps of scenarios ----------------------------------------------------------------------------

    def add(self, **options: Any) -> Job:
        """Add a job ``a`` with the data ``{"n": 1}``."""
        return self.queue.add("a", {"n": 1}, **options)

    def acquire(self) -> Job:
        """Acquire the next job."""
        job = self.queue.get_next_job("t")
        assert job is not None
        return job

    def add_completed(self, value: Any = 1, **options: Any) -> Job:
        """Add a job and complete it."""
        job = self.add(**options)
        self.acquire().move_to_completed(value)
        return job

    def add_failed(self, **options: Any) -> Job:
        """Add a job and fail it."""
        job = self.add(attempts=1, **options)
        self.acquire().move_to_failed("no")
        return job

    def add_flow(self, **options: Any) -> FlowNode[Job]:
        """Add a parent that waits for a child with these options."""
        leaf = FlowJob("leaf", self.name, {}, cast(Any, options))
        return self.flows.add(FlowJob("parent", self.name, {}, {}, [leaf]))

    def add_parent(self, **options: Any) -> Job:
        """Add a flow with :meth:`add_flow`; return its parent as a job of this form."""
        found = self.queue.get_job(self.add_flow(**options).job.id)
        assert found is not None
        return found

    def add_child(self) -> Job:
        """Add a flow with :meth:`add_flow`; return its child as a job of this form."""
        found = self.queue.get_job(self.add_flow().children[0].job.id)
        assert found is not None
        return found

    def add_repeatable(self, key: str = "old") -> None:
        """Store a repeatable job as Node's legacy API does."""
        self.redis.zadd(f"{self.base}repeat", {key: START_MS + HOUR_MS})
        self.redis.hset(f"{self.base}repeat:{key}", mapping={"name": "tick", "every": HOUR_MS})

    def events(self) -> QueueEvents:
        """Open a listener at the beginning of the stream."""
        kind: Any = QueueEvents if self._runner is None else AsyncQueueEvents
        self._opened.append(self._plain(kind(self.name, start="0", broker=lambda: self.broker)))
        return cast("QueueEvents", self._opened[-1])

    def close_callback(self, events: QueueEvents) -> Callable[[object], object]:
        """Return a callback that closes a listener."""
        target = events if self._runner is None else cast(Any, events).target
        return lambda _event: target.close()

    def signal(self) -> Signal:
        """Return a signal that a callback sets and the scenario waits for."""
        return Signal(self._runner)

    def result(self, job: Job) -> Any:
        """Return a handle to a job's result."""
        return job.result() if self._runner is None else AwaitedResult(job.result(), self._runner)

    def connect_worker(self, name: str) -> None:
        """Open a connection with a worker's client name."""
        self._opened.append(self.broker.client(self.queue.context.keys.client_name(name)))
        self._opened[-1].run(command("EXISTS", self.key("meta")))  # in a cluster, connects to the queue's node

    def key(self, name: str) -> str:
        """Return a key of the queue."""
        return self.base + name

    # ---- comparison ----------------------------------------------------------------------------------------------

    def ids(self) -> list[str]:
        """Return the ids of all jobs in the order in which they were added."""
        added = cast("list[tuple[str, dict[str, str]]]", self.redis.xrange(self.key("events")))
        return list(dict.fromkeys(event["jobId"] for _, event in added if event["event"] == "added"))

    def normalize(self, value: Any, ids: Sequence[str]) -> Any:
        """Return a result without the ids, names and classes that differ between the forms."""
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
            return {self.normalize(name, ids): self.normalize(item, ids) for name, item in value.items()}
        return [self.normalize(item, ids) for item in value]

    def _text(self, text: str, ids: Sequence[str]) -> str:
        for number, job_id in enumerate(ids, 1):
            text = text.replace(job_id, f"#{number}")
        return text.replace(self.base, "Q:").replace(self.name, "Q")

    def state(self, ids: Sequence[str]) -> State:
        """Return everything that Redis stores for the queue."""
        return dump(self.redis, self.base, ids)

    def close(self) -> None:
        """Close all connections."""
        for opened in self._opened:
            opened.close()
        self.queue.close()
        self.redis.close()


class Signal:
    """A `threading.Event` or an `asyncio.Event`, both with blocking calls."""

    def __init__(self, runner: asyncio.Runner | None) -> None:
        self._runner, self._event = runner, threading.Event() if runner is None else asyncio.Event()

    def set(self, *_: object) -> None:
        """Set the event; can be used as a callback."""
        self._event.set()

    def wait(self) -> bool:
        """Wait up to half a minute; return whether it was set."""
        if isinstance(self._event, threading.Event):
            return self._event.wait(30)
        assert self._runner is not None
        return bool(self._runner.run(asyncio.wait_for(self._event.wait(), 30)))


class AwaitedResult:
    """The awaitable methods of an ``AsyncResult`` as blocking calls, with the sync methods' names."""

    def __init__(self, result: AsyncResult[Any], runner: asyncio.Runner) -> None:
        self._result, self._runner = result, runner

    def get(self, timeout: float | None = None) -> Any:
        """Run ``aget``."""
        return self._runner.run(self._result.aget(timeout))

    def snapshot(self) -> Any:
        """Run ``asnapshot``."""
        return self._runner.run(self._result.asnapshot())

    def forget(self) -> None:
        """Run ``aforget``."""
        self._runner.run(self._result.aforget())

    def revoke(self, *, terminate: bool = False) -> Any:
        """Run ``arevoke``."""
        return self._runner.run(self._result.arevoke(terminate=terminate))
