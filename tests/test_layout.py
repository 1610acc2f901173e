"""The shape of the code base: short files, short functions, no sleeping, nobody else's Lua in the repository."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent
MOST_LINES_OF_A_FILE = 400
MOST_LINES_OF_A_FUNCTION = 40


def product_files() -> list[Path]:
    return sorted((ROOT / "bulltask").rglob("*.py"))


def all_files() -> list[Path]:
    folders = ["bulltask", "tests", "examples", "benchmarks"]
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if "node_modules" not in path.parts)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def functions(path: Path) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def lines_without_docstring(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from ``def`` to the end; the docstring is left out, so that nobody saves on words."""
    lines = (function.end_lineno or 0) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function) is not None:
        lines -= (first.end_lineno or 0) - first.lineno + 1
    return lines


def calls_of_sleep(path: Path) -> Iterator[int]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "sleep" in text else ():
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr="sleep"):
                yield node.lineno
            case ast.ImportFrom(module="time", names=names) if any(alias.name == "sleep" for alias in names):
                yield node.lineno


def test_no_file_of_the_product_is_longer_than_400_lines() -> None:
    sizes = {name_of(path): len(path.read_text().splitlines()) for path in product_files()}
    assert {name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FILE} == {}


def test_no_function_of_the_product_is_longer_than_40_lines() -> None:
    sizes = {
        f"{name_of(path)}:{function.lineno} {function.name}": lines_without_docstring(function)
        for path in product_files()
        for function in functions(path)
    }
    assert {name: size for name, size in sizes.items() if size > MOST_LINES_OF_A_FUNCTION} == {}


def test_nobody_sleeps() -> None:
    found = [f"{name_of(path)}:{line}" for path in all_files() for line in calls_of_sleep(path)]
    assert found == [], "wait for the event itself (selector, condition, blocking read)"


def test_no_lua_but_our_own_is_in_the_repository() -> None:
    listed = subprocess.run(["git", "ls-files", "*.lua"], cwd=ROOT, capture_output=True, text=True, check=True)
    foreign = [name for name in listed.stdout.splitlines() if Path(name).parent != Path("bulltask/lua/own")]
    assert foreign == [], "BullMQ's scripts come from its wheel while building; own ones live in bulltask/lua/own"


def test_the_lock_files_name_no_package_index() -> None:
    # A mirror's address in a lock file makes the install fail wherever that mirror cannot be reached.
    assert "://" not in (ROOT / "requirements-dev.lock").read_text()
    assert '"resolved"' not in (ROOT / "tests/interop/package-lock.json").read_text()
