"""Rules for the code base: no ``time.sleep``, only bulltask's Lua scripts, one module that can run code from data."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import bulltask
from tests.support.syntax_trees import package_trees
from tools.house import FORWARDING_LINES, imported, product, tuple_assignments, words_of_docs

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def trees() -> dict[Path, ast.Module]:
    return package_trees()


def package_files() -> list[Path]:
    return sorted((ROOT / "bulltask").rglob("*.py"))


def all_files() -> list[Path]:
    folders = ["bulltask", "tests", "examples", "benchmarks"]
    files = (path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return sorted(path for path in files if "node_modules" not in path.parts)


def relative_name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def sleep_calls(path: Path) -> Iterator[int]:
    text = path.read_text()
    for node in ast.walk(ast.parse(text)) if "sleep" in text else ():
        match node:
            case ast.Attribute(value=ast.Name(id="time"), attr="sleep"):
                yield node.lineno
            case ast.ImportFrom(module="time", names=names) if any(alias.name == "sleep" for alias in names):
                yield node.lineno


def test_no_code_calls_time_sleep() -> None:
    calls = [f"{relative_name(path)}:{line}" for path in all_files() for line in sleep_calls(path)]
    assert calls == [], "wait for the event itself (selector, condition, blocking read)"


STOPPED = {
    "time": {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns"},
    "asyncio": {"sleep", "timeout", "timeout_at", "wait_for"},
}


def waits_for_stopped_clocks(path: Path) -> Iterator[int]:
    text = path.read_text().replace("asyncio.sleep(0)", "pause")
    for node in ast.walk(ast.parse(text)) if re.search("monotonic|perf_counter|asyncio|call_(later|at)", text) else ():
        match node:
            case ast.Attribute(value=ast.Name(id="time" | "asyncio" as module), attr=name) if name in STOPPED[module]:
                yield node.lineno
            case ast.ImportFrom(module="time" | "asyncio" as module, names=names):
                yield from (node.lineno for alias in names if alias.name in STOPPED[module])
            case ast.Attribute(attr="call_later" | "call_at"):
                yield node.lineno
            case _:
                pass


def test_no_wait_uses_a_clock_that_a_test_can_stop() -> None:
    files = [path for path in package_files() if path.name not in {"clock.py", "loop_timers.py"}]
    found = [f"{relative_name(path)}:{line}" for path in files for line in waits_for_stopped_clocks(path)]
    assert found == [], "use bulltask.jobs.clock.mono_s() or mono_ms(), and bulltask.jobs.clock"


# ---- size ------------------------------------------------------------------------------------------------------------

MAX_FILES = 255
"""240; 12 for the room ``dashboard`` and the commands that came with it; 3 for the lake's Delta tables."""

MAX_WORDS = 80_200
"""75,000; 3,500 for the dashboard, ``doctor``, ``top`` and the files of ``deploy/``; 700 for the home page of the site
and its pages for three kinds of readers; 650 for questions to the lake in SQL, and what
maintains it; 200 for several brokers in one lake; 150 for what a billion events a day need.
"""


def test_the_package_and_the_docs_do_not_grow_without_a_reason() -> None:
    assert len(dict(product(ROOT))) <= MAX_FILES, "look for what the new file can replace, or join"
    assert words_of_docs(ROOT) <= MAX_WORDS, "take away what a reader does not miss"


# ---- rooms -----------------------------------------------------------------------------------------------------------

ROOMS = {
    "app", "cli", "config", "contrib", "dashboard", "embedded", "jobs", "lake", "lua", "migrate", "observe", "outbox",
    "queue", "registry", "spark", "testing", "transport", "worker",
}  # fmt: skip
MAX_LAYERS = 12

BY_NAME = {
    ("app", "bulltask.cli.main"),  # App.start() runs the command line, which imports the app
    ("app", "bulltask.testing.inline"),
    ("app", "bulltask.worker.in_process"),
    ("embedded", "bulltask.testing.plugin"),  # only looked up in sys.modules
    ("observe", "bulltask.worker"),  # the name of a logger
    ("registry", "bulltask.spark"),  # task.map_dataframe() needs an extra
    ("testing", "bulltask.contrib.django"),  # the app of a Django project
    ("worker", "bulltask.spark.tasks"),  # needs an extra
}
"""Modules of higher rooms that a room names in a string. Add none: an import by name is still an import."""


