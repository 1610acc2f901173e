"""Tools for tests of programs that use bulltask; docs/how-to/testing.md describes them.

The names are imported on first use, because pytest imports this package in every project that has bulltask installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bulltask.testing.app_server import use_server
    from bulltask.testing.clock import FakeClock
    from bulltask.testing.enqueued import assert_enqueued, enqueued_jobs
    from bulltask.testing.flaky import FlakyProxy
    from bulltask.testing.inline_worker import InlineWorker
    from bulltask.testing.server import RedisServer
    from bulltask.testing.wait import wait_until
    from bulltask.testing.worker import WorkerProcess

__all__ = [
    "FakeClock",
    "FlakyProxy",
    "InlineWorker",
    "RedisServer",
    "WorkerProcess",
    "assert_enqueued",
    "enqueued_jobs",
    "use_server",
    "wait_until",
]

_MODULES: Final = {
    "FlakyProxy": "bulltask.testing.flaky",
    "InlineWorker": "bulltask.testing.inline_worker",
    "FakeClock": "bulltask.testing.clock",
    "RedisServer": "bulltask.testing.server",
    "WorkerProcess": "bulltask.testing.worker",
    "assert_enqueued": "bulltask.testing.enqueued",
    "enqueued_jobs": "bulltask.testing.enqueued",
    "use_server": "bulltask.testing.app_server",
    "wait_until": "bulltask.testing.wait",
}
"""The module of each public name."""

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)
