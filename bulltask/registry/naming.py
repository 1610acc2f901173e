"""Task names: ``module.function``, the same in the script that sends and in the worker that imports."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bulltask.errors import ConfigError

__all__ = ["source_location", "task_name"]


def task_name(function: Callable[..., Any]) -> str:
    """Return the automatic name of a task.

    A module that runs as a script is called ``__main__`` in its process, but has another name in the worker, which
    imports it. The task's name therefore contains the name that an import would use. (Celery names such a task
    ``__main__.f``, which no worker has registered.)

    Raises:
        ConfigError: The function has no usable name (a lambda, for example).
    """
    qualname = getattr(function, "__qualname__", "")
    if not qualname or "<lambda>" in qualname:
        raise ConfigError(f"{function!r:.200} has no usable name: set one with @app.task(name='…')")
    return f"{_module_name(function.__module__)}.{qualname.replace('<locals>.', '')}"


def source_location(function: Callable[..., Any]) -> str:
    """Return a function's ``file:line``, for messages."""
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
