"""Scans all keys of a server, or of all nodes of a cluster."""

from __future__ import annotations

from collections.abc import Callable

from bulltask.transport.call import Call
from bulltask.transport.client_types import SyncClient
from bulltask.transport.cluster import ClusterClient

__all__ = ["ScanStep", "scan_all"]

ScanStep = Callable[[str], Call[tuple[str, list[str]]]]
"""A function that returns the call for the next step of a scan, given the cursor (first ``"0"``)."""


def scan_all(client: SyncClient, step: ScanStep) -> set[str]:
    """Scan and return all results; each call continues from the cursor that the previous one returned.

    If slots of a cluster have moved in the meantime, the scan starts again. Keys that are being moved to another node
    may be missed.

    Raises:
        BrokerError: As in :meth:`SyncClient.run`.
    """
    if not isinstance(client, ClusterClient):
        return _scan(step, client.run)
    names, nodes = set[str](), None
    while nodes != (nodes := client.nodes()):
        for address in nodes:
            names |= _scan(step, lambda call, node=address: client.run_at(node, call))  # type: ignore[misc]
    return names


def _scan(step: ScanStep, run: Callable[[Call[tuple[str, list[str]]]], tuple[str, list[str]]]) -> set[str]:
    names, cursor = set[str](), "0"
    while True:
        cursor, page = run(step(cursor))
        names.update(page)
        if cursor == "0":
            return names
