"""``bulltask outbox``: the command that runs relays, and the number of rows."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import sqlalchemy as sa
from click.testing import CliRunner, Result
from sqlalchemy import orm

from bulltask import App
from bulltask.cli.main import main
from bulltask.outbox.sqlalchemy import Outbox
from bulltask.testing.worker import wait_until
from tests.support.command_output import json_of
from tests.support.programs import ROOT

SHOP = """
import sqlalchemy as sa
from bulltask import App
from bulltask.outbox.sqlalchemy import Outbox

app = App("shop", "{broker}")
outbox = Outbox(app, sa.create_engine("{database}"), poll_interval=0.02)
"""

Run = Callable[..., Result]


@pytest.fixture
def outbox(tmp_path: Path, broker_url: str) -> Iterator[Outbox]:
    """The outbox of the module ``outbox_shop`` in another process."""
    database = f"sqlite:///{tmp_path / 'shop.db'}"
    (tmp_path / "outbox_shop.py").write_text(SHOP.format(broker=broker_url, database=database))
    app, engine = App("sender", broker_url), sa.create_engine(database)
    outbox = Outbox(app, engine)
    outbox.metadata.create_all(engine)
    with orm.Session(engine) as session, session.begin():
        outbox.send(session, app.signature("mail", kwargs={"number": 1}))
        session.execute(sa.insert(outbox.table).values(version=1, created_ms=0, payload="{}", error="unreadable"))
    yield outbox
    engine.dispose()
    app.close()


@pytest.fixture
def run(outbox: Outbox, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.syspath_prepend(tmp_path)
    return lambda *args: CliRunner().invoke(main, ["outbox", *args, "-A", "outbox_shop"])


def test_status_counts_the_rows_and_fails_if_one_has_waited_too_long(run: Run) -> None:
    waiting = run("status", "--max-age", "3600")
    assert waiting.exit_code == 0, waiting.output
    assert waiting.output.startswith("outbox 0: 1 waiting, oldest ")
    assert " s, 1 failed\n  row 2 of bulltask_outbox failed: unreadable\n" in waiting.output
    assert "UPDATE bulltask_outbox SET error = NULL WHERE error IS NOT NULL;" in waiting.output
    assert run("status", "--max-age", "0").exit_code == 1
    [row] = json_of(run("status", "--json"), "outbox status")["outboxes"]
    assert (row["waiting"], row["failed"], row["errors"]) == (1, 1, {"2": "unreadable"})


def test_a_relay_needs_an_outbox(run: Run, tmp_path: Path) -> None:
    (tmp_path / "outbox_shop.py").write_text("from bulltask import App\napp = App('shop')\n")
    sys.modules.pop("outbox_shop", None)
    refused = run("relay")
    assert refused.exit_code == 1
    assert "has no outbox" in refused.output


@pytest.mark.process
def test_the_relay_command_sends_rows_until_it_is_stopped(outbox: Outbox, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "bulltask", "outbox", "relay", "-A", "outbox_shop", "--workdir"]
    with subprocess.Popen([*command[:3], "--workdir", str(tmp_path), *command[3:-1]], cwd=ROOT) as relay:
        wait_until(lambda: outbox.backlog().waiting == 0, 60, "the end of the backlog")
        relay.send_signal(signal.SIGTERM)
        assert relay.wait(20) == 0
    assert outbox.app.queue("default").get_waiting_count() == 1
