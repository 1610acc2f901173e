"""Record which tests reach which lines, and how long each test takes."""

from __future__ import annotations

import json
import sqlite3
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import click
from coverage.numbits import numbits_to_nums, numbits_union

from tests.mutants.trace import RESULTS, TEST
from tests.mutants.tree import Tree

__all__ = ["Reach", "record"]

CONFIG = f"""
[run]
source =
{{sources}}
data_file = {{data}}/lines
parallel = true
context = ${{{{{TEST}-}}}}
patch =
    execv
    fork
    _exit
"""
LIMIT_S = 2 * 3600.0
# These tests raise exceptions at random times, even inside coverage, which then never releases its lock.
EXCLUDED_TESTS = (
    "tests/redis/test_client.py::test_interrupts_at_random_moments_never_mix_up_replies",
    "tests/unit/test_thread_tasks.py::test_interrupts_at_random_moments_never_affect_the_next_call_in_the_thread",
)


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


def record(tree: Tree, data: Path, folders: Sequence[str], tests: Sequence[str], processes: int) -> None:
    """Run the tests in ``tree`` and write to ``data/reach.json`` which lines of ``folders`` each of them reaches."""
    (data / "lines").mkdir(parents=True)
    config, results = data / "coveragerc", data / "results"
    sources = "\n".join(f"    {tree.directory / folder}" for folder in folders)
    config.write_text(CONFIG.format(sources=sources, data=data / "lines"))
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
    _, output = tree.pytest([*options, *tests, *(f"--deselect={test}" for test in EXCLUDED_TESTS)], LIMIT_S, environ)
    click.echo(output[-2000:])
    seconds: dict[str, float] = defaultdict(float)
    failed = set()
    for line in results.read_text().splitlines():
        test, _, outcome, duration = json.loads(line)
        seconds[test] += duration
        if outcome != "passed":
            failed.add(test)
    lines: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for (file, test), bits in _reached(data / "lines").items():
        for number in numbits_to_nums(bits):
            lines[str(Path(file).relative_to(tree.directory))][number].add(test)
    document = {
        "seconds": {test: round(spent, 3) for test, spent in seconds.items() if test not in failed},
        "lines": {file: {line: sorted(tests) for line, tests in found.items()} for file, found in lines.items()},
    }
    (data / "reach.json").write_text(json.dumps(document))


def _reached(directory: Path) -> dict[tuple[str, str], bytes]:
    """Return the lines by file and test, as coverage's bits.

    Thousands of processes have written a data file each: ``CoverageData.contexts_by_lineno`` would take ten minutes.
    """
    reached: dict[tuple[str, str], bytes] = {}
    for data_file in directory.iterdir():
        # A process that was killed while it wrote leaves an unreadable file.
        with closing(sqlite3.connect(data_file)) as connection, suppress(sqlite3.DatabaseError):
            for file, test, bits in connection.execute(_LINES):
                reached[file, test] = numbits_union(reached.get((file, test), b""), bits)
    return reached


# https://coverage.readthedocs.io/en/latest/dbschema.html
_LINES = """
SELECT file.path, context.context, line_bits.numbits FROM line_bits
JOIN file ON file.id = line_bits.file_id JOIN context ON context.id = line_bits.context_id
WHERE context.context != ''
"""
