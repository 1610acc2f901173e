"""URLs with their password masked, for logs, errors and output.

bulltask holds the broker URL as a :class:`SecretUrl`; the functions redact text from other sources.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable
from typing import Literal
from urllib.parse import parse_qsl, quote, unquote, urlsplit

__all__ = [
    "SENTINEL_OPTIONS",
    "TLS_CHOICES",
    "TLS_OPTIONS",
    "TRUE_CHOICES",
    "Address",
    "Kind",
    "SecretUrl",
    "options_of",
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
_WITH_OPTIONS = re.compile(r"([^/?#\[\]]*@)?([^/?#@:\[\]]+|\[[^\]@]*\])(:\d+)?(/\d*)?\?\w+=")  # followed by an @
_PLAIN_HOST = re.compile(r"(\[[^\]]*\]|[^:@\[\]]*)(:\d*)?")
_HOST_AND_PORT = re.compile(r"(?P<host>\[[^\[\]@,]+\]|[^:\[\]@,\s]+)(:(?P<port>\d{1,5}))?", re.ASCII)
# From the start of a run of a scheme's characters: tried at each of its letters, a long run would take quadratic time.
_SCHEME_IN_TEXT = r"(?<![A-Za-z0-9+.-])([0-9+.-]*)([A-Za-z][A-Za-z0-9+.-]*://"
_URL_IN_TEXT = re.compile(_SCHEME_IN_TEXT + r"[^\s<>\x1b]+)")  # ESC begins a color code
_URL_IN_JSON = re.compile(_SCHEME_IN_TEXT + r"[^\s\"<>\x1b]+)")

Kind = Literal["single", "cluster", "sentinel"]
"""What a broker URL names: one server, nodes of a Redis Cluster, or sentinels that monitor a primary."""

Address = tuple[str, int]
"""Host and port."""

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
"""TLS options of a broker URL, with redis-py's names."""

SENTINEL_OPTIONS = ("sentinel_password", "sentinel_ssl", "sentinel_username")
"""Options of a Sentinel URL that apply to the connections to them, not to the primary."""

_BOOLEANS = ("true", "false", "1", "0", "yes", "no")
TRUE_CHOICES = _BOOLEANS[::2]
TLS_CHOICES = {
    "ssl_cert_reqs": ("required", "optional", "none"),
    "ssl_check_hostname": _BOOLEANS,
    "sentinel_ssl": _BOOLEANS,
}
"""TLS options with a fixed set of values; redis-py treats any other value as true."""


