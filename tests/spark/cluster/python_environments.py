"""Python environments for the cluster tests, composed of existing ones without installing packages."""

from __future__ import annotations

import venv
from pathlib import Path

import pyspark

__all__ = ["SITE_PACKAGES", "environment"]

SITE_PACKAGES = Path(pyspark.__file__).parent.parent
"""The directory with the packages in the tests' environment."""


def environment(home: Path, *directories: Path) -> Path:
    """Create an environment with the packages in some directories, in this order; return its Python.

    Editable installs, such as bulltask's in development, are not included.
    """
    venv.create(home, symlinks=True)
    (site_packages,) = home.glob("lib/python3.*/site-packages")
    (site_packages / "others.pth").write_text("".join(f"{path}\n" for path in directories))
    return home / "bin" / "python"
