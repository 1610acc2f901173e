"""The delay before the next attempt, in milliseconds.

There are two formulas. In a job that bulltask sent, jitter lengthens or shortens the delay, which has a maximum. For a
job that another client sent, the delay is BullMQ 5.62's: jitter only shortens it, and there is no maximum. Workers of
Node.js and bulltask therefore wait equally long. In both formulas, ``attempts_made`` includes the attempt that has just
failed, so it is 1 after the first attempt.

An invalid backoff raises ``ConfigError``; one that is stored raises ``DecodeError``.
"""

from __future__ import annotations

import random as _random
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from math import floor, isfinite
from reprlib import repr as _short  # the built-in repr() raises RecursionError for deeply nested values
from typing import TypeGuard

from bulltask.jobs.clock import value_class
from bulltask.jobs.errors import ConfigError, DecodeError, did_you_mean, warn_user

__all__ = [
    "Backoff",
    "CustomBackoff",
    "bullmq_delay_ms",
    "bulltask_delay_ms",
    "check_strategy",
    "reconnect_delay_ms",
    "warn_about_long_delay",
]

CustomBackoff = Callable[[int, BaseException], float | timedelta]
"""A custom strategy: called with ``(attempts_made, exception)``, returns seconds or a ``timedelta``."""

_BUILT_IN = ("fixed", "exponential")
_WARN_ABOVE_MS = 3_600_000
_DEFAULT_DELAY_MS = 1_000
# JSON and Lua represent integers exactly up to 2^53. Half of that leaves room for adding the current time.
_MAX_MS = 2**52
_MAX_DOUBLINGS = 52


@value_class(frozen=True)
class Backoff:
    """Delay before the next attempt.

    Args:
        type: ``"fixed"`` (always ``delay_ms``), ``"exponential"`` (doubles each time), or the name of a registered
            custom strategy.
        delay_ms: First delay in milliseconds, 0 or more.
        jitter: Random fraction of the delay, 0 to 1. In a job that bulltask sent, 0.2 means ±20%. In a job that another
            client sent, it only shortens the delay, as in BullMQ. A fixed delay with a maximum has no jitter, and 0 is
            stored, so that Node waits equally long. (bulltask stores every fixed delay with a maximum.)
        max_delay_ms: Maximum delay in milliseconds; ``None`` for no maximum (as in BullMQ).

    Raises:
        ConfigError: A value has the wrong type or is out of range.
    """

    type: str = "exponential"
    delay_ms: int = _DEFAULT_DELAY_MS
    jitter: float = 0.2
    max_delay_ms: int | None = 3_600_000

    def __post_init__(self) -> None:
        if not isinstance(self.type, str) or not self.type:
            raise ConfigError(f"backoff type must be a name such as 'fixed' or 'exponential', not {_short(self.type)}")
        _check_ms("delay", self.delay_ms)
        if self.max_delay_ms is not None:
            _check_ms("max delay", self.max_delay_ms)
        if not _is_number(self.jitter) or not 0 <= self.jitter <= 1:
            raise ConfigError(f"backoff jitter must be a number from 0 to 1, not {_short(self.jitter)}")
        if self.type == "fixed" and self.max_delay_ms is not None:
            object.__setattr__(self, "jitter", 0.0)

    def to_wire(self) -> dict[str, object]:
        """Return the ``backoff`` entry of a stored job's opts, under BullMQ's names.

        ``maxDelay`` is bulltask's extension; Node ignores it. A custom type is stored as ``exponential``, because a
        Node worker without a strategy with that name throws, and the job stays active until it stalls.
        """
        wire: dict[str, object] = {"type": self.type if self.type in _BUILT_IN else "exponential"}
        wire |= {"delay": self.delay_ms, "jitter": self.jitter}
        return wire if self.max_delay_ms is None else wire | {"maxDelay": self.max_delay_ms}

    @classmethod
    def from_wire(cls, value: object) -> Backoff | None:
        """Read the ``backoff`` entry of a stored job's opts, ``None`` for an immediate retry.

        A number of milliseconds is a fixed delay, as in BullMQ. A missing delay (BullMQ's custom types have none) and a
        negative one count as 0; fractions of a millisecond are rounded.
        """
        if value is None:
            return None
        if _is_number(value):
            value = {"type": "fixed", "delay": value}
        if not isinstance(value, Mapping):
            raise DecodeError(f"backoff must be a number of milliseconds or an object, not {_short(value)}")
        cap = value.get("maxDelay")
        jitter = value.get("jitter")
        try:
            return cls(
                type=value.get("type", ""),
                delay_ms=_stored_ms("delay", value.get("delay")),
                jitter=0.0 if jitter is None else jitter,
                max_delay_ms=None if cap is None else _stored_ms("maxDelay", cap),
            )
        except ConfigError as error:
            raise DecodeError(f"{error} (in the stored backoff {_short(value)})") from error


