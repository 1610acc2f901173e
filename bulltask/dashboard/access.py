"""Who may use the dashboard, and for what: logins and their rate limit, roles, CSRF protection, and the audit log.

One function, :meth:`Access.may`, decides what a user may do: routes ask it before they act, and templates before they
show a button.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import logging
import re
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import cached_property, lru_cache
from time import time
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import HTTPConnection, Request

from bulltask.app import App
from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import BulltaskError, ConfigError
from bulltask.lake.formatting import one_line
from bulltask.observe.http_requests import host_of
from bulltask.transport.call import Call, command, dashboard_audit, text, texts_by_name
from bulltask.transport.streams import id_parts

__all__ = [
    "ACTIONS",
    "VIEWS",
    "Access",
    "Audit",
    "AuditEntry",
    "Role",
    "SecurityHeaders",
    "TooManyGuesses",
    "User",
    "client_address",
]

SESSION_S: Final = 12 * 3_600

MIN_PASSWORD: Final = 8
_RANDOM: Final = 24
"""A secret of this length cannot be guessed, so it logs in even while an address is blocked."""
_GUESSES: Final = 5
_ALL_GUESSES: Final = 50
_GUESSES_S: Final = 60.0


class Role(IntEnum):
    """What a user may do; each role includes those before it."""

    VIEWER = 1
    """See everything but the audit log."""
    OPERATOR = 2
    """Change what runs: retry, promote, revoke and run jobs, pause queues and schedules, control workers."""
    ADMIN = 3
    """Delete jobs and queues, and read the audit log."""


ACTIONS: Final[Mapping[str, Role]] = {
    "retry": Role.OPERATOR,
    "promote": Role.OPERATOR,
    "revoke": Role.OPERATOR,
    "pause": Role.OPERATOR,
    "resume": Role.OPERATOR,
    "limit": Role.OPERATOR,
    "stop": Role.OPERATOR,
    "run": Role.OPERATOR,
    "control": Role.OPERATOR,
    "remove": Role.ADMIN,
}
"""Which role an action needs."""

VIEWS: Final[Mapping[str, Role]] = {"audit": Role.ADMIN}
"""Pages that not everybody may see, and the role that they need."""


@dataclass(frozen=True, slots=True)
class User:
    """Who sends a request.

    Attributes:
        name: The name that the proxy gives; ``token`` or ``password`` for a login; ``anonymous``.
        role: What the user may do.
        session: The id of the login; ``""`` for others.
    """

    name: str
    role: Role
    session: str = ""


class TooManyGuesses(Exception):
    """An address, or all together, have tried too many wrong passwords in the last minute."""


@dataclass(kw_only=True)
class Access:
    """How users are known, and what they may do. At least one of the first three, or ``anonymous``, is needed.

    Attributes:
        token: A random secret, which logs in as the user ``token``.
        password: A password of at least 8 characters, which logs in as the user ``password``.
        user_header: A header with the user's name, which a proxy sets (``X-Forwarded-User``), and removes from what
            browsers send. It is trusted only if the request comes from one of ``proxies``.
        proxies: Addresses or networks of proxies. Their headers ``X-Forwarded-For``, ``-Proto``, ``-Host`` and
            ``-Prefix`` are trusted, too.
        roles: Roles of users by their names; ``"*"`` for all others of the proxy (default: viewers). ``token`` and
            ``password`` are admins unless named here.
        anonymous: The role of users who have not logged in; ``None``: they must.
        read_only: Whether all changes are rejected.
        hosts: The names by which browsers may address the dashboard, without ports; ``None``: any. Without a login,
            they protect from web pages whose host name resolves to an address of this network.
        secret: A random text that signs sessions and forms; needed if several processes serve users of a proxy.
    """

    token: str | None = field(default=None, repr=False)
    password: str | None = field(default=None, repr=False)
    user_header: str | None = None
    proxies: Sequence[str] = ()
    roles: Mapping[str, Role] = field(default_factory=dict)
    anonymous: Role | None = None
    read_only: bool = False
    hosts: Sequence[str] | None = None
    secret: str | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not (self.token or self.password or self.user_header or self.anonymous):
            raise ConfigError("the dashboard needs a token, a password or user_header, or anonymous=Role.VIEWER")
        if self.password and len(self.password) < MIN_PASSWORD:
            raise ConfigError(f"the dashboard's password needs at least {MIN_PASSWORD} characters")
        if self.user_header and not self.proxies:
            raise ConfigError(f"user_header={self.user_header!r} needs the proxies that set this header: proxies=[…]")
        try:
            self._networks = tuple(map(ipaddress.ip_network, self.proxies))
        except ValueError as exc:
            raise ConfigError(f"proxies must be addresses or networks: {exc}") from exc
        self._guesses: dict[str, deque[float]] = {}
        self._ended: dict[str, float] = {}

    def may(self, user: User | None, action: str) -> bool:
        """Return whether a user may do something, one of :data:`ACTIONS`, or see one of :data:`VIEWS`."""
        if user is None:
            return False
        if action in VIEWS:
            return user.role >= VIEWS[action]
        return not self.read_only and user.role >= ACTIONS[action]

    # ---- requests through proxies ----

    def as_sent(self, scope: Mapping[str, Any], path: str = "") -> dict[str, Any]:
        """Return a request as the browser has sent it: its address, scheme, host and path, if a proxy tells them.

        ``path`` is the dashboard's path at the proxy, which the proxy may have removed or not.
        """
        sent = {**scope, _IS_PROXIED: self._is_proxy(scope["client"][0] if scope.get("client") else "")}
        if sent[_IS_PROXIED]:
            headers = Headers(raw=scope["headers"])
            sent["client"] = self._client(headers, sent["client"])
            if (scheme := headers.get("x-forwarded-proto", "").rpartition(",")[2].strip()) in {"http", "https"}:
                sent["scheme"] = scheme
            if host := headers.get("x-forwarded-host", "").rpartition(",")[2].strip():
                sent["headers"] = list(scope["headers"])
                MutableHeaders(scope=sent)["host"] = host
            path = headers.get("x-forwarded-prefix", "").rstrip("/") or path
        root = str(scope.get("root_path", ""))
        # The path begins with the root: "//evil.example" would be another site.
        if _PREFIX.fullmatch(path) and not f"{root}/".startswith(f"{path}/"):
            sent["root_path"] = path + root
            if not f"{scope['path']}/".startswith(f"{path}{root}/"):
                sent["path"] = path + scope["path"]
        return sent

    def _client(self, headers: Headers, proxy: tuple[str, int]) -> tuple[str, int]:
        """Return the last address that is not a proxy's: browsers may have sent those before it."""
        for address in reversed(",".join(headers.getlist("x-forwarded-for")).split(",")):
            if not self._is_proxy(address.strip()):
                parsed = _parsed(address.strip())
                return proxy if parsed is None else (str(parsed), 0)
        return proxy

    def _is_proxy(self, address: str) -> bool:
        parsed = _parsed(address)
        return parsed is not None and any(parsed in network for network in self._networks)

    def is_own_host(self, request: HTTPConnection) -> bool:
        """Return whether a request is for one of :attr:`hosts`."""
        host = host_of(request.headers.get("host", "")).lower()
        return self.hosts is None or host in self.hosts

    # ---- who sends a request ----

    def user(self, request: HTTPConnection) -> User | None:
        """Return who sends a request; ``None`` if they must log in."""
        if self.user_header and request.scope[_IS_PROXIED]:
            names = request.headers.getlist(self.user_header)
            if len(names) == 1 and (name := names[0].strip()):
                return User(name, self.roles.get(name, self.roles.get("*", Role.VIEWER)))
        if (user := self._logged_in(request.cookies.get(self.cookie, ""))) is not None:
            return user
        return None if self.anonymous is None else User("anonymous", self.anonymous)

    @property
    def has_login(self) -> bool:
        """Whether users can log in, with a token or password."""
        return bool(self.token or self.password)

    def log_in(self, request: Request, given: str) -> User | None:
        """Return the user who knows this token or password; ``None`` if it is wrong.

        Raises :class:`TooManyGuesses`, even if it is right, unless it is too long to be guessed.
        """
        blocked = self._has_guessed_too_often(_network(request))
        for name, secret in (("token", self.token), ("password", self.password)):
            if secret and _are_equal(given, secret) and (not blocked or len(secret) >= _RANDOM):
                return self._user(name, secrets.token_hex(16))
        if blocked:
            raise TooManyGuesses
        self._guesses.setdefault(_network(request), deque(maxlen=_GUESSES)).append(mono_s())
        return None

    def _user(self, name: str, session: str) -> User:
        return User(name, self.roles.get(name, Role.ADMIN), session)

    def _has_guessed_too_often(self, address: str) -> bool:
        since = mono_s() - _GUESSES_S
        for other in [other for other, times in self._guesses.items() if times[-1] < since]:
            del self._guesses[other]
        count = {other: sum(at > since for at in times) for other, times in self._guesses.items()}
        return count.get(address, 0) >= _GUESSES or sum(count.values()) >= _ALL_GUESSES

    # ---- sessions and forms ----

    @cached_property
    def _key(self) -> bytes:
        """What signs sessions and forms.

        It depends on the token and password, so that a new one ends all sessions. All users see signatures, from which
        a weak password could be guessed if the key were quickly computed.
        """
        known = "\0".join(map(str, (self.secret, self.token, self.password)))
        if self.secret:
            return hashlib.sha256(known.encode()).digest()
        return _stretched(known) if self.has_login else secrets.token_bytes(32)

    @cached_property
    def cookie(self) -> str:
        """The session's cookie: one for each dashboard, because all ports of a host share cookies."""
        return f"bulltask_session_{self._sign('cookie')[:8]}"

    def session(self, user: User) -> str:
        """Return the value of a cookie that proves who its user is."""
        body = f"{user.name}.{user.session}.{int(time()) + SESSION_S}"
        return f"{body}.{self._sign('session', body)}"

    def _logged_in(self, cookie: str) -> User | None:
        body, _, signature = cookie.rpartition(".")
        if not body or not _are_equal(signature, self._sign("session", body)):
            return None
        name, session, until = body.split(".")
        return self._user(name, session) if time() < int(until) and session not in self._ended else None

    def log_out(self, user: User) -> None:
        """End a session: its cookie is no longer valid, in this process."""
        now = time()
        self._ended = {session: until for session, until in self._ended.items() if until > now}
        if user.session:
            self._ended[user.session] = now + SESSION_S

    def form_token(self, user: User) -> str:
        """Return what a form must contain, so that other sites cannot send it."""
        return self._sign("form", user.name, user.session)

    def is_own_form(self, request: Request, user: User, token: str) -> bool:
        """Return whether a form comes from a page of the dashboard."""
        return _is_same_site(request) and _are_equal(token, self.form_token(user))

    def seal(self, user: User, notice: str) -> str:
        """Return what proves that the dashboard has written a notice, because links of others must not show theirs."""
        return self._sign("notice", user.name, user.session, notice)[:32]

    def _sign(self, *texts: str) -> str:
        message = "\0".join(texts).encode("utf-8", "replace")
        return hmac.new(self._key, message, hashlib.sha256).hexdigest()


