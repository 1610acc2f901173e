"""Options of tasks: the keywords of ``@app.task``."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, fields
from datetime import datetime
from typing import Any, Final

from bulltask.clock import Duration, to_ms
from bulltask.config.config import Config
from bulltask.config.parsers import jitter_fraction
from bulltask.config.payload_settings import check_payload_options, compression
from bulltask.config.rate_limits import TaskRate, task_rate
from bulltask.errors import ConfigError
from bulltask.jobs.backoff import Backoff, CustomBackoff, warn_about_long_delay
from bulltask.jobs.names import check_queue_name
from bulltask.jobs.options import STORED, check_priority, stored_options
from bulltask.jobs.retention import KeepJobs
from bulltask.jobs.time_limits import TimeLimits
from bulltask.payloads.envelope import Compression, Serializer
from bulltask.payloads.payload_codec import PayloadFormat
from bulltask.registry.celery_options import hint_for_unknown_option, translate_task_options
from bulltask.registry.option_values import UNLIMITED_RETRIES, check_max_retries, expiry_ms, is_exception

__all__ = ["TaskOptions"]

CELERY_RETRY_DELAY_S: Final = 180
CELERY_MAX_RETRIES: Final = 3
MAX_BATCH: Final = 1_000

_FLAGS: Final = {
    "spark": "; for Spark's settings, use spark_conf",
    "typed": "",
    "pydantic": "",
    "ignore_result": "",
    "lifo": "",
    "unlimited_retries": "",
    "checkpoint": "",
}

_DURATIONS: Final = (
    "retry_backoff_max",
    "default_retry_delay",
    "result_expires",
    "result_failure_expires",
    "checkpoint_interval",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TaskOptions:
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

    queue: str | None = None
    priority: int | None = None
    expires: Duration | datetime | None = None
    max_retries: int | None = None
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
    rate_limit: float | str | None = None
    batch: int | None = None
    batch_wait: Duration = 0
    spark: bool = False
    typed: bool | None = None
    pydantic: bool | None = None
    checkpoint: bool = False
    checkpoint_interval: Duration = 1
    serializer: Serializer | None = None
    compression: Compression | None = None

    def __post_init__(self) -> None:
        # All checks run when the task is defined, so that errors do not point to a call.
        if self.queue is not None:
            check_queue_name(self.queue)
        check_priority(self.priority)
        for name in ("autoretry_for", "dont_autoretry_for", "throws"):
            kinds = getattr(self, name)
            if not (isinstance(kinds, tuple) and all(is_exception(kind) for kind in kinds)):
                raise ConfigError(f"{name} must be a tuple of exception classes, not {kinds!r:.200}")
        for name in _DURATIONS:
            if (value := getattr(self, name)) is not None:
                to_ms(value, name)
        self._check_retry_options()
        for name, advice in _FLAGS.items():
            if not isinstance(value := getattr(self, name), bool | None):
                raise ConfigError(f"{name} must be True or False, not {value!r:.200}{advice}")
        self.time_limits.check("a task")
        task_rate(self.rate_limit, "rate_limit")
        self._check_batch()
        check_payload_options(self.serializer, self.compression)
        stored_options(self.stored)

    def check_function(self, name: str, *, is_async: bool, bind: bool) -> None:
        """Check that a function can be a task with these options.

        Args:
            name: The task's name.
            is_async: Whether it is an ``async def``.
            bind: Whether it receives a context.

        Raises:
            ConfigError: The options do not fit the function.
        """
        if is_async and self.spark:
            raise ConfigError(
                f"task {name!r:.200} is an async def and cannot have spark=True, because calls to Spark would "
                "block the "
                "event loop and all other tasks; make it a plain function"
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
        """Build the options from keywords; see :func:`bulltask.registry.celery_options.translate_task_options`.

        Raises:
            TypeError: A name is unknown; the message suggests a similar name, or an alternative to the Celery option.
        """
        known, options = {field.name for field in fields(cls)}, translate_task_options(given)
        for name in options:
            if name in _HANDLERS:
                raise TypeError(
                    f"unknown task option {name!r:.200} (a Celery option): define a method {name} in a task class "
                    "and pass "
                    f"the class as base=, or use {_HANDLERS[name]}"
                )
            if name not in known:
                raise TypeError(f"unknown task option {name!r:.200}{hint_for_unknown_option(name, known)}")
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
            return UNLIMITED_RETRIES + 1
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
        return {name: value for name in _STORED if (value := getattr(self, name)) is not None}


# Only fields, because STORED has an option ``backoff``, and TaskOptions a method of that name.
_STORED: Final = tuple(field.name for field in fields(TaskOptions) if field.name in STORED)
