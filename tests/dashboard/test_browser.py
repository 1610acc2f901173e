"""The dashboard in Chromium, as its users see it: live, by keyboard, on a phone, with hostile names, in both themes."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest
import redis
from starlette.responses import HTMLResponse

from bulltask import App, group
from bulltask.dashboard import Access, Dashboard, Role, site
from bulltask.dashboard import pages as pages_module
from bulltask.testing.worker import wait_until
from tests.dashboard.conftest import SECRET
from tests.dashboard.test_hostile_names import NAMES, TEXT, write_job
from tests.support.browser import Chromium, Keys, served
from tests.support.lake import LakeBuilder, at
from tests.support.worker_harness import WorkerHarness

pytestmark = [pytest.mark.redis, pytest.mark.process]

TOKEN: Final = "the token of the dashboard in these tests"
AXE: Final = Path(__file__).parents[1] / "interop/node_modules/axe-core/axe.min.js"

TASKS: Final = '''
@app.task(bind=True, name="shop.ship", queue="orders", max_retries=0)
def ship(self, order: int) -> str:
    """Ship an order."""
    record("start", job=self.request.id)
    if not journal().exists("stock"):
        raise ValueError("out of stock")
    wait_at("truck")
    return "shipped"
'''


@pytest.fixture(scope="module")
def chromium(session_processes: set[int]) -> Iterator[Chromium]:
    """The browser of these tests: starting one takes a second."""
    with Chromium.opened() as chromium:
        session_processes.add(chromium.pid)
        yield chromium
    session_processes.discard(chromium.pid)


Open = Callable[..., str]


@pytest.fixture
def _pages_are_updated_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look for news every quarter of a second, instead of every two."""
    monkeypatch.setattr(site, "LIVE_S", 0.25)
    monkeypatch.setattr(pages_module, "MIN_AGE_S", 0.1)
    monkeypatch.setattr(pages_module, "COST", 1)


@pytest.fixture
def serve(app: App) -> Iterator[Open]:
    """Serve a dashboard with these arguments of ``Access``, and return its address."""
    with ExitStack() as stack:

        def start(lake: Path | None = None, **access: Any) -> str:
            dashboard = Dashboard(app, Access(**{"secret": SECRET, **(access or {"anonymous": Role.ADMIN})}), lake=lake)
            return stack.enter_context(served(dashboard))

        yield start


@pytest.fixture
def page(chromium: Chromium, serve: Open) -> Iterator[Chromium]:
    """A new visitor's browser; afterwards, no page may have done what it must not do."""
    chromium.forget()
    yield chromium
    misdeeds = chromium.misdeeds()
    chromium.driver.get("about:blank")
    assert misdeeds == []


@pytest.fixture
def harness(
    broker_url: str, single_url: str, tmp_path: Path, record_property: Callable[[str, object], None]
) -> Iterator[WorkerHarness]:
    """Starts a worker."""
    harness = WorkerHarness(single_url, tmp_path, record_property, broker_url=broker_url)
    yield harness
    harness.close()


def fail(app: App, queue: str, error: str, task: str = "send") -> str:
    """Add a job that has failed; return its id."""
    job = app.queue(queue).add(task, {"to": "ada@example.org"}, attempts=1)
    acquired = app.queue(queue).get_next_job("token")
    assert acquired is not None
    acquired.move_to_failed(ConnectionError(error))
    return job.id


# ---- what users do ----


@pytest.mark.usefixtures("_pages_are_updated_soon")
def test_a_failed_job_is_retried_and_seen_to_complete_live(page: Chromium, serve: Open, harness: WorkerHarness) -> None:
    harness.worker(TASKS, children=1)
    job = harness.app.send_task("shop.ship", args=[7], queue="orders")
    wait_until(lambda: harness.app.queue("orders").get_job_counts("failed")["failed"], 30, "the failure")
    harness.redis.set("stock", 1)
    page.driver.get(serve())
    page.click("1 failed jobs of orders")
    page.click(job.id)
    assert "out of stock" in page.text(".why")
    page.click("Retry")
    page.wait_for("waits again", ".notice")
    page.run("window.same = true")
    page.wait_for("active", "#state")
    harness.open_gate("truck")
    page.wait_for("completed", "#state")
    page.wait_for('"shipped"')
    assert page.text("#live") == "live"
    assert page.run("return window.same"), "the page was not loaded again"
    page.click("Audit")
    page.wait_for(f"retry queue orders, job {job.id} Job {job.id} waits again.")


