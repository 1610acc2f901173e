"""The types of ``**options``, for editors and type checkers.

A unit test compares them with :class:`TaskOptions` and :class:`CallOptions`, which describe and check the options.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, Literal, Required, TypedDict, TypeVar

from bulltask.clock import Duration
from bulltask.jobs.backoff import CustomBackoff
from bulltask.jobs.options import BackoffLike, Deduplication, ParentLike
from bulltask.jobs.retention import KeepJobs
from bulltask.payloads.envelope import Compression, Serializer

if TYPE_CHECKING:  # canvas.py imports this module
    from bulltask.registry.canvas import Canvas
    from bulltask.registry.signature import Signature

__all__ = ["BatchTaskKeywords", "CallKeywords", "Exceptions", "SignatureKeywords", "SingleCallKeywords", "TaskKeywords"]

DeliveryMode = Literal[1, 2, "transient", "persistent"]
R = TypeVar("R")
Exceptions = tuple[type[BaseException], ...] | list[type[BaseException]]


class TaskKeywords(TypedDict, total=False):
    """Options of ``@app.task``: see :class:`bulltask.registry.task_options.TaskOptions`.

    The options at the end are Celery's and have no effect. A value that differs from bulltask's behavior causes a
    warning (:mod:`bulltask.registry.celery_options`).
    """

    queue: str | None
    priority: int | None
    expires: Duration | datetime | None
    max_retries: int | None
    retry_backoff: bool | Duration | CustomBackoff | None
    retry_backoff_max: Duration | None
    retry_jitter: bool | float | None
    default_retry_delay: Duration | None
    autoretry_for: Exceptions
    dont_autoretry_for: Exceptions
    throws: Exceptions
    ignore_result: bool
    result_expires: Duration | None
    result_failure_expires: Duration | None
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
    rate_limit: float | str | None
    spark: bool
    checkpoint: bool
    checkpoint_interval: Duration
    typed: bool | None
    pydantic: bool | None
    serializer: Serializer | None
    compression: Compression | None
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
    delivery_mode: DeliveryMode | None
    immediate: bool | None
    lazy: bool | None
    mandatory: bool | None
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


class SingleCallKeywords(TypedDict, total=False):
    """Options of calls: see :class:`bulltask.registry.call_options.CallOptions`.

    The options at the end are Celery's, as in :class:`TaskKeywords`.
    """

    countdown: Duration | None
    eta: datetime | None
    expires: Duration | datetime | None
    priority: int | None
    queue: str | None
    job_id: str | None
    headers: Mapping[str, Any] | None
    max_retries: int | None
    lifo: bool
    ignore_result: bool | None
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
    backoff: BackoffLike | None
    timestamp: datetime | float | None
    deduplication: Deduplication | Mapping[str, Any] | str | None
    parent: ParentLike | None
    telemetry_metadata: str | None
    omit_context: bool | None
    serializer: Serializer | None
    compression: Compression | None
    # Celery's:
    task_id: str | None
    stamped_headers: Sequence[str] | None
    # Celery's, without effect:
    add_to_parent: bool | None
    argsrepr: str | None
    connection: Any
    correlation_id: str | None
    delivery_mode: DeliveryMode | None
    immediate: bool | None
    kwargsrepr: str | None
    mandatory: bool | None
    producer: Any
    publisher: Any
    reply_to: str | None
    result_cls: Any
    retry: bool | None
    retry_policy: Mapping[str, Any] | None
    shadow: str | None


class CallKeywords(SingleCallKeywords, Generic[R], total=False):
    """Options of calls that return ``R``, and their callbacks.

    Attributes:
        link, link_error: One or several calls that run after this one has completed, or failed.
    """

    link: Canvas[R, Any] | Sequence[Canvas[R, Any]] | None
    link_error: Signature[Any, Any] | Sequence[Signature[Any, Any]] | None


class SignatureKeywords(CallKeywords[R], Generic[R], total=False):
    """Options of a signature: those of its call, and ``immutable``."""

    immutable: bool
