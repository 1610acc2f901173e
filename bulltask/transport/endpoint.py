"""The address of Redis, and how connections to it are made and limited in time."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any, Final
from urllib.parse import urlsplit

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
from bulltask.config.urls import SecretUrl, tls_options
from bulltask.errors import BrokerAuthError, ConfigError

__all__ = ["DeadlineParser", "Endpoint", "set_reply_deadline"]

_TLS_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path")


@dataclass(frozen=True, slots=True, init=False)
class Endpoint:
    """A server and the timeouts of connections to it.

    No call is ever without a timeout: on a half-open connection both official BullMQ clients wait forever. redis-py's
    own retries are off, because only the caller knows whether a call may be repeated.

    Attributes:
        url: ``redis://``, ``rediss://`` or ``unix://``, with options of redis-py after a ``?``, among them those of
            TLS.
        connect_timeout_ms: Time to connect.
        command_timeout_ms: Time for a complete reply, or for all replies of a pipeline.
        clustered: The user of the endpoint routes calls in a Redis Cluster; otherwise a cluster node is refused.
    """

    url: SecretUrl
    connect_timeout_ms: int
    command_timeout_ms: int
    clustered: bool

    def __init__(
        self, url: str | SecretUrl, connect_timeout_ms: int, command_timeout_ms: int, clustered: bool = False
    ) -> None:
        object.__setattr__(self, "url", SecretUrl(url))
        object.__setattr__(self, "connect_timeout_ms", connect_timeout_ms)
        object.__setattr__(self, "command_timeout_ms", command_timeout_ms)
        object.__setattr__(self, "clustered", clustered)

    @classmethod
    def from_config(cls, config: Config, url: str | SecretUrl) -> Endpoint:
        """Return the endpoint at ``url`` with the timeouts of ``config``."""
        return cls(url, config.connect_timeout_ms, config.command_timeout_ms)

    def blocking(self, block_ms: int) -> Endpoint:
        """Return the same server for calls that block up to ``block_ms`` on purpose."""
        return replace(self, command_timeout_ms=block_ms + min(5_000, self.command_timeout_ms))

    def within(self, timeout_ms: int | None) -> Endpoint:
        """Return the same server for calls that may take at most ``timeout_ms``."""
        if timeout_ms is None:
            return self
        return replace(
            self,
            connect_timeout_ms=min(self.connect_timeout_ms, timeout_ms),
            command_timeout_ms=min(self.command_timeout_ms, timeout_ms),
        )

    @property
    def address(self) -> tuple[str, int]:
        """Host and port."""
        parts = urlsplit(str(self.url))
        return parts.hostname or "localhost", parts.port or 6379

    def at(self, host: str, port: int) -> Endpoint:
        """Return the same user, options and timeouts for another server: a node of a cluster."""
        place = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        return replace(self, url=self.url.at(place))

    def for_cluster(self) -> Endpoint:
        """Return the same server for a caller that routes calls in a cluster."""
        return replace(self, clustered=True)

    @property
    def safe_url(self) -> str:
        """The URL without its password."""
        return str(self.url)

    def connection(self, name: str | None) -> redis.Connection:
        """Make a connection that is not connected yet; ``name`` is shown by ``CLIENT LIST``."""
        options = self._options(name) | {"retry": Retry(NoBackoff(), 0), "parser_class": DeadlineParser}
        connection: redis.Connection = self._made(redis.ConnectionPool, options)
        return connection

    def async_connection(self, name: str | None) -> redis.asyncio.Connection:
        """The same for asyncio."""
        # The client applies the timeouts: redis-py's own would write each call in a task of its own, and lose the order
        # of calls.
        options = self._options(name) | {"retry": AsyncRetry(NoBackoff(), 0), "socket_timeout": None}
        connection: redis.asyncio.Connection = self._made(redis.asyncio.ConnectionPool, options)
        return connection

    def _options(self, name: str | None) -> dict[str, Any]:
        options: dict[str, Any] = {
            "client_name": name,
            "protocol": 2,
            "health_check_interval": 0,
            "socket_connect_timeout": self.connect_timeout_ms / 1000,
            "socket_timeout": self.command_timeout_ms / 1000,
        }
        if self.url.scheme != "unix":
            options["socket_keepalive"] = True
        if self.url.scheme == "rediss":
            options |= _tls_defaults(self.url)
        return options

    def _made(self, pool: Any, options: dict[str, Any]) -> Any:
        """Make a connection from a pool that is not kept.

        Raises:
            ConfigError: The URL has an invalid port or option.
            BrokerAuthError: It names a file that is not on this machine.
        """
        try:
            connection = pool.from_url(self.url.get_secret_value(), **options).make_connection()
        except (ValueError, TypeError, RedisError) as exc:
            # redis-py passes options on as arguments and raises TypeError for an unknown one. Its message and its
            # frames may contain the password.
            why = self.url.hide_in(str(exc))
            raise ConfigError(f"Invalid broker_url {self.safe_url}: {why}") from exc.with_traceback(None)
        _check_files(self.url)
        return connection


_SLACK_S = 0.01  # changing a socket's timeout costs a system call


class DeadlineParser(_HiredisParser):
    """redis-py's parser with a deadline for the whole reply; its own timeout starts again with each piece."""

    deadline_ms: int | None = None

    def read_from_socket(self, *args: Any, **kwargs: Any) -> Any:
        """Read the next piece of a reply.

        Raises:
            RedisTimeout: The deadline has passed.
        """
        if self.deadline_ms is not None and self._sock is not None:
            left_s = (self.deadline_ms - mono_ms()) / 1000
            if left_s <= 0:
                raise RedisTimeout("the reply was not complete in time")
            if (now_s := self._sock.gettimeout()) is None or now_s > left_s + _SLACK_S:
                self._sock.settimeout(left_s)
        return super().read_from_socket(*args, **kwargs)  # type: ignore[no-untyped-call]


def set_reply_deadline(connection: Any, deadline_ms: int) -> None:
    """Allow sending and reading on a connection until ``deadline_ms`` (``mono_ms``); on a new one, its handshake."""
    connection._parser.deadline_ms = deadline_ms  # noqa: SLF001 - redis-py has no public name for either
    if (sock := connection._sock) is None:  # noqa: SLF001
        return
    left_s = max(1, deadline_ms - mono_ms()) / 1000
    if (now_s := sock.gettimeout()) is None or abs(now_s - left_s) > _SLACK_S:
        sock.settimeout(left_s)


def _check_files(url: SecretUrl) -> None:
    """Check that the files that the URL names can be read here.

    Raises:
        BrokerAuthError: One cannot. The drivers would report that no such server exists.
    """
    for name, path in tls_options(url).items():
        if name in _TLS_FILES and not os.access(path, os.R_OK):
            raise BrokerAuthError(
                f"no TLS connection to Redis at {url}: cannot read {path} ({name} in the URL). Every machine that "
                "connects needs the file at that path"
            )


def _tls_defaults(url: SecretUrl) -> dict[str, Any]:
    """Return options that the URL does not set, so that every version of redis-py behaves the same.

    redis-py 5 did not check whether the server's certificate was made for its name, and ignored a certificate that has
    its key in the same file.
    """
    given = tls_options(url)
    found: dict[str, Any] = {"ssl_check_hostname": given.get("ssl_cert_reqs") != "none"}
    if "ssl_certfile" in given:
        found["ssl_keyfile"] = given["ssl_certfile"]
    return found
