"""How values are written for people: short, with their unit, three digits at most."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import datetime
from decimal import Decimal
from enum import StrEnum
from typing import Any, Final

__all__ = ["ABSENT", "CONTROL", "Unit", "one_line", "shortened", "written"]

ABSENT: Final = "\N{EN DASH}"

CONTROL: Final = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff]")
"""What moves a cursor, hides or turns text: no terminal and no page is to be taken in by the name of a task."""


_LONGEST_NAME: Final = 120
_NAME_BEGIN, _NAME_END = 70, 49
"""Characters of a name that is too long to be shown whole."""


class Unit(StrEnum):
    """What a number counts, or that it is something else."""

    TEXT = "text"
    NAME = "name"
    TEXTS = "texts"
    COUNT = "count"
    NUMBER = "number"
    MS = "ms"
    SECONDS = "s"
    PART = "part"
    MONEY = "money"
    TIME = "time"
    FLAG = "flag"


def written(value: Any, unit: Unit) -> str:
    """Return a value as people read it; nothing is a dash.

    Args:
        value: a number, a text, a time or None.
        unit: what it is.
    """
    return ABSENT if value is None else _WRITERS[unit](value)


def one_line(text: str) -> str:
    """Return a text without what would break a line or move a cursor: that is shown as ``\\n`` or ``\\x1b``."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def shortened(name: str) -> str:
    """Return the name of a task or a queue as readers need it: of a long one the beginning and the end."""
    return name if len(name) <= _LONGEST_NAME else f"{name[:_NAME_BEGIN]}…{name[-_NAME_END:]}"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{digits}f}"
    if float(text):
        return text.rstrip("0").rstrip(".") if digits else text
    if abs(value) < 0.0001:  # which would be written with an exponent
        return "< 0.0001" if value > 0 else "> -0.0001"
    return f"{value:.1g}"


_LENGTHS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def _length(ms: float) -> str:
    for size, name in _LENGTHS:
        if abs(ms) >= size:
            return f"{_number(ms / size)} {name}"
    return f"{_number(round(ms, 1))} ms"


def _part(value: float) -> str:
    percent = value * 100
    # 99.98 % are not all, and one failure in a million is not none.
    if 99 < percent < 100:
        text = f"{percent:.2f}" if percent < 99.995 else f"{min(percent, 99.999):.3f}"
        return f"{text.rstrip('0').rstrip('.')} %"
    if 0 < abs(percent) < 0.01:
        return "< 0.01 %" if percent > 0 else "> -0.01 %"
    return f"{_number(percent)} %"


def _money(value: Decimal | float) -> str:
    amount = float(value)
    if not amount:
        return "0"
    return f"{amount:,.2f}" if abs(amount) >= 0.1 else f"{amount:.2g}" if abs(amount) >= 0.0001 else f"{amount:.6f}"


def _time(value: datetime) -> str:
    return f"{value:%Y-%m-%d %H:%M:%S}"


_WRITERS: Final[Mapping[Unit, Callable[[Any], str]]] = {
    Unit.TEXT: lambda value: one_line(str(value)),
    Unit.NAME: lambda value: shortened(one_line(str(value))),
    Unit.TEXTS: lambda value: ", ".join(one_line(str(text)) for text in value) or ABSENT,
    Unit.COUNT: lambda value: f"{value:,}",
    Unit.NUMBER: _number,
    Unit.MS: _length,
    Unit.SECONDS: lambda value: _length(value * 1_000),
    Unit.PART: _part,
    Unit.MONEY: _money,
    Unit.TIME: _time,
    Unit.FLAG: lambda value: "yes" if value else "no",
}
