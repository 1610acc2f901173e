"""Task names: ``module.function``, the same in the script that sends and in the worker that imports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bulltask.errors import ConfigError

__all__ = ["task_name", "where"]


def task_name(function: Callable[..., Any]) -> str:
    """Return the automatic name of a task.

    A module that is run as a script is called ``__main__`` there and by its own name in the worker; the name it would
    be imported by is used in both (Celery names such tasks ``__main__.f``, and no worker knows them).

    Raises:
        ConfigError: the function has no usable name of its own (a lambda, or one defined inside a function).
    """
    qualname = getattr(function, "__qualname__", "")
    if not qualname or "<lambda>" in qualname:
        raise ConfigError(f"{function!r} has no name to make a task name of; give one: @app.task(name='…')")
    return f"{_module_name(function.__module__)}.{qualname.replace('<locals>.', '')}"


def where(function: Callable[..., Any]) -> str:
    """Return ``file:line`` of a function, for messages."""
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else repr(function)


def _module_name(module: str) -> str:
    if module != "__main__":
        return module
    main = sys.modules["__main__"]
    spec = getattr(main, "__spec__", None)
    if spec is not None:  # python -m package.module
        return str(spec.name).removesuffix(".__main__")
    file = getattr(main, "__file__", None)
    return Path(file).stem if file else module
