"""The key names of Bull, BullMQ's predecessor: mostly those of BullMQ (``keys.py``), for another layout."""

from __future__ import annotations

from bulltask.transport.keys import QueueKeys

__all__ = ["BullKeys"]


class BullKeys(QueueKeys):
    """The keys of a queue of Bull 1 to 4.

    Args:
        prefix: Bull's prefix, ``bull`` by default.
        name: the queue's name as Bull spells it.
    """

    __slots__ = ("limiter_index", "meta_paused", "priority")

    def __init__(self, prefix: str, name: str) -> None:
        super().__init__(prefix, name)
        self.meta_paused = f"{self.base}meta-paused"
        self.priority = f"{self.base}priority"
        self.limiter_index = f"{self.base}limiter:index"
