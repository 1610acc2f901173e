"""Where and how to connect: :class:`Endpoint` has the address, options and timeouts, and creates connections.

All endpoints of an app share its changing credentials, and with sentinels, what is known about the primary.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Final, TypeVar

import redis
import redis.asyncio
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider
from redis.exceptions import RedisError
from redis.retry import Retry

from bulltask.config.config import Config
from bulltask.config.urls import Address, Credentials, Kind, SecretUrl, tls_options
from bulltask.jobs.clock import mono_ms, value_class
from bulltask.jobs.errors import BrokerAuthError, ConfigError
from bulltask.transport.call import Call, command
from bulltask.transport.redis_connection import AsyncConnection, Connection, DeadlineParser

if TYPE_CHECKING:  # discovery.py imports this module
    from bulltask.transport.discovery import SentinelEvents

__all__ = [
    "CHECK_MS",
    "FAILOVER_MS",
    "Authentication",
    "Endpoint",
    "KnownPrimary",
    "PrimaryState",
]


T = TypeVar("T")

CHECK_MS: Final = 5_000
"""How often a process asks a sentinel while it uses Redis, in addition to the events that the sentinels send."""

FAILOVER_MS: Final = 5_000
"""How long calls wait for a failover that has begun. The sentinels may wait longer for a replica that hangs."""

REAUTHENTICATE_MS: Final = 120_000
"""How long a connection is used before it authenticates again with current credentials.

