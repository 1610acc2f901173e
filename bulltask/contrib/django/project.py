"""The :class:`bulltask.App` of a Django project, and access to Django's tasks API.

:func:`project_app` finds or creates the app. The tasks API is optional: the functions below it import ``django.tasks``
(Django 6) or the package ``django-tasks`` only when they are called.
"""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Mapping
from importlib import import_module
from typing import Any, Final

from django.conf import settings
from django.core import checks

from bulltask.app import App
from bulltask.config.parsers import parse_names
from bulltask.embedded import import_directory
from bulltask.jobs.errors import ConfigError
from bulltask.registry.request import current_sender
from bulltask.registry.tasks import find_app
from bulltask.worker.beat import entry_problems, unregistered_tasks

__all__ = ["api", "check_schedule", "normalize_json", "project_app", "task_backends"]

_TASKS_PACKAGES: Final = ("django.tasks", "django_tasks")


@functools.cache
def project_app() -> App:
    """Return the project's app.

    The project's app is the first of these:

    1. the app that the setting ``BULLTASK_APP`` names (``"shop.bulltask:app"``);
    2. an app that the project has already created, for example in ``shop/celery.py``;
    3. a new app with the settings in the dictionary ``BULLTASK`` and those whose names begin with ``CELERY_``.

    Raises:
        ConfigError: A setting has an unknown name or an invalid value.
        AppNotFoundError: ``BULLTASK_APP`` does not name an app.
    """
    spec = getattr(settings, "BULLTASK_APP", None)
    app = find_app(spec, App) if spec else _existing_app() or _new_app()
    app.autodiscover_tasks(_create_task_backends)
    return app


def check_schedule(**_kwargs: object) -> list[checks.CheckMessage]:
    """Check ``beat_schedule``, as a worker does when it starts: one of Django's system checks."""
    app = project_app()
    if not app.conf.beat_schedule or not os.environ.get("DJANGO_SETTINGS_MODULE"):  # as for the import of tasks
        return []
    try:
        # Not load_tasks(), which runs these checks, and prepares the process for running tasks.
        app._import_modules([*parse_names(app.conf.imports, "imports"), *parse_names(app.conf.include, "include")])
        if urlconf := getattr(settings, "ROOT_URLCONF", None):
            import_module(urlconf)  # tasks may be defined in the modules of views, too
    except Exception as exc:  # noqa: BLE001 - any error in the project's modules
        text = f"the modules with tasks cannot be imported: {type(exc).__name__}: {exc}"
        return [checks.Error(text, id="bulltask.E003")]
    problems: list[checks.CheckMessage] = [checks.Error(text, id="bulltask.E002") for text in entry_problems(app)]
    return problems + [
        checks.Warning(
            f"beat_schedule[{entry!r}]: the task {task!r} is not registered",
            hint="Check the task's name, or import its module: its jobs wait until a worker has the task.",
            id="bulltask.W001",
        )
        for entry, task in unregistered_tasks(app).items()
    ]


def _existing_app() -> App | None:
    try:
        sender = current_sender()
    except ConfigError:
        return None
    return sender if isinstance(sender, App) else None


def _new_app() -> App:
    given: Any = getattr(settings, "BULLTASK", {})
    if not isinstance(given, Mapping):
        raise ConfigError(f"settings.BULLTASK must be a dictionary of bulltask's settings, not {given!r}")
    app = App((settings.SETTINGS_MODULE or "django").partition(".")[0])
    if settings.SETTINGS_MODULE:
        app._directory = import_directory(vars(import_module(settings.SETTINGS_MODULE)))
    app.conf.timezone = settings.TIME_ZONE
    app.config_from_object("django.conf:settings", namespace="CELERY")
    app.conf.update(given)
    app.autodiscover_tasks()
    return app


def _create_task_backends() -> list[str]:
    """Create the backends of Django's ``TASKS``, so that workers know their queues.

    It returns no packages, although it is registered as a function that returns packages with tasks.
    """
    if hasattr(settings, "TASKS") and _tasks_package() is not None:
        list(task_backends().all())
    return []


@functools.cache
def _tasks_package() -> str | None:
    """Return the name of the package, ``None`` if neither is installed."""
    return next((name for name in _TASKS_PACKAGES if importlib.util.find_spec(name) is not None), None)


def api(module: str) -> Any:
    """Import a module of the package: ``base``, ``backends.base``, ``exceptions`` or ``signals``."""
    name = _tasks_package()
    if name is None:
        raise ImportError(
            "BulltaskBackend needs Django 6 or newer, or the package django-tasks: pip install django-tasks"
        )
    return import_module(f"{name}.{module}")


def task_backends() -> Any:
    """Return the backends of the setting ``TASKS`` by their aliases."""
    return import_module(str(_tasks_package())).task_backends


def normalize_json(value: Any) -> Any:
    """Return a value as plain JSON, as Django does for arguments and results."""
    in_django = importlib.util.find_spec("django.utils.json") is not None and _tasks_package() == "django.tasks"
    return import_module("django.utils.json" if in_django else "django_tasks.utils").normalize_json(value)
