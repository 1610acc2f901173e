"""Scans all keys of a server, or of all nodes of a cluster."""

from __future__ import annotations

import sys
from collections.abc import Callable

from bulltask.transport.call import Call
from bulltask.transport.client_types import SyncClient
from bulltask.transport.cluster import ClusterClient

__all__ = ["ScanStep", "scan_all", "scan_up_to"]

ScanStep = Callable[[str], Call[tuple[str, list[str]]]]
"""A function that returns the call for the next step of a scan, given the cursor (first ``"0"``)."""


def scan_all(client: SyncClient, step: ScanStep) -> set[str]:
    """Scan and return all results; each call continues from the cursor that the previous one returned.

    If slots of a cluster have moved in the meantime, the scan starts again. Keys that are being moved to another node
    may be missed.

    Raises:
        BrokerError: As in :meth:`SyncClient.run`.
    """
    return scan_up_to(client, step, sys.maxsize)[0]


def scan_up_to(client: SyncClient, step: ScanStep, max_steps: int) -> tuple[set[str], bool]:
    """Like :func:`scan_all`, but with at most ``max_steps`` calls to each node; also return whether all were scanned.

    Raises:
        BrokerError: As in :meth:`SyncClient.run`.
    """
    if not isinstance(client, ClusterClient):
        return _scan(step, client.run, max_steps)
    names, is_complete, nodes = set[str](), True, None
    while nodes != (nodes := client.nodes()):
        is_complete = True
        for address in nodes:
            found, ended = _scan(step, lambda call, node=address: client.run_at(node, call), max_steps)  # type: ignore[misc]
            names |= found
            is_complete &= ended
    return names, is_complete


def _scan(
    step: ScanStep, run: Callable[[Call[tuple[str, list[str]]]], tuple[str, list[str]]], max_steps: int
) -> tuple[set[str], bool]:
    names, cursor = set[str](), "0"
    for _ in range(max_steps):
        cursor, page = run(step(cursor))
        names.update(page)
        if cursor == "0":
            return names, True
    return names, False
