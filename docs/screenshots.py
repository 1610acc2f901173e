"""Take the pictures of the dashboard in ``images/``: ``PYTHONPATH=. python docs/screenshots.py``.

It needs Chromium, its driver, and the development tools. Workers on a server of its own run the jobs of an
example; only the curves of the time before, and the lake, are invented. ``--all DIRECTORY`` takes every page from its
top to its end, at three widths in both themes, to be looked at.
"""

from __future__ import annotations

import argparse
import math
import random
import runpy
import secrets
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

from bulltask import App, group
from bulltask.dashboard import Access, Dashboard, Role
from bulltask.dashboard.pages import Filter, Sample, _total
from bulltask.testing import RedisServer, WorkerProcess
from bulltask.testing.worker import wait_until
from tests.support.browser import Chromium, served
from tests.support.lake import LakeBuilder

IMAGES: Final = Path(__file__).parent / "images"
WIDTHS: Final = {360: 740, 800: 1000, 1280: 850}
QUEUES: Final = ("emails", "payments", "thumbnails", "reports")
MAX_HEIGHT: Final = 2_400
STEPS: Final = 100
LAKE_PAGES: Final = {
    "history": "/history?name=payments.capture",
    "past-job": "/history/payments/capture-2",
    "past-charts": "/queues/payments/charts",
}
CHOSEN: Final = (
    ("overview-light", "overview", 1280, False),
    ("overview-dark", "overview", 1280, True),
    ("queue", "queue", 1280, False),
    ("job", "job", 1280, False),
    ("workflow", "workflow", 1280, True),
    ("workers", "workers", 1280, False),
    ("phone", "overview", 360, True),
)
"""The pictures of the docs: name, page, width, and whether it is dark."""

SHOP: Final = '''
"""An online shop's tasks."""

import random
import threading
from typing import Literal

from bulltask import App, crontab

app = App("shop")
app.conf.beat_schedule = {
    "nightly-report": {"task": "reports.build", "schedule": crontab(hour=3, minute=30), "args": ["yesterday"]},
    "poll-the-bank": {"task": "payments.poll", "schedule": 300.0},
    "weekly-newsletter": {"task": "emails.newsletter", "schedule": "0 8 * * mon"},
}
never = threading.Event()
Currency = Literal["EUR", "USD", "GBP"]
EVERY_SECOND = {"default_retry_delay": 1, "retry_backoff": False}


class CardDeclined(Exception):
    """The bank has said no."""


@app.task(name="emails.receipt", queue="emails")
def receipt(order_id: int, to: str) -> str:
    """Send the receipt of an order."""
    never.wait(random.uniform(0.01, 0.06))
    return f"sent to {to}"


@app.task(name="emails.newsletter", queue="emails")
def newsletter(issue: int = 1) -> None:
    """Send the newsletter to all subscribers."""


@app.task(name="payments.capture", queue="payments", autoretry_for=(ConnectionError,), max_retries=2, **EVERY_SECOND)
def capture(order_id: int, amount: float, currency: Currency = "EUR", note: str | None = None) -> str:
    """Capture the payment of an order."""
    never.wait(random.uniform(0.1, 0.4))
    if order_id % 40 == 7:
        raise CardDeclined(f"order {order_id}: insufficient funds")
    if order_id % 50 == 9:
        raise ConnectionError("bank.example:443: connection reset by peer")
    return f"captured {amount} {currency}"


@app.task(name="payments.poll", queue="payments")
def poll() -> int:
    """Ask the bank for new transfers."""
    return 3


@app.task(name="thumbnails.resize", queue="thumbnails")
def resize(image: str, width: int) -> str:
    """Make a smaller copy of an image."""
    never.wait(random.uniform(0.02, 0.1))
    if image.endswith(".heic"):
        raise OSError(f"cannot identify image file {image!r}")
    return f"{image}@{width}"


@app.task(name="thumbnails.crawl", queue="thumbnails")
def crawl(shelf: str) -> None:
    """Look for images without a thumbnail."""
    never.wait(3600)


@app.task(name="reports.load", queue="reports")
def load(day: str) -> int:
    """Load the orders of a day."""
    never.wait(random.uniform(0.1, 0.4))
    return len(day)


@app.task(name="reports.merge", queue="reports")
def merge(orders: list[int]) -> int:
    """Put days together."""
    never.wait(3600)
    return sum(orders)


@app.task(name="reports.render", queue="reports")
def render(orders: int, kind: str = "pdf") -> str:
    """Draw a report."""
    return kind


@app.task(name="reports.publish", queue="reports")
def publish(files: list[str]) -> None:
    """Publish reports."""


@app.task(name="reports.build", queue="reports")
def build(day: str) -> None:
    """Build the report of a day."""
'''


