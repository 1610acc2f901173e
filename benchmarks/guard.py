"""Fail if bulltask has become much slower: compares ratios with those of the recorded run (``results.json``).

Rates depend on the machine and on what else runs on it; ratios of one run depend on them much less, but a busy machine
still changes them by a third. Therefore, this only detects that bulltask takes twice as long.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.frameworks import FRAMEWORKS
from benchmarks.measures import Bench
from benchmarks.report import BULLTASK, ratios

RECORDED = Path(__file__).parent / "results.json"
OTHERS = ("celery", "baseline-32")
JOBS, ROUNDS, CHILDREN = 3_000, 3, 2
TOLERATED = 0.5
"""The smallest accepted ratio, relative to the recorded one."""


def main() -> int:
    recorded = json.loads(RECORDED.read_text())["rounds"]
    with tempfile.TemporaryDirectory(prefix="bulltask-guard-") as directory:
        bench = Bench(Path(directory), JOBS, CHILDREN)
        rounds = [
            {"throughput": {name: bench.throughput(FRAMEWORKS[name]) for name in (BULLTASK, *OTHERS)}}
            for _ in range(ROUNDS)
        ]
    failures = compare(recorded, rounds)
    return len(failures) > 0


def compare(recorded: list[dict[str, Any]], rounds: list[dict[str, Any]]) -> list[str]:
    """Print the ratio of bulltask's throughput to each of the others'; return those for which it is too small."""
    failures = []
    for other in OTHERS:
        before, now = (statistics.median(ratios(each, "throughput", BULLTASK, other)) for each in (recorded, rounds))
        is_enough = now >= before * TOLERATED
        print(f"{BULLTASK} : {other} = {now:.2f}, recorded {before:.2f}{'' if is_enough else ': too slow'}")
        if not is_enough:
            failures.append(other)
    return failures


if __name__ == "__main__":
    sys.exit(main())
