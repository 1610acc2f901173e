"""Ends the supervisor's calls to Redis when the worker must stop, whether Redis replies or not."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Sequence
from types import FrameType
from typing import Any, Final, TypeVar, cast

from bulltask.clock import mono_ms
from bulltask.errors import BrokerUnavailableError
from bulltask.transport.call import Call
from bulltask.transport.client_types import SyncClient
from bulltask.transport.known_primary import KnownPrimary

__all__ = ["CallLimits"]

R = TypeVar("R")
T = TypeVar("T")

_NO_TIME_LEFT: Final = "the worker is stopping, and Redis has not replied in time"


class CallLimits:
    """The time until which the supervisor's clients may wait for Redis; without a limit, for their own timeouts.

    A supervisor that waits for Redis handles no signals and kills no children, so without this a shutdown would take
    as long as the timeouts of all calls that follow each other. The timer interrupts a call that is already waiting:
    the system call ends early only if a signal handler raises an exception.

    Args:
        primary: What the clients know about the primary, with sentinels.
    """

    def __init__(self, primary: KnownPrimary | None = None) -> None:
        self._primary = primary
        self._waiting = self._is_over = False
        self._patience_ms = self._give_up_ms = 0

    def client(self, client: SyncClient) -> SyncClient:
        """Return a client whose calls these limits end, with ``BrokerUnavailableError``."""
        return cast("SyncClient", _LimitedClient(client, self))

    def end_calls_in(self, timeout_ms: int | None) -> None:
        """End all calls at that time, also those that start later; ``None`` for no limit. Replaces an earlier limit.

        A signal handler may call this.
        """
        self._is_over, self._patience_ms = False, 0
        if timeout_ms is not None:
            signal.signal(signal.SIGALRM, self._on_alarm)
        signal.setitimer(signal.ITIMER_REAL, 0 if timeout_ms is None else max(1, timeout_ms) / 1000)

    def end_calls_without_reply_in(self, patience_ms: int) -> None:
        """End calls if Redis has not replied for that long, from now on; replaces :meth:`end_calls_in`.

        No sentinels are asked any more while Redis replies: they may hang although Redis does not.
        """
        self.end_calls_in(None)
        if self._primary is not None:
            self._primary.stop_checks()
        self._patience_ms, self._give_up_ms = patience_ms, mono_ms() + patience_ms

    @property
    def has_given_up(self) -> bool:
        """Whether Redis has not replied within the time of :meth:`end_calls_without_reply_in`."""
        return self._patience_ms > 0 and mono_ms() >= self._give_up_ms

    def run(self, client: SyncClient, call: Callable[[], T]) -> T:
        """Make a call of a client within the limits.

        Raises:
            BrokerUnavailableError: The time is over.
        """
        if self._patience_ms:
            client.set_deadline(self._give_up_ms)
        result = self.interrupt(call)
        if self._patience_ms:
            self._give_up_ms = mono_ms() + self._patience_ms
        return result

    def interrupt(self, wait: Callable[[], T]) -> T:
        """Wait within the limit of :meth:`end_calls_in`; for anything that no client does.

        Raises:
            BrokerUnavailableError: The time is over.
        """
        if self._is_over:
            raise BrokerUnavailableError(_NO_TIME_LEFT)
        self._waiting = True
        try:
            return wait()
        except _TimeOver as exc:
            raise BrokerUnavailableError(_NO_TIME_LEFT) from exc
        finally:
            self._waiting = False

    def _on_alarm(self, _number: int, _: FrameType | None) -> None:
        self._is_over = True
        if self._waiting:
            raise _TimeOver


class _TimeOver(BaseException):
    """Ends a wait. No ``BrokerError``, after which a client would go on with another sentinel or node."""


class _LimitedClient:
    """A supervisor's client; see :class:`CallLimits`. It has the methods of ``SyncClient`` that a supervisor needs."""

    def __init__(self, client: SyncClient, limits: CallLimits) -> None:
        self._client, self._limits = client, limits

    def run(self, call: Call[R]) -> R:
        return self._limits.run(self._client, lambda: self._client.run(call))

    def run_many(self, calls: Iterable[Call[Any]]) -> list[Any]:
        return self._limits.run(self._client, lambda: self._client.run_many(calls))

    def run_on_all_nodes(self, call: Call[R]) -> list[R]:
        return self._limits.run(self._client, lambda: self._client.run_on_all_nodes(call))

    def try_many(self, calls: Sequence[Call[Any]], packed: Sequence[bytes] | None = None) -> list[Any]:
        return self._limits.run(self._client, lambda: self._client.try_many(calls, packed))

    def send_packed(self, packed: Sequence[bytes]) -> list[Any]:
        return self._limits.run(self._client, lambda: self._client.send_packed(packed))

    def dry_run(self, calls: Sequence[Call[Any]]) -> list[Any] | None:
        return self._limits.run(self._client, lambda: self._client.dry_run(calls))

    @property
    def safe_url(self) -> str:
        return self._client.safe_url

    def close(self) -> None:
        self._client.close()