_IS_PROXIED: Final = "bulltask.is_proxied"
_PREFIX: Final = re.compile(r"(/[A-Za-z0-9._~-]+)+")


@lru_cache(maxsize=8)
def _stretched(secret: str) -> bytes:
    return hashlib.scrypt(secret.encode(), salt=b"bulltask dashboard", n=2**15, r=8, p=1, maxmem=2**26, dklen=32)


def _are_equal(one: str, other: str) -> bool:
    """Compare secrets in a time that does not depend on them, nor on their lengths."""
    hashed = (hashlib.sha256(given.encode("utf-8", "replace")).digest() for given in (one, other))
    return hmac.compare_digest(*hashed)


def _parsed(address: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        parsed = ipaddress.ip_address(address)
    except ValueError:
        return None
    return getattr(parsed, "ipv4_mapped", None) or parsed


def client_address(request: HTTPConnection) -> str:
    """Return the address that has sent a request."""
    return request.client.host if request.client else ""


def _network(request: HTTPConnection) -> str:
    """Return the address of a client, or its network, because one user of IPv6 may have 2**64 addresses."""
    parsed = _parsed(client_address(request))
    return str(ipaddress.ip_network((parsed, 64), strict=False)) if parsed and parsed.version == 6 else str(parsed)


def _is_same_site(request: Request) -> bool:
    """Return whether a browser says that a page of ours sends this: by ``Sec-Fetch-Site``; without TLS, ``Origin``."""
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is not None:
        return site in {"same-origin", "none"}
    return origin is None or urlsplit(origin).netloc == request.headers.get("host")


# ---- audit log ----

_MAX_ENTRIES: Final = 10_000
_MAX_CHARS: Final = 500

_log = logging.getLogger("bulltask.dashboard.audit")


@dataclass(frozen=True, slots=True)
class AuditEntry:
    """What a user did, or tried to do.

    Attributes:
        at_ms: When, by the server's clock.
        user: Who; ``""`` if they have not logged in.
        address: From where.
        action: One of :data:`ACTIONS`, ``login`` or ``logout``.
        target: The queue and job.
        outcome: The message that the user saw.
        is_refused: Whether it was refused, and nothing changed.
    """

    at_ms: int
    user: str
    address: str
    action: str
    target: str
    outcome: str
    is_refused: bool


class Audit:
    """The audit log: a line for ``logging`` for each entry, and the last 10,000 entries in Redis.

    Entries that were refused have a stream of their own, so that those who guess passwords cannot push out the others.
    """

    def __init__(self, app: App) -> None:
        self._app = app
        self._keys = {refused: dashboard_audit(app._config.prefix, refused=refused) for refused in (False, True)}

    def record(
        self, action: str, outcome: str, *, user: str, address: str, target: str = "", refused: bool = False
    ) -> None:
        """Write an entry; if Redis does not take it, the log says so."""
        given = {"user": user, "address": address, "action": action, "target": target, "outcome": outcome}
        fields = {name: one_line(value)[:_MAX_CHARS] for name, value in given.items()}
        level = logging.WARNING if refused else logging.INFO
        what = f"{fields['action']} {fields['target']}".rstrip()
        _log.log(
            level,
            "dashboard: %s (%s) %s: %s",
            fields["user"] or "not logged in",
            fields["address"],
            what,
            fields["outcome"],
        )
        values = [part.encode("utf-8", "replace") for item in fields.items() for part in item]
        try:
            self._app._broker.pool.run(
                command("XADD", self._keys[refused], "MAXLEN", "~", str(_MAX_ENTRIES), "*", *values)
            )
        except BulltaskError as exc:
            _log.warning("dashboard: the last entry of the audit log was not stored in Redis: %s", exc)

    def newest(self, count: int) -> list[AuditEntry]:
        """Return the newest entries, the newest first."""
        calls: list[Call[Any]] = [
            command("XREVRANGE", key, "+", "-", "COUNT", str(count)) for key in self._keys.values()
        ]
        found = [
            _entry(text(entry_id), texts_by_name(fields), refused)
            for refused, entries in zip(self._keys, self._app._broker.pool.run_many(calls), strict=True)
            for entry_id, fields in entries
        ]
        return sorted(found, key=lambda entry: -entry.at_ms)[:count]


def _entry(entry_id: str, fields: Mapping[str, str], refused: bool) -> AuditEntry:
    named = {name: fields.get(name, "") for name in ("user", "address", "action", "target", "outcome")}
    return AuditEntry(at_ms=id_parts(entry_id)[0], **named, is_refused=refused)


# ---- headers ----

SECURITY_HEADERS: Final = (
    (b"content-security-policy", b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
     b"connect-src 'self'; form-action 'self'; frame-ancestors 'none'; base-uri 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
    (b"cross-origin-opener-policy", b"same-origin"),
)  # fmt: skip


class SecurityHeaders:
    """Adds :data:`SECURITY_HEADERS` to each response."""

    def __init__(self, app: Callable[..., Any]) -> None:
        self._app = app

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""

        async def send_with_headers(message: dict[str, Any]) -> None:
            if message["type"] == "http.response.start":
                present = {name for name, _ in message["headers"]}
                if b"etag" in present:  # a file of the dashboard, which may be kept, but may change with an update
                    message = {**message, "headers": [*message["headers"], (b"cache-control", b"no-cache")]}
                    present.add(b"cache-control")
                more = [header for header in SECURITY_HEADERS if header[0] not in present]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
