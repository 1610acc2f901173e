"""The options of tasks and calls.

``TaskOptions`` and ``CallOptions`` describe, check and convert them; the ``…Keywords`` are their types for editors and
type checkers, which cannot derive one from the other (tests/unit/test_option_types.py compares them, and BullMQ's own
options of queues). At the end are Celery's options: those without effect, and those that bulltask refuses.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final, Generic, Literal, Required, TypedDict, TypeVar

from bulltask.config.config import Config, check_payload_options
from bulltask.config.parsers import TaskRate, compression, jitter_fraction, task_rate
from bulltask.jobs.backoff import Backoff, CustomBackoff, warn_about_long_delay
from bulltask.jobs.clock import Duration, to_epoch_ms, to_ms, value_class
from bulltask.jobs.errors import ConfigError, did_you_mean, warn_user
from bulltask.jobs.fields import KeepJobs, TimeLimits
from bulltask.jobs.job import (
    STORED,
    UNLIMITED_ATTEMPTS,
    BackoffLike,
    Deduplication,
    ParentLike,
    check_priority,
    stored_options,
)
from bulltask.jobs.names import check_queue_name
from bulltask.jobs.payloads import Compression, PayloadFormat, Serializer
from bulltask.registry.stamping import headers_with_stamps, with_stamps

if TYPE_CHECKING:
    from bulltask.registry.canvas import Canvas, Signature

__all__ = [
    "TASK_OPTIONS",
    "BatchTaskKeywords",
    "CallKeywords",
    "CallOptions",
    "SignatureKeywords",
    "SingleCallKeywords",
    "TaskKeywords",
    "TaskOptions",
    "check_max_retries",
    "expiry_ms",
    "keep_ms",
    "translate_call_options",
]


def check_max_retries(value: int) -> int:
    """Return a valid number of retries; raises ``ConfigError`` for any other value."""
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < UNLIMITED_ATTEMPTS:
        raise ConfigError(f"max_retries must be an integer of 0 or more, not {value!r:.200}")
    return value


def keep_ms(expires: Duration | None, default_ms: int | None) -> int | None:
    """Return how long a finished job is kept."""
    return default_ms if expires is None else to_ms(expires, "result_expires")


def expiry_ms(expires: Duration | datetime | None) -> tuple[int | None, int | None]:
    """Return ``(expires_in_ms, expires_ms)``: counted from the send, or epoch milliseconds; at most one is set."""
    if expires is None:
        return None, None
    if isinstance(expires, datetime):
        return None, to_epoch_ms(expires, "expires")
    return to_ms(expires, "expires"), None


DeliveryMode = Literal[1, 2, "transient", "persistent"]
R = TypeVar("R")
ExceptionTypes = tuple[type[BaseException], ...] | list[type[BaseException]]


class _Keywords(TypedDict, total=False):
    """Options of tasks and of calls; the last three are Celery's, and have no effect."""

    queue: str | None
    priority: int | None
    expires: Duration | datetime | None
    max_retries: int | None
    lifo: bool
    remove_on_complete: KeepJobs | None
    remove_on_fail: KeepJobs | None
    keep_logs: int | None
    stack_trace_limit: int | None
    size_limit: int | None
    fail_parent_on_failure: bool | None
    continue_parent_on_failure: bool | None
    ignore_dependency_on_failure: bool | None
    remove_dependency_on_failure: bool | None
    soft_time_limit: Duration | None
    time_limit: Duration | None
    serializer: Serializer | None
    compression: Compression | None
    delivery_mode: DeliveryMode | None
    immediate: bool | None
    mandatory: bool | None


class TaskKeywords(_Keywords, total=False):
    """Options of ``@app.task``: see :class:`bulltask.registry.options.TaskOptions`.

    The options at the end are Celery's and have no effect. A value that differs from bulltask's behavior causes a
    warning (:mod:`bulltask.registry.options`).
    """

    retry_backoff: bool | Duration | CustomBackoff | None
    retry_backoff_max: Duration | None
    retry_jitter: bool | float | None
    default_retry_delay: Duration | None
    autoretry_for: ExceptionTypes
    dont_autoretry_for: ExceptionTypes
    throws: ExceptionTypes
    ignore_result: bool
    result_expires: Duration | None
    result_failure_expires: Duration | None
    rate_limit: float | str | None
    spark: bool
    checkpoint: bool
    checkpoint_interval: Duration
    typed: bool | None
    pydantic: bool | None
    retry_kwargs: Mapping[Literal["max_retries", "countdown"], Any]
    # Celery's, without effect:
    Request: Any
    Strategy: Any
    abstract: bool | None
    acks_late: bool | None
    acks_on_failure: bool | None
    acks_on_failure_or_timeout: bool | None
    acks_on_timeout: bool | None
    autoregister: bool | None
    backend: Any
    lazy: bool | None
    reject_on_worker_lost: bool | None
    resultrepr_maxsize: int | None
    retry_on_worker_lost: bool | None
    send_events: bool | None
    shared: bool | None
    store_eager_result: bool | None
    store_errors_even_if_ignored: bool | None
    track_started: bool | None
    trail: bool | None
    typing: bool | None


