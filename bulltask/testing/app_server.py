"""Lets an app use a test's server and clock, and restores its own connections afterwards."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from bulltask.app import App
from bulltask.testing.clock import FakeClock
from bulltask.transport.broker import Broker
from bulltask.transport.call import AllNodesCall, command

__all__ = ["use_server"]

_SETTINGS: Final[Mapping[str, object]] = {"lock_duration": 86_400}
"""A debugger may stop a task for longer than the default lock lasts, and no supervisor renews the lock."""


@contextmanager
def use_server(app: App, url: str, **settings: object) -> Iterator[FakeClock]:
    """Let an app use another server, which is emptied, and a clock that the test can advance.

    Example, for test suites without pytest::

        with RedisServer.start(directory) as server, use_server(app, server.url), InlineWorker(app) as worker:
            add.delay(1, 2)
            worker.run_jobs()

    Args:
        app: The app; jobs that it sends inside the ``with`` block are stored in this server.
        url: The server, **which is emptied**.
        settings: Other settings; they override the app's own settings and the environment.

    Returns:
        The clock.

    Raises:
        ConfigError: A setting is invalid.
        BrokerUnavailableError: The server cannot be reached.
    """
    conf = app.conf.overridden({**_SETTINGS, **settings, "broker_url": url})
    clock = FakeClock()
    broker = Broker(conf.freeze(), url, clock=clock)
    clock.connect(broker.pool)
    broker.pool.run(AllNodesCall(command("FLUSHDB"), len))
    # In eager mode, the app makes its connections itself.
    previous = app.replace_connections(conf, None if conf.freeze().always_eager else broker)
    try:
        yield clock
    finally:
        app.close()
        broker.close()
        app.replace_connections(*previous)