@cache
def contract() -> dict[str, list[str]]:
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    (found,) = [entry for entry in config if entry["type"] == "layers"]
    return {name: found[name] for name in ("layers", "exhaustive_ignores")}


@cache
def heights() -> dict[str, int]:
    """Return the number of each room's layer; the lowest is 0."""
    return {room: at for at, layer in enumerate(reversed(contract()["layers"])) for room in layer.split(" | ")}


def forwarding_modules() -> set[str]:
    return set(contract()["exhaustive_ignores"]) - {"__main__"}


@cache
def forwarded_rooms(module: str) -> set[str]:
    """Return the rooms from which a forwarding module imports."""
    tree = ast.parse((ROOT / f"bulltask/{module}.py").read_text())
    return {room for name in imported(tree) for room in rooms_of(name)}


def rooms_of(name: str) -> set[str]:
    """Return the rooms that contain a module or name of bulltask, through forwarding modules and lazy names."""
    package, _, rest = name.partition(".")
    first = rest.partition(".")[0]
    if package != "bulltask" or not first:
        return set()
    if first in forwarding_modules():
        return forwarded_rooms(first)
    lazy = vars(bulltask)["_MODULES"].get(first)
    return {first} if first in ROOMS else rooms_of(lazy) if lazy else set()


def upward(room: str, tree: ast.AST) -> set[str]:
    """Return what the code of a room imports, or names in a string, from another room of its layer or above it."""
    strings = (node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str))
    modules = {text for text in strings if re.fullmatch(r"bulltask(\.\w+)+", text)}
    named = {text for text in modules if is_module(text) and (room, text) not in BY_NAME}
    return {
        name
        for name in {*imported(tree), *named}
        if any(heights()[other] >= heights()[room] and other != room for other in rooms_of(name))
    }


def is_module(name: str) -> bool:
    path = ROOT / name.replace(".", "/")
    return path.is_dir() or path.with_suffix(".py").is_file()


def test_each_attribute_is_assigned_by_a_statement_of_its_own(trees: dict[Path, ast.Module]) -> None:
    found = {relative_name(path): lines for path, tree in trees.items() if (lines := tuple_assignments(tree))}
    assert found == {}


def test_the_package_has_eighteen_rooms_in_at_most_twelve_layers() -> None:
    found = {path.stem for path in (ROOT / "bulltask").glob("*") if path.suffix == ".py" or any(path.glob("*.py"))}
    assert found - forwarding_modules() - {"__init__", "__main__"} == ROOMS == heights().keys()
    assert len(contract()["layers"]) <= MAX_LAYERS
    listed = " \u203a ".join(f"`{layer}`" for layer in contract()["layers"])
    assert listed in " ".join((ROOT / "CONTRIBUTING.md").read_text().split()), "CONTRIBUTING.md lists the layers"


def test_a_forwarding_module_has_at_most_fifteen_lines_and_defines_nothing() -> None:
    for name in forwarding_modules():
        text = (ROOT / f"bulltask/{name}.py").read_text()
        assert len(text.splitlines()) <= FORWARDING_LINES, name
        kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        assert [node for node in ast.walk(ast.parse(text)) if isinstance(node, kinds)] == [], name


def test_no_room_imports_from_a_room_above_it(trees: dict[Path, ast.Module]) -> None:
    found = {}
    for path, tree in trees.items():
        room = path.relative_to(ROOT / "bulltask").parts[0].removesuffix(".py")
        if room in ROOMS and (names := upward(room, tree)):
            found[relative_name(path)] = names
    assert found == {}


