from __future__ import annotations

from bulltask.jobopts import Deduplication
from bulltask.queue.ajob import AsyncJob
from bulltask.queue.answers import JobCounts
from bulltask.queue.aqueue import AsyncQueue
from bulltask.queue.job import Job
from bulltask.queue.options import AddOptions, BulkJob
from bulltask.queue.queue import Queue

__all__ = ["AddOptions", "AsyncJob", "AsyncQueue", "BulkJob", "Deduplication", "Job", "JobCounts", "Queue"]
