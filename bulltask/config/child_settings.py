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
        "Number of child processes, or of threads with worker_pool=threads; auto: one per CPU core. "
        "Increase it if tasks mostly wait, reduce it if they need much memory.",
    ),
    _S(
        "worker_pool",
        "pool",
        worker_pool,
        "prefork",
        "Where sync tasks run: in child processes (prefork), or in threads of one child process "
        "(threads). Use threads if tasks mostly wait and processes need too much memory.",
    ),
    _S(
        "worker_autoscale",
        "autoscale",
        optional(autoscale),
        None,
        "Maximum and minimum number of child processes, which then follows the load; none: worker_concurrency applies.",
    ),
    _S(
        "worker_autoscale_keepalive",
        "autoscale_keepalive_ms",
        duration(1_000),
        30,
        "How long child processes must be idle before worker_autoscale stops them. Increase it if the "
        "load changes often.",
    ),
    _S(
        "worker_start_method",
        "start_method",
        choice("auto", "fork", "spawn"),
        "auto",
        "How child processes are started, as in multiprocessing; auto: fork where possible. Use spawn if "
        "a library does not work after a fork.",
    ),
    _S(
        "worker_max_tasks_per_child",
        "max_tasks_per_child",
        optional(integer(1)),
        None,
        "How many jobs a child process acquires before it is replaced; none: no limit. Set it if a task "
        "leaks memory or other resources.",
    ),
    _S(
        "worker_max_memory_per_child",
        "max_memory_kib",
        optional(memory),
        None,
        "Resident memory, in KiB or with a unit, above which a child process is replaced once its jobs "
        "have finished; none: no limit. Set it if tasks leak memory.",
    ),
    _S(
        "worker_hard_memory_limit",
        "hard_memory_kib",
        optional(memory),
        None,
        "Resident memory, in KiB or with a unit, above which a child process is killed while it runs a "
        "job; none: no limit. Set it if a single job can exhaust the machine's memory.",
    ),
    _S(
        "worker_prefetch",
        "prefetch",
        integer(0, 1_000),
        32,
        "How many jobs a child process acquires in one round trip while jobs are short. 0: always one, "
        "for jobs that should start as soon as any process is idle (in Celery, 0 means unlimited).",
    ),
    _S(
        "worker_async_concurrency",
        "async_concurrency",
        integer(1, 10_000),
        100,
        "How many async jobs run at the same time in each child process. Reduce it if they overload a "
        "service or need much memory.",
    ),
)
