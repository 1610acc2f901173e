"""Tools for tests of programs that use bulltask; docs/how-to/testing.md describes them.

The names are imported on first use, because pytest imports this package in every project that has bulltask installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from bulltask.testing.inline import FakeClock, InlineWorker
    from bulltask.testing.worker import (
        RedisServer,
        WorkerProcess,
        assert_enqueued,
        enqueued_jobs,
        use_server,
        wait_until,
    )

__all__ = [
    "FakeClock",
    "InlineWorker",
    "RedisServer",
    "WorkerProcess",
    "assert_enqueued",
    "enqueued_jobs",
    "use_server",
    "wait_until",
]

_MODULES: Final = {
    **dict.fromkeys(__all__, "bulltask.testing.worker"),
    **dict.fromkeys(["FakeClock", "InlineWorker"], "bulltask.testing.inline"),
}
"""The module of each public name."""

if not TYPE_CHECKING:  # type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Import a public name on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(_MODULES[name]), name)
