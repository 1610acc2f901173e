"""Makes this interpreter look like Python on Windows: what is missing there is missing here.

The names come from typeshed, which mypy brings: everything that its stubs define only for other systems.
"""

from __future__ import annotations

import ast
import asyncio
import functools
import importlib
import selectors
import socket
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import mypy

__all__ = ["MODULES", "missing_names", "simulate_windows"]

MODULES = ("fcntl", "resource", "termios", "tty", "pty", "grp", "pwd", "syslog", "posix", "readline", "curses")
"""Modules that Windows does not have."""

_PARTLY = ("os", "signal", "socket", "time", "select", "mmap", "faulthandler", "asyncio", "socketserver")
_STUBS = Path(mypy.__file__).parent / "typeshed/stdlib"


def simulate_windows(imports: Callable[[], None]) -> None:
    """Remove what Windows lacks, for bulltask, which is then imported anew.

    Args:
        imports: Imports all of bulltask that is used afterwards, so that the standard library and other packages are
            loaded as they are on this system.
    """
    imports()
    for name in [name for name in sys.modules if name.partition(".")[0] == "bulltask"]:
        del sys.modules[name]
    setattr(socket, "socketpair", functools.partial(socket.socketpair, socket.AF_UNIX))  # for event loops  # noqa: B010
    selectors.DefaultSelector = selectors.SelectSelector  # type: ignore[misc, assignment]
    for name in MODULES:
        sys.modules[name] = None  # type: ignore[assignment]
    for name in _PARTLY:
        module = importlib.import_module(name)
        for attribute in missing_names(name):
            if hasattr(module, attribute):
                delattr(module, attribute)
    for name in ("add_reader", "add_writer", "add_signal_handler"):
        setattr(asyncio.SelectorEventLoop, name, _not_implemented)  # as in the event loop of Windows
    sys.platform = "win32"


def _not_implemented(*_: object) -> NoReturn:
    raise NotImplementedError


def missing_names(module: str) -> set[str]:
    """Return the names of a module that typeshed has only for systems other than Windows."""
    path = _STUBS / module
    stub = ast.parse((path / "__init__.pyi" if path.is_dir() else path.with_suffix(".pyi")).read_text())
    windows, others = (set(_names(stub.body, system)) for system in ("win32", "linux"))
    return others - windows


def _names(body: Sequence[ast.stmt], platform: str) -> Iterator[str]:
    for statement in body:
        if isinstance(statement, ast.If):
            taken = _is_true(statement.test, platform)
            yield from _names(statement.body if taken else statement.orelse, platform)
        elif isinstance(statement, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            yield statement.name
            if isinstance(statement, ast.ClassDef) and any(ast.unparse(base) == "IntEnum" for base in statement.bases):
                yield from _names(statement.body, platform)
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id
        elif isinstance(statement, ast.Assign):
            yield from (target.id for target in statement.targets if isinstance(target, ast.Name))
        elif isinstance(statement, ast.ImportFrom):
            yield from (alias.asname or alias.name for alias in statement.names)


def _is_true(test: ast.expr, platform: str) -> bool:
    """Evaluate a condition of a stub on the platform and the version."""
    return bool(eval(ast.unparse(test), {"sys": _System(platform), "TYPE_CHECKING": True}))


class _System:
    version_info = sys.version_info

    def __init__(self, platform: str) -> None:
        self.platform = platform
