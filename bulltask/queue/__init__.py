from __future__ import annotations

from bulltask.job_options import Deduplication
from bulltask.queue.ajob import AsyncJob
from bulltask.queue.answers import JobCounts
from bulltask.queue.aqueue import AsyncQueue
from bulltask.queue.events import AsyncQueueEvents, QueueEvents
from bulltask.queue.flow import AsyncFlowProducer, FlowJob, FlowProducer
from bulltask.queue.job import Job
from bulltask.queue.options import AddOptions, BulkJob
from bulltask.queue.queue import Queue
from bulltask.states import Revocation

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
