"""The dashboard in other apps and behind proxies: every link, form and redirect has the path that browsers see."""

from __future__ import annotations

import asyncio
import os
import re
from typing import Any

import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

from bulltask import App
from bulltask.dashboard import Access, Dashboard, Role, site
from tests.dashboard.conftest import SECRET, Browser

pytestmark = pytest.mark.redis

TOKEN = "the token of the dashboard in these tests"
PROXY = "192.168.1.1"


@pytest.fixture
def dashboard(app: App) -> Dashboard:
    app.send_task("send", queue="mail", countdown=3600)
    return Dashboard(app, Access(token=TOKEN, secret=SECRET, proxies=[PROXY]))


def addresses(html: str) -> list[str]:
    """Return all addresses in a page: of links, files and forms."""
    return re.findall(r'(?:href|src|action)="([^"#]+)"', html)


def check(browser: Browser, root: str) -> None:
    """Log in, follow all links, act, and log out: everything must be below ``root``."""
    response = browser.get(f"{root}/queues/mail")
    assert response.url.path == f"{root}/login"
    response = browser.get(f"{response.url}&token={TOKEN}")
    assert response.url.path == f"{root}/queues/mail"
    (cookie,) = browser.cookies.jar
    assert cookie.path == (root or "/")
    found = addresses(response.text)
    assert found
    forms = re.findall(r'<form method="post" action="([^"#]+)"', response.text)
    for address in found:
        assert address.startswith((f"{root}/", "?")), address
        if address not in forms:
            assert browser.get(str(response.url.join(address))).status_code == 200, address
    response = browser.act(f"{root}/queues/mail/pause", f"{root}/queues/mail", back="/queues/mail")
    assert response.url.path == f"{root}/queues/mail"
    assert "Queue mail is paused." in response.text
    assert browser.act(f"{root}/logout", f"{root}/").url.path == f"{root}/login"
    assert not list(browser.cookies.jar)


def test_by_itself(dashboard: Dashboard) -> None:
    check(Browser(dashboard), "")


def test_mounted_in_fastapi_beside_its_own_routes(dashboard: Dashboard) -> None:
    from fastapi import FastAPI  # noqa: PLC0415 - slow to import

    api = FastAPI()

    @api.get("/hello")
    def hello() -> str:
        return "hello"

    api.mount("/ops/tasks", dashboard)
    browser = Browser(api)
    assert browser.get("/hello").json() == "hello"
    assert browser.get("/ops/tasks").url.path == "/ops/tasks/login"
    check(browser, "/ops/tasks")


def test_mounted_in_starlette_in_a_mounted_app(dashboard: Dashboard) -> None:
    inner = Starlette(routes=[Mount("/tasks", dashboard)])
    check(Browser(Starlette(routes=[Mount("/ops", inner)])), "/ops/tasks")


