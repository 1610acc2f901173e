"""Names of packages that need an extra: looked up where they are used, so that importing the package needs nothing."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Set
from typing import Any, Final

from bulltask.errors import MissingExtraError

__all__ = ["SPARK", "look_up"]

SPARK: Final = frozenset({"numpy", "pyarrow", "pyspark", "py4j"})
"""Libraries of the extra ``spark``, as they are imported."""


def look_up(package: str, name: str, homes: Mapping[str, str], extra: str, libraries: Set[str]) -> Any:
    """Return a public name of a package, as its ``__getattr__`` does.

    Args:
        package: asks.
        name: which.
        homes: the module of each public name.
        extra: what has to be installed for them.
        libraries: of that extra, as they are imported.

    Raises:
        AttributeError: the package has no such name.
        MissingExtraError: one of the libraries is not installed.
    """
    if name not in homes:
        raise AttributeError(f"module {package!r} has no attribute {name!r}")
    try:
        return getattr(importlib.import_module(homes[name]), name)
    except ModuleNotFoundError as exc:
        if exc.name is None or exc.name.partition(".")[0] not in libraries:
            raise
        raise MissingExtraError(
            f"{package}.{name} needs {exc.name}, which is not installed: pip install 'bulltask[{extra}]'"
        ) from exc
