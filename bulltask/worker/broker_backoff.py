"""Backoff after Redis errors, and the events that report them."""

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
    RedisErrorReply,
    RedisReconnected,
    RedisReconnecting,
    RedisRecovered,
)
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.transport.keys import QueueKeys

__all__ = ["QueueBackoff", "ReconnectBackoff"]

MAX_CHEAP_DELAY_MS: Final = 1_000
_SERVER_ERRORS = (BrokerUnavailableError, BrokerNotReadyError, BrokerOutOfMemoryError, BrokerConfigError)


class ReconnectBackoff:
    """The backoff of one process while Redis is unreachable, or replies to every command with an error.

    Args:
        bus: Receives events for the start and the end of an outage, and for each attempt to reconnect.
        config: The delays between attempts.
    """

    def __init__(self, bus: Bus, config: Config) -> None:
        self._bus, self._config = bus, config
        self._attempt = 0
        self._attempts_by_kind: Counter[tuple[bool, bool]] = Counter()
        self._reported: set[str] = set()
        self._since_ms = self._until_ms = 0
        self._lost = False

    def record_failure(self, exc: BrokerError) -> int:
        """Record a failure; return how many milliseconds to wait before the next attempt.

        Each distinct error is reported once per outage, even if another was reported in between. For example, a Redis
        that was unreachable may reject the password when it is available again.

        The delay doubles up to ``broker_reconnect_delay_max`` if Redis is unreachable, and up to ``run_retry_delay``
        after error replies. By default, a worker resumes within 5 s after Redis is available again, however long the
        outage lasted. If the connection is refused, or the error reply is temporary (``LOADING``, ``READONLY``,
        ``MISCONF`` …), an attempt is cheap, and the delay is at most a second. Each kind of error starts with a short
        delay, because a failover begins with error replies, and a connection that breaks afterwards shows that the
        situation has changed.
        """
        lost = isinstance(exc, BrokerUnavailableError)
        if self._attempt == 0:
            self._since_ms = mono_ms()
        self._report(exc)
        self._attempt += 1
        if self._lost:
            self._bus.emit(RedisReconnecting(self._attempt))
        quick = isinstance(exc, BrokerNotReadyError) or (isinstance(exc, BrokerUnavailableError) and exc.refused)
        self._attempts_by_kind[lost, quick] += 1
        max_ms = self._config.reconnect_delay_max_ms if lost else self._config.run_retry_delay_ms
        return reconnect_delay_ms(
            self._attempts_by_kind[lost, quick],
            first_ms=self._config.reconnect_delay_ms,
            cap_ms=min(MAX_CHEAP_DELAY_MS, max_ms) if quick else max_ms,
        )

    def record_shared_failure(self, exc: BrokerError) -> int:
        """:meth:`record_failure` for jobs that share a connection: simultaneous failures count as one."""
        now_ms = mono_ms()
        if now_ms >= self._until_ms:
            self._until_ms = now_ms + self.record_failure(exc)
        return self._until_ms - now_ms

    def _report(self, exc: BrokerError) -> None:
        message = str(exc).partition(" script: ")[0]  # the same error from different scripts is reported once
        if isinstance(exc, BrokerUnavailableError):
            # A Redis restart causes several connection errors, but only one is reported. A reply from a program that is
            # not Redis is reported as well.
            if not self._lost or (exc.wrong_protocol and message not in self._reported):
                self._bus.emit(RedisDisconnected(str(exc)))
            self._lost = True
        elif message not in self._reported:
            self._bus.emit(RedisErrorReply("", str(exc)))
        self._reported.add(message)

    @property
    def is_active(self) -> bool:
        """True from a failure until the next :meth:`reset`."""
        return self._attempt > 0

    @property
    def is_exhausted(self) -> bool:
        """True after more attempts than ``broker_connection_max_retries``."""
        max_retries = self._config.connection_retries
        return max_retries is not None and self._attempt > max_retries

    def reset(self) -> None:
        """Record that a command succeeded; this ends an outage."""
        if self._attempt:
            duration_ms = mono_ms() - self._since_ms
            if self._lost:
                self._bus.emit(RedisReconnected(self._attempt, duration_ms))
            else:
                self._bus.emit(RedisRecovered("", self._attempt, duration_ms))
            self._attempt, self._until_ms, self._lost = 0, 0, False
            self._attempts_by_kind.clear()
            self._reported.clear()


@dataclass(slots=True)
class _QueueState:
    since_ms: int
    attempt: int = 0
    reported: set[str] = field(default_factory=set)


class QueueBackoff:
    """The backoff of individual queues whose commands fail with error replies; the worker's other queues continue.

    Args:
        queues: The worker's queues, in order.
        bus: Receives an event for each new error, and when the queue has recovered.
        config: The maximum delay, ``run_retry_delay``.
    """

    def __init__(self, queues: Sequence[QueueKeys], bus: Bus, config: Config) -> None:
        self._queues, self._bus, self._config = queues, bus, config
        self._failing: dict[int, _QueueState] = {}

    @staticmethod
    def affects_queue(exc: BrokerError) -> bool:
        """Whether an error affects one queue; False if Redis is unreachable, or returns this error for every queue.

        An error of one node of a cluster affects only the queues on that node.
        """
        if exc.node is not None:
            return True
        return not (isinstance(exc, _SERVER_ERRORS) or (isinstance(exc, BrokerAuthError) and exc.handshake_failed))

    @contextmanager
    def recording(self, index: int) -> Iterator[None]:
        """Record an error of queue ``index`` that is raised in the block.

        Raises:
            BrokerError: The error affects the whole server, so commands for other queues would fail, too.
        """
        try:
            yield
        except BrokerError as exc:
            if not self.affects_queue(exc):
                raise
            self.record_failure(index, exc)

    def record_failure(self, index: int, exc: BrokerError) -> int:
        """Record an error of queue ``index``; return how many milliseconds to wait before the next attempt."""
        if (state := self._failing.get(index)) is None:
            state = self._failing[index] = _QueueState(mono_ms())
        if str(exc) not in state.reported:
            state.reported.add(str(exc))
            self._bus.emit(RedisErrorReply(self._queues[index].queue, str(exc)))
        state.attempt += 1
        # An unreachable node of a cluster is soon replaced, so the delay stays short.
        cap_ms = self._config.run_retry_delay_ms if exc.node is None else MAX_CHEAP_DELAY_MS
        return reconnect_delay_ms(state.attempt, first_ms=self._config.reconnect_delay_ms, cap_ms=cap_ms)

    def reset(self, index: int) -> None:
        """Record that a command for queue ``index`` succeeded."""
        if self._failing and (state := self._failing.pop(index, None)) is not None:
            duration_ms = mono_ms() - state.since_ms
            self._bus.emit(RedisRecovered(self._queues[index].queue, state.attempt, duration_ms))
