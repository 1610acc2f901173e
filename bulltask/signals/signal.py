"""``Signal``: functions that are called when something happens, as in Celery and Django."""

from __future__ import annotations

import inspect
import threading
import weakref
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeVar, overload

from bulltask.errors import ConfigError
from bulltask.signals.failures import report_failure

__all__ = ["Receiver", "ReceiverFlag", "Signal"]

Receiver = Callable[..., Any]
"""A function that accepts keyword arguments; its return value is ignored."""
F = TypeVar("F", bound=Receiver)


class ReceiverFlag:
    """Whether any of a group of signals has a receiver: in one attribute, because it is read for every job.

    Attributes:
        active: True if at least one of them has a receiver.
    """

    __slots__ = ("_counts", "active")

    def __init__(self) -> None:
        self.active = False
        self._counts: dict[str, int] = {}

    def update(self, signal: str, receivers: int) -> None:
        """Record how many receivers a signal has."""
        self._counts[signal] = receivers
        self.active = any(self._counts.values())


@dataclass(frozen=True, slots=True, eq=False)
class _Connection:
    key: Hashable
    sender: Any
    receiver: Callable[[], Receiver | None]

    def accepts(self, sender: Any) -> bool:
        wanted = self.sender
        return wanted is None or wanted is sender or ((name := _name(wanted)) is not None and name == _name(sender))


class Signal:
    """A signal: connect functions to it, and it calls them.

    Args:
        name: Its name in log lines.
        receiver_flag: The group that records whether it has receivers.
        is_async: Whether its receivers may be coroutine functions, which only a worker awaits.
    """

    def __init__(self, name: str, receiver_flag: ReceiverFlag | None = None, *, is_async: bool = False) -> None:
        self.name, self.is_async = name, is_async
        self._receiver_flag, self._lock = receiver_flag or ReceiverFlag(), threading.RLock()
        self._connections: tuple[_Connection, ...] = ()

    @overload
    def connect(
        self, receiver: F, /, sender: Any = None, weak: bool = True, dispatch_uid: Hashable | None = None
    ) -> F: ...
    @overload
    def connect(
        self, /, *, sender: Any = None, weak: bool = True, dispatch_uid: Hashable | None = None
    ) -> Callable[[F], F]: ...

    def connect(
        self,
        receiver: Receiver | None = None,
        /,
        sender: Any = None,
        weak: bool = True,
        dispatch_uid: Hashable | None = None,
    ) -> Any:
        """Call ``receiver`` whenever the signal is sent; a decorator, with and without arguments.

        Args:
            receiver: A plain function or method that accepts any keyword arguments; for ``worker_process_init`` and
                ``worker_process_shutdown``, also a coroutine function.
            sender: Call it only for this sender. For a task or its name: only for this task.
            weak: Keep only a weak reference, so that the receiver disappears with the last other reference. A lambda or
                a nested function needs ``weak=False``.
            dispatch_uid: Identifies the connection, so that connecting it twice has no effect; default: the receiver
                itself.

        Returns:
            The receiver, or a decorator.

        Raises:
            ConfigError: The receiver is not callable, is a coroutine function, or does not accept keyword arguments.
        """

        def add(function: F) -> F:
            _check(function, self.name, is_async=self.is_async)
            key = _key(function) if dispatch_uid is None else dispatch_uid
            with self._lock:
                if not any(same.key == key and same.sender == sender for same in self._connections):
                    reference = self._weak(function) if weak else lambda: function
                    self._replace((*self._connections, _Connection(key, sender, reference)))
            return function

        return add if receiver is None else add(receiver)

    def disconnect(
        self,
        receiver: Receiver | None = None,
        sender: Any = None,
        weak: bool | None = None,  # noqa: ARG002 - Celery's and Django's, unused there, too
        dispatch_uid: Hashable | None = None,
    ) -> bool:
        """Remove a connection that was made with the same arguments; return whether there was one."""
        key = _key(receiver) if dispatch_uid is None else dispatch_uid
        with self._lock:
            left = tuple(one for one in self._connections if (one.key, one.sender) != (key, sender))
            found = len(left) < len(self._connections)
            self._replace(left)
        return found

    def has_listeners(self, sender: Any = None) -> bool:
        """Return whether :meth:`send` would call a receiver."""
        return bool(self.receivers(sender))

    def receivers(self, sender: Any = None) -> list[Receiver]:
        """Return the receivers for ``sender``, in the order in which they were connected."""
        connections = self._connections
        if not connections:
            return []
        live = (connection.receiver() for connection in connections if connection.accepts(sender))
        return [receiver for receiver in live if receiver is not None]

    def send(self, sender: Any = None, **named: Any) -> list[tuple[Receiver, Any]]:
        """Call the receivers, each with ``signal``, ``sender`` and ``named``.

        Returns:
            Each receiver and what it returned, or the ``Exception`` that it raised, which was logged.
        """
        responses: list[tuple[Receiver, Any]] = []
        for receiver in self.receivers(sender):
            try:
                response = receiver(signal=self, sender=sender, **named)
            except Exception as exc:  # noqa: BLE001 - a receiver must not disturb the sender
                report_failure(receiver, self.name, exc)
                response = exc
            responses.append((receiver, response))
        return responses

    def _weak(self, function: Receiver) -> Callable[[], Receiver | None]:
        reference: Any = None

        def forget(_: object) -> None:
            with self._lock:
                self._replace(tuple(one for one in self._connections if one.receiver is not reference))

        kind: Any = weakref.WeakMethod if isinstance(function, MethodType) else weakref.ref
        reference = kind(function, forget)
        return reference  # type: ignore[no-any-return]

    def _replace(self, connections: tuple[_Connection, ...]) -> None:
        self._connections = connections
        self._receiver_flag.update(self.name, len(connections))

    def __repr__(self) -> str:
        return f"<Signal {self.name}>"


def _name(sender: Any) -> str | None:
    """Return the name by which a sender is recognized: a task's name, or the string itself."""
    name = sender if isinstance(sender, str) else getattr(sender, "name", None)
    return name if isinstance(name, str) else None


def _key(receiver: Receiver | None) -> Hashable:
    if isinstance(receiver, MethodType):
        return id(receiver.__self__), id(receiver.__func__)
    return id(receiver)


def _check(receiver: object, signal: str, *, is_async: bool) -> None:
    if not callable(receiver):
        raise ConfigError(f"a receiver of {signal} must be a function, not {receiver!r}")
    name = getattr(receiver, "__qualname__", repr(receiver))
    if inspect.iscoroutinefunction(receiver) and not is_async:
        raise ConfigError(
            f"{name}, a receiver of {signal}, must be a plain function, because it is not awaited. Send a job instead, "
            "or use the async methods of bulltask.Middleware"
        )
    try:
        parameters = inspect.signature(receiver).parameters.values()
    except (TypeError, ValueError):
        return  # some builtins have no signature
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        raise ConfigError(f"{name}, a receiver of {signal}, must accept any keyword arguments: add **kwargs")