def test_beside_django(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    from django.conf import settings  # noqa: PLC0415 - only here
    from django.core.asgi import get_asgi_application  # noqa: PLC0415 - only here
    from django.test import override_settings  # noqa: PLC0415 - only here

    if not settings.configured:  # otherwise, other tests have
        settings.configure(SECRET_KEY="x")
    monkeypatch.setitem(os.environ, "DJANGO_ALLOW_ASYNC_UNSAFE", "1")
    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"]):
        browser = Browser(Starlette(routes=[Mount("/tasks", dashboard), Mount("/", get_asgi_application())]))
        assert browser.get("/of-django").text == "from Django: /of-django"
        check(browser, "/tasks")


def of_django(request: Any) -> Any:
    from django.http import HttpResponse  # noqa: PLC0415 - only here

    return HttpResponse(f"from Django: {request.path}")


try:
    from django.urls import path as django_path

    urlpatterns = [django_path("of-django", of_django)]
except ImportError:
    pass


class Proxy:
    """A reverse proxy: it passes requests below ``path`` on, without ``path`` if it strips it."""

    def __init__(self, site: Any, path: str, headers: dict[str, str], *, strips: bool) -> None:
        self._site, self._path, self._headers, self._strips = site, path, headers, strips

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            assert scope["path"].startswith(self._path + "/")
            more = [(name.lower().encode(), value.encode()) for name, value in self._headers.items()]
            path = scope["path"].removeprefix(self._path) if self._strips else scope["path"]
            host = [(b"x-forwarded-host", b"testserver"), (b"host", b"10.9.9.9:8787")]
            headers = [header for header in scope["headers"] if header[0] != b"host"]
            scope = {**scope, "path": path, "headers": [*headers, *host, *more], "client": (PROXY, 1)}
        await self._site(scope, receive, send)


def test_behind_a_proxy_that_sends_its_prefix(dashboard: Dashboard) -> None:
    proxy = Proxy(dashboard, "/ops/tasks", {"X-Forwarded-Prefix": "/ops/tasks/"}, strips=True)
    check(Browser(proxy), "/ops/tasks")


def test_mounted_behind_a_proxy_that_sends_its_prefix(dashboard: Dashboard) -> None:
    mounted = Starlette(routes=[Mount("/tasks", dashboard)])
    check(Browser(Proxy(mounted, "/ops", {"X-Forwarded-Prefix": "/ops"}, strips=True)), "/ops/tasks")


@pytest.mark.parametrize("mounted", [True, False])
def test_under_a_server_that_knows_its_root_path(dashboard: Dashboard, mounted: bool) -> None:
    async def served(scope: Any, receive: Any, send: Any) -> None:  # as by ``uvicorn --root-path /ops``
        if scope["type"] == "http":
            scope = {**scope, "root_path": "/ops", "path": f"/ops{scope['path']}"}
        await (Starlette(routes=[Mount("/tasks", dashboard)]) if mounted else dashboard)(scope, receive, send)

    check(Browser(Proxy(served, "/ops", {}, strips=True)), "/ops/tasks" if mounted else "/ops")


@pytest.mark.parametrize("strips", [True, False])
def test_behind_a_proxy_whose_path_it_was_told(app: App, dashboard: Dashboard, strips: bool) -> None:
    told = Dashboard(app, Access(token=TOKEN, secret=SECRET), path="/ops")
    check(Browser(Proxy(told, "/ops", {}, strips=strips)), "/ops")


def test_a_proxy_with_tls_gets_secure_cookies_and_forms_of_its_host_are_accepted(dashboard: Dashboard) -> None:
    proxy = Proxy(dashboard, "", {"X-Forwarded-Proto": "https"}, strips=False)
    browser = Browser(proxy, base_url="https://testserver")
    answer = browser.get(f"/login?token={TOKEN}", follow_redirects=False)
    assert "; secure" in answer.headers["set-cookie"].lower()
    browser.headers["origin"] = "https://testserver"
    assert "Queue mail is paused." in browser.act("/queues/mail/pause", "/queues/mail").text


@pytest.mark.parametrize("prefix", ["//evil.example", "/a b", "https://evil.example", "/<i>", "/a/../b%2f", "x"])
def test_a_prefix_that_is_no_path_is_ignored(dashboard: Dashboard, prefix: str) -> None:
    proxy = Proxy(dashboard, "", {"X-Forwarded-Prefix": prefix}, strips=False)
    assert Browser(proxy).get("/", follow_redirects=False).headers["location"] == "/login"


def test_headers_of_others_than_proxies_are_ignored(dashboard: Dashboard) -> None:
    headers = {"X-Forwarded-Prefix": "/evil", "X-Forwarded-Proto": "https", "X-Forwarded-For": PROXY}
    browser = Browser(dashboard, headers=headers)
    assert browser.get("/", follow_redirects=False).headers["location"] == "/login"
    answer = browser.get(f"/login?token={TOKEN}", follow_redirects=False)
    assert "secure" not in answer.headers["set-cookie"].lower()


@pytest.mark.parametrize(
    ("forwarded", "address"),
    [
        ("1.2.3.4", "1.2.3.4"),
        ("9.9.9.9, 1.2.3.4", "1.2.3.4"),  # a browser may send the header, too
        (f"1.2.3.4, {PROXY}", "1.2.3.4"),
        ("2001:db8::1", "2001:db8::1"),
        ("1.2.3.4, unknown", PROXY),
        ("", PROXY),
        (PROXY, PROXY),
    ],
)
def test_the_audit_log_has_the_address_that_the_proxy_saw(app: App, forwarded: str, address: str) -> None:
    site = Dashboard(app, Access(anonymous=Role.ADMIN, secret=SECRET, proxies=[PROXY]))
    browser = Browser(Proxy(site, "", {"X-Forwarded-For": forwarded}, strips=False))
    browser.post("/queues/mail/pause")
    assert site._audit.newest(1)[0].address == address


# ---- live updates ----


async def events(dashboard: Dashboard, cookie: str, send: Any) -> None:
    """Open a page's stream, and wait until the dashboard ends it."""
    headers = [(b"accept", b"text/event-stream"), (b"cookie", cookie.encode()), (b"host", b"testserver")]
    scope = {
        "type": "http", "method": "GET", "path": "/queues/mail", "root_path": "", "scheme": "http",
        "query_string": b"", "headers": headers, "client": ("10.0.0.1", 1), "asgi": {"version": "3.0"},
    }  # fmt: skip
    await dashboard(scope, asyncio.Event().wait, send)


def logged_in(dashboard: Dashboard) -> str:
    browser = Browser(dashboard)
    browser.get(f"/login?token={TOKEN}")
    (cookie,) = browser.cookies.jar
    return f"{cookie.name}={cookie.value}"


async def test_live_updates_end_with_the_session(dashboard: Dashboard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(site, "LIVE_S", 0.01)
    cookie = logged_in(dashboard)
    user = dashboard._access._logged_in(cookie.partition("=")[2])
    assert user is not None
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)
        if message.get("body"):
            dashboard._access.log_out(user)

    await events(dashboard, cookie, send)
    assert sent[0]["status"] == 200
    assert b"data: " in sent[1]["body"]
    assert not dashboard._streams


async def test_live_updates_end_when_the_server_stops(dashboard: Dashboard) -> None:
    async def send(message: Any) -> None:
        if message.get("body"):
            dashboard.close_streams()

    await events(dashboard, logged_in(dashboard), send)
    assert not dashboard._streams
