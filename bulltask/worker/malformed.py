"""Fails jobs whose hash is malformed, so that they do not block other jobs."""

from __future__ import annotations

from bulltask.clock import ServerClock
from bulltask.config.config import Config
from bulltask.errors import BrokerError, BulltaskError, JobError
from bulltask.events import Bus, MalformedJobFailed
from bulltask.jobs.job import RunningJob
from bulltask.jobs.retention import KEEP_ALL
from bulltask.jobs.states import REVOKED
from bulltask.transport.client_types import SyncClient
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.fetch import FetchOptions
from bulltask.transport.scripts.move import fail_malformed, malformed_finish, move_to_finished

__all__ = ["MalformedJobHandler", "parent_waits", "with_parent_waits"]


def parent_waits(job: RunningJob, exc: BulltaskError) -> str:
    """Return the part of a job's reason that says that its parent is not informed, because of ``exc``."""
    return f"its parent {job.parent_key} still waits for it: {exc}; then retry this job"


def with_parent_waits(reason: str, trace: str, waits: str) -> tuple[str, str]:
    """Return a failure's reason and trace with the result of :func:`parent_waits`, which may be empty.

    By its reason, clients recognize a revoked job.
    """
    if not waits:
        return reason, trace
    return (reason, f"{trace}{waits}\n") if reason == REVOKED else (f"{reason} ({waits})", trace)


class MalformedJobHandler:
    """Fails jobs that cannot be acquired or recovered because their hash is malformed.

    Args:
        client: The process's client.
        clock: The server's time.
        config: The settings for retention and metrics.
        bus: Receives an event for every such job.
    """

    def __init__(self, client: SyncClient, clock: ServerClock, config: Config, bus: Bus) -> None:
        self._client, self._clock, self._config, self._bus = client, clock, config, bus
        self._keep = config.keep_failed or KEEP_ALL

    def fail_if_malformed(self, keys: QueueKeys, token: str, job_id: str, exc: Exception) -> bool:
        """Fail the job that is locked with ``token`` if its hash caused ``exc``.

        If the queue caused the error reply instead, nothing is changed.

        Returns:
            False if the job's hash is well-formed.

        Raises:
            BrokerError: Redis is unavailable, or returns an error reply to this call, too.
        """
        is_reply = isinstance(exc, BrokerError)
        finish_options = malformed_finish(str(exc) if is_reply else f"{type(exc).__name__}: {exc}", self._keep)
        options, now_ms = FetchOptions.from_config(self._config, keys, token, ""), self._clock.now_ms()
        finish = move_to_finished(keys, job_id, options, finish_options, fetch_next=False, now_ms=now_ms)
        try:
            failed = self._client.run(fail_malformed(keys, finish, token, only_malformed=is_reply))
        except JobError:  # the job has finished, or another worker has it: it no longer blocks this worker
            return True
        if failed:
            self._bus.emit(MalformedJobFailed(job_id, keys.queue, finish_options.value.decode("utf-8", "replace")))
        return failed
