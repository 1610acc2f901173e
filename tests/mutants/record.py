"""Record which tests reach which lines, and how long each test takes."""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import click
import coverage
import coverage.exceptions

from tests.mutants.trace import RESULTS, TEST
from tests.mutants.tree import Tree

__all__ = ["Reach", "record"]

CONFIG = f"""
[run]
source = {{tree}}/bulltask
data_file = {{data}}/lines
parallel = true
context = ${{{{{TEST}-}}}}
patch =
    fork
    _exit
"""
LIMIT_S = 2 * 3600.0
# This test raises exceptions at random times, even inside coverage, which then never releases its lock.
EXCLUDED_TEST = "tests/redis/test_client.py::test_interrupts_at_random_moments_never_mix_up_replies"


@dataclass(frozen=True, slots=True)
class Reach:
    """The recording: durations of tests and the lines that they reach.

    Attributes:
        seconds: The duration of each test that passed.
        lines: The tests that reach a line, by file and line.
    """

    seconds: dict[str, float]
    lines: dict[str, dict[int, set[str]]]

    @classmethod
    def read(cls, file: Path) -> Self:
        """Read the file that :func:`record` has written."""
        document = json.loads(file.read_text())
        lines = {
            name: {int(line): set(tests) for line, tests in found.items()} for name, found in document["lines"].items()
        }
        return cls(document["seconds"], lines)

    def tests(self, file: str, first: int, last: int) -> set[str]:
        """Return the tests that reach any of these lines."""
        lines = self.lines.get(file, {})
        return set().union(*(lines.get(line, ()) for line in range(first, last + 1))) & self.seconds.keys()


def record(tree: Tree, data: Path, tests: list[str], processes: int) -> None:
    """Run the tests in ``tree`` and write ``reach.json`` to ``data``."""
    (data / "lines").mkdir(parents=True)
    config, results = data / "coveragerc", data / "results"
    config.write_text(CONFIG.format(tree=tree.directory, data=data / "lines"))
    environ = {"COVERAGE_PROCESS_START": str(config), RESULTS: str(results)}
    options = [
        "-q",
        "-n",
        str(processes),
        "--dist",
        "loadfile",
        "-p",
        "tests.mutants.trace",
        "-m",
        "not (spark or bench)",
    ]
    _, output = tree.pytest([*options, *tests, "--deselect", EXCLUDED_TEST], LIMIT_S, environ)
    click.echo(output[-2000:])
    seconds: dict[str, float] = defaultdict(float)
    failed = set()
    for line in results.read_text().splitlines():
        test, _, outcome, duration = json.loads(line)
        seconds[test] += duration
        if outcome != "passed":
            failed.add(test)
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for file in (data / "lines").iterdir():
        _read(file, tree.directory, lines)
    document = {
        "seconds": {test: round(spent, 3) for test, spent in seconds.items() if test not in failed},
        "lines": {file: {line: sorted(tests) for line, tests in found.items()} for file, found in lines.items()},
    }
    (data / "reach.json").write_text(json.dumps(document))


def _read(file: Path, root: Path, lines: dict[str, dict[int, set[str]]]) -> None:
    measured = coverage.CoverageData(str(file))
    try:
        measured.read()
    except coverage.exceptions.DataError:  # its process was killed while it wrote
        return
    for name in measured.measured_files():
        found = lines[str(Path(name).relative_to(root))]
        for line, contexts in measured.contexts_by_lineno(name).items():
            found[line] |= {context for context in contexts if context}
