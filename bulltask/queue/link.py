"""One queue's way to Redis, shared by the queue and its jobs, sync and async."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from bulltask import embedded
from bulltask.config.config import Conf
from bulltask.config.urls import SecretUrl
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import check_queue_name
from bulltask.queue.options import build_job, check_options
from bulltask.transport.async_client import AsyncClient
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, run_async, run_sync

__all__ = ["Link"]

R = TypeVar("R")


class Link:
    """Responsible for carrying a queue's operations.

    Args:
        queue: the queue as the user spells it.
        broker: gives the way to Redis; asked at every use, so that a forked child finds its own, and not before the
            first one, so that an app's settings may still change.
        defaults: options that every job added through this queue has unless it says otherwise.
        owned: the broker is this link's alone and is closed with it.

    Raises:
        InvalidNameError: the queue's name is refused.
        TypeError: a default option is unknown.
    """

    def __init__(
        self, queue: str, broker: Callable[[], Broker], defaults: Mapping[str, Any] | None, *, owned: bool = False
    ) -> None:
        check_options(defaults or {})
        self.queue, self.defaults = check_queue_name(queue), dict(defaults or {})
        self._broker, self._owned = broker, owned

    @classmethod
    def to(
        cls,
        queue: str,
        url: SecretUrl | None,
        settings: Mapping[str, object],
        defaults: Mapping[str, Any] | None,
    ) -> Link:
        """Make a link without an app; ``settings`` are those of ``bulltask.config.settings``.

        Raises:
            ConfigError: a setting has a wrong name or value.
        """
        config = Conf(settings if url is None else {**settings, "broker_url": url}).freeze()
        return cls(queue, cache(lambda: Broker(config, embedded.resolve_url(config.broker_url))), defaults, owned=True)

    @property
    def broker(self) -> Broker:
        """The way to Redis."""
        return self._broker()

    @property
    def keys(self) -> QueueKeys:
        """The queue's keys."""
        return self.broker.keys(self.queue)

    def run(self, operation: Operation[R]) -> R:
        """Carry an operation; all its steps go through one connection."""
        with self.broker.pool.client() as client:
            client.connect()  # the clock is set when a connection is made, and the calls carry its time
            return run_sync(client, operation)

    async def arun(self, operation: Operation[R]) -> R:
        """:meth:`run` for asyncio."""
        client = self.broker.shared_async_client()
        await client.connect()
        return await run_async(client, operation)

    def wait(self, call: Call[Any], wait_ms: int) -> None:
        """Make a call that blocks for up to ``wait_ms``, on a connection of its own."""
        client = self.broker.blocking_client(wait_ms)
        try:
            client.run(call)
        finally:
            client.close()

    async def await_(self, call: Call[Any], wait_ms: int) -> None:
        """:meth:`wait` for asyncio."""
        client = AsyncClient(self.broker.endpoint.blocking(wait_ms))
        try:
            await client.run(call)
        finally:
            await client.close()

    def connect(self) -> None:
        """Connect now, so that the server's time is known."""
        with self.broker.pool.client() as client:
            client.connect()

    async def aconnect(self) -> None:
        """:meth:`connect` for asyncio."""
        await self.broker.shared_async_client().connect()

    def now_ms(self) -> int:
        """The server's time; inside an operation it is known."""
        return self.broker.clock.now_ms()

    def build(self, name: str, data: Any, options: Mapping[str, Any]) -> NewJob:
        """Check everything about a job and return what will be sent; the defaults are added."""
        return build_job(self.queue, name, data, {**self.defaults, **options}, self.broker.config)

    def dated(self, jobs: Iterable[NewJob]) -> list[NewJob]:
        """Give new jobs the server's time of this moment, so that what is sent is what the caller sees."""
        now_ms = self.now_ms()
        return [job if job.timestamp_ms is not None else replace(job, timestamp_ms=now_ms) for job in jobs]

    def close(self) -> None:
        """Close idle connections, unless an app owns them."""
        if self._owned:
            self.broker.close()

    async def aclose(self) -> None:
        """Close the running loop's connection, unless an app owns it."""
        if self._owned:
            await self.broker.aclose()
            self.broker.close()
