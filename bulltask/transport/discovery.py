"""Finds the server to connect to, and checks it: :class:`PrimaryLink`, and :func:`check_server` after connecting.

With a Sentinel URL, the sentinels say which server is the primary. A process asks one of them when it connects and from
time to time, and reads the events that they publish about failovers (:class:`SentinelEvents`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from redis.exceptions import ResponseError

from bulltask.config.urls import Address
from bulltask.jobs import clock as loop_timers
from bulltask.jobs.clock import ServerClock, mono_ms, value_class
from bulltask.jobs.errors import (
    BrokerAuthError,
    BrokerConfigError,
    BrokerError,
    BrokerNotReadyError,
    BrokerUnavailableError,
    ConfigError,
)
from bulltask.transport import redis_errors
from bulltask.transport.call import Call, as_is, command
from bulltask.transport.endpoint import Endpoint, KnownPrimary
from bulltask.transport.operation import arun_generator, run_generator
from bulltask.transport.redis_connection import AsyncConnection, Connection
from bulltask.transport.redis_errors import tls_mismatch_hint

__all__ = [
    "HELLO",
    "TIME",
    "UNKNOWN_SERVER",
    "PrimaryLink",
    "SentinelEvents",
    "ServerInfo",
    "check_server",
    "handshake_calls",
    "refresh",
]


@value_class
class ServerInfo:
    """Reply to ``HELLO``: version of Redis or Valkey, and role (``master`` or ``replica``), if they are known."""

    version: tuple[int, ...] = ()
    clustered: bool = False
    sentinel: bool = False
    role: str = ""

    @property
    def has_read_only_scripts(self) -> bool:
        """True if the server has ``EVALSHA_RO``."""
        return self.version >= (7,)


UNKNOWN_SERVER: Final = ServerInfo()
"""The properties of a server that does not support ``HELLO``, or is behind a proxy that does not."""


def handshake_calls(clock: ServerClock | None) -> tuple[Call[Any], ...]:
    """Return the calls for a new connection: ``HELLO``, and ``TIME`` if there is a clock to set."""
    return (HELLO,) if clock is None else (HELLO, TIME)


def check_server(reply: Any, endpoint: Endpoint) -> None:
    """Check that the server can be used, before the first call.

    Args:
        reply: The reply to ``HELLO``; an error is accepted, because a proxy may not have the command.
        endpoint: The server's endpoint, which says whether the caller routes calls in a cluster, or the endpoint of
            sentinels that reported this server as the primary.

    Raises:
        BrokerNotReadyError: The sentinels' reply is outdated: the server is not a primary.
        BrokerUnavailableError: It is not a reply to ``HELLO``.
        BrokerConfigError: The server is a Sentinel, or a node of a cluster and the caller does not route calls.
    """
    try:
        info = _parse_info(reply)
    except redis_errors.UNEXPECTED_REPLY as exc:
        raise redis_errors.unexpected_reply(exc, endpoint.safe_url) from exc
    if info.sentinel:
        raise redis_errors.sentinel_error(endpoint.safe_url)
    if info.clustered and not endpoint.clustered:
        raise redis_errors.cluster_node_error(endpoint.safe_url)
    if endpoint.primary is not None and info.role not in {"", "master"}:
        endpoint.primary.ask_next()
        raise BrokerNotReadyError(
            f"the server that the sentinels of {endpoint.safe_url} report as the primary is a {info.role}. During a "
            "failover this is temporary"
        )


def _parse_info(reply: Any) -> ServerInfo:
    if not isinstance(reply, list):  # an error, or any reply from a proxy
        return UNKNOWN_SERVER
    info = dict(zip(reply[::2], reply[1::2], strict=False))
    version, role = (info.get(name, b"").decode("ascii", "replace") for name in (b"version", b"role"))
    numbers = tuple(int(part) for part in version.split(".") if part.isdecimal())
    return ServerInfo(numbers, info.get(b"mode") == b"cluster", info.get(b"mode") == b"sentinel", role)


def _ms(reply: Any) -> float:
    return int(reply[0]) * 1000 + int(reply[1]) / 1000


HELLO: Final[Call[ServerInfo]] = command("HELLO", parse_reply=_parse_info)
"""The server's properties, which every user may read, whatever its ACL."""

