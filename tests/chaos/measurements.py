"""Counts of a run of the fault-injection matrix, by fault, process and phase: ``tests/chaos/results.json``."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from tests.chaos.cell import Result
from tests.chaos.phases import PHASES, phase_of
from tests.chaos.points import FAULTS, LOCK_S, STALLED_S

__all__ = ["measurements"]


def measurements(results: Sequence[Result], server: str, seed: int, repetitions: int) -> dict[str, Any]:
    """Return the measurements of all cells whose fault was injected.

    Args:
        results: The results of all cells and repetitions.
        server: The name and version of the server.
        seed: The seed of the run.
        repetitions: How often each cell was run.
    """
    reached = [result for result in results if result.reached]
    groups: dict[tuple[str, str, str], list[Result]] = defaultdict(list)
    for result in reached:
        if result.cell.point is not None:
            groups[result.cell.fault, result.cell.point.role, phase_of(result.cell.point)].append(result)
    order = [(fault, role, phase) for fault in FAULTS for role, phases in PHASES.items() for phase in phases]
    return {
        "server": server,
        "seed": seed,
        "repetitions": repetitions,
        "lock_s": LOCK_S,
        "stalled_s": STALLED_S,
        "points": len({(result.cell.workload, result.cell.mode, result.cell.point) for result in reached}),
        "cells": len({str(result.cell) for result in results}),
        "not_reached": len(results) - len(reached),
        **_counts(reached),
        "note": "",  # about the run, for the page; to be edited in the file
        "rows": [
            {"fault": key[0], "process": key[1], "phase": key[2], **_counts(groups[key]), **_recovery(groups[key])}
            for key in order
            if key in groups
        ],
    }


def _counts(results: Sequence[Result]) -> dict[str, int]:
    return {
        "faults": len(results),
        "jobs": sum(result.jobs for result in results),
        "lost": sum(result.lost for result in results),
        "repeated": sum(result.repeated for result in results),
    }


def _recovery(results: Sequence[Result]) -> dict[str, float | None]:
    seconds = [result.recovery_s for result in results if result.recovery_s is not None]
    return {
        "recovery_median_s": round(statistics.median(seconds), 2) if seconds else None,
        "recovery_max_s": round(max(seconds), 2) if seconds else None,
    }
