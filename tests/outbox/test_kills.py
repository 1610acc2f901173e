"""Relays, separate ones and those of workers, are killed with SIGKILL; every committed job runs exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

from bulltask import App
from bulltask.outbox.sqlalchemy import Outbox
from bulltask.testing.worker import wait_until
from tests.support.programs import ROOT
from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

TASKS = """
import os
import sqlalchemy as sa
from sqlalchemy import orm
from bulltask.outbox.sqlalchemy import Outbox

engine = sa.create_engine(os.environ["DATABASE"])
outbox = Outbox(app, engine, poll_interval=0.02)

@app.task(name="order")
def order(number):
    with orm.Session(engine) as session, session.begin():
        outbox.delay(session, invoice, number)

@app.task(name="invoice", result_expires=0)
def invoice(number):
    record("invoice", number=number)
"""


@pytest.mark.parametrize("kind", ["sync", "async", "django"])
def test_a_relay_that_is_killed_at_any_of_its_operations_loses_and_duplicates_nothing(
    database_url: str, broker_url: str, kind: str
) -> None:
    command = [sys.executable, "-m", "tests.outbox.fault_injection", database_url, broker_url, kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10, "the number of operations"


DJANGO_PROJECT = {
    "proj/__init__.py": "",
    "proj/bulltask.py": """
import os

from bulltask import App
from bulltask.outbox.django import Outbox

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "proj.settings")
app = App("proj", os.environ["SERVER_OF_TEST"])
outbox = Outbox(app)

@app.task
def invoice(number):
    return number

@app.task
def order(number):
    from django.db import transaction
    with transaction.atomic():
        return outbox.delay(invoice, number).id
""",
    "proj/settings.py": """
SECRET_KEY = "for a test"
INSTALLED_APPS = ["bulltask.outbox.django"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": "DATABASE"}}
""",
}


def test_a_worker_of_a_django_project_sends_the_rows_of_its_tasks(harness: WorkerHarness, tmp_path: Path) -> None:
    for name, text in DJANGO_PROJECT.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text.replace('DATABASE"', f'{tmp_path / "test.db"}"'))
    environ = {"PYTHONPATH": str(tmp_path), "SERVER_OF_TEST": harness.url}
    migrate = [sys.executable, "-m", "django", "migrate", "-v0", "--settings=proj.settings"]
    subprocess.run(migrate, cwd=tmp_path, env={**os.environ, **environ}, check=True)
    worker = harness.worker(children=1, options=["-A", "proj"], environ=environ, fresh=True)
    order = harness.app.send_task("proj.bulltask.order", kwargs={"number": 7})
    invoice = harness.app.result(order.get(timeout=60), "default")
    wait_until(lambda: invoice.state == "completed", 60, "the job of the outbox")
    assert invoice.get(timeout=1) == 7
    assert worker.stop() == 0


def test_a_worker_sends_rows_and_restarts_a_killed_relay(harness: WorkerHarness, database_url: str) -> None:
    engine = sa.create_engine(database_url)
    outbox = Outbox(App("sender"), engine)
    outbox.metadata.create_all(engine)
    worker = harness.worker(TASKS, children=1, environ={"DATABASE": database_url})
    relay = 0
    for number in range(20):
        with orm.Session(engine) as session, session.begin():
            outbox.send(session, harness.app.signature("invoice", kwargs={"number": number}))
        if number == 10:
            harness.journal.wait_for(1, what="invoice")
            relay = worker.wait_for_line("Outbox relay started")[0]["pid"]
            os.kill(relay, signal.SIGKILL)
    harness.app.send_task("order", kwargs={"number": 20})
    harness.journal.wait_for(21, what="invoice")
    assert worker.wait_for_line("Outbox relay died")[0]["pid"] == relay
    assert worker.stop() == 0
    numbers = sorted(int(entry["number"]) for entry in harness.journal.all(what="invoice"))
    assert numbers == list(range(21))
    assert outbox.backlog().waiting == 0
    engine.dispose()
