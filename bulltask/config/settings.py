"""``Settings``: ``app.conf``, and the sources of its values.

Precedence, highest first:

1. the command line;
2. the environment (``BULLTASK_`` and the name in capitals);
3. the ``--config`` file;
4. ``app.conf`` and the arguments of ``App``;
5. ``[tool.bulltask]`` in pyproject.toml;
6. the defaults (:mod:`bulltask.config.config`).

An unknown name or an invalid value raises ``ConfigError``. It suggests a similar name, or, for one of Celery's names,
says what to use instead.
"""

from __future__ import annotations

import importlib
import inspect
import os
import re
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, Unpack

from bulltask.config.celery_settings import CELERY_SETTINGS, CUSTOM_SCHEDULER, current_name
from bulltask.config.config import SETTINGS, Config, check_config
from bulltask.config.parsers import SECRET_FILES, wrap_secrets
from bulltask.config.urls import SecretUrl, redact_text, secret_url, url
from bulltask.jobs.errors import ConfigError, nearest, warn_user

if TYPE_CHECKING:
    from bulltask.config.setting_types import SettingOptions, SettingTypes
else:
    SettingTypes = object

__all__ = ["CONFIG_VARIABLE", "ENV_PREFIX", "FILE_VARIABLES", "Settings", "constructor_settings", "read_secret_file"]

ENV_PREFIX: Final = "BULLTASK_"
CONFIG_VARIABLE: Final = "BULLTASK_CONFIG"
"""Environment variable with the ``--config`` file or module."""

_CELERY_URL: Final = "CELERY_BROKER_URL"
"""Celery's environment variable, used if no other source sets ``broker_url``."""

FILE_VARIABLES: Final = {name: f"{ENV_PREFIX}{name.upper()}_FILE" for name in SECRET_FILES}
"""Environment variables with the path of a file that contains a secret setting, such as a Docker or Kubernetes
secret."""

_EAGER: Final = ("task_always_eager", "task_eager_propagates")
_SWITCHES: Final = (*_EAGER, "task_allow_error_cb_on_chord_header")
"""Settings that can be changed at any time, because they apply only to the process that sends."""

_STATE: Final = frozenset(
    "_project _values _file _overrides _frozen _app _when_frozen _when_switched _used _celery_url".split()
)
"""Attributes of :class:`Settings` that are not settings."""


