"""What a handle knows about its job besides the outcome: the call, and when the job finished."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from bulltask.jobs.job import JobRef
from bulltask.ports import ResultReader

__all__ = ["ResultDetails"]


class ResultDetails:
    """Celery's ``name``, ``args``, ``kwargs`` and ``date_done``; a base class of ``AsyncResult``.

    Each property reads the job from Redis, and is ``None`` if the job does not exist.
    """

    ref: JobRef
    reader: ResultReader

    @property
    def name(self) -> str | None:
        """The job's name, which is the task's."""
        call = self.reader.call(self.ref)
        return None if call is None else call.name

    @property
    def args(self) -> list[Any] | None:
        """The arguments that are stored without a name; usually empty, because jobs store arguments by name.

        Raises:
            DecodeError: The job's data is malformed, or this app does not accept it or has no key for it.
        """
        arguments = self._arguments()
        return None if arguments is None else arguments[0]

    @property
    def kwargs(self) -> dict[str, Any] | None:
        """The stored arguments by parameter name, including those that were passed by position.

        Raises:
            DecodeError: As for :attr:`args`.
        """
        arguments = self._arguments()
        return None if arguments is None else arguments[1]

    @property
    def date_done(self) -> datetime | None:
        """When the job completed or failed, in UTC; ``None`` before."""
        call = self.reader.call(self.ref)
        try:
            ms = None if call is None else call.finished_ms
            return None if ms is None else datetime.fromtimestamp(ms / 1000, UTC)
        except (OverflowError, ValueError, OSError):  # another client may have written any number
            return None

    def _arguments(self) -> tuple[list[Any], dict[str, Any]] | None:
        call = self.reader.call(self.ref)
        if call is None:
            return None
        data = self.reader.payloads.load_data(call.data, self.ref, call.name).value
        if isinstance(data, dict):
            return [], data
        return data if isinstance(data, list) else [] if data is None else [data], {}
