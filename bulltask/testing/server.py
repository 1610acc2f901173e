"""A public path of :class:`bulltask.testing.RedisServer`."""

from __future__ import annotations

from bulltask.testing.worker import RedisServer

__all__ = ["RedisServer"]
