"""The parser of ``broker_url``: checks a URL before anything connects, because redis-py ignores most mistakes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import parse_qs, parse_qsl, urlsplit

from bulltask.config.urls import (
    SENTINEL_OPTIONS,
    TLS_CHOICES,
    TLS_OPTIONS,
    TRUE_CHOICES,
    SecretUrl,
    options_of,
    tls_options,
)
from bulltask.errors import ConfigError, did_you_mean

__all__ = ["URL_SCHEMES", "url"]

URL_SCHEMES: Final = (
    "redis://",
    "rediss://",
    "redis+cluster://",
    "rediss+cluster://",
    "redis+sentinel://",
    "rediss+sentinel://",
    "unix://",
    "embedded://",
)
"""The beginnings of valid URLs."""

_NUMBER: Final = re.compile(r"\d+", re.ASCII)
_DATABASE: Final = re.compile(r"(/(\d+/?)?)?", re.ASCII)
_NO_DATABASE: Final = re.compile(r"/?|/0/?")
_SERVICE_PATH: Final = re.compile(r"/[A-Za-z0-9._-]+(/(\d+/?)?)?", re.ASCII)


def url(value: Any, name: str) -> SecretUrl:
    """Return the URL of a server; its password appears neither in messages nor in the value's ``repr``.

    Raises:
        ConfigError: The value is invalid; ``name`` identifies it in the message.
    """
    value = SecretUrl(value) if isinstance(value, str) else value
    if isinstance(value, SecretUrl) and value.scheme == "sentinel":
        raise ConfigError(_celery_sentinels(value, name))
    if not isinstance(value, SecretUrl) or not value.get_secret_value().startswith(URL_SCHEMES):
        shown = str(value) or "empty" if isinstance(value, SecretUrl) else repr(value)
        raise ConfigError(f"{name} must start with {', '.join(URL_SCHEMES)}, not {shown:.200}")
    if value.is_ambiguous:
        raise ConfigError(
            f"{name} {value:.200} is invalid: in its user and password, write / as %2F, ? as %3F, # as %23, @ as %40, "
            "[ as %5B and ] as %5D"
        )
    if value.kind == "single":
        _check_address(value, name)
    else:
        _check_hosts(value, name)
    _check_database_option(value, name)
    _check_tls(value, name)
    return value


def _celery_sentinels(value: SecretUrl, name: str) -> str:
    """Return the error for Celery's Sentinel URLs, with the URL to write instead."""
    hosts = "host1:26379,host2:26379"
    user = "user:password@" if value.has_secret else ""
    if not value.has_secret:  # otherwise, a ; in a password would look like the end of a URL
        urls = value.get_secret_value().split(";")
        hosts = ",".join(part.rpartition("://")[2].partition("/")[0] for part in urls)
    return (
        f"{name} {value:.200} has Celery's form; write redis+sentinel://{user}{hosts:.200}/MASTER?db=0, where MASTER "
        "is the master_name in broker_transport_options. A password in sentinel_kwargs becomes the option "
        "&sentinel_password=…, and TLS needs rediss+sentinel://"
    )


def _check_address(value: SecretUrl, name: str) -> None:
    """Check host, port and database, because redis-py silently uses database 0 if it cannot read the number."""
    try:
        parts = urlsplit(str(value))
        port = parts.port
    except ValueError:
        parts, port = urlsplit(""), 0
    if value.scheme in {"redis", "rediss"}:
        if port == 0:
            raise ConfigError(f"{name} must have a host, and a port from 1 to 65535 (default: 6379), not {value:.200}")
        if not _DATABASE.fullmatch(parts.path):
            raise ConfigError(
                f"the database in {name} must be a number, as in redis://host:6379/0 (default: 0), not {value:.200}"
            )


def _check_hosts(value: SecretUrl, name: str) -> None:
    """Check the hosts of a cluster or of sentinels, and what follows them."""
    try:
        hosts = value.hosts
    except ValueError as exc:
        raise ConfigError(
            f"{name} must list hosts separated by commas, as in {value.scheme}://host1:{value.default_port},host2, "
            f"after one user and password for all, not {value:.200}: {exc}"
        ) from None
    first, port = hosts[0]
    if value.kind == "cluster":
        if not _NO_DATABASE.fullmatch(value.path):
            raise ConfigError(
                f"{name} must have no database: bulltask uses database 0 of a cluster. Remove it from {value:.200}"
            )
    elif not _SERVICE_PATH.fullmatch(value.path):
        raise ConfigError(
            f"{name} must contain the name of the primary that the sentinels monitor, as in "
            f"{value.scheme}://{first}:{port}/mymaster?db=0, not {value:.200}"
        )


def _check_database_option(value: SecretUrl, name: str) -> None:
    query = str(value).partition("?")[2]
    for number in parse_qs(query, keep_blank_values=True).get("db", ()):
        if not _NUMBER.fullmatch(number):
            raise ConfigError(f"db in {name} must be a database number, not {value:.200}")
        if value.kind == "cluster" and int(number):
            raise ConfigError(
                f"{name} must have no database: bulltask uses database 0 of a cluster. Remove it from {value:.200}"
            )


def _check_tls(value: SecretUrl, name: str) -> None:
    """Check the options of TLS and of sentinels, because a misspelled option would otherwise be ignored silently."""
    given, sentinels = tls_options(value), options_of(value, "sentinel_")
    tls_only = [*given, *("sentinel_ssl" for option in sentinels if option == "sentinel_ssl")]
    if tls_only and not value.scheme.startswith("rediss"):
        secure = value.scheme.replace("redis", "rediss") if value.scheme.startswith("redis") else "rediss"
        raise ConfigError(f"{name} must start with {secure}:// to use the TLS option {min(tls_only)}, not {value:.200}")
    allowed_options = TLS_OPTIONS + (SENTINEL_OPTIONS if value.kind == "sentinel" else ())
    for option in (*given, *sentinels):
        if option not in allowed_options:
            raise ConfigError(
                f"{name} {value:.200} has an unknown option {option:.100}{did_you_mean(option, allowed_options)}"
            )
    for option, allowed in TLS_CHOICES.items():
        if (given | sentinels).get(option, allowed[0]) not in allowed:
            shown = (given | sentinels)[option]
            raise ConfigError(f"{option} in {name} must be one of {', '.join(allowed)}, not {shown!r:.200}")
    _check_verification(value, given, name)
    if "ssl_keyfile" in given and "ssl_certfile" not in given:
        raise ConfigError(f"{name} {value:.200} has ssl_keyfile without ssl_certfile")
    if "sentinel_username" in sentinels and "sentinel_password" not in sentinels:
        raise ConfigError(f"{name} {value:.200} has sentinel_username without sentinel_password")


def _check_verification(value: SecretUrl, given: Mapping[str, str], name: str) -> None:
    """Check that the server's certificate is verified if the URL seems to say so."""
    options = [option for option, _ in parse_qsl(str(value).partition("?")[2], keep_blank_values=True)]
    if twice := [option for option in TLS_OPTIONS if options.count(option) > 1]:  # redis-py uses the first one
        raise ConfigError(f"{name} {value:.200} has the option {twice[0]} twice")
    if given.get("ssl_cert_reqs") == "none" and given.get("ssl_check_hostname") in TRUE_CHOICES:
        raise ConfigError(
            f"{name} {value:.200} has ssl_cert_reqs=none, with which nothing is checked, and ssl_check_hostname: "
            "remove one of them"
        )
