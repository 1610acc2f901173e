"""How many jobs a child may have at the same time."""

from __future__ import annotations

from bulltask.app import App
from bulltask.clock import to_ms

__all__ = ["batches_of", "concurrency_of", "slots_per_child"]


def concurrency_of(app: App) -> int:
    """Return how many jobs a child may run before it stops to acquire more."""
    has_async = any(task.is_async for task in app.tasks.values())
    return max(app.config.async_concurrency if has_async else 1, app.config.threads)


def slots_per_child(app: App) -> int:
    """Return how many slots a child needs: for its concurrency, but at least for one batch."""
    return max([concurrency_of(app), *(task.options.batch or 1 for task in app.tasks.values())])


def batches_of(app: App) -> dict[str, tuple[int, int]]:
    """Return the batch tasks: the maximum number of jobs, and for how many milliseconds to wait for them."""
    every = {task.name: task.options for task in app.tasks.values()}
    return {
        name: (options.batch, to_ms(options.batch_wait, "batch_wait"))
        for name, options in every.items()
        if options.batch is not None
    }
