"""``JobClient``: what a running task can do with its job in Redis."""

from __future__ import annotations

from typing import Any, Literal, Protocol

from bulltask.registry.checkpoints import CheckpointStore

__all__ = ["JobClient", "JobCommand"]

JobCommand = Literal[
    "progress", "log", "data", "children_values", "pending_children", "child_failure", "incompatible_since"
]
"""Commands on a job. The first three store progress, append a log line, and replace the data. The others read the
results of child jobs, the number of pending ones, the reason why one has failed, and since when no worker could run the
job."""


class JobClient(CheckpointStore, Protocol):
    """Executes commands on a running task's job."""

    def send(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """Execute a command; ``value`` is JSON, or the text of a log line."""
        ...

    async def asend(self, command: JobCommand, value: bytes | str = b"") -> Any:
        """:meth:`send` for asyncio."""
        ...

    def replace(self, canvas: Any, *, retries: int = 0) -> None:
        """Add a canvas as child jobs; its result becomes that of the job.

        Args:
            canvas: The canvas.
            retries: The number of retries before it, if it is the next attempt of the job in another queue.
        """
        ...

    async def areplace(self, canvas: Any, *, retries: int = 0) -> None:
        """:meth:`replace` for asyncio."""
        ...
