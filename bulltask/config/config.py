"""The configuration of an app: a frozen value, built from the table of settings and validated once.

Precedence, highest first:

1. the command line;
2. the environment (``BULLTASK_`` and the name in capitals);
3. the ``--config`` file;
4. ``app.conf`` and the arguments of ``App``;
5. ``[tool.bulltask]`` in pyproject.toml;
6. the defaults (:mod:`bulltask.config.settings`).

Durations are seconds or ``timedelta`` for the user, and integer milliseconds internally (``_ms``). An unknown name
raises an error that suggests a similar one. For one of Celery's names, the error says what to use instead.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Unpack

from bulltask.config.annotations import Annotations
from bulltask.config.credentials import Credentials
from bulltask.config.names import check_same_meaning, explain, resolve
from bulltask.config.parsers import Autoscale
from bulltask.config.payload_settings import check_payload_settings
from bulltask.config.rate_limits import Limits, TaskRate
from bulltask.config.routes import Routes
from bulltask.config.secret_settings import SECRET_FILES, wrap_secrets
from bulltask.config.server_urls import url
from bulltask.config.settings import SETTINGS
from bulltask.config.sources import read_config, read_object, read_project_file
from bulltask.config.urls import SecretUrl, secret_url
from bulltask.errors import ConfigError
from bulltask.jobs.names import EVERY_QUEUE
from bulltask.jobs.time_limits import TimeLimits
from bulltask.payloads.payload_codec import PayloadSettings

if TYPE_CHECKING:
    from bulltask.config.setting_types import SettingOptions, SettingTypes
else:
    SettingTypes = object

__all__ = ["CELERY_URL", "CONFIG_VARIABLE", "ENV_PREFIX", "FILE_VARIABLES", "Config", "Settings"]

ENV_PREFIX: Final = "BULLTASK_"

CONFIG_VARIABLE: Final = "BULLTASK_CONFIG"
"""Environment variable with the ``--config`` file or module."""

CELERY_URL: Final = "CELERY_BROKER_URL"
"""Celery's environment variable, used if no other source sets ``broker_url``."""

FILE_VARIABLES: Final = {name: f"{ENV_PREFIX}{name.upper()}_FILE" for name in SECRET_FILES}
"""Environment variables with the path of a file that contains a secret setting, such as a Docker or Kubernetes
secret."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(PayloadSettings):
    """The parsed, immutable settings of an app and its workers; :meth:`Settings.freeze` returns them."""

    sender: str = ""
    """The app and the host, which sent jobs name; not a setting."""
    broker_url: SecretUrl
    credentials: Credentials | None
    connect_timeout_ms: int
    command_timeout_ms: int
    publish_retries: int
    publish_timeout_ms: int | None
    publish_replicas: int
    connection_retries: int | None
    reconnect_delay_ms: int
    reconnect_delay_max_ms: int
    max_events: int
    max_logs: int | None
    default_queue: str
    canvas_queue: str | None
    errbacks_in_chord_headers: bool
    queues: tuple[str, ...]
    routes: Routes | None
    annotations: Annotations | None
    max_retries: int
    max_explicit_retries: int | None
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    backoff_strategies: tuple[str, ...]
    retry_jitter: float
    soft_time_limit_ms: int | None
    time_limit_ms: int | None
    default_rate: TaskRate | None
    typed: bool | None
    always_eager: bool
    eager_propagates: bool
    incompatible_timeout_ms: int | None
    imports: tuple[str, ...]
    include: tuple[str, ...]
    result_expires_ms: int | None
    failure_expires_ms: int | None
    start_method: str
    concurrency: int
    pool: str
    autoscale: Autoscale | None
    autoscale_keepalive_ms: int
    max_tasks_per_child: int | None
    max_memory_kib: int | None
    hard_memory_kib: int | None
    prefetch: int
    async_concurrency: int
    lock_ms: int
    lock_renew_ms: int | None
    stalled_interval_ms: int
    max_stalled_count: int
    skip_stalled_check: bool
    outbox_relay: bool
    max_crashes: int
    max_releases: int | None
    max_started_attempts: int | None
    drain_delay_ms: int
    run_retry_delay_ms: int
    disable_rate_limits: bool
    paused: bool
    shutdown_timeout_ms: int
    shutdown_notice_ms: int
    worker_name: str
    limits: Limits | None
    metrics_max_data_points: int | None
    keep_completed: Mapping[str, int] | None
    keep_failed: Mapping[str, int] | None
    metrics_port: int | None
    metrics_host: str
    log_level: str
    redirect_stdouts: bool
    redirect_stdouts_level: str
    timezone: str
    spark_master: str | None
    spark_conf: Mapping[str, str] | None = field(repr=False)  # may contain passwords and object-store keys
    beat_schedule: Mapping[str, Any] | None

    @property
    def children(self) -> int:
        """The number of child processes with which a worker starts."""
        if self.pool == "threads":
            return 1
        return self.concurrency if self.autoscale is None else self.autoscale.minimum

    @property
    def threads(self) -> int:
        """The number of threads in which a child runs sync tasks; 0 if they run on its main thread."""
        return self.concurrency if self.pool == "threads" else 0

    @property
    def renew_ms(self) -> int:
        """Twice the interval at which locks are renewed; by default, half of ``lock_duration``."""
        return self.lock_renew_ms if self.lock_renew_ms is not None else self.lock_ms // 2

    @property
    def time_limits(self) -> TimeLimits:
        """Time limits of tasks and calls that set none."""
        return TimeLimits(self.soft_time_limit_ms, self.time_limit_ms)

    def limiter(self, queue: str) -> Mapping[str, int] | None:
        """Return BullMQ's ``limiter`` for a queue by its name in the app; ``None`` if it has none."""
        limits = self.limits
        return None if limits is None else limits.get(queue, limits.get(EVERY_QUEUE))


