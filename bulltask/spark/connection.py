"""One connection of a reader: opened where it is used, closed with the ``with`` block, and patient.

Spark makes readers in one process and uses copies of them in others, so no reader keeps a connection. Everything that
is asked here only reads, so a call whose answer got lost may simply be made again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Final, Self, TypeVar

from bulltask.backoff import reconnect_delay_ms
from bulltask.config import Config
from bulltask.errors import BrokerAuthError, BrokerError, BrokerNotReady, BrokerUnavailable
from bulltask.transport.call import Call
from bulltask.transport.client import Client
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.hello import SILENT, Hello, hello
from bulltask.transport.scripts_history import READING
from bulltask.transport.transaction import atomic

__all__ = ["Connection"]

R = TypeVar("R")

_TRIES: Final = 4


class Connection:
    """Responsible for asking one server, again where that helps.

    Args:
        config: where the server is, and how long anything may take.
    """

    def __init__(self, config: Config) -> None:
        self._config, self._endpoint = config, Endpoint.from_config(config, config.broker_url)
        self._client = Client(self._endpoint, None)
        self._hello: Hello | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def run(self, call: Call[R]) -> R:
        """Make one call; the errors are those of ``Client.run``."""
        return self._patiently(lambda: self._client.run(self._fit(call)))

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip."""
        return self._patiently(lambda: self._client.run_many(list(map(self._fit, calls))))

    def try_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls in one round trip; what one of them raised stands in its place."""
        return self._patiently(lambda: self._client.try_many(list(map(self._fit, calls))))

    def try_at_once(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls between which nobody else comes; what one of them raised stands in its place."""

        def ask() -> list[Any]:
            results: list[Any] = self._client.run_many(atomic(list(map(self._fit, calls)), self._endpoint.shown))[-1]
            return results

        return self._patiently(ask)

    def run_at_once(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls between which nobody else comes."""
        results = self.try_at_once(calls)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def _fit(self, call: Call[R]) -> Call[R]:
        """The call in the words that this server knows and that its user may say."""
        if call.script is None or call.script.name not in READING or not self._said().may_keep_from_writing:
            return call
        return replace(call, script=call.script.only_reading())

    def _said(self) -> Hello:
        if self._hello is None:
            try:
                self._hello = self._client.run(hello())
            except (BrokerUnavailable, BrokerNotReady, BrokerAuthError):
                raise
            except BrokerError:
                self._hello = SILENT
        return self._hello

    def _patiently(self, ask: Callable[[], R]) -> R:
        failed = 0
        while True:
            try:
                return ask()
            except (BrokerUnavailable, BrokerNotReady) as exc:
                failed += 1
                if failed == _TRIES or getattr(exc, "refused", False):
                    raise
                pause_ms = reconnect_delay_ms(
                    failed, first_ms=self._config.reconnect_delay_ms, cap_ms=self._config.reconnect_delay_max_ms
                )
                threading.Event().wait(pause_ms / 1000)
