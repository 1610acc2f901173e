"""Time: durations from users, a monotonic clock for deadlines, the server's time for timestamps in Redis, and timers.

A value of the wrong type, or out of range, raises ``ConfigError``, in which ``name`` identifies it. ``value_class``
is here because every module of jobs imports this one.
"""

from __future__ import annotations

import asyncio
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import FrozenInstanceError, dataclass, field, fields
from datetime import UTC, datetime, timedelta, timezone, tzinfo
from functools import partial
from operator import attrgetter
from typing import Any, Final, TypeVar, dataclass_transform, overload

from bulltask.jobs.errors import ConfigError

__all__ = [
    "Duration",
    "LoopTimer",
    "ServerClock",
    "moment_of",
    "mono_ms",
    "mono_s",
    "share_refusals",
    "sleep",
    "timeout",
    "to_epoch_ms",
    "to_ms",
    "value_class",
    "wall_ms",
    "zone_of",
]

T = TypeVar("T")


@overload
def value_class(cls: type[T], /) -> type[T]: ...
@overload
def value_class(*, kw_only: bool = ..., frozen: bool = ...) -> Callable[[type[T]], type[T]]: ...


@dataclass_transform(frozen_default=True, field_specifiers=(field,))
def value_class(
    cls: type[T] | None = None, /, *, kw_only: bool = False, frozen: bool = False
) -> type[T] | Callable[[type[T]], type[T]]:
    """Turn a class into a dataclass with slots that type checkers treat as frozen.

    Instances are compared and hashed by their fields. ``frozen`` enforces immutability at run time, too, for the
    classes that users see. Each field is then set through ``object.__setattr__``, which costs three times as much as an
    assignment, and a worker constructs ten objects of other classes per job.

    Each method that ``dataclass`` itself writes is source code that it compiles: with ``__init__`` alone, a class takes
    0.1 ms of a program's start instead of 0.3.
    """
    make = partial(_make_value_class, kw_only=kw_only, frozen=frozen)
    return make if cls is None else make(cls)


def _make_value_class(cls: type[T], *, kw_only: bool, frozen: bool) -> type[T]:
    made: type[Any] = dataclass(slots=True, eq=False, repr=False, kw_only=kw_only, frozen=frozen)(cls)
    if frozen:
        share_refusals(cls, made)
    compared = [item.name for item in fields(made) if item.compare]
    made._compared = attrgetter(*compared) if compared else type  # noqa: SLF001
    for name, method in (("__eq__", _equals), ("__hash__", _hash), ("__repr__", _show)):
        if cls.__dict__.get(name) is None:
            setattr(made, name, method)
    return made


def _equals(self: Any, other: Any) -> Any:
    return self._compared(self) == other._compared(other) if type(self) is type(other) else NotImplemented  # noqa: SLF001


def _hash(self: Any) -> int:
    return hash(self._compared(self))


def _show(self: Any) -> str:
    texts = [f"{item.name}={getattr(self, item.name)!r}" for item in fields(self) if item.repr]
    return f"{type(self).__qualname__}({', '.join(texts)})"


def share_refusals(cls: type, made: type[Any]) -> None:
    """Replace the methods with which ``dataclass(frozen=True, slots=True)`` refuses changes by two for all classes.

    Its own are compiled for each class, and refer to the class without slots (``cls``), of which each process would
    keep a copy: 5 KiB in all.
    """
    for name, method in (("__setattr__", _refuse_to_assign), ("__delattr__", _refuse_to_delete)):
        delattr(cls, name)
        setattr(made, name, method)


def _refuse_to_assign(_: object, name: str, _value: object) -> None:
    raise FrozenInstanceError(f"cannot assign to field {name!r}")


def _refuse_to_delete(_: object, name: str) -> None:
    raise FrozenInstanceError(f"cannot delete field {name!r}")


Duration = float | timedelta
"""A duration in the public API: seconds (int or float) or a ``timedelta``."""


