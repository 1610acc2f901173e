"""A Valkey server for development and tests, started by bulltask: ``embedded://`` and :class:`EmbeddedServer`."""

from __future__ import annotations

from bulltask.embedded.server import EmbeddedServer, ServerBinary, find_binary
from bulltask.embedded.shared import (
    calling_directory,
    import_directory,
    is_server_of_tests,
    is_under_test,
    resolve_url,
    server_of_tests,
    start_or_join,
)

__all__ = [
    "EmbeddedServer",
    "ServerBinary",
    "calling_directory",
    "find_binary",
    "import_directory",
    "is_server_of_tests",
    "is_under_test",
    "resolve_url",
    "server_of_tests",
    "start_or_join",
]
