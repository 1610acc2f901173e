"""Celery's signals, under Celery's names and with its keyword arguments."""

from __future__ import annotations

import inspect
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from types import MethodType
from typing import Any, Final, TypeVar, overload

from bulltask.jobs.errors import ConfigError
from bulltask.registry.request import ExceptionInfo

__all__ = [
    "ExceptionInfo",
    "Signal",
    "after_task_publish",
    "before_task_publish",
    "setup_logging",
    "task_failure",
    "task_postrun",
    "task_prerun",
    "task_received",
    "task_retry",
    "task_revoked",
    "task_success",
    "worker_init",
    "worker_process_init",
    "worker_process_shutdown",
    "worker_ready",
    "worker_shutdown",
    "worker_shutting_down",
]

Receiver = Callable[..., Any]
"""A function that accepts keyword arguments; its return value is ignored."""
F = TypeVar("F", bound=Receiver)


class ReceiverFlag:
    """Whether any of a group of signals has a receiver: in one attribute, because it is read for every job."""

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

    ``receiver_flag`` is the group that records whether it has receivers. With ``is_async``, they may be coroutine
    functions, which only a worker awaits.
    """

    def __init__(self, name: str, receiver_flag: ReceiverFlag | None = None, *, is_async: bool = False) -> None:
        self.name = name
        self.is_async = is_async
        self._receiver_flag = receiver_flag or ReceiverFlag()
        self._lock = threading.RLock()
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

        Each is returned with what it returned, or with the ``Exception`` that it raised, which was logged.
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


_logger = logging.getLogger("bulltask.hooks")
_failures: Counter[tuple[str, str]] = Counter()


def report_failure(hook: Any, on: str, exc: BaseException) -> None:
    """Log the 1st, 2nd, 4th, 8th … failure of a hook, so that a broken hook does not flood the log.

    ``on`` is the signal's name, or the middleware's method.
    """
    name = f"{getattr(hook, '__module__', '?')}.{getattr(hook, '__qualname__', type(hook).__name__)}"
    _failures[name, on] += 1
    count = _failures[name, on]
    if count & (count - 1) == 0:
        _logger.error("Hook failed", extra={"hook": name, "on": on, "failures": count}, exc_info=exc)


PUBLISH_SIGNALS: Final = ReceiverFlag()
TASK_SIGNALS: Final = ReceiverFlag()

# Sending: in the process that sends; the sender is the task's name.

before_task_publish: Final = Signal("before_task_publish", PUBLISH_SIGNALS)
"""Before a job is sent: ``body``, ``exchange``, ``routing_key``, ``headers``, ``properties``, ``declare``,
``retry_policy``. ``headers`` has ``id`` and ``task`` and may be changed; the other arguments are copies."""

after_task_publish: Final = Signal("after_task_publish", PUBLISH_SIGNALS)
"""After Redis has stored a job: ``body``, ``exchange``, ``routing_key``, ``headers``."""

# Running: in the child that runs the job, in the task's context; the sender is the task.

task_received: Final = Signal("task_received", TASK_SIGNALS)
"""Directly before ``task_prerun``, because a worker takes a job only when it can run it: ``request``."""

task_prerun: Final = Signal("task_prerun", TASK_SIGNALS)
"""Before a task is called: ``task_id``, ``task``, ``args``, ``kwargs``."""

task_postrun: Final = Signal("task_postrun", TASK_SIGNALS)
"""After the outcome is stored, for every ``task_prerun``: ``task_id``, ``task``, ``args``, ``kwargs``, ``retval``,
``state`` (``SUCCESS``, ``FAILURE``, ``RETRY``, ``REVOKED``; ``IGNORED`` if the lock was lost)."""

task_success: Final = Signal("task_success", TASK_SIGNALS)
"""After the result is stored: ``result``."""

task_failure: Final = Signal("task_failure", TASK_SIGNALS)
"""After the failure is stored: ``task_id``, ``exception``, ``args``, ``kwargs``, ``traceback``, ``einfo``."""

task_retry: Final = Signal("task_retry", TASK_SIGNALS)
"""After the retry is stored: ``request``, ``reason`` (the exception), ``einfo``."""

task_revoked: Final = Signal("task_revoked", TASK_SIGNALS)
"""After a running job was revoked, or an expired one failed: ``request``, ``terminated``, ``signum``, ``expired``."""

# A worker's processes.

worker_init: Final = Signal("worker_init")
"""Before a worker starts, in its supervisor. The sender has ``hostname`` and ``app``."""

worker_ready: Final = Signal("worker_ready")
"""When the first child is ready, in the worker's hook process. The sender has ``hostname`` and ``app``."""

worker_shutting_down: Final = Signal("worker_shutting_down")
"""When the worker begins to stop, in its hook process: ``sig``, ``how`` (``Warm``, ``Cold``), ``exitcode``. The sender
is the worker id."""

worker_shutdown: Final = Signal("worker_shutdown")
"""When all children have exited, in the worker's hook process. The sender has ``hostname`` and ``app``."""

worker_process_init: Final = Signal("worker_process_init", is_async=True)
"""In each child, before its first job. The sender is ``None``. Coroutine functions run on the event loop of async
tasks."""

worker_process_shutdown: Final = Signal("worker_process_shutdown", is_async=True)
"""In each child that stops, after its last job: ``pid``, ``exitcode``. The sender is ``None``. Coroutine functions run
on the event loop of async tasks."""

setup_logging: Final = Signal("setup_logging")
"""Instead of configuring logging, in the worker's supervisor and in spawned children: ``loglevel``, ``logfile``,
``format``, ``colorize``. The sender is ``None``."""

_LISTENER: Final = "use @app.on({}) of bulltask.events"
NOT_AVAILABLE: Final[Mapping[str, str]] = {
    "after_setup_logger": "connect setup_logging, or add a handler to the root logger in the app's module",
    "after_setup_task_logger": "connect setup_logging, or add a handler to the root logger in the app's module",
    "beat_embedded_init": "there is no beat process",
    "beat_init": "there is no beat process",
    "celeryd_after_setup": "use worker_init",
    "celeryd_init": "use worker_init",
    "eventlet_pool_apply": "there is no eventlet pool",
    "eventlet_pool_postshutdown": "there is no eventlet pool",
    "eventlet_pool_preshutdown": "there is no eventlet pool",
    "eventlet_pool_started": "there is no eventlet pool",
    "heartbeat_sent": "workers send no heartbeat messages",
    "import_modules": "put the code in the app's module",
    "task_internal_error": "an unexpected error of bulltask ends the child, and its job runs again",
    "task_rejected": _LISTENER.format("MalformedJobFailed"),
    "task_sent": "use after_task_publish",
    "task_unknown": _LISTENER.format("JobIncompatible"),
    "trace": "use task_prerun and task_postrun",
    "user_preload_options": "an app cannot add options to bulltask's commands",
}
"""Celery's other signals, and what to use instead."""


def __getattr__(name: str) -> object:
    """Explain which of Celery's signals bulltask does not have."""
    if name in NOT_AVAILABLE:
        # An AttributeError would lose its message in "from bulltask.signals import …".
        raise ImportError(f"cannot import Celery's signal {name!r} from bulltask.signals: {NOT_AVAILABLE[name]}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
