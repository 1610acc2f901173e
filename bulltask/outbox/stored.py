"""The stored form of a call: the jobs as they will be sent, as JSON text.

Times are absolute: ``countdown`` and ``expires`` count from the call, even if the jobs reach Redis later.

Increment :data:`VERSION` if relays of the previous version cannot read a changed format. A relay ignores rows of newer
versions, which newer relays send.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, Final

import uuid_utils

from bulltask.errors import BulltaskError, DecodeError
from bulltask.jobs.backoff import Backoff
from bulltask.jobs.flow import PlannedJob, in_order
from bulltask.jobs.job import JobOptions, NewJob, ParentLink
from bulltask.jobs.time_limits import TimeLimits

__all__ = ["VERSION", "StoredCall"]

VERSION: Final = 1
"""The version of the stored form."""

_HOUR_MS: Final = 3_600_000
_DEFAULTS: Final = JobOptions()
_NOT_IN_JSON: Final = {"backoff": Backoff, "time_limits": TimeLimits}
"""Fields of the options that are objects, and their classes."""


@dataclass(frozen=True, slots=True)
class StoredCall:
    """The jobs of one call.

    Attributes:
        write_id: Identifies the write to Redis, so that sending the row again adds nothing
            (:class:`bulltask.transport.scripts.add.IdempotentWrite`).
        roots: The trees of jobs: a single job, or those of a canvas.
    """

    write_id: str
    roots: Sequence[PlannedJob]

    @classmethod
    def from_jobs(cls, roots: Sequence[PlannedJob], now_ms: int) -> StoredCall:
        """Return the call with absolute times.

        Args:
            roots: The jobs. They are changed in place.
            now_ms: The time of the call, in epoch milliseconds.
        """
        for planned in in_order(roots):
            planned.job = replace(planned.job, options=_with_absolute_times(planned.job.options, now_ms))
        call = cls("", roots)
        if call.single is not None and not call.single.has_custom_id:
            # A set of ids expires some time after its last job, so the jobs of each hour share a set.
            return cls(f"outbox-{now_ms // _HOUR_MS}", roots)
        # After its job has been removed, a job_id may be used again. The second call is then another write.
        return cls(f"outbox-{uuid_utils.uuid7()}", roots)

    @property
    def single(self) -> NewJob | None:
        """The job of a call that consists of one job; ``None`` for a canvas of several jobs."""
        first = self.roots[0]
        return None if len(self.roots) > 1 or first.children or first.dependents else first.job

    def encode(self) -> str:
        """Return the stored form."""
        every = list(in_order(self.roots))
        index = {planned: number for number, planned in enumerate(every)}
        jobs = [
            {
                **_encoded_job(planned.job),
                **({"chosen": True} if planned.has_custom_id else {}),
                **({"children": [index[child] for child in planned.children]} if planned.children else {}),
                **({"dependents": [index[one] for one in planned.dependents]} if planned.dependents else {}),
            }
            for planned in every
        ]
        stored = {"write": self.write_id, "roots": len(self.roots), "jobs": jobs}
        return json.dumps(stored, ensure_ascii=False, separators=(",", ":"))

    @classmethod
    def decode(cls, text: str) -> StoredCall:
        """Read the stored form.

        Raises:
            DecodeError: It was not written by an outbox of this version.
        """
        try:
            stored = json.loads(text)
            planned = [PlannedJob(_decoded_job(job), job.get("chosen", False)) for job in stored["jobs"]]
            for one, job in zip(planned, stored["jobs"], strict=True):
                one.children += [planned[index] for index in job.get("children", ())]
                one.dependents += [planned[index] for index in job.get("dependents", ())]
            return cls(stored["write"], planned[: stored["roots"]])
        except (LookupError, TypeError, ValueError, AttributeError, BulltaskError) as exc:
            raise DecodeError(f"the row was not written by an outbox of this version: {exc!r:.200}") from exc


def _with_absolute_times(options: JobOptions, now_ms: int) -> JobOptions:
    if options.delay_ms:
        options = replace(options, delay_ms=0, eta_ms=max(options.eta_ms or 0, now_ms + options.delay_ms))
    if options.expires_in_ms is not None:
        options = replace(options, expires_in_ms=None, expires_ms=now_ms + options.expires_in_ms)
    return options


def _encoded_job(job: NewJob) -> dict[str, Any]:
    stored: dict[str, Any] = {"queue": job.queue, "id": job.id, "name": job.name, "data": job.data.decode()}
    options = {
        field.name: asdict(value) if field.name in _NOT_IN_JSON and value is not None else value
        for field in fields(JobOptions)
        if (value := getattr(job.options, field.name)) != getattr(_DEFAULTS, field.name)
    }
    if options:
        stored["options"] = options
    if job.parent is not None:
        stored["parent"] = {"key": job.parent.key, "data": dict(job.parent.data)}
    for name in ("has_children", "timestamp_ms", "has_custom_id"):
        if value := getattr(job, name):
            stored[name] = value
    return stored


def _decoded_job(stored: Mapping[str, Any]) -> NewJob:
    options = dict(stored.get("options", {}))
    for name, class_ in _NOT_IN_JSON.items():
        if options.get(name) is not None:
            options[name] = class_(**options[name])
    parent = stored.get("parent")
    return NewJob(
        queue=stored["queue"],
        id=stored["id"],
        name=stored["name"],
        data=stored["data"].encode(),
        options=JobOptions(**options),
        parent=None if parent is None else ParentLink(parent["key"], parent["data"]),
        has_children=stored.get("has_children", False),
        timestamp_ms=stored.get("timestamp_ms"),
        has_custom_id=stored.get("has_custom_id", False),
    )
