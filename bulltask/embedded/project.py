"""Projects: each has its own embedded server, unless ``embedded://NAME`` names another one."""

from __future__ import annotations

import hashlib
import os
import re
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from types import FrameType
from typing import Any, Final

from bulltask.errors import ConfigError

__all__ = ["calling_directory", "find_project", "import_directory", "server_name"]

_MARKERS: Final = ("pyproject.toml", "setup.py", "setup.cfg", "manage.py", ".git", ".hg")
"""Files and directories at the root of a project."""

_LIBRARIES: Final = tuple(
    f"{directory}{os.sep}"
    for directory in (
        Path(__file__).parent.parent,
        *map(sysconfig.get_path, ("stdlib", "purelib", "platlib", "scripts")),
    )
)
"""The directories of bulltask, Python and installed packages, whose modules belong to no project."""

_PACKAGES: Final = frozenset({"site-packages", "dist-packages"})
"""Names of other directories with installed packages: the user's, and those of Debian."""


def find_project(directory: Path | None = None) -> Path:
    """Return the root of the project that contains a directory: the nearest directory with one of the markers.

    Without markers, the project is the directory itself. Markers in the home directory, such as a repository of
    settings, and above it do not count, because they would turn all of the user's projects into one.

    Args:
        directory: The directory; default: the current directory.

    Raises:
        ConfigError: The current directory has been removed.
    """
    try:
        start = (Path.cwd() if directory is None else directory).resolve()
    except FileNotFoundError as exc:
        raise ConfigError(
            "embedded:// is the server of the project in the current directory, which has been removed: change to "
            "another directory, or name a server, as in embedded://shop"
        ) from exc
    try:
        home = Path.home().resolve()
    except RuntimeError:  # no home directory
        home = Path("/")
    for parent in (start, *start.parents):
        if parent == home or home.is_relative_to(parent):
            break
        if any((parent / marker).exists() for marker in _MARKERS):
            return parent
    return start


def server_name(project: Path) -> str:
    """Return the name of a project's server, such as ``shop-0f3a9b2c``: projects in two directories have two."""
    readable = re.sub(r"[^A-Za-z0-9_]+", "-", project.name).strip("-")[:40] or "project"
    return f"{readable}-{hashlib.sha256(os.fsencode(project)).hexdigest()[:8]}"


def import_directory(module: Mapping[str, Any]) -> Path | None:
    """Return the directory from which a module is imported: that of a script, or of the top-level package.

    A program that sends jobs and the worker find the same directory, whatever their current directories are.

    Args:
        module: The module's globals.

    Returns:
        ``None`` for a module without a file, such as a notebook, and for those of libraries.
    """
    file, package = module.get("__file__"), module.get("__package__") or ""
    if not isinstance(file, str) or file.startswith(_LIBRARIES):
        return None
    path = Path(file).absolute()
    if not path.suffix or not _PACKAGES.isdisjoint(path.parts):  # a program such as ~/.local/bin/bulltask; a package
        return None
    depth = len(package.split(".")) if package else 0
    return path.parents[depth] if path.is_file() and depth < len(path.parents) else None


def calling_directory() -> Path | None:
    """Return :func:`import_directory` of the innermost caller for which there is one."""
    frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 # as logging does
    while frame is not None:
        if (found := import_directory(frame.f_globals)) is not None:
            return found
        frame = frame.f_back
    return None
