"""Names, ids and texts that other clients chose do nothing: each page shows them, and each link and form works."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis

from bulltask import App
from bulltask.dashboard import site
from bulltask.jobs.names import bullmq_name
from bulltask.lake.formatting import one_line
from tests.dashboard.conftest import Browser

pytestmark = pytest.mark.redis

TEXT = """</pre></title></textarea>--><script>alert(1)</script><i onclick=alert(1)>'"{{ 7*7 }}\u2028\u202e\x00\x1b"""
NAMES = [
    "a/b <i>",
    '"><script>alert(1)</script>',
    "..%2f",
    "..",
    ".",
    "%",
    "%2e%2e",
    "%252e",
    "a?b#c&d=e&amp;",
    "//evil.example",
    "\\evil",
    "javascript%3Aalert(1)",
    "' onmouseover='alert(1)",
    "x {{ 7*7 }}",
    "a\u202eb",
    " ",
    "+",
    "ä" * 255,
]
BYTES = b"\xff\xfe<i>"
"""A name that no app can write, but other clients can."""

HOSTILE = [
    "/queues/%00",
    "/queues/a:b",
    "/queues/..%2f..%2fstatic",
    "/static/../access.py",
    "/static/%2e%2e/site.py",
    f"/queues/{'x' * 5_000}",
    "/queues/mail/jobs/meta",
    "/queues/mail/jobs/%ff",
    "/%ff",
    "/queues/{{7*7}}",
    "/queues/mail?state=<script>",
    f"/queues/mail?state={'x' * 5_000}",
    "/queues/mail?page=-1",
    "/queues/mail?page=\N{ARABIC-INDIC DIGIT THREE}",
    "/queues/mail?page=999999",
    "/queues/mail?text=%ff%00<script>",
    "/?notice=<script>",
]

PACKAGE = Path(site.__file__).parent
SOURCES = [*PACKAGE.glob("templates/*.html"), *PACKAGE.glob("*.py")]
TAGS = {tag for path in SOURCES for tag in re.findall(r"<([a-z]\w*)", path.read_text())}
assert "i" not in TAGS