@pytest.mark.usefixtures("_pages_are_updated_soon")
def test_why_a_queue_is_stuck_is_read_and_mended(page: Chromium, serve: Open, app: App) -> None:
    app.queue("orders").add("shop.ship", {"order": 7})
    app.queue("orders").pause(by="ann")
    page.driver.get(serve())
    page.click("orders")
    page.wait_for("Queue orders is paused since", ".why")
    assert "by ann: no worker acquires its jobs until it is resumed bulltask queue resume orders" in page.text(".why")
    page.click("Evidence")
    page.click("Resume")
    page.wait_for("No worker of queue orders is connected", ".why")
    assert "paused" not in page.text(".why")
    assert "bulltask worker -A APP -Q orders" in page.text(".why")


@pytest.mark.usefixtures("_pages_are_updated_soon")
def test_details_that_were_opened_stay_open_and_what_is_typed_stays_when_the_page_changes(
    page: Chromium, serve: Open, app: App
) -> None:
    app.queue("orders").add("shop.ship", {"order": 7})
    page.driver.get(f"{serve()}/queues/orders")
    page.click("Limits")
    app.queue("orders").add("shop.ship", {"order": 8})
    page.wait_for("waiting 2", ".tabs")
    assert page.find("details[data-key=limits]").get_property("open")
    page.run("document.querySelector('input[name=concurrency]').focus()")
    page.press("3")
    app.queue("orders").add("shop.ship", {"order": 9})
    page.wait_for("held while you type", "#live")
    assert page.find("input[name=concurrency]").get_property("value") == "3"
    page.press(Keys.ENTER)
    page.wait_for("waiting 3", ".tabs")
    assert app.queue("orders").get_global_concurrency() == 3


def test_a_workflow_of_200_jobs_is_drawn_and_made_larger(page: Chromium, serve: Open, app: App) -> None:
    @app.task(name="shop.load")
    def load(day: int) -> int:
        return day

    @app.task(name="shop.sum")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    result = (group(load.s(day) | load.si(day) for day in range(99)) | total.s() | load.s()).delay()
    page.driver.get(f"{serve()}/queues/default/jobs/{result.id}/workflow")
    assert "200 jobs" in page.text()
    boxes = page.run("return [...document.querySelectorAll('.job')].map((one) => one.getBoundingClientRect().toJSON())")
    assert len(boxes) == 200
    assert all(not overlap(one, other) for at, one in enumerate(boxes) for other in boxes[:at])
    width = "return document.querySelector('.graph').getBoundingClientRect().width"
    page.click("All")
    fits = page.run(width)
    assert fits <= page.run("return document.querySelector('.pan').clientWidth")
    page.click("100 %")
    full = page.run(width)
    assert full > fits
    page.run("document.querySelector('.pan').focus()")
    page.press("+")
    assert page.run(width) == pytest.approx(full * 1.4, rel=0.01)
    page.find(".job[aria-current]").click()
    page.wait_for("shop.load", "h1")


def overlap(one: dict[str, float], other: dict[str, float]) -> bool:
    """Return whether two boxes have common points."""
    across = min(one["right"], other["right"]) - max(one["left"], other["left"])
    return across > 0.5 and min(one["bottom"], other["bottom"]) - max(one["top"], other["top"]) > 0.5


@pytest.mark.usefixtures("_pages_are_updated_soon")
def test_the_keyboard_suffices(page: Chromium, serve: Open, app: App) -> None:
    job_id = fail(app, "orders", "out of stock")
    page.driver.get(serve())
    page.press(Keys.TAB)
    assert page.driver.switch_to.active_element.text == "Skip to the content"
    page.press(Keys.ENTER)
    page.press(Keys.TAB)
    # In one step: an update of the page may replace the element.
    assert page.run("return document.activeElement.innerText.trim()") == "orders"
    assert page.run("return getComputedStyle(document.activeElement).outlineStyle") == "solid"
    page.press("/")
    page.press("out of", Keys.ENTER)
    page.wait_for("Find out of", "h1")
    page.focus(job_id)
    page.press(Keys.ENTER)
    page.wait_for("failed", "#state")
    page.focus("Remove")
    page.press(Keys.ENTER)
    assert page.driver.switch_to.alert.text == "Remove this job, with its data and result?"
    page.driver.switch_to.alert.dismiss()
    assert app.queue("orders").get_job(job_id) is not None
    app.queue("orders").get_job(job_id).update_progress(50)  # type: ignore[union-attr]
    page.wait_for("Progress 50")
    assert page.driver.switch_to.active_element.accessible_name == "Remove", "an update keeps the focus"
    page.press(Keys.SPACE)
    page.driver.switch_to.alert.accept()
    page.wait_for("is removed", ".notice")


def test_the_theme_that_was_chosen_is_kept(page: Chromium, serve: Open) -> None:
    background = "return getComputedStyle(document.body).backgroundColor"
    page.driver.get(serve())
    light = page.run(background)
    page.click("Dark or light")
    dark = page.run(background)
    assert dark != light
    page.driver.refresh()
    assert page.run(background) == dark
    page.run("localStorage.clear()")
    page.look_like(dark=True)
    page.driver.refresh()
    assert page.run(background) == dark


