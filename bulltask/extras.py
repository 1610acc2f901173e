"""Optional dependencies: they are imported on first use, and an error names the extra that installs them."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Mapping, Set
from typing import Any, Final

from bulltask.errors import MissingExtraError

__all__ = ["SPARK", "check_installed", "look_up"]

SPARK: Final = frozenset({"numpy", "pyarrow", "pyspark", "py4j"})
"""Modules of the libraries in the extra ``spark``."""


def look_up(package: str, name: str, modules: Mapping[str, str], extra: str, libraries: Set[str]) -> Any:
    """Import a public name of a package and return it; the package's ``__getattr__`` calls this.

    Args:
        package: Name of the package.
        name: The public name.
        modules: Module of each public name.
        extra: The extra that the names need.
        libraries: Modules of the libraries in that extra.

    Raises:
        AttributeError: The package has no such name.
        MissingExtraError: A library is not installed.
    """
    if name not in modules:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(modules[name]), name)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in libraries:
            raise
        raise MissingExtraError(
            f"{package}.{name} needs {exc.name}, which is not installed: pip install 'bulltask[{extra}]'"
        ) from exc


def check_installed(module: str, extra: str, what: str) -> None:
    """Check that an optional dependency is installed, without importing it.

    Args:
        module: The dependency's module.
        extra: The extra that installs it.
        what: What needs it, for the message.

    Raises:
        MissingExtraError: It is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise MissingExtraError(f"{what} needs {module}, which is not installed: pip install 'bulltask[{extra}]'")
