"""Python environments for the tests of clusters, made of others without installing anything."""

from __future__ import annotations

import venv
from pathlib import Path

import pyspark

__all__ = ["HERE", "environment"]

HERE = Path(pyspark.__file__).parent.parent
"""Where the packages of these tests are installed."""


def environment(home: Path, *sites: Path) -> Path:
    """Make an environment that sees the packages of some directories, the first first; return its Python.

    Packages that are installed there as links (as bulltask is, in development) are not among them: such a link counts
    in the environment it belongs to.
    """
    venv.create(home, symlinks=True)
    (own,) = home.glob("lib/python3.*/site-packages")
    (own / "others.pth").write_text("".join(f"{site}\n" for site in sites))
    return home / "bin" / "python"
