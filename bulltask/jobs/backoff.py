"""How long to wait before the next attempt: pure arithmetic, milliseconds in and out.

Two formulas live side by side. Jobs sent by bulltask wait as seed 002 section 8 says (jitter both ways, a cap);
jobs sent by others wait as BullMQ 5.62 does (jitter only shortens, no cap), so a queue shared with Node behaves the
same whoever runs the job. In all of them ``attempts_made`` counts the attempt that has just failed: 1 after the first.
"""

from __future__ import annotations

import os
import random as _random
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from math import floor, isfinite
from pathlib import Path
from reprlib import repr as _short  # of what is nested as deeply as it may be, the built-in one raises
from typing import TypeGuard

from bulltask.errors import ConfigError, DecodeError, did_you_mean

__all__ = [
    "Backoff",
    "CustomBackoff",
    "bullmq_delay_ms",
    "check_strategy",
    "reconnect_delay_ms",
    "seed_delay_ms",
    "warn_of_long_delay",
]

CustomBackoff = Callable[[int, BaseException], float | timedelta]
"""A strategy of the user: ``(attempts_made, exception)`` to seconds or a ``timedelta``."""

_BUILT_IN = ("fixed", "exponential")
_REASONABLE_MS = 3_600_000
_PACKAGE = f"{Path(__file__).parent}{os.sep}"
_DEFAULT_DELAY_MS = 1_000
# Without a cap 2^n soon leaves what JSON and Lua can carry. Half of 2^53 leaves room for adding "now" to it.
_LONGEST_MS = 2**52
_LAST_DOUBLING = 52


@dataclass(frozen=True, slots=True)
class Backoff:
    """How long to wait before the next attempt.

    Args:
        type: ``"fixed"`` (always ``delay_ms``), ``"exponential"`` (doubles each time), or the name of a registered
            custom strategy.
        delay_ms: first delay in milliseconds, 0 or more.
        jitter: share of the delay that is left to chance, 0 to 1. For jobs of bulltask 0.2 means ±20 %; for jobs of
            others it has BullMQ's meaning and only shortens. A fixed delay with a cap (every fixed delay of bulltask)
            is constant, so its jitter becomes 0: Node, which would apply it, then waits as long as we do.
        max_delay_ms: longest delay in milliseconds that doubling may lead to; ``None`` for no cap (BullMQ).

    Raises:
        ConfigError: a value has a wrong type or is out of range.
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
        """Return the ``backoff`` entry of a stored job's opts, in BullMQ's names.

        ``maxDelay`` is ours and Node ignores it. A custom type is written as ``exponential``: the name of a strategy
        that Node does not have makes its worker throw and leaves the job hanging (PROTOCOL 4.6).
        """
        wire: dict[str, object] = {"type": self.type if self.type in _BUILT_IN else "exponential"}
        wire |= {"delay": self.delay_ms, "jitter": self.jitter}
        return wire if self.max_delay_ms is None else wire | {"maxDelay": self.max_delay_ms}

    @classmethod
    def from_wire(cls, value: object) -> Backoff | None:
        """Read the ``backoff`` entry of a stored job's opts.

        Args:
            value: ``None`` or absent (retry at once), a number of milliseconds (fixed, as BullMQ takes it), or a
                mapping ``{type, delay, jitter?, maxDelay?}``. A missing delay is 0 (BullMQ's custom types have none)
                and so is a negative one; fractions of a millisecond are rounded.

        Raises:
            DecodeError: it is none of these.
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
    """Look whether whoever runs a job can know the strategy that its backoff names.

    A worker of Node throws where it does not, and the job hangs in it; bulltask's would double the delay each time.

    Args:
        kind: the name.
        registered: the setting ``backoff_strategies``.

    Raises:
        ConfigError: it is neither BullMQ's own nor registered.
    """
    known = (*_BUILT_IN, *registered)
    if kind not in known:
        raise ConfigError(
            f"the backoff type {kind!r} is unknown; known are {', '.join(known)}{did_you_mean(kind, known)}. The "
            "name of a strategy that your Node workers have belongs into the setting backoff_strategies"
        )


def warn_of_long_delay(delay_ms: int, name: str) -> None:
    """Warn the user of a first delay of more than an hour: most are milliseconds where seconds were meant."""
    if delay_ms > _REASONABLE_MS:
        text = f"{name} is {delay_ms / 1000:g} s, more than an hour; delays are seconds in bulltask"
        warnings.warn(text, stacklevel=_users_level())


def _users_level() -> int:
    """How many frames away the user's code is, so that the warning names its line."""
    frame, level = sys._getframe(1), 1  # noqa: SLF001
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_PACKAGE, "<")):  # "<": of a dataclass
        frame, level = frame.f_back, level + 1
    return level


