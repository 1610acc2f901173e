"""Lets Celery's integration tests import bulltask: the names that they import, and the fixtures that they use.

pytest loads this module as a plugin, and the worker as the module of its app. :data:`PATCHES` lists what it adds to
``bulltask.celery``; pytest prints the list. Nothing here changes what bulltask does.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Final, Never

import pytest
import redis

import bulltask.celery
from bulltask.signals import task_received

PATCHES: Final[list[str]] = []


class PlaceholderModule(types.ModuleType):
    """A module of Celery's that bulltask does not have."""

    def __getattr__(self, name: str) -> Never:
        if name.startswith("__"):
            raise AttributeError(name)
        raise NotImplementedError(f"the facade has no {self.__name__}.{name}")


def decorator(*_: object, **__: object) -> Callable[[Any], Any]:
    """Take the place of a decorator of Celery's, such as ``control_command``; return the function unchanged."""
    return lambda function: function


def provide(module: str, **names: object) -> None:
    """Add names to a module of Celery's, unless bulltask has them; create the module if bulltask has none."""
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError:
        PATCHES.append(f"{module}: a module without other names")
        found = sys.modules[module] = PlaceholderModule(module)
        found.__path__ = []
        parent, _, name = module.rpartition(".")
        provide(parent)
        setattr(sys.modules[parent], name, found)
    for name, value in names.items():
        try:
            getattr(found, name)
        except (AttributeError, ImportError, NotImplementedError):
            PATCHES.append(f"{module}.{name}: {getattr(value, '__qualname__', value)}")
            setattr(found, name, value)


def placeholder(name: str) -> dict[str, type]:
    """Return a class of Celery's that bulltask does not have, by its name."""
    return {name: type(name, (Exception,), {"__qualname__": "an Exception, only to be imported"})}


def shared_task(function: Any = None, **options: Any) -> Any:
    """``bulltask.shared_task``; a task that it refuses becomes ``None``, so that the others are defined."""
    if function is None:
        return lambda function: shared_task(function, **options)
    try:
        return bulltask.shared_task(**options)(function) if options else bulltask.shared_task(function)
    except bulltask.ConfigError as error:
        PATCHES.append(f"the task {function.__name__} is not defined: {error}")
        return None


class View:
    """An object, with other values for some of its attributes."""

    def __init__(self, of: object, **attributes: object) -> None:
        vars(self).update(_of=of, **attributes)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._of, name)

    def __setattr__(self, name: str, value: object) -> None:
        setattr(self._of, name, value)


class Manager:
    """The methods of Celery's test manager that need no remote control."""

    def __init__(self, app: bulltask.App) -> None:
        self.app = View(app, conf=View(app.conf, **READ_ONLY))

    def inspect(self) -> types.SimpleNamespace:
        """Return an object whose method ``ping`` answers for each worker."""
        workers = self.app.queue(self.app._config.default_queue).get_workers()
        return types.SimpleNamespace(ping=lambda: {worker.name: {"ok": "pong"} for worker in workers})

    def join(self, result: Any, *, propagate: bool = False, timeout: float | None = None) -> Any:
        """Wait for a result."""
        return result.get(timeout=timeout, propagate=propagate)

    def wait_for(self, condition: Callable[[], object], catch: tuple[type[Exception], ...]) -> object:
        """Call ``condition`` until it raises none of these exceptions."""
        for _ in range(600):
            with suppress(*catch):
                return condition()
            connection.blpop(["nothing"], 0.1)
        return condition()

    def assert_result_tasks_in_progress_or_completed(self, results: list[Any]) -> None:
        """Wait until a worker has taken all jobs."""
        untaken = (result for result in results if result.status not in ("STARTED", "SUCCESS"))
        self.wait_for(lambda: next(untaken, 1) or 1, (AssertionError,))

    def wait_until_idle(self) -> None:
        """Remove all waiting jobs."""
        self.app.queue(self.app._config.default_queue).drain(delayed=True)


@pytest.fixture(scope="session")
def celery_session_app() -> bulltask.App:
    """Return the app of all tests."""
    return app


celery_app = celery_session_app


def relay(request: bulltask.Request, **_: object) -> None:
    """In the worker: wait until :func:`receive` has called the receivers in the process of the tests."""
    connection.rpush("task-received", json.dumps(dataclasses.asdict(request)))
    connection.blpop(["task-relayed"], 5)


def receive() -> None:
    """In the process of the tests: send the worker's ``task_received`` again. (Celery's worker is a thread there.)"""
    while True:
        request = bulltask.Request(**json.loads(connection.blpop(["task-received"])[1]))
        for receiver in task_received.receivers():
            with suppress(Exception):  # not logged here: two threads must not use `ast` at the same time
                receiver(request=request)
        connection.rpush("task-relayed", 1)


@pytest.fixture(scope="session")
def celery_session_worker(celery_session_app: bulltask.App) -> Iterator[None]:
    """Run a worker process with one child, as Celery's fixture does."""
    command = [sys.executable, "-m", "bulltask", "-A", __name__, "worker", "-c", "1", "-l", "info"]
    with Path(os.environ["SUITE_WORKER_LOG"]).open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    Thread(target=receive, daemon=True).start()
    try:
        Manager(celery_session_app).wait_for(lambda: next(iter(Manager(app).inspect().ping())), (StopIteration,))
        yield
    finally:
        process.terminate()
        process.wait()


def pytest_report_header() -> list[str]:
    """Print what the facade adds."""
    return [f"facade: {patch}" for patch in PATCHES]


URL: Final = os.environ["TEST_BROKER"]
OF_TRANSPORT: Final = "result_backend_transport_options"
connection: Final = redis.Redis.from_url(URL, socket_timeout=None)
READ_ONLY: Final = {"broker_url": URL, "result_backend": URL, "task_protocol": 2, OF_TRANSPORT: {}}
PATCHES += [f"manager.app.conf.{name} is {value!r}" for name, value in READ_ONLY.items()]
added: Any = bulltask.App("suite", broker=URL, result_extended=True, convert_untyped=True)
added.ResultSet = bulltask.ResultSet
added.backend = types.SimpleNamespace(ensure_chords_allowed=lambda: None)
added.amqp = types.SimpleNamespace(queues={"celery"})
app: Final[bulltask.App] = added
PATCHES += ["app.backend: only ensure_chords_allowed()", "app.amqp: only queues", "app.ResultSet: bulltask.ResultSet"]
vars(sys.modules["celery"])["shared_task"] = shared_task
PATCHES += ["shared_task: a task that bulltask refuses is None", "task_received: also sent in the tests' process"]
provide("celery.app.trace")
provide("celery.backends.base", states=bulltask.celery.states, **placeholder("BaseKeyValueStoreBackend"))
provide("celery.canvas", _chain=bulltask.chain)
provide("celery.exceptions", **placeholder("ChordError"))
provide("celery.utils.serialization", **placeholder("UnpickleableExceptionWrapper"))
provide("celery.worker.control", add_consumer=decorator, cancel_consumer=decorator)
provide("celery.worker.control", control_command=decorator, inspect_command=decorator)
provide("celery.worker.state")
provide("celery.contrib.pytest", celery_app=celery_app, celery_session_app=celery_session_app)
provide("celery.contrib.pytest", celery_session_worker=celery_session_worker)
provide("celery.contrib.testing.manager", Manager=Manager)

from t.integration.tasks import ClassBasedAutoRetryTask  # noqa: E402 - imports the names above

if "pytest" not in sys.argv[0]:  # the worker
    app.register_task(ClassBasedAutoRetryTask())
    task_received.connect(relay)