class BatchTaskKeywords(TaskKeywords, total=False):
    """Options of a batch task, whose function receives a list of jobs."""

    batch: Required[int]
    batch_wait: Duration


class SingleCallKeywords(_Keywords, total=False):
    """Options of calls: see :class:`CallOptions`; those at the end are Celery's, as in :class:`TaskKeywords`."""

    countdown: Duration | None
    eta: datetime | None
    job_id: str | None
    headers: Mapping[str, Any] | None
    ignore_result: bool | None
    backoff: BackoffLike | None
    timestamp: datetime | float | None
    deduplication: Deduplication | Mapping[str, Any] | str | None
    parent: ParentLike | None
    telemetry_metadata: str | None
    omit_context: bool | None
    # Celery's:
    task_id: str | None
    stamped_headers: Sequence[str] | None
    # Celery's, without effect:
    add_to_parent: bool | None
    argsrepr: str | None
    connection: Any
    correlation_id: str | None
    kwargsrepr: str | None
    producer: Any
    publisher: Any
    reply_to: str | None
    result_cls: Any
    retry: bool | None
    retry_policy: Mapping[str, Any] | None
    shadow: str | None


class CallKeywords(SingleCallKeywords, Generic[R], total=False):
    """Options of calls that return ``R``, and of one or several calls that run after it has completed, or failed."""

    link: Canvas[R, Any] | Sequence[Canvas[R, Any]] | None
    link_error: Signature[Any, Any] | Sequence[Signature[Any, Any]] | None


class SignatureKeywords(CallKeywords[R], Generic[R], total=False):
    """Options of a signature: those of its call, and ``immutable``."""

    immutable: bool


@value_class(kw_only=True)
class _SharedOptions:
    """The options of tasks and of calls, as in :class:`_Keywords`."""

    queue: str | None = None
    priority: int | None = None
    expires: Duration | datetime | None = None
    max_retries: int | None = None
    lifo: bool = False
    remove_on_complete: KeepJobs | None = None
    remove_on_fail: KeepJobs | None = None
    keep_logs: int | None = None
    stack_trace_limit: int | None = None
    size_limit: int | None = None
    fail_parent_on_failure: bool | None = None
    continue_parent_on_failure: bool | None = None
    ignore_dependency_on_failure: bool | None = None
    remove_dependency_on_failure: bool | None = None
    soft_time_limit: Duration | None = None
    time_limit: Duration | None = None
    serializer: Serializer | None = None
    compression: Compression | None = None