@pytest.mark.parametrize(
    "source",
    [
        "from bulltask.worker.run import run_worker",
        "import bulltask.cli.main",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from bulltask.app import App",
        "def call():\n    from bulltask.queue.context import QueueContext",
        "from bulltask.events import Bus",
        "from bulltask import App",
        "from bulltask import celery",
        "importlib.import_module('bulltask.worker.run')",
        "from bulltask.embedded.server import EmbeddedServer",
    ],
)
def test_an_import_from_above_is_found_in_every_form(source: str) -> None:
    assert upward("registry", ast.parse(source))
    allowed = source.replace("bulltask.cli.main", "bulltask.app").replace("celery", "errors")
    assert not upward("testing", ast.parse(allowed))


def test_a_worker_imports_nothing_large_before_it_needs_it() -> None:
    program = "import sys, bulltask.cli.main, bulltask.cli.worker, bulltask.worker.run; print(*sys.modules)"
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    late = {"bulltask.queue.aio", "bulltask.queue.sync", "bulltask.outbox", "prometheus_client", "pydantic"}
    late |= {"bulltask.embedded.server", "bulltask.queue.context", "bulltask.queue.overview"}
    late |= {"bulltask.registry.canvas_plan", "bulltask.transport.cluster", "email.parser", "zoneinfo"}
    assert late & set(result.stdout.split()) == set()


def test_the_repository_contains_only_bulltasks_lua_scripts() -> None:
    listed = subprocess.run(["git", "ls-files", "*.lua"], cwd=ROOT, capture_output=True, text=True, check=True)
    foreign = [name for name in listed.stdout.splitlines() if Path(name).parent != Path("bulltask/lua/bulltask")]
    assert foreign == [], (
        "BullMQ's scripts come from its wheel during the build; bulltask's are in bulltask/lua/bulltask"
    )


def test_lock_files_contain_no_package_index_url() -> None:
    # A mirror's address in a lock file makes the install fail on a machine that cannot reach the mirror.
    for name in ("requirements-dev.lock", "tools/requirements-release.txt", "tools/requirements-build.txt"):
        assert "://" not in (ROOT / name).read_text()
    assert '"resolved"' not in (ROOT / "tests/interop/package-lock.json").read_text()


def test_every_locked_version_has_a_hash() -> None:
    for name in ("requirements-dev.lock", "tools/requirements-release.txt", "tools/requirements-build.txt"):
        lines = (ROOT / name).read_text().replace("\\\n", " ").splitlines()
        requirements = [line for line in lines if line.strip() and not line.startswith("#")]
        assert [line for line in requirements if "==" not in line or "--hash=sha256:" not in line] == []


def test_the_build_has_one_version_of_each_requirement() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    (backend,) = project["build-system"]["requires"]
    manifest = json.loads((ROOT / "bulltask/lua/manifest.json").read_text())
    assert backend in (ROOT / "tools/requirements-release.in").read_text().split()
    assert f"\n{manifest['source']} " in (ROOT / "tools/requirements-build.txt").read_text()


LOADERS = {"cloudpickle", "dill", "marshal", "pickle", "shelve", "yaml"}
SUSPICIOUS = re.compile(rf"import.*\b({'|'.join(LOADERS)})\b|(?<![.\w])(eval|exec|compile)\(|shell=")


def test_only_one_module_can_run_code_from_data() -> None:
    """A pickle runs code when it is loaded, so only the module whose callers verify signatures may load one."""
    found = set()
    for path in package_files():
        text = path.read_text()
        for node in ast.walk(ast.parse(text)) if SUSPICIOUS.search(text) else ():
            match node:
                case ast.Import(names=names) if LOADERS & {alias.name.partition(".")[0] for alias in names}:
                    found.add(relative_name(path))
                case ast.ImportFrom(module=str(module)) if module.partition(".")[0] in LOADERS:
                    found.add(relative_name(path))
                case ast.Call(func=ast.Name(id="eval" | "exec" | "compile")):
                    found.add(relative_name(path))
                case ast.keyword(arg="shell", value=ast.Constant(value=True)):
                    found.add(relative_name(path))
                case _:
                    pass
    assert found == {"bulltask/jobs/payloads.py"}