@dataclass(frozen=True)
class Example:
    """What the pictures show: the addresses of pages, by name."""

    pages: dict[str, str]


@contextmanager
def example() -> Iterator[Example]:
    """Run the example."""
    with tempfile.TemporaryDirectory(prefix="screenshots-") as directory, RedisServer.start(directory) as server:
        module = Path(directory) / "shop.py"
        module.write_text(SHOP)
        app: App = runpy.run_path(str(module))["app"]
        app.conf.broker_url = server.url
        with _worker(server.url, directory, "web-1", 4), _worker(server.url, directory, "web-2", 2):
            pages, access = _send(app), Access(anonymous=Role.ADMIN)
            site, with_login = Dashboard(app, access), Dashboard(app, Access(token=secrets.token_urlsafe()))
            with_lake = Dashboard(app, access, lake=_invent_lake(Path(directory) / "lake"))
            with served(site) as url, served(with_lake) as url_with_lake, served(with_login) as url_with_login:
                _invent_history(site)
                for action, outcome in (("resume", "Queue emails runs again."), ("pause", "Queue emails is paused.")):
                    site._audit.record(  # noqa: SLF001
                        action, outcome, user="maria@shop.example", address="10.0.0.7", target="queue emails"
                    )
                change = site._pages.changes.count(  # noqa: SLF001
                    "payments", "retry", Filter("failed", task="payments.capture"), older_than=None, user="anonymous"
                )
                yield Example(
                    {name: url + path for name, path in pages.items()}
                    | {"change": f"{url}/changes/{change.id}", "login": f"{url_with_login}/login"}
                    | {name: url_with_lake + path for name, path in LAKE_PAGES.items()}
                )
        app.close()


def _worker(url: str, directory: str, name: str, children: int) -> WorkerProcess:
    options = ["-Q", ",".join(QUEUES), "-c", str(children), "-n", name]
    return WorkerProcess.start("shop:app", *options, broker_url=url, directory=directory)


def _send(app: App) -> dict[str, str]:
    """Send jobs, and wait until only those are left that the pictures show; return the paths of the pages."""
    tasks, chance = app.tasks, random.Random(1)  # noqa: S311 - for prices
    app.queue("webhooks").add_bulk([{"name": "webhooks.post", "data": {"order": at}} for at in range(38)])
    app.queue("invoices").pause(by="maria@shop.example")
    app.queue("invoices").add_bulk([{"name": "invoices.print", "data": {"order": 4_000 + at}} for at in range(214)])
    sent = [tasks["payments.capture"].delay(order, round(chance.uniform(5, 200), 2)) for order in range(4_000, 4_060)]
    for order in range(4_000, 4_400):
        tasks["emails.receipt"].delay(order, f"customer-{order}@example.com")
    for at in range(80):
        tasks["thumbnails.resize"].delay(f"IMG_{2_100 + at}.{'heic' if at % 23 == 5 else 'jpg'}", 320)
    for at in range(12):
        tasks["emails.receipt"].apply_async((5_000 + at, "later@example.com"), countdown=3_600 * (at + 1))
    wait_until(lambda: all(result.ready() for result in sent), 120, "payments")
    wait_until(lambda: not app.queue("emails").get_job_counts("waiting")["waiting"], 120, "emails")
    days = ["monday", "tuesday", "wednesday", "thursday", "friday", "saturday", "sunday"]
    merge, render = tasks["reports.merge"], tasks["reports.render"]
    kinds = group(render.s(kind) for kind in ("pdf", "csv", "html"))
    workflow = (
        group(tasks["reports.load"].s(day) for day in days) | merge.s() | kinds | tasks["reports.publish"].s()
    ).delay()
    for shelf in ("shoes", "hats"):
        tasks["thumbnails.crawl"].delay(shelf)
    wait_until(lambda: app.queue("reports").get_job_counts("completed")["completed"] == len(days), 60, "the merge")
    failed = app.queue("payments").get_jobs(["failed"])
    reset = next(job for job in failed if "reset" in str(job.failed_reason))
    return {
        "overview": "/",
        "queue": "/queues/invoices",
        "failed": "/queues/payments?state=failed",
        "job": f"/queues/payments/jobs/{reset.id}",
        "why": f"/queues/reports/jobs/{workflow.id}",
        "workflow": f"/queues/reports/jobs/{workflow.id}/workflow",
        "workers": "/workers",
        "failures": "/failures",
        "charts": "/charts",
        "queue-charts": "/queues/payments/charts",
        "schedules": "/schedules",
        "schedule": "/queues/reports/schedules/nightly-report",
        "run": "/run",
        "run-task": "/run/payments.capture",
        "search": "/search?text=insufficient",
        "audit": "/audit",
        "missing": "/queues/reports/jobs/none",
        "empty": "/queues/webhooks?state=failed",
    }