@value_class(kw_only=True)
class CallOptions(_SharedOptions):
    """Options of a call (``apply_async``, ``send_task``), which override the task's.

    Attributes:
        countdown: Seconds or ``timedelta`` before the job may run.
        eta: ``datetime`` before which the job may not run; a naive ``datetime`` is UTC.
        expires: Seconds, ``timedelta`` or ``datetime`` after which a worker fails the job instead of running it.
        priority, queue, max_retries: As in :class:`bulltask.registry.options.TaskOptions`.
        job_id: The job's id; default: a new UUIDv7. If a job with this id exists, no job is added.
        headers: JSON value for ``self.request.headers`` in the worker.
        lifo: Run the job before those that are already waiting.
        ignore_result: As in :class:`TaskOptions`; ``None``: the task's option.
        remove_on_complete … time_limit: As in :class:`TaskOptions`.
        backoff: Delay between attempts: seconds, or ``{"type": "exponential", "delay": 1, "jitter": 0.2, "max_delay":
            3600}``; overrides the task's ``retry_backoff`` unless that is a function.
        timestamp: The job's creation time: a ``datetime``, or seconds since the epoch.
        deduplication: An id, or :class:`bulltask.jobs.job.Deduplication`. If this job is a duplicate, the call
            returns the existing job's handle.
        parent: The parent job; in a task, ``parent=self.request``.
        serializer, compression: How the arguments are serialized and compressed; for results, these are options of the
            task.
        telemetry_metadata, omit_context: Context that bullmq-otel passes from producer to worker.
    """

    countdown: Duration | None = None
    eta: datetime | None = None
    job_id: str | None = None
    headers: Mapping[str, Any] | None = None
    ignore_result: bool | None = None
    backoff: BackoffLike | None = None
    timestamp: datetime | float | None = None
    deduplication: Deduplication | Mapping[str, Any] | str | None = None
    parent: ParentLike | None = None
    telemetry_metadata: str | None = None
    omit_context: bool | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> CallOptions:
        """Build the options from keywords; raises ``TypeError`` for an unknown name.

        Raises ``ConfigError`` if a flag is neither true nor false.
        """
        known = {field.name for field in fields(cls)}
        if not given.keys() <= known:
            given = headers_with_stamps(translate_call_options(given))
        if unknown := sorted(set(given) - known):
            raise TypeError(f"unknown option {unknown[0]!r:.200}{_hint(unknown[0], known, _REFUSED_CALL_OPTIONS)}")
        for name in ("lifo", "ignore_result"):
            if name in given and not isinstance(given[name], bool | None):
                raise ConfigError(f"{name} must be True or False, not {given[name]!r:.200}")
        return cls(**given)

    @property
    def stored(self) -> dict[str, Any]:
        """The options that have a name in BullMQ, if they are set."""
        return {name: value for name in _STORED_IN_CALLS if (value := getattr(self, name)) is not None}


_STORED_IN_CALLS: Final = tuple(field.name for field in fields(CallOptions) if field.name in STORED)


CELERY_RETRY_DELAY_S: Final = 180
CELERY_MAX_RETRIES: Final = 3
MAX_BATCH: Final = 1_000

_FLAGS: Final = "spark typed pydantic ignore_result lifo unlimited_retries checkpoint".split()
_DURATIONS: Final = (
    "retry_backoff_max default_retry_delay result_expires result_failure_expires checkpoint_interval".split()
)

_HANDLERS: Final = {
    "before_start": "the signal task_prerun",
    "on_success": "link= of a call, or the signal task_success",
    "on_failure": "link_error= of a call, or the signal task_failure",
    "on_retry": "the signal task_retry",
    "after_return": "the signal task_postrun",
}
"""Celery's handlers, which are task options only in Celery, with the alternatives."""

Exceptions = tuple[type[BaseException], ...]


