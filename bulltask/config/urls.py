"""The broker's URL: how it is hidden in logs and errors, checked, and supplied with a password that changes.

bulltask holds the URL as a :class:`SecretUrl`, the parser :func:`url` checks it before anything connects, and
:class:`Credentials` is the setting ``broker_credential_provider``. An invalid setting raises ``ConfigError``. The
functions ``redact_…`` hide the passwords in texts from elsewhere.
"""

from __future__ import annotations

import inspect
import re
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any, Final, Literal, cast
from urllib.parse import parse_qs, parse_qsl, quote, unquote, urlsplit

from bulltask.jobs.errors import BrokerAuthError, BrokerUnavailableError, ConfigError, did_you_mean

__all__ = [
    "HIDDEN",
    "Address",
    "Credentials",
    "Kind",
    "SecretUrl",
    "credential_provider",
    "redact_command",
    "redact_secrets",
    "redact_text",
    "redact_url",
    "secret_url",
    "tls_options",
    "url",
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

_SECRET_WORD = re.compile(
    r"pass(?:wo?r?d|phrase|code|(?![a-z]))|pwd|secret|token|credential|api[-_]?key|authorization", re.IGNORECASE
)
# Such a name, = or :, and the value. Bounded, and tried only at the beginning of a word.
_SECRET_IN_TEXT = re.compile(
    rf"(?<![\w-])([\w-]{{0,40}}?(?:{_SECRET_WORD.pattern})[\w-]{{0,40}}[\\\"']{{0,4}}\s{{0,4}}[=:]\s{{0,4}}"
    r"(?:(?:basic|bearer)\s{1,4})?)"
    r"""("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|[^\s,;&]+)""",
    re.IGNORECASE,
)
# What is a secret by its form: AWS' key ids, with the secret key after them, tokens of GitHub, GitLab, Slack, Stripe,
# OpenAI and Google, JSON Web Tokens, and private keys, also without their end.
_SECRET_BY_FORM = re.compile(
    r"(?<![A-Za-z0-9])A[KS]IA[A-Z0-9]{16}(?:[\s:,/]{1,4}[A-Za-z0-9/+]{40}(?![A-Za-z0-9/+]))?"
    r"|(?<![A-Za-z0-9])(?:gh[oprsu]_|github_pat_|glpat-|xox[abeprs]-|[rs]k[-_]|AIza)[\w-]{16,255}"
    r"|(?<![A-Za-z0-9])eyJ[\w-]{8,4096}\.[\w-]{8,4096}(?:\.[\w-]{0,4096})?"
    r"|-----BEGIN [A-Z ]{0,40}PRIVATE KEY-----[^-]{0,20000}(?:-----END[A-Z -]{0,60}(?<=[A-Z-]))?"
)
# Secrets after an option of a command, such as --password; not after "--password is required".
_SECRET_OPTION_IN_TEXT = re.compile(
    rf"((?<![\w-])--[\w-]{{0,40}}?(?:{_SECRET_WORD.pattern})[\w-]{{0,40}}\s)"
    r"(?!-|(?:is|was|must|has|or|and|needs?|cannot|to|for|not|in|the|requires?|options?|arguments?|flags?)\b)"
    r"[^\s,;&\"']+",
    re.IGNORECASE,
)
_COOKIE = re.compile(r"(\bcookie[\\\"']{0,4}:\s{0,4}[\"']?)[^\s=;\"']{1,40}=[^\r\n\"']*", re.IGNORECASE)
_SECRET_OF_COMMAND = re.compile(
    r"(\b(?:mysql|mariadb|sshpass|redis-cli|valkey-cli)[\w-]{0,20}(?=\s)[^\r\n|;]{0,200}?\s-(?:p|a\s))\s?[^\s\"']+"
)
# In lower case. A text without them, which most are, is not searched further: this takes a microsecond.
_MARKS_OF_SECRETS = (
    *("pass", "pwd", "secret", "token", "credential", "api", "authorization", "cookie", "akia", "asia", "gho_", "ghp_"),
    *("ghr_", "ghs_", "ghu_", "github_pat_", "glpat-", "xox", "sk-", "sk_", "rk-", "rk_", "aiza", "eyj", "private key"),
    *("mysql", "mariadb", "-cli"),
)

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
    """A server's URL that never shows its password, not even in a debugger or in Sentry."""

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

    @property
    def database(self) -> int:
        """The number of the database."""
        path = "" if self.scheme == "unix" else self.path.strip("/")
        named = path.partition("/")[2] if self.kind == "sentinel" else path
        number = dict(parse_qsl(self._url.partition("?")[2])).get("db", named)
        return int(number) if number.isdecimal() else 0

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
    invalid. When in doubt, it hides too much rather than too little. ``url`` need not have a scheme, and may be several
    URLs, separated by commas or semicolons.
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

    Without a URL in the text, the call takes a tenth of a microsecond. With ``json``, a quote ends a URL, so that a
    line of JSON stays valid; elsewhere, a password may contain quotes.
    """
    if "://" not in text:
        return text
    return (_URL_IN_JSON if json else _URL_IN_TEXT).sub(lambda match: match[1] + redact_url(match[2]), text)


def redact_secrets(text: str) -> str:
    """Return a text of others, such as an error, with what looks like a secret hidden.

    That are passwords of URLs, values like ``token=…`` or ``--password …``, cookies, well-known forms of keys and
    tokens, and private keys.
    """
    shown = redact_text(text)
    lower = shown.lower()
    if not any(mark in lower for mark in _MARKS_OF_SECRETS):
        return shown
    for pattern in (_COOKIE, _SECRET_OPTION_IN_TEXT, _SECRET_OF_COMMAND):
        shown = pattern.sub(rf"\1{HIDDEN}", shown)
    return _SECRET_BY_FORM.sub(HIDDEN, _SECRET_IN_TEXT.sub(_hide_value, shown))


def _hide_value(match: re.Match[str]) -> str:
    value = match[2]
    if value[0] in "\"'":
        return f"{match[1]}{value[0]}{HIDDEN}{value[0]}"
    rest = value.rstrip(")]}")  # KeyError('password=…') keeps what ends its text
    end = value[len(rest) - 1 :] if rest.endswith(('"', "'")) else ""
    return f"{match[1]}{HIDDEN}{end}"


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
    """Return the URL of a server; its password appears neither in messages nor in the value's ``repr``."""
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


_SETTING: Final = "broker_credential_provider"
_NAME: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_FILE: Final = "file://"


class Credentials:
    """Reads the user and password for each new connection, so that they can change while the process is running.

    Args:
        source: One of the following: an object with redis-py's ``get_credentials()``, or its class; a function; the
            name of one of these, ``"module:attribute"``, which is imported on first use; ``"file:///path"`` of a file
            that contains a password. A function or ``get_credentials()`` returns a password, or a user and a password.
    """

    __slots__ = ("_source",)

    def __init__(self, source: Any) -> None:
        self._source = source

    def read(self, user: str) -> tuple[str, ...]:
        """Return the arguments of ``AUTH``: a password, or a user and a password.

        ``user`` is that of the URL, for a source that returns only a password; ``""`` if there is none.

        Raises:
            ConfigError: The source cannot be imported.
            BrokerAuthError: The file cannot be read, or the source returned something else.
            BrokerUnavailableError: The source raised an error. A later attempt may succeed.
        """
        source = self._source
        if isinstance(source, str) and source.startswith(_FILE):
            return _named(user, _read_file(_path(source)))
        if isinstance(source, str):
            source = self._source = _imported(source)
        if isinstance(source, type):
            source = self._source = source()
        call: Callable[[], object] = getattr(source, "get_credentials", source)
        try:
            found = call()
        except Exception as exc:
            raise BrokerUnavailableError(
                f"cannot connect to Redis: {_SETTING} raised {type(exc).__name__}: {exc}"
            ) from exc
        return _checked(found, user)

    def __repr__(self) -> str:
        return "<Credentials>"


def credential_provider(value: Any, name: str) -> Credentials:
    """Return the credentials in a setting; errors do not show the value."""
    if isinstance(value, str):
        is_valid = bool(_NAME.fullmatch(value)) or (value.startswith(_FILE) and _path(value).is_absolute())
    else:
        is_valid = callable(getattr(value, "get_credentials", value))
    if not is_valid:
        raise ConfigError(
            f"{name} must be a credential provider, a function, 'module:attribute' or 'file:///path', "
            f"not {type(value).__name__}"
        )
    return Credentials(value)


def _path(url: str) -> Path:
    return Path(unquote(urlsplit(url).path))


def _read_file(path: Path) -> str:
    try:
        return path.read_text().removesuffix("\n").removesuffix("\r")
    except (OSError, UnicodeDecodeError) as exc:
        raise _rejected(f"cannot read the password in {path} ({_SETTING}): {exc}") from exc


def _imported(name: str) -> Any:
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as exc:
        raise ConfigError(f"cannot import {_SETTING} {name!r:.200}: {exc}") from exc


def _checked(found: object, user: str) -> tuple[str, ...]:
    words = (found,) if isinstance(found, str) else found
    if inspect.iscoroutine(found):
        found.close()
    if (
        not isinstance(words, Sequence)
        or len(words) not in {1, 2}
        or not all(word and isinstance(word, str) for word in words)
    ):
        raise _rejected(
            f"{_SETTING} returned {type(found).__name__}; it must return a password, or a user and a password, and "
            "must not be async"
        )
    return cast("tuple[str, str]", tuple(words)) if len(words) == 2 else _named(user, words[0])


def _named(user: str, password: str) -> tuple[str, ...]:
    return (user, password) if user else (password,)


def _rejected(message: str) -> BrokerAuthError:
    error = BrokerAuthError(message)
    error.handshake_failed = True
    return error