def _invent_lake(root: Path) -> Path:
    """Write jobs that Redis no longer has; return the lake's directory."""
    lake, now, chance = LakeBuilder(root), datetime.now(UTC), random.Random(3)  # noqa: S311 - for durations
    rows = [
        {
            "incarnation": f"{at}-0",
            "name": "payments.capture",
            "job_id": f"capture-{at}",
            "queue": "payments",
            "state": "failed" if at % 5 == 2 else "completed",
            "failed_reason": f"order {at}: insufficient funds" if at % 5 == 2 else None,
            "created_at": now - timedelta(hours=at, milliseconds=400 + ms),
            "finished_at": now - timedelta(hours=at),
            "attempt_count": 1,
            "wait_ms": 400,
            "run_ms": ms,
            "total_ms": 400 + ms,
        }
        for at, ms in enumerate(chance.randrange(100, 9_000) for _ in range(40))
    ]
    lake.jobs(rows)
    lake.attempts(
        {key: row[key] for key in ("incarnation", "name", "job_id", "queue", "wait_ms", "run_ms", "failed_reason")}
        | {
            "outcome": row["state"],
            "started_at": row["created_at"] + timedelta(milliseconds=400),
            "ended_at": row["finished_at"],
            "worker": "web-1",
        }
        for row in rows
    )
    lake.events(
        {
            "event_id": f"{round((row['created_at'] + timedelta(seconds=after)).timestamp() * 1000)}-0",
            "event": event,
            "job_id": row["job_id"],
            "queue": row["queue"],
        }
        for row in rows
        for event, after in (("added", 0), ("waiting", 0.001), ("active", 0.4), (row["state"], row["total_ms"] / 1000))
    )
    return lake.layout.root


def _invent_history(site: Dashboard) -> None:
    """Let the dashboard have been open for two hours, with curves that end where the queues are now."""
    overview, chance = site._pages.overview(), random.Random(2)  # noqa: S311, SLF001 - for curves
    for step in range(STEPS):
        past = dict[str, Sample]()
        for at, queue in enumerate(overview.queues):
            end = getattr(queue.figures, "waiting", 0)
            wave = 1 + math.sin(step / 9 + 2 * at)
            grown = end * max(0.0, step / STEPS - 0.3) / 0.7
            waiting = round(grown if end else min(1.0, (STEPS - step) / 15) * (30 * wave * chance.uniform(0.9, 1.1)))
            rate = 0.0 if end else (2 + 5 * wave) * chance.uniform(0.9, 1.1)
            active = 0 if end else min(4, round(rate / 3))
            oldest = (getattr(queue.figures, "oldest_ms", 0) or 0) * waiting // end if end else 90 * waiting
            past[queue.keys.name] = Sample(waiting, active, oldest or None, rate)
        past[""] = _total(past.values())
        site._pages._history.moments.insert(-1, (overview.now_ms - (STEPS - step) * 60_000, past))  # noqa: SLF001


def main() -> None:
    """Take the pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--all", type=Path, metavar="DIRECTORY")
    parser.add_argument("--only", default="")
    arguments = parser.parse_args()
    with example() as shown, Chromium.opened() as browser:
        if arguments.all is None:
            for name, page, width, dark in CHOSEN:
                _open(browser, shown, page, width, dark=dark)
                (IMAGES / f"dashboard-{name}.png").write_bytes(browser.picture())
        else:
            arguments.all.mkdir(exist_ok=True)
            for page in shown.pages:
                for width in WIDTHS:
                    for dark in (False, True):
                        file = arguments.all / f"{page}-{width}-{'dark' if dark else 'light'}.png"
                        if arguments.only in file.name:
                            _open(browser, shown, page, width, dark=dark)
                            height = browser.run("return document.scrollingElement.scrollHeight")
                            browser.look_like(width, min(height, MAX_HEIGHT), dark=dark)
                            file.write_bytes(browser.picture())


def _open(browser: Chromium, shown: Example, page: str, width: int, *, dark: bool) -> None:
    browser.look_like(width, WIDTHS[width], dark=dark)
    browser.driver.get(shown.pages[page])
    if browser.run("return document.querySelector('#live') !== null") and page != "missing":
        browser.wait_for("live", "#live[data-state=on]")


if __name__ == "__main__":
    main()