@value_class(kw_only=True)
class TaskOptions(_SharedOptions):
    """Options of ``@app.task``, with Celery's names; ``None`` means to use the app's setting.

    Attributes:
        queue: Queue of the task's jobs.
        priority: 1 (first) to 2,097,151 (last). Jobs without a priority run before all others. (This is BullMQ's order,
            not Celery's.)
        expires: Seconds, ``timedelta`` or ``datetime`` after which a worker fails the job instead of running it.
        max_retries: Maximum number of retries after the first attempt (3 attempts are ``max_retries=2``).
        unlimited_retries: Retry without a limit.
        retry_backoff: Initial delay of the exponential backoff (seconds or ``timedelta``; ``True`` is 1 s). ``False``:
            every delay is ``default_retry_delay``. A function receives the attempts made and the exception, and returns
            seconds.
        retry_backoff_max: Maximum delay.
        retry_jitter: Random variation of the delay, as a fraction; ``True`` is 0.2.
        default_retry_delay: A fixed delay instead of the backoff (Celery's name); default: 180 s if ``retry_backoff``
            is ``False``.
        autoretry_for: Exceptions that are retried even if they are not transient, except ``PermanentError``.
        dont_autoretry_for: Exceptions that are never retried.
        throws: Exceptions that are expected: a job that fails with one is logged at INFO level, without a traceback.
        ignore_result: Store ``null`` instead of the return value, unless another job of a canvas or flow receives it.
        result_expires, result_failure_expires: Retention of completed and failed jobs.
        lifo: Run a job before those that are already waiting.
        remove_on_complete, remove_on_fail: Retention in BullMQ's form, instead of the two above: ``True``, ``False``, a
            number of jobs, or ``{"age": seconds, "count": n}``.
        keep_logs, stack_trace_limit: Maximum number of a job's log lines (0: no limit) and tracebacks.
        size_limit: Maximum size of a job's arguments in bytes of JSON.
        fail_parent_on_failure, continue_parent_on_failure, ignore_dependency_on_failure,
            remove_dependency_on_failure: How a job's failure affects its parent; at most one of them.
        soft_time_limit: Seconds or ``timedelta`` after which the task is interrupted with ``SoftTimeLimitExceeded`` (an
            async task is cancelled).
        time_limit: Seconds or ``timedelta`` after which the attempt is stopped and fails with ``TimeLimitExceeded``.
        rate_limit: How often the task's jobs may start, across all workers of a queue. A number is jobs per second; a
            string has a unit: ``"10/s"``, ``"100/m"``, ``"5/30s"``. 0 means no limit. Starts are spread evenly.
        batch: Call the task's function once for up to this many jobs, 1 to 1,000, with a list of
            :class:`~bulltask.registry.batches.BatchJob`.
        batch_wait: Seconds or ``timedelta`` to wait for further jobs of a batch; 0: only jobs that are already waiting.
        spark: Give the task a Spark session when a worker runs it (``bulltask.spark.current_session()``).
        typed: Which type hints are enforced. ``True``: all; ``False``: none; ``None``: the setting ``task_typed``, by
            default the hints of types that JSON does not have (``datetime``, dataclasses, pydantic models …).
        serializer: How arguments, results and exceptions are serialized: ``"json"`` or ``"cloudpickle"``; ``None``: the
            settings ``task_serializer`` and ``result_serializer``.
        compression: How large arguments and results are compressed: ``"zlib"`` (in Celery also called ``"gzip"``) or
            ``"zstd"``; ``None``: the settings ``task_compression`` and ``result_compression``.
        pydantic: Celery's option. ``True``: ``get()`` returns the JSON of the result, such as a dictionary for a model
            (arguments are always converted); ``False``: ``typed=False``.
        checkpoint: The task's jobs have a cursor, from which they continue after an interruption (``self.iterate()``);
            needs ``bind=True``.
        checkpoint_interval: Minimum time between two writes of the cursor (seconds or ``timedelta``); 0 stores it after
            each item.
    """

    unlimited_retries: bool = False
    retry_backoff: bool | Duration | CustomBackoff | None = None
    retry_backoff_max: Duration | None = None
    retry_jitter: bool | float | None = None
    default_retry_delay: Duration | None = None
    autoretry_for: Exceptions = ()
    dont_autoretry_for: Exceptions = ()
    throws: Exceptions = ()
    ignore_result: bool = False
    result_expires: Duration | None = None
    result_failure_expires: Duration | None = None
    rate_limit: float | str | None = None
    batch: int | None = None
    batch_wait: Duration = 0
    spark: bool = False
    typed: bool | None = None
    pydantic: bool | None = None
    checkpoint: bool = False
    checkpoint_interval: Duration = 1

    def __post_init__(self) -> None:
        # All checks run when the task is defined, so that errors do not point to a call.
        if self.queue is not None:
            check_queue_name(self.queue)
        check_priority(self.priority)
        for name in ("autoretry_for", "dont_autoretry_for", "throws"):
            kinds = getattr(self, name)
            if not isinstance(kinds, tuple) or not all(
                isinstance(kind, type) and issubclass(kind, BaseException) for kind in kinds
            ):
                raise ConfigError(f"{name} must be a tuple of exception classes, not {kinds!r:.200}")
        for name in _DURATIONS:
            if (value := getattr(self, name)) is not None:
                to_ms(value, name)
        self._check_retry_options()
        for name in _FLAGS:
            if not isinstance(value := getattr(self, name), bool | None):
                advice = "; for Spark's settings, use spark_conf" if name == "spark" else ""
                raise ConfigError(f"{name} must be True or False, not {value!r:.200}{advice}")
        self.time_limits.check("a task")
        task_rate(self.rate_limit, "rate_limit")
        self._check_batch()
        check_payload_options(self.serializer, self.compression)
        stored_options(self.stored)

    def check_function(self, name: str, *, is_async: bool, bind: bool) -> None:
        """Check that a function can be a task with these options; raises ``ConfigError`` if it cannot."""
        if is_async and self.spark:
            raise ConfigError(
                f"task {name!r:.200} is an async def and cannot have spark=True, because calls to Spark would block "
                "the event loop and all other tasks; make it a plain function"
            )
        if self.checkpoint and not bind:
            raise ConfigError(
                f"task {name!r:.200} has checkpoint=True, but no self to access the cursor: add bind=True"
            )

    def _check_batch(self) -> None:
        wait_ms = to_ms(self.batch_wait, "batch_wait")
        if self.batch is None:
            if wait_ms:
                raise ConfigError("batch_wait needs batch, the maximum number of jobs: batch=100, batch_wait=0.05")
        elif not isinstance(self.batch, int) or isinstance(self.batch, bool) or not 1 <= self.batch <= MAX_BATCH:
            raise ConfigError(f"batch must be an integer from 1 to {MAX_BATCH:,}, not {self.batch!r:.200}")
        elif self.checkpoint:
            raise ConfigError("a batch task cannot have checkpoint=True: its jobs do not share a cursor")

    def _check_retry_options(self) -> None:
        expiry_ms(self.expires)
        if inspect.iscoroutinefunction(self.retry_backoff):
            raise ConfigError(f"retry_backoff must be a plain function, because {self.retry_backoff!r} is not awaited")
        warn_about_long_delay(self._first_ms() or 0, "retry_backoff")
        if self.default_retry_delay is not None:
            warn_about_long_delay(to_ms(self.default_retry_delay, "default_retry_delay"), "default_retry_delay")
        if self.max_retries is not None:
            check_max_retries(self.max_retries)
        if self.retry_jitter is not None:
            jitter_fraction(self.retry_jitter, "retry_jitter")

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> TaskOptions:
        """Build the options from keywords; raises ``TypeError``, with a hint, for an unknown name."""
        known, options = {field.name for field in fields(cls)}, translate_task_options(given)
        for name in options:
            if name in _HANDLERS:
                raise TypeError(
                    f"unknown task option {name!r:.200} (a Celery option): define a method {name} in a task class and "
                    f"pass the class as base=, or use {_HANDLERS[name]}"
                )
            if name not in known:
                raise TypeError(f"unknown task option {name!r:.200}{_hint(name, known, _REFUSED_TASK_OPTIONS)}")
        return cls(**options)

    @property
    def _is_fixed(self) -> bool:
        return self.retry_backoff is False or (self.retry_backoff is None and self.default_retry_delay is not None)

    @property
    def time_limits(self) -> TimeLimits:
        """The task's time limits."""
        return TimeLimits.of(self.soft_time_limit, self.time_limit)

    def rate(self, config: Config) -> TaskRate | None:
        """Return the task's rate limit, else the app's; ``None`` if there is no limit."""
        if config.disable_rate_limits:
            return None
        return config.default_rate if self.rate_limit is None else task_rate(self.rate_limit, "rate_limit")

    @property
    def enforced_hints(self) -> bool | None:
        """Whether all type hints are enforced, or none; ``None`` for the app's setting."""
        return False if self.typed is None and self.pydantic is False else self.typed

    def result_form(self, config: Config) -> PayloadFormat:
        """Return how the results of the task's jobs are written."""
        given = None if self.compression is None else compression(self.compression, "compression")
        return PayloadFormat(self.serializer or config.result_serializer, given or config.result_compression)

    @property
    def custom_backoff(self) -> CustomBackoff | None:
        """The task's backoff function, ``None`` if it has none."""
        return self.retry_backoff if callable(self.retry_backoff) else None

    def backoff(self, config: Config) -> Backoff:
        """Return the backoff that is stored in the task's jobs."""
        max_ms = config.retry_backoff_max_ms
        if self.retry_backoff_max is not None:
            max_ms = to_ms(self.retry_backoff_max, "retry_backoff_max")
        jitter = config.retry_jitter
        if self.retry_jitter is not None:
            jitter = jitter_fraction(self.retry_jitter, "retry_jitter")
        if self._is_fixed:
            delay_ms = to_ms(CELERY_RETRY_DELAY_S if self.default_retry_delay is None else self.default_retry_delay)
            return Backoff("fixed", delay_ms, 0.0, max_ms)
        first_ms = self._first_ms()
        return Backoff("exponential", config.retry_backoff_ms if first_ms is None else first_ms, jitter, max_ms)

    def _first_ms(self) -> int | None:
        """Return the initial delay if ``retry_backoff`` sets one."""
        if self.retry_backoff is None or isinstance(self.retry_backoff, bool) or callable(self.retry_backoff):
            return None
        return to_ms(self.retry_backoff, "retry_backoff")

    def attempts(self, config: Config) -> int:
        """Return the maximum number of attempts."""
        if self.unlimited_retries:
            return UNLIMITED_ATTEMPTS
        return 1 + (config.max_retries if self.max_retries is None else self.max_retries)

    def max_explicit_retries(self, config: Config) -> int | None:
        """Return how many retries a task may request, ``None`` if :meth:`attempts` is the limit."""
        if self.max_retries is not None or self.unlimited_retries:
            return None
        if config.max_explicit_retries is None and config.max_retries == 0:
            return CELERY_MAX_RETRIES
        return config.max_explicit_retries

    @property
    def stored(self) -> dict[str, Any]:
        """The options that have a name in BullMQ, if they are set."""
        return {name: value for name in _STORED_IN_TASKS if (value := getattr(self, name)) is not None}


