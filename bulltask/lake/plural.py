"""Numbers with what they count: ``1 job``, ``2 jobs``."""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["counted", "significant"]


def counted(number: float, noun: str, how: str | Callable[[float], str] = ",") -> str:
    """Return a number and its noun, which gets an ``s`` unless the number is written as 1.

    Args:
        number: how many.
        noun: of one of them.
        how: how the number is written, as in ``format``, or a function; ``1234`` is ``1,234`` by default.
    """
    text = format(number, how) if isinstance(how, str) else how(number)
    return f"{text} {noun}{'' if text == '1' else 's'}"


def significant(number: float) -> str:
    """Return a number that is not negative with three digits, and never with an exponent."""
    if 0 < number < 0.001:
        return "less than 0.001"
    text = f"{number:.3g}"
    return f"{number:,.0f}" if "e" in text or number >= 1_000 else text
