"""Queues, their jobs, flows and events; each name is imported on first use, as in ``bulltask``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bulltask.jobs.job import Deduplication
    from bulltask.jobs.names import Revocation
    from bulltask.queue.aio.events import AsyncQueueEvents
    from bulltask.queue.aio.flow import AsyncFlowProducer
    from bulltask.queue.aio.job import AsyncBulkChange, AsyncJob
    from bulltask.queue.aio.queue import AsyncQueue
    from bulltask.queue.context import AddOptions, BulkJob
    from bulltask.queue.fields import QueueSummary
    from bulltask.queue.flows import FlowJob
    from bulltask.queue.search import FailureGroup, FailureGroups, FoundJob, FoundJobs
    from bulltask.queue.sync.events import QueueEvents
    from bulltask.queue.sync.flow import FlowProducer
    from bulltask.queue.sync.job import BulkChange, Job
    from bulltask.queue.sync.queue import Queue
    from bulltask.transport.workers import WorkerChild, WorkerJob, WorkerState

__all__ = [
    "AddOptions",
    "AsyncBulkChange",
    "AsyncFlowProducer",
    "AsyncJob",
    "AsyncQueue",
    "AsyncQueueEvents",
    "BulkChange",
    "BulkJob",
    "Deduplication",
    "FailureGroup",
    "FailureGroups",
    "FlowJob",
    "FlowProducer",
    "FoundJob",
    "FoundJobs",
    "Job",
    "Queue",
    "QueueEvents",
    "QueueSummary",
    "Revocation",
    "WorkerChild",
    "WorkerJob",
    "WorkerState",
]

_MODULES: Final = {
    "AddOptions": "bulltask.queue.context",
    "AsyncBulkChange": "bulltask.queue.aio.job",
    "AsyncFlowProducer": "bulltask.queue.aio.flow",
    "AsyncJob": "bulltask.queue.aio.job",
    "AsyncQueue": "bulltask.queue.aio.queue",
    "AsyncQueueEvents": "bulltask.queue.aio.events",
    "BulkChange": "bulltask.queue.sync.job",
    "BulkJob": "bulltask.queue.context",
    "Deduplication": "bulltask.jobs.job",
    "FailureGroup": "bulltask.queue.search",
    "FailureGroups": "bulltask.queue.search",
    "FlowJob": "bulltask.queue.flows",
    "FlowProducer": "bulltask.queue.sync.flow",
    "FoundJob": "bulltask.queue.search",
    "FoundJobs": "bulltask.queue.search",
    "Job": "bulltask.queue.sync.job",
    "Queue": "bulltask.queue.sync.queue",
    "QueueEvents": "bulltask.queue.sync.events",
    "QueueSummary": "bulltask.queue.fields",
    "Revocation": "bulltask.jobs.names",
    "WorkerChild": "bulltask.transport.workers",
    "WorkerJob": "bulltask.transport.workers",
    "WorkerState": "bulltask.transport.workers",
}
"""The module of each public name."""

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        value = globals()[name] = getattr(importlib.import_module(_MODULES[name]), name)
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
