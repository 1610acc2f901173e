"""What a queue shares with its jobs and schedulers: :class:`QueueContext`, with its connection, keys and options.

Also the options of ``Queue.add``, and the check of the arguments of public methods.
"""

from __future__ import annotations

import functools
import inspect
import socket
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from functools import cache
from typing import Any, Final, NamedTuple, Required, TypedDict, TypeVar

from bulltask import embedded
from bulltask.config.config import Config
from bulltask.config.settings import Settings
from bulltask.config.urls import SecretUrl, secret_url
from bulltask.jobs import clock as loop_timers
from bulltask.jobs import codec
from bulltask.jobs.backoff import Backoff
from bulltask.jobs.clock import Duration, to_epoch_ms, to_ms
from bulltask.jobs.errors import BulltaskError, ConfigError
from bulltask.jobs.fields import KeepJobs, TimeLimits
from bulltask.jobs.job import (
    UNLIMITED_ATTEMPTS,
    BackoffLike,
    Deduplication,
    JobOptions,
    NewJob,
    ParentLike,
    check_priority,
    check_size,
    link_to_parent,
    new_job_id,
    stored_options,
)
from bulltask.jobs.names import check_job_id, check_job_name, check_queue_name
from bulltask.jobs.payloads import PayloadCodec
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call, QueueKeys
from bulltask.transport.operation import (
    Operation,
    arun_generator,
    execute,
    run_async,
    run_generator,
    run_sync,
    together,
)
from bulltask.transport.permissions import permitted
from bulltask.transport.scripts.queue import Pause

__all__ = [
    "AddOptions",
    "BulkJob",
    "QueueBase",
    "QueueContext",
    "build_job",
    "check_bulk_jobs",
    "check_positive",
    "checked",
]


C = TypeVar("C")

_KINDS: Final[dict[str, tuple[type[bool] | type[int] | type[str], str]]] = {
    "bool": (bool, "true or false"),
    "int": (int, "an integer"),
    "str": (str, "a string"),
}
_NOT_NEGATIVE: Final = frozenset(("count", "limit", "keep", "keep_logs", "max_jobs", "max_length"))


class _Rule(NamedTuple):
    kind: type[bool] | type[int] | type[str]
    what: str
    optional: bool

    def check(self, name: str, value: Any) -> None:
        """Raise ``ConfigError`` for an invalid value."""
        if value is None and self.optional:
            return
        if not isinstance(value, self.kind) or (self.kind is int and isinstance(value, bool)):
            raise ConfigError(f"{name} must be {self.what}, not {value!r:.200}")
        if isinstance(value, int) and name in _NOT_NEGATIVE and value < 0:
            raise ConfigError(f"{name} must be 0 or more, not {value}")


def checked(kind: type[C]) -> type[C]:
    """Return the class; its public methods raise ``ConfigError`` for arguments that do not match their plain hints.

    Otherwise ``force="false"`` would be true, and Redis would report ``count="x"`` as an error in a script. Only
    parameters with the hints ``bool``, ``int`` and ``str``, or one of them and ``None``, are checked, and generators
    check their arguments themselves.
    """
    for name, method in list(vars(kind).items()):
        is_generator = inspect.isgeneratorfunction(method) or inspect.isasyncgenfunction(method)
        if inspect.isfunction(method) and not (name.startswith("_") or is_generator):
            setattr(kind, name, _checked(method))
    return kind


