"""Queues, their jobs, flows and events; each name is looked up where it is used first, as in ``bulltask``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bulltask.jobs.options import Deduplication
    from bulltask.jobs.states import Revocation
    from bulltask.queue.ajob import AsyncJob
    from bulltask.queue.answers import JobCounts
    from bulltask.queue.aqueue import AsyncQueue
    from bulltask.queue.events import AsyncQueueEvents, QueueEvents
    from bulltask.queue.flow import AsyncFlowProducer, FlowJob, FlowProducer
    from bulltask.queue.job import Job
    from bulltask.queue.options import AddOptions, BulkJob
    from bulltask.queue.queue import Queue

__all__ = [
    "AddOptions",
    "AsyncFlowProducer",
    "AsyncJob",
    "AsyncQueue",
    "AsyncQueueEvents",
    "BulkJob",
    "Deduplication",
    "FlowJob",
    "FlowProducer",
    "Job",
    "JobCounts",
    "Queue",
    "QueueEvents",
    "Revocation",
]

_HOME: Final = {
    "AddOptions": "bulltask.queue.options",
    "AsyncFlowProducer": "bulltask.queue.flow",
    "AsyncJob": "bulltask.queue.ajob",
    "AsyncQueue": "bulltask.queue.aqueue",
    "AsyncQueueEvents": "bulltask.queue.events",
    "BulkJob": "bulltask.queue.options",
    "Deduplication": "bulltask.jobs.options",
    "FlowJob": "bulltask.queue.flow",
    "FlowProducer": "bulltask.queue.flow",
    "Job": "bulltask.queue.job",
    "JobCounts": "bulltask.queue.answers",
    "Queue": "bulltask.queue.queue",
    "QueueEvents": "bulltask.queue.events",
    "Revocation": "bulltask.jobs.states",
}
"""Where each public name lives."""

if not TYPE_CHECKING:  # type checkers would take every name for one that is there

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = globals()[name] = getattr(importlib.import_module(_HOME[name]), name)
        return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