def _is_number(value: object) -> TypeGuard[int | float]:
    # isfinite() is not asked about integers: it refuses those that no float can hold.
    return not isinstance(value, bool) and (isinstance(value, int) or (isinstance(value, float) and isfinite(value)))


def _check_ms(name: str, value: object) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= _LONGEST_MS:
        raise ConfigError(f"backoff {name} must be whole milliseconds from 0 to 2^52, not {_short(value)}")


def _stored_ms(name: str, value: object) -> int:
    """A number of another program: Node stores fractions and negatives, and Lua turns long integers into floats."""
    if value is None:
        return 0
    if not _is_number(value):
        raise DecodeError(f"backoff {name} must be a number of milliseconds, not {_short(value)}")
    return min(max(0, round(value)), _LONGEST_MS)


def _doubled(delay_ms: int, times: int) -> int:
    """``delay_ms`` doubled ``times`` times. Bounded: attempt 10^9 must not build a number of 10^9 bits."""
    return min(delay_ms << min(times, _LAST_DOUBLING), _LONGEST_MS)


def seed_delay_ms(backoff: Backoff, attempts_made: int, random: Callable[[], float] = _random.random) -> int:
    """Return the delay for a job of bulltask: ``min(delay · 2^(n-1) · uniform(1-j, 1+j), cap)`` (seed 002 section 8).

    A fixed delay is constant: no jitter, no doubling, hence nothing for the cap to stop (seed 003 section 3). A custom
    type is calculated as exponential, which is also how it is stored; its strategy is the caller's to ask.

    Args:
        backoff: the job's backoff.
        attempts_made: failed attempts so far, this one included; below 1 the plain first delay is returned.
        random: gives a number from 0 to below 1.

    Returns:
        Milliseconds, 0 or more.
    """
    if backoff.type == "fixed":
        return backoff.delay_ms
    delay_ms: float = backoff.delay_ms
    if attempts_made >= 1:
        delay_ms = _doubled(backoff.delay_ms, attempts_made - 1) * _spread(backoff.jitter, random)
    return min(round(delay_ms), _LONGEST_MS if backoff.max_delay_ms is None else backoff.max_delay_ms)


def _spread(jitter: float, random: Callable[[], float]) -> float:
    return 1 - jitter + 2 * jitter * random()


def bullmq_delay_ms(backoff: Backoff, attempts_made: int, random: Callable[[], float] = _random.random) -> int:
    """Return the delay for a job of another BullMQ client, as Node calculates it (PROTOCOL 4.6).

    Fixed is ``D``, exponential ``2^(n-1) · D``; jitter ``j`` shortens it to a point in ``[d · (1-j), d)``; no cap.
    For a type that nobody registered here Node's worker throws and the job hangs until it stalls; instead it is
    calculated as exponential, from one second when the job names no delay.

    Args:
        backoff: the job's backoff.
        attempts_made: failed attempts so far, this one included.
        random: gives a number from 0 to below 1.

    Returns:
        Milliseconds, 0 or more; 0 means retry at once.
    """
    delay_ms = backoff.delay_ms
    if backoff.type not in _BUILT_IN:
        delay_ms = delay_ms or _DEFAULT_DELAY_MS
    if backoff.type != "fixed":
        delay_ms = _doubled(delay_ms, max(0, attempts_made - 1))
    if not backoff.jitter:
        return delay_ms
    return floor(random() * delay_ms * backoff.jitter + delay_ms * (1 - backoff.jitter))


def reconnect_delay_ms(
    attempt: int, random: Callable[[], float] = _random.random, *, first_ms: int = 100, cap_ms: int = 30_000
) -> int:
    """Return the delay before the next try to reach Redis: 100 ms doubling to 30 s, ±20 % (seed 002 section 8).

    The jitter comes after the cap, so the longest wait is 36 s: were it the other way round, a fleet that has waited
    long would come back in one instant.

    Args:
        attempt: failed tries so far; 1 after the first.
        random: gives a number from 0 to below 1.
        first_ms: delay after the first failure, before jitter.
        cap_ms: longest delay, before jitter.
    """
    return round(min(_doubled(first_ms, max(0, attempt - 1)), cap_ms) * _spread(0.2, random))
