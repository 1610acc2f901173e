"""The pages of the dashboard with pictures: a job's timeline, its workflow, and charts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from pathlib import Path
from time import process_time
from typing import Any
from xml.etree import ElementTree

import pytest
from redis import Redis

from bulltask import App, chain, group
from bulltask.dashboard import Role
from bulltask.dashboard.pages import _History
from bulltask.queue import FlowJob
from bulltask.testing import InlineWorker, use_server
from tests.dashboard.conftest import Browser
from tests.support.lake import LakeBuilder

pytestmark = pytest.mark.redis


@pytest.fixture
def shop(app: App, broker_url: str) -> Iterator[App]:
    """An app with tasks."""

    @app.task(name="shop.add")
    def add(x: int, y: int = 0) -> int:
        return x + y

    @app.task(name="shop.sum")
    def total(numbers: list[int]) -> int:
        return sum(numbers)

    @app.task(name="shop.fail")
    def fail() -> None:
        raise ValueError("no stock")

    with use_server(app, broker_url):
        yield app


def forget(browser: Any) -> None:
    """Let the dashboard read everything again."""
    browser.site._pages.forget()


def graph_of(browser: Browser, queue: str, job_id: str) -> ElementTree.Element:
    """Return the picture of a workflow."""
    page = browser.get(f"/queues/{queue}/jobs/{job_id}/workflow")
    assert page.status_code == 200, page.text
    found = re.search(r'<svg class="graph".*?</svg>', page.text, re.DOTALL)
    assert found is not None
    return ElementTree.fromstring(found[0])


def titles(picture: ElementTree.Element) -> list[str]:
    return sorted((link.get("aria-label") or "").partition(";")[0] for link in picture.findall(".//a"))


def test_a_workflow_is_drawn_from_each_of_its_jobs(shop: App, browser: Browser) -> None:
    add, total = shop.tasks["shop.add"], shop.tasks["shop.sum"]
    workflow = chain(add.s(1, 2), group(add.s(3), add.s(4)), total.s()).delay()
    expected = [
        "fan-out, waiting-children",
        "shop.add, waiting",
        *["shop.add, waiting-children"] * 2,
        "shop.sum, waiting-children",
    ]
    picture = graph_of(browser, "default", workflow.id)
    assert titles(picture) == expected
    assert len(picture.findall(".//path[@marker-start]")) == 5
    for link in picture.findall(".//a"):
        job_id = str(link.get("href")).rpartition("/")[2]
        assert titles(graph_of(browser, "default", job_id)) == expected
    with InlineWorker(shop) as worker:
        worker.run_jobs(propagate=False)
    assert workflow.get(timeout=5) == 13
    forget(browser)
    picture = graph_of(browser, "default", workflow.id)
    assert titles(picture) == ["fan-out, completed", *["shop.add, completed"] * 3, "shop.sum, completed"]
    assert len(picture.findall(".//path[@marker-start]")) == 5


def test_a_flow_across_queues_has_the_states_and_links_of_its_jobs(shop: App, browser: Browser) -> None:
    flow = shop.flows().add(
        FlowJob("report", "reports", children=[
            FlowJob("shop.fail", "loads", {}, {"ignore_dependency_on_failure": True}),
            FlowJob("<i>load</i>", "loads/2 <b>", {}, {"delay": 60, "job_id": "a/b"}),
        ])
    )  # fmt: skip
    with InlineWorker(shop) as worker:
        worker.run_jobs(propagate=False)
    picture = graph_of(browser, "reports", flow.job.id)
    assert titles(picture) == ["<i>load</i>, delayed", "report, waiting-children", "shop.fail, failed: no stock"]
    [href] = [str(link.get("href")) for link in picture.findall(".//a") if "delayed" in str(link.get("aria-label"))]
    assert href == "/queues/loads%252F2%2520%253Cb%253E/jobs/a%252Fb"
    page = browser.get(f"/queues/reports/jobs/{flow.job.id}/workflow").text
    assert "&lt;i&gt;load" in page
    assert "<i>" not in page
    assert "Graph of its workflow" in browser.get(f"/queues/reports/jobs/{flow.job.id}").text


def test_a_workflow_without_its_removed_jobs_says_how_many_are_missing(shop: App, browser: Browser) -> None:
    children = [FlowJob("shop.add", "default", {"x": at}, {"remove_on_complete": True}) for at in range(3)]
    flow = shop.flows().add(FlowJob("report", "reports", children=children))
    with InlineWorker(shop) as worker:
        worker.run_jobs(propagate=False)
    page = browser.get(f"/queues/reports/jobs/{flow.job.id}/workflow")
    assert "3 jobs below others are not shown" in page.text
    assert "+3<title>" in page.text
    assert browser.get("/queues/reports/jobs/nothing/workflow").status_code == 404


HOSTILE_KEYS = ["garbage", "a:b", "bull:{x:1", "bull::", "bull:{}:1", ":::", "bull:{reports}:one", "\xff<b>"]


@pytest.mark.parametrize("key", HOSTILE_KEYS)
def test_hostile_links_and_times_of_a_job_do_nothing(
    shop: App, browser: Browser, redis_client: Redis, key: str
) -> None:
    shop.queue("reports").add("report", {}, job_id="one")
    base = "bull:{reports}:one"
    redis_client.hset(base, mapping={"parentKey": key, "timestamp": 10**30, "finishedOn": -(10**30)})
    redis_client.sadd(f"{base}:dependencies", base, key)
    redis_client.hset(f"{base}:processed", mapping={base: "{", "x": "1"})
    assert titles(graph_of(browser, "reports", "one"))[0].startswith("report, ")
    assert browser.get("/queues/reports/jobs/one").status_code == 200


def test_a_workflow_of_a_thousand_jobs_is_drawn_quickly_and_a_larger_one_in_part(shop: App, browser: Browser) -> None:
    children = [FlowJob("shop.add", f"q{at % 3}", {"x": at}) for at in range(1_200)]
    flow = shop.flows().add(FlowJob("report", "reports", children=children))
    browser.get("/workers")
    started = process_time()
    picture = graph_of(browser, "reports", flow.job.id)
    assert process_time() - started < 1.0  # 0.2 s on an idle machine
    assert len(picture.findall(".//a")) == 1_000
    page = browser.get(f"/queues/reports/jobs/{flow.job.id}/workflow").text
    assert "201 jobs below others are not shown" in page
    assert "The workflow is larger" in page


def timeline_of(browser: Browser, queue: str, job_id: str) -> list[str]:
    page = browser.get(f"/queues/{queue}/jobs/{job_id}").text
    table = re.search(r'<table class="timeline">.*?</table>', page, re.DOTALL)
    assert table is not None, page
    return re.findall(r"</span> ([\w-]+)", table[0])


def test_the_timeline_of_a_job_has_its_retries_with_their_durations(shop: App, browser: Browser) -> None:
    queue = shop.queue("default")
    job = queue.add("shop.fail", {}, attempts=2, backoff={"type": "fixed", "delay": 1})
    for _ in range(2):
        acquired = queue.get_next_job("token")
        assert acquired is not None
        acquired.move_to_failed("no stock")
        queue.promote_jobs()
    states = timeline_of(browser, "default", job.id)
    assert states == ["waiting", "active", "delayed", "waiting", "active", "failed"], states
    assert "no longer has all events" not in browser.get(f"/queues/default/jobs/{job.id}").text


def test_without_events_the_timeline_says_what_the_jobs_fields_say(
    shop: App, browser: Browser, redis_client: Redis
) -> None:
    job = shop.queue("default").add("shop.add", {"x": 1})
    with InlineWorker(shop) as worker:
        worker.run_jobs(propagate=False)
    redis_client.delete("bull:{default}:events")
    assert timeline_of(browser, "default", job.id) == ["waiting", "active", "completed"]
    assert "no longer has all events" in browser.get(f"/queues/default/jobs/{job.id}").text
    delayed = shop.queue("default").add("shop.add", {"x": 1}, delay=60)
    redis_client.delete("bull:{default}:events")
    assert timeline_of(browser, "default", delayed.id) == ["delayed"]


def test_charts_show_bullmqs_metrics_and_the_samples_of_the_dashboard(
    shop: App, browser: Browser, redis_client: Redis
) -> None:
    shop.queue("default").add("shop.add", {"x": 1})
    shop.queue("a/b <i>").add("shop.add", {"x": 1})
    now_ms = shop._now_ms()
    redis_client.hset(
        "bull:{default}:metrics:completed", mapping={"count": 12, "prevTS": now_ms - 120_000, "prevCount": 9}
    )
    redis_client.rpush("bull:{default}:metrics:completed:data", 4, 5)
    browser.get("/")
    forget(browser)
    page = browser.get("/queues/default/charts")
    assert page.status_code == 200
    figure = re.findall(r'<figure class="chart">.*?</figure>', page.text, re.DOTALL)
    assert len(figure) == 5
    *idle, third, second, first = re.findall(r'<td class="n">([\d?]+) jobs', figure[0])
    assert (third, second, first) == ("3", "4", "5")
    assert idle in (["0"] * 2, ["0"] * 3), "two minutes, and one more if it has just begun"
    assert re.findall(r'<td class="n">([\d?]+) jobs', figure[2]) == ["1", "1"]
    everything = browser.get("/charts")
    assert "all queues: 2 jobs; a/b &lt;i&gt;: 1 jobs; default: 1 jobs" in everything.text
    assert browser.get("/queues/nothing/charts").status_code == 404


@pytest.mark.parametrize("minutes", [3, 30, 90, 300])
def test_a_dashboard_that_stays_open_keeps_an_hour_of_evenly_spread_samples(minutes: int) -> None:
    found, last_ms = _History(), minutes * 60_000
    for at_ms in range(0, last_ms + 1, 2_000):
        found.add(at_ms, {})
    times = [at_ms for at_ms, _ in found.moments]
    assert times[-1] == last_ms
    assert 50 <= len(times) <= 120
    span_ms = times[-1] - times[0]
    assert min(last_ms, 3_500_000) <= span_ms <= 7_300_000
    gaps = [later - earlier for earlier, later in pairwise(times[:-1])]
    assert max(gaps) <= 3 * span_ms / len(times)


def test_charts_show_how_long_attempts_took_from_the_lake(shop: App, browser_with: Any, tmp_path: Path) -> None:
    shop.queue("mail").add("shop.add", {"x": 1})
    shop.queue("other").add("shop.add", {"x": 1})
    hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0) - timedelta(hours=1)
    LakeBuilder(tmp_path).attempts(
        {"job_id": str(at), "queue": "mail", "outcome": "completed", "ended_at": hour, "run_ms": 2_000, "wait_ms": at}
        for at in range(3)
    )
    browser = browser_with(anonymous=Role.VIEWER, lake=tmp_path)
    figures = re.findall(r'<figure class="chart">.*?</figure>', browser.get("/queues/mail/charts").text, re.DOTALL)
    assert re.findall(r'<td class="n">([^<]*)', figures[-3])[2:4] == ["3", "0"]
    assert re.findall(r'<td class="n">([^<]*)', figures[-1])[:6] == ["?"] * 3 + ["1.99 s"] * 3, "within 1 %"
    figures = re.findall(r'<figure class="chart">.*?</figure>', browser.get("/queues/other/charts").text, re.DOTALL)
    assert "No values yet" in figures[-1]
    without = browser_with(anonymous=Role.VIEWER, lake=tmp_path / "missing")
    assert "The lake: " in without.get("/queues/mail/charts").text
