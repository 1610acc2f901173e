"""TLS: options of the URL, and advice when a handshake fails.

The options are redis-py's: ``rediss://host:6380/0?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE``.
"""

from __future__ import annotations

import os
import re
from typing import Any, Final

from bulltask.config.urls import SecretUrl, tls_options
from bulltask.errors import BrokerAuthError

__all__ = ["advice", "check_files", "defaults", "hint"]

_FILES: Final = ("ssl_ca_certs", "ssl_certfile", "ssl_keyfile", "ssl_ca_path")

_ENDED: Final = "reset by peer|closed by|EOF occurred|broken pipe"

_ADVICE: Final = tuple(
    (re.compile(pattern, re.IGNORECASE), text)
    for pattern, text in (
        (
            "Hostname mismatch|IP address mismatch",
            "Use a host name for which the certificate was issued, or add ssl_check_hostname=false to the URL",
        ),
        ("CERTIFICATE_VERIFY_FAILED.*expired", "The server needs a new certificate"),
        (
            "CERTIFICATE_VERIFY_FAILED",
            "The server's certificate is not signed by an authority that this machine trusts: add ssl_ca_certs=FILE "
            "to the URL, with the certificate of the authority that has signed it",
        ),
        (
            "ALERT_CERTIFICATE_REQUIRED|ALERT_HANDSHAKE_FAILURE",
            "The server requires a client certificate: add ssl_certfile=FILE and ssl_keyfile=FILE to the URL",
        ),
        (
            "ALERT_UNKNOWN_CA|ALERT_BAD_CERTIFICATE|ALERT_CERTIFICATE",
            "The server does not trust the certificate in ssl_certfile: use a valid one that is signed by the server's "
            "authority (tls-ca-cert-file)",
        ),
        (
            r"KEY_VALUES_MISMATCH|PEM lib|\bPEM\b.*NO_START_LINE|certfile should be",
            "ssl_certfile and ssl_keyfile must be a certificate and its key, both as PEM",
        ),
        ("NO_CERTIFICATE_OR_CRL_FOUND", "ssl_ca_certs must be a file with certificates, as PEM"),
        ("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE", "The port does not speak TLS: start the URL with redis://"),
    )
)


def advice(fault: BaseException) -> str | None:
    """Return what to do about a failed handshake; ``None`` for a fault that has nothing to do with certificates."""
    return next((text for pattern, text in _ADVICE if pattern.search(str(fault))), None)


def hint(fault: BaseException, url: str) -> str:
    """Return what else a connection that broke during the handshake may mean, ``""`` if unknown."""
    text = str(fault)
    # In TLS 1.3 the server checks a client's certificate after the handshake is over for the client, so its alert may
    # be lost when the connection is closed.
    if url.startswith("rediss://") and re.search("timeout|" + _ENDED, text, re.IGNORECASE):
        return ". Either the port does not speak TLS, or the server requires another client certificate (ssl_certfile)"
    if url.startswith("redis://") and re.search(_ENDED, text, re.IGNORECASE):
        return ". If the port speaks TLS, start the URL with rediss://"
    return ""


def check_files(url: SecretUrl) -> None:
    """Check that the files that the URL names can be read here.

    Raises:
        BrokerAuthError: one cannot. The drivers would report that no such server exists.
    """
    for name, path in tls_options(url).items():
        if name in _FILES and not os.access(path, os.R_OK):
            raise BrokerAuthError(
                f"no TLS connection to Redis at {url}: cannot read {path} ({name} in the URL). Every machine that "
                "connects needs the file at that path"
            )


def defaults(url: SecretUrl) -> dict[str, Any]:
    """Return options that the URL does not set, so that every version of redis-py behaves the same.

    redis-py 5 did not check whether the server's certificate was made for its name, and ignored a certificate that has
    its key in the same file.
    """
    given = tls_options(url)
    found: dict[str, Any] = {"ssl_check_hostname": given.get("ssl_cert_reqs") != "none"}
    if "ssl_certfile" in given:
        found["ssl_keyfile"] = given["ssl_certfile"]
    return found
