"""Private copies of the working tree, so that several mutants can run at the same time."""

from __future__ import annotations

import os
import shutil
import signal
import site
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

__all__ = ["ROOT", "Tree"]

ROOT = Path(__file__).resolve().parents[2]
TREE_VARIABLE = "MUTANTS_TREE"
# Ignored by Git, but needed by tests.
LINKS = ("tests/interop/node_modules",)
COPIES = ("bulltask/lua/official",)
PYTEST = (".venv/bin/python", "-m", "pytest", "-p", "no:cacheprovider")
COVERAGE_PTH = 'import os; os.getenv("COVERAGE_PROCESS_START") and __import__("coverage").process_startup()\n'


class Tree:
    """A copy of the working tree, with a virtual environment that imports ``bulltask`` from the copy.

    Args:
        directory: The directory of the copy; an existing one is replaced.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self._second = 0
        shutil.rmtree(directory, ignore_errors=True)
        listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout
        for name in filter(None, listed.decode().split("\0")):
            if (ROOT / name).is_file():
                (directory / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, directory / name)
        for name in COPIES:
            shutil.copytree(ROOT / name, directory / name, dirs_exist_ok=True)
        for name in LINKS:
            if (ROOT / name).exists():
                (directory / name).symlink_to((ROOT / name).resolve())
        self._make_environment()

    def _make_environment(self) -> None:
        home = self.directory / ".venv"
        subprocess.run([sys.executable, "-m", "venv", "--without-pip", home], check=True)
        packages = [path for path in [*site.getsitepackages(), *sys.path] if Path(path).name == "site-packages"]
        within = Path(sysconfig.get_path("purelib", vars={"base": str(home)}))
        lines = "".join(f"{path}\n" for path in dict.fromkeys(packages))
        (within / "tree.pth").write_text(f"{self.directory}\n{lines}{COVERAGE_PTH}")
        for entry in (ROOT / ".venv").iterdir():
            if entry.is_dir() and not (home / entry.name).exists():
                (home / entry.name).symlink_to(entry.resolve())

    @contextmanager
    def changed(self, file: str, source: str) -> Iterator[None]:
        """Replace the contents of a file, and restore it at the end."""
        target = self.directory / file
        original, status = target.read_text(), target.stat()
        target.write_text(source)
        # Python compares length and mtime (in seconds) of a source with its .pyc: each mutant gets its own second.
        self._second += 1
        os.utime(target, (self._second, self._second))
        try:
            yield
        finally:
            target.write_text(original)
            os.utime(target, ns=(status.st_atime_ns, status.st_mtime_ns))

    def pytest(self, arguments: list[str], limit_s: float, environ: dict[str, str] | None = None) -> tuple[int, str]:
        """Run pytest in the copy; return its exit code and output. -1 means that it was killed after ``limit_s``."""
        process = subprocess.Popen(
            [*PYTEST, "--basetemp", self.directory / "t", *arguments],
            cwd=self.directory,
            # Thousands of processes start in this tree: they reuse compiled modules.
            env=os.environ | {TREE_VARIABLE: str(self.directory), "PYTHONDONTWRITEBYTECODE": ""} | (environ or {}),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            self.end_processes()
            output, _ = process.communicate()
            return -1, output
        self.end_processes()
        return process.returncode, output

    def end_processes(self) -> None:
        """Kill the processes of this tree. Servers overwrite their environment, but their directory is in the tree."""
        variable = f"{TREE_VARIABLE}={self.directory}".encode()
        for entry in os.scandir("/proc"):
            with suppress(OSError, ValueError):
                belongs = variable in Path(entry.path, "environ").read_bytes().split(b"\0")
                if belongs or Path(entry.path, "cwd").readlink().is_relative_to(self.directory):
                    os.kill(int(entry.name), signal.SIGKILL)