TIME: Final[Call[float]] = command("TIME", parse_reply=_ms)
"""The server's time in milliseconds."""


TIMEOUT_MS: Final = 1_000
"""Timeout for each sentinel, so that one that is down does not delay a connection for long."""

CHECK_TIMEOUT_MS: Final = 500
"""Timeout for a sentinel that is asked whether the primary has changed; other calls wait until it replies."""

POLL_MS: Final = 10
"""Minimum interval between two system calls that look for events."""

CONNECT_TIMEOUT_MS: Final = 500
"""Timeout for subscribing to the events of one sentinel."""

REFUSED_CHECK_MS: Final = 100
"""How often a process asks a sentinel if it may not subscribe to events."""

_FAILOVER_POLL_S: Final = 0.02
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
    connection: Connection
    heard_ms: int
    pinged_ms: int


class SentinelEvents:
    """Subscriptions to the events of all sentinels, which are read between the calls to the primary.

    Only the sentinel that performs a failover reports its beginning, and the others learn of its end later; therefore,
    the events of all of them are read. A connection that has died silently is noticed by a ``PING``. Any number of
    threads may use it. After a fork, the child subscribes again.

    ``queries`` about the primary are sent before the subscription, so that no event is missed; ``observe`` receives a
    sentinel's replies to them.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        known: KnownPrimary,
        queries: bytes,
        observe: Callable[[Address, Sequence[Any]], None],
    ) -> None:
        self._endpoint = endpoint
        self._known = known
        self._queries = queries
        self._observe = observe
        self._name = endpoint.url.service_name.encode()
        self._subscriptions: dict[Address, _Subscription] = {}
        self._reset()

    def _reset(self) -> None:
        self._pid = os.getpid()
        self._next_ms = 0
        self._closed = 0
        self._lock = threading.Lock()
        self._connecting = threading.Lock()
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
                self._subscriptions.popitem()[1].connection.close()

    def _read(self, address: Address, subscription: _Subscription, now_ms: int) -> bool:
        """Return whether a sentinel has reported another primary."""
        found = False
        try:
            for event in subscription.connection.messages(now_ms + _READ_MS, now_ms):
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
        subscription.connection.send(_PING, now_ms + _READ_MS, now_ms)
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

    def _subscribed(self, address: Address) -> Connection | None:
        """Return a connection with a subscription; ``None`` if the sentinel's ACL does not permit it."""
        sentinel, now_ms = self._endpoint.sentinel_at(*address).within(CONNECT_TIMEOUT_MS), mono_ms()
        connection, deadline_ms = sentinel.connection(None), now_ms + CONNECT_TIMEOUT_MS
        try:
            connection.connect(deadline_ms, now_ms)
            connection.send(self._queries + _SUBSCRIBE, deadline_ms, mono_ms())
            self._observe(address, [connection.read(), connection.read()])
            if isinstance(connection.read(), ResponseError):
                self._known.check_ms = min(self._known.check_ms, REFUSED_CHECK_MS)
                connection.close()
                return None
            for _ in _PATTERNS[1:]:
                connection.read()
        except BaseException:
            connection.close()
            raise
        return connection

    def _drop(self, address: Address, retry_ms: int) -> None:
        self._retry_ms[address] = retry_ms
        if (subscription := self._subscriptions.pop(address, None)) is not None:
            subscription.connection.close()


@value_class
class Primary:
    """A primary as a sentinel reported it; ``epoch`` is 0 if the sentinel's ACL does not permit reading it."""

    endpoint: Endpoint
    epoch: int


