"""The ancestors of a job: the job whose task sent it, and the previous steps of its canvas."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Final, TypedDict

from bulltask.errors import InvalidJobError
from bulltask.jobs.child_results import ChildResults
from bulltask.jobs.job import NewJob, RunningJob

__all__ = ["Ancestry", "ancestry", "origin_of_jobs_sent_by", "origin_of_replacement", "sent_by"]

_GROUP_ID: Final = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-7[0-9a-f]{3}-[0-9a-f]{4}-[0-9a-f]{12}(\.\d+)*")

_MAX_DIGITS: Final = 9


class Ancestry(TypedDict):
    """Fields of a :class:`bulltask.Request`."""

    root_id: str | None
    parent_id: str | None
    group: str | None
    chord: str | None
    replaced_task_nesting: int


def sent_by(job: RunningJob, jobs: Sequence[NewJob]) -> list[NewJob]:
    """Return jobs that the task of ``job`` sends, with the ids of that job and of the first of its ancestors."""
    origin = origin_of_jobs_sent_by(job)
    return [replace(one, options=replace(one.options, origin=origin)) for one in jobs]


def origin_of_jobs_sent_by(job: RunningJob | None) -> dict[str, str]:
    """Return the ids of the parent and the root of jobs that the task of ``job`` sends; empty without a job."""
    return {} if job is None else {"parent": job.id, "root": ancestry(job)["root_id"] or job.id}


def origin_of_replacement(job: RunningJob) -> dict[str, str]:
    """Return the origin of jobs by which the task of ``job`` replaces itself; it counts the replacements."""
    return {**origin_of_jobs_sent_by(job), "replacements": str(ancestry(job)["replaced_task_nesting"] + 1)}


def ancestry(job: RunningJob) -> Ancestry:
    """Return the jobs from which ``job`` descends."""
    nesting = 0
    origin, parent = job.opts.bulltask.get("origin"), job.parent_key.rpartition(":")[2]
    if isinstance(origin, dict):
        root_id, parent_id = _id(origin.get("root")), _id(origin.get("parent"))
        nesting = _count(origin.get("replacements"))
    else:
        parent_id = _step_before(job)
        root_id = job.id if parent_id is None else None
    group = job.id.rpartition(".")[0]
    chord = parent if parent and group == parent else None
    return {
        "root_id": root_id,
        "parent_id": parent_id,
        "group": chord or _group_id(group),
        "chord": chord,
        "replaced_task_nesting": nesting,
    }


def _group_id(prefix: str) -> str | None:
    """Return the id of the group from which a job's id is derived (:func:`bulltask.jobs.child_results.member_id`).

    It is not stored in the job, but is a part of the job's id: a UUIDv7, and a number for each enclosing group.
    """
    return prefix if prefix and _GROUP_ID.fullmatch(prefix) else None


def _step_before(job: RunningJob) -> str | None:
    try:
        received = ChildResults.from_wire(job.canvas)
    except InvalidJobError:
        return None
    return received.shape.rpartition(":")[2] if received is not None and isinstance(received.shape, str) else None


def _id(stored: object) -> str | None:
    return stored if isinstance(stored, str) else None


def _count(stored: object) -> int:
    return int(stored) if isinstance(stored, str) and stored.isdecimal() and len(stored) <= _MAX_DIGITS else 0
