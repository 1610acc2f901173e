from __future__ import annotations

from bulltask.embedded.binary import ServerBinary, find_binary
from bulltask.embedded.server import EmbeddedServer
from bulltask.embedded.shared import resolve_url, start_or_join

__all__ = ["EmbeddedServer", "ServerBinary", "find_binary", "resolve_url", "start_or_join"]