# Only fields, because STORED has an option ``backoff``, and TaskOptions a method of that name.
_STORED_IN_TASKS: Final = tuple(field.name for field in fields(TaskOptions) if field.name in STORED)


_Options = Mapping[str, tuple[tuple[object, ...], str]]
"""Options by name: the values that match bulltask's behavior, and why others have no effect, or what to use instead."""

_ROUTING: Final[_Options] = {
    "exchange": (("",), "use queue="),
    "exchange_type": (("direct",), "use queue="),
    "routing_key": (("",), "use queue="),
}
"""Also accepted if they name the queue, as they do by default in Celery."""

_REFUSED_TASK_OPTIONS: Final[_Options] = {
    **_ROUTING,
    "filter": ((), "use a decorator around the function"),
    "pydantic_strict": ((False,), "set strict=True in the model's model_config"),
    "pydantic_context": (({},), "use a model validator that needs no context"),
    "pydantic_dump_kwargs": (({},), "models are always dumped by alias, so the JSON is valid input for the same model"),
}
"""Task options that would change where a job goes, or what it does: other values are errors."""

_MESSAGES: Final[_Options] = {
    "delivery_mode": ((2, "persistent"), "the Redis server's configuration decides whether jobs are written to disk"),
    "immediate": ((False,), "a job waits in its queue until a worker acquires it"),
    "mandatory": ((False,), "a job waits in its queue until a worker acquires it"),
}

