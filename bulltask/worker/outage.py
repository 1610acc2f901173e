"""Redis is away: how long to wait before the next try, and what to say about it."""

from __future__ import annotations

from collections import Counter
from typing import Final

from bulltask.clock import mono_ms
from bulltask.config.config import Config
from bulltask.errors import BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.events import (
    Bus,
    RedisAccepted,
    RedisDisconnected,
    RedisReconnected,
    RedisReconnecting,
    RedisRefused,
)
from bulltask.jobs.backoff import reconnect_delay_ms

__all__ = ["Outage"]

QUICK_MS: Final = 1_000


class Outage:
    """Responsible for one process's view of one outage of Redis: it is lost, or it answers everything with an error.

    Args:
        bus: hears of its beginning, every try to reach a lost Redis, and its end.
        config: the pauses between tries.
    """

    def __init__(self, bus: Bus, config: Config) -> None:
        self._bus, self._config = bus, config
        self._attempt = 0
        self._tries: Counter[tuple[bool, bool]] = Counter()
        self._told: set[str] = set()
        self._since_ms = self._until_ms = 0
        self._lost = False

    def failed(self, exc: BrokerError) -> int:
        """Note a failure; return how many milliseconds to wait before the next try.

        Every fault is told once, also when another one came first: a Redis that was lost may refuse the login when it
        is back.

        The pause doubles up to ``broker_reconnect_delay_max`` where Redis is lost, ``run_retry_delay`` where it
        answers: by default a worker works again within 5 s of Redis' return, however long it was away. Where the
        machine itself says that nothing listens, or Redis that it is still loading, asking costs nobody anything and a
        second is the most. Each kind of fault begins with a short pause: in a failover error replies come first, and a
        connection that breaks after them says that something has changed.
        """
        lost = isinstance(exc, BrokerUnavailableError)
        if self._attempt == 0:
            self._since_ms = mono_ms()
        self._tell(exc)
        self._attempt += 1
        if self._lost:
            self._bus.emit(RedisReconnecting(self._attempt))
        quick = isinstance(exc, BrokerNotReadyError) or (isinstance(exc, BrokerUnavailableError) and exc.refused)
        self._tries[lost, quick] += 1
        most_ms = self._config.reconnect_delay_max_ms if lost else self._config.run_retry_delay_ms
        return reconnect_delay_ms(
            self._tries[lost, quick],
            first_ms=self._config.reconnect_delay_ms,
            cap_ms=min(QUICK_MS, most_ms) if quick else most_ms,
        )

    def failed_together(self, exc: BrokerError) -> int:
        """:meth:`failed` for jobs that share a connection: its fault meets all of them at once, and is one try."""
        now_ms = mono_ms()
        if now_ms >= self._until_ms:
            self._until_ms = now_ms + self.failed(exc)
        return self._until_ms - now_ms

    def _tell(self, exc: BrokerError) -> None:
        fault = str(exc).partition(" script: ")[0]  # whichever script met it
        if isinstance(exc, BrokerUnavailableError):
            # Ways to be lost follow each other in every restart; an answer that is not Redis' says something else.
            if not self._lost or (exc.answered and fault not in self._told):
                self._bus.emit(RedisDisconnected(str(exc)))
            self._lost = True
        elif fault not in self._told:
            self._bus.emit(RedisRefused("", str(exc)))
        self._told.add(fault)

    @property
    def is_on(self) -> bool:
        """True from a failure to the next :meth:`over`."""
        return self._attempt > 0

    @property
    def given_up(self) -> bool:
        """True after more tries than ``broker_connection_max_retries`` allows."""
        most = self._config.connection_retries
        return most is not None and self._attempt > most

    def over(self) -> None:
        """Redis serves this process; cheap when there was no outage."""
        if self._attempt:
            lasted_ms = mono_ms() - self._since_ms
            if self._lost:
                self._bus.emit(RedisReconnected(self._attempt, lasted_ms))
            else:
                self._bus.emit(RedisAccepted("", self._attempt, lasted_ms))
            self._attempt, self._until_ms, self._lost = 0, 0, False
            self._tries.clear()
            self._told.clear()
