"""Compare the speed of this checkout with that of another commit, in alternating runs on one machine.

A change of a few percent is visible only in the ratio of two runs that follow each other. Each round measures both
versions, in alternating order; the result is the median of the rounds' ratios. The exit code is 1 if a median is below
the accepted one.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
FRAMEWORKS = ("bulltask", "bulltask-async")
FIGURES = {"throughput": "rate", "single": "rate", "bulk": "rate", "latency": "result_p50_ms", "sleep": "rate"}
"""The figure that is compared for each measurement. A smaller latency is better."""


def main() -> int:
    options = _options()
    with _checkout(options.base) as base, tempfile.TemporaryDirectory(prefix="bulltask-compare-") as directory:
        file = Path(directory) / "results.json"
        ratios: dict[tuple[str, str], list[float]] = {}
        for number in range(options.rounds):
            trees = [ROOT, base] if number % 2 else [base, ROOT]
            measured = {tree: _measure(tree, file, options) for tree in trees}
            for measure in options.measure:
                figure = FIGURES[measure]
                for name in options.only:
                    before, after = (measured[tree][measure][name].get(figure) for tree in (base, ROOT))
                    if before and after:
                        ratio = before / after if measure == "latency" else after / before
                        ratios.setdefault((measure, name), []).append(ratio)
            print(f"round {number + 1}: {_summary(ratios, -1)}", flush=True)
    medians = {key: statistics.median(values) for key, values in ratios.items()}
    for (measure, name), values in ratios.items():
        print(f"{measure}, {name}: {medians[measure, name]:.2f} ({min(values):.2f}-{max(values):.2f})")
    return int(min(medians.values()) < options.accept)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--rounds", type=int, default=5, help="number of rounds (5)")
    parser.add_argument("--jobs", type=int, default=20_000, help="number of jobs in a backlog (20000)")
    parser.add_argument("--measure", type=_names, default=tuple(FIGURES), help=f"of {','.join(FIGURES)} (all)")
    parser.add_argument("--only", type=_names, default=FRAMEWORKS, help=f"of {','.join(FRAMEWORKS)} (both)")
    parser.add_argument("--accept", type=float, default=0.98, help="smallest accepted median (0.98)")
    return parser.parse_args()


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


@contextmanager
def _checkout(commit: str) -> Iterator[Path]:
    """Check the commit out into a temporary directory, with the scripts that this checkout's build has unpacked."""
    with tempfile.TemporaryDirectory(prefix="bulltask-base-") as directory:
        tree = Path(directory) / "base"
        subprocess.run(["git", "worktree", "add", "-q", "--detach", tree, commit], cwd=ROOT, check=True)
        try:
            shutil.copytree(ROOT / "bulltask/lua/official", tree / "bulltask/lua/official", dirs_exist_ok=True)
            yield tree
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", tree], cwd=ROOT, check=True)


def _measure(tree: Path, file: Path, options: argparse.Namespace) -> dict[str, dict[str, dict[str, Any]]]:
    arguments = ["--rounds", "1", "--jobs", str(options.jobs), "--only", ",".join(options.only), "--json", str(file)]
    command = [sys.executable, "-m", "benchmarks.run", *arguments, "--measure", ",".join(options.measure)]
    done = subprocess.run(command, cwd=tree, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{tree}: the benchmark failed:\n{done.stdout}\n{done.stderr}")
    measured: dict[str, dict[str, dict[str, Any]]] = json.loads(file.read_text())["rounds"][0]
    return measured


def _summary(ratios: dict[tuple[str, str], list[float]], index: int) -> str:
    return ", ".join(f"{measure} {name} {values[index]:.2f}" for (measure, name), values in ratios.items())


if __name__ == "__main__":
    sys.exit(main())