# ---- what nobody may do ----


SUMMARY: Final = """return [window.seen, document.body.innerText, document.title,
    [...document.querySelectorAll("main a")].map((one) => one.getAttribute("href"))]"""


def test_hostile_names_and_payloads_do_nothing(
    page: Chromium, serve: Open, redis_client: redis.Redis, app: App
) -> None:
    for name in NAMES:
        write_job(redis_client, name, name, "failed")
        app.queue(name).schedulers.upsert(name, name=name, every=3600, data={TEXT: TEXT})
    address = serve()
    misdeeds, shown = [], ""
    left, seen = ["/", "/failures", "/charts", "/schedules", "/workers", "/audit", "/search?text=script"], set[str]()
    while left:
        path = left.pop()
        seen.add(path)
        page.driver.get(address + path)
        seen_there, text, title, links = page.run(SUMMARY)
        misdeeds += seen_there
        shown += text
        assert title.endswith("· bulltask")
        kinds = {link.count("/"): link for link in links if link.startswith("/queues/") and "?" not in link}
        left += [link for link in kinds.values() if link not in seen and link not in left and len(seen) < 20]
    assert misdeeds == []
    assert "<script>alert(1)</script>" in shown
    assert sum("/jobs/" in path for path in seen) > 2
    assert page.run("return localStorage.length + document.querySelectorAll('main script, main i').length") == 0


def test_a_page_with_a_foreign_script_would_be_noticed(page: Chromium, serve: Open) -> None:
    page.driver.get(serve())
    page.run("document.body.innerHTML += '<img src=x onerror=alert(1)><i style=color:red>'")
    page.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'alert(2)'}))")
    # Three violations of the policy, and the picture that does not exist.
    wait_until(lambda: len(page.run("return window.seen")) >= 4, 30, "what the page must not do")
    seen = page.run("return window.seen.splice(0)")
    assert not any("called" in what for what in seen), "the policy has forbidden it"
    assert {what.split()[1] for what in seen if "policy" in what} == {
        "script-src-attr",
        "script-src-elem",
        "style-src-attr",
    }
    page.driver.get_log("browser")


def test_users_log_in_and_out_and_their_session_is_no_scripts_business(page: Chromium, serve: Open, app: App) -> None:
    app.send_task("send", queue="mail")
    address = serve(token=TOKEN)
    page.driver.get(f"{address}/queues/mail")
    page.wait_for("Log in", "h1")
    page.find("input[type=password]").send_keys("a guess", Keys.ENTER)
    page.wait_for("Wrong token or password.", "[role=alert]")
    page.driver.get(f"{address}/login?token={TOKEN}")
    page.wait_for("Overview", "h1")
    assert TOKEN not in page.driver.current_url
    (cookie,) = page.driver.get_cookies()
    assert cookie["httpOnly"]
    assert page.run("return document.cookie") == ""
    page.click("Audit")
    page.wait_for("login refused", "tbody")
    page.click("Log out")
    page.wait_for("Log in", "h1")
    page.driver.back()
    page.wait_for("Log in", "h1")
    page.driver.get_log("browser")  # the answer to the guess was an error


def test_a_reader_finds_no_button_and_another_site_changes_nothing(page: Chromium, serve: Open, app: App) -> None:
    job_id = fail(app, "orders", "out of stock")
    reader, admin = serve(anonymous=Role.ADMIN, read_only=True), serve(token=TOKEN)
    for path in ("/queues/orders?state=failed", f"/queues/orders/jobs/{job_id}", "/failures", "/schedules", "/workers"):
        page.driver.get(reader + path)
        assert (
            page.run("return document.querySelectorAll('main form[method=post], main button:not(.ask *)').length") == 0
        )
    page.driver.get(f"{admin}/login?token={TOKEN}")
    form = f"<form method=post action='{admin}/queues/orders/pause'><input name=form_token value=x></form>"
    with served(HTMLResponse(f"{form}<script>document.forms[0].submit()</script>")) as evil:
        page.driver.get(evil)
        page.wait_for("This form was not sent", "main")
    assert not app.queue("orders").is_paused()
    page.driver.get(f"{admin}/audit")
    page.wait_for("pause refused queue orders", "tbody")
    page.driver.get_log("browser")  # the refusal was an error


# ---- every page ----


