"""Run a Node program of the documentation."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.interop.conftest import HERE

__all__ = ["node_program"]


@contextmanager
def node_program(code: str, url: str, directory: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a page's Node program on a server other than the one it names; it is killed if it does not end."""
    assert "redis://localhost:6379" in code
    (directory / "program.mjs").write_text(code.replace("redis://localhost:6379", url.removesuffix("/0")))
    (directory / "node_modules").symlink_to(HERE / "node_modules")
    node = shutil.which("node") or "node"
    with subprocess.Popen([node, "program.mjs"], cwd=directory, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()
