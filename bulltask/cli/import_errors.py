"""One clear message for an error in the user's modules: the error, and the lines of their code that led to it."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import click

from bulltask.config.urls import redact_text
from bulltask.jobs.errors import AppNotFoundError

__all__ = ["reporting_import_errors"]

_PACKAGE: Final = f"{Path(__file__).parent.parent}{os.sep}"
_IMPORT_SYSTEM: Final = ("<frozen", f"{Path(importlib.__file__).parent}{os.sep}")
_MAX_LINES: Final = 8


@contextmanager
def reporting_import_errors(what: str) -> Iterator[None]:
    """Replace an error with a message that omits the frames of bulltask and of Python's import system.

    Args:
        what: What is imported, for the message.

    Raises:
        click.ClickException: The block raised an error.
    """
    try:
        yield
    except (AppNotFoundError, click.ClickException):
        raise  # its message is complete
    except Exception as exc:
        raise click.ClickException(_describe(exc, what)) from exc


def _describe(exc: Exception, what: str) -> str:
    text = exc.msg if isinstance(exc, SyntaxError) else str(exc)
    lines = [f"cannot import {what}: {type(exc).__name__}{': ' if text else ''}{text}"]
    cause = exc.__cause__
    if cause is not None and str(cause) not in text:
        lines.append(f"  caused by {type(cause).__name__}: {cause}")
    frames = [f"  {_place(frame.filename, frame.lineno)}: {frame.line}" for frame in _users_frames(exc)]
    if isinstance(exc, SyntaxError) and exc.filename:
        frames.append(f"  {_place(exc.filename, exc.lineno)}: {(exc.text or '').strip()}")
    if len(frames) > _MAX_LINES:
        half = _MAX_LINES // 2
        frames[half:-half] = [f"  … {len(frames) - _MAX_LINES} more"]
    return redact_text("\n".join([*lines, *frames]))


def _users_frames(exc: Exception) -> list[traceback.FrameSummary]:
    frames = traceback.extract_tb(exc.__traceback__)
    return [frame for frame in frames if not frame.filename.startswith((_PACKAGE, *_IMPORT_SYSTEM))]


def _place(filename: str, line: int | None) -> str:
    path = Path(filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return f"{shown}:{line}"
