"""A random part of the fault-injection matrix: ``python -m tools fault-injection`` runs the whole one."""

from __future__ import annotations

import random
from collections import defaultdict
from pathlib import Path

import pytest

from tests.chaos.cell import Cell, Point, Result, run_cell
from tests.chaos.matrix import TARGETS, all_cells, fault_free_cells, problems_of, run_cells
from tests.chaos.phases import phase_of

pytestmark = [pytest.mark.process, pytest.mark.slow]

PARALLEL = 6
IN_THE_TASK = Point("child", "run the task", "before")


def problems(results: list[Result]) -> list[str]:
    """Return each problem with the cell's name, which ``python -m tests.chaos --only NAME`` runs again."""
    return [f"{result.cell}: {problem}\n{result.log}" for result in results for problem in problems_of(result)]


def test_no_fault_of_a_random_part_of_the_matrix_loses_a_job_or_repeats_one_too_often(
    broker_url: str, tmp_path: Path, rng: random.Random
) -> None:
    plain = list(run_cells(fault_free_cells(), broker_url, tmp_path / "plain", PARALLEL))
    assert problems(plain) == []
    rows: dict[tuple[str, str, str], list[Cell]] = defaultdict(list)
    for cell in all_cells(plain):
        assert cell.point is not None
        rows[cell.fault, cell.point.role, phase_of(cell.point)].append(cell)
    assert {role for _, role, _ in rows} == {role for roles in TARGETS.values() for role in roles}

    # One cell for a quarter of the rows of the table in the documentation; which ones depends on the seed.
    cells = [rng.choice(row) for row in rng.sample([*rows.values()], len(rows) // 4)]
    results = list(run_cells(cells, broker_url, tmp_path / "cells", PARALLEL))
    assert problems(results) == []
    assert sum(result.reached for result in results) >= len(results) * 3 // 4, "most faults were injected"


def test_without_lock_renewal_a_job_of_a_stopped_child_runs_twice(broker_url: str, tmp_path: Path) -> None:
    source = "from bulltask.worker.locks import Heartbeat\nHeartbeat.tick = lambda *_: None\n"
    result = run_cell(Cell("jobs", "sync", IN_THE_TASK, "SIGSTOP"), broker_url, tmp_path / "cell", source=source)
    assert result.repeated > 0, "otherwise, the matrix could not find a job that runs too often"
    assert problems_of(result) != []


def test_without_recovery_the_job_of_a_killed_child_is_late(broker_url: str, tmp_path: Path) -> None:
    source = "from bulltask.worker.recovery import Recovery\nRecovery.recover = lambda *_: None\n"
    result = run_cell(Cell("jobs", "sync", IN_THE_TASK, "kill -9"), broker_url, tmp_path / "cell", source=source)
    assert result.recovery_s is not None
    assert result.recovery_s > 1.0, "otherwise, the matrix could not find a job that is recovered too late"
