"""Django's tasks API: ``django.tasks`` in Django 6, or the package ``django-tasks`` for Django 5."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from typing import Any, Final

__all__ = ["api", "normalize_json", "package", "task_backends"]

_PACKAGES: Final = ("django.tasks", "django_tasks")


@functools.cache
def package() -> str | None:
    """Return the name of the package, ``None`` if neither is installed."""
    return next((name for name in _PACKAGES if importlib.util.find_spec(name) is not None), None)


def api(module: str) -> Any:
    """Import a module of the package: ``base``, ``backends.base``, ``exceptions`` or ``signals``.

    Raises:
        ImportError: Django is older than 6, and ``django-tasks`` is not installed.
    """
    name = package()
    if name is None:
        raise ImportError(
            "BulltaskBackend needs Django 6 or newer, or the package django-tasks: pip install django-tasks"
        )
    return importlib.import_module(f"{name}.{module}")


def task_backends() -> Any:
    """Return the backends of the setting ``TASKS`` by their aliases."""
    return importlib.import_module(str(package())).task_backends


def normalize_json(value: Any) -> Any:
    """Return a value as plain JSON, as Django does for arguments and results.

    Raises:
        TypeError, ValueError: The value cannot be represented in JSON.
    """
    in_django = importlib.util.find_spec("django.utils.json") is not None and package() == "django.tasks"
    return importlib.import_module("django.utils.json" if in_django else "django_tasks.utils").normalize_json(value)
