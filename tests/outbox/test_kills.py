"""Relays are killed with SIGKILL, by themselves and as processes of workers; every committed job runs exactly once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest
import sqlalchemy as sa
from sqlalchemy import orm

from bulltask import App
from bulltask.outbox.sqlalchemy import Outbox
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


def test_a_relay_that_is_killed_at_any_of_its_operations_loses_and_doubles_nothing(
    database_url: str, broker_url: str
) -> None:
    command = [sys.executable, "-m", "tests.outbox.kill_matrix", database_url, broker_url]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 10, "the number of operations"


def test_a_worker_sends_rows_and_starts_a_relay_again_that_was_killed(
    harness: WorkerHarness, database_url: str
) -> None:
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
