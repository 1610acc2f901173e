"""The benchmark counts every job and reports its measurements."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest

from benchmarks.apps.counter import Counter, Counts, progress, read_counts
from benchmarks.conditions import conditions
from benchmarks.frameworks import FRAMEWORKS, Framework, missing
from benchmarks.guard import compare
from benchmarks.measures import Bench
from benchmarks.report import closing_line, noise, problems, ratios, report, spread, summary
from benchmarks.run import installed_frameworks, main

ROOT = Path(__file__).parent.parent.parent
NEEDS_NODE = pytest.mark.skipif(bool(missing(["bullmq"])), reason="needs Node.js and bullmq (tests/interop)")


def throughput_result(rate: float, **fields: Any) -> dict[str, Any]:
    counted = {"done": 100, "stored": 100, "lost": 0, "duplicated": 0}
    return {"rate": rate, "worker_us": 40.0, "redis_us": 30.0, "pss_mib": 50.0, "other_cpu": 0.01, **counted, **fields}


def two_rounds(**fields: Any) -> list[dict[str, dict[str, dict[str, Any]]]]:
    rates = [(9000.0, 1000.0), (8000.0, 2000.0)]
    return [
        {"throughput": {"bulltask": throughput_result(fast, **fields), "celery": throughput_result(slow)}}
        for fast, slow in rates
    ]


def count_jobs(path: Path, indexes: list[int]) -> None:
    """Count jobs as the worker process with this file would."""
    counter = Counter(path, jobs=5, started_ns=1)
    for index in indexes:
        counter.add(index)


def test_the_counts_of_all_processes_are_added_up(tmp_path: Path) -> None:
    count_jobs(tmp_path / "one", [0, 2, 4])
    count_jobs(tmp_path / "two", [1, 3])
    counts = read_counts(tmp_path, 5)
    assert (counts.done, counts.lost, counts.duplicated, counts.processes) == (5, 0, 0, (3, 2))
    assert progress(tmp_path) == 5


def test_a_duplicated_job_does_not_hide_a_lost_job(tmp_path: Path) -> None:
    count_jobs(tmp_path / "one", [0, 1, 2])
    count_jobs(tmp_path / "two", [2, 3])
    counts = read_counts(tmp_path, 5)
    assert (counts.done, counts.lost, counts.duplicated) == (5, 1, 1)


def test_the_measured_time_spans_the_first_start_to_the_last_end(tmp_path: Path) -> None:
    early, late = Counter(tmp_path / "one", 2, started_ns=100), Counter(tmp_path / "two", 2, started_ns=200)
    assert read_counts(tmp_path, 2) == Counts(0, 0, 0, 2, 0, ()), "a process without jobs has no times"
    late.add(0)
    before_ns = time.monotonic_ns()
    early.add(1)
    counts = read_counts(tmp_path, 2)
    assert counts.started_ns == 100
    assert counts.ended_ns >= before_ns


def test_an_empty_counter_file_counts_no_job(tmp_path: Path) -> None:
    (tmp_path / "1").touch()
    assert progress(tmp_path) == 0


def test_ratios_are_computed_within_a_round() -> None:
    assert ratios(two_rounds(), "throughput", "bulltask", "celery") == [9.0, 4.0]


def test_a_shorter_latency_gives_a_ratio_above_one() -> None:
    rounds = [{"latency": {"bulltask": {"result_p50_ms": 0.5}, "celery": {"result_p50_ms": 2.0}}}]
    assert ratios(rounds, "latency", "bulltask", "celery") == [4.0]


def test_the_last_line_shows_medians_and_the_median_ratio() -> None:
    assert closing_line(two_rounds()) == "throughput: bulltask 8,500 jobs/s, celery 1,500 jobs/s, ratio 6.50"


def test_the_last_line_has_no_ratio_if_only_one_framework_was_measured() -> None:
    assert (
        closing_line([{"throughput": {"bulltask": throughput_result(9000.0)}}]) == "throughput: bulltask 9,000 jobs/s"
    )


def test_the_table_shows_median_and_range_of_every_framework() -> None:
    text = report(two_rounds())
    row = next(line for line in text.splitlines() if line.startswith("| bulltask"))
    assert "8,500 (8,000-9,000)" in row
    assert "bulltask : celery = 6.50 (4.00-9.00)" in text


def test_the_summary_has_a_column_for_each_framework_and_a_dash_for_what_was_not_measured() -> None:
    rounds = two_rounds()
    for measures in rounds:
        measures["sleep"] = {"bulltask": {"of_ideal": 0.9}, "celery": {}}
    header, _, *rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in summary(rounds).splitlines()]
    assert header == ["", "bulltask", "celery"]
    assert ["backlog of no-op jobs, jobs/s", "8,500", "1,500"] in rows
    assert ["sleeping 50 ms, 200 at once, % of ideal", "90", "-"] in rows


def test_the_guard_fails_only_if_a_ratio_is_much_smaller_than_the_recorded_one(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def rounds(baseline: float) -> list[dict[str, Any]]:
        rates = {"bulltask": 9_000.0, "celery": 1_000.0, "baseline-32": baseline}
        return [{"throughput": {name: throughput_result(rate) for name, rate in rates.items()}}]

    assert compare(rounds(10_000.0), rounds(14_000.0)) == []
    assert compare(rounds(10_000.0), rounds(21_000.0)) == ["baseline-32"]
    assert "bulltask : baseline-32 = 0.43, recorded 0.90: too slow" in capsys.readouterr().out


def test_a_constant_value_has_no_range() -> None:
    assert spread([3.0, 3.0]) == "3"


@pytest.mark.parametrize("wrong", [{"lost": 1}, {"duplicated": 1}, {"stored": 99}])
def test_a_lost_or_duplicated_job_is_reported(wrong: dict[str, int]) -> None:
    assert problems(two_rounds()) == []
    assert len(problems(two_rounds(**wrong))) == 2


def test_a_missing_framework_is_reported_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(
        cast("dict[str, Framework]", FRAMEWORKS), "other", replace(FRAMEWORKS["celery"], package="no_such_package")
    )
    assert main(["--only", "other"]) == 2
    stderr = capsys.readouterr().err
    assert "no_such_package" in stderr
    assert "make bench" in stderr


def test_a_busy_machine_is_reported() -> None:
    assert noise(two_rounds()) == ""
    assert "up to 40%" in noise(two_rounds(other_cpu=0.4))


def test_the_last_line_includes_bullmq() -> None:
    rounds = two_rounds()
    for measures, rate in zip(rounds, (4500.0, 2000.0), strict=True):
        measures["throughput"]["bullmq"] = throughput_result(rate)
    assert closing_line(rounds).endswith("celery 1,500 jobs/s, ratio 6.50, bullmq 3,250 jobs/s, ratio 3.00")


def test_bullmq_is_skipped_with_a_message_if_node_is_missing(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", "")
    assert installed_frameworks(["bulltask", "bullmq"]) == ["bulltask"]
    assert "without bullmq: it needs Node.js" in capsys.readouterr().err
    assert main(["--only", "bullmq"]) == 2


class FakeBench(Bench):
    """A bench without real measurements: the rate is computed from the settings of the framework's worker."""

    def throughput(self, framework: Framework) -> dict[str, Any]:
        processes, concurrency = map(int, framework.worker(2)[-2:])
        return throughput_result(float(processes * 100 + concurrency))


