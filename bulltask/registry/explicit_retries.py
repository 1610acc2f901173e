"""How many retries a task may request, with ``self.retry()`` or ``autoretry_for``."""

from __future__ import annotations

from bulltask.jobs.job import RunningJob

__all__ = ["has_retries_left", "max_attempts", "no_retries_left"]


def max_attempts(job: RunningJob, max_retries: int | None) -> int:
    """Return the maximum number of attempts of a job that ``self.retry()`` retries.

    Args:
        job: The job.
        max_retries: The argument of ``self.retry()``.
    """
    stored = job.opts.bulltask.get("max_explicit_retries")
    retries = stored if max_retries is None and isinstance(stored, int) else max_retries
    return max(1, job.attempts if retries is None else retries + 1)


def has_retries_left(job: RunningJob, max_retries: int | None) -> bool:
    """Return whether this is not the last attempt of a running job."""
    return job.attempts_made + 1 < max_attempts(job, max_retries)


def no_retries_left(job: RunningJob, max_retries: int | None) -> str:
    """Return why a job that has requested a retry fails."""
    maximum = max_attempts(job, max_retries)
    return f"the task requested a retry, but this was attempt {job.attempts_made + 1} of {maximum}"
