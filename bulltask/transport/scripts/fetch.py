"""Calls to the scripts with which a worker acquires jobs.

Times are in milliseconds, by the server's clock. A token proves that the caller holds the job's lock.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any

from bulltask.config.config import Config
from bulltask.lua import wrappers
from bulltask.transport.call import Call, script_call
from bulltask.transport.keys import QueueKeys
from bulltask.transport.replies import Fetched, parse_fetched
from bulltask.transport.scripts.packed_options import pack_fetch
from bulltask.value_class import value_class

__all__ = ["FetchOptions", "collect_batch", "fetch_ahead", "fetch_now", "move_to_active"]


@value_class
class FetchOptions:
    """How a worker acquires jobs.

    Attributes:
        token: Value of the lock.
        lock_ms: How long a lock lasts unless it is renewed.
        worker: The worker id, written into each job that it acquires; ``""`` for none.
        limiter: BullMQ's ``limiter``, which applies if the queue has no global rate limit.
        data_points: Minutes of BullMQ's metrics to keep; ``None`` turns the metrics off.
        packed_finishes: The packed options of ``moveToFinished``, which are the same for most jobs of a slot.
    """

    token: str
    lock_ms: int
    worker: str
    limiter: Mapping[str, int] | None = None
    data_points: int | None = None
    packed_finishes: dict[object, bytes] = field(default_factory=dict, compare=False, repr=False)

    @classmethod
    def from_config(
        cls, config: Config, keys: QueueKeys, token: str, worker: str, lock_ms: int | None = None
    ) -> FetchOptions:
        """Return the options of a worker with these settings; ``lock_ms`` overrides the setting."""
        lock_ms = config.lock_ms if lock_ms is None else lock_ms
        return cls(token, lock_ms, worker, config.limiter(keys.queue), config.metrics_max_data_points)


def move_to_active(keys: QueueKeys, options: FetchOptions, now_ms: int) -> Call[Fetched]:
    """``moveToActive``: promote delayed jobs that are due, then acquire the next job."""
    script_keys = (
        keys.wait,
        keys.active,
        keys.prioritized,
        keys.events,
        keys.stalled,
        keys.limiter,
        keys.delayed,
        keys.paused,
        keys.meta,
        keys.pc,
        keys.marker,
    )
    limiter = None if options.limiter is None else tuple(options.limiter.items())
    packed = pack_fetch(options.token, options.lock_ms, options.worker, limiter)
    return script_call(
        wrappers.with_guard("moveToActive", "promotionGuard"), script_keys, (keys.base, now_ms, packed), parse_fetched
    )


def collect_batch(keys: QueueKeys, options: Sequence[FetchOptions], task: str, now_ms: int) -> Call[list[Fetched]]:
    """bulltask's ``collectBatch`` with ``moveToActive``: acquire jobs of one task until a job of another task is next.

    Args:
        keys: The queue.
        options: The options for each job, with different tokens.
        task: The task's name.
        now_ms: The server's time.
    """
    first, *others = (move_to_active(keys, job_options, now_ms) for job_options in options)
    packed = (first.argv[2], *(call.argv[2] for call in others))

    return script_call(wrappers.collect_batch(), first.keys, (*first.argv[:2], task, *packed), _parse_all_fetched)


def fetch_ahead(keys: QueueKeys, options: Sequence[FetchOptions], now_ms: int) -> Call[list[Fetched]]:
    """bulltask's ``fetchAhead`` with ``moveToActive``: acquire several jobs, unless all workers share a limit.

    Args:
        keys: The queue.
        options: The options for each job, with different tokens.
        now_ms: The server's time.
    """
    first, *others = (move_to_active(keys, job_options, now_ms) for job_options in options)
    packed = (first.argv[2], *(call.argv[2] for call in others))
    return script_call(wrappers.fetch_ahead(), first.keys, (*first.argv[:2], *packed), _parse_all_fetched)


def fetch_now(keys: QueueKeys, options: FetchOptions) -> Call[Fetched]:
    """bulltask's ``fetchNow`` with ``moveToActive``: acquire the next job, at the server's time."""
    fetch = move_to_active(keys, options, 0)
    return script_call(wrappers.fetch_now(), fetch.keys, (fetch.argv[0], fetch.argv[2]), parse_fetched)


def _parse_all_fetched(reply: Any) -> list[Fetched]:
    return [parse_fetched(each) for each in reply]
