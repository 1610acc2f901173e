"""Finds the setting for a name, which may be bulltask's or Celery's."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from typing import Any, Final

from bulltask.config.celery_settings import CELERY_SETTINGS, CUSTOM_SCHEDULER, current_name
from bulltask.config.settings import SETTINGS
from bulltask.config.urls import SecretUrl
from bulltask.errors import ConfigError
from bulltask.errors.suggestions import nearest
from bulltask.user_warnings import warn_user

__all__ = ["check_same_meaning", "constructor_settings", "explain", "resolve"]

_CLOSE: Final = 0.75
"""The minimum similarity of a suggestion, 0 to 1. Names of settings are similar, so a lower value would mislead."""

_RENAMED_ARGUMENTS: Final = {"broker": "broker_url", "backend": "result_backend"}
_APP_ARGUMENTS: Final = ("changes", "config_source", "namespace", "set_as_current", "task_cls")
_REMOVED_ARGUMENTS: Final = {
    **dict.fromkeys(["amqp", "control", "events", "loader", "log"], "bulltask has no equivalent"),
    "autofinalize": "a task is registered when it is defined",
    "fixups": "the worker sets Django up if DJANGO_SETTINGS_MODULE is set",
    "main": "the first argument is the name: App('shop')",
    "strict_typing": "arguments are always checked when a task is called",
    "tasks": "decorate functions with @app.task",
}
"""Arguments of Celery's constructor that have no meaning in bulltask, with the reason."""


def resolve(name: str, value: object, label: str) -> str | None:
    """Return the setting to which a value applies; if the value has no effect, warn and return ``None``.

    Args:
        name: The name of a setting, bulltask's or Celery's.
        value: Its value.
        label: The name as the user wrote it, such as ``CELERY_TASK_SERIALIZER``.

    Raises:
        ConfigError: The name is unknown, or it is one of Celery's settings that must not be ignored.
    """
    if name in SETTINGS:
        return name
    celery = CELERY_SETTINGS.get(name)
    if celery is None:
        raise ConfigError(explain(name, label))
    if celery.replacement:
        return celery.replacement
    if not celery.is_redundant(value):
        if celery.rejected:
            raise ConfigError(celery.message(label))
        warn_user(celery.message(label))
    return None


def explain(name: str, label: str = "") -> str:
    """Return the message for a name that is not a setting: what to use instead, or the nearest name."""
    label = label or name
    if name in CELERY_SETTINGS:
        return CELERY_SETTINGS[name].message(label)
    known = [*SETTINGS, *CELERY_SETTINGS]
    prefix = label[: -len(name)] if label.lower().endswith(name.lower()) else ""
    if current := current_name(name, known) or current_name(label, known):
        return f"unknown setting {label!r:.200}: it is an old Celery name; use {_as_written(current, prefix)}"
    if name.lower().startswith("redbeat_"):
        return f"unknown setting {label!r:.200}: it belongs to RedBeat, but {CUSTOM_SCHEDULER}"
    match = nearest(name.lower(), known, _CLOSE)
    if match in CELERY_SETTINGS and CELERY_SETTINGS[match].rejected:
        return f"unknown setting {label!r:.200}. {CELERY_SETTINGS[match].message(match)}"
    if not match:
        return f"unknown setting {label!r:.200}"
    return f"unknown setting {label!r:.200}; did you mean {_as_written(match, prefix)!r:.200}?"


def _as_written(name: str, prefix: str) -> str:
    """Return a setting's name as in the user's namespace, such as ``CELERY_``."""
    return prefix + name.upper() if prefix.isupper() else prefix + name


def constructor_settings(broker_url: SecretUrl | None, given: Mapping[str, object]) -> dict[str, object]:
    """Return the settings in the arguments of an app's constructor, which may be Celery's.

    Raises:
        TypeError: An argument of Celery's has no meaning, or the URL is given twice.
    """
    settings: dict[str, object] = {} if broker_url is None else {"broker_url": broker_url}
    changes = given.get("changes") or {}
    for name, value in {**given, **(changes if isinstance(changes, Mapping) else {})}.items():
        if name in _REMOVED_ARGUMENTS and value is not None:
            raise TypeError(f"App has no argument {name!r:.200}, unlike Celery: {_REMOVED_ARGUMENTS[name]}")
        setting = _RENAMED_ARGUMENTS.get(name, name)
        if name in _APP_ARGUMENTS or (name != setting and value is None):
            continue
        if setting in settings:
            raise TypeError(f"App got {setting} twice: as {setting} and as {name}")
        settings[setting] = value
    return settings


def check_same_meaning(found: Mapping[str, tuple[str, Any]]) -> None:
    """Reject values that have a different meaning in Celery.

    Raises:
        ConfigError: ``result_expires`` is 0, which keeps results forever in Celery, but not at all in bulltask.
    """
    for label, (name, value) in found.items():
        if name == "result_expires" and value in (0, timedelta(0)) and value is not None:
            raise ConfigError(
                f"{label} is 0: Celery then keeps results forever, but bulltask removes them immediately; set "
                "None to keep them, or write app.conf.result_expires = 0 to remove them"
            )
