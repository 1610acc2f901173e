"""The connection, keys and default options that a queue shares with its jobs and schedulers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any, TypeVar

from bulltask import embedded, loop_timers
from bulltask.config.config import Settings
from bulltask.config.urls import SecretUrl, secret_url
from bulltask.jobs.job import NewJob
from bulltask.jobs.names import check_queue_name
from bulltask.queue.add_options import AddOptions, build_job, check_options
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation, execute, run_async, run_sync

__all__ = ["QueueBase", "QueueContext"]

R = TypeVar("R")


class QueueContext:
    """Runs the calls and operations of one queue.

    Methods that use Redis have two forms; names of the asyncio form start with ``a``.

    Args:
        queue: The queue's name in the app.
        broker: Returns the connection to Redis. It is called on every use, because a forked child needs a new
            connection. It is not called before the first use, so that an app's settings can still be changed.
        defaults: Default options of jobs that are added through this queue.
        owned: The connection belongs to this context and is closed with it.

    Raises:
        InvalidNameError: The queue's name is invalid.
        TypeError: A default option is unknown.
    """

    def __init__(
        self, queue: str, broker: Callable[[], Broker], defaults: Mapping[str, Any] | None, *, owned: bool = False
    ) -> None:
        check_options(defaults or {})
        self.queue, self.defaults = check_queue_name(queue), dict(defaults or {})
        self._broker, self._owned = broker, owned

    @classmethod
    def without_app(
        cls,
        queue: str,
        url: SecretUrl | None,
        settings: Mapping[str, object],
        defaults: Mapping[str, Any] | None,
    ) -> QueueContext:
        """Create a context with a separate connection; for ``settings``, see ``bulltask.config.settings``.

        Raises:
            ConfigError: A setting is unknown or has an invalid value.
        """
        config = Settings(settings if url is None else {**settings, "broker_url": url}).freeze()
        directory = embedded.calling_directory()
        connect = cache(lambda: Broker(config, embedded.resolve_url(config.broker_url, directory)))
        return cls(queue, connect, defaults, owned=True)

    @property
    def broker(self) -> Broker:
        """The connections to the Redis server."""
        return self._broker()

    @property
    def keys(self) -> QueueKeys:
        """The queue's keys."""
        return self.broker.keys(self.queue)

    def run(self, work: Call[R] | Operation[R]) -> R:
        """Make a call, or run an operation with all its steps on one connection."""
        with self.broker.pool.client() as client:
            client.connect()  # sets the clock, whose time is an argument of the operation's calls
            return run_sync(client, work if isinstance(work, Generator) else execute(work))

    async def arun(self, work: Call[R] | Operation[R]) -> R:
        """:meth:`run` for asyncio."""
        client = self.broker.shared_async_client()
        await client.connect()
        return await run_async(client, work if isinstance(work, Generator) else execute(work))

    def run_blocking(self, call: Call[Any], block_ms: int) -> None:
        """Make a call that may block for ``block_ms`` in Redis, on a separate connection."""
        client = self.broker.blocking_client(block_ms)
        try:
            client.run(call)
        finally:
            client.close()

    async def arun_blocking(self, call: Call[Any], block_ms: int) -> None:
        """:meth:`run_blocking` for asyncio."""
        client = self.broker.blocking_async_client(block_ms)
        try:
            await client.run(call)
        finally:
            await client.close()

    def connect(self) -> None:
        """Connect now, which also sets the clock."""
        with self.broker.pool.client() as client:
            client.connect()

    async def aconnect(self) -> None:
        """:meth:`connect` for asyncio."""
        await self.broker.shared_async_client().connect()

    def sleep(self, seconds: float) -> None:
        """Wait."""
        threading.Event().wait(seconds)

    async def asleep(self, seconds: float) -> None:
        """:meth:`sleep` for asyncio."""
        await loop_timers.sleep(seconds)

    def now_ms(self) -> int:
        """Return the server's time. It is known after connecting, so it is always known within an operation."""
        return self.broker.clock.now_ms()

    def build(self, name: str, data: Any, options: Mapping[str, Any]) -> NewJob:
        """Check a job's name, data and options, add the default options, and return the job as it will be sent."""
        return build_job(self.queue, name, data, {**self.defaults, **options}, self.broker.config)

    def with_timestamps(self, jobs: Iterable[NewJob]) -> list[NewJob]:
        """Set the server's time as the timestamp of new jobs, so that the caller gets the stored timestamp."""
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


class QueueBase:
    """Base class of ``Queue`` and ``AsyncQueue``: a name and a context.

    Args:
        name: The queue's name in the app: ``emails`` is Node's ``{emails}`` unless ``queue_hash_tag`` is false.
        broker_url: The server's URL, for a queue without an app; ``BULLTASK_BROKER_URL`` takes precedence.
        default_job_options: Default options of jobs that are added through this queue.
        context: The context of an app's queue.
        settings: Any other setting of ``bulltask.config.settings``: ``prefix``, ``queue_hash_tag`` …

    Raises:
        ConfigError, InvalidNameError: A setting or the name is invalid.
    """

    def __init__(
        self,
        name: str,
        broker_url: str | SecretUrl | None = None,
        *,
        default_job_options: AddOptions | None = None,
        context: QueueContext | None = None,
        **settings: object,
    ) -> None:
        broker_url = secret_url(broker_url)
        self._context = context or QueueContext.without_app(name, broker_url, settings, default_job_options)

    @property
    def name(self) -> str:
        """The queue's name in the app."""
        return self._context.queue

    @property
    def qualified_name(self) -> str:
        """The queue's qualified name in Node: ``bull:{emails}``."""
        return self._context.keys.base[:-1]

    @property
    def context(self) -> QueueContext:
        """The queue's connection, keys and default options."""
        return self._context

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"
