"""``HooksMixin``: the methods of an app that register listeners and middleware."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, overload

from bulltask.events.bus import Event
from bulltask.events.listeners import Listeners
from bulltask.hooks.lifespan import Lifespan, LifespanFunction
from bulltask.hooks.middleware import Middleware, MiddlewareList

__all__ = ["HooksMixin"]

L = TypeVar("L", bound=LifespanFunction)
R = TypeVar("R")
E = TypeVar("E", bound=Event)


class HooksMixin:
    """Registers listeners and middleware: a base class of ``App``."""

    def __init__(self) -> None:
        super().__init__()
        self.listeners = Listeners()
        self.middleware = MiddlewareList()
        self.lifespans = Lifespan()

    def lifespan(self, function: L, /) -> L:
        """Register what async tasks share, such as connection pools: a decorator for an async generator function.

        Each child process enters it before its first job, on the event loop on which its async tasks run, and leaves it
        after the last one. What it yields is :attr:`state`, and ``self.state`` in a bound task. If it raises an
        exception before it yields, the child does not start.

        Raises:
            ConfigError: The app already has a lifespan, or the function has parameters.
        """
        self.lifespans.define(function)
        return function

    @property
    def state(self) -> Any:
        """What the :meth:`lifespan` has yielded in this process, ``None`` before; a test may set it."""
        return self.lifespans.state

    @state.setter
    def state(self, state: Any) -> None:
        self.lifespans.state = state

    @overload
    def on(self, kind: type[E], /) -> Callable[[Callable[[E], R]], Callable[[E], R]]: ...
    @overload
    def on(self, kind: type[E], listener: Callable[[E], R], /) -> Callable[[E], R]: ...

    def on(self, kind: type[E], listener: Callable[[E], R] | None = None, /) -> Any:
        """Register a listener for the events of this app's workers: ``@app.on(JobFailed)``.

        The listener is called in the child process that emits the event; for a job's outcome, on the thread that ran
        the job, after Redis has stored the outcome. It should be quick. An exception that it raises is logged and has
        no other effect.

        Args:
            kind: An event class of :mod:`bulltask.events` that children emit; ``ChildEvent`` means all of them.
            listener: Called with the event; omit it to use this method as a decorator. Its return value is ignored.

        Returns:
            The listener, or a decorator.

        Raises:
            ConfigError: Children do not emit such events, ``listener`` is a coroutine function, or the children have
                already started.
        """

        def add(function: Callable[[E], R]) -> Callable[[E], R]:
            self.listeners.add(kind, function)
            return function

        return add if listener is None else add(listener)

    def add_middleware(self, middleware: Middleware) -> None:
        """Call the methods of ``middleware`` before and after every send and every run of this app's jobs.

        Jobs are sent by tasks (``delay`` …), signatures, ``send_task`` and ``send_many``; those of queues, flows and
        job schedulers have no hooks.

        Args:
            middleware: An instance of a subclass of :class:`bulltask.Middleware`.

        Raises:
            ConfigError: It is not one, or has an ``async def`` where a plain method is needed, or the reverse.
        """
        self.middleware.add(middleware)
