"""Importing a package imports no more than is asked for, and each name is there all the same."""

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
READERS = "bulltask.spark.connector.data_source"


def imported(program: str) -> set[str]:
    """What a new process imports with a program, beside what Python comes with."""
    told = f"{program}; import sys; print(*(one for one in sys.modules if one.split('.')[0] not in {{*known}}))"
    code = f"import sys; known = {{*sys.stdlib_module_names, *sys.modules}}; {told}"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=100)
    assert ran.returncode == 0, ran.stderr
    return set(ran.stdout.split())


def imports_for_checkers(package: str) -> dict[str, str]:
    """The names that a package imports for type checkers, and from where."""
    found = importlib.import_module(package).__file__
    assert found is not None
    blocks = [node for node in ast.parse(Path(found).read_text()).body if isinstance(node, ast.If)]
    nodes = [node for block in blocks for node in block.body if isinstance(node, ast.ImportFrom)]
    return {name.name: str(node.module) for node in nodes for name in node.names}


def test_the_package_itself_imports_nothing() -> None:
    assert imported("import bulltask") == {"bulltask"}


def test_the_errors_come_without_a_client_of_redis() -> None:
    assert imported("from bulltask import Retry, ConfigError; import bulltask.queue") == {
        "bulltask", "bulltask.errors", "bulltask.errors.interrupts", "bulltask.queue",
    }  # fmt: skip


@pytest.mark.slow
def test_spark_executors_import_no_app_and_no_queue() -> None:
    found = imported(f"import {READERS}")
    assert READERS in found
    assert (
        found & {"bulltask.app", "bulltask.queue.queue", "bulltask.registry", "bulltask.events.listeners", "click"}
        == set()
    )
    assert found & {"structlog", "prometheus_client"} == set()


@pytest.mark.parametrize("package", LAZY)
def test_every_lazy_name_is_the_one_that_type_checkers_see(package: str) -> None:
    module = importlib.import_module(package)
    assert imports_for_checkers(package) == module._HOME
    assert sorted(module._HOME) == sorted(module.__all__)
    assert set(module.__all__) <= set(dir(module))


@pytest.mark.parametrize("package", LAZY)
def test_an_unknown_name_is_an_attribute_error(package: str) -> None:
    for name in ("nothing", "_nothing", "__wrapped__"):
        with pytest.raises(AttributeError, match=f"module '{package}' has no attribute '{name}'"):
            getattr(importlib.import_module(package), name)
    with pytest.raises(ImportError, match="cannot import name 'nothing'"):
        exec(f"from {package} import nothing")


def test_a_module_is_an_attribute_even_if_it_was_not_imported() -> None:
    assert "bulltask.clock" in imported("import bulltask; bulltask.errors.ConfigError; bulltask.clock.wall_ms()")


def test_a_star_import_has_all_names() -> None:
    names: dict[str, object] = {}
    exec("from bulltask import *", names)
    assert {name: names[name] for name in bulltask.__all__} == {
        name: getattr(bulltask, name) for name in bulltask.__all__
    }


def at_import(node: ast.AST) -> Iterator[ast.ImportFrom | ast.Import]:
    """What is imported with a module: not in functions, nor for type checkers."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ImportFrom | ast.Import):
            yield child
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            continue
        elif not isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from at_import(child)


def test_any_module_can_be_imported_first() -> None:
    paths = (ROOT / "bulltask").rglob("*.py")
    files = {".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path for path in paths}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        found = set()
        for node in at_import(ast.parse(path.read_text())):
            for name in node.names:
                inside = f"{node.module}.{name.name}" if isinstance(node, ast.ImportFrom) else name.name
                found.add(inside if inside in files else inside.rpartition(".")[0])
        graph[module] = (found & set(files)) - {"bulltask"}
    assert len(graph) > 300
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError
