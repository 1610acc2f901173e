"""Measure the house: files, lines, rooms, layers, circles, what an app loads, the words of the docs.

``python -m tools house [CHECKOUT]`` prints one figure per line; give it two checkouts to compare them. ``--runtime``
adds the memory of an idle worker and the time from its start to its first job, which need a Redis server.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from statistics import median
from typing import Final

GENERATED: Final = ("config/setting_types.py", "queue/sync/")
FORWARDING_LINES: Final = 15
APP: Final = """
from bulltask import App
app = App("house", "{url}")

@app.task
def add(x: int, y: int) -> int:
    return x + y

@app.task
def stamp() -> None:
    import time
    with open("started", "w") as file:
        file.write(str(time.time()))
"""
AFTER_THE_FIRST_RESULT: Final = """
import sys, house_app
house_app.add.delay(1, 2).get(timeout=30)
print(sum(m.partition('.')[0] == 'bulltask' for m in sys.modules))
"""


def product(root: Path) -> Iterator[tuple[str, Path]]:
    """Yield the product's modules, by their paths in the package, without generated ones."""
    for file in sorted((root / "bulltask").rglob("*.py")):
        name = file.relative_to(root / "bulltask").as_posix()
        if not name.startswith(GENERATED):
            yield name, file


def room_of(name: str) -> str:
    """Return the room of a module: the first part of its path."""
    return name.partition("/")[0].removesuffix(".py")


def rooms(root: Path) -> dict[str, set[str]]:
    """Return the rooms that each room imports, with the imports for type checkers and those inside functions."""
    found: dict[str, set[str]] = {}
    for name, file in product(root):
        is_forwarding = "/" not in name and len(file.read_text().splitlines()) <= FORWARDING_LINES
        if not name.startswith("__") and not is_forwarding:
            names = imported(ast.parse(file.read_text()))
            found.setdefault(room_of(name), set()).update(
                path.split(".")[1] for path in names if path.startswith("bulltask.")
            )
    return {room: {other for other in others if other in found and other != room} for room, others in found.items()}


def imported(tree: ast.AST) -> Iterator[str]:
    """Yield what code imports, anywhere: also in functions and under ``TYPE_CHECKING``."""
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (f"{module}.{alias.name}" for alias in names)
            case _:
                pass


def layers(graph: Mapping[str, set[str]]) -> list[list[str]]:
    """Return the rooms by layer, the lowest first.

    Raises:
        CycleError: Rooms import each other.
    """
    sorter = TopologicalSorter(graph)
    sorter.prepare()
    found = []
    while sorter.is_active():
        layer = sorter.get_ready()
        found.append(sorted(layer))
        sorter.done(*layer)
    return found


def structure(root: Path) -> Iterator[tuple[str, object]]:
    """Yield the figures that are read from the source."""
    files = dict(product(root))
    lines = {name: len(file.read_text().splitlines()) for name, file in files.items()}
    yield "product files", len(files)
    yield "product lines", sum(lines.values())
    yield (
        "generated lines",
        sum(len(f.read_text().splitlines()) for f in (root / "bulltask").rglob("*.py")) - sum(lines.values()),
    )
    yield "files under 100 lines", sum(0 < count < 100 for count in lines.values())
    graph = rooms(root)
    yield "rooms", len(graph)
    try:
        found = layers(graph)
        yield "circles between rooms", 0
        yield "layers", len(found)
    except CycleError as exc:
        yield "circles between rooms", f"at least one: {exc.args[1]}"
    trees = (ast.parse(file.read_text()) for file in files.values())
    yield "tuple assignments to attributes", sum(len(tuple_assignments(tree)) for tree in trees)
    yield "words of docs", words_of_docs(root)


def words_of_docs(root: Path) -> int:
    """Count the words of all pages and the README."""
    pages = [*(root / "docs").rglob("*.md"), root / "README.md"]
    return sum(len(re.findall(r"\w[\w'-]*", page.read_text())) for page in pages)


def tuple_assignments(tree: ast.AST) -> list[int]:
    """Return the lines of a module that assign a tuple's members to targets of which one is an attribute."""
    return [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Tuple)
        and any(
            isinstance(target, ast.Tuple) and any(isinstance(item, ast.Attribute) for item in target.elts)
            for target in node.targets
        )
    ]


