"""Packages import their modules lazily, and all their names are available."""

from __future__ import annotations

import ast
import graphlib
import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import bulltask
from tests.support.programs import ROOT

LAZY = ("bulltask", "bulltask.queue", "bulltask.lake", "bulltask.spark")
DATA_SOURCE = "bulltask.spark.connector"


def imported_modules(program: str) -> set[str]:
    """Return the modules that a program imports in a new process, without the standard library."""
    program = f"{program}; import sys; print(*(name for name in sys.modules if name.split('.')[0] not in {{*known}}))"
    code = f"import sys; known = {{*sys.stdlib_module_names, *sys.modules}}; {program}"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert run.returncode == 0, run.stderr
    return set(run.stdout.split())


def type_checker_imports(package: str) -> dict[str, str]:
    """Return the names that a package imports for type checkers, with their modules."""
    path = importlib.import_module(package).__file__
    assert path is not None
    blocks = [node for node in ast.parse(Path(path).read_text()).body if isinstance(node, ast.If)]
    nodes = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in nodes for name in node.names}


def test_importing_bulltask_imports_no_other_module() -> None:
    assert imported_modules("import bulltask") == {"bulltask"}


def test_importing_errors_does_not_import_a_redis_client() -> None:
    assert imported_modules("from bulltask import Retry, ConfigError; import bulltask.queue") == {
        "bulltask", "bulltask.jobs", "bulltask.jobs.errors", "bulltask.queue",
    }  # fmt: skip


def test_a_program_that_sends_jobs_of_tasks_imports_no_queues_and_no_events() -> None:
    modules = imported_modules("from bulltask import App; task = App('shop').task(name='add')(lambda x: x); task.s(1)")
    assert "bulltask.transport.broker" in modules
    unused = {"bulltask.queue.events", "bulltask.queue.aio.queue", "bulltask.observe.events", "bulltask.worker"}
    assert not modules & unused


@pytest.mark.slow
@pytest.mark.parametrize("module", [DATA_SOURCE, "bulltask.spark.lifecycle"])
def test_spark_executors_import_no_app_and_no_queue(module: str) -> None:
    modules = imported_modules(f"import {module}")
    assert module in modules
    assert (
        modules
        & {"bulltask.app", "bulltask.queue.aio.queue", "bulltask.registry.task", "bulltask.observe.events", "click"}
        == set()
    )
    assert modules & {"structlog", "prometheus_client"} == set()


@pytest.mark.parametrize("package", LAZY)
def test_lazy_names_match_the_imports_for_type_checkers(package: str) -> None:
    module = importlib.import_module(package)
    assert type_checker_imports(package) == {**module._MODULES, **getattr(module, "_ALIASES", {})}
    assert sorted(module._MODULES) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", LAZY)
def test_an_unknown_name_raises_an_attribute_error(package: str) -> None:
    for name in ("nothing", "_nothing", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute '{name}'"):
            getattr(importlib.import_module(package), name)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {package} import nothing")


def test_a_submodule_is_an_attribute_before_it_is_imported() -> None:
    program = "import bulltask; bulltask.errors.ConfigError; bulltask.schedules.crontab()"
    assert "bulltask.schedules" in imported_modules(program)


def test_a_star_import_imports_all_public_names() -> None:
    names: dict[str, object] = {}
    exec("from bulltask import *", names)
    assert {name: names[name] for name in bulltask.__all__} == {
        name: getattr(bulltask, name) for name in bulltask.__all__
    }


def module_level_imports(node: ast.AST) -> Iterator[ast.ImportFrom | ast.Import]:
    """Yield the imports of a module that are neither in functions nor for type checkers only."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom | ast.Import):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.expr):
            yield from module_level_imports(child)


def test_modules_have_no_import_cycles() -> None:
    paths = (ROOT / "bulltask").rglob("*.py")
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        imports = set()
        for node in module_level_imports(ast.parse(path.read_text())):
            for name in node.names:
                imported = f"{node.module}.{name.name}" if isinstance(node, ast.ImportFrom) else name.name
                imports.add(imported if imported in files else imported.rpartition(".")[0])
        graph[module] = (imports & set(files)) - {"bulltask"}
    assert len(graph) > 200
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