class _RevealedUrl(str):
    """A URL with its password, for drivers; its ``repr`` hides the password from debuggers and Sentry."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(redact_url(self))


class SecretUrl:
    """A server's URL that never shows its password, not even in a debugger or in Sentry.

    Args:
        url: The URL as the user wrote it.
    """

    __slots__ = ("_shown", "_url")

    def __init__(self, url: str | SecretUrl) -> None:
        self._url: str = url.get_secret_value() if isinstance(url, SecretUrl) else url
        self._shown = redact_url(self._url)

    def get_secret_value(self) -> str:
        """Return the URL with its password."""
        return _RevealedUrl(self._url)

    @property
    def scheme(self) -> str:
        """The part before ``://``."""
        return self._url.partition("://")[0]

    @property
    def has_secret(self) -> bool:
        """True if the URL has a password."""
        return self._shown != self._url

    @property
    def is_ambiguous(self) -> bool:
        """True if the password contains an unescaped ``/``, ``?`` or ``#``, which would end the host."""
        scheme, _, rest = self._url.partition("://")
        userinfo = rest.rpartition("@")[0]
        return scheme != "unix" and bool(set(userinfo) & set("/?#[]")) and not _WITH_OPTIONS.match(rest)

    def hide_in(self, text: str) -> str:
        """Return a driver's message about this URL, with words that occur only in the password masked."""
        hidden = self._url[: _userinfo_end(self.scheme, self._url)] if self.has_secret else ""
        return _WORD.sub(lambda word: HIDDEN if word[0] in hidden and word[0] not in self._shown else word[0], text)

    @property
    def kind(self) -> Kind:
        """What the URL names, according to its scheme: ``redis+cluster``, ``rediss+sentinel``."""
        suffix = self.scheme.partition("+")[2]
        return "cluster" if suffix == "cluster" else "sentinel" if suffix == "sentinel" else "single"

    @property
    def default_port(self) -> int:
        """The port of a host without one."""
        return 26379 if self.kind == "sentinel" else 6379

    @property
    def path(self) -> str:
        """The part between the hosts and the options: ``/0``, or ``/mymaster`` in a Sentinel URL."""
        _, slash, path = self._before_options.partition("/")
        return slash + path

    @property
    def hosts(self) -> tuple[Address, ...]:
        """The hosts and ports, in order; ``localhost`` if the URL of one server has none.

        Raises:
            ValueError: A part of the list is not a host and a port.
        """
        if self.kind == "single":
            parts = urlsplit(self._shown)
            return ((parts.hostname or "localhost", parts.port or self.default_port),)
        userinfo, _, hosts = self._before_options.partition("/")[0].rpartition("@")
        if "@" in userinfo or "," in userinfo.partition(":")[0]:
            raise ValueError("it has a second user (in a user or password, write @ as %40 and a comma as %2C)")
        return tuple(map(self._address, hosts.split(",")))

    @property
    def service_name(self) -> str:
        """The name in a Sentinel URL by which the sentinels monitor the primary, such as ``mymaster``."""
        return self.path.strip("/").partition("/")[0]

    def at(self, host_and_port: str) -> SecretUrl:
        """Return the URL of one server: the same user, database and options, with this host and port."""
        if self.kind == "single":
            parts = urlsplit(self._url)
            userinfo, separator, _ = parts.netloc.rpartition("@")
            return SecretUrl(parts._replace(netloc=f"{userinfo}{separator}{host_and_port}").geturl())
        userinfo, separator, _ = self._before_options.partition("/")[0].rpartition("@")
        _, slash, database = self.path.strip("/").partition("/")
        path = slash + database if self.kind == "sentinel" else ""
        base, query = self.scheme.partition("+")[0], self._query(lambda name: not name.startswith("sentinel_"))
        return SecretUrl(f"{base}://{userinfo}{separator}{host_and_port}{path}{query}")

    def sentinel_at(self, host_and_port: str) -> SecretUrl:
        """Return the URL of one of the sentinels, with their own user and password.

        They use TLS, with the same options, if the primary does, unless the option ``sentinel_ssl`` is false.
        """
        given = dict(parse_qsl(self._url.partition("?")[2]))
        user, password = given.get("sentinel_username", ""), given.get("sentinel_password")
        userinfo = "" if password is None else f"{quote(user, safe='')}:{quote(password, safe='')}@"
        if self.scheme.startswith("rediss") and given.get("sentinel_ssl", "true") in TRUE_CHOICES:
            query = self._query(lambda name: name.startswith("ssl_"))
            return SecretUrl(f"rediss://{userinfo}{host_and_port}{query}")
        return SecretUrl(f"redis://{userinfo}{host_and_port}")

    @property
    def _before_options(self) -> str:
        return self._url.partition("://")[2].partition("?")[0]

    def _query(self, has: Callable[[str], bool]) -> str:
        options = filter(None, self._url.partition("?")[2].split("&"))
        query = "&".join(option for option in options if has(unquote(option.partition("=")[0])))
        return f"?{query}" if query else ""

    def _address(self, host_and_port: str) -> Address:
        match = _HOST_AND_PORT.fullmatch(host_and_port)
        port = int((match and match["port"]) or self.default_port)
        if match is None or not 1 <= port <= 65535:
            raise ValueError(f"{host_and_port!r:.200} is not a host and a port from 1 to 65535")
        return match["host"].strip("[]"), port

    @property
    def user(self) -> str:
        """The user, ``""`` if there is none."""
        return unquote(urlsplit(self._url).username or "")

    @property
    def has_password(self) -> bool:
        """True if the URL has a password of Redis."""
        parts = urlsplit(self._url)
        return bool(parts.password) or "password" in dict(parse_qsl(parts.query))

    def without_user(self) -> SecretUrl:
        """Return the same URL without user and password."""
        parts = urlsplit(self._url)
        return SecretUrl(parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl())

    def __str__(self) -> str:
        return self._shown

    def __format__(self, spec: str) -> str:
        return format(self._shown, spec)

    def __repr__(self) -> str:
        return repr(self._shown)

    def __eq__(self, other: object) -> bool:
        return self._url == (other._url if isinstance(other, SecretUrl) else other)

    def __hash__(self) -> int:
        return hash(self._url)


