"""How many jobs a child may have at the same time."""

from __future__ import annotations

from bulltask.app import App
from bulltask.clock import to_ms

__all__ = ["batches_of", "concurrency_of", "jobs_per_child", "loop_tasks", "slots_per_child", "unprefetched_tasks"]


def concurrency_of(app: App) -> int:
    """Return how many jobs a child may run concurrently. It acquires no more jobs while it runs that many."""
    has_async = any(task.is_async for task in app.tasks.values())
    return max(app.config.async_concurrency if has_async else 1, app.config.threads)


def jobs_per_child(app: App) -> int:
    """Return how many jobs a child can run at a time, including those of a batch."""
    return max([concurrency_of(app), *(task.options.batch or 1 for task in app.tasks.values())])


def slots_per_child(app: App) -> int:
    """Return how many slots a child needs: for its jobs, and for those that it prefetches."""
    return jobs_per_child(app) + max(0, app.config.prefetch - 1)


def batches_of(app: App) -> dict[str, tuple[int, int]]:
    """Return each batch task's maximum number of jobs, and how many milliseconds to wait for further jobs."""
    by_name = {task.name: task.options for task in app.tasks.values()}
    return {
        name: (options.batch, to_ms(options.batch_wait, "batch_wait"))
        for name, options in by_name.items()
        if options.batch is not None
    }


def unprefetched_tasks(app: App) -> frozenset[str]:
    """Return the tasks whose jobs are not prefetched: they run alongside others, in batches or in Spark."""
    config, tasks = app.config, app.tasks.values()
    return frozenset(
        task.name for task in tasks if task.is_async or task.is_batch or config.threads or task.options.spark
    )


def loop_tasks(app: App) -> frozenset[str]:
    """Return the tasks whose jobs the event loop starts without the main thread: async ones without batch or limit."""
    config, tasks = app.config, app.tasks.values()
    return frozenset(
        task.name for task in tasks if task.is_async and not task.is_batch and task.options.rate(config) is None
    )
