"""``SettingsMixin``: the settings of an app, and Celery's methods that read them from objects."""

from __future__ import annotations

import os

from bulltask.config.config import Settings
from bulltask.errors import ConfigError

__all__ = ["SettingsMixin"]


class SettingsMixin:
    """The settings of an app: a base class of ``App``.

    Attributes:
        conf: The settings.
    """

    conf: Settings

    def config_from_object(
        self, obj: object, *, namespace: str | None = None, silent: bool = False, force: bool = True
    ) -> None:
        """Read settings from an object (Celery's method); they are read immediately.

        Args:
            obj: A dictionary, a module, a class, any object with attributes, or the name of one: ``"shop.settings"``,
                ``"django.conf:settings"``. Imported modules, functions, classes and names with a leading underscore are
                not settings.
            namespace: Read only names that begin with it: ``CELERY`` reads ``CELERY_BROKER_URL``. Without it, all
                lower-case names are read.
            silent: Ignore a module that cannot be imported.
            force: Ignored: settings are always read immediately, as with ``force=True`` in Celery.

        Raises:
            ConfigError: A name is unknown (the message suggests a similar name), or a value is invalid.
            ImportError: The module cannot be imported.
        """
        del force
        try:
            self.conf.read_object(obj, namespace)
        except ImportError:
            if not silent:
                raise

    def config_from_envvar(self, variable_name: str, *, silent: bool = False) -> None:
        """Read settings from the module that an environment variable names (Celery's method).

        Raises:
            ConfigError: The variable is not set. Also raises the errors of :meth:`config_from_object`.
        """
        if module := os.environ.get(variable_name):
            self.config_from_object(module, silent=silent)
        elif not silent:
            raise ConfigError(f"the environment variable {variable_name} is not set: set it to the name of a module")
