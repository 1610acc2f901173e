"""Format numbers, durations, times and names for people: short, with units, at most three digits."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from bulltask.jobs.names import UNSEEN

if TYPE_CHECKING:
    from decimal import Decimal

ABSENT: Final = "\N{EN DASH}"

CONTROL: Final = re.compile(rf"[\x00-\x1f\x7f-\x9f\ud800-\udfff{UNSEEN}]")
"""Characters that move the cursor, hide text or reverse it, and surrogates, which cannot be printed. Names of tasks are
untrusted: they may contain these."""


class Unit(StrEnum):
    """The kind of a value, which determines its format."""

    TEXT = "text"
    NAME = "name"
    TEXTS = "texts"
    COUNT = "count"
    NUMBER = "number"
    MS = "ms"
    SECONDS = "s"
    FRACTION = "fraction"
    MONEY = "money"
    TIME = "time"
    FLAG = "flag"


def format_value(value: Any, unit: Unit) -> str:
    """Return a value as text; ``None`` is a dash."""
    return ABSENT if value is None else _FORMATTERS[unit](value)


def one_line(text: str) -> str:
    """Return text with control characters escaped: ``\\n``, ``\\x1b``."""
    return CONTROL.sub(lambda match: match[0].encode("unicode_escape").decode(), text)


def json_text(value: Any) -> str:
    """Return indented JSON in which the control characters that JSON allows, but a terminal interprets, are escaped."""
    lines = json.dumps(value, indent=2, ensure_ascii=False).split("\n")
    return "\n".join(CONTROL.sub(lambda match: json.dumps(match[0])[1:-1], line) for line in lines)


def age_text(seconds: float) -> str:
    """Return a duration in at most 7 characters: ``0.1 s``, ``12 s``, ``2.5 h``."""
    size, unit = next(((size, unit) for size, unit in _AGES if seconds >= 2 * size), (1, "s"))
    value = max(0, seconds / size)
    return f"{value:.{value < 9.95:d}f} {unit}"


_AGES: Final = ((86_400, "d"), (3_600, "h"), (60, "min"))


def shorten(name: str) -> str:
    """Return the name of a task or queue, shortened in the middle to 120 characters if it is longer."""
    return name if len(name) <= 120 else f"{name[:70]}…{name[-49:]}"


def pluralize(number: float, noun: str, spec: str | Callable[[float], str] = ",") -> str:
    """Return a number with its noun: ``1 job``, ``2 jobs``.

    ``spec`` formats the number; by default 1234 is ``1,234``.
    """
    text = format(number, spec) if isinstance(spec, str) else spec(number)
    return f"{text} {noun}{'' if text == '1' else 's'}"


def _number(value: float) -> str:
    if value == 0:
        return "0"
    if abs(value) >= 1_000:
        return f"{value:,.0f}"
    digits = 2 if abs(value) < 10 else 1 if abs(value) < 100 else 0
    text = f"{value:.{digits}f}"
    if float(text):
        return text.rstrip("0").rstrip(".") if digits else text
    if abs(value) < 0.0001:  # format() would use an exponent
        return "< 0.0001" if value > 0 else "> -0.0001"
    return f"{value:.1g}"


_DURATIONS: Final = ((86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s"))


def _duration(ms: float) -> str:
    for size, name in _DURATIONS:
        if abs(ms) >= size:
            return f"{_number(ms / size)} {name}"
    return f"{_number(round(ms, 1))} ms"


def _fraction(value: float) -> str:
    percent = value * 100
    # 99.98% must not be shown as 100%, nor one failure in a million as 0%.
    if 99 < percent < 100:
        text = f"{percent:.2f}" if percent < 99.995 else f"{min(percent, 99.999):.3f}"
        return f"{text.rstrip('0').rstrip('.')}%"
    if 0 < abs(percent) < 0.01:
        return "< 0.01%" if percent > 0 else "> -0.01%"
    return f"{_number(percent)}%"


def _money(value: Decimal | float) -> str:
    amount = float(value)
    if not amount:
        return "0"
    return f"{amount:,.2f}" if abs(amount) >= 0.1 else f"{amount:.2g}" if abs(amount) >= 0.0001 else f"{amount:.6f}"


_FORMATTERS: Final[Mapping[Unit, Callable[[Any], str]]] = {
    Unit.TEXT: lambda value: one_line(str(value)),
    Unit.NAME: lambda value: shorten(one_line(str(value))),
    Unit.TEXTS: lambda value: ", ".join(one_line(str(text)) for text in value) or ABSENT,
    Unit.COUNT: lambda value: f"{value:,}",
    Unit.NUMBER: _number,
    Unit.MS: _duration,
    Unit.SECONDS: lambda value: _duration(value * 1_000),
    Unit.FRACTION: _fraction,
    Unit.MONEY: _money,
    Unit.TIME: lambda value: f"{value:%Y-%m-%d %H:%M:%S}",
    Unit.FLAG: lambda value: "yes" if value else "no",
}
