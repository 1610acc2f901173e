"""``task.map_dataframe``: call a task for each row of a DataFrame, and add the results to the rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, Literal, Unpack

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F

from bulltask import embedded
from bulltask.config.config import Config
from bulltask.config.parsers import integer
from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.errors import ConfigError, InvalidJobError
from bulltask.jobs.names import bullmq_name
from bulltask.registry.call import JobPlan, plan_job
from bulltask.registry.options import CallOptions
from bulltask.registry.task import AnyTask
from bulltask.spark.results import RESULT_FIELDS, JobLookup, lookup_deadline_ms
from bulltask.spark.sink import (
    NUMBER,
    WEEK,
    RowSender,
    SendOptions,
    check_option_names,
    check_write_id,
    number_duplicates,
    reject_single_job_options,
    row_policies,
    send_rows,
    sending,
    vectorized_udf,
    with_json,
)
from bulltask.transport.call import QueueKeys

_DATA: Final = "bulltask_data"
_SEND_RESULT: Final = "bulltask_send_result"
_JOB_RESULT: Final = "bulltask_job_result"
_RESULTS: Final = ("id", "state", "return_value", "failed_reason")


class MapOptions(SendOptions, total=False):
    """Further arguments of ``map_dataframe``, in addition to :class:`bulltask.spark.sink.SendOptions`.

    Attributes:
        wait: How long to wait for unfinished jobs after all jobs are sent (seconds or ``timedelta``), by the executors'
            clocks; ``0`` does not wait, ``None`` (default) waits without limit. Unfinished jobs are not an error.
        poll: The time between two checks of unfinished jobs (seconds or ``timedelta``); default: 2 seconds.
        options: The options of every call, as for ``apply_async``: ``{"priority": 5, "queue": "bulk"}``.
        on_duplicate_rows: What to do with rows that have the same arguments: add one job for all of them, whose result
            they share (``collapse``, the default), add a job for each (``keep``), or raise an error before anything is
            sent (``error``).
        on_invalid_rows: What to do with rows of which no job can be made: raise the error of the first (``error``, the
            default), or return them with the state ``rejected`` and the reason as ``failed_reason`` (``collect``).
        result_prefix: A prefix for the names of the added columns; default: no prefix.
    """

    wait: Duration | None
    poll: Duration
    options: Mapping[str, Any]
    on_duplicate_rows: Literal["collapse", "keep", "error"]
    on_invalid_rows: Literal["error", "collect"]
    result_prefix: str


def map_dataframe(
    task: AnyTask[Any, Any],
    df: DataFrame,
    columns: Sequence[str] | Mapping[str, str | Column] | None = None,
    **settings: Unpack[MapOptions],
) -> DataFrame:
    """Call a task for each row of a DataFrame, and return the rows with the results of their jobs.

    All jobs are sent before this function returns, each once, however often Spark retries a task. By default, rows with
    the same arguments share one job and its result. Spark's executors then keep the rows and the ids of their jobs
    until the DataFrame is garbage-collected. Results are looked up, and waited for, each time the rows are needed; use
    ``cache()`` or write the rows to keep them.

    Args:
        task: The task. Its options apply: queue, retries, retention of results …
        df: The rows.
        columns: The columns with the arguments: column names that match the task's parameters, or a mapping from
            parameters to names or columns; default: all columns of ``df``. Values are converted as by ``enqueue``: a
            timestamp and a decimal become strings, which type hints convert back, and null becomes ``None``.
        settings: The options of :class:`MapOptions`.

    Returns:
        The columns of ``df``, and ``id``, ``state`` (``completed``, ``failed``, ``unfinished``; ``missing`` if Redis no
        longer has the job; ``rejected`` with ``on_invalid_rows``), ``return_value`` (JSON), ``failed_reason``.

    Raises:
        TypeError: An option is unknown, or the columns do not match the task's parameters.
        ConfigError: An option is invalid, a column has the same name as a result column, ``df`` is a streaming
            DataFrame, or the task keeps no results. Nothing was sent in these cases.
    """
    check_option_names(settings, MapOptions)
    if df.isStreaming:
        raise ConfigError("map_dataframe needs a batch DataFrame; for a streaming DataFrame, call it in foreachBatch")
    config = replace(task._sender()._config, broker_url=embedded.resolve_url(task._sender()._config.broker_url))
    plan = _plan(task, config, settings.get("options", {}))
    prefix = _check_column_names(df, settings.get("result_prefix", ""))
    wait, poll_ms = settings.get("wait"), max(1, to_ms(settings.get("poll", 2.0), "poll"))
    lookup_deadline_ms(wait)  # report an invalid value before anything is sent
    arguments = [column.alias(name) for name, column in _arguments(task, df, columns).items()]
    on_nan, collect = row_policies(settings)
    sender = RowSender(
        config,
        check_write_id(settings.get("write_id") or None),
        plan.queue,
        plan.options,
        plan.timestamp_ms,
        chunk_size=integer(1, 10_000)(settings.get("chunk_size", 500), "chunk_size"),
        idempotency_ttl_ms=max(1, to_ms(settings.get("idempotency_ttl", WEEK), "idempotency_ttl")),
        collects_invalid=collect,
    )

    rows = df.withColumn(_DATA, F.struct(*arguments) if arguments else F.lit("{}"))
    rows = with_json(rows, _DATA, on_nan) if arguments else rows
    rows = number_duplicates(rows, [_DATA], settings.get("on_duplicate_rows", "collapse"))
    fields = [F.lit(task.name).alias("name"), F.col(_DATA).alias("data"), *[F.col(NUMBER)][: NUMBER in rows.columns]]
    with sending(sender, df.sparkSession, f"send calls of {task.name} to queue {plan.queue}"):
        # Keep exactly these rows: rows from rand() or from a growing table would differ if they were computed again.
        rows = rows.withColumn(_SEND_RESULT, send_rows(sender)(F.struct(*fields))).localCheckpoint()

    keys = QueueKeys(config.prefix, bullmq_name(plan.queue, hash_tag=config.queue_hash_tag), plan.queue)
    lookup = JobLookup(config, keys, lookup_deadline_ms(wait), poll_ms)
    with_results = rows.withColumn(
        _JOB_RESULT, vectorized_udf(lookup.look_up, RESULT_FIELDS)(F.col(f"{_SEND_RESULT}.id"))
    )
    rejected, reason = F.col(f"{_SEND_RESULT}.status") == "rejected", F.col(f"{_SEND_RESULT}.reason")
    results = {
        "id": F.col(f"{_SEND_RESULT}.id"),
        "state": F.when(rejected, "rejected").otherwise(F.col(f"{_JOB_RESULT}.state")),
        "return_value": F.col(f"{_JOB_RESULT}.return_value"),
        "failed_reason": F.when(rejected, reason).otherwise(F.col(f"{_JOB_RESULT}.failed_reason")),
    }
    result_columns = [column.alias(prefix + name) for name, column in results.items()]
    return with_results.select("*", *result_columns).drop(_DATA, _SEND_RESULT, _JOB_RESULT, NUMBER)


def _plan(task: AnyTask[Any, Any], config: Config, options: Mapping[str, Any]) -> JobPlan:
    reject_single_job_options(options)
    plan = plan_job(task.name, task._options, CallOptions.of(options), config)
    retention = plan.options.to_wire(0).get("removeOnComplete")
    count = retention.get("count") if isinstance(retention, Mapping) else retention
    if retention is True or (count == 0 and count is not False):
        raise ConfigError(
            f"task {task.name} keeps no results: its jobs are removed as soon as they have completed; keep them "
            "with options={'remove_on_complete': {'age': 3600}}"
        )
    return plan


def _check_column_names(df: DataFrame, prefix: str) -> str:
    taken = [name for name in (prefix + result for result in _RESULTS) if name in df.columns]
    if taken:
        raise ConfigError(
            f"[BULLTASK_COLUMN_TAKEN] the rows already have a column {taken[0]!r}, which is the name of a result; "
            "rename the results with result_prefix='job_'"
        )
    return prefix


def _arguments(
    task: AnyTask[Any, Any], df: DataFrame, columns: Sequence[str] | Mapping[str, str | Column] | None
) -> Mapping[str, Column]:
    """Return the column of each parameter."""
    if isinstance(columns, str):
        raise ConfigError(f"columns must be a list of names or a mapping: [{columns!r}], not {columns!r}")
    if not isinstance(columns, Mapping):
        columns = {name: name for name in (df.columns if columns is None else columns)}
    if not task._is_batch:  # the columns of a batch are the fields of its one argument
        try:
            task._codec.arguments.unbind(dict.fromkeys(columns))
        except InvalidJobError as exc:
            raise TypeError(f"columns {', '.join(columns) or '(none)'}: {exc}") from None
    return {name: F.col(column) if isinstance(column, str) else column for name, column in columns.items()}