class Page(HTMLParser):
    """A page's addresses and forms; refuses tags and attributes that no template has."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.forms: list[str] = []
        self.shown = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in TAGS, tag
        for name, value in attrs:
            assert not name.startswith("on"), (tag, name)
            assert name not in {"style", "srcdoc"}, (tag, name)
            if name in {"href", "src", "action"}:
                parts = urlsplit(value or "")
                assert (parts.scheme, parts.netloc) == ("", ""), value
        named = dict(attrs)
        assert tag != "script" or (named["src"] or "").startswith("/static/")
        if tag == "a" and (href := named["href"] or "") and not href.startswith("#"):
            self.links.append(href)
        if tag == "form" and named.get("method") == "post":
            self.forms.append(named["action"] or "")

    def handle_data(self, data: str) -> None:
        self.shown += data


def write_job(client: redis.Redis, queue: str | bytes, job_id: str | bytes, state: str) -> None:
    """Write a job as another client could."""
    base = b"bull:%b:" % (b"{%b}" % queue if isinstance(queue, bytes) else bullmq_name(queue, hash_tag=True).encode())
    raw_id = job_id if isinstance(job_id, bytes) else job_id.encode()
    hostile = json.dumps({TEXT: TEXT}, ensure_ascii=False)
    fields: dict[Any, Any] = {
        "name": TEXT, "data": hostile, "opts": json.dumps({"attempts": 1}), "timestamp": 1,
        "failedReason": TEXT, "stacktrace": json.dumps([TEXT], ensure_ascii=False), "progress": hostile,
        "returnvalue": hostile, "pb": TEXT, "finishedOn": 2, "processedOn": 1,
    }  # fmt: skip
    client.hset(base + raw_id, mapping=fields)
    client.hset(base + b"meta", "version", "bullmq:5.62.0")
    if state == "active":
        client.lpush(base + b"active", raw_id)
    else:
        client.zadd(base + state.encode(), {raw_id: 2})
    client.rpush(base + raw_id + b":logs", TEXT)


def crawl(browser: Browser, start: str) -> dict[str, Page]:
    """Follow the links from a page to queues, jobs, schedules and tasks, and to lists of failed jobs."""
    seen: dict[str, Page] = {}
    left = [start]
    while left:
        address = left.pop()
        if address in seen:
            continue
        response = browser.get(address)
        assert response.status_code in {200, 404}, (address, response.status_code)
        seen[address] = page = Page(response.text)
        joined = (response.url.join(link).raw_path.decode() for link in page.links)
        left += [
            link
            for link in joined
            if link.startswith(("/queues/", "/run/")) and ("state=" not in link or "state=failed" in link)
        ]
    return seen


@pytest.mark.parametrize("name", NAMES)
def test_a_hostile_name_is_shown_and_its_links_and_forms_lead_to_it(
    browser: Browser, app: App, redis_client: redis.Redis, name: str
) -> None:
    write_job(redis_client, name, name, "failed")
    Page(browser.get("/").text)
    pages = crawl(browser, "/")
    shown = " ".join(one_line(name).split())
    assert any(shown in " ".join(page.shown.split()) for page in pages.values())
    retries = {form for page in pages.values() for form in page.forms if "/retry/" in form}
    assert len(retries) == 1
    response = browser.act(retries.pop(), back=next(address for address in pages if "/jobs/" in address))
    assert response.status_code == 200
    assert "waits again" in response.text
    assert app.queue(name).get_job(name).get_state() == "waiting"  # type: ignore[union-attr]
    assert shown in " ".join(Page(browser.get("/audit").text).shown.split())


@pytest.mark.parametrize("name", NAMES[::3])
def test_a_hostile_name_of_a_schedule_and_a_task_leads_to_them(browser: Browser, app: App, name: str) -> None:
    @app.task(name=name)
    def echo(value: str) -> str:
        return value

    app.queue(name).schedulers.upsert(name, name=name, every=3600)
    pages = crawl(browser, "/schedules")
    shown = f"Schedule {one_line(name)}"
    assert any(" ".join(shown.split()) in " ".join(page.shown.split()) for page in pages.values())
    (run,) = {form for page in pages.values() for form in page.forms if form.endswith("/run")}
    assert "has added this job" in browser.act(run).text
    pages = crawl(browser, "/run")
    (form,) = {form for page in pages.values() for form in page.forms if form.startswith("/run/")}
    assert "was added" in browser.act(form, value=name).text


@pytest.mark.parametrize("state", ["failed", "completed", "delayed", "active", "waiting-children"])
def test_hostile_texts_of_a_job_do_nothing(browser: Browser, redis_client: redis.Redis, state: str) -> None:
    write_job(redis_client, "mail", "a", state)
    pages = crawl(browser, f"/queues/mail?state={state}")
    assert any("<script>alert(1)" in page.shown for address, page in pages.items() if "/jobs/" in address)
    assert not any("49" in page.shown.split("alert")[-1][:20] for page in pages.values())


def test_names_that_are_not_utf_8_are_shown(browser: Browser, redis_client: redis.Redis) -> None:
    write_job(redis_client, "mail", BYTES, "failed")
    write_job(redis_client, BYTES, "b", "failed")
    for path in ("/", "/workers", "/failures", "/charts", "/audit"):
        assert browser.get(path).status_code == 200, path
    pages = crawl(browser, "/")
    assert any("\\udcff\\udcfe<i>" in page.shown for page in pages.values())
    jobs = [page for address, page in pages.items() if "/jobs/" in address]
    assert any("alert(1)" in page.shown for page in jobs)


def test_hostile_addresses_find_nothing(browser: Browser) -> None:
    for path in HOSTILE:
        response = browser.get(path)
        assert response.status_code in {200, 404}, path
        if response.headers["content-type"].startswith("text/html"):
            Page(response.text)
        assert "def " not in response.text
