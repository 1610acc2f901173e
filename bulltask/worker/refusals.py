"""Queues that Redis does not serve, because it answers with an error whenever it is asked something about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

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
from bulltask.events import Bus, RedisAccepted, RedisRefused
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.transport.keys import QueueKeys

__all__ = ["Refusals"]

_OF_THE_SERVER = (BrokerUnavailableError, BrokerNotReadyError, BrokerOutOfMemoryError, BrokerConfigError)


@dataclass(slots=True)
class _Refusal:
    since_ms: int
    attempt: int = 0
    told: set[str] = field(default_factory=set)


class Refusals:
    """Responsible for how long a queue is left alone, and for saying why, once; the worker's other queues go on.

    Args:
        queues: the worker's, in their order.
        bus: hears of each refusal that is another one than before, and of the end.
        config: the longest pause, ``run_retry_delay``.
    """

    def __init__(self, queues: Sequence[QueueKeys], bus: Bus, config: Config) -> None:
        self._queues, self._bus, self._config = queues, bus, config
        self._open: dict[int, _Refusal] = {}

    @staticmethod
    def concern_a_queue(exc: BrokerError) -> bool:
        """False where Redis is lost, or would answer the same for every queue."""
        return not (isinstance(exc, _OF_THE_SERVER) or (isinstance(exc, BrokerAuthError) and exc.login))

    @contextmanager
    def noted(self, index: int) -> Iterator[None]:
        """Note the refusal of queue ``index`` that ends the block.

        Raises:
            BrokerError: what ended the block concerns the server; the other queues need not be tried.
        """
        try:
            yield
        except BrokerError as exc:
            if not self.concern_a_queue(exc):
                raise
            self.note(index, exc)

    def note(self, index: int, exc: BrokerError) -> int:
        """Note that asking queue ``index`` ended with ``exc``; return how many milliseconds to leave it alone."""
        if (refusal := self._open.get(index)) is None:
            refusal = self._open[index] = _Refusal(mono_ms())
        if str(exc) not in refusal.told:
            refusal.told.add(str(exc))
            self._bus.emit(RedisRefused(self._queues[index].queue, str(exc)))
        refusal.attempt += 1
        return reconnect_delay_ms(
            refusal.attempt, first_ms=self._config.reconnect_delay_ms, cap_ms=self._config.run_retry_delay_ms
        )

    def over(self, index: int) -> None:
        """Queue ``index`` was asked and Redis served it; cheap where nothing was refused."""
        if self._open and (refusal := self._open.pop(index, None)) is not None:
            lasted_ms = mono_ms() - refusal.since_ms
            self._bus.emit(RedisAccepted(self._queues[index].queue, refusal.attempt, lasted_ms))