IGNORED_TASK_OPTIONS: Final[_Options] = {
    **_MESSAGES,
    "backend": ((), "a job stores its own result; to store none, use ignore_result=True"),
    "shared": ((True, False), ""),
    "autoregister": ((True,), "each task is registered in its app"),
    "Strategy": (("celery.worker.strategy:default",), "use middleware"),
    "Request": (("celery.worker.request:Request",), "use middleware"),
    "acks_late": ((True,), "jobs are always acknowledged late, when their outcome is stored"),
    "acks_on_failure": ((True,), "a failed job is always stored as failed, or retried"),
    "acks_on_timeout": ((True,), "a job that exceeds its time limit is always stored as failed, or retried"),
    "acks_on_failure_or_timeout": ((True,), "a failed job is always stored as failed, or retried"),
    "reject_on_worker_lost": ((True,), "a job whose child died always runs again; max_crashes limits this"),
    "retry_on_worker_lost": ((True,), "a job whose child died always runs again; max_crashes limits this"),
    "track_started": ((True, False), ""),
    "send_events": ((True,), "BullMQ's scripts always emit their events"),
    "store_errors_even_if_ignored": ((True,), "the error of a failed job is always stored"),
    "trail": ((True, False), ""),
    "typing": ((True,), "arguments are always checked when a call is sent"),
    "resultrepr_maxsize": ((1024,), "results are always shortened in log lines"),
    "store_eager_result": ((False,), "the result of a job in eager mode is kept in its process"),
    "lazy": ((True, False), ""),
    "abstract": ((True, False), ""),
}
"""Task options that are ignored: other values cause a warning."""

TASK_OPTIONS: Final = frozenset({*_REFUSED_TASK_OPTIONS, *IGNORED_TASK_OPTIONS, "retry_kwargs"})
"""Celery's task options that bulltask does not have."""

