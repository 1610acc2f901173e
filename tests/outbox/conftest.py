"""Databases for the tests of the outbox: SQLite, and one PostgreSQL server for each session."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.postgresql import PostgresServer
from tests.support.worker_harness import WorkerHarness


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database, for SQLAlchemy's sync engines."""
    if request.param == "sqlite":
        return f"sqlite:///{tmp_path / 'test.db'}"
    server: PostgresServer = request.getfixturevalue("postgres")
    return server.url(server.create_database())


@pytest.fixture
def harness(broker_url: str, tmp_path: Path, record_property: Callable[[str, object], None]) -> Iterator[WorkerHarness]:
    """A harness for real workers, which are stopped after the test."""
    harness = WorkerHarness(broker_url, tmp_path, record_property)
    yield harness
    harness.close()


@pytest.fixture
def async_url() -> Callable[[str], str]:
    """Turns a URL into that for an async engine; psycopg's is the same."""
    return lambda url: url.replace("sqlite:", "sqlite+aiosqlite:")
