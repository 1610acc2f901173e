"""The public names of the package, and their docstrings."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bulltask
from bulltask import App, Context, Request
from bulltask.errors import BulltaskError, Interrupt
from bulltask.jobs import errors
from tests.support.syntax_trees import package_trees
from tools.public_surface import PUBLIC

PACKAGE = Path(bulltask.__file__).parent

EXPECTED = {
    "App",
    "AsyncResult",
    "AsyncTask",
    "BatchJob",
    "BrokerError",
    "BrokerUnavailableError",
    "BulltaskError",
    "Celery",
    "ConfigError",
    "Context",
    "ErrorCategory",
    "GroupResult",
    "JobState",
    "Middleware",
    "PermanentError",
    "Request",
    "ResultSet",
    "ResultTimeoutError",
    "Retry",
    "Signature",
    "StampingVisitor",
    "SoftTimeLimitExceeded",
    "Task",
    "TaskError",
    "TaskCancelled",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TransientError",
    "allow_join_result",
    "categorize_error",
    "chain",
    "chord",
    "crontab",
    "current_app",
    "current_task",
    "get_task_logger",
    "group",
    "schedule",
    "shared_task",
    "signature",
}

REFERENCE = PACKAGE.parent / "docs/reference/app-and-tasks.md"

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_the_package_exports_the_expected_names() -> None:
    assert set(bulltask.__all__) == EXPECTED
    assert len(bulltask.__all__) == len(EXPECTED) <= 40


def test_each_public_name_exists_and_has_a_docstring() -> None:
    values = {name: getattr(bulltask, name) for name in EXPECTED}
    assert [name for name, value in values.items() if not inspect.getdoc(value)] == []
    assert [name for name, value in values.items() if not value.__module__.startswith("bulltask.")] == []


def test_public_errors_derive_from_bulltask_error_or_interrupt() -> None:
    values = [getattr(bulltask, name) for name in EXPECTED]
    errors = [value for value in values if isinstance(value, type) and issubclass(value, BaseException)]
    assert [error for error in errors if not issubclass(error, BulltaskError | Interrupt)] == []


@pytest.fixture(scope="module")
def modules() -> dict[Path, ast.Module]:
    """The syntax tree of each module in the package."""
    return {path.relative_to(PACKAGE): tree for path, tree in package_trees().items()}


@pytest.fixture(scope="module")
def documented() -> dict[str, set[str]]:
    """The names in the first columns of the reference, by section."""
    sections = REFERENCE.read_text().split("\n## ")[1:]
    rows = {text.partition("\n")[0]: re.findall(r"^\| (`.*?) \|", text, re.MULTILINE) for text in sections}
    return {title: {name for row in cells for name in re.findall(r"`(\w+)`", row)} for title, cells in rows.items()}


@pytest.mark.parametrize(
    ("kind", "sections"),
    [
        ("App", ["App"]),
        ("Task", ["Task", "In a running job"]),
        ("AsyncTask", ["Task", "In a running job"]),
        ("Context", ["Context", "In a running job"]),
        ("AsyncResult", ["AsyncResult"]),
    ],
)
def test_what_an_editor_completes_is_documented(
    documented: dict[str, set[str]], kind: str, sections: list[str]
) -> None:
    app = App("names")

    @app.task
    def task() -> None: ...

    @app.task
    async def async_task() -> None: ...

    values = {"App": app, "Task": task, "AsyncTask": async_task, "AsyncResult": app.result("1")}
    values["Context"] = Context(Request(), task=task)
    names = {name for name in dir(values[kind]) if is_public(name)}
    if kind == "Context":
        names |= {"state"}  # found by __getattr__
    assert names == set[str]().union(*(documented[section] for section in sections))


def is_public(name: str) -> bool:
    return not name.startswith("_")


def public_definitions(node: ast.AST, parent: str) -> Iterator[tuple[str, Definition]]:
    """Yield public classes, functions and methods by their qualified name, without those inside functions."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition) and is_public(child.name):
            yield f"{parent}.{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child, f"{parent}.{child.name}")


def needs_docstring(function: Definition) -> bool:
    """Return whether a function needs a docstring; an overload and a setter do not."""
    names = {name for decorator in function.decorator_list for name in re.split(r"\W", ast.unparse(decorator))}
    return not names & {"overload", "setter"}


def body_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a function without those of nested functions and classes."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield child
            yield from body_nodes(child)


def raised_errors(function: Definition) -> set[str]:
    """Return the errors that a function itself raises: bulltask's, and Python's for invalid arguments."""
    nodes = list(body_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        return set()  # a sans-I/O operation: the methods that run it document its errors
    calls = [node.exc for node in nodes if isinstance(node, ast.Raise)]
    calls += [call.args[0] for call in calls if isinstance(call, ast.Call) and ast.unparse(call.func) == "incompatible"]
    names = {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    return names & {*errors.__all__, "TypeError", "ValueError"} - {"incompatible"}  # which marks an error


def test_public_definitions_have_a_docstring(modules: dict[Path, ast.Module]) -> None:
    inherited = {"registry/pydantic_types.py"}  # its converters implement a protocol
    undocumented = []
    for path, module in modules.items():
        definitions = list(public_definitions(module, str(path)))
        if str(path) in inherited:
            definitions = [pair for pair in definitions if pair[1].name not in {"decode", "encode", "schema"}]
        undocumented += [name for name, node in definitions if needs_docstring(node) and not ast.get_docstring(node)]
        if definitions and path.name != "__init__.py" and not ast.get_docstring(module):
            undocumented.append(str(path))
    assert undocumented == []


def test_docstrings_list_the_errors_that_a_public_function_raises(modules: dict[Path, ast.Module]) -> None:
    undocumented = {
        f"{name}: {error}"
        for path, module in modules.items()
        for name, definition in public_definitions(module, str(path))
        if not isinstance(definition, ast.ClassDef) and needs_docstring(definition)
        for error in raised_errors(definition)
        if not re.search(rf"[Rr]aises?\b.*\b{error}\b", ast.get_docstring(definition) or "", re.DOTALL)
        and f"raises ``{error}``" not in (ast.get_docstring(module) or "")  # as all functions of the module do
    }
    assert undocumented == set()


def star_imports(modules: dict[Path, ast.Module]) -> set[str]:
    nodes = [node for tree in modules.values() for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {str(node.module) for node in nodes if any(alias.name == "*" for alias in node.names)}


def test_modules_that_are_public_or_star_imported_list_their_names(modules: dict[Path, ast.Module]) -> None:
    """Elsewhere, a name without an underscore is for other modules. A list would hide that none of them uses it."""
    wrong = {}
    needed = {*PUBLIC, *star_imports(modules)}
    for path, module in modules.items():
        listed = [
            [ast.literal_eval(item) for item in node.value.elts]
            for node in module.body
            if isinstance(node, ast.Assign)
            and isinstance(node.value, ast.List)
            and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
        ]
        name = ".".join(["bulltask", *path.with_suffix("").parts]).removesuffix(".__init__")
        defined = {node.name for node in module.body if isinstance(node, Definition)}
        if name in needed and any(map(is_public, defined)) and len(listed) != 1:
            wrong[path] = "no __all__"
        if private := [name for names in listed for name in names if not is_public(name)]:
            wrong[path] = f"private names in __all__: {private}"
    assert wrong == {}
