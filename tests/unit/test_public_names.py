"""What the package promises: its names, and that each of them says what it is."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import bulltask
from bulltask import errors
from bulltask.errors import BulltaskError, Interrupt

PACKAGE = Path(bulltask.__file__).parent

EXPECTED = {
    "App",
    "AsyncResult",
    "AsyncTask",
    "BrokerError",
    "BrokerUnavailableError",
    "BulltaskError",
    "ConfigError",
    "Context",
    "ErrorCategory",
    "JobState",
    "PermanentError",
    "Request",
    "ResultTimeoutError",
    "Retry",
    "Signature",
    "SoftTimeLimitExceeded",
    "Task",
    "TaskError",
    "TaskCancelled",
    "TaskRevokedError",
    "TimeLimitExceeded",
    "TransientError",
    "categorize_error",
    "crontab",
    "shared_task",
}

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def test_the_public_names_are_these_and_few() -> None:
    assert set(bulltask.__all__) == EXPECTED
    assert len(bulltask.__all__) == len(EXPECTED) <= 25


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_each_public_name_exists_and_has_a_text(name: str) -> None:
    found = getattr(bulltask, name)
    assert inspect.getdoc(found)
    assert found.__module__.startswith("bulltask.")


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_errors_are_of_one_family(name: str) -> None:
    found = getattr(bulltask, name)
    if isinstance(found, type) and issubclass(found, BaseException):
        assert issubclass(found, BulltaskError | Interrupt)


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def is_public(name: str) -> bool:
    return not name.startswith("_")


def public_definitions(node: ast.AST, way: str) -> Iterator[tuple[str, Definition]]:
    """Public classes, functions and methods, by their way from the module; what stands in functions is nobody's."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, Definition) and is_public(child.name):
            yield f"{way}.{child.name}", child
            if isinstance(child, ast.ClassDef):
                yield from public_definitions(child, f"{way}.{child.name}")


def needs_text(function: Definition) -> bool:
    """An overload's text stands at the implementation, a setter's at the property."""
    words = {word for decorator in function.decorator_list for word in re.split(r"\W", ast.unparse(decorator))}
    return not words & {"overload", "setter"}


def own_nodes(node: ast.AST) -> Iterator[ast.AST]:
    """What a function itself does; functions inside it are called by others."""
    for child in ast.iter_child_nodes(node):
        if not isinstance(child, Definition):
            yield child
            yield from own_nodes(child)


def raised(function: Definition) -> set[str]:
    """Errors of ours, or of Python's for wrong arguments, that a function itself raises."""
    nodes = list(own_nodes(function))
    if any(isinstance(node, ast.Yield | ast.YieldFrom) for node in nodes):
        return set()  # an operation: its text stands at the methods that perform it
    calls = (node.exc for node in nodes if isinstance(node, ast.Raise))
    names = {call.func.id for call in calls if isinstance(call, ast.Call) and isinstance(call.func, ast.Name)}
    return names & {*errors.__all__, "TypeError", "ValueError"}


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_everything_public_has_a_docstring(path: Path) -> None:
    module = ast.parse(path.read_text())
    found = list(public_definitions(module, path.stem))
    bare = [way for way, definition in found if needs_text(definition) and not ast.get_docstring(definition)]
    if found and path.name != "__init__.py" and not ast.get_docstring(module):
        bare.append(path.stem)
    assert bare == []


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_what_a_public_function_raises_stands_in_its_docstring(path: Path) -> None:
    silent = {
        f"{way}: {error}"
        for way, definition in public_definitions(ast.parse(path.read_text()), path.stem)
        if not isinstance(definition, ast.ClassDef) and needs_text(definition)
        for error in raised(definition)
        if error not in (ast.get_docstring(definition) or "").partition("Raises:")[2]
    }
    assert silent == set()


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_module_says_which_of_its_names_are_for_others(path: Path) -> None:
    module = ast.parse(path.read_text())
    listed = [
        [ast.literal_eval(item) for item in node.value.elts]
        for node in module.body
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.List)
        and any(isinstance(target, ast.Name) and target.id == "__all__" for target in node.targets)
    ]
    defined = {node.name for node in module.body if isinstance(node, Definition)}
    if any(is_public(name) for name in defined) and path.name != "build_hook.py":
        assert len(listed) == 1, "no __all__"
    assert [name for names in listed for name in names if not is_public(name)] == []
