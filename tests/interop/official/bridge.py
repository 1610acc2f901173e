"""Drive the official Python client of BullMQ in a separate environment through JSON lines (client.py)."""

from __future__ import annotations

from pathlib import Path

from tests.interop.node_bridge import NodeBridge
from tests.interop.official.environment import python_of

__all__ = ["OfficialPython"]

SCRIPT = Path(__file__).with_name("client.py")


class OfficialPython(NodeBridge):
    """A long-lived process with the official Python client; operations and replies are those of the Node bridge.

    ``package`` is the client's major version: ``"2"`` (the default) or ``"3"``.
    """

    client = "the official Python client"

    def _command(self, package: str) -> list[str]:
        major = 2 if package == "bullmq" else int(package)
        return [str(python_of(major)), "-u", str(SCRIPT)]
