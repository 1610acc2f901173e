"""Warnings that point to the user's line of code."""

from __future__ import annotations

import os
import sys
import warnings
from pathlib import Path
from typing import Final

__all__ = ["warn_user"]

_PACKAGE: Final = f"{Path(__file__).parent}{os.sep}"


def warn_user(text: str) -> None:
    """Emit a ``UserWarning`` at the line of the user's code that called bulltask; Python shows each once per line."""
    warnings.warn(text, stacklevel=_users_level())


def _users_level() -> int:
    """Return the number of frames up to the user's code."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<")):  # "<": code of a dataclass
        frame, level = frame.f_back, level + 1
    return level
