"""The table of settings in ``reference/configuration.md``, made from ``bulltask.config.settings.SETTINGS``.

Run as a program, this file writes the table anew; ``tests/unit/test_docs.py`` fails while it is out of date.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

import click

from bulltask.cli import worker
from bulltask.config.settings import SETTINGS, Setting
from bulltask.errors import ConfigError

PAGE = Path(__file__).parent / "reference/configuration.md"
BEGIN, END = "<!-- settings: written by docs/settings_table.py -->\n", "<!-- /settings -->"

# What the error of a wrong value says after "must be" is what the setting takes.
_SAYS = re.compile(r" must (?:be |start with )(.*?)(?:, not )", re.DOTALL)


def table() -> str:
    """Return the table as Markdown."""
    head = ["| setting | default | value | flag | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(_line(row) for row in SETTINGS.values())]) + "\n"


def written(page: str) -> str:
    """Return the text of the page with the table as it should be."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


def _line(row: Setting) -> str:
    cells = [f"`{row.name}`", _default(row), _takes(row), _flag(row), row.doc]
    return f"| {' | '.join(cell.replace('|', '&#124;') for cell in cells)} |"


def _default(row: Setting) -> str:
    value = row.default
    if value is None or value in ((), ""):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _takes(row: Setting) -> str:
    text = _refusal(row, object()).removesuffix(" without control characters")
    if row.field.endswith("_ms"):
        least = re.search(r"at least (.*?) s,", _refusal(row, timedelta(0), whole=True))
        text = f"seconds, at least {least[1]}" if least else "seconds"
    others = [str(value).lower() for value in (None, "auto") if _accepts(row, value)]
    return ", or ".join([text, *others])


def _refusal(row: Setting, value: object, *, whole: bool = False) -> str:
    try:
        row.parse(value, row.name)
    except ConfigError as exc:
        said = _SAYS.search(str(exc))
        return str(exc) if whole or said is None else said[1]
    return ""


def _accepts(row: Setting, value: object) -> bool:
    """True where ``value`` is not just another text: none means that there is none, and auto is worked out."""
    try:
        return row.parse(value, row.name) is None if value is None else isinstance(row.parse(value, row.name), int)
    except ConfigError:
        return False


def _flag(row: Setting) -> str:
    names = [flag for flag, setting in worker.SETTINGS.items() if setting == row.name]
    names += {"broker_url": ["broker"], "include": ["include"]}.get(row.name, [])
    options = (option for option in worker.command.params if isinstance(option, click.Option))
    return " ".join(f"`{opt}`" for option in options if option.name in names for opt in option.opts)


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