def secret_url(url: str | SecretUrl | None) -> SecretUrl | None:
    """Wrap a URL early, before an error can show local variables; return anything but a string unchanged."""
    return SecretUrl(url) if isinstance(url, str) else url


def tls_options(url: SecretUrl) -> dict[str, str]:
    """Return the options of ``url`` that begin with ``ssl_``, known or not, with secrets redacted."""
    return options_of(url, "ssl_")


def options_of(url: SecretUrl, prefix: str) -> dict[str, str]:
    """Return the options of ``url`` that begin with ``prefix``, known or not, with secrets redacted."""
    pairs = parse_qsl(str(url).partition("?")[2], keep_blank_values=True)
    return {name: value for name, value in pairs if name.startswith(prefix)}


def redact_url(url: str) -> str:
    """Return ``url`` with ``***`` for every password in it; the user, host and database stay readable.

    It never raises. It also hides a password with an unescaped ``/``, ``@``, ``?`` or ``#``, which makes the URL
    invalid. When in doubt, it hides too much rather than too little.

    Args:
        url: A broker URL, valid or not, with or without a scheme; or several, separated by commas or semicolons.
    """
    scheme, separator, rest = url.partition("://")
    if not _SCHEME.fullmatch(scheme):  # not a scheme: it is part of the password
        scheme, separator, rest = "", "", url
    userinfo_ends = _userinfo_end(scheme, rest)
    shown = rest
    if userinfo_ends >= 0:
        user, colon, _ = rest[:userinfo_ends].partition(":")
        # Without a colon, redis-py treats it as the user, but redis://secret@host usually means a password.
        keep = f"{user}:" if colon and user and not set(user) & set("/?#@") else ""
        shown = f"{keep}{HIDDEN}{rest[userinfo_ends:]}"
    path, question, query = shown.partition("?")
    return f"{scheme}{separator}{path}{question}{'&'.join(map(_redact_option, query.split('&')))}"


def redact_text(text: str, *, json: bool = False) -> str:
    """Return ``text`` with the passwords of all URLs in it redacted, as by :func:`redact_url`.

    Args:
        text: An error, a traceback, a log line; without a URL in it the call takes a tenth of a microsecond.
        json: A quote ends a URL, so that a line of JSON stays valid; elsewhere, a password may contain quotes.
    """
    if "://" not in text:
        return text
    return (_URL_IN_JSON if json else _URL_IN_TEXT).sub(lambda match: match[1] + redact_url(match[2]), text)


def redact_command(words: Iterable[str]) -> str:
    """Return a command line with the passwords of its URLs redacted; passwords may contain spaces and quotes."""
    parts = ((flag[0] if (flag := _FLAG.match(word)) else "", word) for word in words)
    shown = (f"{flag}{redact_url(word.removeprefix(flag))}" if "://" in word else word for flag, word in parts)
    return shlex.join(shown)


def _userinfo_end(scheme: str, rest: str) -> int:
    """Return the index of the ``@`` after user and password, -1 if there is none."""
    authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
    if _BROKER.search(scheme) or not scheme or not _PLAIN_HOST.fullmatch(authority.rpartition("@")[2]):
        return rest.rfind("@")
    # https://example.org/@name has no userinfo: in URLs other than broker URLs, only the authority counts.
    return authority.rfind("@")


def _redact_option(option: str) -> str:
    name, equals, _ = option.partition("=")
    return f"{name}={HIDDEN}" if equals and _SECRET_OPTION.search(unquote(name)) else option
