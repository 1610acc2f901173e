"""The table in ``explanation/guarantees.md`` matches the measurements."""

from __future__ import annotations

import json
import runpy

from tests.chaos.topologies import FAULTS
from tests.support.programs import ROOT


def test_the_guarantees_page_shows_the_measurements_of_the_fault_injection() -> None:
    script = runpy.run_path(str(ROOT / "docs/guarantees_table.py"))
    page, results = script["PAGE"].read_text(), json.loads(script["RESULTS"].read_text())
    expected = script["replace_table"](page, script["table"](results))
    assert page == expected, "run: .venv/bin/python docs/guarantees_table.py"


def test_the_measured_run_lost_no_job() -> None:
    results = json.loads((ROOT / "tests/chaos/results.json").read_text())
    assert results["lost"] == 0
    assert results["faults"] >= 500


def test_the_table_has_each_fault_of_each_topology_and_planned_ones_lost_no_job() -> None:
    rows = json.loads((ROOT / "tests/chaos/results.json").read_text())["topologies"]
    measured = {(row["topology"], row["fault"]): row["lost"] for row in rows}
    expected = {(topology, fault): safe for topology, faults in FAULTS.items() for fault, (_, safe) in faults.items()}
    assert measured.keys() == expected.keys()
    assert [key for key, safe in expected.items() if safe and measured[key]] == []
