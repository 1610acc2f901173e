"""TLS: what the URL says about it, and what to do when a handshake fails.

The words are redis-py's: ``rediss://host:6380/0?ssl_ca_certs=FILE&ssl_certfile=FILE&ssl_keyfile=FILE``.
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
            "Connect by a name for which its certificate was made, or add ssl_check_hostname=false to the URL",
        ),
        ("CERTIFICATE_VERIFY_FAILED.*expired", "The server needs a new certificate"),
        (
            "CERTIFICATE_VERIFY_FAILED",
            "Nobody who is trusted here has signed the server's certificate: add ssl_ca_certs=FILE to the URL, with "
            "the certificate of the authority that has",
        ),
        (
            "ALERT_CERTIFICATE_REQUIRED|ALERT_HANDSHAKE_FAILURE",
            "The server wants a certificate from its clients: add ssl_certfile=FILE and ssl_keyfile=FILE to the URL",
        ),
        (
            "ALERT_UNKNOWN_CA|ALERT_BAD_CERTIFICATE|ALERT_CERTIFICATE",
            "The server does not trust the certificate in ssl_certfile: take one that its authority (tls-ca-cert-file) "
            "has signed and that is still valid",
        ),
        (
            r"KEY_VALUES_MISMATCH|PEM lib|\bPEM\b.*NO_START_LINE|certfile should be",
            "ssl_certfile and ssl_keyfile must be a certificate and its own key, both as PEM",
        ),
        ("NO_CERTIFICATE_OR_CRL_FOUND", "ssl_ca_certs must be a file with certificates, as PEM"),
        ("WRONG_VERSION_NUMBER|RECORD_LAYER_FAILURE", "That port does not speak TLS: begin the URL with redis://"),
    )
)


def advice(fault: BaseException) -> str | None:
    """What to do about a handshake that failed; ``None`` for a fault that has nothing to do with certificates."""
    return next((text for pattern, text in _ADVICE if pattern.search(str(fault))), None)


def hint(fault: BaseException, url: str) -> str:
    """What else a connection that broke while it was made may mean; ``""`` when nothing can be said."""
    text = str(fault)
    # In TLS 1.3 the server judges a client's certificate when the handshake is over for the client: what it says may be
    # overtaken by the end of the connection.
    if url.startswith("rediss://") and re.search("timeout|" + _ENDED, text, re.IGNORECASE):
        return ". A port without TLS answers like this, and a server that wants another certificate (ssl_certfile)"
    if url.startswith("redis://") and re.search(_ENDED, text, re.IGNORECASE):
        return ". If that port speaks TLS, begin the URL with rediss://"
    return ""


def check_files(url: SecretUrl) -> None:
    """Look whether the files that the URL names can be read here.

    Raises:
        BrokerAuthError: one cannot. The drivers would say that no such server exists.
    """
    for name, path in tls_options(url).items():
        if name in _FILES and not os.access(path, os.R_OK):
            raise BrokerAuthError(
                f"no TLS connection to Redis at {url}: {path} ({name} in the URL) cannot be read. Each "
                "machine that connects needs the file at that place"
            )


def defaults(url: SecretUrl) -> dict[str, Any]:
    """What is meant where the URL does not say it, with every redis-py.

    redis-py 5 did not look whether the server's certificate was made for its name, and left a certificate out that has
    its key in the same file.
    """
    said = tls_options(url)
    meant: dict[str, Any] = {"ssl_check_hostname": said.get("ssl_cert_reqs") != "none"}
    if "ssl_certfile" in said:
        meant["ssl_keyfile"] = said["ssl_certfile"]
    return meant
