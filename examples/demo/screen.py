"""What the demo shows: short lines while it runs, a table at the end."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path

from feed import Heard
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
    """One line of the table."""

    what: str
    jobs: int
    ended: str
    numbers: str


class Screen:
    """Writes to the terminal; plain text of 80 columns where there is none."""

    def __init__(self) -> None:
        sys.stdout.reconfigure(errors="replace")  # type: ignore[union-attr] # an ASCII terminal gets '?', not an error
        self._console = Console(highlight=False)
        self._rows: list[Row] = []
        self._scenes = 0

    def opening(self, server: str) -> None:
        """Say what runs."""
        self._console.print("\n[bold]bulltask demo[/]: a server, a worker with two children, and this process\n")
        self._console.print(f"   server  {server}", markup=False)

    def scene(self, title: str, *code: str) -> None:
        """Begin a scene; show the lines of code that make it."""
        self._scenes += 1
        self._console.print(f"\n[bold]{self._scenes}. {escape(title)}[/]")
        for line in code:
            self.code(line)

    def code(self, line: str) -> None:
        """Show a line of code that runs now."""
        self._console.print(Text(f"   >>> {line}", "green"), soft_wrap=True)

    def say(self, text: str) -> None:
        """Show what came of it."""
        self._console.print(f"   {text}", markup=False)

    def moment(self, seconds: float, source: str, text: str) -> None:
        """Show one moment of a job's life, ``seconds`` after it was sent."""
        line = Text()
        line.append(f"{seconds:8.3f} s  ", "dim")
        line.append(f"{source:<6}  ", COLORS[source])
        line.append(text, "bold red" if source == "demo" else "default")
        self._console.print(line, no_wrap=True, overflow="ellipsis", soft_wrap=not self._console.is_terminal)

    def heard(self, heard: Heard, sent_at: float) -> None:
        """Show an event or a line of the worker's log."""
        # "Job failed" is told by the event as well, and one of the two always comes first: another one each time.
        if heard.what == "Job failed":
            return
        text = _log_line(heard) if heard.source == "worker" else _event(heard)
        if text:
            self.moment(heard.at - sent_at, heard.source, text)

    def row(self, row: Row) -> None:
        """Keep a line for the table."""
        self._rows.append(row)

    def table(self) -> None:
        """Show the table."""
        table = Table(box=SIMPLE_HEAD, pad_edge=False)
        table.add_column("What was sent", no_wrap=True)
        table.add_column("Jobs", justify="right")
        table.add_column("How it ended")
        table.add_column("In numbers")
        for row in self._rows:
            table.add_row(row.what, f"{row.jobs:,}", row.ended, row.numbers)
        self._console.print(table)

    def verdict(self, good: str) -> None:
        """Say that all is well, and what to try next."""
        self._console.print(f"[bold green]✓[/] {escape(good)}")
        self._console.print("\n[bold]What to try next[/]")
        for why, command in _next_steps():
            self._console.print(Text(f"  # {why}", "dim"))
            self._console.print(Text(f"  {command}", "green"), soft_wrap=True)

    def failure(self, faults: list[str], log: list[str]) -> None:
        """Say what went wrong, with the end of the worker's log."""
        self._console.print("\n[bold red]✗ The demo failed[/]")
        for fault in faults[:20]:
            self._console.print(f"  - {fault}", markup=False, soft_wrap=True)
        if len(faults) > 20:
            self._console.print(f"  - and {len(faults) - 20:,} more of this kind")
        if log:
            self._console.print("  The last lines of the worker's log:")
            for line in log:
                self._console.print(f"    {line}", markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Show a line at the margin."""
        self._console.print(text, markup=False)


def _event(heard: Heard) -> str:
    """The event in words; empty for one that says nothing to a newcomer."""
    forms = {
        "added": "added, id {jobId}",
        "progress": "progress {data}",
        "waiting": "waiting, given back by the child that is gone" if heard.fields.get("prev") == "active" else "",
        "completed": "completed, result {returnvalue}",
        "failed": "failed: {failedReason}",
    }
    return forms.get(heard.what, heard.what).format_map(heard.fields)


def _log_line(heard: Heard) -> str:
    said = (form.format(heard.fields[name]) for name, form in LOG_FIELDS.items() if name in heard.fields)
    return f"{heard.what}  {' '.join(said)}"


def _next_steps() -> list[tuple[str, str]]:
    folder = Path(sys.executable).parent
    bulltask = "bulltask" if shutil.which("bulltask") == str(folder / "bulltask") else _shown(folder / "bulltask")
    examples = Path(__file__).parents[1]
    quickstart = examples / "quickstart"
    return [
        ("a worker of your own; Ctrl-C stops it", f"{bulltask} --workdir {_shown(quickstart)} worker -A tasks"),
        ("in a second terminal: send it jobs", f"{_shown(Path(sys.executable))} {_shown(quickstart / 'send.py')}"),
        ("the same queues from Node.js", f"less {_shown(examples / 'node' / 'README.md')}"),
    ]


def _shown(path: Path) -> str:
    """The path as one would type it here."""
    here = Path.cwd()
    return os.path.relpath(path, here) if path.is_relative_to(here) else str(path)