def imports(root: Path) -> Iterator[tuple[str, object]]:
    """Yield how many modules an app loads, and how long that takes."""
    program = "import sys, time; t = time.perf_counter(); from bulltask import App; App('house'); "
    program += "print(sum(m.partition('.')[0] == 'bulltask' for m in sys.modules), time.perf_counter() - t)"
    best: list[str] = []
    for _ in range(5):
        result = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
        best = min(best or ["0", "inf"], result.stdout.split(), key=lambda fields: float(fields[1]))
    yield "modules loaded by App", best[0]
    yield "import and App(), seconds, best of 5", f"{float(best[1]):.3f}"


def runtime(root: Path) -> Iterator[tuple[str, object]]:
    """Yield what needs a server: modules after the first result, memory of an idle worker, time to the first job.

    The checkout is installed with its dependencies and nothing else, because redis-py and structlog import optional
    packages that a contributor has: OpenTelemetry and Rich take 10 MiB.
    """
    sys.path.insert(0, str(root))
    from bulltask.testing import RedisServer  # noqa: PLC0415 - it belongs to the checkout

    with tempfile.TemporaryDirectory() as temporary, RedisServer.start(directory := Path(temporary)) as server:
        python = _install(root, directory / "venv")
        (directory / "house_app.py").write_text(APP.format(url=server.url))
        worker = [python, "-m", "bulltask", "worker", "-A", "house_app", "-c", "2"]
        times, memory = [], []
        for _ in range(7):
            (directory / "started").unlink(missing_ok=True)
            run(directory, python, "-c", "import house_app; house_app.stamp.delay()")
            started = time.time()
            with subprocess.Popen(worker, cwd=directory, stderr=subprocess.DEVNULL) as process:
                modules = run(directory, python, "-c", AFTER_THE_FIRST_RESULT)
                times.append(float((directory / "started").read_text()) - started)
                memory.append(_memory_mib(_tree(process.pid)))
                process.terminate()
        yield "modules loaded after the first result", modules
        yield "start of a worker to its first job, seconds, best of 7", f"{min(times):.3f}"
        libraries = [python, "-c", "import redis.connection, structlog, click, hiredis; print(flush=True); input()"]
        with subprocess.Popen(libraries, cwd=directory, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
            assert process.stdout is not None
            process.stdout.readline()
            floor = _memory_mib([process.pid])
            process.kill()
        # PSS divides a library's pages among all programs that have mapped them, also among those that are not ours.
        for index, kind in enumerate(("PSS", "own (anonymous) memory")):
            yield (
                f"{kind} of an idle worker with 2 children, MiB, median of 7",
                f"{median(m[index] for m in memory):.1f}",
            )
            yield f"{kind} of one process with the libraries alone, MiB", f"{floor[index]:.1f}"


def _install(root: Path, directory: Path) -> str:
    """Install a checkout in a new environment; return the path of its Python."""
    subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    python = str(directory / "bin" / "python")
    run(directory, python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", str(root))
    return python


def run(directory: Path, *command: str) -> str:
    """Run a command in a directory; return its output."""
    return subprocess.run(command, cwd=directory, capture_output=True, text=True, check=True).stdout.strip()


def _tree(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [pid, *(found for child in children for found in _tree(int(child)))]


def _memory_mib(pids: list[int]) -> tuple[float, float]:
    """Return the PSS of processes, and the part of it that belongs to no file: pages that forks share count once."""
    texts = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
    found = [re.findall(r"^(?:Pss|Pss_Anon):\s+(\d+)", text, re.MULTILINE) for text in texts]
    return sum(int(pss) for pss, _ in found) / 1024, sum(int(own) for _, own in found) / 1024


def main() -> None:
    """Print the figures."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--runtime"]
    root = Path(arguments[0] if arguments else Path(__file__).parents[1]).resolve()
    parts = [structure, imports, *([runtime] if "--runtime" in sys.argv else [])]
    for part in parts:
        for name, value in part(root):
            sys.stdout.write(f"{value!s:>10}  {name}\n")


if __name__ == "__main__":
    main()
