"""JVMs that start fast, for the tests: little compilation, and classes from an archive (class data sharing)."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

import pyspark

__all__ = ["SMALL_QUERIES", "archive", "conf_options", "java", "java_options", "shared_home", "spark_home", "thin_home"]

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A JVM that runs for a minute does not benefit from optimized code: without it, small runs take a third less time."""

ARCHIVED = "-Xshare:auto -Xlog:disable -Xlog:all=error:stderr"
"""Start without the archive if it does not match, and print no warning to standard output."""

SMALL_QUERIES: Final = {
    # Otherwise Spark records the calling line of each operation on a column, for error messages.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
    # Generating and compiling Java code takes longer than running a query on a test's few rows.
    "spark.sql.codegen.factoryMode": "NO_CODEGEN",
    "spark.sql.codegen.wholeStage": "false",
    "spark.sql.dataFrameQueryContext.enabled": "false",
}
"""Spark settings with which queries on few rows take less time."""


def conf_options(settings: Mapping[str, object]) -> list[str]:
    """Return Spark settings as command line options, ``--conf NAME=VALUE`` for each."""
    return [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]


def java_options(parent: Path | None = None) -> str:
    """Return the options for Spark's JVMs, with the archive of `tests.support.spark_archive` if it exists.

    Args:
        parent: The JVM's temporary directory is created in this directory; /tmp by default.
    """
    options, path = QUICK, archive()
    if parent is not None and " " not in str(parent):  # options are split at spaces
        scratch = parent / "java"
        scratch.mkdir(parents=True, exist_ok=True)
        options += f" -Djava.io.tmpdir={scratch}"
    if " " in str(path) or not path.is_file():
        return options
    return f"{options} -XX:SharedArchiveFile={path} {ARCHIVED}"


def thin_home(home: Path) -> Path:
    """Create a SPARK_HOME without ``pyspark.zip``.

    Each of Spark's Python processes would compile that archive's modules again, in half a second. Without it, they
    import the installed pyspark.
    """
    installed = Path(pyspark.__file__).parent
    (home / "python" / "lib").mkdir(parents=True)
    for part in ("bin", "data", "jars", "sbin"):
        (home / part).symlink_to(installed / part)
    return home


def spark_home(otherwise: Path) -> Path:
    """Return the thin SPARK_HOME that all tests share: JVMs can use the archive only with the same class path.

    Args:
        otherwise: The directory to use if the virtual environment is not writable.
    """
    try:
        return shared_home()
    except OSError:
        return thin_home(otherwise)


def shared_home() -> Path:
    """Create the shared SPARK_HOME unless it exists; several processes may do so at the same time."""
    home = _cache_directory() / "home"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        new = Path(tempfile.mkdtemp(dir=home.parent))
        with suppress(OSError):  # another process was faster
            thin_home(new / "home").rename(home)
        shutil.rmtree(new)
    return home


def archive() -> Path:
    """Return the path of the archive, which may not exist."""
    return _cache_directory() / "classes.jsa"


def java() -> Path:
    """Return the path of the java executable that Spark starts."""
    named = os.environ.get("JAVA_HOME")
    return Path(named, "bin", "java") if named else Path(shutil.which("java") or "java")


@cache
def _cache_directory() -> Path:
    """Return the directory for the archive and SPARK_HOME, in the tests' virtual environment."""
    release = java().resolve().parents[1] / "release"
    jars = sorted((jar.name, jar.stat().st_size) for jar in (Path(pyspark.__file__).parent / "jars").iterdir())
    known = (pyspark.__file__, str(java().resolve()), release.read_text() if release.is_file() else "", jars, QUICK)
    return Path(sys.prefix, "spark-cds-archive", hashlib.sha256(repr(known).encode()).hexdigest()[:16])
