"""The dashboard: an ASGI app whose pages are rendered on the server, and updated while they are open.

Each page has one function that reads what it shows, and one template. A browser receives it as a whole, and then, over
server-sent events (``Accept: text/event-stream`` at the same address), its ``<main>`` each time that it has changed.
Without JavaScript, pages and forms work, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.resources import files
from typing import Any, Final
from urllib.parse import quote, unquote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from bulltask.app import App
from bulltask.dashboard.access import ACTIONS, SESSION_COOKIE, SESSION_S, Access, SecurityHeaders, User
from bulltask.dashboard.drawings import sparkline
from bulltask.dashboard.pages import PER_PAGE, STATES, Pages
from bulltask.jobs.errors import BulltaskError

__all__ = ["Dashboard"]

LIVE_S: Final = 2.0
"""How often an open page looks for news."""

MAX_STREAMS: Final = 200
"""How many open pages are updated at a time; further ones must be reloaded."""

_audit = logging.getLogger("bulltask.dashboard.audit")


class NotFound(Exception):
    """There is no such queue, job or page."""


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its path, its template, and what reads the template's variables, in a thread."""

    path: str
    template: str
    read: Callable[[Pages, Request], Mapping[str, Any]]


class Dashboard:
    """An ASGI app that shows and changes the queues of an app's server.

    It can be mounted in another app (``Mount("/tasks", Dashboard(app, access))``), and works behind a proxy's path.

    Args:
        app: The app; its tasks can be run from the dashboard. ``App("name", broker_url=…)`` suffices for the rest.
        access: Who may use it.
    """

    def __init__(self, app: App, access: Access) -> None:
        self._app = app
        self._access = access
        self._pages = Pages(app)
        self._streams = 0
        self._templates = _environment()
        self._asgi = Starlette(
            routes=[
                Route("/login", self._login, methods=["GET", "POST"], name="login"),
                Route("/logout", self._logout, methods=["POST"], name="logout"),
                Mount("/static", StaticFiles(directory=str(files("bulltask.dashboard") / "static")), name="static"),
                *(Route(page.path, self._page(page), name=page.template) for page in _PAGES),
                *(Route(path, self._action(name, act), methods=["POST"], name=name) for path, name, act in _ACTIONS),
            ],
            middleware=[Middleware(SecurityHeaders)],
            exception_handlers={404: self._not_found},
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""
        await self._asgi(scope, receive, send)

    # ---- pages ----

    def _page(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            user = self._access.user(request)
            if user is None:
                return self._to_login(request)
            if "text/event-stream" in request.headers.get("accept", ""):
                return self._stream(page, request, user)
            status, html = await run_in_threadpool(self._render, page, request, user, whole=True)
            return HTMLResponse(html, status)

        return serve

    def _stream(self, page: Page, request: Request, user: User) -> Response:
        """Return the page's ``<main>``, again each time that it has changed, until the tab is closed or hidden."""
        if self._streams >= MAX_STREAMS:
            return Response("too many open pages", 503, {"Retry-After": "60"})

        async def events() -> AsyncIterator[str]:
            self._streams += 1
            try:
                last = ""
                while not await request.is_disconnected():
                    _, html = await run_in_threadpool(self._render, page, request, user, whole=False)
                    digest = hashlib.sha256(html.encode()).hexdigest()
                    if digest != last:
                        yield "".join(f"data: {line}\n" for line in html.splitlines()) + "\n"
                    else:
                        yield ": no news\n\n"
                    last = digest
                    await asyncio.sleep(LIVE_S)
            finally:
                self._streams -= 1

        return StreamingResponse(events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    def _render(self, page: Page, request: Request, user: User, *, whole: bool) -> tuple[int, str]:
        """Render a page, or its ``<main>``; if Redis cannot be read, the page says so."""
        template, status = self._templates.get_template(f"{page.template}.html"), 200
        try:
            found = page.read(self._pages, request)
        except NotFound as exc:
            template, status, found = self._templates.get_template("error.html"), 404, {"error": str(exc)}
        except BulltaskError as exc:
            template, status, found = self._templates.get_template("error.html"), 502, {"error": str(exc)}
        variables = {**self._common(request, user), **found}
        if whole:
            return status, template.render(variables)
        context = template.new_context(variables)
        return status, "".join(template.blocks["main"](context))

    def _common(self, request: Request, user: User | None) -> dict[str, Any]:
        root = request.scope.get("root_path", "")
        return {
            "root": root,
            "user": user,
            "form_token": "" if user is None else self._access.form_token(user),
            "may": lambda action: self._access.may(user, action),
            "has_login": self._access.has_login,
            "app_name": self._app.main,
            "server": self._app._broker.endpoint.safe_url,
            "here": request.url.path.removeprefix(root) or "/",
            "query": dict(request.query_params),
            "notice": request.query_params.get("notice", ""),
        }

    async def _not_found(self, request: Request, _exc: Exception) -> Response:
        user = self._access.user(request)
        variables = {**self._common(request, user), "error": "There is no such page."}
        return HTMLResponse(self._templates.get_template("error.html").render(variables), 404)

    # ---- login ----

    def _to_login(self, request: Request) -> Response:
        if "text/event-stream" in request.headers.get("accept", ""):
            return Response("log in", 401)
        root = request.scope.get("root_path", "")
        after = request.url.path.removeprefix(root) + (f"?{request.url.query}" if request.url.query else "")
        return RedirectResponse(f"{root}/login?{urlencode({'next': after})}", 303)

    async def _login(self, request: Request) -> Response:
        root = request.scope.get("root_path", "")
        variables = {**self._common(request, None), "error": ""}
        after = request.query_params.get("next", "/")
        given = (
            str((await request.form()).get("secret", ""))
            if request.method == "POST"
            else (request.query_params.get("token", ""))
        )
        if given:
            if self._access.has_guessed_too_often(request):
                variables["error"] = "Too many attempts: try again in a minute."
                return HTMLResponse(self._templates.get_template("login.html").render(variables), 429)
            user = self._access.log_in(request, given)
            if user is not None:
                # Only a path of this site: "//evil.example" and "/\evil.example" would be others.
                is_path = after.startswith("/") and not after.startswith(("//", "/\\"))
                response = RedirectResponse(f"{root}{after if is_path else '/'}", 303)
                response.set_cookie(
                    SESSION_COOKIE,
                    self._access.session(user),
                    max_age=SESSION_S,
                    path=root or "/",
                    secure=request.url.scheme == "https",
                    httponly=True,
                    samesite="strict",
                )
                _audit.info("login", extra={"user": user.name, "address": request.client and request.client.host})
                return response
            variables["error"] = "This is not the token or password."
        return HTMLResponse(self._templates.get_template("login.html").render(variables), 401 if given else 200)

    async def _logout(self, request: Request) -> Response:
        root = request.scope.get("root_path", "")
        response = RedirectResponse(f"{root}/login", 303)
        response.delete_cookie(SESSION_COOKIE, path=root or "/")
        return response

    # ---- actions ----

    def _action(self, name: str, act: _Act) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            user = self._access.user(request)
            if user is None:
                return self._to_login(request)
            form = await request.form()
            if not self._access.is_own_form(request, user, str(form.get("form_token", ""))):
                return Response("This form was not sent by the dashboard; reload the page.", 403)
            if not self._access.may(user, name):
                return Response(f"You may not do this: {name} needs the role {ACTIONS[name].name.lower()}.", 403)
            try:
                notice = await run_in_threadpool(act, self._app, request, form)
                _audit.info(name, extra={"user": user.name, "path": request.url.path, "notice": notice})
            except BulltaskError as exc:
                notice = f"Error: {exc}"
                _audit.warning(name, extra={"user": user.name, "path": request.url.path, "error": str(exc)})
            self._pages.forget()
            root = request.scope.get("root_path", "")
            back = str(form.get("back", "/"))
            back = back if back.startswith("/") and not back.startswith(("//", "/\\")) else "/"
            sign = "&" if "?" in back else "?"
            return RedirectResponse(f"{root}{back}{sign}{urlencode({'notice': notice})}", 303)

        return serve


# ---- what pages show ----


def _param(request: Request, name: str) -> str:
    """Return a part of the path as :func:`_path` has quoted it."""
    return unquote(request.path_params[name])


def _overview(pages: Pages, _request: Request) -> Mapping[str, Any]:
    overview = pages.overview()
    fleet, _ = pages.fleet()
    return {"overview": overview, "fleet": fleet, "failures": pages.failures()[:8]}


def _workers(pages: Pages, _request: Request) -> Mapping[str, Any]:
    fleet, now_ms = pages.fleet()
    return {"fleet": fleet, "now_ms": now_ms}


def _failures(pages: Pages, _request: Request) -> Mapping[str, Any]:
    return {"failures": pages.failures()}


def _queue(pages: Pages, request: Request) -> Mapping[str, Any]:
    name, params = _param(request, "queue"), request.query_params
    state = params.get("state", "waiting")
    if state not in STATES:
        raise NotFound(f"There is no state {state!r}.")
    number = int(params["page"]) if params.get("page", "").isdecimal() and len(params["page"]) < 7 else 0
    found = pages.queue(name, state, params.get("text", ""), number)
    return {"name": name, "found": found, "state": state, "states": STATES, "page": number, "per_page": PER_PAGE}


def _job(pages: Pages, request: Request) -> Mapping[str, Any]:
    queue, job_id = _param(request, "queue"), _param(request, "job_id")
    found = pages.job(queue, job_id)
    if found is None:
        raise NotFound(f"Queue {queue} has no job {job_id}: it was removed, or never added.")
    return {"found": found, "job": found.job}


_PAGES: Final = (
    Page("/", "overview", _overview),
    Page("/workers", "workers", _workers),
    Page("/failures", "failures", _failures),
    Page("/queues/{queue}", "queue", _queue),
    Page("/queues/{queue}/jobs/{job_id}", "job", _job),
)


# ---- actions ----

_Act = Callable[[App, Request, FormData], str]


def _pause(app: App, request: Request, _form: FormData) -> str:
    name = _param(request, "queue")
    app.queue(name).pause(by="the dashboard")
    return f"Queue {name} is paused."


def _resume(app: App, request: Request, _form: FormData) -> str:
    name = _param(request, "queue")
    app.queue(name).resume()
    return f"Queue {name} runs again."


def _of_job(verb: str, done: str) -> _Act:
    def act(app: App, request: Request, _form: FormData) -> str:
        queue, job_id = _param(request, "queue"), _param(request, "job_id")
        job = app.queue(queue).get_job(job_id)
        if job is None:
            return f"Error: queue {queue} has no job {job_id}"
        getattr(job, verb)()
        return f"Job {job_id} {done}."

    return act


def _revoke(app: App, request: Request, _form: FormData) -> str:
    queue, job_id = _param(request, "queue"), _param(request, "job_id")
    return f"Job {job_id}: {app.queue(queue).revoke(job_id, terminate=True)}."


_ACTIONS: Final[tuple[tuple[str, str, _Act], ...]] = (
    ("/queues/{queue}/pause", "pause", _pause),
    ("/queues/{queue}/resume", "resume", _resume),
    ("/queues/{queue}/retry/{job_id}", "retry", _of_job("retry", "waits again")),
    ("/queues/{queue}/promote/{job_id}", "promote", _of_job("promote", "waits for a worker")),
    ("/queues/{queue}/revoke/{job_id}", "revoke", _revoke),
    ("/queues/{queue}/remove/{job_id}", "remove", _of_job("remove", "is removed")),
)


# ---- templates ----


def _environment() -> Environment:
    templates = Environment(
        loader=PackageLoader("bulltask.dashboard"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {"moment": _moment, "age": _age, "number": _number, "path": _path}
    templates.globals["sparkline"] = sparkline
    return templates


_ABSENT: Final = "\N{EN DASH}"


def _moment(ms: int | None) -> Markup:
    """Return a time, which the browser shows in the reader's zone, with UTC in its title."""
    if not ms:
        return escape(_ABSENT)
    try:
        utc = datetime.fromtimestamp(ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):  # a hash may contain any value
        return Markup("?")
    text = f"{utc:%Y-%m-%d %H:%M:%S}"
    return Markup('<time datetime="{}" title="{} UTC">{}</time>').format(utc.isoformat(), text, text)


def _age(ms: float | None) -> str:
    """Return ``4.2 s``, ``12 min``, ``3.5 h`` or ``2 d``."""
    if ms is None:
        return _ABSENT
    seconds = max(0.0, ms / 1000)
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60)):
        if seconds >= 2 * size:
            return f"{seconds / size:.1f}".removesuffix(".0") + f" {unit}"
    return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"


def _number(value: float) -> str:
    return f"{value:,}"


def _path(text: str) -> str:
    """Quote a name for a path, twice, because servers decode paths before routes see them, and names may have a "/"."""
    return quote(quote(text, safe=""), safe="")
