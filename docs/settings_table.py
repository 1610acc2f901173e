"""Generate the tables of settings in ``reference/configuration.md`` and ``reference/celery-settings.md``.

Run this file to update the tables; ``tests/unit/test_docs.py`` fails if they are out of date.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path

from bulltask.config.celery_settings import CELERY_SETTINGS
from bulltask.config.config import SETTINGS, Setting
from bulltask.errors import ConfigError

PAGE = Path(__file__).parent / "reference/configuration.md"
CELERY_PAGE = Path(__file__).parent / "reference/celery-settings.md"
CELERY_NAMES = Path(__file__).parent.parent / "tests/unit/celery_settings.txt"
BEGIN, END = "<!-- settings: written by docs/settings_table.py -->\n", "<!-- /settings -->"

# The error message for an invalid value contains the valid values after "must be".
_VALID_VALUES = re.compile(r" must (?:be |start with )(.*?)(?:, not )", re.DOTALL)


def table() -> str:
    """Return the table as Markdown."""
    head = ["| setting | default | value | flag | meaning |", "|---|---|---|---|---|"]
    return "\n".join([*head, *(_line(row) for row in SETTINGS.values())]) + "\n"


def celery_table() -> str:
    """Return the table of all of Celery's settings, one line per reason, as Markdown."""
    same = [f"`{name}`" for name in CELERY_NAMES.read_text().split() if name in SETTINGS]
    rows: dict[tuple[str, str], list[str]] = {("supported", "the same name and meaning"): same}
    for row in CELERY_SETTINGS.values():
        effect = "error" if row.rejected else "none" if row.is_redundant(object()) else "warning"
        reason = row.reason
        if row.replacement:
            effect, reason = "supported", f"same as `{row.replacement}`"
        rows.setdefault((effect, reason), []).append(f"`{row.name}`")
    lines = [f"| {', '.join(_together(names))} | {effect} | {reason} |" for (effect, reason), names in rows.items()]
    return "\n".join(["| Celery's setting | effect | why, and what to use |", "|---|---|---|", *lines]) + "\n"


def _together(names: list[str]) -> list[str]:
    """Return the names; those of a group of at least three that no other row has are one: ``cassandra_…``."""
    known = [*CELERY_NAMES.read_text().split(), *CELERY_SETTINGS]
    groups: dict[str, list[str]] = {}
    for name in names:
        groups.setdefault(name.strip("`").partition("_")[0], []).append(name)
    short: list[str] = []
    for prefix, members in groups.items():
        others = {name for name in known if name.partition("_")[0] == prefix and f"`{name}`" not in members}
        short += members if others or len(members) < _LARGE_GROUP else [f"`{prefix}_…`"]
    return short


_LARGE_GROUP = 3


def replace_table(page: str, text: str) -> str:
    """Return the text of a page with the updated table."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{text}\n{END}{after}"


def _line(row: Setting) -> str:
    cells = [f"`{row.name}`", _default(row), _valid_values(row), _flag(row), row.doc]
    escaped = [cell.replace("|", r"\|") for cell in cells]
    return f"| {' | '.join(escaped)} |"


def _default(row: Setting) -> str:
    value = row.default
    if value is None or value in ((), ""):
        return "none"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def _valid_values(row: Setting) -> str:
    text = _error_message(row, object()).removesuffix(" without control characters")
    if row.field.endswith("_ms"):
        minimum = re.search(r"at least (.*?) s,", _error_message(row, timedelta(0), whole=True))
        text = f"seconds, at least {minimum[1]}" if minimum and minimum[1] != "0.001" else "seconds"
    text = re.sub(r"^an integer (from|of) ", "", text)
    others = [str(value).lower() for value in (None, "auto") if value != row.default and _accepts(row, value)]
    return ", or ".join([text, *others])


def _error_message(row: Setting, value: object, *, whole: bool = False) -> str:
    try:
        row.parse(value, row.name)
    except ConfigError as exc:
        match = _VALID_VALUES.search(str(exc))
        return str(exc) if whole or match is None else match[1]
    return ""


def _accepts(row: Setting, value: object) -> bool:
    """True if ``value`` has a special meaning: none for no value, and auto for a computed number."""
    try:
        return row.parse(value, row.name) is None if value is None else isinstance(row.parse(value, row.name), int)
    except ConfigError:
        return False


def _flag(row: Setting) -> str:
    names = {"broker_url": "-b --broker", "include": "-I --include"}.get(row.name, row.flag.names if row.flag else "")
    return " ".join(f"`{name}`" for name in names.split())


if __name__ == "__main__":
    PAGE.write_text(replace_table(PAGE.read_text(), table()))
    CELERY_PAGE.write_text(replace_table(CELERY_PAGE.read_text(), celery_table()))
