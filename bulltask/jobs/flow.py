"""A tree of jobs that is sent in one transaction: a parent runs after its child jobs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from bulltask.errors import BulltaskError
from bulltask.jobs.job import NewJob

__all__ = ["PlannedJob", "in_order"]


@dataclass(slots=True, eq=False)
class PlannedJob:
    """A job in a flow that is being sent.

    Attributes:
        job: The job.
        has_custom_id: The caller set its id, so a job with this id may exist already.
        children: Its child jobs.
        dependents: The other jobs of the same flow that wait for this job, besides its parent.
        result: The stored id, or the error; ``None`` until it has been sent.
    """

    job: NewJob
    has_custom_id: bool
    children: list[PlannedJob] = field(default_factory=list)
    dependents: list[PlannedJob] = field(default_factory=list)
    result: str | BulltaskError | None = None


def in_order(roots: Sequence[PlannedJob]) -> Iterator[PlannedJob]:
    """Iterate over all jobs level by level, parents before children, in the order in which Node adds them."""
    level = list(roots)
    while level:
        yield from level
        level = [child for planned in level for child in planned.children]