def check_strategy(kind: str, registered: Sequence[str]) -> None:
    """Check that workers support a backoff strategy: it is built in or registered.

    With an unknown strategy, a Node worker throws, and the job stays active until it stalls; a bulltask worker uses
    exponential backoff.
    """
    known = (*_BUILT_IN, *registered)
    if kind not in known:
        raise ConfigError(
            f"unknown backoff type {kind!r:.200}: use {', '.join(known)}{did_you_mean(kind, known)}. If your Node "
            "workers have a strategy with that name, add it to the setting backoff_strategies"
        )


def warn_about_long_delay(delay_ms: int, name: str) -> None:
    """Warn about an initial delay of more than an hour: usually it was given in milliseconds instead of seconds."""
    if delay_ms > _WARN_ABOVE_MS:
        warn_user(f"{name} is {delay_ms / 1000:g} s, more than an hour; in bulltask, delays are in seconds")


def _is_number(value: object) -> TypeGuard[int | float]:
    # isfinite() raises OverflowError for integers beyond the range of float.
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and isfinite(value)))


def _check_ms(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _MAX_MS:
        raise ConfigError(f"backoff {name} must be whole milliseconds from 0 to 2^52, not {_short(value)}")


def _stored_ms(name: str, value: object) -> int:
    """Read a stored number: Node writes fractions and negative numbers, and Lua turns long integers into floats."""
    if value is None:
        return 0
    if not _is_number(value):
        raise DecodeError(f"backoff {name} must be a number of milliseconds, not {_short(value)}")
    return min(max(0, round(value)), _MAX_MS)


def _double(delay_ms: int, times: int) -> int:
    """Double ``delay_ms`` ``times`` times, up to a bound: attempt 10^9 must not create a number of 10^9 bits."""
    return min(delay_ms << min(times, _MAX_DOUBLINGS), _MAX_MS)


def bulltask_delay_ms(backoff: Backoff, attempts_made: int, random: Callable[[], float] = _random.random) -> int:
    """Return the delay for a job that bulltask sent: ``min(delay · 2^(n-1) · uniform(1-j, 1+j), max_delay)``.

    A fixed delay is constant. A custom type is stored, and computed, as exponential; the caller applies the strategy.
    If ``attempts_made`` is below 1, the initial delay without jitter is returned.
    """
    if backoff.type == "fixed":
        return backoff.delay_ms
    delay_ms: float = backoff.delay_ms
    if attempts_made >= 1:
        delay_ms = _double(backoff.delay_ms, attempts_made - 1) * _jitter_factor(backoff.jitter, random)
    return min(round(delay_ms), _MAX_MS if backoff.max_delay_ms is None else backoff.max_delay_ms)


def _jitter_factor(jitter: float, random: Callable[[], float]) -> float:
    return 1 - jitter + 2 * jitter * random()


def bullmq_delay_ms(backoff: Backoff, attempts_made: int, random: Callable[[], float] = _random.random) -> int:
    """Return the delay for a job that another BullMQ client sent, as Node calculates it; 0 means retry immediately.

    A fixed delay is ``D``, an exponential one ``2^(n-1) · D``. Jitter ``j`` shortens a delay ``d`` to a value in
    ``[d · (1-j), d)``. There is no maximum. An unknown type counts as exponential, and starts at one second if the job
    has no delay. (A Node worker throws, and the job stays active until it stalls.)
    """
    delay_ms = backoff.delay_ms
    if backoff.type not in _BUILT_IN:
        delay_ms = delay_ms or _DEFAULT_DELAY_MS
    if backoff.type != "fixed":
        delay_ms = _double(delay_ms, max(0, attempts_made - 1))
    if not backoff.jitter:
        return delay_ms
    return floor(random() * delay_ms * backoff.jitter + delay_ms * (1 - backoff.jitter))


def reconnect_delay_ms(
    attempt: int, random: Callable[[], float] = _random.random, *, first_ms: int, cap_ms: int
) -> int:
    """Return the delay before the next attempt to connect to Redis: ``first_ms``, doubling up to ``cap_ms``, ±20%.

    Jitter also changes the maximum delay; otherwise, all workers that have reached it would reconnect at the same time.
    ``attempt`` is 1 after the first failure.
    """
    return round(min(_double(first_ms, max(0, attempt - 1)), cap_ms) * _jitter_factor(0.2, random))
