"""Fails jobs whose hash is malformed, so that they do not block other jobs."""

from __future__ import annotations

from bulltask.clock import ServerClock
from bulltask.config.config import Config
from bulltask.errors import BrokerError, JobError
from bulltask.events import Bus, MalformedJobFailed
from bulltask.jobs.retention import KEEP_ALL
from bulltask.transport.client import Client
from bulltask.transport.keys import QueueKeys
from bulltask.transport.scripts.move import FetchOptions, malformed_finish, move_to_finished, quarantine

__all__ = ["MalformedJobs"]


class MalformedJobs:
    """Fails jobs that cannot be acquired or settled because their hash is malformed.

    Args:
        client: The process's client.
        clock: The server's time.
        config: The settings for retention and metrics.
        bus: Receives an event for every such job.
    """

    def __init__(self, client: Client, clock: ServerClock, config: Config, bus: Bus) -> None:
        self._client, self._clock, self._config, self._bus = client, clock, config, bus
        self._keep = config.keep_failed or KEEP_ALL

    def fail_if_malformed(self, keys: QueueKeys, token: str, job_id: str, fault: Exception) -> bool:
        """Fail the job that is locked with ``token`` if its hash has caused ``fault``.

        An error reply of Redis may have its cause in the queue instead; then nothing is changed.

        Returns:
            False if the job's hash is well-formed.

        Raises:
            BrokerError: Redis is unavailable, or refuses this call too.
        """
        by_redis = isinstance(fault, BrokerError)
        ending = malformed_finish(str(fault) if by_redis else f"{type(fault).__name__}: {fault}", self._keep)
        options, now_ms = FetchOptions.from_config(self._config, keys, token, ""), self._clock.now_ms()
        finish = move_to_finished(keys, job_id, options, ending, fetch_next=False, now_ms=now_ms)
        try:
            done = self._client.run(quarantine(keys, finish, token, only_malformed=by_redis))
        except JobError:  # it has ended, or another worker has it: it blocks no jobs here
            return True
        if done:
            self._bus.emit(MalformedJobFailed(job_id, keys.queue, ending.value.decode("utf-8", "replace")))
        return done