class Settings(SettingTypes):
    """The mutable settings of an app, by their public names: ``app.conf.lock_duration = 60``.

    Every assignment is validated immediately. The settings are frozen when the app first uses them, for example to send
    a job, or when a worker starts. A later change would apply to only some processes, because children are forks. Only
    eager mode can be switched on and off at any time, as tests do, and ``task_allow_error_cb_on_chord_header``.
    """

    def __init__(self, given: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        self._project: dict[str, object] = {}
        self._values: dict[str, object] = {}
        self._file: dict[str, object] = {}
        self._overrides: dict[str, object] = {}
        self._frozen: Config | None = None
        self._app = ""
        self._when_frozen: list[Callable[[Config], object]] = []
        self._when_switched: Callable[[], None] = lambda: None
        self._used: set[str] = set()
        self._celery_url = secret_url(environ.get(_CELERY_URL) or None)
        given, config, variables = wrap_secrets(given), environ.get(CONFIG_VARIABLE), _environment(environ)
        del environ  # it contains the URL with its password, and an error can show local variables
        path, found = read_project_file()
        self._read(self._project, found, path)
        for name, value in given.items():
            setattr(self, name, value)
        if config:
            self._read(self._file, read_config(config), config)
        for name, value in variables.items():
            self.override(name, value)

    def update(self, *mappings: Mapping[str, object], **settings: Unpack[SettingOptions]) -> None:
        """Set several settings, from mappings or keywords.

        Raises:
            ConfigError: A name is unknown, a value is invalid or has another meaning in Celery, or the settings are
                frozen.
        """
        updates = wrap_secrets({**dict(pair for part in mappings for pair in part.items()), **settings})
        del mappings, settings  # they may contain passwords, and an error can show local variables
        check_same_meaning({name: (name, value) for name, value in updates.items()})
        for name, value in updates.items():
            setattr(self, name, value)

    def read_object(self, source: object, namespace: str | None = None) -> None:
        """Set the settings in an object, see :meth:`bulltask.app.App.config_from_object`."""
        found = read_object(source, namespace)
        check_same_meaning(found)
        self._read(self._values, found, source if isinstance(source, str) else "")

    def override(self, name: str, value: object) -> None:
        """Set ``name`` with precedence over assignments: for the environment and the command line."""
        value = wrap_secrets({name: value})[name]
        self._set(self._overrides, name, value)

    def overrides(self) -> dict[str, object]:
        """Return the settings from the environment and the command line."""
        return dict(self._overrides)

    @property
    def is_url_from_celery(self) -> bool:
        """Whether ``broker_url`` comes from Celery's environment variable ``CELERY_BROKER_URL``."""
        return self._celery_url is not None and "broker_url" not in self._given()

    def overridden(self, settings: Mapping[str, object]) -> Settings:
        """Return a copy that is not frozen, in which ``settings`` take precedence over all others; for tests."""
        copied = object.__new__(Settings)
        vars(copied).update({**vars(self), "_overrides": self.overrides(), "_frozen": None, "_used": set()})
        for name, value in settings.items():
            copied.override(name, value)
        return copied

    def freeze(self) -> Config:
        """Return the configuration; after this call, settings can no longer be changed."""
        if self._frozen is None:
            config = self._build()
            for call in self._when_frozen:
                call(config)
            self._frozen = config
        return self._frozen

    def freeze_one(self, name: str) -> Any:
        """Return a parsed setting, and freeze it; the other settings can still be changed.

        This is for settings that are needed before the app sends anything, for example by a signature that a module
        creates when it is imported.
        """
        self._used.add(name)
        return SETTINGS[name].parse(getattr(self, name), name)

    def name_app(self, name: str) -> None:
        """Set the name of the app, which its jobs contain."""
        self._app = name

    def when_frozen(self, call: Callable[[Config], object]) -> None:
        """Register a function to call just before the settings are frozen; if it raises, they are not frozen."""
        self._when_frozen.append(call)

    def when_switched(self, call: Callable[[], None]) -> None:
        """Set the function to call when eager mode is switched on or off after the settings were frozen."""
        self._when_switched = call

    def _build(self) -> Config:
        given = self._given()
        if self.is_url_from_celery:
            url(self._celery_url, _CELERY_URL)
            given["broker_url"] = self._celery_url
        merged = {row.name: row.default for row in SETTINGS.values()} | _failover_defaults(given) | given
        parsed = {row.field: row.parse(merged[row.name], row.name) for row in SETTINGS.values()}
        config = Config(**parsed, sender=self._app and f"{self._app}@{socket.gethostname()}")
        check_config(config)
        return config

    def _given(self) -> dict[str, object]:
        return {**self._project, **self._values, **self._file, **self._overrides}

    def _read(self, layer: dict[str, object], found: Mapping[str, tuple[str, object]], source: str) -> None:
        """Add the settings of a source to a layer; errors contain the source and the setting's name in it."""
        for label, (name, value) in found.items():
            try:
                self._set(layer, name, value, label)
            except ConfigError as exc:
                raise ConfigError(f"{source}: {exc}" if source else str(exc)) from None

    def _set(self, layer: dict[str, object], name: str, value: object, label: str | None = None) -> None:
        value = wrap_secrets({name: value})[name]
        if (setting := resolve(name, value, label or name)) is None:
            return
        if self._frozen is not None and setting not in _SWITCHES:
            raise ConfigError(
                f"cannot set {name}, because the app has already been used: set it before the app sends a job, uses a "
                "queue or starts a worker"
            )
        if setting in self._used:
            raise ConfigError(f"cannot set {name}: a task has already used it; set it before the first call")
        parsed = SETTINGS[setting].parse(value, label or name)
        layer[setting] = value
        if self._frozen is not None:
            self._frozen = replace(self._frozen, **{SETTINGS[setting].field: parsed})
            if setting in _EAGER:
                self._when_switched()

    if not TYPE_CHECKING:  # type checkers know the settings' types, and would accept any name

        def __setattr__(self, name: str, value: object) -> None:
            if name in _STATE:
                object.__setattr__(self, name, value)
                return
            value = wrap_secrets({name: value})[name]
            self._set(self._values, name, value)

        def __getattr__(self, name: str) -> Any:
            if name not in SETTINGS:
                raise AttributeError(explain(name))
            if name == "broker_url" and self.is_url_from_celery:
                return self._celery_url
            return self._given().get(name, SETTINGS[name].default)

    def __getitem__(self, name: str) -> Any:
        if name not in SETTINGS:
            raise KeyError(explain(name))
        return getattr(self, name)

    def __setitem__(self, name: str, value: object) -> None:
        setattr(self, name, value)

    def __contains__(self, name: object) -> bool:
        return name in SETTINGS

    def __iter__(self) -> Iterator[str]:
        return iter(SETTINGS)

    def shown(self, *, with_defaults: bool = False) -> dict[str, Any]:
        """Return the settings that were set, or all, as JSON values; secrets are ``***``."""
        given = self._given()
        values = {row.name: row.default for row in SETTINGS.values()} | given if with_defaults else given
        return {name: _shown(value, name, is_secret=SETTINGS[name].is_secret) for name, value in values.items()}

    def __repr__(self) -> str:
        changed = {name: "…" if SETTINGS[name].is_secret and value else value for name, value in self._given().items()}
        return f"<Settings {changed}>"

    def __dir__(self) -> list[str]:
        return ["update", *SETTINGS]  # for completion in a shell


_HIDDEN: Final = re.compile("token|key|secret|pass|credential|signature|auth", re.IGNORECASE)
"""Names in a setting's value whose values are hidden, as in Celery."""

_SHOWN_CHARS: Final = 500


def _shown(value: object, name: str = "", *, is_secret: bool = False) -> Any:
    """Return a value as JSON, without secrets."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, SecretUrl):
        return str(value)
    if is_secret or hasattr(value, "get_secret_value") or (isinstance(value, str) and _HIDDEN.search(name)):
        return "***"
    if isinstance(value, Mapping):
        return {str(key): _shown(item, str(key)) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_shown(item, name) for item in value]
    return redact_text(value if isinstance(value, str) else repr(value))[:_SHOWN_CHARS]


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

    ``label`` is the name as the user wrote it, such as ``CELERY_TASK_SERIALIZER``.
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
    """Reject ``result_expires`` of 0, which keeps results forever in Celery, but not at all in bulltask."""
    for label, (name, value) in found.items():
        if name == "result_expires" and value in (0, timedelta(0)) and value is not None:
            raise ConfigError(
                f"{label} is 0: Celery then keeps results forever, but bulltask removes them immediately; set "
                "None to keep them, or write app.conf.result_expires = 0 to remove them"
            )


_PROJECT_FILE: Final = "pyproject.toml"
_TABLE: Final = "tool.bulltask"


def read_object(source: object, namespace: str | None = None) -> dict[str, tuple[str, Any]]:
    """Return the settings in an object: for each name as the user wrote it, the setting's name and its value.

    Args:
        source: A mapping, a module, a class, any object with attributes, or the name of one: ``pkg.module``,
            ``pkg.module:attribute``.
        namespace: Take only names that begin with this and ``_``, in the same case: ``CELERY`` takes
            ``CELERY_BROKER_URL``. Without it, all lower-case names are taken.
    """
    given = _load(source) if isinstance(source, str) else source
    if namespace:
        prefix = namespace if namespace.endswith("_") else f"{namespace}_"
        if prefix == "CELERY_":  # which would silently leave out CELERYD_CONCURRENCY
            for name in _names(given):
                old = name.startswith(("CELERYD_", "CELERYBEAT_"))
                if old and (current := current_name(name, {*SETTINGS, *CELERY_SETTINGS})):
                    raise ConfigError(f"{name} is an old Celery name: use CELERY_{current.upper()}")
        names = (name for name in _names(given) if name.startswith(prefix))
        return {name: _setting(name.removeprefix(prefix).lower(), _value(given, name)) for name in names}
    settings = {}
    for name in _names(given):
        value = _value(given, name)
        # In a module or class, an import, a function or a class is not a setting.
        is_definition = isinstance(value, ModuleType) or inspect.isclass(value) or inspect.isroutine(value)
        if name.islower() and (isinstance(given, Mapping) or not is_definition):
            settings[name] = _setting(name, value)
        elif name.isupper() and (current := current_name(name, {*SETTINGS, *CELERY_SETTINGS})):
            raise ConfigError(
                f"{name} is either an old setting name or a name with a namespace prefix: use {current}, or "
                "config_from_object(…, namespace='CELERY') for names such as CELERY_BROKER_URL"
            )
    return settings


def read_config(name: str) -> dict[str, tuple[str, Any]]:
    """Return the settings of ``--config``: from a TOML file (``*.toml``), or from a module."""
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
        if (path := parent / _PROJECT_FILE).is_file():
            return str(path), _read_toml(path, required=False)
    return "", {}


def _read_toml(path: Path, *, required: bool) -> dict[str, tuple[str, Any]]:
    """Return the table ``[tool.bulltask]``; a required file may have its settings at the top instead."""
    import tomllib  # noqa: PLC0415 - only for a program whose directory has such a file

    try:
        text = path.read_text(encoding="utf-8")
        if not required and _TABLE not in text:
            return {}  # avoids parsing a file without settings for bulltask
        content = tomllib.loads(text)
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as exc:
        raise ConfigError(f"cannot read the settings in {path}: {exc}") from exc
    tool = content.get("tool", {})
    table = tool.get("bulltask") if isinstance(tool, dict) else None
    if table is None:
        table = content if required and path.name != _PROJECT_FILE else {}
    if not isinstance(table, dict):
        raise ConfigError(f"[{_TABLE}] in {path} must be a table, not {table!r:.200}")
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


def _names(source: object) -> Iterable[str]:
    names: Iterable[object] = source if isinstance(source, Mapping) else dir(source)
    return [name for name in names if isinstance(name, str) and not name.startswith("_")]


def _value(source: object, name: str) -> Any:
    return source[name] if isinstance(source, Mapping) else getattr(source, name)


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in the environment; secrets may come from files."""
    names = {ENV_PREFIX + name.upper(): name for name in SETTINGS}
    settings = wrap_secrets({names[variable]: text for variable, text in environ.items() if variable in names})
    for name, variable in FILE_VARIABLES.items():
        if name not in settings and (path := environ.get(variable)):
            settings |= wrap_secrets({name: read_secret_file(variable, path)})
    return settings


def read_secret_file(variable: str, path: str) -> str:
    """Return the secret in a file that an environment variable names; raises ``ConfigError`` if it cannot be read."""
    try:
        return Path(path).read_text().strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"cannot read the file in {variable}: {exc}") from exc


def _failover_defaults(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for a URL of several servers: a send is retried until a failover has ended."""
    address = given.get("broker_url")
    if not isinstance(address, SecretUrl) or address.kind == "single":
        return {}
    return {"broker_publish_retries": 100, "broker_publish_timeout": 60}
