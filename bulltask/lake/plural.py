"""Numbers with what they count: ``1 job``, ``2 jobs``."""

from __future__ import annotations

__all__ = ["counted"]


def counted(number: float, noun: str, how: str = ",") -> str:
    """Return a number and its noun, which gets an ``s`` unless the number is written as 1.

    Args:
        number: how many.
        noun: of one of them.
        how: how the number is written, as in ``format``; ``1234`` is ``1,234`` by default.
    """
    text = format(number, how)
    return f"{text} {noun}{'' if text == '1' else 's'}"
