"""Pages with lists and forms: queues, searches, changes of many jobs, schedules, workers, running a task, history."""

from __future__ import annotations

import base64
import re
import threading
from collections.abc import Mapping
from datetime import datetime
from enum import Enum
from html import unescape
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from bulltask import App
from bulltask.dashboard import Access, Dashboard, Role, changes, pages, site
from bulltask.dashboard.access import Audit, User
from bulltask.dashboard.forms import Field, Invalid, task_form
from bulltask.dashboard.pages import Filter
from bulltask.jobs.errors import ConfigError
from bulltask.queue.fields import RateLimit
from bulltask.queue.overview import find_queues, read_overview
from bulltask.testing import InlineWorker, use_server
from bulltask.testing.worker import WorkerProcess, wait_until
from bulltask.transport.call import command
from tests.dashboard.conftest import Browser, Open, links
from tests.support.lake import LakeBuilder, at

pytestmark = pytest.mark.redis

KEY = f"e1:{base64.b64encode(bytes(range(32))).decode()}"
APP = "from bulltask import App\n\napp = App('shop')\n"


def add_failed(app: App, errors: Mapping[str, str], queue: str = "mail") -> list[str]:
    """Add a job for each task and error, which fails at once; return their ids."""
    ids = []
    for task, error in errors.items():
        job = app.queue(queue).add(task.partition("#")[0], {"to": "ada@example.org"}, attempts=1)
        acquired = app.queue(queue).get_next_job("token")
        assert acquired is not None
        acquired.move_to_failed(ConnectionError(error))
        ids.append(job.id)
    return ids


def text_of(html: str) -> str:
    """Return what a reader sees of a page's <main>, in one line."""
    main = html[html.index("<main") : html.index("</main>")]
    return " ".join(unescape(re.sub(r"<[^>]*>", " ", main)).split())


def listed(html: str) -> list[str]:
    """Return the ids of the jobs in a page's table."""
    return re.findall(r'<th scope="row"><a href="[^"]*/jobs/[^"]*">([^<]*)</a>', html)


def forms(html: str) -> list[tuple[str, dict[str, str]]]:
    """Return the address and the fields of each form that changes something."""
    found = []
    for address, body in re.findall(r'<form method="post" action="([^"]*)"[^>]*>(.*?)</form>', html, re.DOTALL):
        hidden = re.findall(r'<input type="hidden" name="([^"]*)" value="([^"]*)">', body)
        found.append((unescape(address), {name: unescape(value) for name, value in hidden}))
    return found


def send(browser: Browser, page: httpx.Response, end: str, **fields: str) -> httpx.Response:
    """Send the form of a page whose address ends like this, as a browser without scripts does."""
    [(address, hidden)] = [form for form in forms(page.text) if form[0].endswith(end)][:1]
    response: httpx.Response = browser.post(address, data={**hidden, **fields})
    while "Counting the jobs" in response.text:
        response = browser.get(response.url.path)
    return response


# ---- lists and searches ----


def test_a_queue_is_read_page_by_page(browser: Browser, app: App) -> None:
    ids = [job.id for job in app.queue("mail").add_bulk([{"name": "send"}] * 120)]
    page, found = browser.get("/queues/mail"), list[str]()
    for _ in range(3):
        found += listed(page.text)
        if following := [link for link in links(page.text) if "cursor=" in link]:
            page = browser.get(f"/queues/mail{following[0]}")
    assert found == ids
    assert "First page" in page.text
    assert "Next" not in page.text


def test_jobs_are_found_by_id_name_data_and_error_and_the_page_says_how_many_were_read(
    browser: Browser, app: App
) -> None:
    (failed,) = add_failed(app, {"send": "host 7 refused"})
    waiting = app.queue("mail").add("report", {"to": "grace hopper"}).id
    assert listed(browser.get("/queues/mail?state=failed&text=HOST 7").text) == [failed]
    for text in (waiting[:20], "epor", "grace H"):
        assert listed(browser.get("/queues/mail", params={"text": text}).text) == [waiting]
    nothing = text_of(browser.get("/queues/mail?state=failed&text=nothing").text)
    assert "No such jobs." in nothing
    assert "1 of 1 jobs were read" in nothing


