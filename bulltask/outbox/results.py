"""Results of jobs that may not have reached Redis yet."""

from __future__ import annotations

import threading
from typing import Any, Final

from bulltask import loop_timers
from bulltask.clock import mono_ms
from bulltask.errors import JobNotFoundError, ResultTimeoutError
from bulltask.jobs.job import JobRef
from bulltask.jobs.states import JobState
from bulltask.jobs.stored_job import Finished
from bulltask.ports import ResultReader

__all__ = ["OutboxResults"]

_POLL_S: Final = 0.05


class OutboxResults:
    """A :class:`bulltask.ports.ResultReader` that also waits until a relay has sent the job.

    Args:
        reader: Reads the jobs that are in Redis.
    """

    def __init__(self, reader: ResultReader) -> None:
        self._reader = reader

    def wait(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """Wait until the job has finished.

        Raises:
            ResultTimeoutError: It was not sent, or did not finish, in time.
        """
        deadline_ms = None if timeout_ms is None else mono_ms() + timeout_ms
        while True:
            is_sent = self._reader.snapshot(ref).state is not JobState.UNKNOWN
            try:
                # An unknown job may have finished and been removed. Then the reader finds its event without waiting.
                return self._reader.wait(ref, _left(deadline_ms) if is_sent else 0, sent_ms)
            except (JobNotFoundError, ResultTimeoutError) as exc:
                _check(exc, deadline_ms, ref, is_sent=is_sent)
            threading.Event().wait(_POLL_S)

    async def await_finished(self, ref: JobRef, timeout_ms: int | None, sent_ms: int | None) -> Finished:
        """:meth:`wait` for asyncio."""
        deadline_ms = None if timeout_ms is None else mono_ms() + timeout_ms
        while True:
            is_sent = (await self._reader.asnapshot(ref)).state is not JobState.UNKNOWN
            try:
                return await self._reader.await_finished(ref, _left(deadline_ms) if is_sent else 0, sent_ms)
            except (JobNotFoundError, ResultTimeoutError) as exc:
                _check(exc, deadline_ms, ref, is_sent=is_sent)
            await loop_timers.sleep(_POLL_S)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._reader, name)


def _left(deadline_ms: int | None) -> int | None:
    return None if deadline_ms is None else max(0, deadline_ms - mono_ms())


def _check(exc: Exception, deadline_ms: int | None, ref: JobRef, *, is_sent: bool) -> None:
    """Raise an error if there is nothing more to wait for."""
    if is_sent and isinstance(exc, ResultTimeoutError):
        raise exc
    if deadline_ms is not None and mono_ms() >= deadline_ms:
        raise ResultTimeoutError(
            f"job {ref.id} in queue {ref.queue} is not in Redis: no relay has sent it yet, its transaction was rolled "
            "back, or it has finished and was removed"
        ) from exc
