"""The syntax trees of the package's modules, for tests of its source code."""

from __future__ import annotations

import ast
import gc
from pathlib import Path

from tests.support.programs import ROOT

__all__ = ["package_trees"]


def package_trees() -> dict[Path, ast.Module]:
    """Return the tree of each module of the package, by its path; for fixtures of a module, because they are large."""
    # Half a million objects, which the garbage collector would search again and again: two thirds of the time.
    gc.disable()
    try:
        return {path: ast.parse(path.read_text()) for path in sorted((ROOT / "bulltask").rglob("*.py"))}
    finally:
        gc.freeze()
        gc.enable()
