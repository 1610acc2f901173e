"""Advice in error messages about permissions (ACL) and TLS."""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import unquote, urlsplit

__all__ = ["acl_advice", "password_advice", "rejected_command", "tls_advice", "tls_hint", "user_of"]

_COMMAND: Final = re.compile(r"no permissions to run the '([^']+)' command")
_KEYS: Final = re.compile(r"permissions to access (a key|one of the keys)|can't access at least one of the keys")
_WRONG_PASSWORD: Final = re.compile(r"WRONGPASS|invalid (username-password pair|password)")
_NO_PASSWORD: Final = re.compile(
    r"NOAUTH|^Authentication required|HELLO must be called with the client already authenti"
)
_PASSWORD_UNUSED: Final = re.compile(r"AUTH[^\n]{0,200} called without any password configured")
_SOURCES: Final = "broker_url (redis://user:password@host) or, for passwords that change, broker_credential_provider"
_IN_SCRIPT: Final = re.compile(r"user executing the script can't run")

_CONNECTION_ENDED: Final = "reset by peer|closed by|EOF occurred|broken pipe"

_TLS_ADVICE: Final = tuple(
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


def acl_advice(text: str, url: str) -> str:
    """Return the advice for a rejected command; ``""`` if the ACL did not reject it.

    Args:
        text: The server's message.
        url: The server, without its password.
    """
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
    if _IN_SCRIPT.search(text):
        return (
            ". The user also needs permission for the commands inside scripts: grant all that it needs "
            "(bulltask.spark.acl for Spark; `bulltask acl ROLE` for other programs)"
        )
    return ""


def password_advice(text: str, url: str) -> str:
    """Return the advice for a missing or wrong password; ``""`` for any other error.

    Args:
        text: The server's message.
        url: The server, without its password.
    """
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


def tls_advice(exc: BaseException) -> str | None:
    """Return the advice for a failed TLS handshake; ``None`` for any other error."""
    return next((text for pattern, text in _TLS_ADVICE if pattern.search(str(exc))), None)


def tls_hint(exc: BaseException, url: str) -> str:
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
