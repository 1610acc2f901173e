"""The dashboard: an ASGI app whose pages are rendered on the server, and updated while they are open.

Each page has one function that reads what it shows, and one template. A browser receives it as a whole, and then, over
server-sent events (``Accept: text/event-stream`` at the same address), its ``<main>`` each time that it has changed.
Without JavaScript, pages and forms work, too.
"""

from __future__ import annotations

import asyncio
import hashlib
import inspect
import json
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import parse_qsl, quote, urlencode

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import FormData
from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection, Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response, StreamingResponse
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from bulltask.app import App
from bulltask.config.config import LOG_LEVELS
from bulltask.config.urls import redact_secrets
from bulltask.dashboard.access import (
    ACTIONS,
    SESSION_S,
    VIEWS,
    Access,
    Audit,
    Role,
    SecurityHeaders,
    TooManyGuesses,
    User,
    client_address,
)
from bulltask.dashboard.actions import (
    ENDPOINTS,
    Endpoint,
    NotFound,
    Outcome,
    SentForm,
    change_of,
    form_of,
    no_job,
    param,
    path,
)
from bulltask.dashboard.drawings import SIGNS, Box, Line, bar, chart, graph, moment, sparkline
from bulltask.dashboard.forms import Invalid
from bulltask.dashboard.pages import FAILURE_QUEUES, NEWEST_FAILED, PER_PAGE, STATES, Charts, Filter, Pages, Past
from bulltask.jobs.clock import timeout
from bulltask.jobs.errors import BulltaskError, ConfigError, InvalidNameError
from bulltask.jobs.names import FAN_OUT
from bulltask.jobs.payloads import describe, is_envelope
from bulltask.lake.formatting import ABSENT, CONTROL, Unit, age_text, format_value, one_line
from bulltask.queue.flows import Workflow, WorkflowJob
from bulltask.queue.schedulers import pause_text, rule_text
from bulltask.queue.search import actions_in

if TYPE_CHECKING:
    from bulltask.lake.storage import Lake

__all__ = ["Dashboard"]

LIVE_S: Final = 2.0
"""How often an open page looks for news."""

MAX_STREAMS: Final = 200
"""How many open pages are updated at a time; further ones must be reloaded."""

MAX_FORM: Final = 2**20
"""The longest form, in bytes."""
_MAX_LOGIN: Final = 2**12


@dataclass(frozen=True, slots=True)
class Page:
    """A page: its path, its template, and what reads the template's variables, in a thread.

    ``view`` names it in :data:`bulltask.dashboard.access.VIEWS` if not everybody may see it. ``is_live``: whether it is
    updated while it is open.
    """

    path: str
    template: str
    read: Callable[[Pages, Request], Mapping[str, Any]]
    view: str = ""
    is_live: bool = True


