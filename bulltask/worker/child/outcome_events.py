"""The events of outcomes that have been written."""

from __future__ import annotations

from bulltask.events import JobFailed, JobReleased, JobRescheduled, JobRetried, JobWaitsForChildren
from bulltask.jobs.job import RunningJob
from bulltask.worker.child.outcomes import (
    FailedOutcome,
    RequestedOutcome,
    RescheduledByTaskOutcome,
    RetriedOutcome,
    WaitingForChildrenOutcome,
    release_reason,
)

__all__ = ["failed_event", "requested_event", "retried_event"]


def requested_event(job: RunningJob, outcome: RequestedOutcome) -> JobReleased | JobRescheduled | JobWaitsForChildren:
    """Return the event of an outcome that its task has requested."""
    match outcome:
        case RescheduledByTaskOutcome():
            return JobRescheduled(job.id, job.queue, job.name, outcome.delay_ms)
        case WaitingForChildrenOutcome():
            return JobWaitsForChildren(job.id, job.queue, job.name)
        case _:
            return JobReleased(job.id, job.queue, job.name, release_reason(outcome))


def failed_event(job: RunningJob, outcome: FailedOutcome, duration_ms: float) -> JobFailed:
    """Return the event of a failed job."""
    attempts_made, raised = job.attempts_made + 1, outcome.exception
    error, category, trace = outcome.reason, outcome.category, outcome.trace
    names = job.id, job.queue, job.name
    return JobFailed(*names, duration_ms, error, category, attempts_made, trace, raised, outcome.expected)


def retried_event(job: RunningJob, outcome: RetriedOutcome, duration_ms: float) -> JobRetried:
    """Return the event of a failed attempt after which the job is retried."""
    attempts_made, raised = job.attempts_made + 1, outcome.exception
    error, category, delay_ms = outcome.reason, outcome.category, outcome.delay_ms
    return JobRetried(job.id, job.queue, job.name, duration_ms, error, category, attempts_made, delay_ms, raised)
