"""``OutgoingJob``: a job as hooks see it while it is being sent."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from bulltask.errors import DecodeError
from bulltask.jobs import codec
from bulltask.jobs.job import NewJob
from bulltask.payloads.payload_codec import PayloadCodec

__all__ = ["OutgoingJob"]


@dataclass(slots=True, kw_only=True)
class OutgoingJob:
    """A job that is being sent.

    Attributes:
        id: The job's id.
        task: The task's name.
        queue: The queue's name in the app.
        headers: The job's headers, which ``before_send`` may change; a worker finds them in ``request.headers``. The
            values must be JSON.
        stored_id: The id of the job in Redis; if this job is a duplicate, the id of the existing job. ``None`` until
            the job was sent.
    """

    id: str
    task: str
    queue: str
    headers: dict[str, Any] = field(default_factory=dict)
    stored_id: str | None = None
    _job: NewJob
    _payloads: PayloadCodec | None = None

    @classmethod
    def of(cls, job: NewJob, payloads: PayloadCodec | None = None) -> OutgoingJob:
        """Return ``job`` as hooks see it; ``payloads`` reads data that is encrypted, compressed or pickled."""
        headers = json.loads(job.options.headers) if job.options.headers else {}
        return cls(id=job.id, task=job.name, queue=job.queue, headers=headers, _job=job, _payloads=payloads)

    @property
    def data(self) -> Any:
        """A copy of the job's data: the arguments by name; a list if the task is not registered in the app.

        If the data is pickled and the app does not accept pickles, it is the stored envelope.
        """
        job = self._job
        if self._payloads is not None:
            with suppress(DecodeError):  # a pickle, which this app does not accept
                return self._payloads.load_data(job.data, job.ref, job.name).value
        return codec.decode(job.data)

    @property
    def body(self) -> tuple[list[Any], dict[str, Any], dict[str, Any]]:
        """The data in the shape of Celery's message body: positional arguments, keyword arguments, nothing."""
        data = self.data
        return ([], dict(data), {}) if isinstance(data, Mapping) else (list(data), {}, {})

    @property
    def job(self) -> NewJob:
        """The job as it was before the hooks."""
        return self._job