def to_ms(value: Duration, name: str = "duration") -> int:
    """Return seconds or a ``timedelta`` as integer milliseconds."""
    if isinstance(value, timedelta):
        ms = value / timedelta(milliseconds=1)
    elif isinstance(value, int | float) and not isinstance(value, bool):
        ms = value * 1000
    else:
        raise ConfigError(f"{name} must be a number of seconds or a timedelta, not {value!r:.200}")
    if not 0 <= ms < 2**53:  # also false for NaN
        raise ConfigError(f"{name} must be a finite duration of zero or more, not {value!r:.200}")
    return round(ms)


def to_epoch_ms(moment: datetime, name: str = "eta") -> int:
    """Return an aware ``datetime`` as epoch milliseconds; a naive ``datetime`` is UTC, as in Celery."""
    if not isinstance(moment, datetime):
        raise ConfigError(f"{name} must be a datetime, not {moment!r:.200}")
    aware = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    return round(aware.timestamp() * 1000)


def moment_of(epoch_ms: float | None) -> datetime | None:
    """Return a time of a job; ``None`` if it is missing or out of range, as any client may have written any number."""
    try:
        return None if epoch_ms is None else datetime.fromtimestamp(epoch_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def zone_of(name: str, what: str = "timezone") -> tzinfo:
    """Return a time zone by its IANA name (in any case), ``UTC``, or a fixed offset such as ``UTC+2``."""
    if not isinstance(name, str):
        raise ConfigError(f"{what} must be the name of a time zone, not {name!r:.200}")
    if name.upper() in {"UTC", "GMT"}:
        return UTC
    import zoneinfo  # noqa: PLC0415 - most programs use UTC

    try:
        if (fixed := re.fullmatch(r"(?i:utc|gmt)([+-])(\d{1,2})(?::(\d\d))?", name)) is not None:
            offset = timedelta(hours=int(fixed[2]), minutes=int(fixed[3] or 0))
            return timezone(-offset if fixed[1] == "-" else offset)
        return zoneinfo.ZoneInfo(name)
    except (zoneinfo.ZoneInfoNotFoundError, ValueError, OSError):  # OSError: the name of a directory, such as "Europe"
        for known in zoneinfo.available_timezones():  # Node.js ignores the case
            if known.lower() == name.lower():
                return zoneinfo.ZoneInfo(known)
    raise ConfigError(f"unknown {what} {name!r:.200}: use a name such as Europe/Berlin, or install tzdata")


# Not time.monotonic(), which freezegun and time-machine stop: a wait with a timeout would never end.
if sys.platform == "win32":
    mono_s: Callable[[], float] = time.monotonic
    _mono_ns: Callable[[], int] = time.monotonic_ns
else:
    # The same clock as time.monotonic(), which event loops use.
    _MONOTONIC: Final[int] = getattr(time, "CLOCK_UPTIME_RAW", time.CLOCK_MONOTONIC)  # the former on macOS
    mono_s = partial(time.clock_gettime, _MONOTONIC)
    _mono_ns = partial(time.clock_gettime_ns, _MONOTONIC)


def mono_ms() -> int:
    """Return the monotonic clock in milliseconds, for deadlines; it is the same in all processes on this machine.

    ``mono_s`` returns it in seconds, for durations.
    """
    return _mono_ns() // 1_000_000


def wall_ms() -> int:
    """Return this machine's clock in epoch milliseconds, for use while the server's time is unknown."""
    return time.time_ns() // 1_000_000


_SLOW_MS: Final = 25
"""A reading with a greater error is repeated."""

_CHANGE_MS: Final = 1_000
"""A smaller change is not reported."""


class ServerClock:
    """The server's time, extrapolated with the monotonic clock.

    Every timestamp in Redis is the server's. With its own wall clock, a worker whose clock is two minutes ahead, or
    jumps ahead, would run delayed jobs two minutes early.
    """

    resync_ms = 5_000
    """How long a change of the server's clock may go unnoticed. A reading takes one round trip."""
    max_slow_readings = 3
    """How many readings are made if their replies are slow, for example because the server does not respond for a
    moment; over a slow network, all replies are."""

    def __init__(self) -> None:
        self.on_change: Callable[[int], object] | None = None
        """Called when the server's clock was set, with the difference in milliseconds."""
        self.due_at_ms = 0
        """When to set the clock again (``mono_ms``): the server's may have changed, or it is uncertain."""
        self._offset_ms: float | None = None
        self._error_ms = 0.0
        self._slow_readings = 0

    @property
    def is_uncertain(self) -> bool:
        """True if the last reply was unusually slow: set the clock again before using it."""
        return 0 < self._slow_readings < self.max_slow_readings

    def set(self, server_ms: float, sent_at_ms: float, received_at_ms: float) -> None:
        """Set the clock from a reply to ``TIME``, assuming that the server read its clock halfway through the call.

        The error is at most half of the call's time. A reply that took long does not replace a more precise reading,
        unless the server's clock has changed since. The times of the call are readings of :func:`mono_ms`.
        """
        offset_ms, error_ms = server_ms - (sent_at_ms + received_at_ms) / 2, (received_at_ms - sent_at_ms) / 2
        known_ms, known_error_ms = self._offset_ms, self._error_ms
        is_slow = error_ms > max(_SLOW_MS, 2 * known_error_ms)
        changed_ms = 0 if known_ms is None else offset_ms - known_ms
        if self.on_change is not None and abs(changed_ms) > _CHANGE_MS + error_ms + known_error_ms:
            self.on_change(round(changed_ms))
        if not is_slow or known_ms is None or abs(offset_ms - known_ms) > error_ms + known_error_ms:
            self._offset_ms = offset_ms
            self._error_ms = error_ms
        self._slow_readings = self._slow_readings + 1 if is_slow else 0
        self.due_at_ms = 0 if self.is_uncertain else mono_ms() + self.resync_ms

    def now_ms(self) -> int:
        """Return the server's time in epoch milliseconds (this machine's before the first reply)."""
        if self._offset_ms is None:
            return wall_ms()
        return int(self._offset_ms + mono_s() * 1000)


# freezegun stops ``time.monotonic()``, by which an event loop decides when its own timers are due: ``asyncio.sleep()``
# and ``asyncio.timeout()`` would never end, or end early when the test moves its clock.
_DRIFT_S: Final = 1.0
"""An event loop whose clock differs by more does not use the monotonic clock."""
_EARLY_S: Final = 0.001


class LoopTimer:
    """Calls a function on the running event loop after some seconds, as ``loop.call_later()`` does.

    Attributes:
        due_s: When it calls the function (``mono_s``).
    """

    def __init__(self, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self.due_s = mono_s() + seconds
        self._callback = callback
        self._cancelled = False
        self._timer: asyncio.Handle | threading.Timer
        if seconds > _EARLY_S:
            self._wait(seconds)
        else:
            self._timer = self._loop.call_soon(self._check)

    def cancel(self) -> None:
        """Do not call the function, unless that has already happened."""
        self._cancelled = True
        self._timer.cancel()

    def _check(self) -> None:
        left_s = self.due_s - mono_s()
        if self._cancelled:
            return
        if left_s > _EARLY_S:  # a test has moved the loop's clock
            self._wait(left_s)
        else:
            self._callback()

    def _wait(self, seconds: float) -> None:
        is_test = "freezegun" in sys.modules  # which may stop the clock later, too
        if not is_test and abs(self._loop.time() - mono_s()) < _DRIFT_S:
            self._timer = self._loop.call_later(seconds, self._check)
        else:
            self._timer = timer = threading.Timer(seconds, self._wake_up)
            timer.daemon = True
            timer.start()

    def _wake_up(self) -> None:
        with suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._check)


@asynccontextmanager
async def timeout(seconds: float | None) -> AsyncIterator[None]:
    """Raise ``TimeoutError`` if the block takes longer than ``seconds``, as ``asyncio.timeout()`` does."""
    async with asyncio.timeout(None) as scope:
        if seconds is None:
            yield
            return
        timer = LoopTimer(seconds, lambda: scope.reschedule(asyncio.get_running_loop().time()))
        try:
            yield
        finally:
            timer.cancel()


async def sleep(seconds: float) -> None:
    """Wait, as ``asyncio.sleep()`` does."""
    if seconds <= 0:
        await asyncio.sleep(0)
        return
    done = asyncio.Event()
    timer = LoopTimer(seconds, done.set)
    try:
        await done.wait()
    finally:
        timer.cancel()
