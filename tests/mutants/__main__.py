"""Mutation testing: change one expression, run the tests that execute its line, and expect one of them to fail.

A mutant that no test detects has survived: either a test is missing, or the mutant is equivalent, because no caller can
observe the change. `equivalent.txt` lists equivalent mutants with the reason; they do not count.

The first run records which test reaches which line, in all processes; this takes half an hour. ``build/mutants`` stores
the recording and the results; ``--resume`` continues with both and runs survivors again.
"""

from __future__ import annotations

import ast
import difflib
import hashlib
import json
import queue
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import click

from tests.mutants.mutations import Mutant, find_mutants
from tests.mutants.record import Reach, record
from tests.mutants.tree import ROOT, Tree

FOLDERS = ("bulltask/worker", "bulltask/transport", "bulltask/jobs")
TESTS = ("tests/unit", "tests/redis", "tests/process", "tests/spark/unit", "tests/spark/redis")
EQUIVALENT = Path(__file__).with_name("equivalent.txt")
DATA = ROOT / "build" / "mutants"
RESULTS = DATA / "results.jsonl"
BUDGET_S = 120.0  # recorded duration of the tests of one mutant; without coverage, they take half of it
FAST_S = 0.02  # thousands of tests in unit/ take less time
LIMIT_S, LIMIT_FACTOR = 30.0, 3.0  # timeout of a mutant: LIMIT_S plus LIMIT_FACTOR times the recorded duration


def sample(paths: list[str], seed: int, count: int) -> list[Mutant]:
    """Choose ``count`` mutants of these files and folders. The same seed selects the same mutants in unchanged code."""
    files = [file for path in paths for file in (sorted((ROOT / path).rglob("*.py")) or [ROOT / path])]
    found = [mutant for file in files for mutant in find_mutants(str(file.relative_to(ROOT)), file.read_text())]
    found.sort(key=lambda mutant: hashlib.sha256(f"{seed}:{mutant.key}".encode()).digest())
    return found[:count]