class Dashboard:
    """An ASGI app that shows and changes the queues of an app's server.

    It can be mounted in another app (``Mount("/tasks", Dashboard(app, access))``), and works behind a proxy's path.

    Args:
        app: The app; its tasks can be run from the dashboard. ``App("name", broker_url=…)`` suffices for the rest.
        access: Who may use it.
        path: Its path at the proxy (``"/tasks"``), if the proxy does not send ``X-Forwarded-Prefix``.
        lake: The directory or URL of the lake that ``bulltask pipeline run`` writes; needs the extra ``history``.
    """

    def __init__(self, app: App, access: Access, *, path: str = "", lake: str | Path | Lake | None = None) -> None:
        self._app = app
        self._access = access
        self._path = path.rstrip("/")
        self._pages = Pages(app, lake)
        self._audit = Audit(app)
        self._streams: set[asyncio.Event] = set()
        self._templates = _environment()
        self._asgi = SecurityHeaders(
            Starlette(
                routes=[
                    Route("/login", self._login, methods=["GET", "POST"], name="login"),
                    Route("/logout", self._logout, methods=["POST"], name="logout"),
                    Mount("/static", StaticFiles(directory=str(files("bulltask.dashboard") / "static")), name="static"),
                    *(Route(page.path, self._page(page), name=page.template) for page in _PAGES),
                    *(Route(endpoint.path, self._action(endpoint), methods=["POST"]) for endpoint in ENDPOINTS),
                ],
                exception_handlers={404: self._not_found},
            )
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Serve a request."""
        if scope["type"] == "http":
            scope = self._access.as_sent(scope, self._path)
            if not self._access.is_own_host(HTTPConnection(scope)):
                await PlainTextResponse("Misdirected request: the dashboard has another host name.", 421)(
                    scope, receive, send
                )
                return
        await self._asgi(scope, receive, send)

    def close_streams(self) -> None:
        """End the updates of all open pages, for which a server that stops would wait; called in its event loop."""
        for ended in self._streams:
            ended.set()

    # ---- pages ----

    def _page(self, page: Page) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            user = self._access.user(request)
            if user is None:
                return self._to_login(request)
            if page.view and not self._access.may(user, page.view):
                return self._error(request, user, f"You may not see this: it needs the role {_name(VIEWS[page.view])}.")
            if page.is_live and "text/event-stream" in request.headers.get("accept", ""):
                return self._stream(page, request, user)
            status, html = await run_in_threadpool(self._render, page, request, user, whole=True)
            return HTMLResponse(html, status)

        return serve

    def _stream(self, page: Page, request: Request, user: User) -> Response:
        """Return the page's ``<main>``, again each time that it has changed, until the tab is closed or hidden."""
        if len(self._streams) >= MAX_STREAMS:
            return Response("too many open pages", 503, {"Retry-After": "60"})

        async def events() -> AsyncIterator[str]:
            ended = asyncio.Event()
            self._streams.add(ended)
            try:
                last = ""
                # A session may end while the page is open.
                while not ended.is_set() and self._access.user(request) == user:
                    _, html = await run_in_threadpool(self._render, page, request, user, whole=False)
                    digest = hashlib.sha256(html.encode()).hexdigest()
                    if digest != last:
                        yield "".join(f"data: {line}\n" for line in html.splitlines()) + "\n"
                    else:
                        yield ": no news\n\n"
                    last = digest
                    with suppress(TimeoutError):
                        async with timeout(LIVE_S):
                            await ended.wait()
            finally:
                self._streams.discard(ended)

        return StreamingResponse(events(), media_type="text/event-stream", headers={"X-Accel-Buffering": "no"})

    def _render(
        self, page: Page, request: Request, user: User, *, whole: bool, typed: Mapping[str, Any] | None = None
    ) -> tuple[int, str]:
        """Render a page, or its ``<main>``; if Redis cannot be read, the page says so."""
        template, status = self._templates.get_template(f"{page.template}.html"), 200
        try:
            found = page.read(self._pages, request)
        except (NotFound, InvalidNameError) as exc:
            template, status = self._templates.get_template("error.html"), 404
            found = {"error": str(exc), "past": getattr(exc, "past", "")}
        except BulltaskError as exc:
            template, status, found = self._templates.get_template("error.html"), 502, {"error": str(exc)}
        variables = {**self._common(request, user), **found, "is_live": page.is_live, **(typed or {})}
        html = _visible(template.render(variables))
        if not whole:
            html = html[html.index(">", html.index("<main")) + 1 : html.rindex("</main>")]
        return status, html

    def _common(self, request: Request, user: User | None) -> dict[str, Any]:
        root, query = _root(request), dict(request.query_params)
        is_sealed = user is not None and query.get("seal") == self._access.seal(user, query.get("notice", ""))
        return {
            "root": root,
            "user": user,
            "form_token": "" if user is None else self._access.form_token(user),
            "may": lambda action: self._access.may(user, action),
            "has_login": self._access.has_login,
            "app_name": self._app.main,
            "server": "" if user is None else self._app._broker.endpoint.safe_url,
            "here": _here(request),
            "query": query,
            "notice": query["notice"] if is_sealed else "",
            "has_history": self._pages.has_history,
            "is_live": False,
            "form": {},
            "errors": {},
        }

    def _page_without_data(
        self, request: Request, user: User | None, template: str, status: int, error: str
    ) -> Response:
        variables = {**self._common(request, user), "error": error}
        return HTMLResponse(_visible(self._templates.get_template(template).render(variables)), status)

    def _error(self, request: Request, user: User | None, error: str, status: int = 403) -> Response:
        return self._page_without_data(request, user, "error.html", status, error)

    async def _not_found(self, request: Request, _exc: Exception) -> Response:
        return self._error(request, self._access.user(request), "There is no such page.", 404)

    # ---- login ----

    def _to_login(self, request: Request) -> Response:
        if "text/event-stream" in request.headers.get("accept", ""):
            return Response("log in", 401)
        after = _here(request) + (f"?{request.url.query}" if request.url.query else "")
        after = f"?{urlencode({'next': after})}" if request.method == "GET" and after != "/" else ""
        return RedirectResponse(f"{_root(request)}/login{after}", 303)

    async def _login(self, request: Request) -> Response:
        if request.method == "POST":
            given = str((await _form(request, _MAX_LOGIN)).get("secret", ""))
        else:
            given = request.query_params.get("token", "")
        if not given:
            return self._page_without_data(request, None, "login.html", 200, "")
        try:
            user = self._access.log_in(request, given)
        except TooManyGuesses:
            error = "Too many attempts: try again in a minute."
            return self._page_without_data(request, None, "login.html", 429, error)
        if user is None:
            await self._record(request, None, "login", "wrong token or password", refused=True)
            return self._page_without_data(request, None, "login.html", 401, "Wrong token or password.")
        await self._record(request, user, "login", "logged in")
        response = RedirectResponse(f"{_root(request)}{_own_path(request.query_params.get('next', '/'))}", 303)
        response.set_cookie(
            self._access.cookie,
            self._access.session(user),
            max_age=SESSION_S,
            path=_root(request) or "/",
            secure=request.url.scheme == "https",
            httponly=True,
            samesite="lax",  # "strict" would ask those who follow a link in a chat to log in again
        )
        return response

    async def _logout(self, request: Request) -> Response:
        user, form = self._access.user(request), await _form(request, _MAX_LOGIN)
        if user is not None and user.session:
            if not self._access.is_own_form(request, user, str(form.get("form_token", ""))):
                return self._error(request, user, _FORGED)
            self._access.log_out(user)
            await self._record(request, user, "logout", "logged out")
        response = RedirectResponse(f"{_root(request)}/login", 303)
        response.delete_cookie(self._access.cookie, path=_root(request) or "/")
        return response

    async def _record(
        self, request: Request, user: User | None, action: str, outcome: str, *, refused: bool = False
    ) -> None:
        """Write an entry of the audit log."""
        parts = [(name.removesuffix("_id"), param(request, name)) for name in request.path_params]
        await run_in_threadpool(
            self._audit.record,
            action,
            outcome,
            user="" if user is None else user.name,
            address=client_address(request),
            target=", ".join(f"{name} {value}" for name, value in parts),
            refused=refused,
        )

    # ---- actions ----

    def _action(self, endpoint: Endpoint) -> Callable[[Request], Awaitable[Response]]:
        async def serve(request: Request) -> Response:
            user = self._access.user(request)
            if user is None:
                return self._to_login(request)
            action, fields = endpoint.action, await _form(request, MAX_FORM)
            if not self._access.is_own_form(request, user, str(fields.get("form_token", ""))):
                await self._record(request, user, action, _FORGED, refused=True)
                return self._error(request, user, _FORGED)
            if not self._access.may(user, action):
                refusal = self._refusal(action)
                await self._record(request, user, action, refusal, refused=True)
                return self._error(request, user, refusal)
            return await self._execute(endpoint, SentForm(self._pages, user, request, fields))

        return serve

    async def _execute(self, endpoint: Endpoint, form: SentForm) -> Response:
        """Do what a form asks for, record it, and show the next page."""
        request, user, action = form.request, form.user, endpoint.action
        try:
            outcome = await run_in_threadpool(endpoint.handle, form)
        except Invalid as exc:
            await self._record(request, user, action, str(exc), refused=True)
            return await self._again(endpoint, form, exc)
        except (NotFound, InvalidNameError) as exc:
            await self._record(request, user, action, str(exc), refused=True)
            return self._error(request, user, str(exc), 404)
        except BulltaskError as exc:
            outcome = f"Error: {exc}"
        except Exception as exc:
            await self._record(request, user, action, f"failed with {type(exc).__name__}; the server's log says why")
            raise
        outcome = Outcome(outcome) if isinstance(outcome, str) else outcome
        await self._record(request, user, action, outcome.text)
        self._pages.forget()
        after = _own_path(str(form.fields.get("back", "/"))) if outcome.path is None else outcome.path
        if outcome.is_shown:
            notice = {"notice": outcome.text, "seal": self._access.seal(user, outcome.text)}
            after += f"{'&' if '?' in after else '?'}{urlencode(notice, errors='replace')}"
        return RedirectResponse(f"{_root(request)}{after}", 303)

    async def _again(self, endpoint: Endpoint, form: SentForm, invalid: Invalid) -> Response:
        """Show the page with a form again, with what was typed into it, and why it was not accepted."""
        page = next(page for page in _PAGES if page.path == endpoint.path)
        typed = {"form": dict(form.fields), "errors": invalid.errors, "is_live": False}
        _, html = await run_in_threadpool(self._render, page, form.request, form.user, whole=True, typed=typed)
        return HTMLResponse(html, 422)

    def _refusal(self, action: str) -> str:
        if self._access.read_only:
            return "The dashboard is read-only."
        return f"You may not do this: {action} needs the role {_name(ACTIONS[action])}."


_FORGED: Final = "This form was not sent by a page of the dashboard, or its session has ended: reload the page."


def _name(role: Role) -> str:
    return role.name.lower()


def _root(request: Request) -> str:
    return str(request.scope.get("root_path", ""))


def _here(request: Request) -> str:
    """Return the path of a page, quoted as links to it are."""
    return quote(request.scope["path"].removeprefix(_root(request))) or "/"


def _own_path(path: str) -> str:
    r"""Return a path of this site, or ``/``: ``//evil.example`` and ``/\evil.example`` would be others."""
    return path if _OWN_PATH.match(path) else "/"


_OWN_PATH: Final = re.compile(r"/(?![/\\])[^\x00-\x20\x7f]*\Z")


def _visible(html: str) -> str:
    """Escape characters that hide or reverse text, and those that UTF-8 cannot encode: names in Redis are bytes."""
    return CONTROL.sub(lambda found: found[0] if found[0] in "\n\t" else one_line(found[0]), html)


async def _form(request: Request, max_bytes: int) -> FormData:
    """Read a form as browsers send it by default. (Files would need a parser of their own.)"""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > max_bytes:
            raise HTTPException(413, f"the form has more than {max_bytes} bytes")
    try:
        fields = parse_qsl(body.decode("ascii", "replace"), keep_blank_values=True, max_num_fields=10_000)
    except ValueError as exc:
        raise HTTPException(400, str(exc)) from exc
    return FormData([(name, value) for name, value in fields])


# ---- what pages show ----


def _overview(pages: Pages, request: Request) -> Mapping[str, Any]:
    params, overview = request.query_params, pages.overview()
    name, order, start = params.get("name", "").strip(), params.get("order", ""), params.get("from", "")
    first = int(start) if re.fullmatch(r"[0-9]{1,9}", start) else 0
    queues = overview.choose(name, _ORDERS.get(order))
    fleet, _ = pages.fleet()
    return {
        "overview": overview,
        "queues": queues[first : first + _QUEUES_PER_PAGE],
        "found": len(queues),
        "first": first,
        "per_page": _QUEUES_PER_PAGE,
        "orders": list(_ORDERS),
        "filters": {"name": name, "order": order if order in _ORDERS else ""},
        "fleet": fleet,
        "failures": pages.failures()[:8],
    }


_QUEUES_PER_PAGE: Final = 100
_ORDERS: Final = {
    "waiting": "waiting",
    "oldest": "oldest_ms",
    "active": "active",
    "failed": "failed",
    "completed": "completed",
}
"""By which figures the queues can be sorted."""


def _workers(pages: Pages, _request: Request) -> Mapping[str, Any]:
    fleet, now_ms = pages.fleet()
    return {"fleet": fleet, "now_ms": now_ms, "levels": LOG_LEVELS}


def _audit(pages: Pages, _request: Request) -> Mapping[str, Any]:
    return {"entries": pages.audit()}


def _failures(pages: Pages, _request: Request) -> Mapping[str, Any]:
    return {"failures": pages.failures(), "newest": NEWEST_FAILED, "most_queues": FAILURE_QUEUES}


def _queue(pages: Pages, request: Request) -> Mapping[str, Any]:
    name, params = param(request, "queue"), request.query_params
    try:
        wanted = Filter.of(params)
    except ConfigError as exc:
        raise NotFound(str(exc)) from exc
    found = pages.queue(name, wanted, params.get("cursor"))
    possible = actions_in(wanted.state)
    return {
        "name": name,
        "found": found,
        "wanted": wanted,
        "states": STATES,
        "possible": possible,
        "per_page": PER_PAGE,
    }


def _search(pages: Pages, request: Request) -> Mapping[str, Any]:
    text = request.query_params.get("text", "").strip()
    return {"text": text, "found": pages.search(text)}


def _change(pages: Pages, request: Request) -> Mapping[str, Any]:
    return {"change": change_of(pages, request)}


def _schedules(pages: Pages, _request: Request) -> Mapping[str, Any]:
    return {"found": pages.schedules()}


def _schedule(pages: Pages, request: Request) -> Mapping[str, Any]:
    queue, scheduler_id = param(request, "queue"), param(request, "scheduler")
    found = pages.schedule(queue, scheduler_id)
    if found is None:
        raise NotFound(f"Queue {queue} has no schedule {scheduler_id}: it was removed, or is over.")
    return {"row": found, "item": found.item}


def _run(pages: Pages, _request: Request) -> Mapping[str, Any]:
    tasks = sorted(pages.app.tasks.values(), key=lambda task: task.name)
    return {"tasks": [(task.name, _first_line(task.function)) for task in tasks]}


def _first_line(function: Callable[..., Any]) -> str:
    return (inspect.getdoc(function) or "").partition("\n")[0]


def _run_task(pages: Pages, request: Request) -> Mapping[str, Any]:
    name = param(request, "task")
    form = form_of(pages, name)
    if form is None:
        raise NotFound(f"The app of this dashboard has no task {name}.")
    return {"task": form}


def _history(pages: Pages, request: Request) -> Mapping[str, Any]:
    given = {name: request.query_params.get(name, "").strip() or None for name in (*_HISTORY_FILTERS, "cursor")}
    try:
        times = {name: _typed_time(given[name], name) for name in ("since", "until")}
        where: Any = {**given, **times}
        page, problem = pages.history.search(**where), ""
    except ConfigError as exc:
        if not pages.has_history:
            raise NotFound(str(exc)) from exc
        page, problem = None, str(exc)
    return {"page": page, "problem": problem, "filters": {name: given[name] or "" for name in _HISTORY_FILTERS}}


_HISTORY_FILTERS: Final = ("id", "name", "state", "queue", "since", "until", "text", "error_fingerprint")


def _typed_time(text: str | None, name: str) -> datetime | None:
    if text is None:
        return None
    try:
        return datetime.fromisoformat(text)
    except ValueError as exc:
        raise ConfigError(
            f"{name} must be a time in UTC such as 2026-11-22 or 2026-11-22T14:00, not {text!r:.100}"
        ) from exc


def _past_job(pages: Pages, request: Request) -> Mapping[str, Any]:
    queue, job_id = param(request, "queue"), param(request, "job_id")
    found = pages.history.job(job_id, queue)
    if found is None:
        raise NotFound(f"The lake has no job {job_id} of queue {queue}.")
    return {"found": found}


def _job(pages: Pages, request: Request) -> Mapping[str, Any]:
    queue, job_id = param(request, "queue"), param(request, "job_id")
    found = pages.job(queue, job_id)
    if found is None:
        past = f"/history/{path(queue)}/{path(job_id)}" if pages.has_history else ""
        raise no_job(queue, job_id, past)
    return {"found": found, "job": found.job, "possible": actions_in(found.state), "signs": SIGNS}


def _workflow(pages: Pages, request: Request) -> Mapping[str, Any]:
    queue, job_id = param(request, "queue"), param(request, "job_id")
    found = pages.workflow(queue, job_id)
    if found is None:
        raise no_job(queue, job_id)
    here = next(job for job in found.jobs if (job.queue, job.id) == (queue, job_id))
    counts = Counter(job.state for job in found.jobs)
    picture = _graph(found, here, _root(request))
    left_out = sum(job.left_out for job in found.jobs)
    return {"job": here, "found": found, "counts": counts, "picture": picture, "left_out": left_out, "signs": SIGNS}


@lru_cache(maxsize=16)
def _graph(workflow: Workflow, here: WorkflowJob, root: str) -> Markup:
    """Draw a workflow; one that is open, but has not changed, is not drawn again."""
    title = f"Workflow of job {here.id}: each job is below those that wait for it"
    return graph([_box(job, root) for job in workflow.jobs], here.key, title)


def _box(job: WorkflowJob, root: str) -> Box:
    name = "fan-out" if job.name == FAN_OUT else job.name
    waits = f"; waits for {len(job.waits_for) + job.left_out:,} jobs" if job.waits_for or job.left_out else ""
    reason = f": {redact_secrets(job.reason)[:200]}" if job.reason else ""
    return Box(
        key=job.key,
        href=f"{root}/queues/{path(job.queue)}/jobs/{path(job.id)}",
        name=name,
        state=job.state,
        title=f"{name}, {job.state}{reason}; job {job.id} of queue {job.queue}{waits}",
        below=job.waits_for,
        left_out=job.left_out,
    )


def _charts(pages: Pages, request: Request) -> Mapping[str, Any]:
    name = param(request, "queue") if "queue" in request.path_params else None
    found = pages.charts(name)
    if name is not None and name not in found.queues:
        raise NotFound(f"There is no queue {name}, or nothing is known of it yet.")
    past, pictures = "", _pictures(found)
    if pages.has_history:
        try:
            pictures += _pictures_of_past(pages.past(name))
        except BulltaskError as exc:  # a lake that does not know the queue, or cannot be read
            past = str(exc)
    return {"name": name, "found": found, "pictures": pictures, "past_error": past}


def _pictures_of_past(past: Past) -> list[Markup]:
    return [
        chart(
            "From the lake: attempts that ended, per hour",
            "",
            past.times_ms,
            [Line(*line) for line in past.ended.items()],
        ),
        chart(
            "From the lake: how long they had waited, by percentile",
            "s",
            past.times_ms,
            [Line(*line) for line in past.wait_s.items()],
        ),
        chart(
            "From the lake: how long they ran, by percentile",
            "s",
            past.times_ms,
            [Line(*line) for line in past.run_s.items()],
        ),
    ]


def _pictures(found: Charts) -> list[Markup]:
    def of(values: Mapping[str, Sequence[float | None]]) -> list[Line]:
        return [Line(name, line) for name, line in values.items()]

    pictures = []
    if found.minutes_ms:
        pictures.append(chart("Jobs finished per minute", "jobs", found.minutes_ms, of(found.per_minute)))
    return [
        *pictures,
        chart("Jobs finished per second, mean of a minute", "/s", found.times_ms, of(found.rate)),
        chart("Waiting jobs", "jobs", found.times_ms, of(found.waiting)),
        chart("For how long the oldest job has been waiting", "s", found.times_ms, of(found.oldest_s)),
        chart("Active jobs", "jobs", found.times_ms, of(found.active)),
    ]


_PAGES: Final = (
    Page("/", "overview", _overview),
    Page("/workers", "workers", _workers),
    Page("/failures", "failures", _failures),
    Page("/audit", "audit", _audit, view="audit"),
    Page("/search", "search", _search, is_live=False),
    Page("/schedules", "schedules", _schedules),
    Page("/run", "run", _run, is_live=False),
    Page("/run/{task}", "run_task", _run_task, is_live=False),
    Page("/history", "history", _history, is_live=False),
    Page("/history/{queue}/{job_id}", "past_job", _past_job, is_live=False),
    Page("/changes/{change}", "change", _change),
    Page("/queues/{queue}", "queue", _queue),
    Page("/queues/{queue}/schedules/{scheduler}", "schedule", _schedule),
    Page("/queues/{queue}/jobs/{job_id}", "job", _job),
    Page("/queues/{queue}/jobs/{job_id}/workflow", "workflow", _workflow),
    Page("/charts", "charts", _charts),
    Page("/queues/{queue}/charts", "charts", _charts),
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
    templates.filters |= {
        "moment": _moment,
        "age": _age,
        "duration": lambda ms: format_value(ms, Unit.MS),
        "seconds": lambda seconds: format_value(seconds, Unit.SECONDS),
        "number": _number,
        "path": path,
        "plain": _plain,
        "redact": redact_secrets,
        "rule": lambda item: rule_text(item, lambda ms: format_value(ms, Unit.MS)),
        "paused": lambda item: pause_text(item, _moment),
    }
    templates.globals |= {"sparkline": sparkline, "bar": bar}
    return templates


def _moment(time: int | datetime | None) -> Markup:
    """Return a time as :func:`moment` does, if there is one."""
    if not time:
        return escape(ABSENT)
    try:
        return moment(time)
    except (OverflowError, ValueError, OSError):  # a hash may contain any value
        return Markup("?")


def _age(ms: float | None) -> str:
    return ABSENT if ms is None else age_text(ms / 1000)


def _number(value: float) -> str:
    return f"{value:,}"


def _plain(value: object) -> str:
    """Return a stored value as JSON; of one that is encrypted, signed or compressed, only what it is."""
    return describe(value) if is_envelope(value) else json.dumps(value, indent=2, ensure_ascii=False, default=repr)
