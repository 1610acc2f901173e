"""Redis is away: how long to wait before the next try, and what to say about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from bulltask.clock import mono_ms
from bulltask.config.config import Config
from bulltask.errors import (
    BrokerAuthError,
    BrokerConfigError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
)
from bulltask.events import (
    Bus,
    RedisDisconnected,
    RedisReconnected,
    RedisReconnecting,
    RedisRecovered,
    RedisRefused,
)
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.transport.keys import QueueKeys

__all__ = ["QueueBackoff", "ReconnectBackoff"]

QUICK_MS: Final = 1_000
_OF_THE_SERVER = (BrokerUnavailableError, BrokerNotReadyError, BrokerOutOfMemoryError, BrokerConfigError)


class ReconnectBackoff:
    """Responsible for one process's view of one outage of Redis: it is lost, or it answers everything with an error.

    Args:
        bus: hears of its beginning, every try to reach a lost Redis, and its end.
        config: the pauses between tries.
    """

    def __init__(self, bus: Bus, config: Config) -> None:
        self._bus, self._config = bus, config
        self._attempt = 0
        self._tries: Counter[tuple[bool, bool]] = Counter()
        self._reported: set[str] = set()
        self._since_ms = self._until_ms = 0
        self._lost = False

    def record_failure(self, exc: BrokerError) -> int:
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
        self._report(exc)
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

    def record_shared_failure(self, exc: BrokerError) -> int:
        """:meth:`failed` for jobs that share a connection: its fault meets all of them at once, and is one try."""
        now_ms = mono_ms()
        if now_ms >= self._until_ms:
            self._until_ms = now_ms + self.record_failure(exc)
        return self._until_ms - now_ms

    def _report(self, exc: BrokerError) -> None:
        fault = str(exc).partition(" script: ")[0]  # whichever script met it
        if isinstance(exc, BrokerUnavailableError):
            # Ways to be lost follow each other in every restart; an answer that is not Redis' says something else.
            if not self._lost or (exc.answered and fault not in self._reported):
                self._bus.emit(RedisDisconnected(str(exc)))
            self._lost = True
        elif fault not in self._reported:
            self._bus.emit(RedisRefused("", str(exc)))
        self._reported.add(fault)

    @property
    def is_active(self) -> bool:
        """True from a failure to the next :meth:`over`."""
        return self._attempt > 0

    @property
    def is_exhausted(self) -> bool:
        """True after more tries than ``broker_connection_max_retries`` allows."""
        most = self._config.connection_retries
        return most is not None and self._attempt > most

    def reset(self) -> None:
        """Redis serves this process; cheap when there was no outage."""
        if self._attempt:
            lasted_ms = mono_ms() - self._since_ms
            if self._lost:
                self._bus.emit(RedisReconnected(self._attempt, lasted_ms))
            else:
                self._bus.emit(RedisRecovered("", self._attempt, lasted_ms))
            self._attempt, self._until_ms, self._lost = 0, 0, False
            self._tries.clear()
            self._reported.clear()


@dataclass(slots=True)
class _QueueState:
    since_ms: int
    attempt: int = 0
    reported: set[str] = field(default_factory=set)


class QueueBackoff:
    """Responsible for how long a queue is left alone, and for saying why, once; the worker's other queues go on.

    Args:
        queues: the worker's, in their order.
        bus: hears of each refusal that is another one than before, and of the end.
        config: the longest pause, ``run_retry_delay``.
    """

    def __init__(self, queues: Sequence[QueueKeys], bus: Bus, config: Config) -> None:
        self._queues, self._bus, self._config = queues, bus, config
        self._open: dict[int, _QueueState] = {}

    @staticmethod
    def concerns_queue(exc: BrokerError) -> bool:
        """False where Redis is lost, or would answer the same for every queue."""
        return not (isinstance(exc, _OF_THE_SERVER) or (isinstance(exc, BrokerAuthError) and exc.login))

    @contextmanager
    def recording(self, index: int) -> Iterator[None]:
        """Note the refusal of queue ``index`` that ends the block.

        Raises:
            BrokerError: what ended the block concerns the server; the other queues need not be tried.
        """
        try:
            yield
        except BrokerError as exc:
            if not self.concerns_queue(exc):
                raise
            self.record_failure(index, exc)

    def record_failure(self, index: int, exc: BrokerError) -> int:
        """Note that asking queue ``index`` ended with ``exc``; return how many milliseconds to leave it alone."""
        if (state := self._open.get(index)) is None:
            state = self._open[index] = _QueueState(mono_ms())
        if str(exc) not in state.reported:
            state.reported.add(str(exc))
            self._bus.emit(RedisRefused(self._queues[index].queue, str(exc)))
        state.attempt += 1
        return reconnect_delay_ms(
            state.attempt, first_ms=self._config.reconnect_delay_ms, cap_ms=self._config.run_retry_delay_ms
        )

    def reset(self, index: int) -> None:
        """Queue ``index`` was asked and Redis served it; cheap where nothing was refused."""
        if self._open and (state := self._open.pop(index, None)) is not None:
            lasted_ms = mono_ms() - state.since_ms
            self._bus.emit(RedisRecovered(self._queues[index].queue, state.attempt, lasted_ms))