_EAGER: Final = ("task_always_eager", "task_eager_propagates")
_SWITCHES: Final = (*_EAGER, "task_allow_error_cb_on_chord_header")
"""Settings that can be changed at any time, because they apply only to the process that sends."""


class Settings(SettingTypes):
    """The mutable settings of an app, by their public names: ``app.conf.lock_duration = 60``.

    Every assignment is validated immediately. The settings are frozen when the app first uses them, for example to send
    a job, or when a worker starts. A later change would apply to only some processes, because children are forks. Only
    eager mode can be switched on and off at any time, as tests do, and ``task_allow_error_cb_on_chord_header``.

    Raises:
        ConfigError: A setting of the app, the environment, pyproject.toml or the ``--config`` file is invalid.
    """

    _project: dict[str, object]
    _values: dict[str, object]
    _file: dict[str, object]
    _overrides: dict[str, object]
    _celery_url: SecretUrl | None
    _frozen: Config | None
    _when_switched: Callable[[], None]
    _used: set[str]
    _app: str
    _when_frozen: list[Callable[[Config], None]]

    def __init__(self, given: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        for layer in ("_project", "_values", "_file", "_overrides"):
            object.__setattr__(self, layer, {})
        object.__setattr__(self, "_frozen", None)
        object.__setattr__(self, "_app", "")
        object.__setattr__(self, "_when_frozen", [])
        object.__setattr__(self, "_when_switched", lambda: None)
        object.__setattr__(self, "_used", set())
        object.__setattr__(self, "_celery_url", secret_url(environ.get(CELERY_URL) or None))
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
            object.__setattr__(self, "_frozen", config)
        assert self._frozen is not None
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
        object.__setattr__(self, "_app", name)

    def when_frozen(self, call: Callable[[Config], None]) -> None:
        """Register a function to call just before the settings are frozen; if it raises, they are not frozen."""
        self._when_frozen.append(call)

    def when_switched(self, call: Callable[[], None]) -> None:
        """Set the function to call when eager mode is switched on or off after the settings were frozen."""
        object.__setattr__(self, "_when_switched", call)

    def _build(self) -> Config:
        given = self._given()
        if self.is_url_from_celery:
            url(self._celery_url, CELERY_URL)
            given["broker_url"] = self._celery_url
        merged = {row.name: row.default for row in SETTINGS.values()} | _failover_defaults(given) | given
        parsed = {row.field: row.parse(merged[row.name], row.name) for row in SETTINGS.values()}
        config = Config(**parsed, sender=self._app and f"{self._app}@{socket.gethostname()}")
        if config.renew_ms >= config.lock_ms:
            raise ConfigError(
                f"lock_renew_time ({config.renew_ms} ms) must be shorter than lock_duration ({config.lock_ms} ms), "
                "otherwise running jobs lose their locks"
            )
        if config.reconnect_delay_max_ms < config.reconnect_delay_ms:
            raise ConfigError("broker_reconnect_delay_max must not be shorter than broker_reconnect_delay")
        if config.retry_backoff_max_ms < config.retry_backoff_ms:
            raise ConfigError("task_retry_backoff_max must not be shorter than task_retry_backoff")
        if config.autoscale and config.pool == "threads":
            raise ConfigError(
                "worker_autoscale scales the number of child processes, so it needs worker_pool='prefork'"
            )
        if config.hard_memory_kib and config.hard_memory_kib < (config.max_memory_kib or 0):
            raise ConfigError("worker_hard_memory_limit must not be less than worker_max_memory_per_child")
        _check_broker(config)
        config.time_limits.check("the settings", "task_")
        check_payload_settings(config)
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
            object.__setattr__(self, "_frozen", replace(self._frozen, **{SETTINGS[setting].field: parsed}))
            if setting in _EAGER:
                self._when_switched()

    if not TYPE_CHECKING:  # type checkers know the settings' types, and would accept any name

        def __setattr__(self, name: str, value: object) -> None:
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

    def __repr__(self) -> str:
        changed = self._given()
        if changed.get("spark_conf"):
            changed["spark_conf"] = "…"  # may contain passwords and object-store keys
        return f"<Settings {changed}>"

    def __dir__(self) -> list[str]:
        return ["update", *SETTINGS]  # for completion in a shell


def _check_broker(config: Config) -> None:
    if config.credentials and config.broker_url.has_password:
        raise ConfigError(
            f"broker_url {config.broker_url} contains a password, but broker_credential_provider is set: remove "
            "one of them"
        )


def _failover_defaults(given: Mapping[str, object]) -> dict[str, object]:
    """Return the defaults for a URL of several servers: a send is retried until a failover has ended."""
    address = given.get("broker_url")
    if not isinstance(address, SecretUrl) or address.kind == "single":
        return {}
    return {"broker_publish_retries": 100, "broker_publish_timeout": 60}


def _environment(environ: Mapping[str, str]) -> dict[str, Any]:
    """Return the settings in the environment; secrets may come from files.

    Raises:
        ConfigError: A file cannot be read.
    """
    names = {ENV_PREFIX + name.upper(): name for name in SETTINGS}
    settings = wrap_secrets({names[variable]: text for variable, text in environ.items() if variable in names})
    for name, variable in FILE_VARIABLES.items():
        if name not in settings and (path := environ.get(variable)):
            try:
                settings |= wrap_secrets({name: Path(path).read_text().strip()})
            except (OSError, UnicodeDecodeError) as exc:
                raise ConfigError(f"cannot read the file in {variable}: {exc}") from exc
    return settings


assert {row.field for row in SETTINGS.values()} | {"sender"} == {field.name for field in fields(Config)}
