"""Compare bulltask with other frameworks and with the baseline, on one machine and in one run.

Every measurement uses a new embedded server without persistence. Every framework is measured in each round, and ratios
are computed within a round, so that they are valid on a busy machine. The exit code is 1 if a job was lost or ran
twice.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.conditions import Conditions, conditions
from benchmarks.frameworks import FRAMEWORKS, NODE_CLIENT, Framework, missing
from benchmarks.measures import MEASURES, Bench, Result
from benchmarks.processes import Failed
from benchmarks.report import closing_line, noise, problems, report, summary
from bulltask.embedded import find_binary

DEFAULT_PEERS = [
    "bulltask",
    "bulltask-async",
    "celery",
    "dramatiq",
    "huey",
    "taskiq",
    "bullmq",
    "bullmq-1",
    "bullmq-same-options",
    "baseline",
    "baseline-32",
]


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.only is None:
        options.only = installed_frameworks(DEFAULT_PEERS)
    if absent := missing(options.only):
        print(f"not installed: {', '.join(absent)}. `make bench` creates an environment that has them", file=sys.stderr)
        return 2
    facts = _facts(options)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n", flush=True)
    try:
        rounds, observed = _measure(options)
    except Failed as exc:
        print(f"failed: {exc}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "conditions": observed, "rounds": rounds}, indent=1))
    print(report(rounds))
    print(f"**Summary** (medians)\n\n{summary(rounds)}\n")
    errors = problems(rounds)
    for error in errors:
        print(f"error: {error}")
    if warning := noise(rounds):
        print(warning)
    print(closing_line(rounds))
    return 1 if errors else 0


def _measure(options: argparse.Namespace) -> tuple[list[dict[str, dict[str, Result]]], list[Conditions]]:
    rounds, observed = [], [conditions()]
    # The servers have no persistence, so it does not matter whether this directory is on disk or in memory.
    with tempfile.TemporaryDirectory(prefix="bulltask-bench-") as directory:
        bench = Bench(Path(directory), options.jobs, options.children)
        frameworks = _find_fastest(bench, options)
        for number in range(options.rounds):
            shift = number % len(options.only)
            order = [*options.only[shift:], *options.only[:shift]]
            results: dict[str, dict[str, Result]] = {}
            for measure in options.measure:
                measured = {name: _measure_framework(bench, measure, frameworks[name], number) for name in order}
                results[measure] = {name: measured[name] for name in options.only}
            rounds.append(results)
            observed.append(conditions())
    return rounds, observed


def _find_fastest(bench: Bench, options: argparse.Namespace) -> dict[str, Framework]:
    """Return the frameworks with their fastest settings; print the rates of those with several settings."""
    frameworks = {}
    for name in options.only:
        frameworks[name], summary = bench.fastest(FRAMEWORKS[name])
        if summary:
            print(f"{name}: {frameworks[name].note}, {summary}", end="\n\n", flush=True)
    return frameworks


def _measure_framework(bench: Bench, measure: str, framework: Framework, number: int) -> Result:
    result = MEASURES[measure](bench, framework)
    values = ", ".join(f"{key} {value:,.2f}" for key, value in result.items() if isinstance(value, float))
    if result and sys.stderr.isatty():
        print(f"round {number + 1}, {measure}, {framework.name}: {values}", file=sys.stderr, flush=True)
    return result


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--jobs", type=_positive, default=20_000, help="number of jobs in the backlog and in the bulk-send test (20000)"
    )
    parser.add_argument("--rounds", type=_positive, default=3, help="number of rounds (3)")
    parser.add_argument("--children", type=_positive, default=2, help="number of children of each worker (2)")
    parser.add_argument(
        "--only",
        type=_names(FRAMEWORKS),
        help=f"frameworks to measure, from {', '.join(FRAMEWORKS)}; default: {', '.join(DEFAULT_PEERS)}",
    )
    parser.add_argument(
        "--measure",
        type=_names(MEASURES),
        default=",".join(MEASURES),
        help=f"measurements, from {', '.join(MEASURES)}",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers to this file")
    return parser.parse_args(argv)


def installed_frameworks(names: list[str]) -> list[str]:
    """Return ``names`` without BullMQ if Node.js is not installed, and print a message."""
    if absent := [name for name in names if not FRAMEWORKS[name].package and missing([name])]:
        print(f"without {', '.join(absent)}: it needs Node.js 18 or newer with npm", file=sys.stderr)
    return [name for name in names if name not in absent]


def _positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError("must be 1 or more")
    return number


def _names(known: Any) -> Any:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",")]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; choose from {', '.join(known)}")
        return names

    return parse


def _facts(options: argparse.Namespace) -> dict[str, str]:
    packages = [
        name for name in ("celery", "kombu", "dramatiq", "huey", "taskiq", "redis", "hiredis") if _version(name)
    ]
    return {
        "commit": _commit(),
        "machine": f"{os.cpu_count()} CPUs ({_processor()}), Python {platform.python_version()}",
        "server": f"{find_binary()} on 127.0.0.1, no persistence, a new one for each measurement",
        "packages": ", ".join([*(f"{name} {_version(name)}" for name in packages), *_node(options.only)]),
        "jobs": f"{options.jobs:,} no-ops, {options.children} children, {options.rounds} rounds",
        **{name: FRAMEWORKS[name].note for name in options.only},
    }


def _node(names: list[str]) -> list[str]:
    """Return the versions of Node.js and BullMQ, if one of ``names`` uses them."""
    if all(FRAMEWORKS[name].package for name in names):
        return []
    program = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    client = json.loads((NODE_CLIENT / "package.json").read_text())
    return [f"bullmq {client['version']} on Node.js {program.stdout.strip()}"]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _commit() -> str:
    """Return the commit, with ``-dirty`` if files have changed since."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are stopped, too
    sys.exit(main())
