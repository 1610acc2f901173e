"""A real worker, started by ``manage.py bulltask``, runs Django's tasks."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.worker_harness import WorkerHarness

pytestmark = pytest.mark.process

SETTINGS = """
import os

SECRET_KEY = "for a test"
USE_TZ = True
INSTALLED_APPS = ["bulltask.contrib.django", "shop"]
DATABASES = {"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": os.environ["DATABASE_OF_TEST"]}}
BULLTASK = {"broker_url": os.environ["SERVER_OF_TEST"], "worker_concurrency": 1}
TASKS = {"default": {"BACKEND": "bulltask.contrib.django.backend.BulltaskBackend", "QUEUES": ["default", "mail"]}}
"""
TASKS = """
import os
import signal

from django.db import connection
from django_tasks import task

connection.ensure_connection()  # while the worker imports this module, before it forks


@task(takes_context=True)
def look(context, name):
    shared, workers = connection.connection is not None, context.task_result.worker_ids
    connection.ensure_connection()
    if context.attempt == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return [name, shared, context.attempt, workers[0], len(workers)]
"""


def test_a_worker_runs_djangos_tasks_and_shares_no_connection_with_its_children(
    harness: WorkerHarness, tmp_path: Path
) -> None:
    (tmp_path / "shop").mkdir()
    for name, text in {"__init__": "", "settings": SETTINGS, "tasks": TASKS}.items():
        (tmp_path / "shop" / f"{name}.py").write_text(text)
    environ = os.environ | {
        "DATABASE_OF_TEST": str(tmp_path / "shop.sqlite3"),
        "DJANGO_SETTINGS_MODULE": "shop.settings",
        "PYTHONPATH": str(tmp_path),
        "SERVER_OF_TEST": harness.url,
    }
    command = [sys.executable, "-m", "django", "bulltask", "worker"]
    with subprocess.Popen(command, cwd=tmp_path, env=environ, stderr=subprocess.DEVNULL) as worker:
        try:
            job = harness.app.send_task("shop.tasks.look", kwargs={"args": [], "kwargs": {"name": "x"}}, queue="mail")
            assert job.get(timeout=60) == ["x", False, 2, "unknown", 2]
            worker.terminate()
            assert worker.wait(60) == 0
        finally:
            worker.kill()
