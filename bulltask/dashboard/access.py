"""Who may use the dashboard, and for what: login, roles, protection against forged requests, limits on guesses.

One function, :meth:`Access.may`, decides what a user may do: routes ask it before they act, and templates before they
show a button.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import ipaddress
import json
import secrets
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from time import time
from typing import Any, Final
from urllib.parse import urlsplit

from starlette.requests import HTTPConnection, Request

from bulltask.jobs.clock import mono_s
from bulltask.jobs.errors import ConfigError

__all__ = ["ACTIONS", "Access", "Role", "User"]

SESSION_COOKIE: Final = "bulltask_session"
SESSION_S: Final = 12 * 3_600

_GUESSES: Final = 5
_ALL_GUESSES: Final = 50
_GUESSES_S: Final = 60.0


class Role(IntEnum):
    """What a user may do; each role includes those before it."""

    VIEWER = 1
    """See everything."""
    OPERATOR = 2
    """Change what runs: retry, promote, revoke and run jobs, pause queues, control workers."""
    ADMIN = 3
    """Delete jobs and queues."""


ACTIONS: Final[Mapping[str, Role]] = {
    "retry": Role.OPERATOR,
    "promote": Role.OPERATOR,
    "revoke": Role.OPERATOR,
    "pause": Role.OPERATOR,
    "resume": Role.OPERATOR,
    "run": Role.OPERATOR,
    "control": Role.OPERATOR,
    "remove": Role.ADMIN,
    "drain": Role.ADMIN,
    "clean": Role.ADMIN,
}
"""Which role an action needs."""


@dataclass(frozen=True, slots=True)
class User:
    """Who sends a request."""

    name: str
    role: Role


@dataclass(kw_only=True)
class Access:
    """How users are known, and what they may do. At least one of the first three, or ``anonymous``, is needed.

    Attributes:
        token: A secret; whoever knows it is the admin ``token``.
        password: A password; whoever knows it is the admin ``password``.
        user_header: A header with the user's name, which a proxy sets (``X-Forwarded-User``). It is believed only if
            the request comes from one of ``proxies``.
        proxies: Addresses or networks of proxies.
        roles: Roles of users by their names; ``"*"`` for all others (default: viewers).
        anonymous: The role of users who have not logged in; ``None``: they must.
        read_only: Nobody may change anything.
        secret: Signs sessions and forms; needed if several processes serve the dashboard for a proxy's users.
    """

    token: str | None = None
    password: str | None = None
    user_header: str | None = None
    proxies: Sequence[str] = ("127.0.0.1", "::1")
    roles: Mapping[str, Role] = field(default_factory=dict)
    anonymous: Role | None = None
    read_only: bool = False
    secret: str | None = None

    def __post_init__(self) -> None:
        if self.token is None and self.password is None and self.user_header is None and self.anonymous is None:
            raise ConfigError("the dashboard needs a token, a password or user_header, or anonymous=Role.VIEWER")
        try:
            self._networks = tuple(map(ipaddress.ip_network, self.proxies))
        except ValueError as exc:
            raise ConfigError(f"proxies must be addresses or networks: {exc}") from exc
        known = self.secret or "\0".join(filter(None, (self.token, self.password)))
        self._key = hashlib.sha256(f"bulltask dashboard\0{known or secrets.token_hex()}".encode()).digest()
        self._guesses: dict[str, deque[float]] = {}
        self._all_guesses: deque[float] = deque()

    def may(self, user: User | None, action: str) -> bool:
        """Return whether a user may do something, one of :data:`ACTIONS`."""
        return user is not None and not self.read_only and user.role >= ACTIONS[action]

    # ---- who sends a request ----

    def user(self, request: HTTPConnection) -> User | None:
        """Return who sends a request; ``None`` if they must log in."""
        if self.user_header is not None and self._is_from_proxy(request):
            name = request.headers.get(self.user_header, "")
            if name:
                return User(name, self.roles.get(name, self.roles.get("*", Role.VIEWER)))
        session = self._verified(request.cookies.get(SESSION_COOKIE, ""))
        if session is not None:
            return User(session["user"], Role(session["role"]))
        return None if self.anonymous is None else User("anonymous", self.anonymous)

    def _is_from_proxy(self, request: HTTPConnection) -> bool:
        try:
            address = ipaddress.ip_address(request.client.host if request.client else "")
        except ValueError:
            return False
        return any(address in network for network in self._networks)

    @property
    def has_login(self) -> bool:
        """Whether users can log in, with a token or password."""
        return self.token is not None or self.password is not None

    def log_in(self, request: Request, given: str) -> User | None:
        """Return the user who knows this token or password; ``None`` if it is wrong."""
        for name, secret in (("token", self.token), ("password", self.password)):
            if secret and hmac.compare_digest(given.encode(), secret.encode()):
                return User(name, Role.ADMIN)
        self._count_guess(request)
        return None

    # ---- guesses ----

    def has_guessed_too_often(self, request: Request) -> bool:
        """Return whether an address, or all together, have tried too many wrong passwords in the last minute."""
        of_address = self._guesses.get(self._address(request), ())
        since = mono_s() - _GUESSES_S
        return sum(at > since for at in of_address) >= _GUESSES or sum(at > since for at in self._all_guesses) >= (
            _ALL_GUESSES
        )

    def _count_guess(self, request: Request) -> None:
        now = mono_s()
        for address in [address for address, times in self._guesses.items() if times[-1] < now - _GUESSES_S]:
            del self._guesses[address]
        self._guesses.setdefault(self._address(request), deque(maxlen=_GUESSES)).append(now)
        self._all_guesses.append(now)
        while self._all_guesses[0] < now - _GUESSES_S:
            self._all_guesses.popleft()

    @staticmethod
    def _address(request: Request) -> str:
        return request.client.host if request.client else ""

    # ---- sessions and forms ----

    def session(self, user: User) -> str:
        """Return the value of a cookie that proves who its user is."""
        fields = {"user": user.name, "role": int(user.role), "until": int(time()) + SESSION_S}
        body = base64.urlsafe_b64encode(json.dumps(fields).encode()).decode()
        return f"{body}.{self._sign(body)}"

    def _verified(self, cookie: str) -> dict[str, Any] | None:
        body, _, signature = cookie.partition(".")
        if not body or not hmac.compare_digest(signature.encode(), self._sign(body).encode()):
            return None
        fields: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body))
        return fields if fields["until"] > time() else None

    def form_token(self, user: User) -> str:
        """Return what a form must contain, so that other sites cannot send it."""
        return self._sign(f"form\0{user.name}")

    def is_own_form(self, request: Request, user: User, token: str) -> bool:
        """Return whether a form comes from a page of the dashboard.

        Browsers say by ``Sec-Fetch-Site`` or, without TLS, by ``Origin``, which site has sent a form.
        """
        site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
        if site is not None and site not in {"same-origin", "none"}:
            return False
        if site is None and origin is not None and urlsplit(origin).netloc != request.headers.get("host"):
            return False
        return hmac.compare_digest(token.encode(), self.form_token(user).encode())

    def _sign(self, text: str) -> str:
        return hmac.new(self._key, text.encode(), hashlib.sha256).hexdigest()


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
                more = [header for header in SECURITY_HEADERS if header[0] not in present]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        await self._app(scope, receive, send_with_headers)
