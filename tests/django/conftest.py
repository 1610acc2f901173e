"""Django in the tests' process: settings, and databases in files, because each thread has its own connection."""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import django
import pytest
from django.conf import settings
from django.db import connections

from bulltask import App
from bulltask.contrib.django.project import project_app
from bulltask.registry import request as current
from bulltask.registry.tasks import SHARED
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
    current._current_app, previous = None, current._current_app  # another test's app is not the project's
    django.setup()
    current._current_app = previous

# Other tests in this process must not find these tasks and queues in their apps.
tasks, queues = dict(SHARED), dict(SHARED._queues)
importlib.import_module("tests.django.task_functions")
OWN_TASKS, OWN_QUEUES = dict(SHARED), dict(SHARED._queues)
SHARED._tasks, SHARED._queues = tasks, queues


@pytest.fixture(autouse=True)
def own_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Register the Django tasks of these tests, and their queues."""
    monkeypatch.setattr(SHARED, "_tasks", {**SHARED, **OWN_TASKS})
    monkeypatch.setattr(SHARED, "_queues", {**SHARED._queues, **OWN_QUEUES})


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
