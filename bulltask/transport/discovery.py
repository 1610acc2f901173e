"""Redis Sentinel: asks the sentinels which server is the primary.

Every connection to the primary begins here. A reply from a sentinel may be outdated; therefore, the client also checks
the role that the server itself reports (:mod:`bulltask.transport.server_info`).
"""

from __future__ import annotations

import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from redis.exceptions import ResponseError

from bulltask import loop_timers
from bulltask.clock import mono_ms
from bulltask.config.urls import Address
from bulltask.errors import BrokerAuthError, BrokerConfigError, BrokerError, BrokerNotReadyError, BrokerUnavailableError
from bulltask.transport import redis_errors
from bulltask.transport.advice import tls_hint
from bulltask.transport.call import Call, as_is
from bulltask.transport.endpoint import Endpoint, set_reply_deadline
from bulltask.transport.known_primary import Events, KnownPrimary
from bulltask.transport.sentinel_events import SentinelEvents
from bulltask.transport.steps import adrive, drive

__all__ = ["PrimaryLink", "refresh"]

TIMEOUT_MS: Final = 1_000
"""Timeout for each sentinel, so that one that is down does not delay a connection for long."""

CHECK_TIMEOUT_MS: Final = 500
"""Timeout for a sentinel that is asked whether the primary has changed; other calls wait until it replies."""

_FAILOVER_POLL_S: Final = 0.02


@dataclass(frozen=True, slots=True)
class Primary:
    """A primary as a sentinel reported it.

    Attributes:
        endpoint: The server.
        epoch: The configuration epoch; 0 if the sentinel's ACL does not permit reading it.
    """

    endpoint: Endpoint
    epoch: int


class PrimaryLink:
    """A client's link to the primary: finds it, and notices that another server has become the primary.

    Without sentinels, the server in the URL is always the primary.

    Args:
        endpoint: The client's endpoint.

    Attributes:
        url: The server, without its password, for errors.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self._endpoint, self._epoch, self.url = endpoint, 0, endpoint.safe_url

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
        """Raise the error for replies from a server that has been replaced: they are discarded.

        Raises:
            BrokerUnavailableError: Another server has become the primary.
        """
        if self.is_replaced():
            raise redis_errors.replaced_primary(self._endpoint.safe_url)

    def _is_outdated(self) -> bool:
        known = self._endpoint.primary
        return known is not None and (self._epoch < known.epoch or known.is_failing_over)

    def _check_wait(self, known: KnownPrimary, deadline_ms: int | None) -> None:
        """Raise an error if this process must not wait for the end of a failover, because others depend on it.

        Raises:
            BrokerNotReadyError: A failover is in progress.
        """
        if known.is_published or not known.reads_events or (deadline_ms is not None and mono_ms() >= deadline_ms):
            raise redis_errors.failover_in_progress(self._endpoint.safe_url)

    def _found(self, primary: Primary) -> Endpoint:
        self._epoch, self.url = primary.epoch, primary.endpoint.safe_url
        return primary.endpoint


_Answer = Primary | None  # None: the sentinel does not monitor a primary with this name
_Search = Generator[Endpoint, Any, Primary]
"""Yields sentinels; receives the raw replies to the queries, or has a ``BrokerError`` thrown into it."""


def resolve(endpoint: Endpoint, deadline_ms: int | None = None) -> Primary:
    """Return the primary that the sentinels report; see :meth:`PrimaryLink.find_server`."""
    return drive(
        _search(endpoint),
        lambda sentinel: _ask(_limited(sentinel, deadline_ms), endpoint.url.service_name),
        BrokerError,
    )


async def aresolve(endpoint: Endpoint, deadline_ms: int | None = None) -> Primary:
    """:func:`resolve` for asyncio."""
    return await adrive(
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


def _events(endpoint: Endpoint, known: KnownPrimary) -> Events:
    if known.events is None:
        queries = _queries(endpoint.url.service_name)
        known.events = SentinelEvents(endpoint, known, queries, partial(_observe, endpoint))
    return known.events


def _known(endpoint: Endpoint) -> KnownPrimary:
    assert endpoint.primary is not None, "only for Sentinel URLs"
    return endpoint.primary


def _observe(endpoint: Endpoint, address: Address, replies: Sequence[Any]) -> None:
    if (answer := _parse(endpoint, replies)) is not None:
        _known(endpoint).observe(answer.epoch, address, len(endpoint.seeds))


def _search(endpoint: Endpoint) -> _Search:
    """Ask the sentinels in order until one knows the primary, at the newest epoch that this process knows."""
    known = _known(endpoint)
    answers: list[_Answer] = []
    errors: list[BrokerError] = []
    for address in known.in_order(endpoint.seeds):
        try:
            replies = yield endpoint.sentinel_at(*address)
            answer = _parse(endpoint, replies)
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
        advice = (
            "" if "TLS" in str(auth) else ". For the sentinels, set sentinel_username and sentinel_password in the URL"
        )
        return BrokerAuthError(f"{auth}{advice}")
    return BrokerUnavailableError(f"no sentinel of {url} replied: {'; '.join(map(str, errors))}")


def _parse(endpoint: Endpoint, replies: Sequence[Any]) -> _Answer:
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
    set_reply_deadline(connection, now_ms + sentinel.command_timeout_ms, now_ms)
    try:
        connection.connect()
        connection.send_packed_command([_queries(name)], check_health=False)
        read = connection._parser.read_response  # noqa: SLF001 - as in Client
        return [read(disable_decoding=True) for _ in range(2)]
    except (*redis_errors.CONNECTION_ERRORS, ResponseError) as exc:
        raise _sentinel_error(exc, sentinel) from redis_errors.visible_cause(exc)
    finally:
        connection.disconnect()


async def _aask(sentinel: Endpoint, name: str) -> list[Any]:
    connection = sentinel.async_connection(None)
    try:
        async with loop_timers.timeout(sentinel.command_timeout_ms / 1000):
            await connection.connect()
            await connection.send_packed_command([_queries(name)], check_health=False)
            parser: Any = connection._parser  # noqa: SLF001 - as in AsyncClient
            return [await _read(parser) for _ in range(2)]
    except (*redis_errors.CONNECTION_ERRORS, TimeoutError, ResponseError) as exc:
        raise _sentinel_error(exc, sentinel) from redis_errors.visible_cause(exc)
    finally:
        with suppress(Exception):
            await connection.disconnect(nowait=True)


async def _read(parser: Any) -> Any:
    try:
        return await parser.read_response(disable_decoding=True)
    except redis_errors.ERROR_REPLIES as exc:
        return exc


def _sentinel_error(exc: BaseException, sentinel: Endpoint) -> BrokerError:
    error = redis_errors.connection_error(exc, sentinel.safe_url, connecting=False)
    if isinstance(error, BrokerUnavailableError):
        text = str(exc).rstrip(".") or "no reply in time"
        return BrokerUnavailableError(f"{sentinel.safe_url}: {text}{tls_hint(exc, sentinel.safe_url)}")
    return error