class PrimaryLink:
    """A client's link to the primary: finds it, and notices that another server has become the primary.

    Without sentinels, the server in the URL is always the primary. ``url`` is the server, without its password, for
    errors.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint = endpoint
        self._epoch = 0
        self.url = endpoint.safe_url

    def find_server(self, endpoint: Endpoint, deadline_ms: int | None) -> Endpoint:
        """Return the server to connect to.

        Args:
            endpoint: The client's endpoint, perhaps with shorter timeouts.
            deadline_ms: Deadline (``mono_ms``), in addition to :data:`TIMEOUT_MS` for each sentinel.

        Raises:
            BrokerConfigError: The sentinels monitor no primary with this name.
            BrokerAuthError: The sentinels rejected the user or the password.
            BrokerNotReadyError: The sentinels that replied do not know of the latest failover, or one is in progress.
            BrokerUnavailableError: No sentinel replied.
        """
        if (known := endpoint.primary) is None:
            return endpoint
        refresh(self._endpoint)
        while known.is_failing_over:
            self._check_wait(known, deadline_ms)
            threading.Event().wait(_FAILOVER_POLL_S)
            refresh(self._endpoint)
        return self._found(resolve(endpoint, deadline_ms))

    async def afind_server(self, endpoint: Endpoint, deadline_ms: int | None) -> Endpoint:
        """:meth:`find_server` for asyncio."""
        if (known := endpoint.primary) is None:
            return endpoint
        await arefresh(self._endpoint)
        while known.is_failing_over:
            self._check_wait(known, deadline_ms)
            await loop_timers.sleep(_FAILOVER_POLL_S)
            await arefresh(self._endpoint)
        return self._found(await aresolve(endpoint, deadline_ms))

    def not_connected(self, exc: BaseException) -> BrokerError:
        """Return the error for a server that could not be reached; the next search begins with another sentinel."""
        if (known := self._endpoint.primary) is None:
            return redis_errors.connection_error(exc, self.url, connecting=True)
        known.ask_next()
        return redis_errors.connection_error(exc, self.url, connecting=True, sentinels=self._endpoint.safe_url)

    def is_replaced(self) -> bool:
        """Return whether the sentinels have promoted another server since the connection was made, or are about to."""
        if self._endpoint.primary is None:
            return False
        refresh(self._endpoint)
        return self._is_outdated()

    def must_close(self, replies: Sequence[object]) -> bool:
        """Return whether the connection must be closed, because its server is no longer the primary."""
        return self.is_replaced() or any(map(redis_errors.is_demoted, replies))

    async def amust_close(self, replies: Sequence[object]) -> bool:
        """:meth:`must_close` for asyncio."""
        if self._endpoint.primary is None:
            return False
        await arefresh(self._endpoint)
        return self._is_outdated() or any(map(redis_errors.is_demoted, replies))

    def raise_if_replaced(self) -> None:
        """Raise ``BrokerUnavailableError`` for replies from a server that has been replaced: they are discarded."""
        if self.is_replaced():
            raise BrokerUnavailableError(
                f"the sentinels of {self._endpoint.safe_url} are promoting, or have promoted, another server; the "
                "reply from the old primary was discarded"
            )

    def _is_outdated(self) -> bool:
        known = self._endpoint.primary
        return known is not None and (self._epoch < known.epoch or known.is_failing_over)

    def _check_wait(self, known: KnownPrimary, deadline_ms: int | None) -> None:
        """Raise an error if this process must not wait for the end of a failover, because others depend on it."""
        if known.is_published or not known.reads_events or (deadline_ms is not None and mono_ms() >= deadline_ms):
            raise BrokerNotReadyError(
                f"the sentinels of {self._endpoint.safe_url} are promoting another server; calls wait until it is the "
                "primary"
            )

    def _found(self, primary: Primary) -> Endpoint:
        self._epoch = primary.epoch
        self.url = primary.endpoint.safe_url
        return primary.endpoint


_Answer = Primary | None  # None: the sentinel does not monitor a primary with this name
_Search = Generator[Endpoint, Any, Primary]
"""Yields sentinels; receives the raw replies to the queries, or has a ``BrokerError`` thrown into it."""


def resolve(endpoint: Endpoint, deadline_ms: int | None = None) -> Primary:
    """Return the primary that the sentinels report; see :meth:`PrimaryLink.find_server`."""
    return run_generator(
        _search(endpoint),
        lambda sentinel: _ask(_limited(sentinel, deadline_ms), endpoint.url.service_name),
        BrokerError,
    )


async def aresolve(endpoint: Endpoint, deadline_ms: int | None = None) -> Primary:
    """:func:`resolve` for asyncio."""
    return await arun_generator(
        _search(endpoint),
        lambda sentinel: _aask(_limited(sentinel, deadline_ms), endpoint.url.service_name),
        BrokerError,
    )


def refresh(endpoint: Endpoint) -> None:
    """Take note of another primary: read the sentinels' events, and ask one of them from time to time.

    Events are read without waiting. A sentinel is asked if it has reported another primary, which has a newer epoch.
    """
    for address in _to_ask(endpoint):
        try:
            replies = _ask(endpoint.sentinel_at(*address).within(CHECK_TIMEOUT_MS), endpoint.url.service_name)
            _observe(endpoint, address, replies)
        except BrokerError:
            _known(endpoint).record_silence(address)


async def arefresh(endpoint: Endpoint) -> None:
    """:func:`refresh` for asyncio."""
    for address in _to_ask(endpoint):
        try:
            replies = await _aask(endpoint.sentinel_at(*address).within(CHECK_TIMEOUT_MS), endpoint.url.service_name)
            _observe(endpoint, address, replies)
        except BrokerError:
            _known(endpoint).record_silence(address)


def _to_ask(endpoint: Endpoint) -> Sequence[Address]:
    known = _known(endpoint)
    reporters = _events(endpoint, known).poll() if known.reads_events else ()
    return reporters or ((known.next_to_check(endpoint.seeds),) if known.takes_check() else ())


def _events(endpoint: Endpoint, known: KnownPrimary) -> SentinelEvents:
    if known.events is None:
        queries = _queries(endpoint.url.service_name)
        known.events = SentinelEvents(endpoint, known, queries, partial(_observe, endpoint))
    return known.events


def _known(endpoint: Endpoint) -> KnownPrimary:
    assert endpoint.primary is not None, "only for Sentinel URLs"
    return endpoint.primary


def _observe(endpoint: Endpoint, address: Address, replies: Sequence[Any]) -> None:
    if (answer := _parse_primary(endpoint, replies)) is not None:
        _known(endpoint).observe(answer.epoch, address, len(endpoint.seeds))


def _search(endpoint: Endpoint) -> _Search:
    """Ask the sentinels in order until one knows the primary, at the newest epoch that this process knows."""
    known = _known(endpoint)
    answers: list[_Answer] = []
    errors: list[BrokerError] = []
    for address in known.in_order(endpoint.seeds):
        try:
            replies = yield endpoint.sentinel_at(*address)
            answer = _parse_primary(endpoint, replies)
        except BrokerError as exc:
            errors.append(exc)
        else:
            if answer is not None and answer.epoch >= known.epoch:
                known.record(answer.epoch)
                return answer
            answers.append(answer)
        known.ask_next()
    primaries = [answer for answer in answers if answer is not None]
    if primaries and len(answers) * 2 > len(endpoint.seeds):
        # Each failover needs a majority, so these sentinels were set up again, and their epochs start again at 0.
        newest = max(primaries, key=lambda primary: primary.epoch)
        known.record(newest.epoch)
        return newest
    raise _not_found(endpoint, primaries, answers, errors)


def _not_found(
    endpoint: Endpoint, primaries: Sequence[Primary], answers: Sequence[_Answer], errors: Sequence[BrokerError]
) -> BrokerError:
    url, name = endpoint.safe_url, endpoint.url.service_name
    if primaries:
        return BrokerNotReadyError(
            f"the sentinels of {url} that replied do not know of the latest failover, so their reply is outdated. The "
            f"others did not reply: {'; '.join(map(str, errors))}"
        )
    if answers and not errors:
        return BrokerConfigError(
            f"the sentinels of {url} monitor no primary named {name!r}. Use the name in `sentinel monitor` of "
            "sentinel.conf (SENTINEL MASTERS lists the names)"
        )
    if auth := next((exc for exc in errors if isinstance(exc, BrokerAuthError)), None):
        hint = (
            "" if "TLS" in str(auth) else ". For the sentinels, set sentinel_username and sentinel_password in the URL"
        )
        return BrokerAuthError(f"{auth}{hint}")
    return BrokerUnavailableError(f"no sentinel of {url} replied: {'; '.join(map(str, errors))}")


def _parse_primary(endpoint: Endpoint, replies: Sequence[Any]) -> _Answer:
    """Return the primary in the replies; raise an error reply as a ``BrokerError``."""
    address, details = replies
    if isinstance(address, Exception):
        raise redis_errors.reply_error(address, endpoint.safe_url) from address  # type: ignore[arg-type]
    if not isinstance(address, list):
        return None
    host, port = address
    epoch = 0
    if isinstance(details, list):
        epoch = int(dict(zip(details[::2], details[1::2], strict=False)).get(b"config-epoch", 0))
    return Primary(endpoint.at(host.decode(), int(port)), epoch)


def _limited(sentinel: Endpoint, deadline_ms: int | None) -> Endpoint:
    remaining_ms = TIMEOUT_MS if deadline_ms is None else max(1, min(TIMEOUT_MS, deadline_ms - mono_ms()))
    return sentinel.within(remaining_ms)


def _queries(name: str) -> bytes:
    # During a failover, only the first reply contains the new primary, and only the second one contains the epoch.
    where, details = ("SENTINEL", "GET-MASTER-ADDR-BY-NAME", name), ("SENTINEL", "MASTER", name)
    return Call(where, as_is).packed() + Call(details, as_is).packed()


def _ask(sentinel: Endpoint, name: str) -> list[Any]:
    connection = sentinel.connection(None)
    now_ms = mono_ms()
    deadline_ms = now_ms + sentinel.command_timeout_ms
    try:
        connection.connect(deadline_ms, now_ms)
        connection.send(_queries(name), deadline_ms, mono_ms())
        return [connection.read(), connection.read()]
    except (*redis_errors.CONNECTION_ERRORS, ResponseError) as exc:
        raise _sentinel_error(exc, sentinel) from redis_errors.visible_cause(exc)
    finally:
        connection.close()


async def _aask(sentinel: Endpoint, name: str) -> list[Any]:
    connection = sentinel.async_connection(None)
    try:
        async with loop_timers.timeout(sentinel.command_timeout_ms / 1000):
            await connection.connect()
            connection.write(_queries(name))
            await connection.drain()
            return [await _read(connection) for _ in range(2)]
    except (*redis_errors.CONNECTION_ERRORS, TimeoutError, ResponseError) as exc:
        raise _sentinel_error(exc, sentinel) from redis_errors.visible_cause(exc)
    finally:
        await connection.close()


async def _read(connection: AsyncConnection) -> Any:
    try:
        return await connection.read()
    except redis_errors.ERROR_REPLIES as exc:
        return exc


def _sentinel_error(exc: BaseException, sentinel: Endpoint) -> BrokerError:
    error = redis_errors.connection_error(exc, sentinel.safe_url, connecting=False)
    if isinstance(error, BrokerUnavailableError):
        text = str(exc).rstrip(".") or "no reply in time"
        return BrokerUnavailableError(f"{sentinel.safe_url}: {text}{tls_mismatch_hint(exc, sentinel.safe_url)}")
    return error
