"""The events that sentinels publish about failovers."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import redis
from redis._parsers.hiredis import NOT_ENOUGH_DATA
from redis.exceptions import ResponseError

from bulltask.clock import mono_ms
from bulltask.config.urls import Address
from bulltask.errors import BrokerError, ConfigError
from bulltask.transport import redis_errors
from bulltask.transport.call import Call, as_is, command
from bulltask.transport.endpoint import Endpoint, set_reply_deadline, socket_of
from bulltask.transport.known_primary import KnownPrimary

__all__ = ["CONNECT_TIMEOUT_MS", "POLL_MS", "SentinelEvents"]

POLL_MS: Final = 10
"""Minimum interval between two system calls that look for events."""

CONNECT_TIMEOUT_MS: Final = 500
"""Timeout for subscribing to the events of one sentinel."""

REFUSED_CHECK_MS: Final = 100
"""How often a process asks a sentinel if it may not subscribe to events."""

_BEGINS: Final = b"+failover-state-select-slave"
_ABORTS: Final = b"-failover-abort-"
_PATTERNS: Final = (b"+switch-master", b"+promoted-slave", _BEGINS, _ABORTS + b"*")
_SUBSCRIBE: Final = Call(("PSUBSCRIBE", *_PATTERNS), as_is).packed()
_PING: Final = command("PING").packed()
_PING_MS: Final = 2_000
_READ_MS: Final = 100
_RETRY_MS: Final = 1_000
_FAILED_RETRY_MS: Final = 10_000


@dataclass(slots=True)
class _Subscription:
    connection: redis.Connection
    heard_ms: int
    pinged_ms: int


class SentinelEvents:
    """Subscriptions to the events of all sentinels, which are read between the calls to the primary.

    Only the sentinel that performs a failover reports its beginning, and the others learn of its end later; therefore,
    the events of all of them are read. A connection that has died silently is noticed by a ``PING``.

    Any number of threads may use it. After a fork, the child subscribes again.

    Args:
        endpoint: The sentinels.
        known: Receives the beginning and the end of a failover.
        queries: Two queries about the primary, which are sent before the subscription, so that no event is missed.
        observe: Receives a sentinel's replies to them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        known: KnownPrimary,
        queries: bytes,
        observe: Callable[[Address, Sequence[Any]], None],
    ) -> None:
        self._endpoint, self._known, self._queries, self._observe = endpoint, known, queries, observe
        self._name = endpoint.url.service_name.encode()
        self._subscriptions: dict[Address, _Subscription] = {}
        self._reset()

    def _reset(self) -> None:
        self._pid, self._next_ms, self._closed = os.getpid(), 0, 0
        self._lock, self._connecting = threading.Lock(), threading.Lock()
        # Not shut down, which would end the parent's subscriptions, too: redis-py checks the process id.
        self.close()
        self._subscriptions = {}
        self._retry_ms: dict[Address, int] = {}

    def poll(self) -> Sequence[Address]:
        """Read the events that have arrived, without waiting; return the sentinels that reported another primary."""
        now_ms = mono_ms()
        if now_ms < self._next_ms:
            return ()
        if os.getpid() != self._pid:
            self._reset()
        # Not with a wait for the lock, which this thread may hold if a signal handler sends.
        if not self._lock.acquire(blocking=False):
            return ()
        try:
            self._next_ms = now_ms + POLL_MS
            reporters = [
                address
                for address, subscription in tuple(self._subscriptions.items())
                if self._read(address, subscription, now_ms)
            ]
            self._connect_missing(now_ms)
        finally:
            self._lock.release()
        return reporters

    def close(self) -> None:
        """End the subscriptions; :meth:`poll` begins them again."""
        self._closed += 1
        while self._subscriptions:
            with suppress(KeyError):  # another thread has dropped it
                self._subscriptions.popitem()[1].connection.disconnect()

    def _read(self, address: Address, subscription: _Subscription, now_ms: int) -> bool:
        """Return whether a sentinel has reported another primary."""
        found = False
        try:
            for event in _received(subscription.connection, now_ms):
                subscription.heard_ms = now_ms
                if event[0] == b"pmessage":
                    found |= self._take(event[2], event[3])
            self._keep_alive(subscription, now_ms)
        except (*redis_errors.CONNECTION_ERRORS, LookupError, TypeError):  # or a reply that is none of these events
            self._drop(address, now_ms + _RETRY_MS)
        return found

    def _take(self, channel: bytes, text: bytes) -> bool:
        """Record an event; return whether it reports another primary."""
        if channel == b"+switch-master":
            return text.split(b" ", 1)[0] == self._name
        # "master NAME IP PORT", or "slave IP:PORT IP PORT @ NAME IP PORT"
        _, _, own = text.rpartition(b"@ ")
        if own.removeprefix(b"master ").split(b" ", 1)[0] != self._name:
            return False
        if channel == b"+promoted-slave":
            return True
        self._known.record_failover(in_progress=channel == _BEGINS)
        return False

    @staticmethod
    def _keep_alive(subscription: _Subscription, now_ms: int) -> None:
        silent_ms = now_ms - max(subscription.heard_ms, subscription.pinged_ms)
        if silent_ms < _PING_MS:
            return
        if subscription.pinged_ms > subscription.heard_ms:
            raise ConnectionError("no reply to a PING")
        set_reply_deadline(subscription.connection, now_ms + _READ_MS, now_ms)
        subscription.connection.send_packed_command([_PING], check_health=False)
        subscription.pinged_ms = now_ms

    def _connect_missing(self, now_ms: int) -> None:
        missing = [
            address
            for address in self._endpoint.seeds
            if address not in self._subscriptions and self._retry_ms.get(address, 0) <= now_ms
        ]
        if not missing or not self._connecting.acquire(blocking=False):
            return
        if not self._known.is_published:  # a supervisor has one thread
            try:
                threading.Thread(target=self._connect, args=(missing,), name="bulltask-sentinels", daemon=True).start()
            except RuntimeError:  # the interpreter is exiting, or has no more threads
                self._connecting.release()
        else:
            self._connect(missing)

    def _connect(self, missing: Sequence[Address]) -> None:
        connecting = self._connecting
        try:
            for address in missing:
                self._subscribe(address)
        finally:
            connecting.release()

    def _subscribe(self, address: Address) -> None:
        closed = self._closed
        try:
            connection = self._subscribed(address)
        except (*redis_errors.CONNECTION_ERRORS, ResponseError, BrokerError, ConfigError):
            connection = None
        now_ms = mono_ms()
        if connection is None:
            # A process that hears no sentinel may be on the minority side of a network partition, with the old primary.
            is_deaf = not (self._subscriptions or self._known.is_published)
            self._drop(address, now_ms + (_RETRY_MS if is_deaf else _FAILED_RETRY_MS))
            return
        self._subscriptions[address] = _Subscription(connection, now_ms, now_ms)
        if closed != self._closed:
            self._drop(address, now_ms)

    def _subscribed(self, address: Address) -> redis.Connection | None:
        """Return a connection with a subscription; ``None`` if the sentinel's ACL does not permit it."""
        sentinel, now_ms = self._endpoint.sentinel_at(*address).within(CONNECT_TIMEOUT_MS), mono_ms()
        connection = sentinel.connection(None)
        set_reply_deadline(connection, now_ms + CONNECT_TIMEOUT_MS, now_ms)
        is_subscribed = False
        try:
            connection.connect()
            connection.send_packed_command([self._queries + _SUBSCRIBE], check_health=False)
            read = connection._parser.read_response  # noqa: SLF001 - as in Client
            self._observe(address, [read(disable_decoding=True) for _ in range(2)])
            if isinstance(read(disable_decoding=True), ResponseError):
                self._known.check_ms = min(self._known.check_ms, REFUSED_CHECK_MS)
                return None
            for _ in _PATTERNS[1:]:
                read(disable_decoding=True)
            is_subscribed = True
        finally:
            if not is_subscribed:
                connection.disconnect()
        return connection

    def _drop(self, address: Address, retry_ms: int) -> None:
        self._retry_ms[address] = retry_ms
        if (subscription := self._subscriptions.pop(address, None)) is not None:
            subscription.connection.disconnect()


def _received(connection: redis.Connection, now_ms: int) -> Iterator[Any]:
    """Yield the messages that a connection has received."""
    sock, parser = socket_of(connection), connection._parser  # noqa: SLF001 - as in Client
    if sock is None:
        raise ConnectionError("the connection was closed")
    poll = select.poll()
    poll.register(sock.fileno(), select.POLLIN)
    pending = getattr(sock, "pending", int)  # bytes that TLS has decrypted, but not delivered
    while poll.poll(0) or pending():
        set_reply_deadline(connection, now_ms + _READ_MS, now_ms)  # TLS may not have a complete record
        parser.read_from_socket()
        while (message := parser._reader.gets(False)) is not NOT_ENOUGH_DATA:  # noqa: SLF001
            yield message
