"""Discovery of the app that ``-A`` names, and of modules with tasks."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Final, TypeVar

from bulltask.errors import AppNotFoundError

__all__ = ["add_to_import_path", "find_app", "import_related"]

A = TypeVar("A")

ATTRIBUTES: Final = ("app", "bulltask", "celery", "application")
_FACTORY: Final = re.compile(r"(?i)app|celery|bulltask|create|make")
SUBMODULES: Final = ("app", "bulltask", "celery", "tasks", "main", "worker")


def add_to_import_path(directory: str | None = None) -> None:
    """Put ``directory`` (default: the current directory) first on the import path, as for a script in it."""
    path = str(Path(directory or ".").resolve())
    if path not in sys.path:
        sys.path.insert(0, path)


def find_app(spec: str, kind: type[A]) -> A:
    """Return the app that ``-A`` names.

    * ``pkg.mod:name``: the object ``name`` in that module; ``pkg.mod:name()`` calls a factory.
    * ``pkg.mod``: the app named ``app``, ``bulltask``, ``celery`` or ``application`` in that module, or its only app.
    * ``pkg``: if a package contains no app, its submodules ``app``, ``bulltask``, ``celery``, ``tasks``, ``main`` and
      ``worker`` are searched.
    * ``pkg.mod.name``: the same as ``pkg.mod:name``, as in Celery.

    Args:
        spec: The value of ``-A``.
        kind: The class of apps.

    Raises:
        AppNotFoundError: No app was found (the message lists what was tried), or more than one. Errors raised by the
            user's modules are not caught.
    """
    tried: list[str] = []
    if ":" in spec:
        module_name, _, name = spec.partition(":")
        app = _load_attribute(module_name, name, kind, tried)
    else:
        app = (
            _find_in_module(spec, kind, tried)
            or _find_in_submodules(spec, kind, tried)
            or _load_dotted(spec, kind, tried)
        )
    if app is None:
        lines = "".join(f"\n  - {line}" for line in tried)
        raise AppNotFoundError(f"no bulltask App found for {spec!r:.200}; tried, from {Path.cwd()}:{lines}")
    return app


def import_related(packages: Iterable[str] | Callable[[], Iterable[str]], related_name: str | None) -> list[str]:
    """Import ``package.related_name`` of each package that has it; return the imported names (Celery's autodiscover).

    Args:
        packages: Package names, including Django's ``shop.apps.ShopConfig``, or a function that returns them.
        related_name: The submodule; ``None`` imports the packages themselves.
    """
    imported = []
    for package in packages() if callable(packages) else packages:
        module = _import_package(package)
        name = f"{module.__name__}.{related_name}" if related_name else package
        if related_name is None or (hasattr(module, "__path__") and importlib.util.find_spec(name) is not None):
            importlib.import_module(name)
            imported.append(name)
    return imported


def _import_package(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        module_name, _, attribute = name.rpartition(".")
        if exc.name != name or not module_name:
            raise
        # Django's INSTALLED_APPS may name a class, whose attribute ``name`` is the package.
        package = getattr(getattr(importlib.import_module(module_name), attribute, None), "name", None)
        if not isinstance(package, str):
            raise
    return importlib.import_module(package)


def _load_attribute(module_name: str, name: str, kind: type[A], tried: list[str]) -> A | None:
    module = _import(module_name, tried)
    if module is None:
        return None
    value: Any = module
    called = name.endswith(")")
    for part in name.partition("(")[0].split("."):
        if not hasattr(value, part):
            tried.append(f"{_place_of(module)}: has no {name!r}; it {_describe_apps(module, kind)}")
            return None
        value = getattr(value, part)
    if called or inspect.isfunction(value):
        if needed := _required(value) if name.endswith("()") or not called else "those in the parentheses":
            tried.append(
                f"{module_name}:{name} needs arguments ({needed}), and -A calls a factory without any: write a module "
                f"with a line such as app = {name.partition('(')[0]}(…), and name that module"
            )
            return None
        value = value()
    if not isinstance(value, kind):
        tried.append(f"{module_name}:{name} is {type(value).__name__}, not an App")
        return None
    return value


def _required(factory: Callable[..., object]) -> str:
    """Return the names of a factory's required parameters."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except (TypeError, ValueError):  # a callable of C code
        return ""
    optional = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    return ", ".join(each.name for each in parameters if each.default is each.empty and each.kind not in optional)


def _find_in_module(module_name: str, kind: type[A], tried: list[str]) -> A | None:
    module = _import(module_name, tried)
    if module is None:
        return None
    for name in ATTRIBUTES:
        value = getattr(module, name, None)
        if isinstance(value, kind):
            return value
    apps = {id(value): (name, value) for name, value in vars(module).items() if isinstance(value, kind)}
    if len(apps) == 1:
        return next(iter(apps.values()))[1]
    if apps:  # searching further would choose one of these arbitrarily
        names = ", ".join(sorted(name for name, _ in apps.values()))
        raise AppNotFoundError(f"{module_name} has several apps ({names}): choose one with -A {module_name}:NAME")
    tried.append(f"{_place_of(module)}: {_describe_apps(module, kind)}")
    return None


def _find_in_submodules(module_name: str, kind: type[A], tried: list[str]) -> A | None:
    package = sys.modules.get(module_name)
    if package is None or not hasattr(package, "__path__"):
        return None
    for name in SUBMODULES:
        full = f"{module_name}.{name}"
        if importlib.util.find_spec(full) is None:
            tried.append(f"{full}: does not exist")
        elif (app := _find_in_module(full, kind, tried)) is not None:
            return app
    return None


def _load_dotted(spec: str, kind: type[A], tried: list[str]) -> A | None:
    module_name, _, name = spec.rpartition(".")
    if not module_name or spec in sys.modules:
        return None
    return _load_attribute(module_name, name, kind, tried)


def _import(name: str, tried: list[str]) -> ModuleType | None:
    if not all(part.isidentifier() for part in name.split(".")):
        tried.append(f"{name!r:.200}: is not a module name")
        return None
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not (name == exc.name or name.startswith(f"{exc.name}.")):
            raise  # the module exists; something that it imports does not
        tried.append(f"{name}: cannot be imported ({exc})")
        return None


def _describe_apps(module: ModuleType, kind: type[Any]) -> str:
    names = sorted(name for name, value in vars(module).items() if isinstance(value, kind))
    if names:
        return f"has the apps {', '.join(names)}"
    factories = [
        f"-A {module.__name__}:{name}"
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and _FACTORY.search(name)
    ]
    return f"has no App; if this is a factory of one, use {' or '.join(factories)}" if factories else "has no App"


def _place_of(module: ModuleType) -> str:
    """Return the module's name, and its file if it may be another module than the user expects."""
    name, file = module.__name__, getattr(module, "__file__", None)
    here = Path.cwd()
    if file is not None and Path(file).is_relative_to(here):
        return name
    path = here.joinpath(*name.split("."))
    hidden = next((each for each in (path.with_suffix(".py"), path / "__init__.py") if each.exists()), None)
    if hidden is None:
        return f"{name} ({file or 'built in'})"
    return f"{name} ({file or 'built in'}, which hides {hidden.relative_to(here)}: rename your module)"
