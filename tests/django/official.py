"""Django's own tests of tasks and backends, run with bulltask's backend instead of the two that Django contains.

A program for an environment with Django 6; ``test_official.py`` runs it. Its arguments are the folder ``tests`` of
Django's source distribution and the URL of a server, which it empties. Its output is JSON.
"""

from __future__ import annotations

import io
import json
import sys
import unittest
from collections import Counter
from collections.abc import Iterator
from typing import Any

import django
from django.conf import settings
from django.tasks.backends import dummy, immediate
from django.tasks.signals import task_enqueued
from django.test.runner import DiscoverRunner

from bulltask.contrib.django.backend import BulltaskBackend
from bulltask.contrib.django.project import project_app
from bulltask.testing import InlineWorker, use_server

KEPT = "bulltask keeps results and can delay jobs"
MEMORY = "it changes the result in the backend's memory"
SKIPPED = {
    "test_immediate_backend.ImmediateBackendTestCase.test_cannot_get_result": KEPT,
    "test_immediate_backend.ImmediateBackendTestCase.test_cannot_refresh_result": KEPT,
    "test_immediate_backend.ImmediateBackendTestCase.test_cannot_pass_run_after": KEPT,
    "test_immediate_backend.ImmediateBackendTestCase.test_throws_keyboard_interrupt": (
        "an exception of a task fails its job, not the worker"
    ),
    "test_dummy_backend.DummyBackendTestCase.test_refresh_result": MEMORY,
    "test_dummy_backend.DummyBackendTestCase.test_refresh_result_async": MEMORY,
}
"""The tests that do not apply, and why. ``test_custom_backend`` defines its own backend."""

MODULES = ("test_dummy_backend", "test_immediate_backend", "test_tasks")


class WaitingBackend(BulltaskBackend):
    """Replaces ``DummyBackend``: no worker runs, so all jobs wait."""

    @property
    def results(self) -> list[Any]:
        """The results of all jobs, read from Redis."""
        names = sorted({"default", *project_app().tasks.queues})
        return [self.get_result(job.id) for name in names for job in project_app().queue(name).get_jobs()]

    def clear(self) -> None:
        """Remove all jobs."""
        for name in {"default", *project_app().tasks.queues}:
            project_app().queue(name).obliterate(force=True)


class RunningBackend(BulltaskBackend):
    """Replaces ``ImmediateBackend``: a worker runs each job before the result is returned."""

    def enqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = super().enqueue(task, args, kwargs)
        with InlineWorker(project_app()) as worker:
            worker.run_jobs(propagate=False)
        return self.get_result(result.id)

    async def aenqueue(self, task: Any, args: Any, kwargs: Any) -> Any:
        result = await super().aenqueue(task, args, kwargs)
        with InlineWorker(project_app()) as worker:
            await worker.arun_jobs(propagate=False)
        return await self.aget_result(result.id)


ENQUEUED: Counter[str] = Counter()


def count(sender: type, **_: object) -> None:
    """Count the calls that a backend has enqueued."""
    ENQUEUED[sender.__name__] += 1


def cases(suite: unittest.TestSuite) -> Iterator[unittest.TestCase]:
    """Iterate over the test cases in a suite."""
    for item in suite:
        if isinstance(item, unittest.TestSuite):
            yield from cases(item)
        else:
            yield item


def run(folder: str) -> dict[str, Any]:
    """Run the tests, and return what happened."""
    sys.path.insert(0, folder)
    setattr(dummy, "DummyBackend", WaitingBackend)  # noqa: B010 - mypy does not accept an assignment to a class
    setattr(immediate, "ImmediateBackend", RunningBackend)  # noqa: B010
    loaded = unittest.defaultTestLoader.loadTestsFromNames([f"tasks.{name}" for name in MODULES])
    every = {case.id().removeprefix("tasks."): case for case in cases(loaded)}
    runner = DiscoverRunner(verbosity=0, interactive=False)
    databases = runner.setup_databases()
    output = io.StringIO()
    chosen = unittest.TestSuite(case for name, case in every.items() if name not in SKIPPED)
    task_enqueued.connect(count)
    outcome = unittest.TextTestRunner(output, verbosity=0).run(chosen)
    runner.teardown_databases(databases)
    return {
        "django": django.__version__,
        "run": outcome.testsRun,
        "passed": outcome.wasSuccessful(),
        "output": output.getvalue(),
        "enqueued": ENQUEUED,
        "skipped": len(SKIPPED),
        "unknown": sorted(SKIPPED.keys() - every.keys()),
    }


if __name__ == "__main__":
    settings.configure(
        SECRET_KEY="for tests",
        USE_TZ=True,
        DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
        INSTALLED_APPS=["bulltask.contrib.django"],
    )
    django.setup()
    with use_server(project_app(), sys.argv[2]):
        print(json.dumps(run(sys.argv[1]), indent=1))  # noqa: T201 - its output
