"""The benchmark counts every job and reports what it measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.apps.counter import Counter, Tally, progress, tally
from benchmarks.measures import Bench
from benchmarks.peers import PEERS, Peer, missing
from benchmarks.report import closing_line, noise, problems, ratios, report, spread
from benchmarks.run import main, those_there

ROOT = Path(__file__).parent.parent.parent
NEEDS_NODE = pytest.mark.skipif(bool(missing(["bullmq"])), reason="needs Node.js and bullmq (tests/interop)")


def drained(rate: float, **more: Any) -> dict[str, Any]:
    counted = {"done": 100, "stored": 100, "lost": 0, "duplicated": 0}
    return {"rate": rate, "worker_us": 40.0, "redis_us": 30.0, "foreign": 0.01, **counted, **more}


def two_rounds(**ours: Any) -> list[dict[str, dict[str, dict[str, Any]]]]:
    rates = [(9000.0, 1000.0), (8000.0, 2000.0)]
    return [{"drain": {"bulltask": drained(fast, **ours), "celery": drained(slow)}} for fast, slow in rates]


def ran(path: Path, indexes: list[int]) -> None:
    """Count as the worker process of that file would."""
    counter = Counter(path, jobs=5, started_ns=1)
    for index in indexes:
        counter.add(index)


def test_the_counts_of_all_processes_are_added_up(tmp_path: Path) -> None:
    ran(tmp_path / "one", [0, 2, 4])
    ran(tmp_path / "two", [1, 3])
    found = tally(tmp_path, 5)
    assert (found.done, found.lost, found.duplicated, found.processes) == (5, 0, 0, (3, 2))
    assert progress(tmp_path) == 5


def test_a_job_that_ran_twice_does_not_hide_one_that_was_lost(tmp_path: Path) -> None:
    ran(tmp_path / "one", [0, 1, 2])
    ran(tmp_path / "two", [2, 3])
    found = tally(tmp_path, 5)
    assert (found.done, found.lost, found.duplicated) == (5, 1, 1)


def test_time_runs_from_the_first_start_to_the_last_end(tmp_path: Path) -> None:
    early, late = Counter(tmp_path / "one", 2, started_ns=100), Counter(tmp_path / "two", 2, started_ns=200)
    assert tally(tmp_path, 2) == Tally(0, 0, 0, 2, 0, ()), "a process that ran no job has no times"
    late.add(0)
    before_ns = time.monotonic_ns()
    early.add(1)
    found = tally(tmp_path, 2)
    assert found.started_ns == 100
    assert found.ended_ns >= before_ns


def test_a_file_that_is_just_being_made_counts_nothing(tmp_path: Path) -> None:
    (tmp_path / "1").touch()
    assert progress(tmp_path) == 0


def test_ratios_are_taken_within_a_round() -> None:
    assert ratios(two_rounds(), "drain", "bulltask", "celery") == [9.0, 4.0]


def test_a_shorter_time_is_the_better_one() -> None:
    rounds = [{"latency": {"bulltask": {"p50_ms": 0.5}, "celery": {"p50_ms": 2.0}}}]
    assert ratios(rounds, "latency", "bulltask", "celery") == [4.0]


def test_the_last_line_gives_medians_and_the_median_ratio() -> None:
    assert closing_line(two_rounds()) == "drain: bulltask 8,500 jobs/s, celery 1,500 jobs/s, ratio 6.50"


def test_the_last_line_has_no_ratio_when_only_one_side_was_measured() -> None:
    assert closing_line([{"drain": {"bulltask": drained(9000.0)}}]) == "drain: bulltask 9,000 jobs/s"


def test_the_table_shows_median_and_range_of_every_peer() -> None:
    text = report(two_rounds())
    row = next(line for line in text.splitlines() if line.startswith("| bulltask"))
    assert "8,500 (8,000-9,000)" in row
    assert "bulltask : celery = 6.50 (4.00-9.00)" in text


def test_a_value_that_never_changed_has_no_range() -> None:
    assert spread([3.0, 3.0]) == "3"


@pytest.mark.parametrize("wrong", [{"lost": 1}, {"duplicated": 1}, {"stored": 99}])
def test_a_lost_or_doubled_job_is_told(wrong: dict[str, int]) -> None:
    assert problems(two_rounds()) == []
    assert len(problems(two_rounds(**wrong))) == 2


def test_a_framework_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(cast("dict[str, Peer]", PEERS), "other", replace(PEERS["celery"], package="no_such_package"))
    assert main(["--only", "other"]) == 2
    said = capsys.readouterr().err
    assert "no_such_package" in said
    assert "make bench" in said


def test_a_busy_machine_is_told() -> None:
    assert noise(two_rounds()) == ""
    assert "up to 40%" in noise(two_rounds(foreign=0.4))


def test_the_last_line_has_the_client_of_node_too() -> None:
    rounds = two_rounds()
    for measures, rate in zip(rounds, (4500.0, 2000.0), strict=True):
        measures["drain"]["bullmq"] = drained(rate)
    assert closing_line(rounds).endswith("celery 1,500 jobs/s, ratio 6.50, bullmq 3,250 jobs/s, ratio 3.00")


def test_without_node_its_client_is_left_out_and_said_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert those_there(["bulltask", "bullmq"]) == ["bulltask"]
    assert "without bullmq: it needs Node.js" in capsys.readouterr().err
    assert main(["--only", "bullmq"]) == 2


class Drains(Bench):
    """A bench whose drains are only noted; the peers' workers say how fast they were."""

    def drain(self, peer: Peer) -> dict[str, Any]:
        processes, at_once = map(int, peer.worker(2)[-2:])
        return drained(float(processes * 100 + at_once))


def test_the_settings_of_the_node_client_are_tried_and_the_fastest_is_taken(tmp_path: Path) -> None:
    peer, found = Drains(tmp_path, 10, 2).fastest(PEERS["bullmq"])
    assert peer.worker(2)[-2:] == ["2", "200"]
    assert "2 processes, concurrency 200" in peer.note
    assert "1 x 50 150, " in found
    assert Drains(tmp_path, 10, 2).fastest(PEERS["bulltask"]) == (PEERS["bulltask"], "")


@pytest.mark.bench
@pytest.mark.timeout(300)  # the client on Node is tried in six settings, each with processes of its own
@pytest.mark.parametrize("peer", ["bulltask", pytest.param("bullmq", marks=NEEDS_NODE)])
def test_a_small_run_counts_every_job_and_reports(tmp_path: Path, peer: str) -> None:
    found = tmp_path / "found.json"
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), "--only", peer, "--jobs", "300", "--rounds", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    run = subprocess.run([*command, "--json", str(found)], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    drain = json.loads(found.read_text())["rounds"][0]["drain"][peer]
    assert (drain["done"], drain["lost"], drain["duplicated"], drain["stored"]) == (300, 0, 0, 300)
    assert run.stdout.splitlines()[-1].startswith(f"drain: {peer} ")
    assert "From send to result in hand" in run.stdout
