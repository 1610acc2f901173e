"""Settings: one table of names, one frozen value, validated once.

Precedence, strongest first: command line, environment (``BULLTASK_`` + the name in capitals), ``app.conf`` and the
arguments of ``App``, the defaults below. Names are Celery's where Celery has one and BullMQ's (in snake_case) for
locks and stalls. Lengths of time are seconds or ``timedelta`` for the user and whole milliseconds inside (``_ms``).
An unknown name is an error that says which name was meant; Celery would take it silently.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Final

from bulltask.clock import to_ms, zone_of
from bulltask.errors import ConfigError
from bulltask.process import usable_cores
from bulltask.urls import redact_url

__all__ = ["SETTINGS", "Conf", "Config", "Setting", "jitter_share", "names_of"]

ENV_PREFIX: Final = "BULLTASK_"
URL_SCHEMES: Final = ("redis://", "rediss://", "unix://", "embedded://")
LOG_LEVELS: Final = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """Every setting of an app and its workers, checked; built by :class:`Conf`, never by hand."""

    broker_url: str
    prefix: str
    queue_hash_tag: bool
    connect_timeout_ms: int
    command_timeout_ms: int
    publish_retries: int
    connection_retries: int | None
    reconnect_delay_ms: int
    reconnect_delay_max_ms: int
    max_payload: int
    max_events: int
    default_queue: str
    max_retries: int
    retry_backoff_ms: int
    retry_backoff_max_ms: int
    retry_jitter: float
    unknown_task: str
    include: tuple[str, ...]
    result_expires_ms: int | None
    failure_expires_ms: int | None
    start_method: str
    concurrency: int
    async_concurrency: int
    lock_ms: int
    lock_renew_ms: int | None
    stalled_interval_ms: int
    max_stalled_count: int
    max_crashes: int
    drain_delay_ms: int
    shutdown_timeout_ms: int
    worker_name: str
    metrics_port: int | None
    metrics_host: str
    log_level: str
    timezone: str
    beat_schedule: Mapping[str, Any] | None

    @property
    def renew_ms(self) -> int:
        """How old a lock may grow before it is renewed; half the lock unless it was set."""
        return self.lock_renew_ms if self.lock_renew_ms is not None else self.lock_ms // 2


Parse = Callable[[Any, str], Any]


@dataclass(frozen=True, slots=True)
class Setting:
    """One row of the table: the public name, the field of :class:`Config`, how it is read, the default, its text."""

    name: str
    field: str
    parse: Parse
    default: object
    doc: str


def _integer(low: int, high: int | None = None) -> Parse:
    def parse(value: Any, name: str) -> int:
        try:
            number = int(value) if isinstance(value, str) else value
        except ValueError:
            number = None
        if not isinstance(number, int) or isinstance(number, bool) or number < low or (high and number > high):
            raise ConfigError(f"{name} must be a whole number {_span(low, high)}, not {value!r}")
        return number

    return parse


def _span(low: int, high: int | None) -> str:
    return f"from {low} to {high}" if high else f"of {low} or more"


def _duration(low_ms: int = 0) -> Parse:
    def parse(value: Any, name: str) -> int:
        try:
            length = float(value) if isinstance(value, str) else value
        except ValueError as exc:
            raise ConfigError(f"{name} must be seconds or a timedelta, not {value!r}") from exc
        if (ms := to_ms(length, name)) < low_ms:
            raise ConfigError(f"{name} must be at least {low_ms / 1000:g} s, not {value!r}")
        return ms

    return parse


def _optional(parse: Parse) -> Parse:
    return lambda value, name: None if value is None or str(value).lower() in {"", "none"} else parse(value, name)


def _choice(*allowed: str) -> Parse:
    def parse(value: Any, name: str) -> str:
        text = str(value).lower()
        if text not in allowed:
            raise ConfigError(f"{name} must be one of {', '.join(allowed)}, not {value!r}{_hint(text, allowed)}")
        return text

    return parse


_WORDS: Final = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def _flag(value: Any, name: str) -> bool:
    meant = value if isinstance(value, bool) else {**_WORDS, "1": True, "0": False}.get(str(value).lower())
    if meant is None:
        raise ConfigError(f"{name} must be true or false, not {value!r}")
    return meant


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value or any(ord(char) < 32 for char in value):
        raise ConfigError(f"{name} must be a text without control characters, not {value!r}")
    return value


def _worker_name(value: Any, name: str) -> str:
    if value is None or value == "":
        return ""
    if any(char.isspace() for char in _text(value, name)):
        raise ConfigError(f"{name} must have no spaces, because Redis shows it as a connection's name: {value!r}")
    return str(value)


def _zone(value: Any, name: str) -> str:
    zone_of(value, name)
    return str(value)


def _entries(value: Any, name: str) -> Mapping[str, Any] | None:
    if value is None:
        return None
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise ConfigError(f"{name} must be a dictionary of entries by name, not {value!r}")
    return dict(value)


def _url(value: Any, name: str) -> str:
    if not isinstance(value, str) or not value.startswith(URL_SCHEMES):
        shown = redact_url(value) if isinstance(value, str) else repr(value)
        raise ConfigError(f"{name} must start with {', '.join(URL_SCHEMES)}; it is {shown}")
    return value


def jitter_share(value: Any, name: str) -> float:
    """Return the share of a delay that is left to chance: a switch (true is 0.2) or a number from 0 to 1.

    Raises:
        ConfigError: it is neither; the message calls it ``name``.
    """
    meant = value if isinstance(value, bool) else _WORDS.get(str(value).lower())
    if meant is not None:
        return 0.2 if meant else 0.0
    try:
        share = float(value)
    except (TypeError, ValueError):
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"{name} must be true, false or a share from 0 to 1, not {value!r}")
    return share


def names_of(value: Any, name: str) -> tuple[str, ...]:
    """Return the names of a list, or of a text with commas between them.

    Raises:
        ConfigError: it is neither; the message calls it ``name``.
    """
    if isinstance(value, str):
        return tuple(_text(part.strip(), name) for part in value.split(",") if part.strip())
    if not isinstance(value, Iterable):
        raise ConfigError(f"{name} must be a list of names, not {value!r}")
    return tuple(_text(part, name) for part in value)


def _cores(value: Any, name: str) -> int:
    if value is None or value == "auto":
        return usable_cores()
    return int(_integer(1, 1_000)(value, name))


_S = Setting
SETTINGS: Final[Mapping[str, Setting]] = {
    row.name: row
    for row in (
        _S("broker_url", "broker_url", _url, "redis://localhost:6379/0", "where Redis or Valkey is"),
        _S("prefix", "prefix", _text, "bull", "first part of every BullMQ key"),
        _S("queue_hash_tag", "queue_hash_tag", _flag, True, "queue 'emails' is BullMQ's '{emails}' (cluster-safe)"),
        _S("redis_socket_connect_timeout", "connect_timeout_ms", _duration(1), 5, "seconds to connect"),
        _S("redis_socket_timeout", "command_timeout_ms", _duration(1), 10, "seconds any command may take"),
        _S("broker_publish_retries", "publish_retries", _integer(0, 100), 3, "resends of a send whose reply was lost"),
        _S(
            "broker_connection_max_retries",
            "connection_retries",
            _optional(_integer(1)),
            None,
            "tries to reach a lost Redis before the worker gives up; none: it never does",
        ),
        _S("broker_reconnect_delay", "reconnect_delay_ms", _duration(1), 0.1, "first pause before a reconnect"),
        _S("broker_reconnect_delay_max", "reconnect_delay_max_ms", _duration(1), 30, "longest pause"),
        _S("max_payload", "max_payload", _integer(1), 10_000_000, "bytes of JSON of one call or one result"),
        _S("max_events", "max_events", _integer(100), 10_000, "length of a queue's event stream, where none is set"),
        _S("task_default_queue", "default_queue", _text, "default", "queue of tasks that name none"),
        _S("task_max_retries", "max_retries", _integer(0, 1_000), 2, "retries after the first try (attempts - 1)"),
        _S("task_retry_backoff", "retry_backoff_ms", _duration(), 1, "first delay of the exponential backoff"),
        _S("task_retry_backoff_max", "retry_backoff_max_ms", _duration(1), 3_600, "longest delay between attempts"),
        _S("task_retry_jitter", "retry_jitter", jitter_share, True, "share by which delays vary; true is 0.2"),
        _S("task_unknown", "unknown_task", _choice("requeue", "fail"), "requeue", "a job whose task nobody here knows"),
        _S("include", "include", names_of, (), "modules that the worker imports for their tasks"),
        _S("result_expires", "result_expires_ms", _optional(_duration()), 86_400, "completed jobs stay; none: always"),
        _S("result_failure_expires", "failure_expires_ms", _optional(_duration()), None, "the same for failed jobs"),
        _S("worker_concurrency", "concurrency", _cores, "auto", "child processes; auto is one a core"),
        _S("worker_start_method", "start_method", _choice("auto", "fork", "spawn"), "auto", "how children are started"),
        _S("worker_async_concurrency", "async_concurrency", _integer(1, 10_000), 100, "async jobs at once in a child"),
        _S("lock_duration", "lock_ms", _duration(1_000), 30, "a job's lock, renewed while its worker lives"),
        _S("lock_renew_time", "lock_renew_ms", _optional(_duration(100)), None, "age at which it is renewed; half"),
        _S("stalled_interval", "stalled_interval_ms", _duration(1_000), 30, "time between checks for stalled jobs"),
        _S("max_stalled_count", "max_stalled_count", _integer(0, 1_000), 1, "stalls after which a job fails"),
        _S("max_crashes", "max_crashes", _integer(1, 1_000), 2, "dead children after which a job fails"),
        _S("drain_delay", "drain_delay_ms", _duration(100), 5, "longest wait on an empty queue before looking again"),
        _S("shutdown_timeout", "shutdown_timeout_ms", _duration(), 30, "time for running jobs at a warm stop"),
        _S("worker_name", "worker_name", _worker_name, "", "name of the worker; host-pid-random6"),
        _S("metrics_port", "metrics_port", _optional(_integer(0, 65_535)), None, "port of /metrics; none: off"),
        _S("metrics_host", "metrics_host", _text, "127.0.0.1", "address of /metrics"),
        _S("loglevel", "log_level", _choice(*LOG_LEVELS), "info", "least level that is logged"),
        _S("timezone", "timezone", _zone, "UTC", "time zone of schedules that name none"),
        _S("beat_schedule", "beat_schedule", _entries, None, "what workers schedule; none: left as it is in Redis"),
    )
}


class Conf:
    """The settings of an app while they may still change: ``app.conf.lock_duration = 60``.

    Every assignment is checked at once. Once the app has sent or a worker has started, the settings are frozen:
    children are forks, and a later change would be true in one process and not in the next.
    """

    _values: dict[str, object]
    _overrides: dict[str, object]
    _frozen: Config | None

    def __init__(self, given: Mapping[str, object], environ: Mapping[str, str] | None = None) -> None:
        object.__setattr__(self, "_values", {})
        object.__setattr__(self, "_overrides", {})
        object.__setattr__(self, "_frozen", None)
        self.update(given)
        for name, text in (os.environ if environ is None else environ).items():
            key = name.removeprefix(ENV_PREFIX).lower()
            if name.startswith(ENV_PREFIX) and key in SETTINGS:
                self.override(key, text)

    def update(self, *given: Mapping[str, object], **more: object) -> None:
        """Set several settings at once, from mappings or keywords.

        Raises:
            ConfigError: a name is unknown (with the nearest known one), a value is wrong, or settings are frozen.
        """
        for name, value in {**dict(pair for part in given for pair in part.items()), **more}.items():
            setattr(self, name, value)

    def override(self, name: str, value: object) -> None:
        """Set ``name`` above what code says: the environment and the command line use this."""
        self._check(name, value)
        self._overrides[name] = value

    def overrides(self) -> dict[str, object]:
        """What the environment and the command line have set."""
        return dict(self._overrides)

    def freeze(self) -> Config:
        """Return the frozen value; afterwards nothing can be changed."""
        if self._frozen is None:
            object.__setattr__(self, "_frozen", self._build())
        assert self._frozen is not None
        return self._frozen

    def _build(self) -> Config:
        merged = {row.name: row.default for row in SETTINGS.values()} | self._values | self._overrides
        parsed = {row.field: row.parse(merged[row.name], row.name) for row in SETTINGS.values()}
        config = Config(**parsed)
        if config.renew_ms >= config.lock_ms:
            raise ConfigError(
                f"lock_renew_time ({config.renew_ms} ms) must be shorter than lock_duration ({config.lock_ms} ms), "
                "or every running job loses its lock"
            )
        if config.reconnect_delay_max_ms < config.reconnect_delay_ms:
            raise ConfigError("broker_reconnect_delay_max must not be shorter than broker_reconnect_delay")
        if config.retry_backoff_max_ms < config.retry_backoff_ms:
            raise ConfigError("task_retry_backoff_max must not be shorter than task_retry_backoff")
        return config

    def _check(self, name: str, value: object) -> None:
        if name not in SETTINGS:
            raise ConfigError(f"unknown setting {name!r}{_hint(name, SETTINGS)}")
        if self._frozen is not None:
            raise ConfigError(f"cannot set {name}: the app has already sent a job or started a worker")
        SETTINGS[name].parse(value, name)

    def __setattr__(self, name: str, value: object) -> None:
        self._check(name, value)
        self._values[name] = value

    def __getattr__(self, name: str) -> Any:
        if name in SETTINGS:
            row = SETTINGS[name]
            return self._overrides.get(name, self._values.get(name, row.default))
        raise AttributeError(f"unknown setting {name!r}{_hint(name, SETTINGS)}")

    def __repr__(self) -> str:
        changed = {**self._values, **self._overrides}
        if "broker_url" in changed:
            changed["broker_url"] = redact_url(str(changed["broker_url"]))
        return f"<Conf {changed}>"

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), *SETTINGS]


def _hint(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""


assert {row.field for row in SETTINGS.values()} == {field.name for field in fields(Config)}
