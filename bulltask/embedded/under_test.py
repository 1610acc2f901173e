"""Tests send nothing to the development server: in a test process, apps use an empty server of that process.

This applies while Django's test environment is set up (by ``manage.py test`` or pytest-django), and while pytest runs
with the plugin's setting ``bulltask_app``. Without the setting, pytest replaces only ``embedded://``, because another
URL may be that of a server for tests. Neither is imported here.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
from typing import Final
from urllib.parse import urlsplit

from bulltask.config.urls import SecretUrl
from bulltask.embedded.binary import find_binary
from bulltask.embedded.server import STARTED_HERE, EmbeddedServer
from bulltask.errors import BrokerUnavailableError

__all__ = ["is_server_of_tests", "is_under_test", "server_of_tests", "url_in_tests"]

_PLUGIN: Final = "bulltask.testing.plugin"
_DJANGO: Final = "django.test.utils"
_LOCAL: Final = frozenset({"127.0.0.1", "localhost"})

_lock: Final = threading.Lock()
_server: tuple[int, EmbeddedServer] | None = None


def is_under_test(broker_url: SecretUrl) -> bool:
    """Return whether this process runs tests, which must not use this server."""
    state = getattr(sys.modules.get(_DJANGO), "_TestState", None)  # setup_test_environment() saves the settings in it
    isolated: str | tuple[str, ...] = getattr(sys.modules.get(_PLUGIN), "isolated_urls", ())
    return hasattr(state, "saved_data") or broker_url.scheme.startswith(isolated)


def url_in_tests(broker_url: SecretUrl) -> SecretUrl:
    """Return the URL of the server to use instead of ``broker_url``, which is usually the development server.

    A server or proxy that this process has started is used as it is.

    Raises:
        BrokerUnavailableError: The server of the tests could not be started.
    """
    address = urlsplit(str(broker_url))
    if address.scheme == "redis" and address.hostname in _LOCAL and address.port in STARTED_HERE:
        return broker_url
    try:
        return SecretUrl(server_of_tests().url)
    except BrokerUnavailableError as exc:
        raise BrokerUnavailableError(
            f"tests send no jobs to {broker_url}, where a worker may run them, and the server for tests did not start: "
            f"{exc}. Alternatively, set task_always_eager in the settings of the tests, or call "
            "bulltask.testing.use_server(app, url), which empties the server at that URL"
        ) from exc


def server_of_tests() -> EmbeddedServer:
    """Return the server of this test process; start it if necessary. Parallel test processes have one each.

    Raises:
        BrokerUnavailableError: It could not be started.
    """
    global _server  # noqa: PLW0603 # one server per process
    import tempfile  # noqa: PLC0415 # takes 10 ms, and only tests need it

    with _lock:
        if _server is None or _server[0] != os.getpid() or not _server[1].running:
            # Nothing is written to the directory after the start, so it need not outlive the process, which may be
            # killed, or end without calling atexit functions, as multiprocessing's do.
            with tempfile.TemporaryDirectory(prefix="bulltask-tests-") as directory:
                server = EmbeddedServer(directory, binary=find_binary(), appendonly=False, restricted=False)
                server.start()
            atexit.register(server.stop)
            _server = os.getpid(), server
        return _server[1]


def is_server_of_tests(url: SecretUrl) -> bool:
    """Return whether a URL is that of :func:`server_of_tests`, for which no worker runs."""
    return _server is not None and _server[0] == os.getpid() and url == SecretUrl(_server[1].url)
