from __future__ import annotations

from bulltask.embedded.binary import ServerBinary, find_binary
from bulltask.embedded.project import calling_directory, import_directory
from bulltask.embedded.server import EmbeddedServer
from bulltask.embedded.shared import resolve_url, start_or_join
from bulltask.embedded.under_test import is_server_of_tests, is_under_test, server_of_tests

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