def _checked(method: Callable[..., Any]) -> Callable[..., Any]:
    names, rules = list(inspect.signature(method).parameters), _rules(method)
    if not rules:
        return method

    def check(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, value in (*zip(names, args, strict=False), *kwargs.items()):
            if name in rules:
                rules[name].check(name, value)

    @functools.wraps(method)
    async def coroutine(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return await method(*args, **kwargs)

    @functools.wraps(method)
    def function(*args: Any, **kwargs: Any) -> Any:
        check(args, kwargs)
        return method(*args, **kwargs)

    return coroutine if inspect.iscoroutinefunction(method) else function


def _rules(method: Callable[..., Any]) -> dict[str, _Rule]:
    rules: dict[str, _Rule] = {}
    for name, parameter in inspect.signature(method).parameters.items():
        hint, _, optional = str(parameter.annotation).partition(" | ")
        if hint in _KINDS and optional in {"", "None"} and parameter.kind is not parameter.VAR_POSITIONAL:
            rules[name] = _Rule(*_KINDS[hint], bool(optional))
    return rules


class AddOptions(TypedDict, total=False):
    """Options of a job: BullMQ's, and a few of bulltask's; options without an explanation are as for calls.

    Durations are seconds or ``timedelta``. ``None`` is the same as leaving an option out, except for ``backoff``, where
    it means to retry immediately. See also :class:`bulltask.registry.options.CallOptions`, and
    :class:`bulltask.registry.options.TaskOptions`.

    Attributes:
        attempts: Maximum number of attempts (default: the app's ``task_max_retries`` + 1, which is 3; in Node, one
            attempt).
        backoff: Delay between attempts: seconds, or ``{"type": "exponential", "delay": 1, "jitter": 0.2, "max_delay":
            3600}``. ``type`` may be the name of a custom strategy that the workers define. Default: the app's setting.
        delay: Time before the job may run.
        lifo: Put the job at the front of the waiting list.
        remove_on_complete, remove_on_fail: Retention of the finished job: ``True`` removes it, ``False`` keeps it, a
            number keeps the newest jobs, ``{"age": seconds, "count": n}`` keeps jobs up to that age and at most ``n``.
            Default: the app's ``result_expires`` (a day) and ``result_failure_expires`` (forever).
        keep_logs: Maximum number of lines in its log; 0: no limit (default: the setting ``max_logs``, 1,000).
        size_limit: Maximum size of its data as JSON, in bytes; checked before the job is sent.
        parent: The job that waits for this job.
        expires: Duration, or a ``datetime``, after which a bulltask worker fails the job instead of running it.
    """

    attempts: int
    backoff: BackoffLike | None
    delay: Duration
    priority: int
    lifo: bool
    timestamp: datetime | float
    job_id: str | None
    remove_on_complete: KeepJobs
    remove_on_fail: KeepJobs
    keep_logs: int
    stack_trace_limit: int
    size_limit: int
    deduplication: Deduplication | Mapping[str, Any] | str
    parent: ParentLike | None
    fail_parent_on_failure: bool
    continue_parent_on_failure: bool
    ignore_dependency_on_failure: bool
    remove_dependency_on_failure: bool
    telemetry_metadata: str
    omit_context: bool
    expires: Duration | datetime
    headers: Mapping[str, Any]
    soft_time_limit: Duration
    time_limit: Duration


class BulkJob(TypedDict, total=False):
    """A job of ``add_bulk``: name, data and options."""

    name: Required[str]
    data: Any
    options: AddOptions


def check_bulk_jobs(jobs: Iterable[BulkJob]) -> list[BulkJob]:
    """Return the jobs of ``add_bulk``; raises ``TypeError`` if one has no name, or an unknown key, such as ``opts``."""
    checked, known = list(jobs), BulkJob.__annotations__
    for job in checked:
        if unknown := sorted(set(job) - set(known)):
            raise TypeError(f"unknown key {unknown[0]!r:.200} of a job in add_bulk; use {', '.join(known)}")
        if "name" not in job:
            raise TypeError("a job in add_bulk has no 'name'")
    return checked


def check_options(options: Mapping[str, Any]) -> None:
    """Check the names of options; raises ``TypeError``, with the known ones, for any other."""
    known = AddOptions.__annotations__
    if unknown := sorted(set(options) - set(known)):
        raise TypeError(f"unknown option {unknown[0]!r:.200}; use {', '.join(sorted(known))}")


def build_job(queue: str, name: str, data: Any, options: Mapping[str, Any], config: Config) -> NewJob:
    """Check a job's name, data (plain JSON) and options (:class:`AddOptions`), and return the job that will be sent."""
    check_options(options)
    stored = stored_options(options, config.backoff_strategies)
    parent = link_to_parent(options.get("parent"), stored, prefix=config.prefix, hash_tag=config.queue_hash_tag)
    encoded = PayloadCodec(config).dump_job_data(data, queue, name, f"the data of job {name}")
    job_options = _job_options(name, options, stored, config)
    check_size(encoded, job_options, config.max_payload, f"the data of job {name}")
    job_id, timestamp_ms = options.get("job_id"), stored.get("timestamp")
    return NewJob(
        queue=queue,
        id=new_job_id() if job_id is None else check_job_id(job_id),
        name=check_job_name(name),
        data=encoded,
        options=job_options,
        parent=parent,
        timestamp_ms=timestamp_ms if isinstance(timestamp_ms, int) else None,
        has_custom_id=job_id is not None,
    )


def check_positive(value: int, name: str) -> int:
    """Return ``value`` if it is an integer of 1 or more; raises ``ConfigError`` if not."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ConfigError(f"{name} must be 1 or more, not {value!r:.200}")
    return value


def _job_options(name: str, options: Mapping[str, Any], stored: Mapping[str, object], config: Config) -> JobOptions:
    delay, headers, expires = options.get("delay"), options.get("headers"), options.get("expires")
    at = isinstance(expires, datetime)
    limits = TimeLimits.of(options.get("soft_time_limit"), options.get("time_limit"))
    limits.check(f"job {name}")
    backoff = Backoff("exponential", config.retry_backoff_ms, config.retry_jitter, config.retry_backoff_max_ms)
    return JobOptions(
        attempts=_attempts(options.get("attempts"), config),
        backoff=None if "backoff" in options else backoff,
        delay_ms=0 if delay is None else to_ms(delay, "delay"),
        priority=check_priority(options.get("priority")),
        lifo=_flag(options.get("lifo"), "lifo"),
        keep_completed_ms=config.result_expires_ms,
        keep_failed_ms=config.failure_expires_ms,
        expires_in_ms=None if expires is None or at else to_ms(expires, "expires"),
        expires_ms=to_epoch_ms(expires, "expires") if isinstance(expires, datetime) else None,
        time_limits=limits,
        sender=config.sender,
        headers="" if not headers else codec.encode(headers, what=f"headers of job {name}").decode(),
        more=stored,
    )


def _attempts(value: object, config: Config) -> int:
    if value is None:
        return config.max_retries + 1
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= UNLIMITED_ATTEMPTS:
        raise ConfigError(f"attempts must be an integer of 0 or more, not {value!r:.200}")
    return value


def _flag(value: object, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{name} must be true or false, not {value!r:.200}")
    return bool(value)


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
    """

    def __init__(
        self, queue: str, broker: Callable[[], Broker], defaults: Mapping[str, Any] | None, *, owned: bool = False
    ) -> None:
        check_options(defaults or {})
        self.queue = check_queue_name(queue)
        self.defaults = dict(defaults or {})
        self._broker = broker
        self._owned = owned

    @classmethod
    def without_app(
        cls,
        queue: str,
        url: SecretUrl | None,
        settings: Mapping[str, object],
        defaults: Mapping[str, Any] | None,
    ) -> QueueContext:
        """Create a context with a separate connection; for ``settings``, see ``bulltask.config.config``."""
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
            return run_sync(client, self.permitted(work if isinstance(work, Generator) else execute(work)))

    async def arun(self, work: Call[R] | Operation[R]) -> R:
        """:meth:`run` for asyncio."""
        client = self.broker.shared_async_client()
        await client.connect()
        return await run_async(client, self.permitted(work if isinstance(work, Generator) else execute(work)))

    def run_together(self, operations: Sequence[Operation[R]]) -> list[R | BulltaskError]:
        """Run independent operations in the same round trips; the result of one that failed is its error."""
        with self.broker.pool.client() as client:
            client.connect()
            return run_generator(together(list(map(self.permitted, operations))), client.try_many)

    async def arun_together(self, operations: Sequence[Operation[R]]) -> list[R | BulltaskError]:
        """:meth:`run_together` for asyncio."""
        client = self.broker.shared_async_client()
        await client.connect()
        return await arun_generator(together(list(map(self.permitted, operations))), client.try_many)

    def permitted(self, operation: Operation[R]) -> Operation[R]:
        """Return an operation that changes nothing if the user may not complete one of its scripts."""
        return permitted(operation, self.broker.permitted, self.broker.endpoint.safe_url)

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

    def new_pause(self, by: str) -> Pause:
        """Return the note of a pause that begins now; ``by`` is who pauses (``""``: the app and this host)."""
        return Pause(by or self.broker.config.sender or socket.gethostname(), self.now_ms())

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
        settings: Any other setting of ``bulltask.config.config``: ``prefix``, ``queue_hash_tag`` …

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
