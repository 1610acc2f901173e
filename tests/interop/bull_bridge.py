"""Drive the real Bull, 4 or 3, from Python (node/bull.js)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.interop.node_bridge import NodeBridge

__all__ = ["BullBridge"]

SCRIPT = Path(__file__).parent / "node" / "bull.js"


class BullBridge(NodeBridge):
    """A Node process with Bull: ``BullBridge.to(url, package="bull")``."""

    client = "Bull"

    def _command(self, package: str) -> list[str]:
        return ["node", str(SCRIPT), package]

    def calls(self, *calls: Sequence[object], queue: str = "mail", **more: Any) -> list[Any]:
        """Call methods of Bull's queue: ``calls(["add", "name", {}], ["pause"])``; return ids of jobs, or replies."""
        replies: list[Any] = self.call("queue.calls", queue=queue, calls=[list(call) for call in calls], **more)
        return replies

    def add(self, name: str, data: object = None, queue: str = "mail", **opts: object) -> str:
        """Add a job; return its id."""
        return str(self.calls(["add", name, {} if data is None else data, opts], queue=queue)[0])

    def work(self, attempts: int, queue: str = "mail") -> None:
        """Run a worker for a number of attempts; the data of the jobs determines their outcomes (node/bull.js)."""
        self.call("queue.work", queue=queue, attempts=attempts)

    def hold(self, queue: str = "mail") -> str:
        """Start a worker that acquires a job and runs it until this process exits; return the id."""
        return str(self.call("queue.hold", queue=queue))
