"""The outbox of Django's ORM, on SQLite and PostgreSQL."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from bulltask import App, group
from bulltask.outbox.django import Outbox
from bulltask.outbox.django.models import OutboxRow
from bulltask.testing import InlineWorker
from tests.support.postgresql import PostgresServer


@pytest.fixture(params=["sqlite3", "postgresql"])
def using(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    """The alias of a new database with the outbox's table."""
    settings: dict[str, Any] = {"NAME": str(tmp_path / "test.sqlite3")}
    if request.param == "postgresql":
        server: PostgresServer = request.getfixturevalue("postgres")
        settings = {"NAME": server.create_database(), "USER": "test", "HOST": str(server.directory)}
    alias = f"outbox-{request.param}"
    settings["ENGINE"] = f"django.db.backends.{request.param}"
    configured = connections.configure_settings({"default": {}, alias: settings})[alias]
    connections.settings[alias] = configured
    call_command("migrate", "bulltask_outbox", database=alias, verbosity=0)
    yield alias
    connections[alias].close()
    del connections[alias]
    del connections.settings[alias]


@pytest.fixture
def outbox(app: App, using: str) -> Outbox:
    return Outbox(app, using, poll_interval=0.01)


@pytest.fixture
def ran(app: App) -> list[int]:
    numbers: list[int] = []

    @app.task(name="note", result_expires=0)
    def note(number: int) -> int:
        numbers.append(number)
        return number

    return numbers


def test_committed_calls_run_once_and_calls_that_are_rolled_back_never(
    app: App, ran: list[int], outbox: Outbox, using: str, worker: InlineWorker
) -> None:
    note = app.tasks["note"]
    with transaction.atomic(using=using):
        result = outbox.delay(note, 1)
        with pytest.raises(ZeroDivisionError):
            _write_and_fail(outbox, note, using)
    both = outbox.send(group(note.s(3), note.s(4)))  # in no transaction, so it is committed at once
    assert (outbox.backlog().waiting, ran) == (2, [])
    assert outbox.relay() == 2
    assert (result.get(timeout=5), both.get(timeout=5)) == (1, [3, 4])
    assert sorted(ran) == [1, 3, 4]
    assert outbox.backlog().waiting == 0


def _write_and_fail(outbox: Outbox, note: Any, using: str) -> None:
    with transaction.atomic(using=using):
        outbox.delay(note, 2)
        _ = 1 / 0


def test_a_relay_runs_in_a_thread_and_keeps_rows_that_cannot_be_sent(
    app: App, ran: list[int], outbox: Outbox, using: str, worker: InlineWorker
) -> None:
    OutboxRow.objects.using(using).create(version=1, created_ms=0, payload="{}")
    result = outbox.delay(app.tasks["note"], 1)
    stop, log = threading.Event(), Log()
    relay = threading.Thread(target=outbox.run_relay, args=(stop.wait, log))
    relay.start()
    assert result.get(timeout=20) == 1
    stop.set()
    relay.join()
    assert [event for event, _ in log.lines] == ["Outbox row failed"]
    assert "DecodeError" in OutboxRow.objects.using(using).get().error
    assert (outbox.backlog().waiting, outbox.backlog().failed) == (0, 1)


class Log:
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def error(self, event: str, **fields: Any) -> None:
        self.lines.append((event, fields))

    warning = info = error


def test_the_migration_matches_the_model() -> None:
    call_command("makemigrations", "bulltask_outbox", check=True, dry_run=True, verbosity=0)