def test_a_search_of_many_jobs_goes_on_while_its_page_is_open(
    browser: Browser, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_SEARCH_S", 0)
    monkeypatch.setattr(pages, "_SEARCHED_AT_ONCE", 100)
    monkeypatch.setattr(pages, "MIN_AGE_S", 0)
    monkeypatch.setattr(pages, "COST", 1)
    ids = [job.id for job in app.queue("mail").add_bulk([{"name": "send"}] * 1_000)]
    page = browser.get("/queues/mail", params={"text": ids[-1]})
    assert not listed(page.text)
    assert "of 1,000 jobs were read." in text_of(page.text)
    [following] = [link for link in links(page.text) if "cursor=" in link]
    page = browser.get(f"/queues/mail{following}")
    assert "Search on" not in page.text
    wait_until(lambda: listed(browser.get(f"/queues/mail{following}").text) == [ids[-1]], 10, "the job")
    wait_until(lambda: "goes on" not in browser.get(f"/queues/mail{following}").text, 10, "the end")
    app.queue("mail").remove(ids[-1])
    browser.act("/queues/mail/pause")
    assert not listed(browser.get(f"/queues/mail{following}").text)


def test_the_overview_does_not_wait_for_a_long_scan_of_all_keys(
    browser: Browser, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    ends = threading.Event()

    def find_slowly(client: Any, prefix: str, known: Any = (), *, scan: bool = True) -> Any:
        assert not scan or ends.wait(30)
        return find_queues(client, prefix, known, scan=scan)

    monkeypatch.setattr(pages, "find_queues", find_slowly)
    app.send_task("send", queue="mail")
    with app._broker.pool.client() as client:
        client.run(command("HSET", f"{app._config.prefix}:of-node:meta", "version", "bullmq:5.62.0", parse_reply=int))
    html = browser.get("/").text
    assert "mail" in html
    assert "of-node" not in html
    assert "still being scanned" in html
    ends.set()

    def is_shown() -> bool:
        browser.site._pages.forget()
        html = browser.get("/").text
        return "of-node" in html and "scanned" not in html

    wait_until(is_shown, 10, "the queue of Node.js")


def test_many_queues_are_shown_a_page_at_a_time_and_found_by_name_or_sorted(
    browser: Browser, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(site, "_QUEUES_PER_PAGE", 2)
    for name, count in (("mail-a", 1), ("mail-b", 3), ("print", 2), ("<b>", 1)):
        app.queue(name).add_bulk([{"name": "send"}] * count)

    def shown(address: str) -> list[str]:
        return re.findall(r'<th scope="row"><a href="/queues/([^"]*)"', browser.get(address).text)

    assert shown("/") == ["%253Cb%253E", "mail-a"]
    [following] = [link for link in links(browser.get("/").text) if "from=" in link]
    assert shown(f"/{following}") == ["mail-b", "print"]
    assert "3 to 4 of 4" in text_of(browser.get(f"/{following}").text)
    assert shown("/?name=MAIL") == ["mail-a", "mail-b"]
    assert shown("/?order=waiting") == ["mail-b", "print"]
    assert shown("/?order=x&from=-1") == shown("/")
    assert not shown("/?from=99")
    assert "No such queues." in browser.get("/?name=<i>").text


def test_a_view_of_many_queues_shows_what_was_read_before_while_they_are_read_again(
    browser: Browser, app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pages, "_MANY_QUEUES", 0)
    app.send_task("send", queue="mail")
    assert "paused" not in browser.get("/").text
    goes_on = threading.Event()

    def read_slowly(*arguments: Any) -> Any:
        assert goes_on.wait(30)
        return read_overview(*arguments)

    app.queue("mail").pause()
    browser.site._pages.forget()
    monkeypatch.setattr(pages, "read_overview", read_slowly)
    assert "paused" not in browser.get("/").text
    goes_on.set()
    wait_until(lambda: "paused" in browser.get("/").text, 10, "the queue's pause")


@pytest.mark.parametrize("query", ["state=x", "cursor=x", "cursor=W10"])
def test_an_invalid_filter_or_cursor_is_an_error_page(browser: Browser, query: str) -> None:
    response = browser.get(f"/queues/mail?{query}")
    assert response.status_code in {404, 502}
    assert "This cannot be shown" in response.text


def test_the_search_box_finds_an_exact_id_in_any_queue_before_it_searches_for_text(browser: Browser, app: App) -> None:
    first = app.queue("mail").add("send", {"about": "shared words"}).id
    second = app.queue("a/b").add("send", {"about": "shared words"}).id
    found = browser.get("/search", params={"text": second})
    assert "/queues/a%252Fb/jobs/" + second in links(found.text)
    assert first not in found.text
    by_text = browser.get("/search?text=SHARED words")
    assert sorted(listed(by_text.text)) == sorted([first, second])
    assert "2 jobs of 2 of 2 queues were read" in text_of(by_text.text)
    assert "No queue has a job with this id" in browser.get("/search?text=meta").text


# ---- changes of many jobs ----


def test_all_jobs_that_match_are_counted_and_then_exactly_these_are_retried(browser: Browser, app: App) -> None:
    queue = app.queue("mail")
    add_failed(app, {"send#1": "host 1 refused", "send#2": "host 2 refused", "report": "no paper"})
    asked = send(browser, browser.get("/queues/mail?state=failed&text=refused"), "/changes/retry")
    assert "2 jobs match. Exactly these would be retried; nothing has been changed yet." in text_of(asked.text)
    assert queue.get_failed_count() == 3
    add_failed(app, {"send": "host 3 refused"})
    done = send(browser, asked, "/retry")
    wait_until(lambda: "2 of 2 jobs were retried." in text_of(browser.get(done.url.path).text), 5, "the change")
    assert (queue.get_failed_count(), queue.get_waiting_count()) == (2, 2)
    [entry] = [entry for entry in browser.site._pages.audit() if entry.action == "retry" and "2 jobs" in entry.outcome]
    assert entry.user == "anonymous"


def test_a_group_of_failures_is_retried_as_a_whole(browser: Browser, app: App) -> None:
    add_failed(app, {"send#1": "host 1 refused", "send#2": "host 2 refused", "post": "host 3 refused"})
    page = browser.get("/failures")
    assert "ConnectionError : host # refused" in text_of(page.text)
    asked = send(browser, page, "/changes/retry")  # of the largest group, which is the first
    assert "2 jobs match" in text_of(asked.text)
    send(browser, asked, "/retry")
    wait_until(lambda: app.queue("mail").get_waiting_count() == 2, 5, "the change")
    assert [job.name for job in app.queue("mail").get_failed()] == ["post"]


def test_a_queue_is_drained_and_cleaned_after_a_count(browser: Browser, app: App) -> None:
    queue = app.queue("mail")
    queue.add_bulk([{"name": "send"}] * 3)
    drain = send(browser, browser.get("/queues/mail"), "/changes/remove")
    assert "3 jobs match" in text_of(drain.text)
    send(browser, drain, "/remove")
    wait_until(lambda: queue.get_waiting_count() == 0, 5, "the change")
    add_failed(app, {"send": "no"})
    clean = {"state": "failed", "older_than_h": "1"}
    response = browser.act("/queues/mail/changes/remove", "/queues/mail", **clean)
    assert "No jobs match." in text_of(response.text)
    response = browser.act("/queues/mail/changes/remove", "/queues/mail", **{**clean, "older_than_h": "0"})
    assert "1 jobs match" in text_of(response.text)


def test_jobs_that_can_no_longer_be_changed_are_named(browser: Browser, app: App) -> None:
    gone, left = add_failed(app, {"send#1": "no", "send#2": "no"})
    asked = send(browser, browser.get("/queues/mail?state=failed"), "/changes/retry")
    app.queue("mail").remove(gone)
    done = send(browser, asked, "/retry")
    wait_until(lambda: "1 of 2 jobs were retried" in text_of(browser.get(done.url.path).text), 5, "the change")
    assert gone in text_of(browser.get(done.url.path).text)
    assert left not in text_of(browser.get(done.url.path).text)


def test_a_change_is_made_once_and_only_by_those_who_may(browser_with: Open, app: App) -> None:
    add_failed(app, {"send": "no"})
    admin = browser_with(user_header="x-user", proxies=["10.0.0.1"], roles={"ada": Role.ADMIN, "bob": Role.VIEWER})
    admin.headers["x-user"] = "ada"
    asked = send(admin, admin.get("/queues/mail"), "/changes/remove", state="failed")
    address = f"{asked.url.path}/remove"
    admin.headers["x-user"] = "bob"
    assert not forms(admin.get(asked.url.path).text)
    token = admin.site._access.form_token(User("bob", Role.VIEWER))
    assert admin.post(address, data={"form_token": token}).status_code == 403
    assert app.queue("mail").get_failed_count() == 1
    admin.headers["x-user"] = "ada"
    send(admin, asked, "/remove")
    wait_until(lambda: app.queue("mail").get_failed_count() == 0, 5, "the change")
    again = send(admin, asked, "/remove")
    assert "is not waiting to be confirmed" in text_of(again.text)


def test_a_change_can_be_stopped_and_too_many_at_a_time_are_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    app.queue("mail").add_bulk([{"name": "send"}] * 3)
    change = changes.Change(app, "mail", "remove", Filter("waiting"), older_than=None, user="ada")
    change.stop()
    change.begin(changes.Phase.COUNTING)
    change.wait(5)
    assert (change.phase, app.queue("mail").count()) == (changes.Phase.STOPPED, 3)
    monkeypatch.setattr(changes, "_MAX_RUNNING", 0)
    with pytest.raises(ConfigError, match="other changes are running"):
        changes.Changes(app).count("mail", "remove", Filter("waiting"), older_than=None, user="ada")


# ---- limits and schedules ----


def test_the_limits_of_a_queue_are_set_and_removed(browser: Browser, app: App) -> None:
    queue = app.queue("mail")
    queue.add("send")
    page = browser.get("/queues/mail")
    told = send(browser, page, "/limit", concurrency="3", jobs="10", seconds="0.5")
    assert "at most 3 jobs at a time, with at most 10 jobs per 0.5 s" in text_of(told.text)
    assert (queue.get_global_concurrency(), queue.get_global_rate_limit()) == (3, RateLimit(10, 0.5))
    assert 'name="concurrency" min="1" value="3"' in told.text
    for wrong in ({"concurrency": "x"}, {"concurrency": "1.5"}, {"concurrency": "0"}, {"jobs": "1"}):
        assert "Error: " in text_of(send(browser, page, "/limit", **wrong).text)
    assert queue.get_global_concurrency() == 3
    send(browser, page, "/limit", concurrency="", jobs="", seconds="")
    assert (queue.get_global_concurrency(), queue.get_global_rate_limit()) == (None, None)


def test_a_changed_limit_does_not_wait_for_the_end_of_the_old_period(browser: Browser, app: App) -> None:
    queue = app.queue("mail")
    queue.add_bulk([{"name": "send"}, {"name": "send"}])
    page = browser.get("/queues/mail")
    send(browser, page, "/limit", jobs="1", seconds="3600")
    assert queue.get_next_job("token") is not None
    send(browser, page, "/limit", jobs="1", seconds="3600", concurrency="3")
    assert queue.get_rate_limit_ttl() > 0, "it is the same limit"
    send(browser, page, "/limit", jobs="1", seconds="60")
    assert queue.get_rate_limit_ttl() == 0


def test_schedules_show_their_next_times_and_last_runs_and_are_run_and_removed(browser: Browser, app: App) -> None:
    queue = app.queue("mail")
    queue.schedulers.upsert("nightly/1", cron="0 3 * * *", name="report", data={"to": "ada"})
    queue.schedulers.upsert("often", every=60, options={"attempts": 1})
    acquired = queue.get_next_job("token")
    assert acquired is not None
    acquired.move_to_failed(ConnectionError("no paper"))
    page = browser.get("/schedules")
    assert "2 of 2 schedules" in text_of(page.text)
    assert "0 3 * * *" in page.text
    assert "every 1 min" in page.text
    shown = browser.get("/queues/mail/schedules/often")
    assert "no paper" in text_of(shown.text)
    assert listed(shown.text) == [acquired.id]
    nightly = browser.get("/queues/mail/schedules/nightly%252F1")
    assert len(re.findall(r"<li><time", nightly.text)) == 5
    ran = send(browser, nightly, "/run")
    assert "has added this job" in text_of(ran.text)
    assert [job.name for job in queue.get_waiting()] == ["report"]
    assert "tick the box" in text_of(send(browser, nightly, "/remove").text)
    assert queue.schedulers.count() == 2
    send(browser, nightly, "/remove", sure="yes")
    assert [item.id for item in queue.schedulers.list()] == ["often"]
    assert browser.get("/queues/mail/schedules/nightly%252F1").status_code == 404


def test_a_paused_schedule_is_listed_last_with_who_has_paused_it_and_can_be_resumed(
    browser_with: Open, app: App
) -> None:
    queue = app.queue("mail")
    queue.schedulers.upsert("hourly", every=3600)
    queue.schedulers.upsert("nightly", cron="0 3 * * *")
    browser = browser_with(user_header="X-User", proxies=["10.0.0.1"], roles={"<ada>": Role.OPERATOR})
    browser.headers["x-user"] = "<ada>"
    told = send(browser, browser.get("/queues/mail/schedules/hourly"), "/hourly/pause")
    assert "Schedule hourly of queue mail is paused." in text_of(told.text)
    assert "<dd>paused since <time" in told.text
    assert "<li><time" not in told.text
    paused = queue.schedulers.get("hourly")
    assert paused is not None
    assert paused.paused_by == "<ada>, by the dashboard"
    page = browser.get("/schedules")
    assert "2 of 2 schedules" in text_of(page.text)
    assert re.findall(r"/schedules/(\w+)", " ".join(links(page.text))) == ["nightly", "hourly"]
    assert re.search(r"paused since \d{4}-\d\d-\d\d [\d:]{8} by <ada>, by the dashboard ", text_of(page.text))
    assert [address for address, _ in forms(page.text) if address.endswith(("/pause", "/resume"))] == [
        "/queues/mail/schedules/nightly/pause",
        "/queues/mail/schedules/hourly/resume",
    ]
    told = send(browser, page, "/hourly/resume")
    assert "Schedule hourly of queue mail adds jobs again." in text_of(told.text)
    assert {item.id for item in queue.schedulers.list()} == {"hourly", "nightly"}
    queue.schedulers.remove("hourly")
    for gone in ("pause", "resume"):
        assert browser.act(f"/queues/mail/schedules/hourly/{gone}", "/schedules").status_code == 404
    done = [(entry.user, entry.action, entry.target) for entry in Audit(app).newest(10) if not entry.is_refused]
    assert done == [("<ada>", action, "queue mail, scheduler hourly") for action in ("resume", "pause")]


# ---- running a task ----


class Color(Enum):
    RED = "red"
    BLUE = "blue"


def with_task(app: App) -> None:
    @app.task(name="paint", queue="mail")
    def paint(  # noqa: PLR0917 - one of each kind
        area: int,
        color: Color,
        factor: float = 1.5,
        fast: bool = False,
        mode: Literal["x", "y"] = "x",
        note: str | None = None,
        rooms: list[str] | None = None,
        at: datetime | None = None,
        **more: int,
    ) -> None:
        """Paint rooms.

        Slowly.
        """


def test_a_task_is_run_by_a_form_that_is_made_from_its_type_hints(browser: Browser, app: App) -> None:
    with_task(app)
    assert "paint Paint rooms." in text_of(browser.get("/run").text)
    page = browser.get("/run/paint")
    assert 'id="arg:area" name="arg:area" type="number" step="1"' in page.text
    assert re.findall(r'<option value="([^"]*)"', page.text)[:2] == ["&#34;red&#34;", "&#34;blue&#34;"]
    typed = {"arg:area": "7", "arg:color": '"blue"', "arg:factor": "2.5", "arg:fast": "true", "arg:rooms": '["hall"]'}
    sent = send(browser, page, "/run/paint", **typed, **{"arg:more": '{"coats": 2}', "countdown": "60", "job_id": "j1"})
    assert sent.url.path == "/queues/mail/jobs/j1"
    job = app.queue("mail").get_job("j1")
    assert job is not None
    expected = {"area": 7, "color": "blue", "factor": 2.5, "fast": True, "rooms": ["hall"], "more": {"coats": 2}}
    assert (job.data, job.delay_ms) == (expected, 60_000)


def test_what_was_typed_stays_in_the_form_with_what_is_wrong_with_it(browser: Browser, app: App) -> None:
    with_task(app)
    typed = {"arg:area": "many", "arg:color": '"green"', "arg:rooms": "[", "arg:note": "<b>", "priority": ""}
    again = send(browser, browser.get("/run/paint"), "/run/paint", **typed)
    assert again.status_code == 422
    assert all(text in again.text for text in ("enter a whole number", "choose one of the values", "enter JSON"))
    assert 'value="&lt;b&gt;"' in again.text
    assert 'id="live"' not in again.text, "an update would replace what was typed"
    again = send(
        browser,
        again,
        "/run/paint",
        **{**typed, "arg:area": "1", "arg:color": '"red"', "arg:rooms": "[1]", "arg:at": "noon"},
    )
    assert "at: " in text_of(again.text)
    assert app.queue("mail").count() == 0


def test_any_task_is_run_by_its_name_with_json(browser: Browser, app: App) -> None:
    page = browser.get("/run")
    sent = send(browser, page, "/run", task="other.task", data='{"x": [1]}', queue="mail", job_id="j1")
    assert sent.url.path == "/queues/mail/jobs/j1"
    job = app.queue("mail").get_job("j1")
    assert job is not None
    assert (job.name, job.data) == ("other.task", {"x": [1]})
    for wrong in ({"task": "", "data": ""}, {"task": "t", "data": "{"}, {"task": "t", "data": "5"}):
        assert send(browser, page, "/run", **wrong).status_code == 422
    assert send(browser, page, "/run", task="t", priority="x").status_code == 422


def test_positional_arguments_and_arguments_without_hints_have_fields(app: App) -> None:
    @app.task(name="sum")
    def total(first: int, /, second: int = 2, *rest: int, flag: bool = False) -> None: ...

    form = task_form(app, total)
    assert form.arguments({"arg:first": "1"}).args == [1]
    every = form.arguments({"arg:first": "1", "arg:second": "3", "arg:rest": "[4, 5]", "arg:flag": "true"})
    assert (every.args, every.kwargs) == ([1, 3, 4, 5], {"flag": True})
    with pytest.raises(Invalid, match="required before rest"):
        form.arguments({"arg:first": "1", "arg:rest": "[4]"})
    with pytest.raises(Invalid, match="required"):
        form.arguments({})
    with pytest.raises(Invalid, match="enter a JSON array"):
        form.arguments({"arg:first": "1", "arg:second": "1", "arg:rest": "4"})


@pytest.mark.parametrize(
    ("kind", "text"), [("integer", "1.5"), ("number", "nan"), ("number", "1e999"), ("json", "NaN")]
)
def test_what_json_cannot_express_is_refused(kind: Any, text: str) -> None:
    with pytest.raises(ValueError, match="enter"):
        Field("x", kind, True, "", (), "", False).parse(text)


# ---- encrypted jobs, workers and history ----


def test_an_encrypted_job_shows_no_data_and_no_result(broker_url: str) -> None:
    app = App("secret", broker_url, payload_encryption_keys={"*": KEY})

    @app.task(name="greet", queue="mail")
    def greet(name: str) -> str:
        return f"hello {name}"

    site = Dashboard(app, Access(anonymous=Role.ADMIN))
    with use_server(app, broker_url), InlineWorker(app) as worker, Browser(site) as browser:
        job_id = greet.delay("grace hopper").id
        waiting = browser.get(f"/queues/mail/jobs/{job_id}").text
        worker.run_jobs()
        browser.site._pages.forget()
        completed = browser.get(f"/queues/mail/jobs/{job_id}").text
    assert "encrypted (key e1)" in waiting
    assert "completed" in completed
    assert "grace" not in waiting + completed
    assert "bulltask:payload" not in completed


def test_a_worker_is_seen_and_obeys_orders(browser: Browser, app: App, tmp_path: Path, broker_url: str) -> None:
    (tmp_path / "shop.py").write_text(APP)
    options = ("-Q", "mail", "-c", "1", "-n", "web@host")
    with WorkerProcess.start("shop:app", *options, broker_url=broker_url, directory=tmp_path) as worker:
        [worker_id] = wait_until(lambda: app.queue("mail").get_worker_states(), 5, "the worker's state")
        page = browser.get("/workers")
        assert worker_id in page.text
        assert f"pid {worker.pid}" in text_of(page.text)
        told = browser.act("/workers/control", "/workers", worker=worker_id, order="pause")
        assert text_of(told.text).startswith(f"{worker_id}: it is paused")
        assert app.control.inspect().ping() is not None
        unsure = browser.act("/workers/control", "/workers", worker=worker_id, order="shutdown")
        assert "tick the box" in text_of(unsure.text)
        wrong = browser.act("/workers/control", "/workers", worker=worker_id, order="obliterate")
        assert "there is no order" in text_of(wrong.text)
        assert browser.act("/workers/control", "/workers", worker="*", order="pause").status_code == 404
        browser.act("/workers/control", "/workers", worker=worker_id, order="shutdown", sure="yes")
        wait_until(lambda: not worker.is_running, 10, "the worker's exit")
    browser.site._pages.forget()
    assert "No worker of bulltask is connected." in text_of(browser.get("/workers").text)


def test_the_history_has_jobs_that_redis_no_longer_has(browser_with: Open, app: App, tmp_path: Path) -> None:
    lake = LakeBuilder(tmp_path / "lake")
    end = at("2026-11-20 10:00", 250)
    name = {"incarnation": "1-0", "name": "send"}
    lake.jobs(
        [
            {**name, "job_id": f"gone/{n}", "state": "failed", "finished_at": end, "failed_reason": f"<b>no {n}"}
            for n in range(60)
        ]
    )
    browser = browser_with(anonymous=Role.VIEWER, lake=lake.root)
    page = browser.get("/history?state=failed&since=2026-11-01")
    found = re.findall(r'href="(/history/[^"?]*)"', page.text)
    assert len(found) == 50
    assert "&lt;b&gt;no" in page.text
    [following] = [link for link in links(page.text) if "cursor=" in link]
    assert len(re.findall(r'href="/history/[^"?]*"', browser.get(f"/history{following}").text)) == 10
    assert "failed" in text_of(browser.get(found[0]).text)
    gone = browser.get("/queues/mail/jobs/gone%252F7")
    assert gone.status_code == 404
    assert "failed" in text_of(browser.get(next(link for link in links(gone.text) if "/history/" in link)).text)
    waiting = app.send_task("send", queue="mail").id
    assert f"/history/mail/{waiting}" in links(browser.get(f"/queues/mail/jobs/{waiting}").text)
    [of_queue] = [link for link in links(browser.get("/queues/mail").text) if link.startswith("/history?")]
    assert len(re.findall(r'href="/history/[^"?]*"', browser.get(of_queue).text)) == 50
    assert "must be a time" in browser.get("/history?since=yesterday").text
    assert browser.get("/history/mail/nothing").status_code in {404, 502}


def test_without_a_lake_there_is_no_history(browser: Browser) -> None:
    assert "History" not in browser.get("/").text
    assert browser.get("/history").status_code == 404