Microsoft Entra tokens must be replaced 3 minutes before they expire; Microsoft's client library returns a new token 5
minutes before. ElastiCache closes a connection 12 hours after its last authentication.
"""

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path")
_SILENT_MS: Final = 10_000
_FOLLOWED_MS: Final = 300
_OWN_CHECK_MS: Final = 100


@value_class
class PrimaryState:
    """What a supervisor tells its children; times are ``mono_ms``.

    Attributes:
        epoch: The newest configuration epoch; 0 if none is known yet.
        failover_until_ms: While a failover is in progress: how long it may take.
        known_ms: When the supervisor last read the sentinels' events.
    """

    epoch: int = 0
    failover_until_ms: int = 0
    known_ms: int = 0


class KnownPrimary:
    """The newest configuration epoch that a sentinel has reported, and the sentinel to ask next.

    The sentinels increment the epoch at each failover. A connection that was made at an earlier epoch leads to a server
    that is no longer the primary, even if it does not know this yet, as on the minority side of a network partition. A
    sentinel whose epoch is older is on that side, too.

    A failover begins before the epoch changes. What the old primary executes after the replica has been promoted is
    lost, so no call is made until the failover has ended.

    All clients of a broker share it. Thread-safe without a lock: each attribute is assigned as a whole, and an outdated
    value costs at most one more query.
    """

    def __init__(self) -> None:
        self.check_ms = CHECK_MS
        self.events: SentinelEvents | None = None
        self._state = PrimaryState()
        self._first = self._next = self._checked_ms = 0
        self._outdated: set[object] = set()
        self._silent_until_ms: dict[object, int] = {}
        self._read_state: Callable[[], PrimaryState] | None = None
        self._publish: Callable[[PrimaryState], object] | None = None
        self._publisher = 0

    @property
    def epoch(self) -> int:
        """The newest epoch; 0 if none is known yet."""
        return self._state.epoch if self._read_state is None else max(self._state.epoch, self._read_state().epoch)

    @property
    def is_failing_over(self) -> bool:
        """Whether a failover is in progress, so that no call should be made."""
        until_ms = self._state.failover_until_ms if self._read_state is None else self._read_state().failover_until_ms
        return until_ms > 0 and mono_ms() < until_ms

    @property
    def reads_events(self) -> bool:
        """Whether this process reads the sentinels' events, because it does not :meth:`follow` another one."""
        return self._read_state is None

    @property
    def is_published(self) -> bool:
        """Whether other processes follow this one, which therefore must not wait."""
        return self._publish is not None and os.getpid() == self._publisher

    def follow(self, read_state: Callable[[], PrimaryState]) -> None:
        """Take the state from another process, which reads the sentinels' events.

        This process asks a sentinel only when it connects, or if the other process has read no events for a while: it
        may be waiting for the old primary, too.
        """
        self._read_state = read_state

    def stop_checks(self) -> None:
        """Ask a sentinel only when a client connects, and read no more events: this process is about to end."""
        state = replace(self._state, known_ms=sys.maxsize)
        self.follow(lambda: state)

    def publish(self, write_state: Callable[[PrimaryState], object]) -> None:
        """Pass each change to other processes, which :meth:`follow` it; a fork of this process passes nothing on."""
        self._publish = write_state
        self._publisher = os.getpid()
        self.record_events()

    def record(self, epoch: int) -> None:
        """Record the epoch in a sentinel's reply; another epoch ends a failover."""
        self._checked_ms = mono_ms()
        ended = epoch != self._state.epoch
        self._set(replace(self._state, epoch=epoch, failover_until_ms=0 if ended else self._state.failover_until_ms))

    def record_events(self) -> None:
        """Record that the sentinels' events have been read."""
        self._set(replace(self._state, known_ms=mono_ms()))

    def record_failover(self, *, in_progress: bool) -> None:
        """Record that a sentinel has begun a failover, or has aborted it."""
        self._set(replace(self._state, failover_until_ms=mono_ms() + FAILOVER_MS if in_progress else 0))

    def observe(self, epoch: int, sentinel: object, sentinels: int) -> None:
        """Record the epoch that one of the sentinels has reported in a check.

        If a majority reports an older epoch, the sentinels were set up again, and their epochs start again at 0: no
        failover happens without a majority.
        """
        if epoch >= self.epoch:
            self._outdated.clear()
        else:
            self._outdated.add(sentinel)
        if epoch > self.epoch or len(self._outdated) * 2 > sentinels:
            self._outdated.clear()
            self.record(epoch)

    def takes_check(self) -> bool:
        """Return whether a sentinel should be asked now, and record that it is."""
        now_ms = mono_ms()
        if self._read_state is None:
            is_due = now_ms - self._checked_ms >= self.check_ms
        else:
            is_due = now_ms - self._read_state().known_ms > _FOLLOWED_MS and now_ms - self._checked_ms > _OWN_CHECK_MS
        if is_due:
            self._checked_ms = now_ms
        return is_due

    def next_to_check(self, sentinels: Sequence[T]) -> T:
        """Return the sentinel to ask for the epoch: a different one each time, but not one that was just silent."""
        self._next += 1
        order = [sentinels[(self._next + step) % len(sentinels)] for step in range(len(sentinels))]
        chosen = next((it for it in order if not self.is_silent(it)), order[0])
        self._next = sentinels.index(chosen)
        return chosen

    def is_silent(self, sentinel: object) -> bool:
        """Whether a sentinel has just not replied, so that others should be asked first."""
        return mono_ms() < self._silent_until_ms.get(sentinel, 0)

    def record_silence(self, sentinel: object) -> None:
        """Record that a sentinel did not reply, so that waiting for it does not take a large part of the time."""
        self._silent_until_ms[sentinel] = mono_ms() + _SILENT_MS

    def in_order(self, sentinels: Sequence[T]) -> Iterator[T]:
        """Return the sentinels in the order in which to ask them."""
        first = self._first % len(sentinels)
        return iter([*sentinels[first:], *sentinels[:first]])

    def ask_next(self) -> None:
        """Begin with the next sentinel: this one did not reply, or its reply was not useful."""
        self._first += 1

    def close(self) -> None:
        """Close the connections to the sentinels; they are opened again when needed."""
        if self.events is not None:
            self.events.close()

    def _set(self, state: PrimaryState) -> None:
        self._state = state
        if self._publish is not None and self.is_published:
            self._publish(state)


class Authentication(CredentialProvider):
    """Reads credentials, for redis-py's connections and for ``AUTH`` on open ones; ``user`` is that in the URL."""

    def __init__(self, credentials: Credentials, user: str) -> None:
        self._credentials = credentials
        self._user = user

    def get_credentials(self) -> Any:
        """Return the arguments of ``AUTH``; raises the errors of ``Credentials.read``."""
        return self._credentials.read(self._user)

    async def get_credentials_async(self) -> Any:
        """:meth:`get_credentials` for asyncio: in a thread, because a provider may wait for its token."""
        return await asyncio.to_thread(self._credentials.read, self._user)

    def call(self) -> Call[Any]:
        """Return the call that authenticates an open connection again; raises the errors of ``Credentials.read``."""
        return command("AUTH", *self.get_credentials())

    async def acall(self) -> Call[Any]:
        """:meth:`call` for asyncio."""
        return command("AUTH", *await self.get_credentials_async())


