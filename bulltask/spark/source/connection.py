"""One connection of a reader: opened where it is used, closed with the ``with`` block, and patient.

Spark makes readers in one process and uses copies of them in others, so no reader keeps a connection. Everything that
is asked here only reads, so a call whose answer got lost may simply be made again. A server says itself whether it is
a node of a cluster; there every call goes to the node that has its keys.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Final, Self, TypeVar

from bulltask import embedded
from bulltask.clock import mono_ms
from bulltask.config.config import Config
from bulltask.errors import BrokerAuthError, BrokerConfigError, BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.jobs.backoff import reconnect_delay_ms
from bulltask.transport.broker import Broker
from bulltask.transport.call import Call
from bulltask.transport.client import Client
from bulltask.transport.cluster import ClusterClient
from bulltask.transport.endpoint import Endpoint
from bulltask.transport.scripts.stream import READING
from bulltask.transport.server_info import UNKNOWN_SERVER, ServerInfo, server_info
from bulltask.transport.transaction import atomic

__all__ = ["CLUSTER_PATIENCE_MS", "Connection", "broker_of", "gc_paused"]

R = TypeVar("R")

ScanStep = Callable[[str], Call[tuple[str, list[str]]]]
"""Makes the call that goes on behind a cursor."""

CLUSTER_PATIENCE_MS: Final = 60_000
"""So long a cluster may need to put a replica in the place of a node; Redis' default makes it some 20 seconds."""

_TRIES: Final = 4
_LONG_PAUSE_MS: Final = 1_000


class Connection:
    """Responsible for asking one server or cluster, again where that helps.

    Args:
        config: where the server is, and how long anything may take.
        patience_ms: so long a server that is away is waited for, as for a node of a cluster that is replaced; ``None``
            asks four times, and once where nothing listens.
    """

    def __init__(self, config: Config, *, patience_ms: int | None = None) -> None:
        self._config, self._endpoint = config, Endpoint.from_config(config, config.broker_url).for_cluster()
        self._patience_ms = patience_ms
        self._client = Client(self._endpoint, None)
        self._cluster: ClusterClient | None = None
        self._hello: ServerInfo | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()
        if self._cluster is not None:
            self._cluster.close()

    def run(self, call: Call[R]) -> R:
        """Make one call; the errors are those of ``Client.run``."""
        return self._patiently(lambda way: way.run(self._fit(call)))

    def run_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls, in one round trip for each node that is asked."""
        return self._patiently(lambda way: way.run_many(list(map(self._fit, calls)))) if calls else []

    def try_many(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """:meth:`run_many`, where what a call raised stands in its place."""
        return self._patiently(lambda way: way.try_many(list(map(self._fit, calls)))) if calls else []

    def try_at_once(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls between which nobody else comes; what one of them raised stands in its place."""

        def ask(way: Client | ClusterClient) -> list[Any]:
            results: list[Any] = way.run_many(atomic(list(map(self._fit, calls)), self._endpoint.safe_url))[-1]
            return results

        return self._patiently(ask)

    def run_at_once(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Make several calls between which nobody else comes."""
        results = self.try_at_once(calls)
        for result in results:
            if isinstance(result, Exception):
                raise result
        return results

    def walk(self, step: ScanStep) -> set[str]:
        """All that some calls without keys find, each behind the cursor of the one before, on every node.

        Where slots have moved meanwhile, the walk begins again. What is on its way to another node at this very moment
        may be missed.
        """

        def walk(way: Client | ClusterClient) -> set[str]:
            if isinstance(way, Client):
                return _walked(step, way.run)
            found, seen = set[str](), None
            while seen != (seen := way.nodes()):
                for address in seen:
                    found |= _walked(step, lambda call, there=address: way.run_at(there, call))  # type: ignore[misc]
            return found

        return self._patiently(walk)

    def said(self) -> ServerInfo:
        """What the server says of itself."""
        return self._patiently(lambda _: self._greet())

    def _fit(self, call: Call[R]) -> Call[R]:
        """The call in the words that this server knows and that its user may say."""
        if call.script is None or call.script.name not in READING or not self._greet().may_keep_from_writing:
            return call
        return replace(call, script=call.script.only_reading())

    def _greet(self) -> ServerInfo:
        if self._hello is None:
            try:
                self._hello = self._client.run(server_info())
            except (BrokerUnavailableError, BrokerNotReadyError, BrokerAuthError, BrokerConfigError):
                raise
            except BrokerError:
                self._hello = UNKNOWN_SERVER
            if self._hello.clustered:
                self._cluster = ClusterClient(self._endpoint, None)
        return self._hello

    def _patiently(self, ask: Callable[[Client | ClusterClient], R]) -> R:
        failed, began_ms = 0, mono_ms()
        while True:
            try:
                self._greet()
                with gc_paused():
                    return ask(self._cluster or self._client)
            except (BrokerUnavailableError, BrokerNotReadyError) as exc:
                failed += 1
                if self._is_over(failed, mono_ms() - began_ms, refused=getattr(exc, "refused", False)):
                    raise
                self._pause(failed)

    def _is_over(self, failed: int, waited_ms: int, *, refused: bool) -> bool:
        """Whether to ask no more."""
        if self._patience_ms is not None:
            return waited_ms >= self._patience_ms
        return refused or (failed >= _TRIES if self._cluster is None else waited_ms >= CLUSTER_PATIENCE_MS)

    def _pause(self, failed: int) -> None:
        longest_ms = self._config.reconnect_delay_max_ms
        if self._cluster is not None or self._patience_ms is not None:
            longest_ms = min(longest_ms, _LONG_PAUSE_MS)
        pause_ms = reconnect_delay_ms(failed, first_ms=self._config.reconnect_delay_ms, cap_ms=longest_ms)
        threading.Event().wait(pause_ms / 1000)


def broker_of(config: Config) -> Broker:
    """What sends to the server or cluster of some settings; in a cluster with the patience that it needs."""
    url = embedded.resolve_url(config.broker_url)
    with Connection(replace(config, broker_url=url)) as connection:
        clustered = connection.said().clustered
    if clustered:
        limit_ms = config.publish_timeout_ms
        config = replace(
            config,
            publish_retries=100,
            publish_timeout_ms=None if limit_ms is None else max(limit_ms, CLUSTER_PATIENCE_MS),
            reconnect_delay_max_ms=min(config.reconnect_delay_max_ms, _LONG_PAUSE_MS),
        )
    return Broker(config, url, clustered=clustered)


def _walked(step: ScanStep, run: Callable[[Call[tuple[str, list[str]]]], tuple[str, list[str]]]) -> set[str]:
    found, cursor = set[str](), "0"
    while True:
        cursor, some = run(step(cursor))
        found.update(some)
        if cursor == "0":
            return found


@contextmanager
def gc_paused() -> Iterator[None]:
    """Keep Python from looking for unused objects that refer to each other.

    A page of replies is tens of thousands of lists, and no cycle. Python takes so many new objects for a reason to look
    through all it has, again and again: that is two thirds of the time in which a page of events is read. What is used
    no more goes all the same, by its count. Of several threads the first one ends it.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
