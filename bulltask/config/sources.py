"""Settings from an object, a module or a TOML file, for ``App.config_from_object``, ``--config`` and pyproject.toml."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from bulltask.config.celery_settings import CELERY_SETTINGS, current_name
from bulltask.config.secret_settings import wrap_secrets
from bulltask.config.settings import SETTINGS
from bulltask.errors import ConfigError

__all__ = ["read_config", "read_object", "read_project_file"]

PROJECT_FILE: Final = "pyproject.toml"
TABLE: Final = "tool.bulltask"


def read_object(source: object, namespace: str | None = None) -> dict[str, tuple[str, Any]]:
    """Return the settings in an object: for each name as the user wrote it, the setting's name and its value.

    Args:
        source: A mapping, a module, a class, any object with attributes, or the name of one: ``pkg.module``,
            ``pkg.module:attribute``.
        namespace: Take only names that begin with this and ``_``, in the same case: ``CELERY`` takes
            ``CELERY_BROKER_URL``. Without it, all lower-case names are taken.

    Raises:
        ConfigError: The object does not exist, or a name is an old Celery name.
        ImportError: A module does not exist.
    """
    given = _load(source) if isinstance(source, str) else source
    if namespace:
        prefix = namespace if namespace.endswith("_") else f"{namespace}_"
        if prefix == "CELERY_":
            _reject_old_names(_names(given))
        names = (name for name in _names(given) if name.startswith(prefix))
        return {name: _setting(name.removeprefix(prefix).lower(), _value(given, name)) for name in names}
    settings = {}
    for name in _names(given):
        value = _value(given, name)
        if name.islower() and (isinstance(given, Mapping) or not _is_definition(value)):
            settings[name] = _setting(name, value)
        elif name.isupper() and (current := current_name(name, {*SETTINGS, *CELERY_SETTINGS})):
            raise ConfigError(
                f"{name} is either an old setting name or a name with a namespace prefix: use {current}, or "
                "config_from_object(…, namespace='CELERY') for names such as CELERY_BROKER_URL"
            )
    return settings


def read_config(name: str) -> dict[str, tuple[str, Any]]:
    """Return the settings of ``--config``: from a TOML file (``*.toml``), or from a module.

    Raises:
        ConfigError: The file or module cannot be read.
    """
    if name.endswith(".toml"):
        return _read_toml(Path(name), required=True)
    try:
        return read_object(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not (name == exc.name or name.startswith((f"{exc.name}.", f"{exc.name}:"))):
            raise  # the module exists; something that it imports does not
        raise ConfigError(f"cannot import {name!r:.200} (a file's name must end in .toml): {exc}") from exc


def read_project_file() -> tuple[str, dict[str, tuple[str, Any]]]:
    """Return the path and the settings of the nearest ``pyproject.toml``, in the current directory or above it."""
    try:
        directory = Path.cwd()
    except FileNotFoundError:  # the directory was removed
        return "", {}
    for parent in (directory, *directory.parents):
        if (path := parent / PROJECT_FILE).is_file():
            return str(path), _read_toml(path, required=False)
    return "", {}


def _read_toml(path: Path, *, required: bool) -> dict[str, tuple[str, Any]]:
    """Return the table ``[tool.bulltask]``; a required file may have its settings at the top instead."""
    import tomllib  # noqa: PLC0415 - only for a program whose directory has such a file

    try:
        text = path.read_text(encoding="utf-8")
        if not required and TABLE not in text:
            return {}  # avoids parsing a file without settings for bulltask
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read the settings in {path}: {exc}") from exc
    tool = content.get("tool", {})
    table = tool.get("bulltask") if isinstance(tool, dict) else None
    if table is None:
        table = content if required and path.name != PROJECT_FILE else {}
    if not isinstance(table, dict):
        raise ConfigError(f"[{TABLE}] in {path} must be a table, not {table!r:.200}")
    return {name: _setting(name, value) for name, value in table.items()}


def _load(name: str) -> object:
    module_name, _, attribute = name.partition(":")
    value: object = importlib.import_module(module_name)
    for part in filter(None, attribute.split(".")):
        if not hasattr(value, part):
            raise ConfigError(f"{name!r:.200} refers to {attribute!r:.200}, which module {module_name} does not have")
        value = getattr(value, part)
    return value


def _setting(name: str, value: Any) -> tuple[str, Any]:
    """Return a name and its value; a secret is wrapped here, before an error can show it."""
    return name, wrap_secrets({name: value})[name]


def _reject_old_names(names: Iterable[str]) -> None:
    """Reject ``CELERYD_CONCURRENCY``, which the namespace ``CELERY`` would silently leave out."""
    for name in names:
        old = name.startswith(("CELERYD_", "CELERYBEAT_"))
        if old and (current := current_name(name, {*SETTINGS, *CELERY_SETTINGS})):
            raise ConfigError(f"{name} is an old Celery name: use CELERY_{current.upper()}")


def _names(source: object) -> Iterable[str]:
    names: Iterable[object] = source if isinstance(source, Mapping) else dir(source)
    return [name for name in names if isinstance(name, str) and not name.startswith("_")]


def _value(source: object, name: str) -> Any:
    return source[name] if isinstance(source, Mapping) else getattr(source, name)


def _is_definition(value: object) -> bool:
    """Return whether a value is an import, a function or a class, and therefore not a setting."""
    return isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isroutine(value)
