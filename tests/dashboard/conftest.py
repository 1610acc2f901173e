"""Fixtures of the dashboard's tests: browsers, which talk to the ASGI app in this process."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from html import unescape
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import httpx
import pytest

from bulltask import App
from bulltask.dashboard import Access, Dashboard, Role
from bulltask.dashboard.access import User

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it prefers httpx2, which nothing else here needs
    from starlette.testclient import TestClient

SECRET = "a secret that signs sessions, for tests"


def _as_served(site: Any) -> Any:
    """Return an ASGI app whose paths are decoded once, as by every server; the test client decodes them twice."""

    async def serve(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": unquote(scope["raw_path"].decode("ascii"))}
        await site(scope, receive, send)

    return serve


class Browser(TestClient):
    """A browser that follows redirects and keeps cookies; ``address`` is where it is."""

    def __init__(self, site: Any, address: str = "10.0.0.1", **options: Any) -> None:
        super().__init__(_as_served(site), client=(address, 50_000), **options)
        self.site = site

    def form_token(self, page: str = "/") -> str:
        """Return the token of the forms on a page, or what it would be if the page had any."""
        found = re.findall(r'name="form_token" value="([^"]*)"', self.get(page).text)
        user = User(self.headers.get("x-user", "anonymous"), Role.VIEWER)
        (token,) = set(found or [self.site._access.form_token(user)])
        return str(token)

    def act(self, path: str, page: str = "/", **fields: str) -> httpx.Response:
        """Send the form with this path that a page has."""
        response: httpx.Response = self.post(path, data={"form_token": self.form_token(page), "back": page, **fields})
        return response


Open = Callable[..., Browser]


@pytest.fixture
def browser_with(app: App) -> Iterator[Open]:
    """Open a browser on a dashboard with these arguments of ``Access``."""
    with ExitStack() as stack:

        def start(*, address: str = "10.0.0.1", path: str = "", lake: Path | None = None, **access: Any) -> Browser:
            site = Dashboard(app, Access(**{"secret": SECRET, **access}), path=path, lake=lake)
            return stack.enter_context(Browser(site, address))

        yield start


@pytest.fixture
def browser(browser_with: Open) -> Browser:
    """The browser of an admin on a dashboard without a login."""
    return browser_with(anonymous=Role.ADMIN)


def links(html: str) -> list[str]:
    """Return the addresses of a page's links."""
    return [unescape(address) for address in re.findall(r'<a [^>]*href="([^"]*)"', html)]
