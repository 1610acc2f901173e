"""The address of Redis, its connection options and timeouts."""

from __future__ import annotations

import inspect
import os
import socket
from dataclasses import dataclass, field, replace
from typing import Any, Final

import redis
import redis.asyncio
from redis._parsers import _HiredisParser
from redis.asyncio.retry import Retry as AsyncRetry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError
from redis.exceptions import TimeoutError as RedisTimeout
from redis.retry import Retry

from bulltask.clock import mono_ms
from bulltask.config.config import Config
from bulltask.config.credentials import Credentials
from bulltask.config.urls import Address, Kind, SecretUrl, tls_options
from bulltask.errors import BrokerAuthError, ConfigError
from bulltask.transport import authentication
from bulltask.transport.authentication import Authentication
from bulltask.transport.known_primary import KnownPrimary

__all__ = ["DeadlineParser", "Endpoint", "set_reply_deadline", "socket_of"]

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path")


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
        return None if self.credentials is None else mono_ms() + authentication.REAUTHENTICATE_MS

    def connection(self, name: str | None) -> redis.Connection:
        """Create a connection that is not connected yet; ``CLIENT LIST`` shows its ``name``."""
        options = self._options(name) | {"retry": Retry(NoBackoff(), 0), "parser_class": DeadlineParser}
        connection: redis.Connection = self._create(redis.ConnectionPool, options)
        return connection

    def async_connection(self, name: str | None) -> redis.asyncio.Connection:
        """:meth:`connection` for asyncio."""
        # The client applies the timeouts: with redis-py's timeouts, each call would be written in a separate task, and
        # the order of calls would be lost.
        options = self._options(name) | {"retry": AsyncRetry(NoBackoff(), 0), "socket_timeout": None}
        connection: redis.asyncio.Connection = self._create(redis.asyncio.ConnectionPool, options)
        return connection

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

    def _create(self, pool: Any, options: dict[str, Any]) -> Any:
        """Create a connection with redis-py's URL parser, which is part of its connection pools.

        Raises:
            ConfigError: The URL has an invalid port or option, or names a Unix socket, which this system does not have.
            BrokerAuthError: A file in the URL does not exist or cannot be read.
        """
        if self.url.scheme == "unix" and not hasattr(socket, "AF_UNIX"):
            raise ConfigError(f"{self.url}: Python has no Unix sockets on this system; use redis://HOST:PORT")
        url = self.url if self.credentials is None else self.url.without_user()
        try:
            connections = pool.from_url(url.get_secret_value(), **options)
            connections.connection_kwargs["protocol"] = 2  # even if the URL says otherwise: replies are parsed as RESP2
            connection = connections.make_connection()
        except (ValueError, TypeError, RedisError) as exc:
            # redis-py passes options as arguments and raises TypeError for unknown ones. Its message and its frames may
            # contain the password, also those of the exceptions before it.
            message = self.url.hide_in(str(exc))
        else:
            _check_files(self.url)
            return connection
        raise ConfigError(f"Invalid broker_url {self.safe_url}: {message}")  # not in the handler: without a context


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
_SLACK_S = 0.01  # changing a socket's timeout costs a system call


class DeadlineParser(_HiredisParser):
    """redis-py's parser with a deadline for the whole reply; redis-py's timeout restarts with each part of a reply."""

    deadline_ms: int | None = None

    def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:
        """Read the next part of a reply.

        Raises:
            RedisTimeout: The deadline has passed.
        """
        if self.deadline_ms is not None and self._sock is not None:
            remaining_s = (self.deadline_ms - mono_ms()) / 1000
            if remaining_s <= 0:
                raise RedisTimeout("timed out while reading a reply")
            if (timeout_s := self._sock.gettimeout()) is None or timeout_s > remaining_s + _SLACK_S:
                self._sock.settimeout(remaining_s)
        return super().read_from_socket(*args, **kwargs)  # type: ignore[no-untyped-call]


def set_reply_deadline(connection: Any, deadline_ms: int, now_ms: int) -> None:
    """Set the deadline (``mono_ms``) for sending and reading on a connection; on a new one, for its handshake."""
    connection._parser.deadline_ms = deadline_ms  # noqa: SLF001 - redis-py has no public name for it
    if (sock := connection._sock) is None:  # noqa: SLF001
        return
    remaining_s = max(1, deadline_ms - now_ms) / 1000
    if (timeout_s := sock.gettimeout()) is None or abs(timeout_s - remaining_s) > _SLACK_S:
        sock.settimeout(remaining_s)


def socket_of(connection: redis.Connection | None) -> socket.socket | None:
    """Return a connection's socket; ``None`` if it has none."""
    sock: socket.socket | None = getattr(connection, "_sock", None)  # redis-py has no public name for it
    return sock


def _check_files(url: SecretUrl) -> None:
    """Check that the TLS files in the URL can be read on this machine.

    Raises:
        BrokerAuthError: A file cannot be read. The drivers would report that no such server exists.
    """
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
