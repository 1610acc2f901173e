"""The output of the demo: lines while it runs, a table at the end."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from feed import Entry
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

LOG_FIELDS = {
    "error": "{!r}",
    "category": "category={}",
    "delay": "delay={:.2g}",
    "reason": "reason={}",
    "jobs": "jobs={}",
    "crashes": "crashes={}",
    "waited": "waited={}",
}
COLORS = {"event": "cyan", "worker": "yellow", "demo": "bold red"}


@dataclass(frozen=True)
class Row:
    """One row of the table."""

    kind: str
    jobs: int
    outcome: str
    measured: str


class Screen:
    """The terminal, or plain text of 80 columns."""

    def __init__(self) -> None:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr] # an ASCII terminal gets '?', not an error
        self._console = Console(highlight=False)
        self._rows: list[Row] = []
        self._steps = 0

    def opening(self, server: str) -> None:
        """Print the processes."""
        self._console.print("\n[bold]bulltask demo[/]: a server, a worker with two children, and this process\n")
        self._console.print(f"   server  {server}", markup=False)

    def step(self, title: str, *code: str) -> None:
        """Print the title of a step and its code."""
        self._steps += 1
        self._console.print(f"\n[bold]{self._steps}. {escape(title)}[/]")
        for line in code:
            self.code(line)

    def code(self, line: str) -> None:
        """Print a line of code that is running."""
        self._console.print(Text(f"   >>> {line}", "green"), soft_wrap=True)

    def line(self, text: str) -> None:
        """Print a line of the step's output."""
        self._console.print(f"   {text}", markup=False)

    def timed_line(self, seconds: float, source: str, text: str) -> None:
        """Print an event, ``seconds`` after the job was sent."""
        line = Text()
        line.append(f"{seconds:8.3f} s  ", "dim")
        line.append(f"{source:<6}  ", COLORS[source])
        line.append(text, "bold red" if source == "demo" else "default")
        self._console.print(line, no_wrap=True, overflow="ellipsis", soft_wrap=not self._console.is_terminal)

    def show_entry(self, entry: Entry, sent_at: float) -> None:
        """Print an event or a line of the worker's log."""
        # The event "failed" has the same content, and the order of the two varies.
        if entry.name == "Job failed":
            return
        text = _log_line(entry) if entry.source == "worker" else _event(entry)
        if text:
            self.timed_line(entry.at - sent_at, entry.source, text)

    def row(self, row: Row) -> None:
        """Add a row to the table."""
        self._rows.append(row)

    def table(self) -> None:
        """Print the table."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("Test", no_wrap=True)
        table.add_column("Jobs", justify="right")
        table.add_column("Outcome")
        table.add_column("Measured")
        for row in self._rows:
            table.add_row(row.kind, f"{row.jobs:,}", row.outcome, row.measured)
        self._console.print(table)

    def success(self, message: str) -> None:
        """Print the success message and the next steps."""
        self._console.print(f"[bold green]✓[/] {escape(message)}")
        self._console.print("\n[bold]Next steps[/]")
        for why, command in _next_steps():
            self._console.print(Text(f"  # {why}", "dim"))
            self._console.print(Text(f"  {command}", "green"), soft_wrap=True)

    def failure(self, problems: list[str], log: list[str]) -> None:
        """Print the problems and the end of the worker's log."""
        self._console.print("\n[bold red]✗ The demo failed[/]")
        for problem in problems[:20]:
            self._console.print(f"  - {problem}", markup=False, soft_wrap=True)
        if len(problems) > 20:
            self._console.print(f"  - and {len(problems) - 20:,} more")
        if log:
            self._console.print("  The last lines of the worker's log:")
            for line in log:
                self._console.print(f"    {line}", markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line without indentation."""
        self._console.print(text, markup=False)


def _event(entry: Entry) -> str:
    """Return the text for an event; empty for events that are not shown."""
    forms = {
        "added": "added, id {jobId}",
        "progress": "progress {data}",
        "waiting": "waiting, released after its child died" if entry.fields.get("prev") == "active" else "",
        "completed": "completed, result {returnvalue}",
        "failed": "failed: {failedReason}",
    }
    return forms.get(entry.name, entry.name).format_map(entry.fields)


def _log_line(entry: Entry) -> str:
    fields = (form.format(entry.fields[name]) for name, form in LOG_FIELDS.items() if name in entry.fields)
    return f"{entry.name}  {' '.join(fields)}"


def _next_steps() -> list[tuple[str, str]]:
    folder = Path(sys.executable).parent
    bulltask = "bulltask" if shutil.which("bulltask") == str(folder / "bulltask") else _shown(folder / "bulltask")
    examples = Path(__file__).parents[1]
    quickstart = examples / "quickstart"
    return [
        ("start a worker; Ctrl-C stops it", f"{bulltask} --workdir {_shown(quickstart)} worker -A tasks"),
        ("send jobs from a second terminal", f"{_shown(Path(sys.executable))} {_shown(quickstart / 'send.py')}"),
        ("use the same queues from Node.js", f"less {_shown(examples / 'node' / 'README.md')}"),
    ]


def _shown(path: Path) -> str:
    """Return the path relative to the current directory, if it is inside."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