def choose(reach: Reach, mutant: Mutant) -> list[str]:
    """Choose tests that reach the changed lines: the fast ones, then some of each test file; the fastest run first."""
    first, last = _statement(mutant)
    found = reach.tests(mutant.file, first, last)
    if not mutant.within or not found:  # runs at import
        found = reach.tests(mutant.file, 1, 10**6)
    # Tests that reach lines of the function which few others reach are the likeliest to notice the change.
    lines = reach.lines.get(mutant.file, {})
    rarity = dict.fromkeys(found, 0.0)
    for line in _function(mutant):
        for test in lines.get(line, set()) & found:
            rarity[test] += 1 / len(lines[line])
    by_value = sorted(found, key=lambda test: -rarity[test] / (1 + reach.seconds[test]))
    rank = Counter[str]()
    ranked: list[tuple[int, int, str]] = []
    for test in by_value:
        if reach.seconds[test] <= FAST_S:
            ranked.append((-1, len(ranked), test))
            continue
        name = test.partition("::")[0]
        ranked.append((rank[name] // 4, len(ranked), test))
        rank[name] += 1
    chosen: list[str] = []
    spent = 0.0
    for _, _, test in sorted(ranked):
        if not chosen or spent + reach.seconds[test] <= BUDGET_S:
            chosen.append(test)
            spent += reach.seconds[test]
    return sorted(chosen, key=reach.seconds.__getitem__)


def _statement(mutant: Mutant) -> tuple[int, int]:
    """Return the lines of the smallest statement around the change, without the body of a compound statement."""
    first, last = max(_spans(mutant, ast.stmt, ast.excepthandler), key=lambda span: (span[0], -span[1]))
    return first, max(first, min(last, mutant.last))


def _function(mutant: Mutant) -> range:
    """Return the lines of the innermost function around the change; none outside functions."""
    first, last = max(_spans(mutant, ast.FunctionDef, ast.AsyncFunctionDef), default=(0, -1))
    return range(first, last + 1)


def _spans(mutant: Mutant, *kinds: type[ast.AST]) -> list[tuple[int, int]]:
    """Return the first and last lines of these nodes around the change."""
    nodes = (node for node in ast.walk(ast.parse((ROOT / mutant.file).read_text())) if isinstance(node, kinds))
    spans: list[tuple[int, int]] = [(node.lineno, node.end_lineno) for node in nodes]  # type: ignore[attr-defined]
    return [span for span in spans if span[0] <= mutant.first and span[1] >= mutant.last]


def attempt(tree: Tree, mutant: Mutant, reach: Reach) -> dict[str, Any]:
    """Run the tests of one mutant; return its line of the results."""
    tests = choose(reach, mutant)
    line = {"key": mutant.key, "file": mutant.file, "line": mutant.first, "kind": mutant.kind, "within": mutant.within}
    line |= {"diff": diff(mutant), "tests": len(tests)}
    if not tests:
        return line | {"outcome": "unreached"}
    names = tree.directory / "names"
    names.write_text("\n".join(tests))
    began = time.monotonic()
    limit_s = LIMIT_S + LIMIT_FACTOR * sum(map(reach.seconds.__getitem__, tests))
    with tree.changed(mutant.file, mutant.source):
        code, output = tree.pytest(["-x", "-q", "--tb", "no", f"@{names}"], limit_s)
    failed = [text.split(" ")[1] for text in output.splitlines() if text.startswith(("FAILED ", "ERROR "))]
    if code > 0 and not failed and tree.pytest(["--collect-only", "-q", f"@{names}"], limit_s)[0]:
        raise click.ClickException(f"the tests do not run without the mutant either:\n{output[-1000:]}")
    outcome = {0: "survived", -1: "timeout"}.get(code, "killed")
    return line | {"outcome": outcome, "by": failed[:1], "seconds": round(time.monotonic() - began, 1)}


def diff(mutant: Mutant) -> str:
    """Return the change as a patch without context."""
    before, after = (ROOT / mutant.file).read_text().splitlines(), mutant.source.splitlines()
    lines = list(difflib.unified_diff(before, after, lineterm="", n=0))[2:]
    return "\n".join(lines)


def run_all(mutants: list[Mutant], reach: Reach, processes: int) -> Iterator[dict[str, Any]]:
    """Run all mutants; yield each result when it is available."""
    home = Path(tempfile.mkdtemp(prefix="mutants-"))
    trees: queue.SimpleQueue[Tree] = queue.SimpleQueue()
    for number in range(processes):
        trees.put(Tree(home / str(number)))

    def run_one(mutant: Mutant) -> dict[str, Any]:
        tree = trees.get()
        try:
            return attempt(tree, mutant, reach)
        finally:
            trees.put(tree)

    pool = ThreadPoolExecutor(processes)
    try:
        for future in as_completed([pool.submit(run_one, mutant) for mutant in mutants]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)
        shutil.rmtree(home, ignore_errors=True)


def report(results: list[dict[str, Any]], equivalent: dict[str, str]) -> None:
    """Print the survivors and the score."""
    counts = Counter(line["outcome"] for line in results)
    survivors = [line for line in results if line["outcome"] in {"survived", "unreached"}]
    named = [line for line in survivors if line["key"] in equivalent]
    for line in sorted(survivors, key=lambda line: (line["file"], line["line"])):
        reason = equivalent.get(line["key"])
        note = f"equivalent: {reason}" if reason else f"{line['outcome']}, {line['tests']} tests"
        click.echo(
            f"\n{line['key']} {line['file']}:{line['line']} {line['within']}: {line['kind']} ({note})\n{line['diff']}"
        )
    detected = counts["killed"] + counts["timeout"]
    click.echo(f"\n{len(results)} mutants: {dict(counts)}, {len(named)} of them equivalent")
    counted = len(results) - len(named)
    click.echo(f"score: {100.0 * detected / max(1, counted):.1f} % ({detected} of {counted})")


def read_equivalent() -> dict[str, str]:
    """Return the reasons of equivalent mutants by key."""
    lines = (line.partition(" ") for line in EQUIVALENT.read_text().splitlines() if not line.startswith("#"))
    return {key: reason for key, _, reason in lines if key}


@click.command(help=__doc__)
@click.option("--seed", default=1, help="Chooses the mutants.")
@click.option("--count", default=300, help="Number of mutants.")
@click.option("--only", multiple=True, metavar="PATH", help="A file or folder of worker, transport or jobs.")
@click.option("--resume", is_flag=True, help="Reuse the recording and the killed mutants of the last run.")
@click.option("--processes", default=2, help="Mutants that run at the same time.")
def main(seed: int, count: int, only: tuple[str, ...], resume: bool, processes: int) -> None:
    """Run mutation testing."""
    if not resume:
        shutil.rmtree(DATA, ignore_errors=True)
    mutants = sample(list(only or filter(lambda path: (ROOT / path).exists(), FOLDERS)), seed, count)
    if not (DATA / "reach.json").exists():
        click.echo("recording which tests reach which lines")
        record(Tree(DATA / "recorded"), DATA, FOLDERS, TESTS, 2 * processes)
    reach = Reach.read(DATA / "reach.json")
    lines = [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []
    results = {line["key"]: line for line in lines}
    pending = [mutant for mutant in mutants if results.get(mutant.key, {}).get("outcome") not in {"killed", "timeout"}]
    with RESULTS.open("a") as file:
        for number, line in enumerate(run_all(pending, reach, processes), 1):
            results[line["key"]] = line
            file.write(json.dumps(line) + "\n")
            file.flush()
            click.echo(f"{number} of {len(pending)} {line['file']}:{line['line']} {line['kind']}: {line['outcome']}")
    report([results[mutant.key] for mutant in mutants], read_equivalent())


if __name__ == "__main__":
    sys.exit(main())
