"""Rules for the code base: no ``time.sleep``, only bulltask's Lua scripts, one module that can run code from data."""

from __future__ import annotations

import ast
import json
import re
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parent.parent


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
    for node in ast.walk(ast.parse(path.read_text().replace("asyncio.sleep(0)", "pause"))):
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
