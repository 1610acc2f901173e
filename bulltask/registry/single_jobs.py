"""The job of a single call, for ``send_many``."""

from __future__ import annotations

from typing import Any

from bulltask.jobs.job import NewJob
from bulltask.registry.signature import Signature

__all__ = ["job_of"]


def job_of(call: Signature[Any, Any] | NewJob) -> NewJob:
    """Return the job of a single call.

    Raises:
        TypeError: It is a chain, a group, or something else.
    """
    if isinstance(call, Signature):
        return call.job()
    if not isinstance(call, NewJob):
        raise TypeError(f"send_many sends signatures of single calls, not {call!r}; use its method apply_async")
    return call