_REFUSED_CALL_OPTIONS: Final[_Options] = {
    **_ROUTING,
    "chord": ((), "use chord() or group() | callback"),
    "chain": ((), "use chain()"),
    "group_id": ((), "use group()"),
    "group_index": ((), "use group()"),
    "retries": ((0,), "a worker counts them"),
    "router": ((), "set task_routes"),
    "route_name": ((), "set task_routes"),
    "root_id": ((), "bulltask sets it"),
    "parent_id": ((), "bulltask sets it; parent= makes the call a child job of a flow"),
}
"""Call options that would change where a job goes, or what it contains: other values are errors."""

_SEND_RETRIES: Final = (
    "a send is retried up to broker_publish_retries times within broker_publish_timeout, with the same job id; "
    "these settings apply to all calls"
)

IGNORED_CALL_OPTIONS: Final[_Options] = {
    **_MESSAGES,
    "retry": ((True,), _SEND_RETRIES),
    "retry_policy": ((), _SEND_RETRIES),
    "connection": ((), "a call uses the connections of its app"),
    "producer": ((), "a call uses the connections of its app"),
    "publisher": ((), "a call uses the connections of its app"),
    "shadow": ((), "a job has the name of its task; use headers= for another name"),
    "add_to_parent": ((True, False), ""),
    "argsrepr": ((), "log lines do not contain the arguments"),
    "kwargsrepr": ((), "log lines do not contain the arguments"),
    "correlation_id": ((), "it is the job's id, which job_id= sets"),
    "reply_to": ((), "a job stores its own result"),
    "result_cls": ((), "use app.result(id, queue)"),
    "throw": ((False,), "in eager mode, task_eager_propagates raises the errors of tasks"),
}
"""Call options that are ignored: other values cause a warning."""

_RETRY_KWARGS: Final[Mapping[str, str]] = {"max_retries": "max_retries", "countdown": "default_retry_delay"}


def translate_task_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return task options in bulltask's form: without options that have no effect, and with ``retry_kwargs`` expanded.

    An ignored option causes a warning, unless its value matches bulltask's behavior.
    """
    options = _without_ignored("task", given, _REFUSED_TASK_OPTIONS, IGNORED_TASK_OPTIONS)
    for name in ("autoretry_for", "dont_autoretry_for", "throws"):
        if isinstance(options.get(name), list):
            options[name] = tuple(options[name])
    if (retry_kwargs := options.pop("retry_kwargs", None)) is not None:
        options.update(_resolved(retry_kwargs, options))
    if options.get("max_retries", 0) is None:
        options["unlimited_retries"] = True
    return options


def translate_call_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return call options in bulltask's form: without options that have no effect; ``task_id`` becomes ``job_id``.

    The stamps that ``stamped_headers`` names become one option, ``stamps``. An ignored option causes a warning, unless
    its value matches bulltask's behavior.
    """
    options = with_stamps(_without_ignored("call", given, _REFUSED_CALL_OPTIONS, IGNORED_CALL_OPTIONS))
    if "task_id" in options and "job_id" not in options:
        options["job_id"] = options.pop("task_id")
    return options


def _without_ignored(kind: str, given: Mapping[str, Any], refused: _Options, ignored: _Options) -> dict[str, Any]:
    options = {}
    for name, value in given.items():
        if name not in refused and name not in ignored:
            options[name] = value
            continue
        silent, reason = refused.get(name) or ignored[name]
        if value is None or value in silent or (name in _ROUTING and value == given.get("queue")):
            continue
        if name in refused:
            options[name] = value  # an unknown option, with a hint
        else:
            # Without the value, which may differ in each call: Python shows each text once per line.
            warn_user(f"Celery's {kind} option {name} has no effect: {reason}")
    return options


def _resolved(retry_kwargs: Any, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options that Celery's ``retry_kwargs`` stand for; ``retry_backoff`` overrides their countdown."""
    if not isinstance(retry_kwargs, Mapping) or not retry_kwargs.keys() <= _RETRY_KWARGS.keys():
        raise ConfigError(
            f"retry_kwargs can contain max_retries and countdown, not {retry_kwargs!r:.200}; use the task's "
            "other options"
        )
    resolved = {_RETRY_KWARGS[name]: value for name, value in retry_kwargs.items()}
    if options.get("retry_backoff"):
        resolved.pop("default_retry_delay", None)
    return resolved


def _hint(name: str, known: Iterable[str], refused: _Options) -> str:
    """Return a suffix for the message about an unknown option: what to use, or a similar name."""
    if name in refused:
        return f" (a Celery option): {refused[name][1]}"
    return did_you_mean(name, known) or f": use {', '.join(sorted(known))}"