def test_bullmq_is_measured_with_its_fastest_settings(tmp_path: Path) -> None:
    framework, summary = FakeBench(tmp_path, 10, 2).fastest(FRAMEWORKS["bullmq"])
    assert framework.worker(2)[-2:] == ["2", "200"]
    assert "2 processes, concurrency 200" in framework.note
    assert "1 x 50 150, " in summary
    assert FakeBench(tmp_path, 10, 2).fastest(FRAMEWORKS["bulltask"]) == (FRAMEWORKS["bulltask"], "")


def test_the_conditions_of_the_machine_are_recorded() -> None:
    observed = conditions()
    assert observed["loop_ms"] > 0
    assert observed["load"] >= 0
    assert observed["steal_s"] >= 0


@pytest.mark.bench
@pytest.mark.extended
@pytest.mark.parametrize("framework", ["baseline", "baseline-32"])
def test_the_baseline_runs_every_job_once(framework: str, tmp_path: Path) -> None:
    result = Bench(tmp_path, 300, 2).throughput(FRAMEWORKS[framework])
    assert (result["done"], result["lost"], result["duplicated"], result["stored"]) == (300, 0, 0, 300)
    assert result["pss_mib"] > 1


def check_results(path: Path, stdout: str, framework: str) -> None:
    """Check a run with 300 jobs."""
    result = json.loads(path.read_text())["rounds"][0]["throughput"][framework]
    assert (result["done"], result["lost"], result["duplicated"], result["stored"]) == (300, 0, 0, 300)
    assert stdout.splitlines()[-1].startswith(f"throughput: {framework} ")
    assert "Time from send to result" in stdout
    assert "Jobs that sleep for 50 ms" in stdout


@pytest.mark.bench
@pytest.mark.extended
def test_a_small_run_counts_every_job_and_reports(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    command = [sys.executable, str(ROOT / "benchmarks/run.py"), "--only", "bulltask", "--jobs", "300", "--rounds", "1"]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    run = subprocess.run([*command, "--json", str(results)], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    check_results(results, run.stdout, "bulltask")


@pytest.mark.bench
@pytest.mark.extended
@NEEDS_NODE
def test_a_small_run_with_two_configurations_of_bullmq_counts_every_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each of its six settings needs one to three Node.js processes; two settings cover all the code.
    monkeypatch.setitem(
        cast("dict[str, Framework]", FRAMEWORKS), "bullmq", replace(FRAMEWORKS["bullmq"], settings=((1, 50), (2, 10)))
    )
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    results = tmp_path / "results.json"
    arguments = "--only bullmq --jobs 300 --rounds 1 --measure throughput,latency,sleep --json".split()
    code = main([*arguments, str(results)])
    stdout, stderr = capsys.readouterr()
    assert code == 0, stdout + stderr
    assert "bullmq: " in stdout
    check_results(results, stdout, "bullmq")
