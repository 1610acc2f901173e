"""Time limits of an attempt, and the exceptions for exceeding them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from bulltask.clock import Duration, to_ms
from bulltask.errors import ConfigError, SoftTimeLimitExceeded, TimeLimitExceeded
from bulltask.value_class import value_class

__all__ = ["NO_LIMITS", "TimeLimits"]

_SOFT: Final = "softTimeLimit"
_HARD: Final = "timeLimit"


@value_class
class TimeLimits:
    """Time limits of one attempt in milliseconds, ``None`` for no limit.

    Attributes:
        soft_ms: After this time, the task is interrupted and may clean up.
        hard_ms: After this time, the attempt is stopped.
    """

    soft_ms: int | None = None
    hard_ms: int | None = None

    @classmethod
    def of(cls, soft: Duration | None, hard: Duration | None) -> TimeLimits:
        """Return the limits for values in seconds or ``timedelta``.

        Raises:
            ConfigError: A value is not a duration of 0.001 s or more.
        """
        return NO_LIMITS if soft is hard is None else cls(_ms(soft, "soft_time_limit"), _ms(hard, "time_limit"))

    @classmethod
    def from_wire(cls, options: Mapping[str, Any]) -> TimeLimits:
        """Read the limits from a job's bulltask options; a value that is not a positive number means no limit."""
        if _SOFT not in options and _HARD not in options:
            return NO_LIMITS
        return cls(_stored_ms(options.get(_SOFT)), _stored_ms(options.get(_HARD)))

    def to_wire(self) -> dict[str, object]:
        """Return the limits as they are stored in a job's bulltask options."""
        stored = {_SOFT: self.soft_ms, _HARD: self.hard_ms}
        return {name: limit_ms for name, limit_ms in stored.items() if limit_ms is not None}

    def check(self, whose: str, prefix: str = "") -> None:
        """Check that the soft limit is shorter than the hard limit.

        Args:
            whose: The owner of the limits, for the message.
            prefix: Prefix of the settings' names, for the message.

        Raises:
            ConfigError: The soft limit is not shorter.
        """
        if self.soft_ms is not None and self.hard_ms is not None and self.soft_ms >= self.hard_ms:
            raise ConfigError(
                f"{prefix}soft_time_limit ({_text(self.soft_ms)}) of {whose} must be shorter than "
                f"{prefix}time_limit ({_text(self.hard_ms)}): otherwise it has no effect"
            )

    def with_defaults(self, defaults: TimeLimits) -> TimeLimits:
        """Return these limits; limits that are not set come from ``defaults``."""
        if self is NO_LIMITS:  # nearly every job
            return defaults
        soft_ms = defaults.soft_ms if self.soft_ms is None else self.soft_ms
        return TimeLimits(soft_ms, defaults.hard_ms if self.hard_ms is None else self.hard_ms)

    def shortest(self, other: TimeLimits) -> TimeLimits:
        """Return the shorter soft limit and the shorter hard limit of the two."""
        return TimeLimits(_shorter(self.soft_ms, other.soft_ms), _shorter(self.hard_ms, other.hard_ms))

    @property
    def soft_s(self) -> float | None:
        """The soft limit in seconds."""
        return None if self.soft_ms is None else self.soft_ms / 1000

    @property
    def hard_s(self) -> float | None:
        """The hard limit in seconds."""
        return None if self.hard_ms is None else self.hard_ms / 1000

    def soft_exceeded(self, task: str) -> SoftTimeLimitExceeded:
        """Return the exception for exceeding the soft limit."""
        return SoftTimeLimitExceeded(f"task {task} ran longer than its soft time limit of {_text(self.soft_ms)}")

    def hard_exceeded(self, task: str, *, killed: bool = False) -> TimeLimitExceeded:
        """Return the exception for exceeding the hard limit; ``killed``: the child process was killed."""
        end = " and its child was killed" if killed else ""
        return TimeLimitExceeded(f"task {task} ran longer than its time limit of {_text(self.hard_ms)}{end}")


NO_LIMITS: Final = TimeLimits()


def _shorter(first_ms: int | None, second_ms: int | None) -> int | None:
    return min((limit_ms for limit_ms in (first_ms, second_ms) if limit_ms is not None), default=None)


def _ms(limit: Duration | None, name: str) -> int | None:
    if limit is None:
        return None
    if (limit_ms := to_ms(limit, name)) < 1:
        raise ConfigError(f"{name} must be 0.001 s or more, not {limit!r:.200}; leave it out for no limit")
    return limit_ms


def _stored_ms(limit: object) -> int | None:
    if isinstance(limit, bool) or not isinstance(limit, int | float) or not 1 <= limit < 2**53:
        return None
    return int(limit)


def _text(limit_ms: int | None) -> str:
    return f"{(limit_ms or 0) / 1000:g} s"
