"""Setting a job aside whose hash is malformed, so that one bad job holds up no other."""

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
    """Responsible for failing jobs that nobody can take or settle, and for telling of it.

    Args:
        client: of the caller's process.
        clock: the server's time.
        config: what is kept of jobs that fail, and whether they are counted.
        bus: hears of every job that is set aside.
    """

    def __init__(self, client: Client, clock: ServerClock, config: Config, bus: Bus) -> None:
        self._client, self._clock, self._config, self._bus = client, clock, config, bus
        self._keep = config.keep_failed or KEEP_ALL

    def fail_if_malformed(self, keys: QueueKeys, token: str, job_id: str, fault: Exception) -> bool:
        """Set a job aside that is locked with ``token``, if it is to blame for ``fault``.

        An error reply of Redis may be due to the queue instead; then nothing is changed.

        Returns:
            False if the job's hash is sound.

        Raises:
            BrokerError: Redis is away, or refuses that, too.
        """
        by_redis = isinstance(fault, BrokerError)
        ending = malformed_finish(str(fault) if by_redis else f"{type(fault).__name__}: {fault}", self._keep)
        claim, now_ms = FetchOptions.from_config(self._config, keys, token, ""), self._clock.now_ms()
        finish = move_to_finished(keys, job_id, claim, ending, fetch_next=False, now_ms=now_ms)
        try:
            done = self._client.run(quarantine(keys, finish, token, only_malformed=by_redis))
        except JobError:  # it has ended, or is another worker's: it is no longer in anybody's way here
            return True
        if done:
            self._bus.emit(MalformedJobFailed(job_id, keys.queue, ending.value.decode("utf-8", "replace")))
        return done
