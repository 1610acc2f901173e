"""The settings of a worker's child processes: part of the table in :mod:`bulltask.config.settings`."""

from __future__ import annotations

from typing import Final

from bulltask.config.parsers import autoscale, choice, cores, duration, integer, memory, optional, worker_pool
from bulltask.config.setting import Setting

__all__ = ["CHILD_SETTINGS"]

_S = Setting
CHILD_SETTINGS: Final = (
    _S(
        "worker_concurrency",
        "concurrency",
        cores,
        "auto",
        "number of child processes, or of threads with worker_pool=threads; auto: one per CPU core",
    ),
    _S(
        "worker_pool",
        "pool",
        worker_pool,
        "prefork",
        "where sync tasks run: in child processes, or in threads of one child process",
    ),
    _S(
        "worker_autoscale",
        "autoscale",
        optional(autoscale),
        None,
        "maximum and minimum number of child processes, instead of worker_concurrency; none: a fixed number",
    ),
    _S(
        "worker_autoscale_keepalive",
        "autoscale_keepalive_ms",
        duration(1_000),
        30,
        "how long a worker must have had more child processes than it needed before worker_autoscale stops the surplus",
    ),
    _S(
        "worker_start_method",
        "start_method",
        choice("auto", "fork", "spawn"),
        "auto",
        "how child processes are started, as in multiprocessing; auto: fork where possible",
    ),
    _S(
        "worker_max_tasks_per_child",
        "max_tasks_per_child",
        optional(integer(1)),
        None,
        "how many jobs a child process acquires before it is replaced; none: unlimited",
    ),
    _S(
        "worker_max_memory_per_child",
        "max_memory_kib",
        optional(memory),
        None,
        "resident memory of a child process above which it is replaced when it has finished its jobs, in KiB or "
        "with a unit; none: unlimited",
    ),
    _S(
        "worker_hard_memory_limit",
        "hard_memory_kib",
        optional(memory),
        None,
        "resident memory of a child process above which it is killed while it runs a job, in KiB or with a unit; "
        "none: unlimited",
    ),
    _S(
        "worker_prefetch",
        "prefetch",
        integer(0, 1_000),
        16,
        "maximum number of jobs that a child process acquires in one round trip while jobs are short; 0: always one",
    ),
    _S(
        "worker_async_concurrency",
        "async_concurrency",
        integer(1, 10_000),
        100,
        "maximum number of async jobs that run concurrently in each child process",
    ),
)
