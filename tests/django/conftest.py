"""Django in the tests' process: settings, and databases in files, because each thread has its own connection."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import django
import pytest
from django.conf import settings
from django.db import connections

from bulltask import App
from bulltask.contrib.django.project import project_app
from bulltask.testing import InlineWorker, use_server

BACKEND = "bulltask.contrib.django.backend.BulltaskBackend"
_FOLDER = tempfile.TemporaryDirectory(prefix="bulltask-django-", ignore_cleanup_errors=True)

if not settings.configured:
    engine = "django.db.backends.sqlite3"
    settings.configure(
        SECRET_KEY="for tests",
        USE_TZ=True,
        INSTALLED_APPS=["bulltask.contrib.django", "bulltask.outbox.django"],
        BULLTASK={"task_max_retries": 2},
        TASKS={
            "default": {"BACKEND": BACKEND, "QUEUES": ["default", "mail"]},
            "any": {"BACKEND": BACKEND, "QUEUES": [], "OPTIONS": {"max_retries": 0}},
        },
        DATABASES={
            name: {"ENGINE": engine, "NAME": Path(_FOLDER.name, f"{name}.sqlite3")} for name in ("default", "other")
        },
    )
    django.setup()


@pytest.fixture
def app(broker_url: str) -> Iterator[App]:
    """An app that uses the tests' server."""
    app = App("tested", "redis://unreachable.invalid:1")
    with use_server(app, broker_url):
        yield app


@pytest.fixture
def project(broker_url: str) -> Iterator[App]:
    """The project's app, on the tests' server."""
    app = project_app()
    with use_server(app, broker_url):
        yield app


@pytest.fixture
def worker(app: App) -> Iterator[InlineWorker]:
    """A worker in the test's thread."""
    with InlineWorker(app) as worker:
        yield worker


@pytest.fixture(autouse=True)
def closed_connections() -> Iterator[None]:
    """Close the test's database connections."""
    yield
    connections.close_all()
