from __future__ import annotations

from bulltask.embedded.binary import ServerBinary, find_binary
from bulltask.embedded.join import resolve_url, start_or_join
from bulltask.embedded.server import EmbeddedServer

__all__ = ["EmbeddedServer", "ServerBinary", "find_binary", "resolve_url", "start_or_join"]