@dataclass(frozen=True, slots=True, init=False)
class Endpoint:
    """A server and the timeouts of connections to it.

    Every call has a timeout, because without one a client would wait forever on a half-open connection. redis-py's
    retries are off, because only the caller knows whether a call may be retried.

    Attributes:
        url: ``redis://``, ``rediss://`` or ``unix://``, with redis-py's options (including TLS) after a ``?``; for a
            cluster or sentinels, such as ``redis+cluster://``, the endpoint of one server is returned by :meth:`at`.
        connect_timeout_ms: Timeout for connecting.
        command_timeout_ms: Timeout for a complete reply, or for all replies to a pipeline.
        clustered: Whether the caller routes calls in a Redis Cluster; otherwise a cluster node is rejected.
        primary: What is known about the primary, with a Sentinel URL; shared by all endpoints made from this one.
        credentials: Where the password, and perhaps the user, come from instead of the URL.
    """

    url: SecretUrl
    connect_timeout_ms: int
    command_timeout_ms: int
    clustered: bool
    primary: KnownPrimary | None = field(compare=False)
    credentials: Credentials | None

    def __init__(
        self,
        url: str | SecretUrl,
        connect_timeout_ms: int,
        command_timeout_ms: int,
        clustered: bool = False,
        primary: KnownPrimary | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        url = SecretUrl(url)
        if primary is None and url.kind == "sentinel":
            primary = KnownPrimary()
        object.__setattr__(self, "url", url)
        object.__setattr__(self, "primary", primary)
        object.__setattr__(self, "connect_timeout_ms", connect_timeout_ms)
        object.__setattr__(self, "command_timeout_ms", command_timeout_ms)
        object.__setattr__(self, "clustered", clustered)
        object.__setattr__(self, "credentials", credentials)

    @classmethod
    def from_config(cls, config: Config, url: str | SecretUrl) -> Endpoint:
        """Return the endpoint at ``url`` with the timeouts of ``config``."""
        return cls(url, config.connect_timeout_ms, config.command_timeout_ms, credentials=config.credentials)

    def blocking(self, block_ms: int) -> Endpoint:
        """Return the endpoint with timeouts for calls that block for up to ``block_ms``."""
        return replace(self, command_timeout_ms=block_ms + min(5_000, self.command_timeout_ms))

    def within(self, timeout_ms: int | None) -> Endpoint:
        """Return the endpoint with timeouts of at most ``timeout_ms``."""
        if timeout_ms is None:
            return self
        return replace(
            self,
            connect_timeout_ms=min(self.connect_timeout_ms, timeout_ms),
            command_timeout_ms=min(self.command_timeout_ms, timeout_ms),
        )

    @property
    def kind(self) -> Kind:
        """Whether the URL names one server, nodes of a cluster, or sentinels."""
        return self.url.kind

    @property
    def seeds(self) -> tuple[Address, ...]:
        """The hosts and ports in the URL, in order: the server, some nodes of the cluster, or the sentinels."""
        return self.url.hosts

    @property
    def address(self) -> Address:
        """The first host and port."""
        return self.seeds[0]

    def at(self, host: str, port: int) -> Endpoint:
        """Return the endpoint of a node of the cluster, or of a primary, with the same user, options and timeouts."""
        return replace(self, url=self.url.at(_netloc(host, port)))

    def sentinel_at(self, host: str, port: int) -> Endpoint:
        """Return the endpoint of one of the sentinels, with their user and password, which are always in the URL."""
        return replace(self, url=self.url.sentinel_at(_netloc(host, port)), credentials=None)

    def for_cluster(self) -> Endpoint:
        """Return the endpoint for a caller that routes calls in a cluster."""
        return replace(self, clustered=True)

    @property
    def safe_url(self) -> str:
        """The URL without its password."""
        return str(self.url)

    def authentication(self) -> Authentication:
        """Return the reader of ``credentials``, which must not be ``None``."""
        assert self.credentials is not None
        return Authentication(self.credentials, self.url.user)

    def next_authentication_ms(self) -> int | None:
        """Return when a connection that authenticates now should do so again (``mono_ms``); ``None``: never."""
        return None if self.credentials is None else mono_ms() + REAUTHENTICATE_MS

    def connection(self, name: str | None) -> Connection:
        """Create a connection that is not connected yet; ``CLIENT LIST`` shows its ``name``."""
        options = self._options(name) | {"parser_class": DeadlineParser}
        return Connection(self._create(redis.connection, options, Retry(NoBackoff(), 0)))

    def async_connection(self, name: str | None) -> AsyncConnection:
        """:meth:`connection` for asyncio."""
        # The client applies the timeouts: with redis-py's timeouts, each call would be written in a separate task, and
        # the order of calls would be lost.
        options = self._options(name) | {"socket_timeout": None}
        return AsyncConnection(self._create(redis.asyncio.connection, options, AsyncRetry(NoBackoff(), 0)))

    def _options(self, name: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "client_name": name,
            **_NO_DRIVER_INFO,
            "health_check_interval": 0,
            "socket_connect_timeout": self.connect_timeout_ms / 1000,
            "socket_timeout": self.command_timeout_ms / 1000,
        }
        if self.url.scheme != "unix":
            options["socket_keepalive"] = True
        if self.url.scheme == "rediss":
            options |= _tls_defaults(self.url)
        if self.credentials is not None:
            options["credential_provider"] = self.authentication()
        return options

    def _create(self, module: Any, options: dict[str, Any], retry: Any) -> Any:
        """Create a connection from the URL, as redis-py's pools do.

        A pool of one connection would also prepare it for notifications of RESP3, which are not used: that takes longer
        than the connection itself, and memory in each child, which copies the pages of all objects that it uses.
        """
        if self.url.scheme == "unix" and not hasattr(socket, "AF_UNIX"):
            raise ConfigError(f"{self.url}: Python has no Unix sockets on this system; use redis://HOST:PORT")
        url = self.url if self.credentials is None else self.url.without_user()
        try:
            connection = _create_connection(module, url, options)
            connection.retry = retry  # also if the URL has retry_on_timeout; as an argument, it would be copied
        except (ValueError, TypeError, RedisError) as exc:
            # redis-py passes options as arguments and raises TypeError for unknown ones. Its message and its frames may
            # contain the password, also those of the exceptions before it.
            message = self.url.hide_in(str(exc))
        else:
            _check_files(self.url)
            return connection
        raise ConfigError(f"Invalid broker_url {self.safe_url}: {message}")  # not in the handler: without a context


def _create_connection(module: Any, url: SecretUrl, options: dict[str, Any]) -> Any:
    # A function, and a new dictionary, because error reports show the variables of the callers.
    options = {**options, **_parse_url(module, url.get_secret_value())}
    options.pop("max_connections", None)  # for a pool
    options["protocol"] = 2  # even if the URL says otherwise: replies are parsed as RESP2
    return options.pop("connection_class", module.Connection)(**options)


@lru_cache
def _parse_url(module: Any, url: str) -> Mapping[str, Any]:
    """Return redis-py's options from a URL. A child connects with those that its supervisor has parsed."""
    options: Mapping[str, Any] = module.parse_url(url)
    return options


def _netloc(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _without_driver_info() -> dict[str, None]:
    """Return options that keep redis-py from sending ``CLIENT SETINFO`` on each connect.

    Redis 7.0 does not know this command, so its ACL does not accept rules for the command, and users without permission
    to run it would fill the log of denied commands.
    """
    known = inspect.signature(redis.connection.AbstractConnection.__init__).parameters
    names = ("driver_info",) if "driver_info" in known else ("lib_name", "lib_version")
    return dict.fromkeys(names)


_NO_DRIVER_INFO: Final = _without_driver_info()


def _check_files(url: SecretUrl) -> None:
    """Check that the URL's TLS files can be read; the drivers would report that no such server exists."""
    for name, path in tls_options(url).items():
        if name in _TLS_FILES and not os.access(path, os.R_OK):
            raise BrokerAuthError(
                f"TLS handshake with Redis at {url} failed: cannot read {path} ({name} in the URL). Every machine that "
                "connects needs the file at that path"
            )


def _tls_defaults(url: SecretUrl) -> dict[str, Any]:
    """Return options that the URL does not set, so that all versions of redis-py behave the same.

    redis-py 5 does not check the host name in the server's certificate, and ignores a client certificate that has its
    key in the same file.
    """
    url_options = tls_options(url)
    defaults: dict[str, Any] = {"ssl_check_hostname": url_options.get("ssl_cert_reqs") != "none"}
    if "ssl_certfile" in url_options:
        defaults["ssl_keyfile"] = url_options["ssl_certfile"]
    return defaults
