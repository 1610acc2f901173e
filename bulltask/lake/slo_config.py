"""Settings of the gold tables, for what events do not contain: objectives, prices and capacities.

As a TOML file::

    price_per_hour = 0.12          # of one slot, which runs one job at a time; or a table with prices by queue
    capacity = 16                  # jobs that can run at the same time; or a table by queue

    [[objective]]
    metric = "wait"                # or run, total
    threshold = 2.0                # seconds
    target = 0.99                  # the fraction that should meet the threshold
    queue = "emails"               # "*" is a wildcard, alone (the default) or in a name
    name = "mail.*"                # of the task
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import KW_ONLY, dataclass, fields
from decimal import Decimal
from enum import StrEnum
from pathlib import Path
from typing import Any, Final

from bulltask.config.parsers import choice, integer, plain_text
from bulltask.jobs.clock import Duration, to_ms
from bulltask.jobs.errors import ConfigError, did_you_mean

EVERY: Final = "*"
"""Matches every queue or task; as a key of prices and capacities, all queues that are not listed."""

_MAX_PRICE: Final = 1_000_000


class Metric(StrEnum):
    """The duration that an objective limits."""

    WAIT = "wait"  # from the time a job is due until its first attempt starts
    RUN = "run"  # of each attempt, with any outcome
    TOTAL = "total"  # from the time a job is added until it finishes; a failed job does not meet the objective


@dataclass(frozen=True, slots=True)
class Objective:
    """A service level objective: 99% of the jobs of a task start within 2 s.

    Each day of a task is measured against all matching objectives. Of several objectives with the same metric and
    threshold, only the first applies.

    Args:
        metric: ``"wait"``, ``"run"`` or ``"total"``.
        threshold: The longest duration that meets the objective (seconds or ``timedelta``), at least a millisecond.
        target: The fraction of durations that should meet the objective, between 0 and 1 (exclusive).
        queue: Pattern of queues, without BullMQ's braces; ``*`` matches any text.
        name: Pattern of task names.

    Raises:
        ConfigError: An argument is invalid.
    """

    metric: Metric | str
    _: KW_ONLY
    threshold: Duration
    target: float
    queue: str = EVERY
    name: str = EVERY

    def __post_init__(self) -> None:
        object.__setattr__(self, "metric", Metric(choice(*(item.value for item in Metric))(self.metric, "metric")))
        if self.threshold_ms < 1:
            raise ConfigError(f"threshold must be at least 0.001 s, not {self.threshold!r}")
        if isinstance(self.target, bool) or not isinstance(self.target, int | float) or not 0 < self.target < 1:
            raise ConfigError(f"target must be more than 0 and less than 1, like 0.99, not {self.target!r}")
        plain_text(self.queue, "queue")
        plain_text(self.name, "name")

    @property
    def threshold_ms(self) -> int:
        """The maximum duration that meets the objective, in milliseconds."""
        return to_ms(self.threshold, "threshold")


@dataclass(frozen=True, slots=True)
class SLOConfig:
    """Objectives, prices and capacities.

    Args:
        objectives: The objectives for ``gold.slo_day``, which is empty without objectives.
        price_per_hour: The price of an hour of a slot, which runs one job at a time: a number, or numbers by queue,
            with ``*`` for all other queues. Queues without a price have no costs.
        capacity: The maximum number of running jobs of a queue, in the same form; default: the day's observed maximum.

    Raises:
        ConfigError: An argument is invalid.
    """

    objectives: Iterable[Objective] = ()
    price_per_hour: Mapping[str, Decimal | float] | Decimal | float | None = None
    capacity: Mapping[str, int] | int | None = None

    def __post_init__(self) -> None:
        objectives = tuple(self.objectives)
        if any(not isinstance(item, Objective) for item in objectives):
            raise ConfigError(f"objectives must be instances of bulltask.lake.slo_config.Objective, not {objectives!r}")
        object.__setattr__(self, "objectives", objectives)
        _by_queue(self.price_per_hour, "price_per_hour", _price)
        _by_queue(self.capacity, "capacity", integer(1))

    @property
    def prices(self) -> dict[str, Decimal]:
        """The price of a slot per hour, by queue and ``*``."""
        return _by_queue(self.price_per_hour, "price_per_hour", _price)

    @property
    def capacities(self) -> dict[str, int]:
        """How many jobs can run at the same time, by queue and ``*``."""
        return _by_queue(self.capacity, "capacity", integer(1))


def _by_queue(value: Any, name: str, parse: Any) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        return {EVERY: parse(value, name)}
    return {
        plain_text(queue, f"queue of {name}"): parse(entry, f"{name} of {queue!r}") for queue, entry in value.items()
    }


def _price(value: Any, name: str) -> Decimal:
    if isinstance(value, int | float | Decimal) and not isinstance(value, bool):
        price = Decimal(str(value))  # exactly 0.1, not its binary approximation
        if price.is_finite() and 0 <= price <= _MAX_PRICE:
            return price
    raise ConfigError(f"{name} must be a number from 0 to {_MAX_PRICE}, not {value!r}")


def read_slo_config(path: str | Path) -> SLOConfig:
    """Read the configuration from a TOML file; the docstring of this module has an example.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or a value is unknown or invalid; the message names it.
    """
    try:
        content = tomllib.loads(Path(path).read_text("utf-8"))
        _check_names(content, ("objective", "price_per_hour", "capacity"))
        return SLOConfig(_objectives(content.pop("objective", [])), **content)
    except (OSError, ValueError) as exc:  # ConfigError, TOMLDecodeError and UnicodeDecodeError are ValueErrors
        raise ConfigError(f"{path}: {exc}") from exc


def _objectives(entries: Any) -> list[Objective]:
    if not isinstance(entries, list) or not all(isinstance(entry, Mapping) for entry in entries):
        raise ConfigError("objectives must be tables: write [[objective]], with two brackets")
    objectives = []
    for number, entry in enumerate(entries, 1):
        name = f"objective {number}"
        _check_names(entry, [field.name for field in fields(Objective)], f"{name}: ")
        if missing := {"metric", "threshold", "target"} - entry.keys():
            raise ConfigError(f"{name}: {', '.join(sorted(missing))} is missing")
        try:
            objectives.append(Objective(**entry))
        except ConfigError as exc:
            raise ConfigError(f"{name}: {exc}") from exc
    return objectives


def _check_names(entries: Mapping[str, Any], names: Iterable[str], where: str = "") -> None:
    known = tuple(names)
    for name in entries:
        if name not in known:
            raise ConfigError(f"{where}{name!r} is unknown; use {', '.join(known)}{did_you_mean(name, known)}")