@pytest.fixture
def pages(app: App, serve: Open, harness: WorkerHarness, tmp_path: Path, redis_client: redis.Redis) -> list[str]:
    """The addresses of all kinds of pages, of a server on which much has happened, with long names."""
    worker = harness.worker(TASKS, children=1)
    long = "a-long-name-" * 8
    held = harness.hold("never", queue="default")

    @app.task(name="shop.ship")
    def ship(order: int, *, gift: bool = False, note: str | None = None, lines: list[int] | None = None) -> str:
        """Ship an order."""
        return "shipped"

    @app.task(name=long)
    def total(sent: list[str]) -> int:
        return len(sent)

    failed = fail(app, "orders", "out of stock " * 20, long)
    redis_client.hset(
        harness.keys_of("orders").job(failed), "stacktrace", json.dumps(["Traceback\n" + "line\n" * 99] * 3)
    )
    app.queue("orders").get_job(failed).log("packed " * 50)  # type: ignore[union-attr]
    fail(app, long, "timeout")
    app.queue("orders").pause()
    app.queue("orders").add(long, {"order": 7, "note": "x" * 300}, delay=60)
    app.queue("orders").schedulers.upsert(long, name="shop.ship", every=3600, data={"order": 7})
    flow = (group(ship.s(order) for order in range(3)) | total.s()).apply_async(queue="orders")
    lake = LakeBuilder(tmp_path / "lake")
    lake.jobs(
        [
            {
                "incarnation": "1-0",
                "name": "send",
                "job_id": "1",
                "queue": "mail",
                "state": "failed",
                "finished_at": at("2026-11-20 10:00"),
                "failed_reason": "no " * 90,
            }
        ]
    )
    harness.wait_for_start(held)
    del worker
    root = serve(lake.root, anonymous=Role.ADMIN)
    with_login = serve(token=TOKEN)
    paths = [
        "/", "/workers", "/failures", "/charts", "/schedules", "/run", "/run/shop.ship", "/history", "/audit",
        "/history/mail/1", "/search?text=stock", f"/queues/{long}/charts", "/queues/orders",
        "/queues/orders?state=failed", f"/queues/orders/schedules/{long}", f"/queues/orders/jobs/{failed}",
        f"/queues/default/jobs/{held.id}", f"/queues/orders/jobs/{flow.id}/workflow", "/nothing",
    ]  # fmt: skip
    return [f"{with_login}/login", *(root + path for path in paths)]


@pytest.mark.extended
def test_every_page_is_accessible_in_both_themes_and_fits_a_phone(chromium: Chromium, pages: list[str]) -> None:
    chromium.forget()
    if not AXE.exists():
        pytest.skip("needs axe-core: npm ci in tests/interop")
    problems = list[str]()
    with chromium.having_run_in_each_page(AXE.read_text()):
        for address in pages:
            chromium.driver.get(address)
            problems += check(chromium, address)
            if address.endswith("/queues/orders?state=failed"):
                chromium.click("Retry all…")
                problems += check(chromium, "change")
            if address.endswith("/run/shop.ship"):
                chromium.find("#arg\\:order").send_keys("1")
                chromium.find("#arg\\:lines").send_keys("no list")
                chromium.click("Run", "main button")
                chromium.wait_for("Nothing was sent")
                problems += check(chromium, "run with errors")
    assert problems == []


FIND_PROBLEMS: Final = """const [options, done] = arguments;
document.querySelectorAll("details").forEach((one) => { one.open = true; });
// A background of several colours, such as the shadows beside a table, is none that axe can judge.
const plain = new CSSStyleSheet();
plain.replaceSync(".scroll { background-image: none !important; }");
document.adoptedStyleSheets = [plain];
axe.run(document, options).then((found) => done(found.violations), (error) => done([{id: String(error), nodes: [{}]}]));
"""
TOO_WIDE: Final = """return document.scrollingElement.scrollWidth <= 360 ? [] :
    [...document.querySelectorAll("body *")]
    .filter((one) => one.getBoundingClientRect().right > 361 && !one.closest(".scroll, .tabs, .pan, pre, .card"))
    .slice(0, 3).map((one) => one.outerHTML.slice(0, 150)).concat(["too wide"])"""


def check(chromium: Chromium, name: str) -> list[str]:
    """Return what axe-core finds on a page, with all details open, and what is too wide for a phone."""
    problems = list[str]()
    for theme in ("light", "dark"):
        chromium.look_like(dark=theme == "dark")
        # Only colours depend on the theme.
        options = {"resultTypes": ["violations"], **({"runOnly": ["color-contrast"]} if theme == "dark" else {})}
        problems += [
            f"{name} ({theme}): {rule['id']}: {node.get('html', '')[:200]} {node.get('failureSummary', '')[:300]}"
            for rule in chromium.driver.execute_async_script(FIND_PROBLEMS, options)
            for node in rule["nodes"][:3]
        ]
    chromium.look_like(360, 740)
    return problems + [f"{name}: {what}" for what in chromium.run(TOO_WIDE)]
