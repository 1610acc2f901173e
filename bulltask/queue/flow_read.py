"""Reads a stored flow, with one round trip per level of the tree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bulltask.errors import ConfigError
from bulltask.jobs.names import address_of, name_in_app
from bulltask.jobs.stored_job import StoredJob
from bulltask.queue.context import QueueContext
from bulltask.transport.broker import Broker
from bulltask.transport.keys import QueueKeys
from bulltask.transport.operation import Operation
from bulltask.transport.scripts.flow import KINDS, children
from bulltask.transport.scripts.job import read_job

__all__ = ["FlowReader", "ReadNode"]


@dataclass(slots=True, eq=False)
class ReadNode:
    """A job in a stored flow.

    Attributes:
        context: The context of its queue.
        job_id: Its id.
        stored: The job; ``None`` if it has been removed.
        keys: Full keys of its child jobs, by outcome.
        children: The children that were read.
    """

    context: QueueContext
    job_id: str
    stored: StoredJob | None = None
    keys: dict[str, list[str]] = field(default_factory=lambda: {kind: [] for kind in KINDS})
    children: list[ReadNode] = field(default_factory=list)


class _OtherNamingContext(QueueContext):
    """A queue whose name does not match this app's ``prefix`` or ``queue_hash_tag``."""

    def __init__(self, keys: QueueKeys, broker: Callable[[], Broker]) -> None:
        super().__init__(keys.name, broker, None)
        self._keys = keys

    @property
    def keys(self) -> QueueKeys:
        """The queue's keys, taken from the keys of its jobs."""
        return self._keys


class FlowReader:
    """Reads a flow.

    Args:
        broker: Returns the connection to Redis.
        queue: The root's queue.
        job_id: The root's id.
        depth: Maximum number of levels.
        max_children: How many children of each kind are read per job.

    Raises:
        InvalidNameError: The queue's name is invalid.
        ConfigError: A number is below 1.
    """

    def __init__(self, broker: Callable[[], Broker], queue: str, job_id: str, depth: int, max_children: int) -> None:
        for name, number in (("depth", depth), ("max_children", max_children)):
            if not isinstance(number, int) or isinstance(number, bool) or number < 1:
                raise ConfigError(f"{name} must be an integer of 1 or more, not {number!r:.200}")
        self._broker, self._depth, self._max_children = broker, depth, max_children
        self._root = ReadNode(QueueContext(queue, broker, None), job_id)
        self._contexts: dict[str, QueueContext] = {}

    def read(self) -> Operation[list[list[ReadNode]]]:
        """Read the flow and return its levels, the root's first."""
        levels = [[self._root]]
        while True:
            level, last = levels[-1], len(levels) == self._depth
            yield from self._read_level(level, with_children=not last)
            below = [] if last else [child for node in level for child in self._below(node)]
            if not below:
                return levels
            levels.append(below)

    def _read_level(self, level: list[ReadNode], *, with_children: bool) -> Operation[None]:
        jobs: list[Any] = yield [read_job(node.context.keys, node.job_id) for node in level]
        for node, stored in zip(level, jobs, strict=True):
            node.stored = stored
        todo = [(node, kind, ("0", 0)) for node in level if with_children and node.stored for kind in KINDS]
        while todo:
            pages: list[Any] = yield [
                children(node.context.keys, node.job_id, kind, self._max_children, cursor)
                for node, kind, cursor in todo
            ]
            unfinished = []
            for (node, kind, _), (cursor, keys, _) in zip(todo, pages, strict=True):
                node.keys[kind] += keys
                if cursor[0] != "0" and len(node.keys[kind]) < self._max_children:
                    unfinished.append((node, kind, cursor))
            todo = unfinished

    def _below(self, node: ReadNode) -> list[ReadNode]:
        # Without duplicates: a child that finishes between two pages is on both, and SSCAN may repeat a member.
        keys = dict.fromkeys(key for kind in KINDS for key in node.keys[kind][: self._max_children])
        node.children = [self._node(key) for key in keys]
        return node.children

    def _node(self, key: str) -> ReadNode:
        prefix, name, job_id = address_of(key, self._broker().config.prefix)
        base = f"{prefix}:{name}"
        if base not in self._contexts:
            self._contexts[base] = self._context(prefix, name)
        return ReadNode(self._contexts[base], job_id)

    def _context(self, prefix: str, name: str) -> QueueContext:
        broker = self._broker()
        for queue in (name_in_app(name, hash_tag=True), name):
            if broker.keys(queue).base == f"{prefix}:{name}:":
                return QueueContext(queue, self._broker, None)
        return _OtherNamingContext(QueueKeys(prefix, name), self._broker)
