"""How often and for how long a send is tried, and what is said when it is given up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from bulltask.clock import mono_ms
from bulltask.config.config import Config
from bulltask.errors import BrokerError, BrokerUnavailableError
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.jobs.job import NewJob

__all__ = ["Tries"]


class Tries:
    """The tries of one round trip with jobs.

    Args:
        config: how many resends, how long in all, how long to pause.
        jobs: of the round trip.
    """

    def __init__(self, config: Config, jobs: Sequence[NewJob]) -> None:
        self._config, self._jobs, self._failed, self._nothing_left_here = config, jobs, 0, True
        limit_ms = config.publish_timeout_ms
        self._ends_ms = None if limit_ms is None else mono_ms() + limit_ms

    def next_ends_ms(self) -> int | None:
        """When the try that begins now has to end (``mono_ms``), ``None`` for no limit.

        While more tries may follow it has half of the time that is left. Where a connection is dead and does not say
        so, only the next try, on a new one, finds Redis.
        """
        if self._ends_ms is None or self._failed == self._config.publish_retries:
            return self._ends_ms
        return self._ends_ms - (self._ends_ms - mono_ms()) // 2

    def pause_ms(self, exc: BrokerError) -> int:
        """How long to wait after a try that failed with ``exc``.

        Raises:
            BrokerError: no try is left, or no time for one.
        """
        self._nothing_left_here &= isinstance(exc, BrokerUnavailableError) and exc.refused
        self._failed += 1
        config = self._config
        pause_ms = reconnect_delay_ms(
            self._failed, first_ms=config.reconnect_delay_ms, cap_ms=config.reconnect_delay_max_ms
        )
        left_ms = pause_ms * 2 if self._ends_ms is None else self._ends_ms - mono_ms()
        if self._failed > config.publish_retries or left_ms <= 0:
            self._give_up(exc)
        return min(pause_ms, left_ms // 2)

    def _give_up(self, exc: BrokerError) -> NoReturn:
        if self._nothing_left_here:
            raise exc  # it says all there is to say: nobody listens there, so nothing was sent
        first, last = self._jobs[0], self._jobs[-1]
        which = f"job {first.id}" if first is last else f"{len(self._jobs)} jobs, {first.id} to {last.id},"
        raise type(exc)(
            f"{exc}. The sending of {which} was given up (try {self._failed}): nobody knows whether Redis has it. "
            "Sent again with the same job_id it is stored once"
        ) from exc
