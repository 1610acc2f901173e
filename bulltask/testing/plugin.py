"""The pytest plugin. pytest imports it in every project that has bulltask installed, so it imports bulltask late."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from bulltask.app import App
    from bulltask.testing.inline import FakeClock, InlineWorker
    from bulltask.testing.worker import RedisServer

__all__ = [
    "assert_enqueued",
    "bulltask_app",
    "bulltask_clock",
    "bulltask_server",
    "bulltask_worker",
    "pytest_addoption",
    "pytest_configure",
    "pytest_unconfigure",
]

isolated_urls: str | tuple[str, ...] = ()
"""The beginning of the URLs instead of which apps use a server of this process; ``()`` for none
(:mod:`bulltask.embedded.shared`)."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the setting ``bulltask_app``."""
    parser.addini("bulltask_app", "the bulltask app under test, as for bulltask -A: pkg.mod:name")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker ``bulltask``, and keep the apps under test away from their own servers."""
    global isolated_urls  # noqa: PLW0603 # bulltask.embedded reads it without importing this module
    isolated_urls = "" if config.getini("bulltask_app") else "embedded"
    config.addinivalue_line("markers", "bulltask(**settings): settings of the app in the fixture bulltask_app")


def pytest_unconfigure() -> None:
    """Let apps use their own servers again, for a process that goes on."""
    global isolated_urls  # noqa: PLW0603 # as above
    isolated_urls = ()


@pytest.fixture(scope="session")
def bulltask_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """The Redis or Valkey server of this test session; with pytest-xdist, each process has its own."""
    from bulltask.testing.worker import RedisServer  # noqa: PLC0415

    with RedisServer.start(tmp_path_factory.mktemp("bulltask")) as server:
        yield server


@pytest.fixture
def bulltask_app(request: pytest.FixtureRequest, bulltask_server: RedisServer) -> Iterator[App]:
    """The app in the setting ``bulltask_app``, or a new one, with an empty server and a fake clock."""
    from bulltask.testing.worker import use_server  # noqa: PLC0415

    settings = [marker.kwargs for marker in request.node.iter_markers("bulltask")]
    merged = {name: value for kwargs in reversed(settings) for name, value in kwargs.items()}
    app = _find_app(request.config)
    with use_server(app, bulltask_server.url, **merged):
        yield app


@pytest.fixture
def bulltask_worker(bulltask_app: App) -> Iterator[InlineWorker]:
    """A worker that runs the app's jobs in the test's thread when the test asks it to."""
    from bulltask.testing.inline import InlineWorker  # noqa: PLC0415

    with InlineWorker(bulltask_app) as worker:
        yield worker


@pytest.fixture
def bulltask_clock(bulltask_app: App) -> FakeClock:
    """The clock of ``bulltask_app``."""
    from bulltask.testing.inline import FakeClock  # noqa: PLC0415

    clock = bulltask_app._broker.clock
    assert isinstance(clock, FakeClock)
    return clock


@pytest.fixture
def assert_enqueued(bulltask_app: App) -> Callable[..., Any]:
    """:func:`bulltask.testing.assert_enqueued` for ``bulltask_app``."""
    from bulltask.testing.worker import assert_enqueued  # noqa: PLC0415

    return functools.partial(assert_enqueued, bulltask_app)


def _find_app(config: pytest.Config) -> App:
    from bulltask.app import App  # noqa: PLC0415
    from bulltask.registry.tasks import add_to_import_path, find_app  # noqa: PLC0415

    spec = config.getini("bulltask_app") or _django_project()
    if not spec:
        return App("tests")
    add_to_import_path(str(config.rootpath))
    app = find_app(spec, App)
    app._load_tasks()
    return app


def _django_project() -> str:
    """Return the ``-A`` of a Django project whose tests pytest-django runs, ``""`` if there is none."""
    is_tested = hasattr(getattr(sys.modules.get("django.test.utils"), "_TestState", None), "saved_data")
    is_used = is_tested and sys.modules["django.apps"].apps.is_installed("bulltask.contrib.django")
    return "bulltask.contrib.django" if is_used else ""
