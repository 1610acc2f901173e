"""bulltask against Celery and BullMQ on Node.js: no-op jobs, on one machine and in one run.

Every measurement has a fresh server (bulltask's embedded one, persistence off for all). In every round each peer has
its turn, so a ratio is taken within a round and holds on a noisy machine. Exits 1 if a job was lost or ran twice.
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

from benchmarks.measures import MEASURES, Bench, Result
from benchmarks.peers import NODE_CLIENT, PEERS, Peer, missing
from benchmarks.processes import Failed
from benchmarks.report import closing_line, noise, problems, report
from bulltask.embedded import find_binary

DEFAULT_PEERS = ["bulltask", "celery", "celery-ignore-result", "bullmq"]


def main(argv: Sequence[str] | None = None) -> int:
    options = _options(argv)
    if options.only is None:
        options.only = those_there(DEFAULT_PEERS)
    if absent := missing(options.only):
        print(
            f"not installed here: {', '.join(absent)}. `make bench` makes an environment that has it", file=sys.stderr
        )
        return 2
    facts = _facts(options)
    print("\n".join(f"{name}: {value}" for name, value in facts.items()), end="\n\n", flush=True)
    try:
        rounds = _measure(options)
    except Failed as exc:
        print(f"failed: {exc}", file=sys.stderr)
        return 1
    if options.json is not None:
        options.json.write_text(json.dumps({"facts": facts, "rounds": rounds}, indent=1))
    print(report(rounds))
    found = problems(rounds)
    for problem in found:
        print(f"wrong: {problem}")
    if warning := noise(rounds):
        print(warning)
    print(closing_line(rounds))
    return 1 if found else 0


def _measure(options: argparse.Namespace) -> list[dict[str, dict[str, Result]]]:
    rounds = []
    # The directory of a run lies on disk or in memory as the system's temporary files do; no server writes to it.
    with tempfile.TemporaryDirectory(prefix="bulltask-bench-") as directory:
        bench = Bench(Path(directory), options.jobs, options.children)
        peers = _tuned(bench, options)
        for number in range(options.rounds):
            shift = number % len(options.only)
            turn = [*options.only[shift:], *options.only[:shift]]
            results: dict[str, dict[str, Result]] = {}
            for measure in options.measure:
                taken = {name: _take(bench, measure, peers[name], number) for name in turn}
                results[measure] = {name: taken[name] for name in options.only}
            rounds.append(results)
    return rounds


def _tuned(bench: Bench, options: argparse.Namespace) -> dict[str, Peer]:
    """The peers in the settings in which they are measured; what was found for those that have several is printed."""
    peers = {}
    for name in options.only:
        peers[name], found = bench.fastest(PEERS[name])
        if found:
            print(f"{name}: {peers[name].note}, {found}", end="\n\n", flush=True)
    return peers


def _take(bench: Bench, measure: str, peer: Peer, number: int) -> Result:
    result = MEASURES[measure](bench, peer)
    shown = ", ".join(f"{key} {value:,.2f}" for key, value in result.items() if isinstance(value, float))
    if result and sys.stderr.isatty():
        print(f"round {number + 1}, {measure}, {peer.name}: {shown}", file=sys.stderr, flush=True)
    return result


def _options(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=_positive, default=20_000, help="jobs of a drain (20000)")
    parser.add_argument("--rounds", type=_positive, default=3, help="how often everything is measured (3)")
    parser.add_argument("--children", type=_positive, default=2, help="children of each worker (2)")
    parser.add_argument("--only", type=_names(PEERS), help=f"peers, of {', '.join(PEERS)}; all but dramatiq")
    parser.add_argument(
        "--measure", type=_names(MEASURES), default=",".join(MEASURES), help=f"of {', '.join(MEASURES)}"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every single number here")
    return parser.parse_args(argv)


def those_there(names: list[str]) -> list[str]:
    """``names`` without the client of Node.js where that is not installed, which is said."""
    if absent := [name for name in names if not PEERS[name].package and missing([name])]:
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
            raise argparse.ArgumentTypeError(f"unknown: {', '.join(unknown)}; known are {', '.join(known)}")
        return names

    return parse


def _facts(options: argparse.Namespace) -> dict[str, str]:
    packages = [name for name in ("celery", "kombu", "dramatiq", "redis", "hiredis") if _version(name)]
    return {
        "machine": f"{os.cpu_count()} CPUs ({_processor()}), Python {platform.python_version()}",
        "server": f"{find_binary()} on 127.0.0.1, no persistence, a fresh one for each measurement",
        "packages": ", ".join([*(f"{name} {_version(name)}" for name in packages), *_node(options.only)]),
        "jobs": f"{options.jobs:,} no-ops, {options.children} children, {options.rounds} rounds",
        **{name: PEERS[name].note for name in options.only},
    }


def _node(names: list[str]) -> list[str]:
    """The versions of Node.js and its client, where one of ``names`` uses them."""
    if all(PEERS[name].package for name in names):
        return []
    program = subprocess.run(["node", "--version"], capture_output=True, text=True, check=True)
    client = json.loads((NODE_CLIENT / "package.json").read_text())
    return [f"bullmq {client['version']} on Node.js {program.stdout.strip()}"]


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that workers are stopped then, too
    sys.exit(main())
