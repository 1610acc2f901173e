"""Django, if the process uses it: its setup, its connections, and its installed apps as packages with tasks."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys

from bulltask.errors import ConfigError

__all__ = ["close_connections", "installed_packages", "run_checks", "set_up_django"]

_VARIABLE = "DJANGO_SETTINGS_MODULE"


def set_up_django() -> bool:
    """Call ``django.setup()`` if the environment names Django's settings, as Celery does before it imports tasks.

    Without it, a task module that imports a model would raise ``AppRegistryNotReady``.

    Returns:
        Whether Django is ready.
    """
    if not os.environ.get(_VARIABLE) or importlib.util.find_spec("django") is None:
        return False
    if not importlib.import_module("django.apps").apps.ready:
        importlib.import_module("django").setup()
    return True


def run_checks() -> None:
    """Run Django's system checks, as Celery's worker does: they import the URLconf, whose modules may define tasks.

    What the checks find is ignored, as in Celery. The environment variable ``CELERY_SKIP_CHECKS`` skips them.
    """
    if not os.environ.get("CELERY_SKIP_CHECKS"):
        importlib.import_module("django.core.checks").run_checks()


def close_connections() -> None:
    """Close the database connections of this thread, if Django is in use, so that forked children do not share them."""
    if "django.db" in sys.modules and importlib.import_module("django.apps").apps.ready:
        importlib.import_module("django.db").connections.close_all()


def installed_packages() -> list[str]:
    """Return the packages in ``INSTALLED_APPS``, for ``autodiscover_tasks()`` without arguments.

    Raises:
        ConfigError: This process does not use Django.
    """
    if not set_up_django():
        raise ConfigError(
            f"autodiscover_tasks() without packages needs Django and the environment variable {_VARIABLE}; pass the "
            "names of the packages, as in autodiscover_tasks(['shop', 'mail'])"
        )
    return [config.name for config in importlib.import_module("django.apps").apps.get_app_configs()]
