"""JVMs that start quickly, for the tests: little to read and to compile, and classes as Java has them in memory."""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import pyspark

__all__ = ["archive", "home_of_tests", "java", "java_options", "spark_home", "thin_home"]

QUICK = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""A JVM that runs for a minute does not profit from optimised code: without it, small runs take a third less."""

ARCHIVED = "-Xshare:auto -Xlog:disable -Xlog:all=error:stderr"
"""Without the archive if it does not fit, and without a word about that on standard output."""


def java_options(place: Path | None = None) -> str:
    """Options of a JVM of Spark's: with the archive of `tests.support.spark_archive`, if that was made.

    Args:
        place: in a directory there it writes what it removes at its end, unless it is killed; /tmp if left out.
    """
    options, found = QUICK, archive()
    if place is not None and " " not in str(place):  # options are cut at spaces
        scratch = place / "java"
        scratch.mkdir(parents=True, exist_ok=True)
        options += f" -Djava.io.tmpdir={scratch}"
    if " " in str(found) or not found.is_file():
        return options
    return f"{options} -XX:SharedArchiveFile={found} {ARCHIVED}"


def thin_home(home: Path) -> Path:
    """Make a SPARK_HOME without ``pyspark.zip``.

    Each of Spark's Python processes would compile the modules of that archive anew, for half a second; without it they
    import pyspark from where it is installed.
    """
    installed = Path(pyspark.__file__).parent
    (home / "python" / "lib").mkdir(parents=True)
    for part in ("bin", "data", "jars", "sbin"):
        (home / part).symlink_to(installed / part)
    return home


def spark_home(otherwise: Path) -> Path:
    """The thin SPARK_HOME of all tests: the archive is of use to JVMs only whose class path it was made with.

    Args:
        otherwise: where to make one if the environment of these tests cannot be written.
    """
    try:
        return home_of_tests()
    except OSError:
        return thin_home(otherwise)


def home_of_tests() -> Path:
    """Make it, unless it is there; several processes may do so at a time."""
    home = _place() / "home"
    if not home.exists():
        home.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(dir=home.parent))
        with suppress(OSError):  # another process was quicker
            thin_home(made / "home").rename(home)
        shutil.rmtree(made)
    return home


def archive() -> Path:
    """Where the archive is, or would be."""
    return _place() / "classes.jsa"


def java() -> Path:
    """The program that Spark starts."""
    named = os.environ.get("JAVA_HOME")
    return Path(named, "bin", "java") if named else Path(shutil.which("java") or "java")


@cache
def _place() -> Path:
    """A directory below the environment of these tests, for what they have of Java and Spark."""
    release = java().resolve().parents[1] / "release"
    jars = sorted((jar.name, jar.stat().st_size) for jar in (Path(pyspark.__file__).parent / "jars").iterdir())
    known = (pyspark.__file__, str(java().resolve()), release.read_text() if release.is_file() else "", jars, QUICK)
    return Path(sys.prefix, "spark-of-tests", hashlib.sha256(repr(known).encode()).hexdigest()[:16])
