"""URLs that can be shown: the password is taken out before anything is logged, raised or printed.

:class:`SecretUrl` is how bulltask itself holds the broker's URL; the functions are for texts of other origin.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

__all__ = [
    "TLS_CHOICES",
    "TLS_OPTIONS",
    "SecretUrl",
    "concealed",
    "redact_command",
    "redact_text",
    "redact_url",
    "secret_url",
    "tls_options",
]

HIDDEN = "***"
_SECRET_OPTION = re.compile(r"pass|pwd|secret|token|credential", re.IGNORECASE)
_BROKER = re.compile(r"redis|valkey|sentinel|unix", re.IGNORECASE)
_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*")
_FLAG = re.compile(r"--[a-z-]+=")
_WORD = re.compile(r"[^\s'\"]{2,}")
_WITH_OPTIONS = re.compile(r"([^/?#\[\]]*@)?([^/?#@:\[\]]+|\[[^\]@]*\])(:\d+)?(/\d*)?\?\w+=")  # and an @ behind these
_PLAIN_HOST = re.compile(r"(\[[^\]]*\]|[^:@\[\]]*)(:\d*)?")
_URL_IN_TEXT = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s<>\x1b]+")  # ESC starts a colour
_URL_IN_JSON = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*://[^\s\"<>\x1b]+")


TLS_OPTIONS = (
    "ssl_ca_certs",
    "ssl_ca_data",
    "ssl_ca_path",
    "ssl_cert_reqs",
    "ssl_certfile",
    "ssl_check_hostname",
    "ssl_ciphers",
    "ssl_keyfile",
    "ssl_min_version",
    "ssl_password",
)
"""What a broker URL may say about TLS, in the words of redis-py."""

TLS_CHOICES = {
    "ssl_cert_reqs": ("required", "optional", "none"),
    "ssl_check_hostname": ("true", "false", "1", "0", "yes", "no"),
}
"""Those of them that are one of some words; redis-py takes any other word for true."""


class _Opened(str):
    """A URL with its password, for drivers: an ordinary text but where a debugger or Sentry looks."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(redact_url(self))


class SecretUrl:
    """The URL of a server. It shows itself without its password, also in a debugger or in Sentry.

    Args:
        url: as the user typed it.
    """

    __slots__ = ("_shown", "_url")

    def __init__(self, url: str | SecretUrl) -> None:
        self._url: str = url.get_secret_value() if isinstance(url, SecretUrl) else url
        self._shown = redact_url(self._url)

    def get_secret_value(self) -> str:
        """The URL with its password, for whoever connects."""
        return _Opened(self._url)

    @property
    def scheme(self) -> str:
        """What stands before ``://``."""
        return self._url.partition("://")[0]

    @property
    def has_secret(self) -> bool:
        """True when something is hidden."""
        return self._shown != self._url

    @property
    def is_ambiguous(self) -> bool:
        """True when the password has a raw ``/``, ``?`` or ``#``: by the rules of URLs the host would end there."""
        scheme, _, rest = self._url.partition("://")
        login = rest.rpartition("@")[0]
        return scheme != "unix" and bool(set(login) & set("/?#[]")) and not _WITH_OPTIONS.match(rest)

    def hide_in(self, text: str) -> str:
        """Return ``text``, which a driver wrote about this URL, without words that only its hidden part has."""
        hidden = self._url[: _login_end(self.scheme, self._url)] if self.has_secret else ""
        return _WORD.sub(lambda word: HIDDEN if word[0] in hidden and word[0] not in self._shown else word[0], text)

    def at(self, place: str) -> SecretUrl:
        """The same with another host and port."""
        parts = urlsplit(self._url)
        login, mark, _ = parts.netloc.rpartition("@")
        return SecretUrl(parts._replace(netloc=f"{login}{mark}{place}").geturl())

    def __str__(self) -> str:
        return self._shown

    def __repr__(self) -> str:
        return repr(self._shown)

    def __eq__(self, other: object) -> bool:
        return self._url == (other._url if isinstance(other, SecretUrl) else other)

    def __hash__(self) -> int:
        return hash(self._url)


def secret_url(url: str | SecretUrl | None) -> SecretUrl | None:
    """Return a URL that hides its password, before anything can raise and show locals; what is no text, as it is."""
    return SecretUrl(url) if isinstance(url, str) else url


def concealed(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings by name, the broker's URL as :func:`secret_url` does."""
    return {
        name: SecretUrl(value) if name == "broker_url" and isinstance(value, str) else value
        for name, value in settings.items()
    }


def tls_options(url: SecretUrl) -> dict[str, str]:
    """Return the options of ``url`` that are about TLS, known ones or not; what is a secret is hidden."""
    pairs = parse_qsl(str(url).partition("?")[2], keep_blank_values=True)
    return {name: value for name, value in pairs if name.startswith("ssl_")}


def redact_url(url: str) -> str:
    """Return ``url`` with ``***`` for every password in it; the user, host and database stay readable.

    Made for URLs that people typed: it never raises, and a password with a raw ``/``, ``@``, ``?`` or ``#`` in it,
    which makes the URL invalid, is hidden as well. When in doubt it hides too much rather than too little.

    Args:
        url: a broker URL in any state, also one without its scheme; several ones with commas or semicolons between.
    """
    scheme, mark, rest = url.partition("://")
    if not _SCHEME.fullmatch(scheme):  # nothing before the mark that could be one: it is part of the password
        scheme, mark, rest = "", "", url
    login_ends = _login_end(scheme, rest)
    shown = rest
    if login_ends >= 0:
        user, colon, _ = rest[:login_ends].partition(":")
        # No colon: redis-py takes it for the user, but who writes redis://secret@host means a password.
        keep = f"{user}:" if colon and user and not set(user) & set("/?#@") else ""
        shown = f"{keep}{HIDDEN}{rest[login_ends:]}"
    path, question, query = shown.partition("?")
    return f"{scheme}{mark}{path}{question}{'&'.join(map(_redact_option, query.split('&')))}"


def redact_text(text: str, *, json: bool = False) -> str:
    """Return ``text`` with the password taken out of every URL in it, as `redact_url` does.

    Args:
        text: an error, a traceback, a log line; without a URL in it the call takes a tenth of a microsecond.
        json: a quote ends a URL, so that a line of JSON stays one; in other texts a password may contain a quote.
    """
    if "://" not in text:
        return text
    return (_URL_IN_JSON if json else _URL_IN_TEXT).sub(lambda found: redact_url(found[0]), text)


def redact_command(words: Iterable[str]) -> str:
    """Return a command line without the passwords of its URLs; a password may have spaces and quotes here."""
    parts = ((flag[0] if (flag := _FLAG.match(word)) else "", word) for word in words)
    shown = (f"{flag}{redact_url(word.removeprefix(flag))}" if "://" in word else word for flag, word in parts)
    return shlex.join(shown)


def _login_end(scheme: str, rest: str) -> int:
    """Index of the ``@`` that ends user and password, -1 when there is none."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if _BROKER.search(scheme) or not scheme or not _PLAIN_HOST.fullmatch(authority.rpartition("@")[2]):
        return rest.rfind("@")
    # https://example.org/@name is no login: elsewhere than in broker URLs only the authority counts.
    return authority.rfind("@")


def _redact_option(option: str) -> str:
    name, equals, _ = option.partition("=")
    return f"{name}={HIDDEN}" if equals and _SECRET_OPTION.search(unquote(name)) else option
